// SPDX-License-Identifier: Apache-2.0
//! Measures the round-trip time of requests and the throughput of TCP connections between a client and a Pod. At each
//! end of a connection, a thread of this process sends or receives.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use npl_testkit::netns::Netns;
use npl_testkit::process::{joined, on_own_thread};
use npl_testkit::{live_frames, poll, traffic};

use crate::tcp::{self, CLIENT_CPU, SERVER_CPU};

/// The number of requests before the measurement, while the threads of both ends are still starting.
const WARM_UP: usize = 20;

/// The time from the start of a stream to the start of its measurement, in which the congestion window opens.
const RAMP: Duration = Duration::from_millis(10);

/// The size of the buffer for each write and read, in bytes.
const CHUNK: usize = 256 * 1024;

/// The byte that ends a stream of zeros.
const LAST: u8 = 1;

/// One connection. Each socket stays in the namespace in which it was opened, so any thread can use it.
#[derive(Debug)]
pub(super) struct Conversation {
    client: TcpStream,
    pod: TcpStream,
}

impl Conversation {
    /// Connects from the client's namespace to `server`, an address at which clients reach the Pod's listener.
    pub(super) fn open(from: &Netns, server: SocketAddr, listener: &TcpListener) -> Result<Self> {
        let client = from.run(|| tcp::connect(server))?.with_context(|| format!("connect to {server}"))?;
        let (pod, peer) = listener.accept().context("accept a connection")?;
        let own = client.local_addr().context("read the client's address")?;
        ensure!(own == peer, "{own} connected to {server}, and the Pod sees {peer}");
        tcp::set_up(&pod)?;
        client.set_write_timeout(Some(traffic::request_limit())).context("set a write timeout")?;
        Ok(Self { client, pod })
    }

    /// The addresses of the connection, for error messages.
    fn name(&self) -> String {
        match (self.client.local_addr(), self.client.peer_addr()) {
            (Ok(own), Ok(server)) => format!("from {own} to {server}"),
            _ => "of a closed connection".to_owned(),
        }
    }

    /// Sends this number of requests and returns the round-trip time of each in µs.
    pub(super) fn ask(&self, questions: usize) -> Result<Vec<f64>> {
        let all = WARM_UP + questions;
        let mut taken = thread::scope(|scope| {
            let pod = scope.spawn(|| on(SERVER_CPU, || (0..all).try_for_each(|_| answer(&self.pod))));
            let client = scope.spawn(|| on(CLIENT_CPU, || (0..all).map(|_| ask(&self.client)).collect()));
            let taken: Result<Vec<f64>> = joined(client);
            joined(pod).and(taken)
        })?;
        Ok(taken.split_off(WARM_UP))
    }
}

/// Returns the throughput to the Pod over all connections together in Gbit/s, measured at the Pod.
pub(super) fn stream(conversations: &[Conversation], time: Duration) -> Result<f64> {
    // The measuring thread has the same real-time priority as the senders, so that no build or other ordinary process
    // runs between the reads of the clock and of the counter.
    on_own_thread(|| live_frames::go_ahead().and_then(|()| stream_ahead(conversations, time)))
}

fn stream_ahead(conversations: &[Conversation], time: Duration) -> Result<f64> {
    let (received, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for conversation @ Conversation { client, pod } in conversations {
            let (received, is_over) = (&received, &is_over);
            let name = || conversation.name();
            threads.push(scope.spawn(move || on(SERVER_CPU, || receive(pod, received)).with_context(name)));
            threads.push(scope.spawn(move || on(CLIENT_CPU, || send(client, is_over)).with_context(name)));
        }
        thread::sleep(RAMP);
        let (start, before) = (Instant::now(), received.load(Ordering::Relaxed));
        thread::sleep(time);
        let (elapsed, bytes) = (start.elapsed(), received.load(Ordering::Relaxed) - before);
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(joined)?;
        #[expect(clippy::cast_precision_loss, reason = "some gigabytes")]
        Ok(bytes as f64 * 8.0 / elapsed.as_secs_f64() / 1e9)
    })
}

/// Pins the calling thread to a processor, gives the thread real-time priority, and runs `work`.
fn on<T>(cpu: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    tcp::stay_on(cpu)?;
    live_frames::go_ahead()?;
    work()
}

/// Sends one request and waits for the response; returns the time in µs.
fn ask(mut stream: &TcpStream) -> Result<f64> {
    let start = Instant::now();
    stream.write_all(b"?").context("send a request")?;
    stream.read_exact(&mut [0]).context("wait for a response")?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Responds to one request.
fn answer(mut stream: &TcpStream) -> Result<()> {
    let mut question = [0];
    stream.read_exact(&mut question).context("wait for a request")?;
    stream.write_all(&question).context("send a response")
}

/// Sends zeros until `is_over` is set, and then the last byte.
fn send(mut stream: &TcpStream, is_over: &AtomicBool) -> Result<()> {
    let zeros = vec![0; CHUNK];
    while !is_over.load(Ordering::Relaxed) {
        stream.write_all(&zeros).context("send data")?;
    }
    stream.write_all(&[LAST]).context("send the last byte")
}

/// Counts the received bytes up to the last byte.
fn receive(mut stream: &TcpStream, received: &AtomicU64) -> Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = poll::uninterrupted(|| stream.read(&mut buffer)).context("receive data")?;
        received.fetch_add(read as u64, Ordering::Relaxed);
        match buffer[..read].last() {
            Some(&LAST) => return Ok(()),
            Some(_zero) => {}
            None => bail!("the connection was closed early"),
        }
    }
}

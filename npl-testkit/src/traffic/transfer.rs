// SPDX-License-Identifier: Apache-2.0
//! Transfers large amounts of data over TCP. The client verifies the digest of all bytes.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::tcp_connect;
use crate::echo::Answer;
use crate::echo::pattern::{Digest, Pattern};
use crate::netns::Netns;
use crate::poll;

/// The buffer size.
const CHUNK: usize = 32 * 1024;

/// The longest pause within a transfer. The interval between retransmissions doubles, so the pause can be twice as long
/// as the interruption that caused it.
const STALL_LIMIT: Duration = Duration::from_mins(2);

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the Pod.
    Upload,
    /// From the Pod to the client.
    Download,
}

/// A completed transfer; all bytes arrived unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferReport {
    /// The number of bytes.
    pub bytes: u64,
    pub elapsed: Duration,
}

/// Transfers this number of bytes and verifies their digest.
pub fn transfer(from: &Netns, server: SocketAddr, direction: Direction, bytes: u64) -> Result<TransferReport> {
    run(&tcp_connect(from, server)?, Plan { direction, bytes, rate: None }, &Shared::default())
        .with_context(|| format!("{direction:?} of {bytes} bytes with {server}"))
}

/// A transfer on its own thread.
#[derive(Debug)]
pub struct Transfer {
    shared: Arc<Shared>,
    bytes: u64,
    thread: JoinHandle<Result<TransferReport>>,
}

impl Transfer {
    /// Starts a transfer of `bytes` at `rate` bytes per second.
    pub fn start(from: &Netns, server: SocketAddr, direction: Direction, bytes: u64, rate: u64) -> Result<Self> {
        let stream = tcp_connect(from, server)?;
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let plan = Plan { direction, bytes, rate: Some(rate) };
        Ok(Self { shared, bytes, thread: thread::spawn(move || run(&stream, plan, &own)) })
    }

    /// The number of bytes transferred so far, as counted by the client.
    pub fn moved(&self) -> u64 {
        self.shared.moved.load(Ordering::Relaxed)
    }

    /// Transfers the remaining bytes without a rate limit.
    pub fn remove_rate_limit(&self) {
        self.shared.is_unlimited.store(true, Ordering::Relaxed);
    }

    /// Whether the transfer is in progress.
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Whether the transfer has ended before all bytes were transferred.
    pub fn is_interrupted(&self) -> bool {
        !self.is_running() && self.moved() < self.bytes
    }

    /// Waits until at least `share` (0 to 1) of the bytes are transferred, or until the transfer has ended.
    pub fn wait_for_share(&self, share: f64, limit: Duration) -> Result<()> {
        #[expect(clippy::cast_precision_loss, reason = "a share of a few MiB")]
        let reached = || (self.moved() as f64 >= share * self.bytes as f64 || !self.is_running()).then_some(());
        poll::until("the transfer's progress", limit, reached).map(drop)
    }

    /// Waits for the end of the transfer. The wait is bounded, because every read and write has a timeout.
    pub fn join(self) -> Result<TransferReport> {
        self.thread.join().map_err(|_panic| anyhow!("the transfer's thread panicked"))?
    }
}

/// State that the thread of a transfer shares with its [`Transfer`].
#[derive(Debug, Default)]
struct Shared {
    /// The number of bytes transferred so far.
    moved: AtomicU64,
    /// Whether the plan's rate no longer applies.
    is_unlimited: AtomicBool,
}

#[derive(Clone, Copy)]
struct Plan {
    direction: Direction,
    bytes: u64,
    rate: Option<u64>,
}

fn run(stream: &TcpStream, plan: Plan, shared: &Shared) -> Result<TransferReport> {
    stream.set_read_timeout(Some(poll::extended(STALL_LIMIT))).context("set a read timeout")?;
    stream.set_write_timeout(Some(poll::extended(STALL_LIMIT))).context("set a write timeout")?;
    // Any seed works. The size is used as the seed, so that every run transfers the same data.
    let seed = plan.bytes;
    let start = Instant::now();
    match plan.direction {
        Direction::Upload => upload(stream, seed, plan, shared),
        Direction::Download => download(stream, seed, plan, shared),
    }?;
    Ok(TransferReport { bytes: plan.bytes, elapsed: start.elapsed() })
}

fn upload(mut stream: &TcpStream, seed: u64, plan: Plan, shared: &Shared) -> Result<()> {
    writeln!(stream, "UPLOAD {} {seed}", plan.bytes).context("announce the upload")?;
    let sent = copy(&mut Pattern::new(seed, plan.bytes), plan, shared, |chunk| stream.write_all(chunk))?;
    let mut reply = String::new();
    BufReader::new(stream.take(64 * 1024)).read_line(&mut reply).context("wait for the digest")?;
    let answer: Answer = serde_json::from_str(&reply).with_context(|| format!("parse the response `{reply}`"))?;
    ensure!(answer.received == plan.bytes, "{} of {} bytes arrived", answer.received, plan.bytes);
    ensure!(answer.digest == sent.to_string(), "the data was corrupted: digest {} instead of {sent}", answer.digest);
    Ok(())
}

fn download(mut stream: &TcpStream, seed: u64, plan: Plan, shared: &Shared) -> Result<()> {
    writeln!(stream, "DOWNLOAD {} {seed}", plan.bytes).context("request the download")?;
    let received = copy(&mut stream.take(plan.bytes), plan, shared, |_chunk| Ok(()))?;
    let arrived = shared.moved.load(Ordering::Relaxed);
    ensure!(arrived == plan.bytes, "{arrived} of {} bytes arrived", plan.bytes);
    let sent = Pattern::new(seed, plan.bytes).digest();
    ensure!(received.to_string() == sent, "the data was corrupted: digest {received} instead of {sent}");
    Ok(())
}

/// Copies all bytes from `source` to `sink`, at the plan's rate if the plan has one.
fn copy(
    source: &mut impl Read,
    plan: Plan,
    shared: &Shared,
    mut sink: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<Digest> {
    let start = Instant::now();
    let mut digest = Digest::default();
    let mut buffer = vec![0; CHUNK];
    loop {
        let so_far = shared.moved.load(Ordering::Relaxed);
        let read =
            poll::uninterrupted(|| source.read(&mut buffer)).with_context(|| format!("read after {so_far} bytes"))?;
        let Some(chunk) = buffer.get(..read).filter(|chunk| !chunk.is_empty()) else { return Ok(digest) };
        digest.update(chunk);
        sink(chunk).with_context(|| format!("write after {so_far} bytes"))?;
        let total = so_far + chunk.len() as u64;
        shared.moved.store(total, Ordering::Relaxed);
        if let Some(rate) = plan.rate.filter(|_rate| !shared.is_unlimited.load(Ordering::Relaxed)) {
            // This sleep limits the rate of the transfer. It does not wait for a condition.
            thread::sleep(Duration::from_micros(total * 1_000_000 / rate.max(1)).saturating_sub(start.elapsed()));
        }
    }
}

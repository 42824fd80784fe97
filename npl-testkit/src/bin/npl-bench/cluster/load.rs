// SPDX-License-Identifier: Apache-2.0
//! Sends requests to several addresses in turn, one request after the other, and measures the time of each request.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::unistd::Pid;
use npl_testkit::netns::Netns;
use npl_testkit::poll;

use crate::tcp::{self, CLIENT_CPU, SERVER_CPU};

const READY_LIMIT: Duration = Duration::from_secs(30);

/// The number of turns per round. In each turn, the bench sends requests to every address.
const TURNS: usize = 10;

/// The number of requests, and of connections, that warm up caches before the measurement.
const WARM_UP: usize = 20;

/// The results for one address.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// The round-trip time of each request over an open connection, in µs.
    pub(crate) requests: Vec<f64>,
    /// The request rate over an open connection, per second.
    pub(crate) rate: f64,
    /// The time to connect, send a request, receive the response and close, in µs each.
    pub(crate) connections: Vec<f64>,
    /// The CPU time of the whole machine per request over an open connection, in µs.
    pub(crate) busy: f64,
}

/// Sends requests to all servers from a namespace. The servers take turns, so that slow phases of the machine affect
/// all servers.
pub(crate) fn measure(
    client: &Netns,
    servers: &[SocketAddr],
    requests: usize,
    connections: usize,
) -> Result<Vec<Measured>> {
    let count = servers.len();
    let work = || -> Result<Vec<Measured>> {
        tcp::stay_on(CLIENT_CPU)?;
        let mut all: Vec<Measured> = servers.iter().map(|_server| Measured::default()).collect();
        // The Service proxy installs its rules shortly after the Pod becomes ready, so the first connections may need several
        // attempts.
        let open =
            |server| poll::until("connections to every address of the Pod", READY_LIMIT, || tcp::connect(server).ok());
        let streams: Vec<TcpStream> = servers.iter().map(|server| Ok(open(*server)?.0)).collect::<Result<_>>()?;
        for (stream, server) in streams.iter().zip(servers) {
            timed(WARM_UP, || ask(stream))?;
            timed(WARM_UP, || one(*server))?;
        }
        for turn in 0..TURNS {
            // The order of the addresses changes with each turn, so that no address is always first.
            for way in (0..count).map(|way| (way + turn) % count) {
                let (measured, stream, server) = (&mut all[way], &streams[way], servers[way]);
                let (start, before) = (Instant::now(), Idle::read()?);
                measured.requests.extend(timed(requests / TURNS, || ask(stream))?);
                measured.busy += Idle::read()?.busy_since(before, start.elapsed());
                measured.connections.extend(timed(connections / TURNS, || one(server))?);
            }
        }
        for measured in &mut all {
            #[expect(clippy::cast_precision_loss, reason = "some thousands")]
            let count = measured.requests.len() as f64;
            measured.busy /= count;
            measured.rate = count * 1e6 / measured.requests.iter().sum::<f64>();
        }
        Ok(all)
    };
    client.run(work)?.context("send requests to every address of the Pod")
}

/// Pins all threads of a process, and threads that they start, to the server's processor.
pub(crate) fn stay_on_server_cpu(process: u32) -> Result<()> {
    for entry in fs::read_dir(format!("/proc/{process}/task")).context("list the threads of a process")?.flatten() {
        let thread = entry.file_name().to_str().and_then(|name| name.parse().ok()).context("parse a thread ID")?;
        tcp::keep_on(Pid::from_raw(thread), SERVER_CPU)?;
    }
    Ok(())
}

/// Returns the time of each of `count` calls, in µs.
fn timed(count: usize, mut work: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let one = |_number| {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    (0..count).map(one).collect()
}

fn one(server: SocketAddr) -> Result<()> {
    ask(&tcp::connect(server)?)
}

/// Sends a request and waits for the response. The content of the response is not checked here.
fn ask(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"?\n").context("send a request")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("wait for a response")?;
    ensure!(answer.ends_with('\n'), "the response is incomplete: {answer:?}");
    Ok(())
}

/// The idle time of all processors together since boot.
///
/// Busy time is computed from idle time, because the kernel measures idle time exactly. The kernel samples busy time
/// only at timer ticks (250 per second in Debian's kernels), and misses work that ends before the next tick.
#[derive(Clone, Copy)]
struct Idle {
    time: Duration,
    processors: u32,
}

impl Idle {
    fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let mut lines = text.lines().take_while(|line| line.starts_with("cpu"));
        let sum = lines.next().and_then(|line| line.strip_prefix("cpu ")).context("find the total in /proc/stat")?;
        let ticks: Vec<u64> = sum.split_whitespace().map_while(|field| field.parse().ok()).collect();
        let [_user, _nice, _system, idle, iowait, ..] = ticks[..] else {
            anyhow::bail!("the first line of /proc/stat has only {} numbers", ticks.len())
        };
        // `/proc/stat` counts in units of 10 ms (USER_HZ).
        let time = Duration::from_millis((idle + iowait) * 10);
        Ok(Self { time, processors: u32::try_from(lines.count()).context("convert the number of processors")? })
    }

    /// Returns the busy time of all processors since an earlier reading, in µs.
    fn busy_since(self, before: Self, elapsed: Duration) -> f64 {
        let idle = self.time.saturating_sub(before.time);
        (elapsed * self.processors).saturating_sub(idle).as_secs_f64() * 1e6
    }
}

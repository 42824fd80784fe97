// SPDX-License-Identifier: Apache-2.0
//! Requests to one address, one after the other, and what each took.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::unistd::Pid;
use npl_testkit::netns::Netns;
use npl_testkit::poll;

use crate::ends::{self, CLIENT_CPU, SERVER_CPU};

const READY_LIMIT: Duration = Duration::from_secs(30);

/// How often every way has its turn in a round.
const TURNS: usize = 10;

/// Connections and requests that fill caches before anything is measured.
const WARM_UP: usize = 20;

/// What a load has shown.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// A question and its answer over a connection that is open, in µs each.
    pub(crate) requests: Vec<f64>,
    /// How many of these there were in each second of them.
    pub(crate) rate: f64,
    /// Connecting, a question, its answer, and the end, in µs each.
    pub(crate) connections: Vec<f64>,
    /// Time that the machine's processors were busy, for each of those requests, in µs.
    pub(crate) busy: f64,
}

/// Asks all servers from a namespace, by turns: what slows the machine down for a moment slows them all.
pub(crate) fn measure<const N: usize>(
    client: &Netns,
    servers: [SocketAddr; N],
    requests: usize,
    connections: usize,
) -> Result<[Measured; N]> {
    let work = || -> Result<[Measured; N]> {
        ends::stay_on(CLIENT_CPU)?;
        let mut all = servers.map(|_server| Measured::default());
        // kube-proxy's rules come a moment after the Pod.
        let open = |server| poll::until("every way to the Pod", READY_LIMIT, || ends::connect(server).ok());
        let streams: Vec<TcpStream> = servers.into_iter().map(|it| Ok(open(it)?.0)).collect::<Result<_>>()?;
        for (stream, server) in streams.iter().zip(servers) {
            timed(WARM_UP, || ask(stream))?;
            timed(WARM_UP, || one(server))?;
        }
        for turn in 0..TURNS {
            // Nobody is always the first.
            for way in (0..N).map(|way| (way + turn) % N) {
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
    client.run(work)?.context("ask by every way")
}

/// Has all threads of a process, and those that they start, run on the server's processor.
pub(crate) fn stay_on_server_cpu(process: u32) -> Result<()> {
    for entry in fs::read_dir(format!("/proc/{process}/task")).context("list a process's threads")?.flatten() {
        let thread = entry.file_name().to_str().and_then(|name| name.parse().ok()).context("a thread's number")?;
        ends::keep_on(Pid::from_raw(thread), SERVER_CPU)?;
    }
    Ok(())
}

/// What each of so many took, in µs.
fn timed(count: usize, mut work: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let one = |_number| {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    (0..count).map(one).collect()
}

fn one(server: SocketAddr) -> Result<()> {
    ask(&ends::connect(server)?)
}

/// What the answer says is a matter for tests; here it only has to come.
fn ask(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"?\n").context("send a question")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("wait for an answer")?;
    ensure!(answer.ends_with('\n'), "the answer ended early: {answer:?}");
    Ok(())
}

/// Time for which all processors together had nothing to do, since the machine started.
///
/// The kernel measures that, where it takes samples of what they did instead: 250 a second or fewer, which miss all work
/// that always ends before the next.
#[derive(Clone, Copy)]
struct Idle {
    time: Duration,
    processors: u32,
}

impl Idle {
    fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let mut lines = text.lines().take_while(|line| line.starts_with("cpu"));
        let sum = lines.next().and_then(|line| line.strip_prefix("cpu ")).context("read the sum of /proc/stat")?;
        let ticks: Vec<u64> = sum.split_whitespace().map_while(|field| field.parse().ok()).collect();
        let [_user, _nice, _system, idle, iowait, ..] = ticks[..] else {
            anyhow::bail!("/proc/stat has {} numbers in its first line", ticks.len())
        };
        // A tick is a hundredth of a second in everything that the kernel shows.
        let time = Duration::from_millis((idle + iowait) * 10);
        Ok(Self { time, processors: u32::try_from(lines.count()).context("count the processors")? })
    }

    /// Time that they were busy since an earlier reading, in µs.
    fn busy_since(self, before: Self, elapsed: Duration) -> f64 {
        let idle = self.time.saturating_sub(before.time);
        (elapsed * self.processors).saturating_sub(idle).as_secs_f64() * 1e6
    }
}

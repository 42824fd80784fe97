// SPDX-License-Identifier: Apache-2.0
//! Requests to one address, one after the other, and what each took.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use npl_testkit::netns::Netns;
use npl_testkit::traffic;

/// Connections and requests that fill caches before anything is measured.
const WARM_UP: usize = 20;

/// What a load has shown.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// A question and its answer over a connection that is open, in µs each.
    pub(crate) requests: Vec<f64>,
    /// Connecting, a question, its answer, and the end, in µs each.
    pub(crate) connections: Vec<f64>,
    /// Time that the machine's processors were busy, for each of those requests, in µs.
    pub(crate) busy: f64,
}

/// Asks from a namespace.
pub(crate) fn measure(client: &Netns, server: SocketAddr, requests: usize, connections: usize) -> Result<Measured> {
    let work = || -> Result<Measured> {
        timed(WARM_UP, || one(server))?;
        let stream = connect(server)?;
        timed(WARM_UP, || ask(&stream))?;
        let before = busy()?;
        let taken = timed(requests, || ask(&stream))?;
        let spent = busy()?.saturating_sub(before);
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        let busy = spent.as_secs_f64() * 1e6 / requests as f64;
        Ok(Measured { requests: taken, connections: timed(connections, || one(server))?, busy })
    };
    client.run(work)?.with_context(|| format!("ask {server}"))
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
    ask(&connect(server)?)
}

fn connect(server: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, traffic::REQUEST_LIMIT).context("connect")?;
    stream.set_nodelay(true).context("set TCP_NODELAY")?;
    stream.set_read_timeout(Some(traffic::REQUEST_LIMIT)).context("set a read timeout")?;
    Ok(stream)
}

/// What the answer says is a matter for tests; here it only has to come.
fn ask(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"?\n").context("send a question")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("wait for an answer")?;
    ensure!(answer.ends_with('\n'), "the answer ended early: {answer:?}");
    Ok(())
}

/// Time that all processors together were not idle, since the machine started.
fn busy() -> Result<Duration> {
    let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("read the sum of /proc/stat")?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq; the rest is what others took, or in the first two.
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        anyhow::bail!("/proc/stat has {} numbers in its first line", ticks.len())
    };
    // A tick is a hundredth of a second in everything that the kernel shows.
    Ok(Duration::from_millis((user + nice + system + irq + softirq) * 10))
}

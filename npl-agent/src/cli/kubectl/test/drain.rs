// SPDX-License-Identifier: Apache-2.0
//! Tests withdrawal and drain: a connection that is open must survive the withdrawal of its node port, and new
//! connections must fail after the drain.

use std::{
    io::{self, Write as _},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::Receiver,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};

use super::{
    clients,
    scene::{PUBLICATION, Scene, client_pod},
};
use crate::{
    cli::{
        kubectl::{child, interrupt::Interrupt},
        note,
    },
    core::{
        model::{Family, Protocol},
        path_test::{
            Client, DrainEnd, Elapsed, Observation, Outcome, Path, Probe, Row, Sent, Server, new_connection,
            open_connection, withdrawal,
        },
    },
};

/// The test waits for the end of the drain only if the agent's drain time is not longer than this.
const LONGEST: Duration = Duration::from_secs(35);
/// The maximum time between the end of the drain and the removal of the mapping.
const MARGIN: Duration = Duration::from_secs(10);

/// The time limit for all requests that detect the end of the drain. The limit is longer than [`LONGEST`], [`MARGIN`]
/// and some slow requests together.
const DRAIN_LIMIT: Duration = Duration::from_secs(90);

/// The time limit for one request from a client Pod. The client in the Pod has shorter time limits, so it normally
/// reports an unanswered request before this limit.
const OBSERVATION: Duration = Duration::from_secs(20);

/// A connection that a client in a Pod keeps open. Dropping this value ends the client.
struct OpenConnection<'a> {
    interrupt: &'a Interrupt,
    process: Child,
    input: ChildStdin,
    output: Receiver<String>,
}

impl<'a> OpenConnection<'a> {
    fn open(test: Test<'a>, pod: &str, probe: Probe) -> anyhow::Result<Self> {
        let probe = probe.to_string();
        let mut command = test.scene.kubectl.command(&test.scene.exec_arguments(pod, &["--stdin"], &["hold", &probe]));
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().context("run kubectl")?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        };
        let mut connection = Self { interrupt: test.interrupt, process, input, output: child::lines(output) };
        let first = connection.read()?;
        ensure!(matches!(first, Observation::Answered(_)), "the connection was not opened: {first:?}");
        Ok(connection)
    }

    fn read(&mut self) -> anyhow::Result<Observation> {
        let start = Instant::now();
        let check = || {
            ensure!(start.elapsed() < OBSERVATION, "the client in the Pod has printed no observation");
            self.interrupt.check()
        };
        let line = child::receive(&self.output, check)?.context("the client in the Pod has ended")?;
        serde_json::from_str(&line).context("decode the observation")
    }

    fn observe(&mut self) -> anyhow::Result<Observation> {
        self.input.write_all(b"\n")?;
        self.read()
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        // Errors are ignored, because the process may have ended already.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// The objects of the drain test, and the interrupt, which reports a signal or the end of the time limit.
#[derive(Clone, Copy)]
pub(super) struct Test<'a> {
    pub(super) scene: &'a Scene<'a>,
    pub(super) interrupt: &'a Interrupt,
}

/// Withdraws the node ports of all echo Pods, and tests during and after the drain whether connections on the path
/// `working` are served. Of the TCP paths from client Pods, `working` is the first whose test has passed. If a step of
/// the drain test returns an error, the returned rows contain the error, so that the results of the earlier tests are
/// still printed.
pub(super) fn rows(test: Test<'_>, published: &[Server], working: Option<&Path>) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Err(error) = follow(test, published, working, &mut rows) {
        let nodes: Vec<&str> = test.scene.sites.iter().map(|site| site.node.as_str()).collect();
        rows.push(Row::about("drain", &nodes.join(", "), Outcome::Unknown, format!("{error:#}")));
    }
    rows
}

fn follow(test: Test<'_>, published: &[Server], working: Option<&Path>, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let scene = test.scene;
    let followed =
        working.and_then(|path| Some((path, scene.sites.get(path.server)?, client_pod(path.client_server?))));
    let open = followed.as_ref().map(|(path, _site, pod)| OpenConnection::open(test, pod, path.probe));
    let start = Instant::now();
    scene.disable()?;
    let disabled = start.elapsed();
    rows.extend(withdrawals(test, published, start)?);
    let (Some((path, site, pod)), Some(open)) = (followed, open) else {
        let reason = "no TCP path from a Pod has passed";
        let nodes = scene.sites.first().map(|site| site.node.as_str()).unwrap_or_default();
        rows.push(Row::about("drain", nodes, Outcome::NotTried, reason));
        return Ok(());
    };
    rows.push(row(path, &site.node, "open connection during the drain", during(open, site.drain(), start)));
    let after = after(test, (&pod, path.probe), site.drain(), (start, disabled))?;
    rows.push(row(path, &site.node, "new connection after the drain", after));
    Ok(())
}

/// Returns whether [`rows`] can keep a connection on this path open: TCP from a client Pod.
pub(super) fn can_follow(path: &Path) -> bool {
    path.probe.protocol == Protocol::Tcp && matches!(path.client, Client::OtherNode | Client::OwnNode)
}

fn row(path: &Path, node: &str, name: &str, (result, detail): (Outcome, String)) -> Row {
    let family = Family::of(path.probe.address.ip());
    Row { protocol: Some(path.probe.protocol), family: Some(family), ..Row::about(name, node, result, detail) }
}

/// Waits until the echo Pods' annotations contain no node port. Failed requests to the API server are repeated, because
/// the API server may fail for a moment.
fn withdrawals(test: Test<'_>, published: &[Server], start: Instant) -> anyhow::Result<Vec<Row>> {
    let mut left = Err(anyhow!("the annotations were not read"));
    test.interrupt.until(PUBLICATION, || {
        left = test.scene.servers();
        let is_withdrawn = left.as_ref().is_ok_and(|(servers, _)| servers.iter().all(|it| it.entries.is_empty()));
        Ok(is_withdrawn.then_some(()))
    })?;
    let elapsed = since(start);
    let rows = published.iter().zip(left?.0).zip(test.scene.sites).map(|((before, after), site)| {
        let (was_published, is_left) = (!before.entries.is_empty(), !after.entries.is_empty());
        withdrawal(&before.node, was_published, is_left, elapsed, millis(site.drain()))
    });
    Ok(rows.collect())
}

fn since(start: Instant) -> Elapsed {
    millis(start.elapsed())
}

fn millis(duration: Duration) -> Elapsed {
    Elapsed(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// Sends a request on the open connection, and returns whether the Pod still answers during the drain.
fn during(open: anyhow::Result<OpenConnection<'_>>, drain: Duration, start: Instant) -> (Outcome, String) {
    let sent = since(start);
    match open.and_then(|mut connection| connection.observe()) {
        Ok(observation) => open_connection(&observation, sent, since(start), millis(drain)),
        Err(error) => (Outcome::Unknown, format!("{error:#}")),
    }
}

/// Sends requests until the result is certain. The result is certain once a request is not answered, or once a request
/// that was sent after the latest permitted end of the drain is answered. The API server accepted the withdrawal at
/// most `disabled` after `start`.
fn after(
    test: Test<'_>,
    (pod, probe): (&str, Probe),
    drain: Duration,
    (start, disabled): (Instant, Duration),
) -> anyhow::Result<(Outcome, String)> {
    if drain > LONGEST {
        return Ok((
            Outcome::NotTried,
            format!("the drain lasts {drain:?}; the test waits only for a drain of at most {LONGEST:?}"),
        ));
    }
    note(&format!("waiting for the end of the drain, {drain:?}"));
    let end = DrainEnd { earliest: millis(drain), latest: millis(disabled + drain + MARGIN) };
    let mut last = (Outcome::Unknown, "no request was sent after the drain".to_owned());
    test.interrupt.until(DRAIN_LIMIT, || {
        let started = since(start);
        let observed = clients::ask_in(test.scene, pod, &[probe]);
        let observed = observed.and_then(|it| it.into_iter().next().context("the client has printed no observation"));
        let sent = Sent { started, observed: since(start) };
        let result = match observed {
            Ok(observation) => new_connection(&observation, sent, end),
            Err(error) => Some((Outcome::Unknown, format!("{error:#}"))),
        };
        let is_certain = matches!(result, Some((Outcome::Passed | Outcome::Failed, _)));
        if let Some(result) = result {
            last = result;
        }
        Ok(is_certain.then_some(()))
    })?;
    Ok(last)
}

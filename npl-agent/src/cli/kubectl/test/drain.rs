// SPDX-License-Identifier: Apache-2.0
//! Withdrawal and drain: an open connection survives the withdrawal of its node port, and a new connection is refused
//! after the drain.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use super::{
    clients,
    interrupt::Interrupt,
    scene::{PUBLICATION, Scene, client_pod},
};
use crate::{
    cli::{kubectl::Kubectl, note},
    core::{
        model::{Family, Protocol},
        path_test::{Client, Observation, Outcome, Path, Probe, Row},
    },
};

/// The longest drain whose end the test waits for.
const LONGEST: Duration = Duration::from_secs(35);
/// The maximum time between the end of the drain and the removal of the mapping.
const MARGIN: Duration = Duration::from_secs(8);

/// An open connection of a client in a Pod. Dropping it ends the client.
struct OpenConnection {
    kubectl: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl OpenConnection {
    fn open(kubectl: Kubectl<'_>, scene: &Scene<'_>, pod: &str, probe: Probe) -> anyhow::Result<Self> {
        let mut command = kubectl.command(&scene.exec_arguments(pod, &["--stdin"], &["hold", &probe.to_string()]));
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut kubectl = command.spawn().context("run kubectl")?;
        let (Some(input), Some(output)) = (kubectl.stdin.take(), kubectl.stdout.take()) else {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        };
        Ok(Self { kubectl, input, output: BufReader::new(output) })
    }

    /// The next observation, which the client's own time limits bound.
    fn read(&mut self) -> anyhow::Result<Observation> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the client in the Pod has ended");
        serde_json::from_str(&line).context("decode the observation")
    }

    fn observe(&mut self) -> anyhow::Result<Observation> {
        self.input.write_all(b"\n")?;
        self.read()
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        // The process may have ended already.
        drop(self.kubectl.kill());
        drop(self.kubectl.wait());
    }
}

/// Withdraws the node ports of all echo Pods, and follows a connection of the first TCP path that has passed.
pub(super) fn rows(
    kubectl: Kubectl<'_>,
    scene: &Scene<'_>,
    interrupt: &Interrupt,
    working: Option<&Path>,
) -> anyhow::Result<Vec<Row>> {
    let followed =
        working.and_then(|path| Some((path, scene.sites.get(path.server)?, client_pod(path.client_server?))));
    let open = followed.as_ref().map(|(path, _site, pod)| -> anyhow::Result<OpenConnection> {
        let mut connection = OpenConnection::open(kubectl, scene, pod, path.probe)?;
        let first = connection.read()?;
        ensure!(matches!(first, Observation::Answered(_)), "the connection was not opened: {first:?}");
        Ok(connection)
    });
    let mut rows = Vec::new();
    let start = Instant::now();
    scene.disable()?;
    rows.extend(withdrawal(scene, interrupt, start)?);
    let (Some((path, site, pod)), Some(open)) = (followed, open) else {
        let reason = "no TCP path from a Pod has passed";
        let nodes = scene.sites.first().map(|site| site.node.as_str()).unwrap_or_default();
        rows.push(Row::about("drain", nodes, Outcome::NotTried, reason));
        return Ok(rows);
    };
    rows.push(row(path, &site.node, "open connection during the drain", during(open, site.drain(), start)));
    let after = after(kubectl, scene, interrupt, (&pod, path.probe), site.drain(), start)?;
    rows.push(row(path, &site.node, "new connection after the drain", after));
    Ok(rows)
}

/// The paths that [`rows`] can follow: TCP from a client Pod.
pub(super) fn can_follow(path: &Path) -> bool {
    path.probe.protocol == Protocol::Tcp && matches!(path.client, Client::OtherNode | Client::OwnNode)
}

fn row(path: &Path, node: &str, name: &str, (result, detail): (Outcome, String)) -> Row {
    let family = Family::of(path.probe.address.ip());
    Row { protocol: Some(path.probe.protocol), family: Some(family), ..Row::about(name, node, result, detail) }
}

/// Waits until the annotations name no node port.
fn withdrawal(scene: &Scene<'_>, interrupt: &Interrupt, start: Instant) -> anyhow::Result<Vec<Row>> {
    let mut left = Vec::new();
    interrupt.until(PUBLICATION, || {
        left = scene.servers()?.0.into_iter().map(|server| !server.entries.is_empty()).collect();
        Ok((!left.contains(&true)).then_some(()))
    })?;
    let elapsed = start.elapsed().as_secs_f32();
    let rows = scene.sites.iter().zip(left).map(|(site, is_left)| {
        let (result, detail) = if is_left {
            (Outcome::Failed, format!("after {elapsed:.1} s, the annotation still names node ports"))
        } else {
            (Outcome::Passed, format!("the annotation names no node port after {elapsed:.1} s"))
        };
        Row::about("withdrawal", &site.node, result, detail)
    });
    Ok(rows.collect())
}

/// Whether the open connection is still answered.
fn during(open: anyhow::Result<OpenConnection>, drain: Duration, start: Instant) -> (Outcome, String) {
    let observation = open.and_then(|mut connection| connection.observe());
    if start.elapsed() >= drain {
        return (Outcome::NotTried, format!("the drain of {drain:?} is shorter than the withdrawal took"));
    }
    match observation {
        Ok(Observation::Answered(_)) => {
            (Outcome::Passed, format!("answered {:.1} s after the withdrawal", start.elapsed().as_secs_f32()))
        }
        Ok(Observation::NoAnswer(reason) | Observation::Refused(reason)) => (Outcome::Failed, reason),
        Ok(Observation::NotSent(reason)) => (Outcome::Unknown, reason),
        Err(error) => (Outcome::Unknown, format!("{error:#}")),
    }
}

/// Waits until a new connection is not answered.
fn after(
    kubectl: Kubectl<'_>,
    scene: &Scene<'_>,
    interrupt: &Interrupt,
    (pod, probe): (&str, Probe),
    drain: Duration,
    start: Instant,
) -> anyhow::Result<(Outcome, String)> {
    if drain > LONGEST {
        return Ok((Outcome::NotTried, format!("the drain lasts {drain:?}; the test waits at most {LONGEST:?}")));
    }
    note(&format!("waiting for the end of the drain, {drain:?}"));
    let mut last = Ok(None);
    let limit = (drain + MARGIN).saturating_sub(start.elapsed());
    interrupt.until(limit, || {
        last = clients::ask_in(kubectl, scene, pod, &[probe]).map(|observed| observed.into_iter().next());
        Ok(matches!(last, Ok(Some(Observation::NoAnswer(_) | Observation::Refused(_)))).then_some(()))
    })?;
    let elapsed = start.elapsed().as_secs_f32();
    Ok(match last {
        Ok(Some(Observation::NoAnswer(reason) | Observation::Refused(reason))) if start.elapsed() < drain => {
            (Outcome::Failed, format!("{elapsed:.1} s after the withdrawal, before the end of the drain: {reason}"))
        }
        Ok(Some(Observation::NoAnswer(reason) | Observation::Refused(reason))) => {
            (Outcome::Passed, format!("{elapsed:.1} s after the withdrawal: {reason}"))
        }
        Ok(Some(Observation::Answered(_))) => {
            (Outcome::Failed, format!("still answered {elapsed:.1} s after the withdrawal"))
        }
        Ok(Some(Observation::NotSent(reason))) => (Outcome::Unknown, reason),
        Ok(None) => (Outcome::Unknown, "the client has printed no observation".to_owned()),
        Err(error) => (Outcome::Unknown, format!("{error:#}")),
    })
}

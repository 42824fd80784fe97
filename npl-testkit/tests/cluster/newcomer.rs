// SPDX-License-Identifier: Apache-2.0
//! Runs the commands of README.md that need a terminal or traffic: `top`, which draws on a terminal, and `trace`, which
//! waits for packets.

use std::fs::{self, File};
use std::io::Write as _;
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, Stdio};

use npl_testkit::cluster::Entry;
use npl_testkit::{poll, terminal, tools};

use crate::agent;
use crate::clients::{self, Client};
use crate::traffic::PORTS;
use crate::world::{LIMIT, World};

const TOP: &str = "kubectl --namespace npl-system exec -it daemonset/npl-agent -- /npl-agent top";
const TRACE: &str =
    "kubectl --namespace npl-system exec daemonset/npl-agent -- /npl-agent trace --node-port 61000 --count 2";

/// The size of the terminal.
const ROWS: NonZero<u16> = NonZero::new(40).unwrap();
const COLUMNS: NonZero<u16> = NonZero::new(120).unwrap();

pub(crate) fn readme() -> String {
    fs::read_to_string(tools::repository_file("README.md")).unwrap()
}

/// A client outside of the cluster sends requests to a mapping. `top` must list the Pod, and `trace` must show two
/// translated packets of the node port.
pub(crate) fn watch_traffic_and_trace_a_packet(world: &World) {
    let (name, pod) = world.wait_for_shop(4).pop_first().unwrap();
    let entry = world.entries(&name, PORTS).remove(0);
    let agent = format!("pod/{}", agent::on(world, &pod.node).name);
    let client = clients::outside(world);
    let output = until_shown(world, TOP, &agent, &entry, (&client, &name), |output| {
        terminal::screen(output, ROWS, COLUMNS).contains(&name)
    });
    println!("`top` shows {name} after {} bytes of output", output.len());
    let is_traced = |output: &[u8]| String::from_utf8_lossy(output).matches("translated as").count() == 2;
    let output = until_shown(world, TRACE, &agent, &entry, (&client, &name), is_traced);
    let lines = String::from_utf8_lossy(&output);
    assert!(lines.contains(&format!(":{}", entry.node_port)), "{lines}");
}

/// Runs a command of README.md on a terminal, in the agent's Pod and for the node port of the entry, and sends requests
/// until the command's output is as expected. Returns the output.
fn until_shown(
    world: &World,
    command: &str,
    agent: &str,
    entry: &Entry,
    (client, pod): (&Client, &str),
    is_expected: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    assert!(readme().contains(command), "README.md does not have `{command}`");
    let line = command.replace("daemonset/npl-agent", agent).replace("61000", &entry.node_port.to_string());
    let path = world.cluster.run().file("terminal");
    let mut terminal = start(world, &line, &path);
    let shown = || {
        let answer = client.ask(entry.protocol, entry.address()).unwrap();
        assert_eq!(answer.pod, pod);
        let output = fs::read(&path).unwrap();
        is_expected(&output).then_some(output)
    };
    let (output, _) = poll::until(&format!("the output of `{line}`"), LIMIT, shown).unwrap();
    // `top` ends when the user presses q; `trace` has ended already, so the write may fail.
    drop(terminal.stdin.take().unwrap().write_all(b"q"));
    let ended = || terminal.try_wait().unwrap();
    let (status, _) = poll::until(&format!("the end of `{line}`"), LIMIT, ended).unwrap();
    assert!(status.success(), "{line}: {status}: {}", String::from_utf8_lossy(&output));
    output
}

/// Starts a command on a terminal that the tool `script` provides. The terminal's output goes to a file.
fn start(world: &World, line: &str, output: &Path) -> Child {
    let mut command = world.cluster.cluster().command("script").unwrap();
    command.args(["--quiet", "--flush", "--return", "--command", &format!("stty cols {COLUMNS} rows {ROWS}; {line}")]);
    command.arg("/dev/null").stdin(Stdio::piped()).stdout(File::create(output).unwrap()).stderr(Stdio::null());
    command.spawn().unwrap()
}

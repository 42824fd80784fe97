// SPDX-License-Identifier: Apache-2.0
//! Commands that access a running cluster: its status, kubectl, and commands inside of Nodes.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result};
use npl_testkit::netns;

use crate::say;
use crate::state::State;

/// The exit code for a process that a signal killed is this number plus the signal's number, as in shells.
const SIGNALLED: i32 = 128;

/// Shows the chosen cluster, or all clusters if none is chosen.
pub(crate) fn status(chosen: Option<&str>) -> Result<()> {
    if chosen.is_some() {
        return look_around(&State::find(chosen)?);
    }
    let all = State::all();
    if all.is_empty() {
        say("no cluster is running");
    }
    for (state, owner) in &all {
        say(&format!("cluster {}: {}; owner process {owner}", state.id, state.made_of));
        match state.ready {
            Some(_) => look_around(state)?,
            None => say("  starting"),
        }
    }
    Ok(())
}

/// Prints how to access the cluster, as commands that can be copied.
pub(crate) fn look_around(state: &State) -> Result<()> {
    let ready = state.ready()?;
    let lines = [
        ("kubectl", "cargo xtask cluster kubectl get pods --all-namespaces --output wide".to_owned()),
        ("  direct", format!("ip netns exec {} kubectl --kubeconfig {} …", ready.lan, ready.kubeconfig.display())),
        ("a Node", "cargo xtask cluster exec node-1 ip addr".to_owned()),
        ("the client", "cargo xtask cluster exec client curl --silent http://NODE-IP:NODE-PORT/".to_owned()),
        ("  direct", format!("ip netns exec {} …", ready.client)),
        ("remove", "cargo xtask cluster down".to_owned()),
    ];
    for (what, command) in &lines {
        say(&format!("  {what:<11} {command}"));
    }
    for node in &ready.nodes {
        let logs = node.directory.join("log");
        say(&format!("  {:<11} {}, network {}, logs in {}", node.name, node.address, node.netns, logs.display()));
    }
    Ok(())
}

/// Runs kubectl in the namespace of the API server.
pub(crate) fn kubectl(chosen: Option<&str>, arguments: &[String]) -> Result<ExitCode> {
    let state = State::find(chosen)?;
    let ready = state.ready()?;
    let mut command = netns::command_in(&ready.lan, "kubectl")?;
    command.args(arguments).env("KUBECONFIG", &ready.kubeconfig);
    command.env("KUBECACHEDIR", ready.kubeconfig.with_file_name("kubectl"));
    command.status().context("run kubectl").map(code)
}

/// Runs a command inside a Node or in the client's network namespace.
pub(crate) fn exec(chosen: Option<&str>, machine: &str, words: &[String]) -> Result<ExitCode> {
    let state = State::find(chosen)?;
    let ready = state.ready()?;
    let shell = ["sh".to_owned()];
    let (program, arguments) = words.split_first().unwrap_or((&shell[0], &[]));
    if machine == "client" {
        let mut command = netns::command_in(&ready.client, program)?;
        return command.args(arguments).status().with_context(|| format!("run {program}")).map(code);
    }
    let node = ready.nodes.iter().find(|node| node.name == machine);
    let node = node.with_context(|| format!("unknown machine {machine}: use client or the name of a Node"))?;
    let mut command = Command::new(program);
    command.args(arguments);
    node.space()?.run(command).map(code)
}

fn code(status: ExitStatus) -> ExitCode {
    let number = status.code().unwrap_or_else(|| SIGNALLED + status.signal().unwrap_or_default());
    u8::try_from(number).map_or(ExitCode::FAILURE, ExitCode::from)
}

// SPDX-License-Identifier: Apache-2.0
//! Tests that the agent reports each startup error as one sentence with a remedy, and does not panic.

use std::fs;
use std::net::IpAddr;
use std::process::{Command, Output};

use npl_testkit::agent::{Agent, Options};
use npl_testkit::cluster::{PodObject, Port};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::tools;

use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

/// Runs the agent with full privileges until it exits.
fn run(world: &World, arguments: &[&str]) -> Output {
    let options = world.agent_options(&[]);
    let mut command: Command = world.topology.node().command(&options.binary).unwrap();
    command.args(arguments).env_clear().output().unwrap()
}

/// Asserts the exit code, and that standard error has exactly one error line, which contains these words.
fn assert_says(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    let complaint: Vec<&str> = text.lines().filter(|line| line.starts_with("npl-agent: ")).collect();
    assert_eq!(complaint.len(), 1, "{text}");
    for word in words {
        assert!(complaint[0].contains(word), "{word:?} is not in: {text}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn bad_flags_are_usage_errors_with_an_example() {
    let world = World::new();
    let bad = [
        (["--port-range", "61000"], "61000-62000"),
        (["--port-range", "0-100"], "1-65535"),
        (["--protocol-pairing", "both"], "merged"),
        (["--drain", "soon"], "30s"),
        (["--namespaces", "shop,,billing"], "shop,billing"),
        (["--listen", "nowhere"], "127.0.0.1:9911"),
    ];
    for (flag, example) in bad {
        let output = run(&world, &["run", "--node-name", NODE, flag[0], flag[1]]);
        assert_says(&output, 2, &[flag[0], example]);
    }
}

#[test]
fn a_missing_bpffs_and_an_unreadable_kubeconfig_are_reported() {
    let world = World::new();
    let bpffs = world.bpffs.path().to_str().unwrap().to_owned();
    let plain = world.run.file("plain");
    fs::create_dir(&plain).unwrap();
    let output = run(&world, &["run", "--node-name", NODE, "--bpffs", plain.to_str().unwrap()]);
    assert_says(&output, 1, &["not a BPF file system", "mount -t bpf"]);
    let output = run(&world, &["run", "--node-name", NODE, "--bpffs", &bpffs, "--kubeconfig", "/nowhere/config"]);
    assert_says(&output, 1, &["/nowhere/config", "--kubeconfig"]);
}

#[test]
fn a_missing_capability_is_reported() {
    let world = World::new();
    let options = world.agent_options(&[]);
    let mut command = world.topology.node().command("setpriv").unwrap();
    command.args(["--bounding-set", "-bpf,-sys_admin", "--inh-caps", "-all", "--"]).arg(&options.binary);
    command.args(["run", "--node-name", NODE, "--bpffs"]).arg(world.bpffs.path());
    assert_says(&command.output().unwrap(), 1, &["CAP_BPF", "deploy/npl.yaml"]);
}

#[test]
fn missing_permissions_are_reported_with_a_remedy() {
    let world = World::new();
    world.create_node();
    world.cluster.kubectl(&["delete", "clusterrole", "npl-agent"]).unwrap();
    world.wait_until_denied("list", "", "pods");
    let error = Agent::start(world.agent_options(&[])).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("pods/status") && text.contains("deploy/npl.yaml"), "{text}");
}

#[test]
fn the_agent_waits_for_an_api_server_that_is_down() {
    let mut world = World::with_own_plane();
    world.create_node();
    world.own_plane().stop_api_server().unwrap();
    let mut agent = Agent::launch(world.agent_options(&[])).unwrap();
    let log = agent.process().log().to_owned();
    let says_so = || fs::read_to_string(&log).unwrap().contains("API server").then_some(());
    poll::until("the agent to log that it waits", LIMIT, says_so).unwrap();
    assert!(agent.process().exit_status().is_none());
    world.own_plane().start_api_server().unwrap();
    agent.wait_until_ready().unwrap();
}

#[test]
fn the_agent_waits_for_a_missing_node_object_and_logs_the_wait() {
    let world = World::new();
    let mut agent = Agent::launch(world.agent_options(&[])).unwrap();
    let log = agent.process().log().to_owned();
    let says_so = || fs::read_to_string(&log).unwrap().contains("--node-name").then_some(());
    poll::until("the agent to log the missing Node", LIMIT, says_so).unwrap();
    world.create_node();
    agent.wait_until_ready().unwrap();
}

#[test]
fn a_second_agent_is_refused_and_a_bad_port_range_is_logged() {
    let mut world = World::with_agent(&["--port-range", "32000-33000", "--quarantine", "29s"]);
    let log = fs::read_to_string(world.agent().process().log()).unwrap();
    assert!(log.contains("ephemeral ports") && log.contains("type NodePort"), "{log}");
    assert!(log.contains("--quarantine 29000ms is shorter than the time for which load balancers"), "{log}");
    let bpffs = world.bpffs.path().to_str().unwrap().to_owned();
    let output = run(&world, &["run", "--node-name", NODE, "--bpffs", &bpffs]);
    assert_says(&output, 1, &["another npl-agent runs"]);
}

/// Each reserved node port uses a file descriptor. Container runtimes start processes with a low soft limit of open
/// files, which the agent must raise to the hard limit.
#[test]
fn node_ports_are_reserved_beyond_the_initial_limit_of_open_files() {
    let mut world = World::new();
    world.create_node();
    let wrapper = world.run.file("npl-agent-with-few-files");
    let options = world.agent_options(&[]);
    let script = format!("#!/bin/sh\nulimit -S -n 64\nexec {} \"$@\"\n", options.binary.display());
    tools::write_program(&wrapper, &script).unwrap();
    world.agent = Some(Agent::start(Options { binary: wrapper, ..options }).unwrap());
    world.create_service();
    world.enable_service();
    let name = |number: u8| format!("crowd-{number}");
    for number in 1..=40 {
        let pod = PodObject::new(NAMESPACE, &name(number), NODE, "web");
        world.cluster.create_pod(&pod.with_ports(vec![Port::new("web", POD_PORT, Protocol::Tcp)])).unwrap();
        let ip = IpAddr::from([10, 99, 0, number]);
        world.cluster.set_pod_running(NAMESPACE, &name(number), world.node_ip(), &[ip]).unwrap();
    }
    for number in 1..=40 {
        world.wait_for_entries(&name(number), 2);
    }
    assert!(world.agent().process().exit_status().is_none());
    assert!(!world.agent_log().contains("Too many open files"), "{}", world.agent_log());
}

// SPDX-License-Identifier: Apache-2.0
//! Tests that the doctor's findings about the agent, its programs and its environment agree with the traffic. Most
//! tests break one part, compare the finding with requests of clients, and repair the part.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use npl_common::names::{self, SOCKET_PROGRAMS};
use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::foreign::{DROPS, ENDS_THE_CHAIN, Foreign, Place};
use npl_testkit::topology::MASQUERADE;
use npl_testkit::traffic;
use npl_testkit::{poll, tools};

use crate::doctor::{assert_ok, assert_reported, finding};
use crate::world::{LIMIT, POD_PORT, World, manifest};

/// Creates a world with an agent, the enabled Service and the Pod `web-0`, which is served.
fn served_world(flags: &[&str]) -> World {
    let mut world = World::with_agent(flags);
    world.serve(&["web-0"]);
    world
}

/// Asserts that the Pod answers no request.
#[track_caller]
fn assert_lost(world: &World, entries: &[Entry]) {
    for entry in entries {
        let outcome = traffic::request(&world.topology.client().netns, entry.protocol, entry.address(), "who?");
        assert!(outcome.is_err(), "{} is answered: {outcome:?}", entry.address());
    }
}

/// Waits until the doctor's check `key` has this state.
#[track_caller]
fn wait_for_state(world: &World, key: &str, state: &str) {
    let mut last = None;
    let has_state = || {
        let found = finding(world, key);
        let is_it = found.state == state;
        last = Some((found.state, found.found));
        is_it.then_some(())
    };
    let waited = poll::until(&format!("the state {state} of the check {key}"), LIMIT, has_state);
    assert!(waited.is_ok(), "{waited:?}: {last:?}");
}

#[test]
fn doctor_reports_a_program_ahead_of_npls_while_requests_are_lost() {
    let world = served_world(&[]);
    let entries = world.wait_for_entries("web-0", 2);
    let uplink = &world.topology.client().uplink;
    for verdict in [DROPS, ENDS_THE_CHAIN] {
        let hooks = [aya::programs::TcAttachType::Ingress];
        let foreign = Foreign::attach(&world.run, "foreign", uplink, verdict, Place::Ahead, &hooks).unwrap();
        assert_reported(&world, "program_order", "failed", "behind NPL's");
        assert_lost(&world, &entries);
        drop(foreign);
        assert_ok(&world, "program_order", "no program of other software");
        world.assert_served("web-0");
    }
}

/// Returns the pins of the links that attach the programs to devices and cgroups.
fn links(world: &World) -> Vec<std::path::PathBuf> {
    let folder = world.pins().join(names::LINK_DIR);
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Each program is necessary: without the ingress program, no request reaches the Pod; without the egress program, the
/// replies have the Pod's address as source, and the client's kernel rejects them.
#[test]
fn doctor_reports_programs_that_are_detached_while_requests_are_lost() {
    let mut world = served_world(&[]);
    let entries = world.wait_for_entries("web-0", 2);
    for end in ["_in", "_out"] {
        world.agent().kill().unwrap();
        let of_side = |path: &&std::path::PathBuf| path.to_str().unwrap().ends_with(end);
        let found = links(&world);
        let of_side: Vec<_> = found.iter().filter(of_side).collect();
        assert_eq!(of_side.len(), 1, "{found:?}");
        fs::remove_file(of_side[0]).unwrap();
        assert_reported(&world, "datapath", "failed", "no client outside the Node reaches a node port");
        assert_lost(&world, &entries);
        world.agent().restart().unwrap();
        wait_for_state(&world, "datapath", "ok");
        world.assert_served("web-0");
    }
}

#[test]
fn doctor_reports_an_address_that_is_not_served_until_the_agent_serves_it() {
    let mut world = served_world(&[]);
    let port = world.address("web-0", Protocol::Tcp).port();
    let second = SocketAddr::new("192.0.2.77".parse().unwrap(), port);
    let is_answered = |world: &World| traffic::tcp_request(&world.topology.client().netns, second, "who?").is_ok();
    assert_ok(&world, "addresses", "on all");

    world.agent().kill().unwrap();
    world.topology.node().ip("addr add 192.0.2.77/32 dev eth0").unwrap();
    assert_reported(&world, "addresses", "warning", "start the agent");
    assert_reported(&world, "agent", "warning", "are not applied");
    assert!(!is_answered(&world), "an address is served although doctor reports that it is not");
    world.assert_served("web-0");

    world.agent().restart().unwrap();
    wait_for_state(&world, "addresses", "ok");
    assert!(is_answered(&world), "an address is not served although doctor reports no problem");
    assert_ok(&world, "agent", "running");
}

/// A connection of a client through a mapping, and the Pod's end of the connection.
struct Idle {
    client: TcpStream,
    pod: TcpStream,
}

impl Idle {
    fn open(world: &World, listener: &TcpListener, server: SocketAddr) -> Self {
        let client = traffic::tcp_connect(&world.topology.client().netns, server).unwrap();
        let (pod, _) = listener.accept().unwrap();
        Self { client, pod }
    }

    /// Removes the entries of kernel conntrack, and sends data from the Pod. Returns whether the client receives the
    /// data.
    fn survives_lost_conntrack(mut self, world: &World) -> bool {
        world.topology.node().forget_connections().unwrap();
        self.pod.write_all(b"!").unwrap();
        self.client.read_exact(&mut [0]).is_ok()
    }
}

#[test]
fn doctor_reports_a_missing_guard_while_idle_connections_are_masqueraded() {
    let mut world = World::new();
    world.topology.node().nft(MASQUERADE).unwrap();
    world.create_node();
    world.start_agent(&[]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    // The test itself is the Pod's server, because the Pod must send first.
    world.servers.clear();
    let listener = world.topology.pods()[0].netns.run(|| TcpListener::bind(("0.0.0.0", POD_PORT)).unwrap()).unwrap();
    wait_for_state(&world, "nft_guard", "ok");
    assert!(Idle::open(&world, &listener, server).survives_lost_conntrack(&world), "the guard has no effect");

    world.agent().kill().unwrap();
    world.topology.node().nft("delete table inet npl").unwrap();
    assert_reported(&world, "nft_guard", "warning", "check the flag --nft-guard");
    let idle = Idle::open(&world, &listener, server);
    assert!(!idle.survives_lost_conntrack(&world), "doctor reports a missing guard, but the connection survives");

    world.agent().restart().unwrap();
    wait_for_state(&world, "nft_guard", "ok");
    assert!(Idle::open(&world, &listener, server).survives_lost_conntrack(&world), "the guard has no effect");
}

#[test]
fn doctor_reports_an_unreachable_api_server_while_changes_are_not_applied() {
    let mut world = World::behind_proxy(&[]);
    world.serve(&["web-0"]);
    assert_ok(&world, "api_server", "receives changes");
    world.proxy().close();
    wait_for_state(&world, "api_server", "warning");
    world.create_pod("web-1");
    wait_for_state(&world, "api_server", "failed");
    world.assert_served("web-0");
    world.proxy().open();
    wait_for_state(&world, "api_server", "ok");
    world.assert_served("web-1");
}

#[test]
fn doctor_reports_local_clients_that_are_not_served() {
    let (mut world, cgroup) = World::with_local_clients(&[]);
    let server = world.address("web-0", Protocol::Tcp);
    let is_answered = |world: &World| {
        cgroup.run(|| traffic::request(world.topology.node(), Protocol::Tcp, server, "who?")).unwrap().is_ok()
    };
    assert_ok(&world, "local_clients", "served by");
    assert!(is_answered(&world));

    world.agent().kill().unwrap();
    let of_sockets = |path: &std::path::PathBuf| {
        SOCKET_PROGRAMS.iter().any(|program| path.to_str().unwrap().ends_with(program.hook))
    };
    for link in links(&world).iter().filter(|path| of_sockets(path)) {
        fs::remove_file(link).unwrap();
    }
    assert_reported(&world, "local_clients", "warning", "all other clients can");
    assert!(!is_answered(&world), "a local client is served although doctor reports that it is not");
    world.assert_served("web-0");

    world.agent().restart().unwrap();
    wait_for_state(&world, "local_clients", "ok");
    assert!(is_answered(&world), "local clients are not served although doctor reports no problem");
}

#[test]
fn doctor_reports_an_agent_that_no_admission_policy_confines_while_requests_are_answered() {
    let mut world = served_world(&[]);
    world.agent().restart().unwrap();
    wait_for_state(&world, "admission_policy", "warning");
    world.assert_served("web-0");
    world.cluster.kubectl(&["apply", "--filename", manifest().to_str().unwrap()]).unwrap();
    world.agent().restart().unwrap();
    wait_for_state(&world, "admission_policy", "ok");
    world.assert_served("web-0");
}

/// Returns the command that runs a subcommand of the agent with all capabilities of root except `capabilities`. Each
/// name in this list has a leading `-`.
fn without(world: &World, capabilities: &str, arguments: &[&str]) -> Command {
    let options = world.agent_options(&[]);
    let mut command = world.topology.node().command("setpriv").unwrap();
    command.args(["--bounding-set", capabilities, "--inh-caps", "-all", "--"]).arg(&options.binary);
    command.args(arguments).arg("--bpffs").arg(&options.bpffs);
    command.env("NPL_RUNTIME_DIR", &options.runtime_dir);
    command
}

/// Without these capabilities, no agent can serve a Pod, so the test compares the findings with the start of an agent
/// instead of requests: an agent refuses to start without a capability that doctor reports as missing.
#[test]
fn doctor_reports_a_missing_capability_and_a_missing_bpffs_without_which_no_agent_starts() {
    let world = World::new();
    for (dropped, key) in [("-bpf,-sys_admin", "cap_bpf"), ("-net_admin", "cap_net_admin")] {
        let output = without(&world, dropped, &["doctor", "--output", "json"]).output().unwrap();
        let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let state = all.as_array().unwrap().iter().find(|row| row["key"] == key).unwrap()["state"].clone();
        assert_eq!(state, "failed", "{key}");
        assert_ok(&world, key, "held");
        let refused = without(&world, dropped, &["run", "--node-name", "node-1"]).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{}", tools::show(&without(&world, dropped, &[])));
        let reason = format!("missing capability {}", key.to_uppercase());
        let printed = [refused.stdout, refused.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        assert!(printed.contains(&reason), "{reason:?} is not in {printed}");
    }
    let mut world = world;
    world.create_node();
    let plain = world.run.file("plain");
    fs::create_dir(&plain).unwrap();
    let options = world.agent_options(&[]);
    let mut doctor = options.netns.command(&options.binary).unwrap();
    let output = doctor.args(["doctor", "--output", "json", "--bpffs"]).arg(&plain).output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(all.as_array().unwrap().iter().find(|row| row["key"] == "bpffs").unwrap()["state"], "failed");
    assert_eq!(output.status.code(), Some(1));
    assert_ok(&world, "bpffs", "mounted at");
    world.start_agent(&[]);
    world.serve(&["web-0"]);
}

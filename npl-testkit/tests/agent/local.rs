// SPDX-License-Identifier: Apache-2.0
//! Tests clients on the Node itself. The agent has only the privileges of `deploy/npl.yaml`.

use std::fs;
use std::path::PathBuf;

use npl_common::names::{self, SOCKET_PROGRAMS};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::echo::{Answer, Protocol};
use npl_testkit::{poll, traffic};

use crate::world::{LIMIT, World};

fn ask(world: &World, cgroup: &ClientCgroup, protocol: Protocol) -> anyhow::Result<Answer> {
    let server = world.address("web-0", protocol);
    cgroup.run(|| traffic::request(world.topology.node(), protocol, server, "who are you?"))?
}

#[test]
fn local_clients_are_served_with_and_without_a_running_agent() {
    let (mut world, cgroup) = World::with_local_clients(&[]);
    let options = world.agent_options(&[]);
    for _ in ["with the agent", "without it"] {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            assert_eq!(ask(&world, &cgroup, protocol).unwrap().pod, "web-0");
        }
        let status = options.command_json("status").unwrap();
        let hooks: Vec<_> = SOCKET_PROGRAMS.iter().map(|program| program.hook).collect();
        assert_eq!(*status.pointer("/socketHooks").unwrap(), serde_json::json!(hooks), "{status}");
        world.agent().kill().unwrap();
    }
    options.command(&["cleanup"]).unwrap();
    let is_refused = || ask(&world, &cgroup, Protocol::Tcp).is_err().then_some(());
    poll::until("the detachment of the programs", LIMIT, is_refused).unwrap();
}

/// The programs may be missing from the cgroup because an administrator has detached them, or because the cgroup was
/// recreated. The agent must attach them again at its next resync.
#[test]
fn detached_cgroup_programs_are_reattached_at_the_next_resync() {
    let (mut world, cgroup) = World::with_local_clients(&["--resync", "1s"]);
    let links = world.pins().join(names::LINK_DIR);
    let of_sockets = || {
        let all = fs::read_dir(&links).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|pin| SOCKET_PROGRAMS.iter().any(|program| pin.to_str().unwrap().ends_with(program.hook))).collect()
    };
    let before: Vec<PathBuf> = of_sockets();
    assert_eq!(before.len(), SOCKET_PROGRAMS.len());
    for pin in &before {
        fs::remove_file(pin).unwrap();
    }
    poll::until("the programs to be attached again", LIMIT, || (of_sockets().len() == before.len()).then_some(()))
        .unwrap();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        assert_eq!(ask(&world, &cgroup, protocol).unwrap().pod, "web-0");
    }
    assert_eq!(
        world
            .agent_log()
            .matches("the local clients that --cgroup and --local-clients select can connect to node ports")
            .count(),
        1
    );
}

#[test]
fn without_a_cgroup_remote_clients_are_served_and_one_warning_is_logged() {
    let mut world = World::with_agent(&["--cgroup", "/proc", "--resync", "1s"]);
    world.serve(&["web-0"]);
    let log = fs::read_to_string(world.agent().process().log()).unwrap();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("cannot connect to node ports")).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let (warning, expected) = (warnings[0], "/proc is not in a cgroup v2 hierarchy");
    assert!(warning.contains(expected) && warning.contains("--cgroup"), "{warning}");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("not served: see --cgroup"), "{status}");
}

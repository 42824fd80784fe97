// SPDX-License-Identifier: Apache-2.0
//! Tests the agent as a Pod of the cluster: its readiness, capabilities, init container and replacement.

use std::fs;
use std::process::Command;

use npl_common::names::{PROGRAMS, SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS};
use npl_testkit::cluster::timeout_option;
use npl_testkit::poll;

use crate::clients;
use crate::traffic;
use crate::world::{AGENT_NAMESPACE, LIMIT, Pod, World};

/// The bit mask of the capabilities `CAP_NET_ADMIN` (bit 12) and `CAP_BPF` (bit 39), as `/proc` shows it.
const CAPABILITIES: &str = "0000008000001000";

/// Returns the agents' Pods that are not terminating.
pub(crate) fn all(world: &World) -> Vec<Pod> {
    world.pods(AGENT_NAMESPACE, "app.kubernetes.io/component=agent")
}

/// Returns the agent's Pod on a Node.
pub(crate) fn on(world: &World, node: &str) -> Pod {
    all(world).into_iter().find(|pod| pod.node == node).unwrap()
}

/// Returns the ID of a Pod's process with this program.
pub(crate) fn process_of(world: &World, pod: &Pod, program: &str) -> u32 {
    let processes = world.cluster.node(&pod.node).unwrap().pod_processes(&pod.uid).unwrap();
    let is_program =
        |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == program);
    processes.into_iter().find(is_program).unwrap()
}

pub(crate) fn the_agent_is_ready_on_every_node(world: &mut World) {
    let is_ready_on_both = || {
        let agents = all(world);
        let mut nodes: Vec<&str> = agents.iter().filter(|pod| pod.is_ready).map(|pod| pod.node.as_str()).collect();
        nodes.sort_unstable();
        (nodes == ["node-1", "node-2"]).then_some(())
    };
    poll::until("one ready agent on each Node", LIMIT, is_ready_on_both).unwrap();
}

pub(crate) fn the_agent_has_two_capabilities_and_no_more(world: &mut World) {
    for pod in all(world) {
        let agent = process_of(world, &pod, "npl-agent");
        let status = fs::read_to_string(format!("/proc/{agent}/status")).unwrap();
        let value = |field: &str| status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default().trim();
        for field in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(value(field), CAPABILITIES, "{field} of the agent on {}", pod.node);
        }
        assert_eq!(value("CapAmb:").trim_start_matches('0'), "");
        assert_eq!((value("NoNewPrivs:"), value("Seccomp:")), ("1", "2"));
        assert!(value("Uid:").split_whitespace().all(|id| id == "0"), "{}", value("Uid:"));
        let root = fs::read_to_string(format!("/proc/{agent}/mountinfo")).unwrap();
        let root = root.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap();
        assert!(root.split(' ').nth(5).unwrap().split(',').any(|option| option == "ro"), "{root}");
    }
}

/// The init container, which has `CAP_PERFMON` in addition to the agent's capabilities, loads the programs.
pub(crate) fn the_programs_are_loaded_before_the_agent_starts(world: &mut World) {
    for node in world.cluster.nodes() {
        let mut command = Command::new("find");
        command.args(["/sys/fs/bpf/npl", "-path", "*/programs/*", "-name", "npl_*"]);
        let found = node.space().output(command).unwrap();
        let programs: Vec<&str> = found.lines().collect();
        assert_eq!(programs.len(), PROGRAMS.len() + SLOW_PATH_PROGRAMS.len() + SOCKET_PROGRAMS.len() + 1, "{found}");
        assert!(
            programs.iter().all(|pin| pin.contains("_unmitigated/")),
            "some programs have speculation barriers: {found}"
        );
    }
    // The init container does not use the API server, so it must have no service account token.
    let mounts = "jsonpath={.items[*].spec.initContainers[*].volumeMounts[*].mountPath}";
    let mounts = world.kubectl(&["get", "pods", "--namespace", AGENT_NAMESPACE, "--output", mounts]);
    assert_eq!(mounts, "/bpf/npl /bpf/npl");
}

pub(crate) fn deleted_agents_do_not_interrupt_service(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let before = all(world);
    let ports: Vec<_> = shop.keys().map(|pod| world.entries(pod, traffic::PORTS)).collect();
    world.kubectl(&["delete", "pods", "--namespace", AGENT_NAMESPACE, "--all", timeout_option()]);
    let outside = clients::outside(world);
    // While no agent runs, the kernel must still translate the mappings.
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }
    let is_new = |pod: &Pod| pod.is_ready && before.iter().all(|old| old.uid != pod.uid);
    let replaced = || {
        let agents = all(world);
        (agents.len() == before.len() && agents.iter().all(is_new)).then_some(())
    };
    let ((), took) = poll::until("new agents to become ready", LIMIT, replaced).unwrap();
    println!("    the new agents were ready {:.1} s after the deletion of the old ones", took.as_secs_f32());
    let kept: Vec<_> = shop.keys().map(|pod| world.entries(pod, traffic::PORTS)).collect();
    assert_eq!(kept, ports, "the new agents must keep every node port");
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }
}

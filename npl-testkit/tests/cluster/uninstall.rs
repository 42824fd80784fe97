// SPDX-License-Identifier: Apache-2.0
//! Tests that an uninstallation with the commands of README.md leaves no kernel state of NPL.

use std::collections::BTreeMap;
use std::process::Command;

use npl_testkit::cluster::{Entry, timeout_option};
use npl_testkit::echo::Protocol;
use npl_testkit::tools;
use npl_testkit::traffic;

use crate::clients;
use crate::traffic::PORTS;
use crate::world::{AGENT_NAMESPACE, NAMESPACE, Pod, World};

/// Commands that show kernel state of NPL on a Node, and a word in their output if state exists. The first command
/// shows pins, on which the links of device programs depend; the second command shows socket programs.
const TRACES: [(&str, &str); 2] = [
    ("find /sys/fs/bpf -name 'npl*'", "npl_mapping_v4"),
    ("find /sys/fs/cgroup -maxdepth 1 -type d -exec bpftool cgroup show {} ';' 2>&1 || true", "npl_connect"),
];

pub(crate) fn uninstalling_removes_everything_and_does_not_affect_workloads(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let entries: Vec<_> = shop.keys().flat_map(|pod| world.entries(pod, PORTS)).collect();
    let before = traces(world);
    assert!(
        before.iter().all(|(is_there, _)| *is_there),
        "there must be kernel state before the uninstallation: {before:?}"
    );

    // The drain is shortened from the default of 30 s, so that the test takes less time.
    let retire = ["set", "env", "daemonset/npl-agent", "NPL_RETIRE=true", "NPL_DRAIN=2s"];
    world.kubectl(&[&retire[..], &["--namespace", AGENT_NAMESPACE]].concat());
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
    let manifest = tools::repository_file("deploy/npl.yaml");
    world.kubectl(&["delete", "--filename", manifest.to_str().unwrap(), timeout_option()]);
    assert_removed(world, &shop, entries);
}

/// Asserts that no kernel state, no annotation and no working node port is left, and that the Pods of the shop are the
/// same as before and answer requests.
pub(crate) fn assert_removed(world: &World, shop: &BTreeMap<String, Pod>, entries: Vec<Entry>) {
    let after = traces(world);
    assert!(after.iter().all(|(is_there, _)| !is_there), "{after:?}");
    let mut left = world.pods(NAMESPACE, "app=web");
    assert!(left.iter().all(|pod| pod.annotation.is_none()), "{left:?}");
    for pod in &mut left {
        pod.annotation.clone_from(&shop[&pod.name].annotation);
        // A late probe makes a Pod unready temporarily; the requests below show that the Pod works.
        pod.is_ready = shop[&pod.name].is_ready;
        assert_eq!(*pod, shop[&pod.name], "the Pods of the shop must not be replaced");
    }
    assert_eq!(left.len(), shop.len());
    let outside = clients::outside(world);
    for entry in entries {
        let answer = outside.ask(entry.protocol, entry.address());
        assert!(answer.is_err(), "{} still responds: {answer:?}", entry.address());
    }
    for pod in &left {
        let node = world.cluster.node(&pod.node).unwrap();
        for ip in &pod.ips {
            let answer = traffic::request(node.netns(), Protocol::Tcp, (*ip, 8080).into(), "who?").unwrap();
            assert_eq!(answer.pod, pod.name);
        }
    }
}

/// The agents are deleted without being retired; then the DaemonSet of `deploy/cleanup.yaml` removes their kernel
/// state.
pub(crate) fn the_cleanup_daemon_set_removes_what_deleted_agents_have_left(world: &mut World) {
    let manifest = tools::repository_file("deploy/npl.yaml");
    let cleanup = tools::repository_file("deploy/cleanup.yaml");
    world.kubectl(&["delete", "--filename", manifest.to_str().unwrap(), timeout_option()]);
    let before = traces(world);
    assert!(before.iter().all(|(is_there, _)| *is_there), "deleted agents must leave kernel state: {before:?}");
    world.kubectl(&["apply", "--filename", cleanup.to_str().unwrap()]);
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-cleanup");
    let after = traces(world);
    assert!(after.iter().all(|(is_there, _)| !is_there), "{after:?}");
    world.kubectl(&["delete", "--filename", cleanup.to_str().unwrap(), timeout_option()]);

    // The agents are installed again, because the next test uninstalls running agents.
    world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
    world.wait_for_shop(4);
}

/// Returns the output of each command on each Node, and whether the output shows kernel state of NPL.
fn traces(world: &World) -> Vec<(bool, String)> {
    let nodes = world.cluster.nodes().iter();
    let seen = nodes.flat_map(|node| {
        TRACES.map(|(words, mark)| {
            let mut command = Command::new("sh");
            command.args(["-c", words]);
            let text = node.space().output(command).unwrap();
            (text.contains(mark), text)
        })
    });
    seen.collect()
}

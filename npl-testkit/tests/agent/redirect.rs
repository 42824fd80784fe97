// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding redirect` and `offload`. The agent has only the privileges of `deploy/npl.yaml`.

use aya::programs::TcAttachType;
use npl_testkit::echo::Protocol;
use npl_testkit::foreign::{Foreign, HANDS_ON, Place};
use npl_testkit::topology::Device;
use npl_testkit::{poll, traffic};

use crate::devices::place;
use crate::world::{LIMIT, World};

/// A FORWARD policy that drops every packet, so that only redirected packets reach the Pod.
pub(crate) const NOTHING_IS_FORWARDED: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
  }
}";

pub(crate) fn wait_for_redirected_pods(world: &World, count: usize) {
    let status = || world.agent_options(&[]).command_json("status").unwrap();
    let is_reached = || (status().get("redirectedPods").unwrap().as_array().unwrap().len() == count).then_some(());
    poll::until(&format!("{count} redirected Pods"), LIMIT, is_reached).unwrap();
}

fn world_with(flags: &[&str]) -> World {
    let world = World::with_agent(flags);
    world.create_service();
    world.enable_service();
    world
}

#[test]
fn new_pods_are_redirected_and_a_restarted_agent_continues() {
    let flags = ["--forwarding", "redirect"];
    let mut world = world_with(&flags);
    world.create_pod("web-0");
    world.assert_served("web-0");
    wait_for_redirected_pods(&world, 1);
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_served("web-0");
    world.create_pod("web-1");
    wait_for_redirected_pods(&world, 2);
    world.assert_served("web-1");

    world.agent().kill().unwrap();
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("packets are redirected (Pod addresses: 2, devices: 2)"), "{status}");
    world.delete_pod("web-1");
    world.start_agent(&flags);
    wait_for_redirected_pods(&world, 1);
    world.assert_served("web-0");
}

/// Creates a Node with a Pod to which packets are redirected. Returns the Node, and the Node's end of the Pod's veth
/// pair.
fn world_with_redirected_pod(flags: &[&str]) -> (World, Device) {
    let mut world = world_with(flags);
    world.create_pod("web-0");
    wait_for_redirected_pods(&world, 1);
    let device = world.topology.pods()[0].host_device.clone();
    (world, device)
}

fn tc(device: &Device, line: &str) {
    device.netns().tc(&line.replace("DEVICE", device.name())).unwrap();
}

/// The kernel notifies the agent when the rate limit (a qdisc) is added or removed, so the agent reacts long before the
/// next resync.
#[test]
fn a_pod_device_with_a_rate_limit_uses_the_stack_until_the_limit_is_removed() {
    let (mut world, device) = world_with_redirected_pod(&["--forwarding", "redirect", "--resync", "10m"]);
    tc(&device, "qdisc add dev DEVICE root tbf rate 1mbit burst 32kbit latency 400ms");
    wait_for_redirected_pods(&world, 0);
    world.wait_for_log("a qdisc of its device shapes or polices traffic");
    world.assert_served("web-0");
    tc(&device, "qdisc del dev DEVICE root");
    wait_for_redirected_pods(&world, 1);
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_served("web-0");
}

/// The kernel notifies the agent when a third-party TC filter is added or removed, so the agent reacts long before the
/// next resync.
#[test]
fn a_pod_device_with_a_third_party_filter_uses_the_stack_until_the_filter_is_removed() {
    let (mut world, device) = world_with_redirected_pod(&["--forwarding", "redirect", "--resync", "10m"]);
    tc(&device, "qdisc add dev DEVICE clsact");
    for side in ["ingress", "egress"] {
        tc(&device, &format!("filter add dev DEVICE {side} protocol all prio 7 u32 match u32 0 0 flowid 1:1"));
        wait_for_redirected_pods(&world, 0);
        world.wait_for_log("its device has programs or filters of other software");
        world.assert_served("web-0");
        tc(&device, &format!("filter del dev DEVICE {side} protocol all prio 7 u32"));
        wait_for_redirected_pods(&world, 1);
    }
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_served("web-0");
}

/// The kernel sends no notification when a BPF link is added or removed, so the agent detects a third-party program
/// on a Pod's device only at the next resync.
#[test]
fn a_pod_device_with_a_third_party_program_uses_the_stack_until_the_program_is_removed() {
    let (world, device) = world_with_redirected_pod(&["--forwarding", "redirect", "--resync", "1s"]);
    for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
        let program = Foreign::attach(&world.run, "other", &device, HANDS_ON, Place::Behind, &[hook]).unwrap();
        wait_for_redirected_pods(&world, 0);
        world.assert_served("web-0");
        drop(program);
        wait_for_redirected_pods(&world, 1);
    }
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_served("web-0");
}

/// The test adds a rule chain of Calico while the agent redirects. The agent must then forward through the stack, until
/// the test restarts the agent with `--ignore-network-policy`.
#[test]
fn redirect_is_refused_beside_a_policy_engine_unless_network_policy_is_ignored() {
    let flags = ["--forwarding", "redirect", "--resync", "1s"];
    let (mut world, _) = world_with_redirected_pod(&flags);
    world.wait_for_metric("npl_redirect_refused 0");
    world.topology.node().nft("table ip filter {\n chain cali-FORWARD {\n }\n}").unwrap();
    wait_for_redirected_pods(&world, 0);
    world.wait_for_log("--forwarding redirect is refused on this Node");
    world.wait_for_metric("npl_redirect_refused 1");
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("--forwarding redirect is refused"), "{status}");
    assert!(status.contains("Calico (policy engine)"), "{status}");
    let doctor = world.agent_options(&[]).command_json("doctor").unwrap();
    let finding = doctor.as_array().unwrap().iter().find(|finding| finding["key"] == "policy_engine").unwrap();
    assert_eq!(finding["state"], "warning", "{finding}");

    world.agent().kill().unwrap();
    world.start_agent(&["--forwarding", "redirect", "--ignore-network-policy"]);
    wait_for_redirected_pods(&world, 1);
    world.wait_for_metric("npl_redirect_refused 0");
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_served("web-0");
}

#[test]
fn an_agent_without_redirect_returns_packets_to_the_stack() {
    let mut world = world_with(&["--forwarding", "redirect", "--attach", "auto"]);
    world.create_pod("web-0");
    wait_for_redirected_pods(&world, 1);
    assert_eq!(place(&world), ["tc", "--forwarding redirect and offload need TC"]);
    world.agent().kill().unwrap();
    world.start_agent(&[]);
    wait_for_redirected_pods(&world, 0);
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command_json("status").unwrap();
    let devices = status.get("devices").unwrap().as_array().unwrap();
    assert_eq!(devices.len(), 1, "only the uplink must have programs: {status}");
}

/// Unless `nf_conntrack_tcp_be_liberal` is set, kernel conntrack would classify packets of offloaded flows as invalid,
/// so the agent offloads no flow. The agent logs the reason and checks the sysctl again at each resync.
#[test]
fn flows_are_offloaded_once_kernel_conntrack_is_liberal() {
    let mut world = World::new();
    world.topology.node().set_liberal_tracking(false).unwrap();
    world.create_node();
    world.start_agent(&["--forwarding", "offload", "--resync", "1s"]);
    world.serve(&["web-0"]);
    world.wait_for_log("nf_conntrack_tcp_be_liberal=1");
    wait_for_redirected_pods(&world, 0);
    world.topology.node().set_liberal_tracking(true).unwrap();
    wait_for_redirected_pods(&world, 1);
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("established flows are offloaded (Pod addresses: 1, devices: 1)"), "{status}");
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    let server = world.address("web-0", Protocol::Tcp);
    assert!(
        traffic::tcp_connect(&world.topology.client().netns, server).is_err(),
        "a new connection must not bypass the FORWARD chain"
    );
}

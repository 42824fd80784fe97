// SPDX-License-Identifier: Apache-2.0
//! `--forwarding redirect` and `offload`, by the agent with its own rights.

use npl_testkit::echo::Protocol;
use npl_testkit::{poll, traffic};

use crate::world::{LIMIT, World};

/// A Node that forwards nothing: only what is redirected gets through.
const NOTHING_IS_FORWARDED: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
  }
}";

fn wait_for_redirected_pods(world: &World, count: usize) {
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
fn pods_that_come_and_go_are_redirected_to_and_a_restarted_agent_goes_on() {
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
    assert!(status.contains("redirected to 2 Pod addresses by 2 devices"), "{status}");
    world.delete_pod("web-1");
    world.start_agent(&flags);
    wait_for_redirected_pods(&world, 1);
    world.assert_served("web-0");
}

#[test]
fn an_agent_that_is_told_otherwise_gives_packets_back_to_the_stack() {
    let mut world = world_with(&["--forwarding", "redirect"]);
    world.create_pod("web-0");
    wait_for_redirected_pods(&world, 1);
    world.agent().kill().unwrap();
    world.start_agent(&[]);
    wait_for_redirected_pods(&world, 0);
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command_json("status").unwrap();
    let devices = status.get("devices").unwrap().as_array().unwrap();
    assert_eq!(devices.len(), 1, "the uplink alone carries programs: {status}");
}

/// What connection tracking would call invalid is not offloaded; the agent says so, and looks again.
#[test]
fn flows_are_offloaded_once_connection_tracking_is_liberal() {
    let mut world = World::new();
    world.topology.node().set_liberal_tracking(false).unwrap();
    world.create_node();
    world.start_agent(&["--forwarding", "offload", "--resync", "1s"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    world.wait_for_log("nf_conntrack_tcp_be_liberal=1");
    wait_for_redirected_pods(&world, 0);
    world.topology.node().set_liberal_tracking(true).unwrap();
    wait_for_redirected_pods(&world, 1);
    world.assert_served("web-0");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("offloaded once established, to 1 Pod addresses by 1 devices"), "{status}");
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    let server = world.address("web-0", Protocol::Tcp);
    assert!(traffic::tcp_connect(&world.topology.client().netns, server).is_err(), "the host decides");
}

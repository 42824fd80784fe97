// SPDX-License-Identifier: Apache-2.0
//! Devices and addresses that change while the agent runs.

use std::net::SocketAddr;

use npl_testkit::echo::Protocol;
use npl_testkit::{poll, traffic};

use crate::world::{LIMIT, World};

#[test]
fn an_address_that_is_added_later_reaches_the_pods_and_one_that_goes_does_not() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let uplink = world.topology.client().uplink.name().to_owned();
    let second = SocketAddr::new("192.0.2.77".parse().unwrap(), world.address("web-0", Protocol::Tcp).port());
    let client = world.topology.client().netns.clone();
    world.topology.node().ip(&format!("addr add 192.0.2.77/32 dev {uplink}")).unwrap();
    let (answer, _) =
        poll::until("an answer by the new address", LIMIT, || traffic::tcp_request(&client, second, "hello").ok())
            .unwrap();
    assert_eq!(answer.pod, "web-0");
    world.topology.node().ip(&format!("addr del 192.0.2.77/32 dev {uplink}")).unwrap();
    let status = || world.agent_options(&[]).command(&["status"]).unwrap();
    poll::until("the address to go", LIMIT, || (!status().contains("192.0.2.77")).then_some(())).unwrap();
    world.assert_served("web-0");
}

#[test]
fn programs_are_on_the_uplink_and_not_on_the_pods_devices() {
    let mut world = World::with_agent(&[]);
    world.create_pod("web-0");
    let status = world.agent_options(&[]).command_json("status").unwrap();
    let devices = status.get("devices").unwrap().as_array().unwrap();
    let names: Vec<&str> = devices.iter().map(|device| device.get("name").unwrap().as_str().unwrap()).collect();
    assert_eq!(names, [world.topology.client().uplink.name()]);
    assert_eq!(devices[0].get("attached").unwrap(), &serde_json::json!(["ingress", "egress"]));
}

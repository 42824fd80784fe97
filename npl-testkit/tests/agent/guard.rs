// SPDX-License-Identifier: Apache-2.0
//! The guard against masquerading, with the agent's own rights.

use npl_testkit::poll;
use npl_testkit::topology::MASQUERADE;
use serde_json::Value;

use crate::world::{LIMIT, World};

fn table(world: &World) -> Option<String> {
    world.topology.node().nft_table("inet npl")
}

#[test]
fn a_node_that_masquerades_its_pods_has_a_guard_until_a_cleanup() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    assert_eq!(table(&world), None, "nobody translates anything");
    let options = world.agent_options(&[]);
    let guarded = || options.command_json("status").unwrap()["guardedEndpoints"].clone();
    assert_eq!(guarded(), Value::Null);
    world.topology.node().nft(MASQUERADE).unwrap();
    let element = format!("{} . 6 . 8080", world.topology.pods()[0].ip());
    let is_guarded = || table(&world).is_some_and(|table| table.contains(&element));
    poll::until("the guard", LIMIT, || is_guarded().then_some(())).unwrap();
    world.wait_for_log("replies are guarded from masquerading");
    assert_eq!(guarded(), 2, "one of TCP and one of UDP");
    let status = options.command(&["status"]).unwrap();
    assert!(status.contains("nftables table inet npl, endpoints: 2"), "{status}");
    world.assert_served("web-0");

    world.agent().kill().unwrap();
    assert!(table(&world).is_some(), "it outlives the agent, as mappings do");
    let removed = options.command(&["cleanup"]).unwrap();
    assert!(removed.contains("removed nftables table inet npl"), "{removed}");
    assert_eq!(table(&world), None);
}

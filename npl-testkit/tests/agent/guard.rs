// SPDX-License-Identifier: Apache-2.0
//! The guard against masquerading, and for replies of Pods with routes of their own, with the agent's own rights.

use npl_testkit::topology::MASQUERADE;
use npl_testkit::{poll, tools};
use serde_json::{Value, json};

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
    world.wait_for_log("exempts replies of mapped endpoints from masquerading");
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

/// As the AWS VPC CNI has it: what carries the mark is routed by the Node's table, ahead of the Pods' rules.
const RULE_OF_MARK: &str = "rule add fwmark 0x80/0x80 lookup main priority 1024";

/// Another mark, of more bits.
const RULE_OF_MARK_V6: &str = "fwmark 0x40/0xc0 lookup main priority 1024";

fn rule_of_pod(world: &World, verb: &str) {
    let pod = world.topology.pods()[0].ip();
    world.topology.node().ip(&format!("rule {verb} from {pod} lookup 100 priority 1536")).unwrap();
}

fn is_marked(world: &World) -> bool {
    let element = format!("{} . 6 . 8080", world.topology.pods()[0].ip());
    table(world).is_some_and(|table| table.contains("ct mark set") && table.contains(&element))
}

#[test]
fn connections_of_a_pod_that_a_rule_routes_apart_are_marked_for_as_long_as_it_does() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let node = world.topology.node().clone();
    node.ip(RULE_OF_MARK).unwrap();
    rule_of_pod(&world, "add");
    poll::until("the mark", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.wait_for_log("marks connections to mappings");
    let shown = table(&world).unwrap();
    assert!(shown.contains("iif \"eth0\"") && !shown.contains("snat"), "nobody masquerades: {shown}");
    let options = world.agent_options(&[]);
    let status = options.command_json("status").unwrap();
    assert_eq!(status["connectionMarks"][0], "IPv4 by eth0: 0x80/0x80");
    assert_eq!(status["guardedEndpoints"], Value::Null);

    // Before a Pod with such an address has a mapping.
    for rule in [&format!("from {} lookup 100 priority 1536", world.topology.pods()[0].addresses.v6), RULE_OF_MARK_V6] {
        let mut add = node.command("ip").unwrap();
        tools::output(add.args(["-6", "rule", "add"]).args(rule.split(' '))).unwrap();
    }
    let marks = || options.command_json("status").unwrap()["connectionMarks"].clone();
    let both = json!(["IPv4 by eth0: 0x80/0x80", "IPv6 by eth0: 0x40/0xc0"]);
    poll::until("the mark of the other family", LIMIT, || (marks() == both).then_some(())).unwrap();

    node.nft(MASQUERADE).unwrap();
    let does_both = || is_marked(&world) && table(&world).is_some_and(|table| table.matches("snat").count() == 2);
    poll::until("the guard against masquerading", LIMIT, || does_both().then_some(())).unwrap();
    for meddling in ["delete table inet npl", "delete chain inet npl requests", "flush chain inet npl requests"] {
        let flush = if meddling.starts_with("delete chain") { "flush chain inet npl requests\n" } else { "" };
        node.nft(&format!("{flush}{meddling}")).unwrap();
        poll::until(meddling, LIMIT, || does_both().then_some(())).unwrap();
    }

    rule_of_pod(&world, "del");
    let mut forget = node.command("ip").unwrap();
    tools::output(forget.args(["-6", "rule", "del", "priority", "1536"])).unwrap();
    let is_bare = || table(&world).is_some_and(|table| !table.contains("ct mark") && table.contains("snat"));
    poll::until("the end of the mark", LIMIT, || is_bare().then_some(())).unwrap();
    node.nft("delete table inet npl_test").unwrap();
    poll::until("the end of the table", LIMIT, || table(&world).is_none().then_some(())).unwrap();

    rule_of_pod(&world, "add");
    poll::until("the mark again", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.agent().kill().unwrap();
    assert!(is_marked(&world), "it outlives the agent, as mappings do");
    let removed = options.command(&["cleanup"]).unwrap();
    assert!(removed.contains("removed nftables table inet npl"), "{removed}");
    assert_eq!(table(&world), None);
}

#[test]
fn an_agent_whose_guard_is_off_marks_nothing_takes_away_what_was_marked_and_says_so() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    world.topology.node().ip(RULE_OF_MARK).unwrap();
    rule_of_pod(&world, "add");
    poll::until("the mark", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.agent().kill().unwrap();
    world.start_agent(&["--resync", "1s", "--nft-guard", "off"]);
    world.wait_for_log("with --nft-guard off no connection is marked");
    poll::until("the end of the mark", LIMIT, || table(&world).is_none().then_some(())).unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! Tests the nftables table that exempts replies from masquerading, and that marks connections if the CNI has policy
//! routes for Pods. The agent has only the privileges of `deploy/npl.yaml`.

use npl_testkit::topology::MASQUERADE;
use npl_testkit::{poll, tools};
use serde_json::{Value, json};

use crate::families::{assert_served, create_dual_stack_pod, world_with_service};
use crate::world::{LIMIT, World};

fn table(world: &World) -> Option<String> {
    world.topology.node().nft_table("inet npl")
}

#[test]
fn a_masquerading_node_has_a_guard_table_until_cleanup() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    assert_eq!(table(&world), None, "there is a guard table although no rule masquerades");
    let options = world.agent_options(&[]);
    let guarded = || options.command_json("status").unwrap()["guardedEndpoints"].clone();
    assert_eq!(guarded(), Value::Null);
    world.topology.node().nft(MASQUERADE).unwrap();
    let element = format!("{} . 6 . 8080", world.topology.pods()[0].ip());
    let is_guarded = || table(&world).is_some_and(|table| table.contains(&element));
    poll::until("the guard table", LIMIT, || is_guarded().then_some(())).unwrap();
    world.wait_for_log("exempts replies of mapped endpoints from masquerading");
    assert_eq!(guarded(), 2, "the guard must contain one TCP and one UDP endpoint");
    let status = options.command(&["status"]).unwrap();
    assert!(
        status.contains("nftables table inet npl: exempts replies of 2 Pod endpoints from masquerading"),
        "{status}"
    );
    world.assert_served("web-0");

    world.agent().kill().unwrap();
    assert!(table(&world).is_some(), "the guard table must survive the agent");
    let removed = options.command(&["cleanup"]).unwrap();
    assert!(removed.contains("nftables-table") && removed.contains("inet npl"), "{removed}");
    assert_eq!(table(&world), None);
}

/// A rule like one of the AWS VPC CNI: marked packets use the routing table `main`. The rule has priority over the
/// Pods' rules.
const RULE_OF_MARK: &str = "rule add fwmark 0x80/0x80 lookup main priority 1024";

/// A rule for IPv6 that compares two bits of the mark: one must be set and the other unset.
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
fn connections_are_marked_while_a_policy_rule_routes_their_pod() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let node = world.topology.node().clone();
    node.ip(RULE_OF_MARK).unwrap();
    rule_of_pod(&world, "add");
    poll::until("the mark", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.wait_for_log("marks connections to mappings");
    let shown = table(&world).unwrap();
    assert!(
        shown.contains("iif \"eth0\"") && !shown.contains("snat"),
        "there is a masquerading exemption although no rule masquerades: {shown}"
    );
    let options = world.agent_options(&[]);
    let status = options.command_json("status").unwrap();
    assert_eq!(status["connectionMarks"][0], "IPv4 from eth0: 0x80/0x80");
    assert_eq!(status["guardedEndpoints"], Value::Null);

    // The agent must set up the mark of an IP family before any Pod has a mapping in this family.
    for rule in [&format!("from {} lookup 100 priority 1536", world.topology.pods()[0].addresses.v6), RULE_OF_MARK_V6] {
        let mut add = node.command("ip").unwrap();
        tools::output(add.args(["-6", "rule", "add"]).args(rule.split(' '))).unwrap();
    }
    let marks = || options.command_json("status").unwrap()["connectionMarks"].clone();
    let both = json!(["IPv4 from eth0: 0x80/0x80", "IPv6 from eth0: 0x40/0xc0"]);
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
    poll::until("the removal of the mark", LIMIT, || is_bare().then_some(())).unwrap();
    node.nft("delete table inet npl_test").unwrap();
    poll::until("the removal of the table", LIMIT, || table(&world).is_none().then_some(())).unwrap();
    world.wait_for_log("removed nftables table inet npl: the Node has no source NAT rules, reply routing needs no");

    rule_of_pod(&world, "add");
    poll::until("the mark to return", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.agent().kill().unwrap();
    assert!(is_marked(&world), "the mark must survive the agent");
    let removed = options.command(&["cleanup"]).unwrap();
    assert!(removed.contains("nftables-table") && removed.contains("inet npl"), "{removed}");
    assert_eq!(table(&world), None);
}

#[test]
fn disabling_the_guard_removes_the_marks_and_logs_a_warning() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    world.topology.node().ip(RULE_OF_MARK).unwrap();
    rule_of_pod(&world, "add");
    poll::until("the mark", LIMIT, || is_marked(&world).then_some(())).unwrap();
    world.agent().kill().unwrap();
    world.start_agent(&["--resync", "1s", "--nft-guard", "off"]);
    world.wait_for_log("with --nft-guard off no connection is marked");
    poll::until("the removal of the mark", LIMIT, || table(&world).is_none().then_some(())).unwrap();
    world.wait_for_log("removed nftables table inet npl: --nft-guard is off");
}

/// Whether the table drops forwarded packets from the Node's IPv6 address and a port of the default port range.
fn drops_forged_sources(world: &World) -> bool {
    let source = format!("{} . 17", world.topology.node_addresses().v6);
    let expected = ["th sport 61000-62000", "@node_sources_v6 drop", &source];
    table(world).is_some_and(|table| expected.iter().all(|part| table.contains(part)))
}

#[test]
fn packets_with_forged_sources_are_dropped_while_there_are_ipv6_mappings() {
    let mut world = world_with_service(&json!({"ipFamilyPolicy": "RequireDualStack"}));
    assert_eq!(table(&world), None);
    create_dual_stack_pod(&mut world, "web-0");
    let entries = world.wait_for_entries("web-0", 4);
    poll::until("the chain", LIMIT, || drops_forged_sources(&world).then_some(())).unwrap();
    world.wait_for_log("drops forwarded IPv6 packets with a node address and a node port as source");
    assert_served(&world, "web-0", &entries);
    let options = world.agent_options(&[]);
    assert_eq!(options.command_json("status").unwrap()["dropsForgedSources"], true);
    let status = options.command(&["status"]).unwrap();
    assert!(status.contains("drops IPv6 packets that forge a node port as source"), "{status}");

    world.agent().kill().unwrap();
    assert!(drops_forged_sources(&world), "the chain must survive the agent");
    world.topology.node().nft("flush chain inet npl forwarded").unwrap();
    world.start_agent(&["--resync", "1s"]);
    poll::until("the restored chain", LIMIT, || drops_forged_sources(&world).then_some(())).unwrap();
    world.agent().kill().unwrap();
    let removed = options.command(&["cleanup"]).unwrap();
    assert!(removed.contains("nftables-table") && removed.contains("inet npl"), "{removed}");
    assert_eq!(table(&world), None);
}

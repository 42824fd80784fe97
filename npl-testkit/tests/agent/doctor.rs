// SPDX-License-Identifier: Apache-2.0
//! Tests the findings of `npl-agent doctor` on a misconfigured Node, and on the same Node after the configuration is
//! corrected.

use std::fs;

use aya::maps::{Array, HashMap, Map, MapData};
use npl_common::lookup_cache::{self, CachedMappingV4};
use npl_common::mapping::{BackendV4, Frontend};
use npl_common::names;
use npl_testkit::agent::{Agent, Options};
use npl_testkit::echo::Protocol;
use npl_testkit::topology::Offload;
use npl_testkit::{tools, traffic};
use serde_json::Value;

use crate::world::World;

/// A finding, as `doctor` prints it in JSON.
pub(crate) struct Finding {
    pub(crate) state: String,
    pub(crate) found: String,
    pub(crate) advice: Option<String>,
}

/// Runs `doctor`. Returns whether the command succeeded, and its output.
fn doctor(world: &World, arguments: &[&str]) -> (bool, String) {
    let options = world.agent_options(&[]);
    let mut command = options.netns.command(&options.binary).unwrap();
    command.arg("doctor").args(arguments).arg("--bpffs").arg(&options.bpffs);
    let output = command.env("NPL_RUNTIME_DIR", &options.runtime_dir).output().unwrap();
    let (text, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(complaint, "", "{}", tools::show(&command));
    assert!(matches!(output.status.code(), Some(0 | 1)), "{:?}", output.status);
    (output.status.success(), text.into_owned())
}

pub(crate) fn findings(world: &World) -> (bool, Value) {
    let (is_well, text) = doctor(world, &["--output", "json"]);
    (is_well, serde_json::from_str(&text).unwrap())
}

#[track_caller]
pub(crate) fn finding(world: &World, key: &str) -> Finding {
    let (_, all) = findings(world);
    let of_key: Vec<&Value> = all.as_array().unwrap().iter().filter(|it| it["key"] == key).collect();
    assert_eq!(of_key.len(), 1, "{key} in {all:#}");
    let text = |field: &str| of_key[0][field].as_str().map(ToOwned::to_owned);
    let page = text("page").map(|page| page == format!("docs/reference/doctor.md#{key}"));
    assert_eq!(page, (of_key[0]["state"] != "ok").then_some(true), "{all:#}");
    Finding { state: text("state").unwrap(), found: text("found").unwrap(), advice: text("advice") }
}

#[track_caller]
pub(crate) fn assert_ok(world: &World, key: &str, found: &str) {
    let finding = finding(world, key);
    assert_eq!(finding.state, "ok", "{key}: {} {:?}", finding.found, finding.advice);
    assert!(finding.found.contains(found), "{key}: {}", finding.found);
    assert_eq!(finding.advice, None, "{key}");
}

#[track_caller]
pub(crate) fn assert_reported(world: &World, key: &str, state: &str, advice: &str) {
    let finding = finding(world, key);
    assert_eq!(finding.state, state, "{key}: {} {:?}", finding.found, finding.advice);
    assert!(finding.advice.as_ref().is_some_and(|told| told.contains(advice)), "{key}: {:?}", finding.advice);
}

#[test]
fn wrong_sysctls_are_reported_until_they_are_corrected() {
    let world = World::new();
    let node = world.topology.node();
    node.set_liberal_tracking(false).unwrap();
    node.sysctl("net/ipv4/ip_forward", "0").unwrap();
    node.sysctl("net/ipv6/conf/all/forwarding", "0").unwrap();
    let pins = || fs::read_dir(world.bpffs.path()).unwrap().count();
    let pins_before = pins();

    assert_reported(&world, "ip_forward", "failed", "set net.ipv4.ip_forward=1");
    assert_reported(&world, "ipv6_forwarding", "warning", "set net.ipv6.conf.all.forwarding=1");
    assert_reported(&world, "conntrack_liberal", "warning", "only --forwarding offload needs this setting");
    assert_reported(&world, "conntrack_timeouts", "warning", "connections that are idle for longer");
    let (is_well, table) = doctor(&world, &[]);
    assert!(!is_well, "doctor succeeds although node ports do not work: {table}");
    for words in [
        "CHECK",
        "net.ipv4.ip_forward=0",
        "ip_forward: the kernel drops IPv4 requests before they reach \
                                                     a Pod",
    ] {
        assert!(table.contains(words), "{words} is not in\n{table}");
    }

    node.sysctl("net/ipv4/ip_forward", "1").unwrap();
    node.sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
    node.set_liberal_tracking(true).unwrap();
    assert_ok(&world, "ip_forward", "net.ipv4.ip_forward=1");
    assert_ok(&world, "ipv6_forwarding", "net.ipv6.conf.all.forwarding=1");
    assert_ok(&world, "conntrack_liberal", "nf_conntrack_tcp_be_liberal=1");
    node.sysctl("net/netfilter/nf_conntrack_tcp_timeout_unacknowledged", "432000").unwrap();
    assert_ok(&world, "conntrack_timeouts", "nf_conntrack_tcp_timeout_unacknowledged=432000");
    assert_reported(&world, "datapath", "warning", "start the agent");
    let (is_well, all) = findings(&world);
    assert!(is_well, "doctor fails although there are only warnings: {all:#}");
    assert_eq!(pins(), pins_before, "doctor changed pins");
}

/// In this test, the agent compares its mappings with those in the kernel only once an hour, so the agent does not
/// correct the differences that the test creates.
#[test]
fn annotations_are_compared_with_the_kernels_mappings_in_both_directions() {
    let mut world = World::with_agent(&["--resync", "1h"]);
    world.serve(&["web-0"]);
    assert_ok(&world, "annotations", "match the kernel's mappings");

    let map = MapData::from_pin(world.pins().join(names::MAP_MAPPING_V4)).and_then(Map::from_map_data).unwrap();
    let mut mappings: HashMap<MapData, Frontend, BackendV4> = map.try_into().unwrap();
    let (key, value) = mappings.iter().next().unwrap().unwrap();
    // Unlike a change by the agent, a change of the map by the test leaves the copy of the mapping in the lookup cache
    // valid, so the test clears this copy.
    let map = MapData::from_pin(world.pins().join(names::MAP_LOOKUP_CACHE_V4)).and_then(Map::from_map_data).unwrap();
    let mut cache: Array<MapData, CachedMappingV4> = map.try_into().unwrap();
    let mut forget_copy = || cache.set(lookup_cache::slot(key), CachedMappingV4::NONE, 0).unwrap();
    mappings.remove(&key).unwrap();
    forget_copy();
    let entry = world.wait_for_entries("web-0", 2).into_iter().find(|entry| entry.node_port == key.node_port).unwrap();
    let is_answered = || {
        let client = &world.topology.client().netns;
        traffic::request(client, entry.protocol, entry.address(), "who?").is_ok()
    };
    assert!(!is_answered(), "a node port is served although doctor reports that it is not mapped");
    assert_reported(&world, "annotations", "failed", "reach no Pod");
    let missing = finding(&world, "annotations").found;
    assert!(missing.contains("shop/web-0") && missing.contains("the kernel has no mapping"), "{missing}");
    mappings.insert(key, BackendV4 { pod_port: value.pod_port + 1, ..value }, 0).unwrap();
    forget_copy();
    let wrong = finding(&world, "annotations").found;
    assert!(wrong.contains(&format!("port {}", value.pod_port + 1)), "{wrong}");
    assert!(!is_answered(), "a request is answered although its node port is mapped to a Pod port without a server");
    mappings.insert(key, value, 0).unwrap();
    forget_copy();
    assert_ok(&world, "annotations", "match the kernel's mappings");
    world.assert_served("web-0");

    mappings.insert(Frontend { node_port: 61999, ..key }, value, 0).unwrap();
    assert_reported(&world, "annotations", "warning", "removes the mappings");
    let unowned = finding(&world, "annotations").found;
    assert!(unowned.contains("61999") && unowned.contains("no Pod of the Node has this node port"), "{unowned}");
}

#[test]
fn the_datapath_is_checked_with_and_without_a_running_agent() {
    let (mut world, _cgroup) = World::with_local_clients(&[]);
    for key in ["kernel", "btf", "bpffs", "cap_bpf", "cap_net_admin", "cap_perfmon"] {
        assert_ok(&world, key, "");
    }
    assert_ok(&world, "agent", "running");
    assert_ok(&world, "api_server", "the agent receives changes of pods, services, nodes");
    assert_ok(&world, "annotations", "match the kernel's mappings");
    assert_ok(&world, "datapath", "programs on eth0; mappings: 2");
    assert_ok(&world, "local_clients", "served by");
    assert_ok(&world, "rp_filter", "on eth0");
    assert_ok(&world, "nft_guard", "no rule masquerades");
    assert_ok(&world, "port_range", "61000-62000");
    let node = world.topology.node();
    node.sysctl("net/ipv4/ip_local_port_range", "60000 61500").unwrap();
    assert_reported(&world, "port_range", "warning", "net.ipv4.ip_local_reserved_ports");
    node.sysctl("net/ipv4/ip_local_reserved_ports", "61000-62000").unwrap();
    assert_ok(&world, "port_range", "ephemeral ports of outgoing connections are 60000-61500");

    world.agent().kill().unwrap();
    assert_reported(&world, "agent", "warning", "are not applied");
    assert_ok(&world, "datapath", "programs on eth0; mappings: 2");
    assert!(findings(&world).0, "doctor fails although the datapath works");

    // Without the device, the programs are detached, which `doctor` must report.
    world.topology.node().ip("link del eth0").unwrap();
    assert_reported(&world, "datapath", "failed", "no client outside the Node reaches a node port");
    assert!(!findings(&world).0, "doctor succeeds although no remote client is served");
}

/// A rule like that of the AWS VPC CNI: it copies the mark of a connection to the Pod's packets.
const RESTORE_MARK: &str = "
table ip npl_test {
  chain prerouting {
    type filter hook prerouting priority mangle; policy accept;
    iifname \"npl1\" meta mark set ct mark & 0x80
  }
}";

/// The Pod's routing table sends packets to the second client, which drops the replies to the first client.
#[test]
fn programs_that_were_loaded_without_cap_perfmon_are_reported() {
    let mut world = World::new();
    world.create_node();
    let options = Options { has_perfmon: false, ..world.agent_options(&[]) };
    world.agent = Some(Agent::start(options).unwrap());
    world.serve(&["web-0"]);
    assert_reported(&world, "cap_perfmon", "warning", "as the init container of deploy/npl.yaml does");
}

#[test]
fn misrouted_replies_are_reported_until_a_mark_routes_them_back() {
    let key = "reply_routes";
    let mut world = World::with_clients(2);
    world.create_node();
    world.start_agent(&["--devices", "eth0,eth1", "--resync", "1s"]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    let is_served = |world: &World| traffic::tcp_request(&world.topology.client().netns, server, "who?").is_ok();
    assert_ok(&world, key, "no policy routing rule");
    let (node, pod) = (world.topology.node().clone(), world.topology.pods()[0].ip());
    node.ip("route add default via 203.0.113.2 dev eth1 table 100").unwrap();
    node.ip(&format!("rule add from {pod} lookup 100 priority 1536")).unwrap();
    assert_reported(&world, key, "warning", "docs/troubleshoot.md");
    assert!(!is_served(&world), "doctor reports that replies are misrouted, but they arrive");
    node.nft(RESTORE_MARK).unwrap();
    node.ip("rule add fwmark 0x80/0x80 lookup main priority 1024").unwrap();
    world.wait_for_log("marks connections to mappings");
    assert_ok(&world, key, "nftables table inet npl marks connections to the mappings of these Pods");
    assert!(is_served(&world), "replies are lost although doctor reports no problem");

    // The strict reverse path filter looks up the route from the Pod to the client without the mark. This route uses
    // another device than the one on which the request arrived, so the filter drops the request.
    assert_ok(&world, "rp_filter", "off on eth0");
    node.sysctl("net/ipv4/conf/eth0/rp_filter", "1").unwrap();
    assert_reported(&world, "rp_filter", "warning", "set rp_filter to 2");
    assert_ok(&world, key, "marks connections");
    assert!(!is_served(&world), "doctor reports that requests are dropped, but they arrive");
    node.sysctl("net/ipv4/conf/eth0/rp_filter", "2").unwrap();
    assert_ok(&world, "rp_filter", "loose on eth0");
    assert!(is_served(&world), "requests are lost although doctor reports no problem");

    world.agent().kill().unwrap();
    node.nft("delete table inet npl").unwrap();
    assert_reported(&world, key, "warning", "--nft-guard");
    assert!(!is_served(&world), "doctor reports that replies are misrouted, but they arrive");
}

#[test]
fn fraglists_are_read_from_the_devices() {
    let world = World::new();
    let key = "gro_fraglist";
    assert_ok(&world, key, "rx-gro-list is off");
    world.topology.node_device("eth0").set_offloads(&[Offload::GroFraglist], true).unwrap();
    let found = finding(&world, key).found;
    assert!(found.contains("rx-gro-list is on for eth0"), "{found}");
    world.topology.node_device("eth0").set_offloads(&[Offload::GroFraglist], false).unwrap();
    assert_ok(&world, key, "rx-gro-list is off");
}

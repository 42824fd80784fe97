// SPDX-License-Identifier: Apache-2.0
//! The changes by other software.

use std::fs;
use std::path::{Path, PathBuf};

use npl_agent::core::repairs::RepairedObject::{CgroupLink, MapEntry, NftTable, Pin, TcxLink, XdpLink};
use npl_common::names::{self, SOCKET_PROGRAMS};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;

use super::maps::{Entry, PinnedMap, bpftool, map, replace_by_map};
use super::scene::{Case, PODS, Scene};
use crate::world::LIMIT;

const fn case(name: &'static str, repairs: &'static [(super::scene::Object, u64)], change: fn(&Scene)) -> Case {
    Case { name, change, repairs, may_mislead: false }
}

pub(super) const LINKS_AND_PINS: &[Case] = &[
    case("the pin of the ingress link is removed", &[(TcxLink, 1)], |scene| unlink(&scene.link("in"))),
    case("the pin of the egress link is removed", &[(TcxLink, 1)], |scene| unlink(&scene.link("out"))),
    case("the ingress link is detached", &[(TcxLink, 1)], |scene| detach(&scene.link("in"))),
    case("a foreign map is pinned in place of the ingress link", &[(TcxLink, 1)], |scene| {
        replace_by_map(&scene.world, &scene.link("in"));
    }),
    case("the pin of the ingress link is renamed", &[(TcxLink, 1)], |scene| {
        fs::rename(scene.link("in"), scene.link("in_old")).unwrap();
    }),
    case("the program of the ingress link is replaced", &[(TcxLink, 1)], |scene| {
        scene.foreign().replace_program_of(&scene.link("in")).unwrap();
    }),
    case("both links are detached", &[(TcxLink, 2)], |scene| {
        detach(&scene.link("out"));
        detach(&scene.link("in"));
    }),
    case("the pin of a cgroup link is removed", &[(CgroupLink, 1)], |scene| unlink(&socket_link(scene, 0))),
    case("a cgroup link is detached", &[(CgroupLink, 1)], |scene| detach(&socket_link(scene, 1))),
    case("the pin of the mappings is removed", &[(Pin, 1)], |scene| {
        unlink(&scene.world.pins().join(names::MAP_MAPPING_V4));
    }),
    case("the pins of the flow table and of the slow path are removed", &[(Pin, 2)], |scene| {
        unlink(&scene.world.pins().join(names::MAP_FLOW_V4));
        unlink(&scene.world.pins().join(names::MAP_SLOW_PATH));
    }),
    case("the pin of a program is removed", &[(Pin, 1)], |scene| {
        let builds = fs::read_dir(scene.world.pins().join(names::PROGRAM_DIR)).unwrap();
        let build = builds.map(|entry| entry.unwrap().path()).next().unwrap();
        unlink(&build.join(names::PROG_INGRESS));
    }),
];

pub(super) const MAPS: &[Case] = &[
    case("a mapping is deleted", &[(MapEntry, 1)], |scene| {
        let (mappings, (key, _)) = mapping(scene, PODS[0]);
        mappings.remove(&key);
    }),
    Case {
        may_mislead: true,
        ..case("a mapping is changed to another Pod", &[(MapEntry, 1)], |scene| {
            let (mappings, (key, _)) = mapping(scene, PODS[0]);
            let (_, (_, other)) = mapping(scene, PODS[1]);
            mappings.set(&key, &other);
        })
    },
    case("a mapping is added", &[(MapEntry, 1)], |scene| {
        let (mappings, (mut key, value)) = mapping(scene, PODS[0]);
        key[..2].copy_from_slice(&61_999_u16.to_ne_bytes());
        mappings.set(&key, &value);
        let is_gone = || (!mappings.entries().iter().any(|(found, _)| *found == key)).then_some(());
        poll::until("the removal of the added mapping", LIMIT, is_gone).unwrap();
    }),
    case("an endpoint is deleted", &[(MapEntry, 1)], |scene| {
        let (endpoints, (key, _)) = endpoint(scene);
        endpoints.remove(&key);
    }),
    case("an endpoint is changed", &[(MapEntry, 1)], |scene| {
        let (endpoints, (key, mut value)) = endpoint(scene);
        value[0] ^= 1;
        endpoints.set(&key, &value);
    }),
    case("the port range in the configuration is cleared", &[(MapEntry, 1)], |scene| {
        let config = map(&scene.world, names::MAP_CONFIG);
        let mut value = config.value(&[0; 4]);
        let ports = std::mem::offset_of!(npl_common::config::Config, port_min);
        value[ports..ports + 4].fill(0);
        config.set(&[0; 4], &value);
    }),
    case("the node address is deleted", &[(MapEntry, 1)], |scene| {
        map(&scene.world, names::MAP_NODE_ADDRESS_V4).remove(&node_address(scene));
    }),
    case("the address of the node address's index is changed", &[(MapEntry, 1)], |scene| {
        let index = map(&scene.world, names::MAP_NODE_ADDRESS_V4).value(&node_address(scene));
        map(&scene.world, names::MAP_NODE_ADDRESS_BY_INDEX_V4).set(&index, &[203, 0, 113, 9]);
    }),
    case("a node address with the index of another is added", &[(MapEntry, 1)], |scene| {
        let addresses = map(&scene.world, names::MAP_NODE_ADDRESS_V4);
        let index = addresses.value(&node_address(scene));
        addresses.set(&[203, 0, 113, 9], &index);
    }),
    case("an allowed source is added", &[(MapEntry, 1)], |scene| {
        let sources = map(&scene.world, names::MAP_ALLOW_V4);
        let (_, (frontend, _)) = mapping(scene, PODS[0]);
        let prefix = npl_common::mapping::FRONTEND_BITS + 24;
        let key = [&prefix.to_ne_bytes()[..], &frontend, &[203, 0, 113, 0]].concat();
        sources.set(&key, &npl_common::mapping::ALLOWED.to_ne_bytes());
        let is_gone = || sources.entries().is_empty().then_some(());
        poll::until("the removal of the added source", LIMIT, is_gone).unwrap();
    }),
    case("a slow-path program is removed", &[(MapEntry, 1)], |scene| {
        map(&scene.world, names::MAP_SLOW_PATH).remove(&[0; 4]);
    }),
    case("an element of the CRC32c table is changed", &[(MapEntry, 1)], |scene| {
        map(&scene.world, names::MAP_CRC).set(&[7, 0, 0, 0], &[1, 2, 3, 4]);
    }),
];

pub(super) const NFT: &[Case] = &[
    case("the table is deleted", &[(NftTable, 1)], |scene| nft(scene, "delete table inet npl")),
    case("a chain is flushed", &[(NftTable, 1)], |scene| nft(scene, "flush chain inet npl replies")),
    case("a rule is added", &[(NftTable, 1)], |scene| nft(scene, "add rule inet npl replies counter")),
];

pub(super) const XDP: &[Case] = &[
    case("the pin of the XDP link is removed", &[(XdpLink, 1)], |scene| unlink(&scene.link("xdp"))),
    case("the XDP link is detached", &[(XdpLink, 1)], |scene| detach(&scene.link("xdp"))),
    case("the pin of the XDP link is renamed", &[(XdpLink, 1)], |scene| {
        fs::rename(scene.link("xdp"), scene.link("xdp_old")).unwrap();
    }),
    case("the entry of the device with XDP is deleted", &[(MapEntry, 1)], |scene| {
        let ifindex = scene.world.topology.client().uplink.ifindex().unwrap();
        map(&scene.world, names::MAP_PRE_TC_DEVICE).remove(&ifindex.to_ne_bytes());
    }),
];

pub(super) const NEXT_HOPS: &[Case] = &[
    case("a next hop is deleted", &[(MapEntry, 1)], |scene| {
        let (hops, (key, _)) = next_hop(scene);
        hops.remove(&key);
    }),
    case("a next hop is changed to an absent device", &[(MapEntry, 1)], |scene| {
        let (hops, (key, mut value)) = next_hop(scene);
        value[..4].copy_from_slice(&999_999_u32.to_ne_bytes());
        hops.set(&key, &value);
    }),
    case("an uplink is deleted", &[(MapEntry, 1)], |scene| {
        let ifindex = scene.world.topology.client().uplink.ifindex().unwrap();
        map(&scene.world, names::MAP_UPLINK).remove(&ifindex.to_ne_bytes());
    }),
];

pub(super) const NOT_REPAIRED: &[Case] = &[
    case("a node address is added and removed", &[], |scene| {
        ip(scene, "addr add 192.0.2.77/32 dev eth0");
        wait_for_status(scene, "192.0.2.77", true);
        ip(scene, "addr del 192.0.2.77/32 dev eth0");
        wait_for_status(scene, "192.0.2.77", false);
    }),
    case("the uplink is renamed twice", &[], |scene| {
        ip(scene, "link set dev eth0 name renamed0");
        wait_for_status(scene, "renamed0", true);
        ip(scene, "link set dev renamed0 name eth0");
        wait_for_status(scene, "renamed0", false);
    }),
    case("policy rules for a Pod are added and removed", &[], |scene| {
        let pod = scene.world.topology.pods()[0].ip();
        ip(scene, "rule add fwmark 0x80/0x80 lookup main priority 1024");
        ip(scene, &format!("rule add from {pod} lookup main priority 1536"));
        ip(scene, &format!("rule del from {pod} lookup main priority 1536"));
        ip(scene, "rule del fwmark 0x80/0x80 lookup main priority 1024");
    }),
];

fn unlink(pin: &Path) {
    fs::remove_file(pin).unwrap();
}

fn detach(link: &Path) {
    bpftool(&["link", "detach", "pinned", link.to_str().unwrap()]);
}

/// The pin of the link of a socket program, by the program's position in the list of all socket programs.
fn socket_link(scene: &Scene, position: usize) -> PathBuf {
    let hook = format!("_{}", SOCKET_PROGRAMS[position].hook);
    let links = fs::read_dir(scene.world.pins().join(names::LINK_DIR)).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = links.filter(|pin| pin.to_str().unwrap().ends_with(&hook)).collect();
    found.pop().unwrap()
}

/// The map of mappings, and the entry of a Pod's TCP mapping.
fn mapping(scene: &Scene, pod: &str) -> (PinnedMap, Entry) {
    let mappings = map(&scene.world, names::MAP_MAPPING_V4);
    let [low, high] = scene.world.address(pod, Protocol::Tcp).port().to_ne_bytes();
    let entry = mappings.entries().into_iter().find(|(key, _)| key[..3] == [low, high, 6]).unwrap();
    (mappings, entry)
}

/// The map of endpoints, and the entry of an endpoint of the first Pod.
fn endpoint(scene: &Scene) -> (PinnedMap, Entry) {
    of_first_pod(scene, names::MAP_ENDPOINT_V4)
}

fn next_hop(scene: &Scene) -> (PinnedMap, Entry) {
    of_first_pod(scene, names::MAP_NEXT_HOP_V4)
}

/// A map whose keys begin with a Pod's address, and an entry of the first Pod.
fn of_first_pod(scene: &Scene, name: &str) -> (PinnedMap, Entry) {
    let found = map(&scene.world, name);
    let pod = scene.world.topology.pods()[0].ip().octets();
    let entry = found.entries().into_iter().find(|(key, _)| key.starts_with(&pod)).unwrap();
    (found, entry)
}

fn node_address(scene: &Scene) -> [u8; 4] {
    scene.world.topology.node_addresses().v4.octets()
}

fn nft(scene: &Scene, rules: &str) {
    scene.world.topology.node().nft(rules).unwrap();
}

fn ip(scene: &Scene, line: &str) {
    scene.world.topology.node().ip(line).unwrap();
}

/// Waits until the output of `npl-agent status` contains these words, or no longer contains them.
fn wait_for_status(scene: &Scene, words: &str, is_contained: bool) {
    let options = scene.world.agent_options(&[]);
    let has_words = || (options.command(&["status"]).unwrap().contains(words) == is_contained).then_some(());
    poll::until(&format!("the status with `{words}`: {is_contained}"), LIMIT, has_words).unwrap();
}

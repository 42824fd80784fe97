// SPDX-License-Identifier: Apache-2.0
//! Tests Nodes with a stateful firewall, masquerading and reverse path filters.

use npl_testkit::topology::MASQUERADE;
use npl_testkit::traffic::{Direction, transfer};

use crate::world::World;

/// Rules of a hardened distribution: invalid packets are dropped, and only allowed connections are forwarded.
const RULES: &str = "
table inet npl_test {
  counter invalid { }
  counter invalid_rst { }
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state invalid tcp flags & rst == rst counter name invalid_rst
    ct state invalid tcp flags & fin == fin counter
    ct state invalid counter name invalid drop
    ct state established,related accept
    ip daddr 10.244.0.0/16 ct state new accept
    ip6 daddr fd00:10:244::/64 ct state new accept
  }
}";

pub(crate) fn load_rules(world: &World) {
    world.node().nft(RULES).unwrap();
    world.node().nft(MASQUERADE).unwrap();
}

/// Number of packets that a named counter of the rules has counted.
pub(super) fn counted(world: &World, counter: &str) -> u64 {
    world.node().packets_counted(&format!("inet npl_test {counter}")).unwrap()
}

/// Asserts that kernel conntrack has classified no packet as invalid, according to the counters of the table `inet
/// npl_test`.
///
/// On a slow machine, a host retransmits a segment whose acknowledgment is late. If the connection is closed when the
/// retransmitted segment arrives, the other host answers with a RST of an old sequence number, which is invalid with and
/// without NPL. There may thus be as many invalid RSTs as retransmitted segments.
#[track_caller]
pub(super) fn assert_no_packet_is_invalid(world: &World) {
    let [invalid, resets] = ["invalid", "invalid_rst"].map(|counter| counted(world, counter));
    let hosts = world.pods.iter().map(|(pod, _)| &pod.netns).chain([world.client()]);
    let resent: u64 = hosts.map(|host| host.counter("Tcp", "RetransSegs").unwrap()).sum();
    let rules = world.node().nft("list table inet npl_test").unwrap();
    assert_eq!(invalid, resets, "invalid packets other than RST: {rules}");
    assert!(resets <= resent, "{resets} invalid RSTs, but {resent} retransmitted segments: {rules}");
}

#[test]
fn firewall_sees_no_invalid_packet_and_does_not_masquerade_replies() {
    let world = World::new(1);
    load_rules(&world);
    for _ in 0..4 {
        world.assert_answers();
    }
    for frontend in world.frontends() {
        transfer(world.client(), frontend, Direction::Upload, 1 << 20).unwrap();
        transfer(world.client(), frontend, Direction::Download, 1 << 20).unwrap();
    }
    assert_no_packet_is_invalid(&world);
}

#[test]
fn strict_reverse_path_filter_passes_both_directions() {
    let world = World::new(1);
    for device in ["all", "default", "eth0", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "1").unwrap();
    }
    for _ in 0..4 {
        world.assert_answers();
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Tests Nodes with a stateful firewall, masquerading and reverse path filters.

use npl_testkit::topology::MASQUERADE;
use npl_testkit::traffic::{Direction, transfer};

use crate::world::World;

/// Rules of a hardened distribution: invalid packets are dropped, and only allowed connections are forwarded.
const RULES: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state invalid tcp flags & rst == rst counter
    ct state invalid tcp flags & fin == fin counter
    ct state invalid counter drop
    ct state established,related accept
    ip daddr 10.244.0.0/16 ct state new accept
    ip6 daddr fd00:10:244::/64 ct state new accept
  }
}";

pub(crate) fn load_rules(world: &World) {
    world.node().nft(RULES).unwrap();
    world.node().nft(MASQUERADE).unwrap();
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
    let rules = world.node().nft("list chain inet npl_test forward").unwrap();
    assert!(rules.contains("ct state invalid counter packets 0 bytes 0 drop"), "{rules}");
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

// SPDX-License-Identifier: Apache-2.0
//! Pods behind a pair of netkit's, which CNIs take instead of veth's. The way to such a Pod is another function of the kernel's.

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::datapath::preflight;

use super::devices::has;
use super::past_the_stack::{STATEFUL, assert_most_packets_pass_by};
use super::redirect::{NOTHING_IS_FORWARDED, assert_served};
use crate::world::World;

/// A Pod of that kind; nothing where the kernel has none, which Linux 6.7 brought, a version after `tcx`.
fn behind_netkit() -> Option<World> {
    let world = World::new(1);
    let is_there = preflight::has_tcx() && has("netkit", world.node(), "link add probe0 type netkit");
    if !is_there {
        return None;
    }
    world.node().ip("link del probe0").unwrap();
    let (pod, _) = &world.pods[0];
    world.topology.put_behind_netkit(pod).unwrap();
    Some(world)
}

#[test]
fn pod_behind_netkit_is_served_by_the_stack() {
    let Some(world) = behind_netkit() else { return };
    assert_served(&world);
}

#[test]
fn pod_behind_netkit_is_redirected_to() {
    let Some(mut world) = behind_netkit() else { return };
    world.follow(Forwarding::Redirect);
    assert_eq!(world.datapath().redirected().unwrap().len(), 2, "the Pod's two addresses");
    world.node().nft(NOTHING_IS_FORWARDED).unwrap();
    assert_served(&world);
}

#[test]
fn flows_to_a_pod_behind_netkit_are_offloaded() {
    let Some(mut world) = behind_netkit() else { return };
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_most_packets_pass_by(world);
}

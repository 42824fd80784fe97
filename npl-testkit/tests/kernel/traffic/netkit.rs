// SPDX-License-Identifier: Apache-2.0
//! Tests Pods with netkit pairs instead of veth pairs, because the kernel redirects packets to such a Pod by a
//! different code path.

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::datapath::preflight;

use super::devices::has;
use super::flow_offload::{STATEFUL, assert_most_packets_bypass_the_stack};
use super::redirect::{DROP_FORWARDED, assert_served};
use crate::world::World;

/// Creates a Node with a Pod on a netkit pair. `None` if the kernel lacks netkit, which Linux 6.7 added.
fn behind_netkit() -> Option<World> {
    let world = World::new(1);
    let is_supported = preflight::has_tcx() && has("netkit", world.node(), "link add probe0 type netkit");
    if !is_supported {
        return None;
    }
    world.node().ip("link del probe0").unwrap();
    let (pod, _) = &world.pods[0];
    world.topology.put_behind_netkit(pod).unwrap();
    Some(world)
}

#[test]
fn pod_behind_netkit_is_served_in_stack_mode() {
    let Some(world) = behind_netkit() else { return };
    assert_served(&world);
}

#[test]
fn pod_behind_netkit_is_served_in_redirect_mode() {
    let Some(mut world) = behind_netkit() else { return };
    world.follow(Forwarding::Redirect);
    assert_eq!(world.datapath().redirected().unwrap().len(), 2, "both addresses of the Pod must be redirected");
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_served(&world);
}

#[test]
fn flows_to_a_pod_behind_netkit_are_offloaded() {
    let Some(mut world) = behind_netkit() else { return };
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_most_packets_bypass_the_stack(world);
}

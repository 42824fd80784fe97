// SPDX-License-Identifier: Apache-2.0
//! Tests Nodes with more Pods and uplinks than the maps of redirect mode have room for.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::devices::redirect::{HopKind, PodNextHop, ProgramSet};
use npl_agent::devices::apply::apply;
use npl_common::next_hop::{MAX_NEXT_HOPS, MAX_UPLINKS};

use crate::world::World;

#[test]
fn full_next_hop_map_of_one_family_does_not_affect_the_other() {
    let mut world = World::new(1);
    let devices = world.devices();
    let of = |name: &str| devices.iter().find(|device| device.name == name).unwrap().ifindex;
    let (uplink, pods) = (of(world.topology.client().uplink.name()), of(world.pod().host_device.name()));
    let hop = PodNextHop { ifindex: pods, kind: HopKind::Peer, mtu: 1500 };
    let v4 = |number| IpAddr::from(Ipv4Addr::from_bits(0x0a63_0000 + number));
    let v6: IpAddr = "fd00::99".parse().unwrap();
    let plan = DevicePlan {
        programs: BTreeMap::from([(uplink, ProgramSet::RedirectUplink), (pods, ProgramSet::Pods)]),
        next_hops: (0..=MAX_NEXT_HOPS).map(v4).chain([v6]).map(|addr| (addr, hop)).collect(),
        ..DevicePlan::default()
    };
    let mut datapath = world.datapath.take().unwrap();
    let attached = datapath.hooks.attached_hooks().unwrap();
    let errors = world.node().run(|| apply(&mut datapath, &devices, &attached, &plan)).unwrap().errors;
    assert_eq!(errors.len(), 1, "{errors:?}");
    let redirected = datapath.redirected().unwrap();
    assert!(redirected.contains_key(&v6) && redirected.len() == MAX_NEXT_HOPS as usize + 1, "{}", redirected.len());
    world.assert_answers();
}

/// If the map of uplinks (`npl_rd_uplinks`) has no room for an uplink, the stack would forward replies through this
/// uplink although requests are redirected. Therefore, the agent disables redirect.
#[test]
fn full_uplink_map_disables_redirect() {
    let mut world = World::new(1);
    let pod = world.pod().host_device.ifindex().unwrap();
    let mut datapath = world.datapath.take().unwrap();
    let hop = PodNextHop { ifindex: pod, kind: HopKind::Peer, mtu: 1500 };
    let mut devices = world.devices();
    let mut wanted =
        BTreeMap::from([(world.uplinks()[0].ifindex, ProgramSet::RedirectUplink), (pod, ProgramSet::Pods)]);
    let pods = BTreeMap::from([(world.pod().ips()[0], hop)]);
    let mut attach = |devices: &[_], wanted: &BTreeMap<_, _>| {
        let plan = DevicePlan { programs: wanted.clone(), next_hops: pods.clone(), ..DevicePlan::default() };
        let attached = datapath.hooks.attached_hooks().unwrap();
        world.node().run(|| apply(&mut datapath, devices, &attached, &plan)).unwrap().errors
    };
    assert!(attach(&devices, &wanted).is_empty());
    let lines: Vec<String> =
        (0..MAX_UPLINKS / 2).map(|number| format!("link add up{number} type veth peer name up{number}-end")).collect();
    world.node().ip(&lines.join("\n")).unwrap();
    devices = world.devices();
    let more_uplinks = devices.iter().filter(|device| device.name.starts_with("up"));
    wanted.extend(more_uplinks.map(|device| (device.ifindex, ProgramSet::RedirectUplink)));
    let errors = attach(&devices, &wanted);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(datapath.redirected().unwrap().is_empty());
    world.assert_answers();
}

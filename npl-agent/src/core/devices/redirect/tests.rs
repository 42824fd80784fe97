// SPDX-License-Identifier: Apache-2.0
//! Each refusal with what is refused, and what is not.

use std::collections::{BTreeMap, BTreeSet};

use super::{Carries, Forwarding, PodWay, Refusal, Route, Way, ways_to_pods};
use crate::core::devices::{
    Device, DeviceKind, LinkFacts, LinkLayer, Master,
    attachments::{Fittings, Owner},
};

fn device(kind: DeviceKind) -> Device {
    Device {
        ifindex: 7,
        name: "device".to_owned(),
        kind,
        link_layer: LinkLayer::Ethernet,
        master: None,
        peer_is_elsewhere: kind == DeviceKind::Veth,
        has_default_route: false,
        addresses: Vec::new(),
        link: LinkFacts { mtu: 1500, ..LinkFacts::default() },
    }
}

const ROUTE: Route = Route { ifindex: 7, has_gateway: false, mtu: None };

fn decided(device: &Device, route: Route, uplinks: &[u32]) -> Option<Result<PodWay, Refusal>> {
    decided_with(device, route, uplinks, &BTreeMap::from([(7, Fittings::default())]))
}

fn decided_with(
    device: &Device,
    route: Route,
    uplinks: &[u32],
    fittings: &BTreeMap<u32, Fittings>,
) -> Option<Result<PodWay, Refusal>> {
    let pod = "10.244.1.5".parse().unwrap();
    let uplinks = uplinks.iter().copied().collect::<BTreeSet<u32>>();
    ways_to_pods(std::slice::from_ref(device), &uplinks, &BTreeMap::from([(pod, route)]), fittings).remove(&pod)
}

fn queue(kind: &str) -> Fittings {
    Fittings { queues: BTreeSet::from([kind.to_owned()]), ..Fittings::default() }
}

#[test]
fn pairs_that_end_in_a_pod_and_bridges_lead_to_pods() {
    let reached = |way| Some(Ok(PodWay { ifindex: 7, way, mtu: 1500 }));
    assert_eq!(decided(&device(DeviceKind::Veth), ROUTE, &[2]), reached(Way::Peer));
    assert_eq!(decided(&device(DeviceKind::Bridge), ROUTE, &[2]), reached(Way::Bridge));
}

#[test]
fn the_smaller_mtu_counts() {
    let mtu = |device_mtu, mtu| {
        let link = LinkFacts { mtu: device_mtu, ..LinkFacts::default() };
        let device = Device { link, ..device(DeviceKind::Veth) };
        decided(&device, Route { mtu, ..ROUTE }, &[2]).unwrap().unwrap().mtu
    };
    assert_eq!(mtu(9000, None), 9000);
    assert_eq!(mtu(9000, Some(1400)), 1400);
    assert_eq!(mtu(1400, Some(9000)), 1400);
    assert_eq!(mtu(65_536, None), u16::MAX);
}

#[test]
fn a_pod_whose_device_is_gone_is_not_decided_on() {
    assert_eq!(decided(&device(DeviceKind::Veth), Route { ifindex: 9, ..ROUTE }, &[2]), None);
}

#[test]
fn every_refusal_has_its_reason() {
    let veth = || device(DeviceKind::Veth);
    let table = [
        (veth(), vec![7], Refusal::IsUplink),
        (device(DeviceKind::Bridge), vec![2, 7], Refusal::IsUplink),
        (Device { peer_is_elsewhere: false, ..veth() }, vec![], Refusal::EndsOnTheNode),
        (Device { master: Some(Master::TakesFrames), ..veth() }, vec![], Refusal::IsEnslaved),
        (Device { master: Some(Master::Vrf), ..veth() }, vec![], Refusal::IsEnslaved),
        (Device { link_layer: LinkLayer::None, ..veth() }, vec![], Refusal::NoEthernet),
        (device(DeviceKind::Other), vec![], Refusal::UnknownKind),
        (device(DeviceKind::Tunnel), vec![], Refusal::UnknownKind),
        (device(DeviceKind::Physical), vec![], Refusal::UnknownKind),
    ];
    for (device, uplinks, refusal) in table {
        assert_eq!(decided(&device, ROUTE, &uplinks), Some(Err(refusal)), "{device:?}");
    }
    let beyond = Route { has_gateway: true, ..ROUTE };
    assert_eq!(decided(&veth(), beyond, &[]), Some(Err(Refusal::HasGateway)));
}

#[test]
fn what_others_have_on_a_pods_device_is_not_passed_by() {
    let ours = || vec![Owner::Ours];
    let both = || vec![Owner::Ours, Owner::Others];
    let table = [
        (Fittings::default(), Ok(()), Ok(())),
        (Fittings { ingress: ours(), egress: ours(), ..queue("noqueue") }, Ok(()), Ok(())),
        (queue("tbf"), Err(Refusal::HasLimit), Ok(())),
        (Fittings { egress: both(), ..Fittings::default() }, Err(Refusal::HasFilters), Ok(())),
        (Fittings { ingress: both(), ..Fittings::default() }, Err(Refusal::HasFilters), Err(Refusal::HasFilters)),
    ];
    for (fittings, by_a_pair, by_a_bridge) in table {
        for (kind, expected) in [(DeviceKind::Veth, by_a_pair), (DeviceKind::Bridge, by_a_bridge)] {
            let all = BTreeMap::from([(7, fittings.clone())]);
            let found = decided_with(&device(kind), ROUTE, &[], &all).unwrap();
            assert_eq!(found.map(drop), expected, "{kind:?} {fittings:?}");
        }
    }
    assert_eq!(decided_with(&device(DeviceKind::Veth), ROUTE, &[], &BTreeMap::new()), Some(Err(Refusal::Unseen)));
}

#[test]
fn a_pair_that_lets_nothing_pass_without_a_program_is_not_passed_by() {
    let closed = |kind| {
        let link = LinkFacts { is_closed: true, ..device(kind).link };
        Device { link, ..device(kind) }
    };
    assert_eq!(decided(&closed(DeviceKind::Veth), ROUTE, &[]), Some(Err(Refusal::HasFilters)));
}

#[test]
fn an_uplink_on_which_others_come_behind_us_keeps_all_packets_on_the_stack() {
    let decided = |uplink: &Device, of_uplink: Option<Vec<Owner>>| {
        let mut fittings = BTreeMap::from([(7, Fittings::default())]);
        let around = Fittings { egress: vec![Owner::Others], ..queue("htb") };
        fittings.extend(of_uplink.map(|ingress| (2, Fittings { ingress, ..around })));
        let (pod, devices) = ("10.244.1.5".parse().unwrap(), [device(DeviceKind::Veth), uplink.clone()]);
        let routes = BTreeMap::from([(pod, ROUTE)]);
        ways_to_pods(&devices, &BTreeSet::from([2]), &routes, &fittings)[&pod].map(drop)
    };
    let uplink = Device { ifindex: 2, ..device(DeviceKind::Physical) };
    let refused = Err(Refusal::UplinkHasFilters);
    assert_eq!(decided(&uplink, Some(vec![])), Ok(()));
    assert_eq!(decided(&uplink, Some(vec![Owner::Others, Owner::Ours])), Ok(()));
    assert_eq!(decided(&uplink, Some(vec![Owner::Ours, Owner::Others])), refused);
    assert_eq!(decided(&uplink, Some(vec![Owner::Others])), refused);
    assert_eq!(decided(&uplink, None), refused, "nobody knows what is there");
    assert_eq!(decided(&Device { link_layer: LinkLayer::None, ..uplink }, Some(vec![Owner::Others])), Ok(()));
}

#[test]
fn only_what_is_there_can_be_chosen() {
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        assert_eq!(forwarding.as_str().parse(), Ok(forwarding));
    }
    let refused = "tunnel".parse::<Forwarding>().unwrap_err();
    assert_eq!(refused.to_string(), "\"tunnel\" is no way of forwarding: give stack, redirect or offload");
}

#[test]
fn uplinks_without_ethernet_and_of_virtual_routers_take_the_stack() {
    let plain = || device(DeviceKind::Physical);
    let carried = |device: &Device| Carries::of_uplink(device, Forwarding::Redirect);
    assert_eq!(carried(&plain()), Carries::DirectUplink);
    assert_eq!(carried(&Device { link_layer: LinkLayer::None, ..plain() }), Carries::Uplink);
    assert_eq!(carried(&Device { master: Some(Master::Vrf), ..plain() }), Carries::Uplink);
}

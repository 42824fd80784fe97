// SPDX-License-Identifier: Apache-2.0
//! Tests which Pods get a next hop, and why packets to other Pods are not redirected.

use std::collections::{BTreeMap, BTreeSet};

use super::{Forwarding, HopKind, PodNextHop, ProgramSet, RedirectRefusal, Route, next_hops};
use crate::core::{
    devices::{
        Device, DeviceKind, LinkFacts, LinkLayer, Master,
        attachments::{AttachmentOwner, DeviceAttachments},
    },
    model::Family,
};

fn device(kind: DeviceKind) -> Device {
    let link = LinkFacts { mtu: 1500, ..LinkFacts::default() };
    Device { peer_is_elsewhere: kind == DeviceKind::Veth, link, ..Device::new(7, "device", kind) }
}

const ROUTE: Route = Route { ifindex: 7, has_gateway: false, mtu: None };

fn decided(device: &Device, route: Route, uplinks: &[u32]) -> Option<Result<PodNextHop, RedirectRefusal>> {
    decided_with(device, route, uplinks, &BTreeMap::from([(7, DeviceAttachments::default())]))
}

fn decided_with(
    device: &Device,
    route: Route,
    uplinks: &[u32],
    attachments: &BTreeMap<u32, DeviceAttachments>,
) -> Option<Result<PodNextHop, RedirectRefusal>> {
    let pod = "10.244.1.5".parse().unwrap();
    let uplinks = uplinks.iter().copied().collect::<BTreeSet<u32>>();
    next_hops(std::slice::from_ref(device), &uplinks, &BTreeMap::from([(pod, route)]), attachments, &BTreeSet::new())
        .remove(&pod)
}

fn other() -> AttachmentOwner {
    AttachmentOwner::Other("other".to_owned())
}

fn queue(kind: &str) -> DeviceAttachments {
    DeviceAttachments { queues: BTreeSet::from([kind.to_owned()]), ..DeviceAttachments::default() }
}

#[test]
fn veth_pairs_with_a_peer_in_a_pod_and_bridges_lead_to_pods() {
    let reached = |kind| Some(Ok(PodNextHop { ifindex: 7, kind, mtu: 1500 }));
    assert_eq!(decided(&device(DeviceKind::Veth), ROUTE, &[2]), reached(HopKind::Peer));
    assert_eq!(decided(&device(DeviceKind::Bridge), ROUTE, &[2]), reached(HopKind::Bridge));
}

#[test]
fn the_smaller_mtu_of_route_and_device_limits_redirects() {
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
fn a_pod_whose_device_was_removed_gets_no_decision() {
    assert_eq!(decided(&device(DeviceKind::Veth), Route { ifindex: 9, ..ROUTE }, &[2]), None);
}

#[test]
fn every_refusal_has_its_reason() {
    let veth = || device(DeviceKind::Veth);
    let table = [
        (veth(), vec![7], RedirectRefusal::IsUplink),
        (device(DeviceKind::Bridge), vec![2, 7], RedirectRefusal::IsUplink),
        (Device { peer_is_elsewhere: false, ..veth() }, vec![], RedirectRefusal::EndsOnTheNode),
        (Device { master: Some(Master::ReceivesFrames), ..veth() }, vec![], RedirectRefusal::IsEnslaved),
        (Device { master: Some(Master::Vrf), ..veth() }, vec![], RedirectRefusal::IsEnslaved),
        (Device { link_layer: LinkLayer::None, ..veth() }, vec![], RedirectRefusal::NoEthernet),
        (device(DeviceKind::Other), vec![], RedirectRefusal::UnknownKind),
        (device(DeviceKind::Tunnel), vec![], RedirectRefusal::UnknownKind),
        (device(DeviceKind::Physical), vec![], RedirectRefusal::UnknownKind),
        // A gateway device of Open vSwitch, such as `antrea-gw0`, has an address and is therefore also an uplink.
        (device(DeviceKind::Other), vec![2, 7], RedirectRefusal::UnknownKind),
        (device(DeviceKind::Tunnel), vec![2, 7], RedirectRefusal::UnknownKind),
    ];
    for (device, uplinks, refusal) in table {
        assert_eq!(decided(&device, ROUTE, &uplinks), Some(Err(refusal)), "{device:?}");
    }
    let beyond = Route { has_gateway: true, ..ROUTE };
    assert_eq!(decided(&veth(), beyond, &[]), Some(Err(RedirectRefusal::HasGateway)));
}

#[test]
fn redirect_does_not_bypass_other_programs_on_a_pods_device() {
    let ours = || vec![AttachmentOwner::Npl];
    let both = || vec![AttachmentOwner::Npl, other()];
    let table = [
        (DeviceAttachments::default(), Ok(()), Ok(())),
        (DeviceAttachments { ingress: ours(), egress: ours(), ..queue("noqueue") }, Ok(()), Ok(())),
        (queue("tbf"), Err(RedirectRefusal::HasLimit), Ok(())),
        (
            DeviceAttachments { egress: both(), ..DeviceAttachments::default() },
            Err(RedirectRefusal::HasFilters),
            Ok(()),
        ),
        (
            DeviceAttachments { ingress: both(), ..DeviceAttachments::default() },
            Err(RedirectRefusal::HasFilters),
            Err(RedirectRefusal::HasFilters),
        ),
    ];
    for (attachments, by_a_pair, by_a_bridge) in table {
        for (kind, expected) in [(DeviceKind::Veth, by_a_pair), (DeviceKind::Bridge, by_a_bridge)] {
            let all = BTreeMap::from([(7, attachments.clone())]);
            let found = decided_with(&device(kind), ROUTE, &[], &all).unwrap();
            assert_eq!(found.map(drop), expected, "{kind:?} {attachments:?}");
        }
    }
    assert_eq!(
        decided_with(&device(DeviceKind::Veth), ROUTE, &[], &BTreeMap::new()),
        Some(Err(RedirectRefusal::Unseen))
    );
}

#[test]
fn redirect_does_not_bypass_a_closed_netkit_pair() {
    let closed = |kind| {
        let link = LinkFacts { is_closed: true, ..device(kind).link };
        Device { link, ..device(kind) }
    };
    assert_eq!(decided(&closed(DeviceKind::Veth), ROUTE, &[]), Some(Err(RedirectRefusal::HasFilters)));
}

#[test]
fn no_packet_is_redirected_if_other_programs_run_after_npls_on_an_uplink() {
    let decided = |uplink: &Device, of_uplink: Option<Vec<AttachmentOwner>>| {
        let mut attachments = BTreeMap::from([(7, DeviceAttachments::default())]);
        let around = DeviceAttachments { egress: vec![other()], ..queue("htb") };
        attachments.extend(of_uplink.map(|ingress| (2, DeviceAttachments { ingress, ..around })));
        let (pod, devices) = ("10.244.1.5".parse().unwrap(), [device(DeviceKind::Veth), uplink.clone()]);
        let routes = BTreeMap::from([(pod, ROUTE)]);
        next_hops(&devices, &BTreeSet::from([2]), &routes, &attachments, &BTreeSet::new())[&pod].map(drop)
    };
    let uplink = Device { ifindex: 2, ..device(DeviceKind::Physical) };
    let refused = Err(RedirectRefusal::UplinkHasFilters);
    assert_eq!(decided(&uplink, Some(vec![])), Ok(()));
    assert_eq!(decided(&uplink, Some(vec![other(), AttachmentOwner::Npl])), Ok(()));
    assert_eq!(decided(&uplink, Some(vec![AttachmentOwner::Npl, other()])), refused);
    assert_eq!(decided(&uplink, Some(vec![other()])), refused);
    assert_eq!(decided(&uplink, None), refused, "the attachments are unknown");
    assert_eq!(decided(&Device { link_layer: LinkLayer::None, ..uplink }, Some(vec![other()])), Ok(()));
}

#[test]
fn no_pod_of_a_family_with_uplinks_chosen_by_mark_is_redirected() {
    let pods = ["10.244.1.5", "2001:db8::5"].map(|text| text.parse().unwrap());
    let routes = BTreeMap::from(pods.map(|pod| (pod, ROUTE)));
    let attachments = BTreeMap::from([(7, DeviceAttachments::default())]);
    let hops = next_hops(&[device(DeviceKind::Veth)], &BTreeSet::new(), &routes, &attachments, &[Family::V4].into());
    let found = pods.map(|pod| hops[&pod].map(drop));
    assert_eq!(found, [Err(RedirectRefusal::RoutedByMark), Ok(())]);
}

#[test]
fn forwarding_accepts_only_its_three_values() {
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        assert_eq!(forwarding.as_str().parse(), Ok(forwarding));
    }
    let refused = "tunnel".parse::<Forwarding>().unwrap_err();
    assert_eq!(refused.to_string(), "\"tunnel\" is not a value of --forwarding: give stack, redirect or offload");
}

#[test]
fn uplinks_without_ethernet_and_of_vrfs_do_not_redirect() {
    let plain = || device(DeviceKind::Physical);
    let carried = |device: &Device| ProgramSet::of_uplink(device, Forwarding::Redirect);
    assert_eq!(carried(&plain()), ProgramSet::RedirectUplink);
    assert_eq!(carried(&Device { link_layer: LinkLayer::None, ..plain() }), ProgramSet::Uplink);
    assert_eq!(carried(&Device { master: Some(Master::Vrf), ..plain() }), ProgramSet::Uplink);
}

/// Cilium's own programs forward packets to its Pods. Routes lead to the Pods through `lxc…` devices if Cilium uses
/// endpoint routes; otherwise through `cilium_host`.
#[test]
fn the_stack_forwards_packets_of_pods_of_cilium() {
    let pod = "10.244.1.5".parse().unwrap();
    let decide = |devices: &[Device]| {
        let attachments = BTreeMap::from([(7, DeviceAttachments::default())]);
        let routes = BTreeMap::from([(pod, ROUTE)]);
        next_hops(devices, &BTreeSet::new(), &routes, &attachments, &BTreeSet::new()).remove(&pod).unwrap()
    };
    let host = Device { peer_is_elsewhere: false, ..Device::new(7, "cilium_host", DeviceKind::Veth) };
    assert_eq!(decide(&[host]), Err(RedirectRefusal::ForwardedByCilium));
    let host = Device::new(8, "cilium_host", DeviceKind::Veth);
    let of_pod = Device { name: "lxc0123".to_owned(), ..device(DeviceKind::Veth) };
    assert_eq!(decide(&[of_pod.clone(), host]), Err(RedirectRefusal::ForwardedByCilium));
    assert!(decide(&[of_pod]).is_ok(), "another CNI may use the name");
}

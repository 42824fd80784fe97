// SPDX-License-Identifier: Apache-2.0
//! `--forwarding`: which devices packets may go between without the host's stack, and why others may not.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    str::FromStr,
};

use super::devices::{Device, DeviceKind, LinkLayer, Master};

/// `--forwarding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwarding {
    /// The host routes what was translated, and its firewall sees it.
    Stack,
    /// What was translated goes from device to device, where both directions can.
    Redirect,
    /// The same, of flows that the host's routes and firewall let through; these see a packet of each now and then.
    Offload,
}

impl Forwarding {
    /// As on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stack => "stack",
            Self::Redirect => "redirect",
            Self::Offload => "offload",
        }
    }
}

/// No way of forwarding.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no way of forwarding: give stack, redirect or offload")]
pub struct ForwardingError(String);

impl FromStr for Forwarding {
    type Err = ForwardingError;

    fn from_str(text: &str) -> Result<Self, ForwardingError> {
        match text {
            "stack" => Ok(Self::Stack),
            "redirect" => Ok(Self::Redirect),
            "offload" => Ok(Self::Offload),
            _ => Err(ForwardingError(text.to_owned())),
        }
    }
}

/// What a device's programs do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Carries {
    /// Requests come in and replies go out, by way of the host's stack.
    Uplink,
    /// The same, and a request may leave for a Pod at once.
    DirectUplink,
    /// The same, of flows that the host's stack lets through.
    OffloadUplink,
    /// Replies of Pods come in, and may leave for the client at once.
    Pods,
    /// The same, of flows that the host's stack lets through; what it lets through is seen there.
    OffloadPods,
}

impl Carries {
    /// Of an uplink. Frames without Ethernet headers have to get some on the way to a Pod, and a virtual router has routes of
    /// its own; the host knows both.
    pub fn of_uplink(device: &Device, forwarding: Forwarding) -> Self {
        let is_plain = device.link_layer == LinkLayer::Ethernet && device.master != Some(Master::Vrf);
        match forwarding {
            _ if !is_plain => Self::Uplink,
            Forwarding::Stack => Self::Uplink,
            Forwarding::Redirect => Self::DirectUplink,
            Forwarding::Offload => Self::OffloadUplink,
        }
    }

    /// Of a device that leads to Pods past the host's stack.
    pub const fn pods(forwarding: Forwarding) -> Self {
        if matches!(forwarding, Forwarding::Offload) { Self::OffloadPods } else { Self::Pods }
    }

    /// Whether replies may leave by it that did not take the host's stack.
    pub const fn is_direct_uplink(self) -> bool {
        matches!(self, Self::DirectUplink | Self::OffloadUplink)
    }
}

/// What is to stand where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// Devices that carry programs, by their index.
    pub devices: BTreeMap<u32, Carries>,
    /// Pods that packets are redirected to, by their address. Each one's device is among those.
    pub pods: BTreeMap<IpAddr, PodWay>,
}

/// The Node's route to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The device that it leaves by, by its index.
    pub ifindex: u32,
    /// Whether another host is to pass packets on.
    pub has_gateway: bool,
    /// The largest packet that the route itself allows, in bytes, if it says so.
    pub mtu: Option<u32>,
}

/// How a Pod is reached without the host's stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodWay {
    /// Its device on the Node, by the index.
    pub ifindex: u32,
    /// How that leads to it.
    pub way: Way,
    /// The largest packet that fits, in bytes with its IP header.
    pub mtu: u16,
}

/// How a device leads to Pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Its other end is the Pod's.
    Peer,
    /// It is a bridge, which finds the Pod by its neighbour entry.
    Bridge,
}

impl Way {
    /// For tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Peer => "its device ends there",
            Self::Bridge => "by a bridge",
        }
    }
}

/// Why packets take the host's stack to a Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Clients are behind it too, and replies could not be told from requests.
    IsUplink,
    /// It is one end of a pair whose other end is on the Node itself.
    EndsOnTheNode,
    /// Others decide there where a packet goes: Open vSwitch, ipvlan, macvlan, a tunnel …
    UnknownKind,
    /// Whoever it belongs to forwards its packets.
    IsEnslaved,
    /// Frames have no Ethernet header.
    NoEthernet,
    /// Another host passes packets on to it.
    HasGateway,
}

impl Refusal {
    /// For tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::IsUplink => "clients are behind its device too",
            Self::EndsOnTheNode => "the other end of its device is on the Node itself",
            Self::UnknownKind => "its device is neither a pair that ends in a Pod nor a bridge",
            Self::IsEnslaved => "its device belongs to another one",
            Self::NoEthernet => "its device has no Ethernet headers",
            Self::HasGateway => "the route to it has a gateway",
        }
    }
}

/// How each Pod is reached without the host's stack, or why it is not.
pub fn ways_to_pods(
    devices: &[Device],
    uplinks: &BTreeSet<u32>,
    routes: &BTreeMap<IpAddr, Route>,
) -> BTreeMap<IpAddr, Result<PodWay, Refusal>> {
    let device_of = |route: &Route| devices.iter().find(|device| device.ifindex == route.ifindex);
    let decide = |(addr, route): (&IpAddr, &Route)| Some((*addr, way_of(route, device_of(route)?, uplinks)));
    routes.iter().filter_map(decide).collect()
}

fn way_of(route: &Route, device: &Device, uplinks: &BTreeSet<u32>) -> Result<PodWay, Refusal> {
    if route.has_gateway {
        return Err(Refusal::HasGateway);
    }
    let way = way_by(device, uplinks)?;
    let mtu = route.mtu.map_or(device.link.mtu, |mtu| mtu.min(device.link.mtu));
    Ok(PodWay { ifindex: device.ifindex, way, mtu: u16::try_from(mtu).unwrap_or(u16::MAX) })
}

fn way_by(device: &Device, uplinks: &BTreeSet<u32>) -> Result<Way, Refusal> {
    if uplinks.contains(&device.ifindex) {
        return Err(Refusal::IsUplink);
    }
    if device.master.is_some() {
        return Err(Refusal::IsEnslaved);
    }
    if device.link_layer != LinkLayer::Ethernet {
        return Err(Refusal::NoEthernet);
    }
    match device.kind {
        DeviceKind::Veth if device.peer_is_elsewhere => Ok(Way::Peer),
        DeviceKind::Veth => Err(Refusal::EndsOnTheNode),
        DeviceKind::Bridge => Ok(Way::Bridge),
        DeviceKind::Physical
        | DeviceKind::Loopback
        | DeviceKind::Dummy
        | DeviceKind::Tunnel
        | DeviceKind::Vrf
        | DeviceKind::Other => Err(Refusal::UnknownKind),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::{Carries, Forwarding, PodWay, Refusal, Route, Way, ways_to_pods};
    use crate::core::devices::{Device, DeviceKind, LinkFacts, LinkLayer, Master};

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
        let pod = "10.244.1.5".parse().unwrap();
        let uplinks = uplinks.iter().copied().collect::<BTreeSet<u32>>();
        ways_to_pods(std::slice::from_ref(device), &uplinks, &BTreeMap::from([(pod, route)])).remove(&pod)
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
    fn uplinks_without_ethernet_and_of_virtual_routers_take_the_stack() {
        let plain = || device(DeviceKind::Physical);
        let carried = |device: &Device| Carries::of_uplink(device, Forwarding::Redirect);
        assert_eq!(carried(&plain()), Carries::DirectUplink);
        assert_eq!(carried(&Device { link_layer: LinkLayer::None, ..plain() }), Carries::Uplink);
        assert_eq!(carried(&Device { master: Some(Master::Vrf), ..plain() }), Carries::Uplink);
    }

    #[test]
    fn only_what_is_there_can_be_chosen() {
        for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
            assert_eq!(forwarding.as_str().parse(), Ok(forwarding));
        }
        let refused = "tunnel".parse::<Forwarding>().unwrap_err();
        assert_eq!(refused.to_string(), "\"tunnel\" is no way of forwarding: give stack, redirect or offload");
    }
}

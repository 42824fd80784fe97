// SPDX-License-Identifier: Apache-2.0
//! `--forwarding`: which devices packets may go between without the host's stack, and why others may not.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    str::FromStr,
};

use super::{
    Device, DeviceKind, LinkLayer, Master,
    attachments::{DeviceAttachments, Side},
};

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
#[error("{0:?} is not a value of --forwarding: give stack, redirect or offload")]
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
pub enum ProgramSet {
    /// Requests come in and replies go out, by way of the host's stack.
    Uplink,
    /// The same, and a request may leave for a Pod at once.
    RedirectUplink,
    /// The same, of flows that the host's stack lets through.
    OffloadUplink,
    /// Replies of Pods come in, and may leave for the client at once.
    Pods,
    /// The same, of flows that the host's stack lets through; what it lets through is seen there.
    OffloadPods,
}

impl ProgramSet {
    /// Of an uplink. Frames without Ethernet headers have to get some on the way to a Pod, and a virtual router has routes of
    /// its own; the host knows both.
    pub fn of_uplink(device: &Device, forwarding: Forwarding) -> Self {
        let is_plain = device.link_layer == LinkLayer::Ethernet && device.master != Some(Master::Vrf);
        match forwarding {
            _ if !is_plain => Self::Uplink,
            Forwarding::Stack => Self::Uplink,
            Forwarding::Redirect => Self::RedirectUplink,
            Forwarding::Offload => Self::OffloadUplink,
        }
    }

    /// Of a device that leads to Pods past the host's stack.
    pub const fn pods(forwarding: Forwarding) -> Self {
        if matches!(forwarding, Forwarding::Offload) { Self::OffloadPods } else { Self::Pods }
    }

    /// Whether replies may leave by it that did not take the host's stack.
    pub const fn is_redirect_uplink(self) -> bool {
        matches!(self, Self::RedirectUplink | Self::OffloadUplink)
    }
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
pub struct PodNextHop {
    /// Its device on the Node, by the index.
    pub ifindex: u32,
    /// How that leads to it.
    pub kind: HopKind,
    /// The largest packet that fits, in bytes with its IP header.
    pub mtu: u16,
}

/// How a device leads to Pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HopKind {
    /// Its other end is the Pod's.
    Peer,
    /// It is a bridge, which finds the Pod by its neighbour entry.
    Bridge,
}

impl HopKind {
    /// For tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Peer => "veth peer",
            Self::Bridge => "bridge",
        }
    }
}

/// Why packets take the host's stack to a Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RedirectRefusal {
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
    /// A queue of its device holds packets back, or drops them, as others have set it.
    HasLimit,
    /// Programs or filters of others see what passes its device.
    HasFilters,
    /// The same of what comes in by an uplink, behind ours.
    UplinkHasFilters,
    /// What others have there could not be looked at.
    Unseen,
}

impl RedirectRefusal {
    /// For tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::IsUplink => "its device is also an uplink",
            Self::EndsOnTheNode => "the veth peer of its device is on the Node",
            Self::UnknownKind => "its device is neither a veth pair into the Pod nor a bridge",
            Self::IsEnslaved => "its device is enslaved to another one",
            Self::NoEthernet => "its device has no Ethernet headers",
            Self::HasGateway => "the route to the Pod has a gateway",
            Self::HasLimit => "a qdisc of its device shapes or polices traffic",
            Self::HasFilters => "its device has programs or filters of other software",
            Self::UplinkHasFilters => "an uplink has programs or filters of other software behind NPL's",
            Self::Unseen => "the programs and filters of its device cannot be listed",
        }
    }
}

/// How each Pod is reached without the host's stack, or why it is not.
pub fn next_hops(
    devices: &[Device],
    uplinks: &BTreeSet<u32>,
    routes: &BTreeMap<IpAddr, Route>,
    attachments: &BTreeMap<u32, DeviceAttachments>,
) -> BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>> {
    let device = |ifindex: u32| devices.iter().find(|device| device.ifindex == ifindex);
    // Of all uplinks, since replies may leave by another than their requests came in by, and take the same way or break.
    let are_clear = uplinks.iter().filter_map(|ifindex| device(*ifindex)).all(|uplink| is_clear(uplink, attachments));
    let decide = |(addr, route): (&IpAddr, &Route)| {
        let device = device(route.ifindex)?;
        let hop = next_hop(route, device, uplinks, attachments.get(&device.ifindex));
        Some((*addr, if are_clear { hop } else { hop.and(Err(RedirectRefusal::UplinkHasFilters)) }))
    };
    routes.iter().filter_map(decide).collect()
}

/// Whether others miss nothing of what leaves an uplink for Pods at once; nothing leaves one so that takes the stack.
fn is_clear(uplink: &Device, attachments: &BTreeMap<u32, DeviceAttachments>) -> bool {
    let has_others = || attachments.get(&uplink.ifindex).is_none_or(DeviceAttachments::has_others_behind_npl);
    !ProgramSet::of_uplink(uplink, Forwarding::Redirect).is_redirect_uplink() || !has_others()
}

fn next_hop(
    route: &Route,
    device: &Device,
    uplinks: &BTreeSet<u32>,
    attachments: Option<&DeviceAttachments>,
) -> Result<PodNextHop, RedirectRefusal> {
    if route.has_gateway {
        return Err(RedirectRefusal::HasGateway);
    }
    let kind = hop_kind(device, uplinks)?;
    check_bypass(kind, device, attachments)?;
    let mtu = route.mtu.map_or(device.link.mtu, |mtu| mtu.min(device.link.mtu));
    Ok(PodNextHop { ifindex: device.ifindex, kind, mtu: u16::try_from(mtu).unwrap_or(u16::MAX) })
}

fn hop_kind(device: &Device, uplinks: &BTreeSet<u32>) -> Result<HopKind, RedirectRefusal> {
    if uplinks.contains(&device.ifindex) {
        return Err(RedirectRefusal::IsUplink);
    }
    if device.master.is_some() {
        return Err(RedirectRefusal::IsEnslaved);
    }
    if device.link_layer != LinkLayer::Ethernet {
        return Err(RedirectRefusal::NoEthernet);
    }
    match device.kind {
        DeviceKind::Veth if device.peer_is_elsewhere => Ok(HopKind::Peer),
        DeviceKind::Veth => Err(RedirectRefusal::EndsOnTheNode),
        DeviceKind::Bridge => Ok(HopKind::Bridge),
        DeviceKind::Physical
        | DeviceKind::Loopback
        | DeviceKind::Dummy
        | DeviceKind::Tunnel
        | DeviceKind::Vrf
        | DeviceKind::Other => Err(RedirectRefusal::UnknownKind),
    }
}

/// Replies leave a device of Pods where they come in. Requests come to a bridge as the host's do; to the other end of a pair
/// they are handed, past all that they would meet on this one.
fn check_bypass(
    kind: HopKind,
    device: &Device,
    attachments: Option<&DeviceAttachments>,
) -> Result<(), RedirectRefusal> {
    let attachments = attachments.ok_or(RedirectRefusal::Unseen)?;
    if kind == HopKind::Peer && attachments.has_limit() {
        return Err(RedirectRefusal::HasLimit);
    }
    let requests_bypass = kind == HopKind::Peer && (attachments.has_others(Side::Egress) || device.link.is_closed);
    if requests_bypass || attachments.has_others(Side::Ingress) { Err(RedirectRefusal::HasFilters) } else { Ok(()) }
}

#[cfg(test)]
mod tests;

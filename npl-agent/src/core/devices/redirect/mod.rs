// SPDX-License-Identifier: Apache-2.0
//! Decides to which Pods packets are redirected with `--forwarding redirect` and `offload`. If packets to a Pod are not
//! redirected, returns the reason why the host's stack forwards these packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    str::FromStr,
};

use super::{
    Device, DeviceKind, LinkLayer, Master,
    attachments::{DeviceAttachments, Side},
};
use crate::core::{model::Family, networks::CILIUM_HOST};

/// The value of the flag `--forwarding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwarding {
    /// The host's stack forwards translated packets: routing, netfilter, kernel conntrack.
    Stack,
    /// Translated packets of a Pod are redirected from device to device if redirect is possible in both directions.
    Redirect,
    /// The host's stack forwards the first packets of a flow, and later one packet per direction every 256 jiffies. The
    /// programs redirect the packets in between.
    Offload,
}

impl Forwarding {
    /// The value of `--forwarding` for this mode.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stack => "stack",
            Self::Redirect => "redirect",
            Self::Offload => "offload",
        }
    }
}

/// The error for a text that is not a value of `--forwarding`.
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

/// Whether to redirect packets on a Node with a policy engine whose rules a redirect would bypass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NetworkPolicy {
    /// The host's stack forwards all packets, so the policy engine's rules apply.
    #[default]
    Applies,
    /// Packets are redirected in spite of the policy engine, because `--ignore-network-policy` is set.
    Ignored,
}

/// The set of TC programs that the agent attaches to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProgramSet {
    /// The programs of an uplink: they translate requests at ingress and replies at egress.
    Uplink,
    /// The programs of an uplink whose ingress program redirects requests to Pods.
    RedirectUplink,
    /// The programs of an uplink whose ingress program redirects requests of a flow if the host's stack has recently
    /// forwarded packets of the flow.
    OffloadUplink,
    /// The program of a Pod's device: it translates replies at ingress and redirects the replies to the client.
    Pods,
    /// The programs of a Pod's device. The ingress program translates and redirects the replies of a flow if the host's
    /// stack has recently forwarded packets of the flow. The egress program records the requests that the stack has
    /// forwarded.
    OffloadPods,
}

impl ProgramSet {
    /// The programs for an uplink. On an uplink without Ethernet headers, and on an uplink in a VRF, which has its own
    /// routes, the host's stack forwards all packets.
    pub fn of_uplink(device: &Device, forwarding: Forwarding) -> Self {
        let is_plain = device.link_layer == LinkLayer::Ethernet && device.master != Some(Master::Vrf);
        match forwarding {
            _ if !is_plain => Self::Uplink,
            Forwarding::Stack => Self::Uplink,
            Forwarding::Redirect => Self::RedirectUplink,
            Forwarding::Offload => Self::OffloadUplink,
        }
    }

    /// The programs for a device that leads to Pods.
    pub const fn pods(forwarding: Forwarding) -> Self {
        if matches!(forwarding, Forwarding::Offload) { Self::OffloadPods } else { Self::Pods }
    }

    /// Whether replies may be redirected to a device with this set of programs.
    pub const fn is_redirect_uplink(self) -> bool {
        matches!(self, Self::RedirectUplink | Self::OffloadUplink)
    }
}

/// The Node's route to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The ifindex of the outgoing device.
    pub ifindex: u32,
    /// Whether the route has a gateway.
    pub has_gateway: bool,
    /// The MTU of the route in bytes; `None` if the route has no MTU.
    pub mtu: Option<u32>,
}

/// The next hop of a Pod with `--forwarding redirect` or `offload`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodNextHop {
    /// The ifindex of the device on the Node that leads to the Pod.
    pub ifindex: u32,
    /// The kind of the device that leads to the Pod.
    pub kind: HopKind,
    /// The MTU of the route or the MTU of the device, whichever is smaller, in bytes.
    pub mtu: u16,
}

/// The kind of a device that leads to Pods. The kind decides how packets are redirected to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HopKind {
    /// One end of a veth or netkit pair whose other end is in the Pod.
    Peer,
    /// A bridge: a packet that is redirected to the bridge gets its destination MAC address from the Pod's entry in the
    /// neighbor table.
    Bridge,
}

impl HopKind {
    /// The name of this kind in tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Peer => "veth peer",
            Self::Bridge => "bridge",
        }
    }
}

/// The reason why the host's stack forwards packets to a Pod, although `--forwarding redirect` or `offload` is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RedirectRefusal {
    /// The device that leads to the Pod is also an uplink, so the programs could not distinguish replies from requests.
    IsUplink,
    /// The device is one end of a veth pair whose other end is in the same network namespace, so the pair leads into no
    /// Pod.
    EndsOnTheNode,
    /// The device is of a kind that forwards packets by its own rules, such as Open vSwitch, ipvlan, macvlan or a
    /// tunnel.
    UnknownKind,
    /// The device has a master (bridge, bond, VRF), which forwards the packets of the device.
    IsEnslaved,
    /// The device has no Ethernet headers.
    NoEthernet,
    /// The route to the Pod has a gateway.
    HasGateway,
    /// A qdisc of the device shapes or polices traffic, and a redirect would bypass the qdisc.
    HasLimit,
    /// The device has programs or filters of other software, which a redirect would bypass; or the device is a netkit
    /// device whose policy drops every packet that no program accepts.
    HasFilters,
    /// The device belongs to Cilium, whose own programs forward the packets of its Pods.
    ForwardedByCilium,
    /// A policy engine filters packets in netfilter, which a redirect would bypass; or netfilter's rules cannot be
    /// read, so the Node may have a policy engine of this kind.
    NetworkPolicy,
    /// On an uplink, ingress programs or filters of other software run after NPL's program, and a redirect would bypass
    /// those programs and filters.
    UplinkHasFilters,
    /// Policy routing rules choose the uplink by a packet's mark, which the route look-up of a redirect ignores.
    RoutedByMark,
    /// The agent cannot list the programs and filters on the device.
    Unseen,
}

impl RedirectRefusal {
    /// The text of the reason in tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::IsUplink => "its device is also an uplink",
            Self::EndsOnTheNode => "the veth peer of its device is on the Node",
            Self::UnknownKind => "its device is neither a veth pair into the Pod nor a bridge",
            Self::IsEnslaved => "its device is enslaved to another device",
            Self::NoEthernet => "its device has no Ethernet headers",
            Self::HasGateway => "the route to the Pod has a gateway",
            Self::HasLimit => "a qdisc of its device shapes or polices traffic",
            Self::HasFilters => "its device has programs or filters of other software",
            Self::ForwardedByCilium => {
                "Cilium forwards packets of its Pods by its own programs: a redirect would have no advantage"
            }
            Self::NetworkPolicy => "a redirect would bypass the Node's NetworkPolicy",
            Self::UplinkHasFilters => "an uplink has programs or filters of other software behind NPL's",
            Self::RoutedByMark => {
                "policy routing rules choose the uplink by packet marks (`ip rule`, fwmark), which a redirect ignores: \
                 use --forwarding stack"
            }
            Self::Unseen => "the programs and filters of its device cannot be listed",
        }
    }
}

/// Returns the next hop of each Pod, or the reason why the host's stack forwards packets to the Pod.
pub fn next_hops(
    devices: &[Device],
    uplinks: &BTreeSet<u32>,
    routes: &BTreeMap<IpAddr, Route>,
    attachments: &BTreeMap<u32, DeviceAttachments>,
    routed_by_mark: &BTreeSet<Family>,
) -> BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>> {
    let device = |ifindex: u32| devices.iter().find(|device| device.ifindex == ifindex);
    // Either both directions of a flow are redirected, or neither direction is. All uplinks are checked, because a
    // reply may leave through another uplink than the one on which its request arrived.
    let are_clear = uplinks.iter().filter_map(|ifindex| device(*ifindex)).all(|uplink| is_clear(uplink, attachments));
    let has_cilium = devices.iter().any(|device| device.name == CILIUM_HOST);
    let decide = |(addr, route): (&IpAddr, &Route)| {
        let device = device(route.ifindex)?;
        let found = if has_cilium && is_of_cilium(device) {
            Err(RedirectRefusal::ForwardedByCilium)
        } else {
            next_hop(route, device, uplinks, attachments.get(&device.ifindex))
        };
        let hop = found.and_then(|hop| {
            if !are_clear {
                Err(RedirectRefusal::UplinkHasFilters)
            } else if routed_by_mark.contains(&Family::of(*addr)) {
                Err(RedirectRefusal::RoutedByMark)
            } else {
                Ok(hop)
            }
        });
        Some((*addr, hop))
    };
    routes.iter().filter_map(decide).collect()
}

/// Whether Cilium has created the device: `cilium_host`, through which routes lead to all Pods, or the device of a
/// single Pod.
fn is_of_cilium(device: &Device) -> bool {
    device.name.starts_with("cilium_") || device.name.starts_with("lxc")
}

/// Whether a redirect at this uplink bypasses no program or filter of other software. The result is also true if the
/// programs for the uplink redirect no packets.
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
    // The kind is the reason for a device of Open vSwitch, such as `antrea-gw0`, although the device is also an uplink.
    let has_known_kind = matches!(device.kind, DeviceKind::Veth | DeviceKind::Bridge);
    if has_known_kind && uplinks.contains(&device.ifindex) {
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

/// Checks that a redirect bypasses no qdisc, program or filter of other software on the Pod's device. Replies are
/// redirected at ingress of the Pod's device. Requests that are redirected to a bridge run through the bridge's egress
/// hook, so the check ignores attachments there. Requests that are redirected to a veth or netkit pair bypass the
/// egress hook of the Node's end, because the Pod's end receives the requests directly.
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

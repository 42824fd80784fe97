// SPDX-License-Identifier: Apache-2.0
//! Decides to which devices the programs are attached, and on which of the Node's addresses NPL serves node ports.
//! Every decision about a device comes with the reason for the decision.

pub mod attachments;
pub mod filter_order;
pub mod forged_sources;
pub mod grace_periods;
pub mod node_network;
pub mod plan;
pub mod planner;
pub mod redirect;
pub mod reply_routing;
pub mod takeover;
pub mod xdp;

use std::net::IpAddr;

/// The kind of a network device, as far as the choice of uplinks depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A hardware network device, or a network device that a hypervisor emulates.
    Physical,
    /// The loopback device `lo`.
    Loopback,
    /// One end of a veth pair. The other end is usually in a Pod. If the Node itself is a container, the Node's uplink
    /// is also a veth.
    Veth,
    /// A bridge; usually the bridge of a CNI, sometimes the Node's uplink.
    Bridge,
    /// A dummy device, which has addresses but no traffic.
    Dummy,
    /// A tunnel, such as a vxlan, geneve, ipip, wireguard or tun device.
    Tunnel,
    /// A virtual router (VRF), which routes the packets that its member devices have received.
    Vrf,
    /// A device of any other kind, such as VLAN, bond or team; such a device may be an uplink.
    Other,
}

/// Where the IP header begins in the packets of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// The IP header follows an Ethernet header.
    Ethernet,
    /// The packet begins with the IP header: point-to-point tunnels, PPP, raw IP.
    None,
    /// The IP header follows an Ethernet header and a VLAN tag: a VLAN device with `reorder_hdr off` leaves the tag in
    /// the frame.
    Tagged,
    /// The IP header follows the outer headers of a tunnel: a GRE device without a remote address leaves the outer
    /// headers in its packets.
    Outer,
    /// The IP header follows a link-layer header that NPL's programs do not parse, such as the link-layer header of
    /// InfiniBand.
    Other,
}

/// The kind of a device's master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Master {
    /// The master is a bond, bridge or team, which receives the frames of its members.
    ReceivesFrames,
    /// The master is a virtual router (VRF).
    Vrf,
}

/// A network device of the Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The ifindex of the device.
    pub ifindex: u32,
    /// The name of the device.
    pub name: String,
    /// The kind of the device.
    pub kind: DeviceKind,
    /// The link layer of the device's packets.
    pub link_layer: LinkLayer,
    /// The kind of the device's master; `None` if the device has no master.
    pub master: Option<Master>,
    /// Whether the device is one end of a veth or netkit pair whose other end is in another network namespace.
    pub peer_is_elsewhere: bool,
    /// Whether the main routing table has a default route through the device.
    pub has_default_route: bool,
    /// Whether a route with a gateway leaves through the device.
    pub has_gateway_route: bool,
    /// The device's IP addresses of global scope, in the order of the kernel's list.
    pub addresses: Vec<IpAddr>,
    /// Driver, MTU and further properties of the link.
    pub link: LinkFacts,
}

impl Device {
    /// Creates an Ethernet device without a master, default route and addresses, and with default link properties.
    #[must_use]
    pub fn new(ifindex: u32, name: &str, kind: DeviceKind) -> Self {
        Self {
            ifindex,
            name: name.to_owned(),
            kind,
            link_layer: LinkLayer::Ethernet,
            master: None,
            peer_is_elsewhere: false,
            has_default_route: false,
            has_gateway_route: false,
            addresses: Vec::new(),
            link: LinkFacts::default(),
        }
    }
}

/// Properties of a device's link.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkFacts {
    /// The name of the driver, if the device is hardware.
    pub driver: Option<String>,
    /// The MTU of the device in bytes.
    pub mtu: u32,
    /// Whether the device is a bridge with a port that may lead out of the Node: a hardware device, or a virtual device
    /// such as a VLAN, a macvlan or a bond.
    pub has_physical_port: bool,
    /// Whether VLAN, macvlan or ipvlan devices are on top of the device.
    pub has_upper_devices: bool,
    /// The ifindex of the lower device of a macvlan or ipvlan device, which shares the network of its lower device;
    /// `None` for devices of other kinds.
    pub shares_network_of: Option<u32>,
    /// Whether the device is a netkit device whose policy drops every packet that no program accepts.
    pub is_closed: bool,
    /// Whether the device has an `ingress` qdisc, which has no egress hook, unlike `clsact`.
    pub has_ingress_queue: bool,
    /// Whether the device has a `clsact` qdisc.
    pub has_clsact: bool,
}

/// The text, for logs and the doctor, that says why a device with an `ingress` qdisc is unsupported before Linux 6.6.
pub const HAS_INGRESS_QUEUE: &str = "has an ingress qdisc, which has no egress hook: replace it with clsact, to \
                                     which the same filters can be attached";

/// The TC hook of a program, seen from the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Packets that arrive on the device: requests on an uplink, replies on a Pod's device.
    Ingress,
    /// Packets that leave through an uplink: replies to clients.
    Egress,
    /// Packets that leave through a Pod's device: requests that the host's stack forwarded.
    ToPods,
}

impl Direction {
    /// All TC hooks of uplinks and Pods' devices.
    pub const ALL: [Self; 3] = [Self::Ingress, Self::Egress, Self::ToPods];

    /// The name of the hook in tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress | Self::ToPods => "egress",
        }
    }
}

/// The number of uplinks with NPL's programs, and the number of devices that need the programs but do not have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// The number of uplinks to which the programs are attached.
    pub attached: usize,
    /// The number of uplinks to which the programs could not be attached, and of devices that clients may use although
    /// the programs do not support their link layer. The agent tries again at each survey of the devices.
    pub failed: usize,
}

/// The devices that `--devices` selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSelection {
    /// The devices that the rules of [`choose`] select.
    Auto,
    /// The devices with these names, and no others.
    Named(Vec<String>),
}

/// The reason why NPL's programs are, or are not, attached to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UplinkReason {
    /// `--devices` names the device.
    Named,
    /// `--devices` names devices, but not this device.
    NotNamed,
    /// The device has a published address of the Node.
    HasNodeAddress,
    /// The main routing table has a default route through the device.
    HasDefaultRoute,
    /// A route with a gateway leaves through the device. The device has no address, or is one end of a veth pair whose
    /// other end is in another network namespace.
    HasGatewayRoute,
    /// The device is a bridge with an address, and with a port that may lead out of the Node
    /// ([`LinkFacts::has_physical_port`]): clients may be reachable through that port.
    BridgesPhysicalPort,
    /// The device is a tunnel, through which replies to Pods of other Nodes leave.
    IsTunnel,
    /// The device has an address, and a device of this kind may be an uplink.
    IsUplink,
    /// An earlier agent attached the programs. The programs stay attached until the Node's published addresses are
    /// known.
    Kept,
    /// The device was an uplink less than a grace period ago, and the device's address or route may return.
    InGracePeriod,
    /// The programs are not attached to this device, but to its master (bond, bridge or team).
    IsEnslaved,
    /// The device is a VRF: the programs are attached to its member devices instead.
    IsVrf,
    /// The device is `lo`: cgroup programs serve local clients, and the TC programs are not needed.
    IsLoopback,
    /// The device is a dummy device, which has no traffic.
    IsDummy,
    /// The device is a veth or a bridge to which no reason for an uplink applies, so the device leads to Pods.
    LeadsToPods,
    /// The device has no address, so no client can send to it.
    HasNoAddress,
    /// The device's link layer is [`LinkLayer::Tagged`], which the programs do not support.
    LeavesTags,
    /// The device's link layer is [`LinkLayer::Outer`], which the programs do not support.
    ShowsOuterHeaders,
    /// The device's link layer is [`LinkLayer::Other`], which the programs do not support.
    HasOtherLinkLayer,
}

impl UplinkReason {
    /// The text of the reason in tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Named => "named by --devices",
            Self::NotNamed => "not named by --devices",
            Self::HasNodeAddress => "has a Node address",
            Self::HasDefaultRoute => "has a default route",
            Self::HasGatewayRoute => "a route with a gateway leaves through the device",
            Self::BridgesPhysicalPort => "bridge with an address and a port that may lead out of the Node",
            Self::IsTunnel => "tunnel to other Nodes",
            Self::IsUplink => "uplink with an address",
            Self::Kept => "attached by an earlier agent; kept until the Node's addresses are known",
            Self::InGracePeriod => "was an uplink a moment ago; kept for a grace period",
            Self::IsEnslaved => "the programs are attached to its master",
            Self::IsVrf => "the programs are attached to its members",
            Self::IsLoopback => "loopback",
            Self::IsDummy => "a dummy device has no traffic",
            Self::LeadsToPods => "leads to Pods",
            Self::HasNoAddress => "has no address",
            Self::LeavesTags => "leaves VLAN tags in frames: set it to `reorder_hdr on`",
            Self::ShowsOuterHeaders => {
                "a GRE tunnel without a remote address exposes its outer headers: set `remote` or `external`"
            }
            Self::HasOtherLinkLayer => "its packets begin with neither an Ethernet nor an IP header",
        }
    }

    /// Whether clients can send to the Node's published address through an uplink with this reason. [`Self::IsTunnel`]
    /// means that this address is not on the tunnel, and that no default route leads through the tunnel. Replies to
    /// Pods of other Nodes leave through such a tunnel, but clients do not send requests to the tunnel.
    pub const fn reaches_clients(self) -> bool {
        !matches!(self, Self::IsTunnel)
    }

    /// Whether a device that stops being an uplink for this reason is still treated as an uplink for a grace period.
    pub const fn has_grace_period(self) -> bool {
        matches!(self, Self::LeadsToPods | Self::HasNoAddress)
    }

    /// Whether this reason means that clients may use the device although the programs do not support it.
    pub const fn is_unsupported(self) -> bool {
        matches!(self, Self::LeavesTags | Self::ShowsOuterHeaders | Self::HasOtherLinkLayer)
    }
}

/// Decides whether the programs are attached to a device, and returns the reason.
///
/// Requests arrive on devices with the Node's addresses; replies leave through any device that does not lead to Pods.
/// So an uplink gets the programs for both directions. Until the Node's addresses are known, a device keeps the
/// programs of an earlier agent. An agent that starts without an API server therefore does not interrupt traffic. A
/// device whose headers the programs do not parse gets no programs.
pub fn choose(
    device: &Device,
    selection: &DeviceSelection,
    node_ips: &[IpAddr],
    is_attached: bool,
) -> Result<UplinkReason, UplinkReason> {
    let chosen = match selection {
        DeviceSelection::Named(names) if names.contains(&device.name) => Ok(UplinkReason::Named),
        DeviceSelection::Named(_) => Err(UplinkReason::NotNamed),
        DeviceSelection::Auto => choose_by_rules(device, node_ips)
            .or_else(|reason| if is_attached && node_ips.is_empty() { Ok(UplinkReason::Kept) } else { Err(reason) }),
    };
    let reason = chosen?;
    match unsupported_link_layer(device.link_layer) {
        None => Ok(reason),
        // A tunnel device without an address has no traffic, for example `gre0`, which the kernel module creates.
        Some(_) if reason == UplinkReason::IsTunnel && device.addresses.is_empty() => Err(UplinkReason::HasNoAddress),
        Some(unsupported_link_layer) => Err(unsupported_link_layer),
    }
}

const fn unsupported_link_layer(link_layer: LinkLayer) -> Option<UplinkReason> {
    match link_layer {
        LinkLayer::Ethernet | LinkLayer::None => None,
        LinkLayer::Tagged => Some(UplinkReason::LeavesTags),
        LinkLayer::Outer => Some(UplinkReason::ShowsOuterHeaders),
        LinkLayer::Other => Some(UplinkReason::HasOtherLinkLayer),
    }
}

fn choose_by_rules(device: &Device, node_ips: &[IpAddr]) -> Result<UplinkReason, UplinkReason> {
    match device.kind {
        DeviceKind::Loopback => return Err(UplinkReason::IsLoopback),
        DeviceKind::Dummy => return Err(UplinkReason::IsDummy),
        DeviceKind::Vrf => return Err(UplinkReason::IsVrf),
        _ if device.master == Some(Master::ReceivesFrames) => return Err(UplinkReason::IsEnslaved),
        DeviceKind::Physical | DeviceKind::Veth | DeviceKind::Bridge | DeviceKind::Tunnel | DeviceKind::Other => {}
    }
    if device.addresses.iter().any(|addr| node_ips.contains(addr)) {
        return Ok(UplinkReason::HasNodeAddress);
    }
    if device.has_default_route {
        return Ok(UplinkReason::HasDefaultRoute);
    }
    let has_address = !device.addresses.is_empty();
    match device.kind {
        DeviceKind::Tunnel => Ok(UplinkReason::IsTunnel),
        DeviceKind::Bridge if device.link.has_physical_port && has_address => Ok(UplinkReason::BridgesPhysicalPort),
        // If both ends of a veth pair are on the Node, such as Cilium's `cilium_host` and `cilium_net`, gateway routes
        // through the pair lead to Pods.
        DeviceKind::Veth if device.peer_is_elsewhere && device.has_gateway_route => Ok(UplinkReason::HasGatewayRoute),
        DeviceKind::Veth | DeviceKind::Bridge => Err(UplinkReason::LeadsToPods),
        DeviceKind::Physical | DeviceKind::Other | DeviceKind::Loopback | DeviceKind::Dummy | DeviceKind::Vrf => {
            if has_address {
                Ok(UplinkReason::IsUplink)
            } else if device.has_gateway_route {
                Ok(UplinkReason::HasGatewayRoute)
            } else {
                Err(UplinkReason::HasNoAddress)
            }
        }
    }
}

/// The addresses on which NPL serves node ports, by priority. The published addresses come first, except addresses that
/// no device has. The unpublished addresses of the devices follow, except addresses of dummy devices. Dummy devices are
/// excluded because kube-proxy in IPVS mode assigns all cluster IPs to a dummy device.
pub fn local_addresses(devices: &[Device], node_ips: &[IpAddr]) -> Vec<IpAddr> {
    let real = devices.iter().filter(|device| device.kind != DeviceKind::Dummy);
    let all: Vec<IpAddr> = real.flat_map(|device| device.addresses.iter().copied()).collect();
    let anywhere = |ip: &&IpAddr| devices.iter().any(|device| device.addresses.contains(ip));
    let mut ordered = Vec::new();
    for addr in node_ips.iter().filter(anywhere).copied().chain(all) {
        if !ordered.contains(&addr) {
            ordered.push(addr);
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::{
        Device, DeviceKind, DeviceSelection, LinkFacts, LinkLayer, Master, UplinkReason, choose, local_addresses,
    };

    const NODE_IP: &str = "192.0.2.11";

    fn device(name: &str, kind: DeviceKind, addresses: &[&str]) -> Device {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        Device { addresses, ..Device::new(2, name, kind) }
    }

    fn auto(device: &Device) -> Result<UplinkReason, UplinkReason> {
        choose(device, &DeviceSelection::Auto, &[NODE_IP.parse().unwrap()], false)
    }

    #[test]
    fn uplinks_and_tunnels_are_chosen_and_pod_devices_are_not() {
        let table = [
            (device("eth0", DeviceKind::Physical, &[NODE_IP]), Ok(UplinkReason::HasNodeAddress)),
            (device("eth1", DeviceKind::Physical, &["198.51.100.4"]), Ok(UplinkReason::IsUplink)),
            (device("eth2", DeviceKind::Physical, &[]), Err(UplinkReason::HasNoAddress)),
            (device("veth0", DeviceKind::Veth, &[NODE_IP]), Ok(UplinkReason::HasNodeAddress)),
            (device("cali123", DeviceKind::Veth, &[]), Err(UplinkReason::LeadsToPods)),
            (device("cni0", DeviceKind::Bridge, &["10.244.1.1"]), Err(UplinkReason::LeadsToPods)),
            (device("br0", DeviceKind::Bridge, &[NODE_IP]), Ok(UplinkReason::HasNodeAddress)),
            (device("flannel.1", DeviceKind::Tunnel, &["10.244.1.0"]), Ok(UplinkReason::IsTunnel)),
            (device("wg0", DeviceKind::Tunnel, &[]), Ok(UplinkReason::IsTunnel)),
            (device("kube-ipvs0", DeviceKind::Dummy, &["10.96.0.1"]), Err(UplinkReason::IsDummy)),
            (device("lo", DeviceKind::Loopback, &[]), Err(UplinkReason::IsLoopback)),
            (device("eth0.100", DeviceKind::Other, &["203.0.113.4"]), Ok(UplinkReason::IsUplink)),
        ];
        for (device, expected) in table {
            assert_eq!(auto(&device), expected, "{}", device.name);
        }
    }

    /// With the kernel's datapath, the internal ports of Open vSwitch are of the kind `openvswitch`, and its other ports
    /// are enslaved to `ovs-system`.
    #[test]
    fn the_gateway_and_the_nodes_bridge_of_open_vswitch_are_uplinks_and_its_other_ports_are_not() {
        let port = |name, kind| Device { master: Some(Master::ReceivesFrames), ..device(name, kind, &[]) };
        let table = [
            (device("antrea-gw0", DeviceKind::Other, &["10.244.1.1"]), Ok(UplinkReason::IsUplink)),
            (device("br-ex", DeviceKind::Other, &[NODE_IP]), Ok(UplinkReason::HasNodeAddress)),
            (device("ovs-system", DeviceKind::Other, &[]), Err(UplinkReason::HasNoAddress)),
            (port("eth0", DeviceKind::Physical), Err(UplinkReason::IsEnslaved)),
            (port("web-0-1a2b3c", DeviceKind::Veth), Err(UplinkReason::IsEnslaved)),
        ];
        for (device, expected) in table {
            assert_eq!(auto(&device), expected, "{}", device.name);
        }
    }

    #[test]
    fn a_default_route_makes_any_device_an_uplink_and_a_master_replaces_its_members() {
        let routed = Device { has_default_route: true, ..device("br-ex", DeviceKind::Bridge, &[]) };
        assert_eq!(auto(&routed), Ok(UplinkReason::HasDefaultRoute));
        let master = Some(Master::ReceivesFrames);
        let member = Device { master, ..device("eth3", DeviceKind::Physical, &[]) };
        assert_eq!(auto(&member), Err(UplinkReason::IsEnslaved));
    }

    /// The case of cilium/cilium#12317: the Node's address is on `lo`, and BGP routes lead to the clients.
    #[test]
    fn a_device_without_an_address_is_an_uplink_if_a_route_with_a_gateway_leaves_through_it() {
        let routed = |name, kind| Device { has_gateway_route: true, ..device(name, kind, &[]) };
        for kind in [DeviceKind::Physical, DeviceKind::Other] {
            assert_eq!(auto(&routed("eth0", kind)), Ok(UplinkReason::HasGatewayRoute), "{kind:?}");
        }
        let pair = routed("e0", DeviceKind::Veth);
        assert_eq!(auto(&pair), Err(UplinkReason::LeadsToPods), "both ends are on the Node");
        assert_eq!(auto(&Device { peer_is_elsewhere: true, ..pair }), Ok(UplinkReason::HasGatewayRoute));
        assert_eq!(auto(&routed("cni0", DeviceKind::Bridge)), Err(UplinkReason::LeadsToPods));
    }

    #[test]
    fn a_bridge_with_an_address_and_a_physical_port_is_an_uplink() {
        let bridge = |addresses, has_physical_port| {
            let bridge = device("br-ex", DeviceKind::Bridge, addresses);
            auto(&Device { link: LinkFacts { has_physical_port, ..bridge.link.clone() }, ..bridge })
        };
        assert_eq!(bridge(&["198.51.100.4"], true), Ok(UplinkReason::BridgesPhysicalPort));
        assert_eq!(bridge(&["198.51.100.4"], false), Err(UplinkReason::LeadsToPods));
        assert_eq!(bridge(&[], true), Err(UplinkReason::LeadsToPods));
    }

    #[test]
    fn clients_reach_the_node_through_a_tunnel_only_if_it_has_the_nodes_address_or_a_default_route() {
        let tunnel = |addresses| device("wg0", DeviceKind::Tunnel, addresses);
        assert!(!auto(&tunnel(&["10.244.1.0"])).unwrap().reaches_clients());
        assert!(auto(&tunnel(&[NODE_IP])).unwrap().reaches_clients());
        assert!(auto(&Device { has_default_route: true, ..tunnel(&[]) }).unwrap().reaches_clients());
    }

    #[test]
    fn vrf_members_are_chosen_like_devices_without_a_master_and_the_vrf_is_not() {
        let member = |name, kind, addresses| Device { master: Some(Master::Vrf), ..device(name, kind, addresses) };
        assert_eq!(auto(&member("eth0", DeviceKind::Physical, &[NODE_IP])), Ok(UplinkReason::HasNodeAddress));
        assert_eq!(auto(&member("cali123", DeviceKind::Veth, &[])), Err(UplinkReason::LeadsToPods));
        assert_eq!(auto(&device("vrf-red", DeviceKind::Vrf, &[NODE_IP])), Err(UplinkReason::IsVrf));
    }

    #[test]
    fn a_device_with_an_unsupported_link_layer_is_refused_even_if_named() {
        let table = [
            (LinkLayer::Ethernet, None),
            (LinkLayer::None, None),
            (LinkLayer::Tagged, Some(UplinkReason::LeavesTags)),
            (LinkLayer::Outer, Some(UplinkReason::ShowsOuterHeaders)),
            (LinkLayer::Other, Some(UplinkReason::HasOtherLinkLayer)),
        ];
        let named = DeviceSelection::Named(vec!["ib0".to_owned()]);
        let others = DeviceSelection::Named(vec!["eth0".to_owned()]);
        for (link_layer, unsupported_link_layer) in table {
            let it = Device { link_layer, ..device("ib0", DeviceKind::Physical, &["198.51.100.4"]) };
            let expected = |reason| unsupported_link_layer.map_or(Ok(reason), Err);
            assert_eq!(auto(&it), expected(UplinkReason::IsUplink));
            assert_eq!(choose(&it, &named, &[], false), expected(UplinkReason::Named));
            assert_eq!(choose(&it, &others, &[], true), Err(UplinkReason::NotNamed));
            let idle = Device { link_layer, ..device("gre0", DeviceKind::Tunnel, &[]) };
            let expected = if unsupported_link_layer.is_some() {
                Err(UplinkReason::HasNoAddress)
            } else {
                Ok(UplinkReason::IsTunnel)
            };
            assert_eq!(auto(&idle), expected);
            assert!(unsupported_link_layer.is_none_or(UplinkReason::is_unsupported));
        }
    }

    #[test]
    fn a_list_of_names_overrides_every_rule() {
        let named = DeviceSelection::Named(vec!["cni0".to_owned()]);
        assert_eq!(choose(&device("cni0", DeviceKind::Bridge, &[]), &named, &[], false), Ok(UplinkReason::Named));
        let left_out = device("eth0", DeviceKind::Physical, &[NODE_IP]);
        for is_attached in [false, true] {
            assert_eq!(choose(&left_out, &named, &[], is_attached), Err(UplinkReason::NotNamed));
        }
    }

    #[test]
    fn attached_programs_are_kept_until_the_nodes_addresses_are_known() {
        let bridge = device("br0", DeviceKind::Bridge, &[NODE_IP]);
        let node_ips = |texts: &[&str]| -> Vec<_> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let auto = |ips: &[&str], is_attached| choose(&bridge, &DeviceSelection::Auto, &node_ips(ips), is_attached);
        assert_eq!(auto(&[], false), Err(UplinkReason::LeadsToPods));
        assert_eq!(auto(&[], true), Ok(UplinkReason::Kept));
        assert_eq!(auto(&["192.0.2.99"], true), Err(UplinkReason::LeadsToPods));
        assert_eq!(auto(&[NODE_IP], true), Ok(UplinkReason::HasNodeAddress));
    }

    #[test]
    fn published_addresses_come_first_and_addresses_of_dummies_are_excluded() {
        let devices = [
            device("eth1", DeviceKind::Physical, &["198.51.100.4", "2001:db8::4"]),
            device("eth0", DeviceKind::Physical, &[NODE_IP]),
            device("kube-ipvs0", DeviceKind::Dummy, &["10.96.0.1"]),
        ];
        let node_ips = [NODE_IP.parse().unwrap(), "203.0.113.250".parse().unwrap()];
        let texts: Vec<String> = local_addresses(&devices, &node_ips).iter().map(ToString::to_string).collect();
        assert_eq!(texts, [NODE_IP, "198.51.100.4", "2001:db8::4"]);
    }
}

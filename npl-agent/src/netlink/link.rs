// SPDX-License-Identifier: Apache-2.0
//! Converts a link message of rtnetlink into a [`Device`].

use rtnetlink::packet_route::link::{
    InfoData, InfoGre, InfoGre6, InfoKind, InfoNetkit, InfoPortKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo,
    LinkLayerType, LinkMessage, NetkitPolicy, VlanFlags,
};

use super::driver;
use crate::core::devices::{Device, DeviceKind, LinkFacts, LinkLayer, Master};

/// Converts a link message; `None` if the message contains no interface name. The caller adds the device's addresses
/// and routes.
pub(super) fn device(link: &LinkMessage) -> Option<Device> {
    device_with(link, driver::driver)
}

/// Converts a link message as [`device`] does. `driver_of` returns the name of a physical device's driver.
pub(super) fn device_with(link: &LinkMessage, driver_of: impl Fn(&str) -> Option<String>) -> Option<Device> {
    let name = link
        .attributes
        .iter()
        .find_map(|attribute| if let LinkAttribute::IfName(name) = attribute { Some(name.clone()) } else { None })?;
    let kind = kind(link);
    let driver = if kind == DeviceKind::Physical { driver_of(&name) } else { None };
    let of_mtu = |attribute: &LinkAttribute| if let LinkAttribute::Mtu(mtu) = attribute { Some(*mtu) } else { None };
    let mtu = link.attributes.iter().find_map(of_mtu).unwrap_or_default();
    let peer_is_elsewhere = link.attributes.iter().any(|it| matches!(it, LinkAttribute::LinkNetNsId(_)));
    // The ifindex of a lower device in another network namespace is ignored, because an unrelated device of this
    // network namespace may have the same ifindex.
    let shares_network_of = shared_device(link).filter(|_| !peer_is_elsewhere);
    Some(Device {
        ifindex: link.header.index,
        name,
        kind,
        link_layer: link_layer(link),
        master: master(link),
        peer_is_elsewhere,
        has_default_route: false,
        has_gateway_route: false,
        addresses: Vec::new(),
        link: LinkFacts { driver, mtu, is_closed: is_closed(link), shares_network_of, ..LinkFacts::default() },
    })
}

/// Returns the ifindex of the lower device from which a VLAN, macvlan or ipvlan device receives its frames; `None` if
/// the device is of a different kind.
pub(super) fn carrier(link: &LinkMessage) -> Option<u32> {
    if matches!(info_kind(link)?, InfoKind::Vlan) { lower_device(link) } else { shared_device(link) }
}

/// Returns the ifindex of the lower device whose network a macvlan or ipvlan device shares; `None` if the device is of
/// a different kind.
fn shared_device(link: &LinkMessage) -> Option<u32> {
    let is_shared =
        matches!(info_kind(link)?, InfoKind::MacVlan | InfoKind::MacVtap | InfoKind::IpVlan | InfoKind::IpVtap);
    lower_device(link).filter(|_| is_shared)
}

fn lower_device(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|it| if let LinkAttribute::Link(index) = it { Some(*index) } else { None })
}

/// Returns the ifindex of a device's master, such as a bond or a bridge. The device must be able to send packets out of
/// the Node: a physical device, or a virtual device such as a VLAN, a macvlan or a bond. Returns `None` if the device
/// has no master, or is of a kind that serves Pods, virtual machines or tunnels, such as veth.
pub(super) fn master_of_physical_port(link: &LinkMessage) -> Option<u32> {
    let of_master = |it: &LinkAttribute| if let LinkAttribute::Controller(index) = it { Some(*index) } else { None };
    link.attributes
        .iter()
        .find_map(of_master)
        .filter(|_| matches!(kind(link), DeviceKind::Physical | DeviceKind::Other))
}

fn kind(link: &LinkMessage) -> DeviceKind {
    if link.header.flags.contains(LinkFlags::Loopback) {
        return DeviceKind::Loopback;
    }
    info_kind(link).map_or(DeviceKind::Physical, kind_of)
}

/// Returns the link kind of a virtual device; `None` for a physical device.
fn info_kind(link: &LinkMessage) -> Option<&InfoKind> {
    infos(link).find_map(|info| if let LinkInfo::Kind(kind) = info { Some(kind) } else { None })
}

fn infos(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    link.attributes.iter().flat_map(infos_of)
}

fn infos_of(attribute: &LinkAttribute) -> &[LinkInfo] {
    if let LinkAttribute::LinkInfo(infos) = attribute { infos } else { &[] }
}

/// Returns whether the link is a netkit device whose default policy drops every packet that no program accepts.
fn is_closed(link: &LinkMessage) -> bool {
    let data =
        infos(link).find_map(|it| if let LinkInfo::Data(InfoData::Netkit(data)) = it { Some(data) } else { None });
    data.into_iter().flatten().any(|it| matches!(it, InfoNetkit::Policy(policy) if *policy != NetkitPolicy::Pass))
}

fn master(link: &LinkMessage) -> Option<Master> {
    let is_master = |it: &LinkAttribute| matches!(it, LinkAttribute::Controller(index) if *index != 0);
    link.attributes.iter().find(|it| is_master(it))?;
    let is_of_vrf = infos(link).any(|info| matches!(info, LinkInfo::PortKind(InfoPortKind::Vrf)));
    Some(if is_of_vrf { Master::Vrf } else { Master::ReceivesFrames })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the programs support only the link layers in this match")]
fn link_layer(link: &LinkMessage) -> LinkLayer {
    match link.header.link_layer_type {
        LinkLayerType::Ether if keeps_vlan_tags(link) => LinkLayer::Tagged,
        LinkLayerType::Ether => LinkLayer::Ethernet,
        LinkLayerType::Ipgre | LinkLayerType::Ip6gre if !has_tunnel_destination(link) => LinkLayer::Outer,
        LinkLayerType::None
        | LinkLayerType::Ppp
        | LinkLayerType::Rawip
        | LinkLayerType::Tunnel
        | LinkLayerType::Tunnel6
        | LinkLayerType::Sit
        | LinkLayerType::Ipgre
        | LinkLayerType::Ip6gre => LinkLayer::None,
        _ => LinkLayer::Other,
    }
}

/// Returns whether the link is a VLAN device without the flag `reorder_hdr`, so that its TC hooks receive frames with
/// the VLAN tag. If the device has no flag, the kernel sends no flags attribute.
fn keeps_vlan_tags(link: &LinkMessage) -> bool {
    let reorders =
        |it: &InfoVlan| matches!(it, InfoVlan::Flags((flags, _mask)) if flags.contains(VlanFlags::ReorderHdr));
    infos(link).any(|info| matches!(info, LinkInfo::Data(InfoData::Vlan(vlan)) if !vlan.iter().any(reorders)))
}

/// Returns whether a GRE device has a remote address or, with `external`, takes the remote address from the tunnel
/// metadata of each packet. A GRE device without any remote address adds the outer header before its TC egress hook
/// runs, so the programs cannot parse its packets (`ipgre_header_ops` and `ip6gre_header_ops` of the kernel).
fn has_tunnel_destination(link: &LinkMessage) -> bool {
    let v4 = |it: &InfoGre| {
        matches!(it, InfoGre::CollectMetadata)
            || matches!(it, InfoGre::Remote(addr) if !addr.is_unspecified() && !addr.is_multicast())
    };
    let v6 = |it: &InfoGre6| {
        matches!(it, InfoGre6::CollectMetadata) || matches!(it, InfoGre6::Remote(addr) if !addr.is_unspecified())
    };
    infos(link).any(|info| {
        matches!(info, LinkInfo::Data(InfoData::GreTun(gre)) if gre.iter().any(v4))
            || matches!(info, LinkInfo::Data(InfoData::GreTun6(gre)) if gre.iter().any(v6))
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "newer kernels have further kinds of devices, which may be uplinks")]
fn kind_of(kind: &InfoKind) -> DeviceKind {
    match kind {
        InfoKind::Veth | InfoKind::Netkit => DeviceKind::Veth,
        InfoKind::Bridge => DeviceKind::Bridge,
        InfoKind::Vrf => DeviceKind::Vrf,
        InfoKind::Dummy | InfoKind::Ifb | InfoKind::Nlmon => DeviceKind::Dummy,
        InfoKind::Vxlan
        | InfoKind::Geneve
        | InfoKind::IpIp
        | InfoKind::Ip6Tnl
        | InfoKind::SitTun
        | InfoKind::GreTun
        | InfoKind::GreTap
        | InfoKind::GreTun6
        | InfoKind::GreTap6
        | InfoKind::Wireguard
        | InfoKind::Xfrm
        | InfoKind::Vti
        | InfoKind::Vti6
        | InfoKind::Tun => DeviceKind::Tunnel,
        _ => DeviceKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(link_layer_type: LinkLayerType, infos: Vec<LinkInfo>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.link_layer_type = link_layer_type;
        message.attributes.push(LinkAttribute::LinkInfo(infos));
        message
    }

    fn gre(data: Vec<InfoGre>) -> LinkMessage {
        link(LinkLayerType::Ipgre, vec![LinkInfo::Kind(InfoKind::GreTun), LinkInfo::Data(InfoData::GreTun(data))])
    }

    fn gre6(data: Vec<InfoGre6>) -> LinkMessage {
        link(LinkLayerType::Ip6gre, vec![LinkInfo::Kind(InfoKind::GreTun6), LinkInfo::Data(InfoData::GreTun6(data))])
    }

    fn vlan(flags: VlanFlags) -> LinkMessage {
        let mut data = vec![InfoVlan::Id(100)];
        if !flags.is_empty() {
            data.push(InfoVlan::Flags((flags, VlanFlags::all())));
        }
        link(LinkLayerType::Ether, vec![LinkInfo::Kind(InfoKind::Vlan), LinkInfo::Data(InfoData::Vlan(data))])
    }

    #[test]
    fn link_layers_follow_the_headers_that_programs_see() {
        let table = [
            (link(LinkLayerType::Ether, vec![]), LinkLayer::Ethernet),
            (vlan(VlanFlags::ReorderHdr | VlanFlags::Gvrp), LinkLayer::Ethernet),
            (vlan(VlanFlags::Gvrp), LinkLayer::Tagged),
            (vlan(VlanFlags::empty()), LinkLayer::Tagged),
            (link(LinkLayerType::None, vec![]), LinkLayer::None),
            (link(LinkLayerType::Ppp, vec![]), LinkLayer::None),
            (link(LinkLayerType::Rawip, vec![]), LinkLayer::None),
            (link(LinkLayerType::Tunnel, vec![]), LinkLayer::None),
            (link(LinkLayerType::Tunnel6, vec![]), LinkLayer::None),
            (link(LinkLayerType::Sit, vec![]), LinkLayer::None),
            (gre(vec![InfoGre::Remote([192, 0, 2, 1].into())]), LinkLayer::None),
            (gre(vec![InfoGre::Remote([0; 4].into()), InfoGre::CollectMetadata]), LinkLayer::None),
            (gre(vec![InfoGre::Remote([0; 4].into())]), LinkLayer::Outer),
            (gre(vec![InfoGre::Remote([224, 66, 66, 66].into())]), LinkLayer::Outer),
            (gre6(vec![InfoGre6::Remote([0xfd; 16].into())]), LinkLayer::None),
            (gre6(vec![InfoGre6::CollectMetadata]), LinkLayer::None),
            (gre6(vec![InfoGre6::Remote([0; 16].into())]), LinkLayer::Outer),
            (link(LinkLayerType::Infiniband, vec![]), LinkLayer::Other),
            (link(LinkLayerType::Ieee1394, vec![]), LinkLayer::Other),
            (link(LinkLayerType::Loopback, vec![]), LinkLayer::Other),
        ];
        for (message, expected) in table {
            assert_eq!(link_layer(&message), expected, "{message:?}");
        }
    }

    #[test]
    fn macvlan_and_ipvlan_devices_share_the_network_of_a_device_of_the_same_namespace() {
        let shared = |kind: InfoKind, other: Vec<LinkAttribute>| {
            let mut message = link(LinkLayerType::Ether, vec![LinkInfo::Kind(kind)]);
            message.attributes.extend([LinkAttribute::IfName("shim".to_owned()), LinkAttribute::Link(2)]);
            message.attributes.extend(other);
            let device = device(&message).unwrap();
            (device.kind, device.link.shares_network_of, carrier(&message))
        };
        for kind in [InfoKind::MacVlan, InfoKind::MacVtap, InfoKind::IpVlan, InfoKind::IpVtap] {
            assert_eq!(shared(kind.clone(), vec![]), (DeviceKind::Other, Some(2), Some(2)), "{kind:?}");
            let elsewhere = shared(kind, vec![LinkAttribute::LinkNetNsId(0)]);
            assert_eq!(elsewhere, (DeviceKind::Other, None, Some(2)));
        }
        assert_eq!(shared(InfoKind::Vlan, vec![]), (DeviceKind::Other, None, Some(2)));
        assert_eq!(shared(InfoKind::Veth, vec![]), (DeviceKind::Veth, None, None), "a veth's IFLA_LINK is its peer");
    }

    #[test]
    fn a_port_of_open_vswitch_is_no_physical_device_and_its_tap_device_is_a_tunnel() {
        for (name, expected) in
            [(InfoKind::Other("openvswitch".to_owned()), DeviceKind::Other), (InfoKind::Tun, DeviceKind::Tunnel)]
        {
            assert_eq!(kind(&link(LinkLayerType::Ether, vec![LinkInfo::Kind(name)])), expected);
        }
    }

    #[test]
    fn a_vrf_master_is_distinguished_from_bridge_and_bond_masters() {
        let mut message = link(LinkLayerType::Ether, vec![LinkInfo::PortKind(InfoPortKind::Vrf)]);
        assert_eq!(master(&message), None);
        message.attributes.push(LinkAttribute::Controller(7));
        assert_eq!(master(&message), Some(Master::Vrf));
        let mut message = link(LinkLayerType::Ether, vec![LinkInfo::PortKind(InfoPortKind::Bond)]);
        message.attributes.push(LinkAttribute::Controller(7));
        assert_eq!(master(&message), Some(Master::ReceivesFrames));
    }

    #[test]
    fn a_netkit_device_is_closed_by_its_own_policy_and_not_by_its_peers() {
        for (policy, closed) in [(NetkitPolicy::Pass, false), (NetkitPolicy::Drop, true)] {
            let data = InfoData::Netkit(vec![InfoNetkit::PeerPolicy(NetkitPolicy::Drop), InfoNetkit::Policy(policy)]);
            let message = link(LinkLayerType::Ether, vec![LinkInfo::Kind(InfoKind::Netkit), LinkInfo::Data(data)]);
            assert_eq!(is_closed(&message), closed, "{policy:?}");
        }
    }
}

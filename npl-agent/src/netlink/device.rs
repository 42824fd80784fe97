// SPDX-License-Identifier: Apache-2.0
//! What the kernel's words about a device mean for us.

use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoNetkit, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, NetkitPolicy,
};

use super::driver::driver;
use crate::core::devices::{Device, DeviceKind, LinkFacts};

/// What a device of a list is; nothing if it has no name.
pub(super) fn device(link: &LinkMessage) -> Option<Device> {
    let name = link
        .attributes
        .iter()
        .find_map(|attribute| if let LinkAttribute::IfName(name) = attribute { Some(name.clone()) } else { None })?;
    let is_enslaved =
        link.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::Controller(index) if *index != 0));
    let kind = kind(link);
    let driver = if kind == DeviceKind::Physical { driver(&name) } else { None };
    let of_mtu = |attribute: &LinkAttribute| if let LinkAttribute::Mtu(mtu) = attribute { Some(*mtu) } else { None };
    let mtu = link.attributes.iter().find_map(of_mtu).unwrap_or_default();
    Some(Device {
        ifindex: link.header.index,
        name,
        kind,
        has_ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        is_enslaved,
        peer_is_elsewhere: link.attributes.iter().any(|it| matches!(it, LinkAttribute::LinkNetNsId(_))),
        has_default_route: false,
        addresses: Vec::new(),
        link: LinkFacts { driver, mtu, carries_others: false, is_closed: is_closed(link) },
    })
}

/// The device that this one takes its frames from.
pub(super) fn carrier(link: &LinkMessage) -> Option<u32> {
    let takes_frames = matches!(
        info_kind(link)?,
        InfoKind::Vlan | InfoKind::MacVlan | InfoKind::MacVtap | InfoKind::IpVlan | InfoKind::IpVtap
    );
    let of_link =
        |attribute: &LinkAttribute| if let LinkAttribute::Link(index) = attribute { Some(*index) } else { None };
    link.attributes.iter().find_map(of_link).filter(|_| takes_frames)
}

fn kind(link: &LinkMessage) -> DeviceKind {
    if link.header.flags.contains(LinkFlags::Loopback) {
        return DeviceKind::Loopback;
    }
    info_kind(link).map_or(DeviceKind::Physical, kind_of)
}

/// What made it, of a device that is no hardware.
fn info_kind(link: &LinkMessage) -> Option<&InfoKind> {
    link_infos(link).find_map(|info| if let LinkInfo::Kind(kind) = info { Some(kind) } else { None })
}

fn link_infos(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    let infos = link
        .attributes
        .iter()
        .find_map(|attribute| if let LinkAttribute::LinkInfo(infos) = attribute { Some(infos) } else { None });
    infos.into_iter().flatten()
}

/// Whether it is a pair of netkit's that drops what no program lets pass.
fn is_closed(link: &LinkMessage) -> bool {
    let data = link_infos(link)
        .find_map(|info| if let LinkInfo::Data(InfoData::Netkit(data)) = info { Some(data) } else { None });
    data.into_iter().flatten().any(|it| matches!(it, InfoNetkit::Policy(policy) if *policy != NetkitPolicy::Pass))
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the kernel adds kinds; an unknown one is treated as an uplink")]
fn kind_of(kind: &InfoKind) -> DeviceKind {
    match kind {
        InfoKind::Veth | InfoKind::Netkit => DeviceKind::Veth,
        InfoKind::Bridge => DeviceKind::Bridge,
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

    #[test]
    fn a_pair_of_netkits_is_closed_by_its_own_policy() {
        for (policy, closed) in [(NetkitPolicy::Pass, false), (NetkitPolicy::Drop, true)] {
            let data = InfoData::Netkit(vec![InfoNetkit::PeerPolicy(NetkitPolicy::Drop), InfoNetkit::Policy(policy)]);
            let mut link = LinkMessage::default();
            link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Netkit), LinkInfo::Data(data)]));
            assert_eq!(is_closed(&link), closed, "{policy:?}");
        }
    }
}

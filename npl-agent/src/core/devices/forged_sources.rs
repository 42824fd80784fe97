// SPDX-License-Identifier: Apache-2.0
//! Decides which forwarded packets have forged sources: a packet that the Node forwards cannot come from a node port of
//! the Node itself.
//!
//! Source NAT follows after the forward hook of netfilter, and NPL translates replies after netfilter. At the forward
//! hook, a packet from a node address and a port of the port range was therefore sent by a Pod or host that forges the
//! Node's address. See design note 19 in `docs/design/`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
};

use super::{
    Device, DeviceKind,
    attachments::{DeviceAttachments, Side},
};
use crate::core::networks::CILIUM_HOST;

/// By what the nftables guard recognizes forwarded packets with forged sources. Only IPv6 needs the guard: the kernel
/// itself drops IPv4 packets that arrive on a device and have one of the Node's addresses as source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForgedSources {
    /// The addresses on which NPL serves node ports.
    pub addresses: BTreeSet<Ipv6Addr>,
    /// The ifindexes of all bridges. With `br_netfilter`, frames between two ports of a bridge reach the forward hook
    /// with the bridge as input and output device. Such a frame may be the Node's own packet, which another bridge has
    /// sent through a veth pair.
    pub bridges: BTreeSet<u32>,
}

impl ForgedSources {
    /// Returns the forged sources of a Node with these devices, on which NPL serves node ports at `served`.
    pub fn of(devices: &[Device], served: &[IpAddr]) -> Self {
        let v6 = |addr: &IpAddr| match addr {
            IpAddr::V4(_) => None,
            IpAddr::V6(addr) => Some(*addr),
        };
        let bridges = devices.iter().filter(|device| device.kind == DeviceKind::Bridge);
        Self { addresses: served.iter().filter_map(v6).collect(), bridges: bridges.map(|it| it.ifindex).collect() }
    }
}

/// Whether a program that runs after NPL's egress program may masquerade, as Cilium's programs do. NPL's egress program
/// then records a Pod's packets from ports of the port range as packets of a host connection, which would otherwise
/// enable a Pod to forge such records.
///
/// `attachments` are the programs of the inspected devices; the agent does not inspect devices in every forwarding mode.
pub fn may_masquerade_at_egress(devices: &[Device], attachments: &BTreeMap<u32, DeviceAttachments>) -> bool {
    devices.iter().any(|device| device.name == CILIUM_HOST)
        || attachments.values().any(|device| device.has_others(Side::Egress))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Device, DeviceAttachments, DeviceKind, ForgedSources, may_masquerade_at_egress};
    use crate::core::devices::attachments::AttachmentOwner;

    #[test]
    fn ipv6_addresses_and_bridges_are_collected() {
        let devices = [
            Device::new(2, "eth0", DeviceKind::Physical),
            Device::new(3, "br-ex", DeviceKind::Bridge),
            Device::new(4, "cni0", DeviceKind::Bridge),
        ];
        let served = ["192.0.2.10", "2001:db8::10", "2001:db8::11"].map(|addr| addr.parse().unwrap());
        let sources = ForgedSources::of(&devices, &served);
        assert_eq!(sources.addresses, ["2001:db8::10", "2001:db8::11"].map(|addr| addr.parse().unwrap()).into());
        assert_eq!(sources.bridges, [3, 4].into());
    }

    #[test]
    fn cilium_and_egress_programs_of_other_software_may_masquerade() {
        let uplink = Device::new(2, "eth0", DeviceKind::Physical);
        let with = |egress| BTreeMap::from([(2, DeviceAttachments { egress, ..DeviceAttachments::default() })]);
        let devices = std::slice::from_ref(&uplink);
        assert!(!may_masquerade_at_egress(devices, &BTreeMap::new()));
        assert!(!may_masquerade_at_egress(devices, &with(vec![AttachmentOwner::Npl])));
        assert!(may_masquerade_at_egress(devices, &with(vec![AttachmentOwner::Other("snat".to_owned())])));
        let cilium = Device::new(3, "cilium_host", DeviceKind::Veth);
        assert!(may_masquerade_at_egress(&[uplink, cilium], &BTreeMap::new()));
    }
}

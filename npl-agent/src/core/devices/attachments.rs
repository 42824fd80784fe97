// SPDX-License-Identifier: Apache-2.0
//! The attachments of a network device: programs, filters and qdiscs. A redirect would bypass the attachments of other
//! software.

use std::collections::BTreeSet;

use super::{Device, DeviceKind, DeviceSelection};

/// The major number of the handles of NPL's filters.
const MAJOR: u16 = 0x4e50;
/// The base of the minor numbers of filter handles: the minor number for ABI version N is this number plus (N modulo
/// 255).
const MINOR: u16 = 0x4c00;
/// The minor number of the temporary filter's handle. This number is greater than the minor number for every ABI
/// version, so the handle differs from the handles of all other filters of NPL.
const STAND_IN_MINOR: u16 = MINOR + 0xff;
/// The handle, as major and minor number, of a temporary filter. The temporary filter translates packets while the
/// agent moves NPL's filter ahead of the filters of other software.
pub const STAND_IN_HANDLE: (u16, u16) = (MAJOR, STAND_IN_MINOR);
/// The priority of NPL's filters that translate packets. Filters with this priority run before all filters whose
/// priority the kernel chose.
pub const FIRST: u16 = 1;
/// The priority of NPL's filters that observe packets: the kernel runs filters with this priority last.
pub const LAST: u16 = u16::MAX;

/// Kinds of qdiscs that do not limit traffic by shaping or policing, for example the kernel's default `pfifo_fast`.
const PLAIN_QUEUES: [&str; 9] = ["noqueue", "pfifo_fast", "pfifo", "bfifo", "mq", "fq", "fq_codel", "codel", "sfq"];
/// Kinds of qdiscs that have no queue and only provide hooks for filters.
const HOOKS: [&str; 2] = [HOOK_OF_BOTH, HOOK_OF_INGRESS];
/// The qdisc with an ingress hook and an egress hook.
const HOOK_OF_BOTH: &str = "clsact";
/// The qdisc with an ingress hook only.
const HOOK_OF_INGRESS: &str = "ingress";

/// The owner of a program or filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachmentOwner {
    /// NPL: this agent or an earlier agent.
    Npl,
    /// Other software, with the name of the program or filter.
    Other(String),
}

impl AttachmentOwner {
    /// Whether the owner is other software.
    pub const fn is_other(&self) -> bool {
        matches!(self, Self::Other(_))
    }

    fn other_name(&self) -> Option<&str> {
        if let Self::Other(name) = self { Some(name) } else { None }
    }
}

/// A direction of packets, seen from the network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Packets that arrive on the device.
    Ingress,
    /// Packets that leave through the device.
    Egress,
}

/// The qdiscs, programs and filters of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceAttachments {
    /// The kinds of the device's qdiscs, as `tc` names them.
    pub queues: BTreeSet<String>,
    /// The owners of the ingress programs and filters, in the order in which the programs and filters run.
    pub ingress: Vec<AttachmentOwner>,
    /// The owners of the egress programs and filters, in the order in which the programs and filters run.
    pub egress: Vec<AttachmentOwner>,
}

impl DeviceAttachments {
    /// Whether a qdisc of the device shapes or polices traffic.
    pub fn has_limit(&self) -> bool {
        self.queues.iter().any(|kind| !PLAIN_QUEUES.contains(&kind.as_str()) && !is_hook(kind))
    }

    /// Whether other software has a program or filter on the device for packets of this direction.
    pub fn has_others(&self, side: Side) -> bool {
        self.on(side).iter().any(AttachmentOwner::is_other)
    }

    /// The names of the programs and filters of other software that run ahead of NPL's program or filter; empty if NPL
    /// has no program or filter in this direction.
    pub fn ahead_of_npl(&self, side: Side) -> Vec<&str> {
        let owners = self.on(side);
        let Some(npl) = owners.iter().position(|owner| *owner == AttachmentOwner::Npl) else { return Vec::new() };
        owners.iter().take(npl).filter_map(AttachmentOwner::other_name).collect()
    }

    /// Whether other software has an ingress program or filter that runs after NPL's ingress program or filter. If NPL
    /// has no ingress program or filter on the device yet, every ingress program or filter of other software counts.
    pub fn has_others_behind_npl(&self) -> bool {
        let npl = self.ingress.iter().position(|owner| *owner == AttachmentOwner::Npl);
        self.ingress.iter().skip(npl.unwrap_or_default()).any(AttachmentOwner::is_other)
    }

    /// The directions for which the device has a qdisc to which filters can be attached.
    pub fn filtered_sides(&self) -> &'static [Side] {
        if self.queues.contains(HOOK_OF_BOTH) {
            &[Side::Ingress, Side::Egress]
        } else if self.queues.contains(HOOK_OF_INGRESS) {
            &[Side::Ingress]
        } else {
            &[]
        }
    }

    /// Appends the owners of the device's filters for one direction, in the order in which the filters run.
    pub fn add(&mut self, side: Side, owners: impl IntoIterator<Item = AttachmentOwner>) {
        match side {
            Side::Ingress => self.ingress.extend(owners),
            Side::Egress => self.egress.extend(owners),
        }
    }

    const fn on(&self, side: Side) -> &Vec<AttachmentOwner> {
        match side {
            Side::Ingress => &self.ingress,
            Side::Egress => &self.egress,
        }
    }
}

/// Returns the handle of the filters of an ABI version, as major and minor number. Because ABI versions have different
/// handles, an agent can attach its filter before it detaches the filter of another ABI version.
pub const fn filter_handle(abi: u32) -> (u16, u16) {
    // ABI version 255 gets the handle of version 0 again, because the handle after the handle of version 254 belongs to
    // the temporary filter.
    (MAJOR, MINOR + (abi % 0xff) as u16)
}

/// Whether a qdisc of this kind has no queue and only provides hooks for filters.
pub fn is_hook(kind: &str) -> bool {
    HOOKS.contains(&kind)
}

/// Returns the owner of the filter that a netlink message describes; `None` if the message describes only a priority of
/// NPL, and not a filter.
///
/// For each priority, the kernel first sends a message with the kind of the filters and without a handle, and then one
/// message for each filter. NPL's filters may have the same priority as filters of other software, so the handle
/// decides whether a filter is NPL's.
pub fn owner_of_filter(kind: &str, priority: u16, handle: (u16, u16), name: Option<&str>) -> Option<AttachmentOwner> {
    let is_npl = kind == "bpf" && [FIRST, LAST].contains(&priority);
    match handle {
        (MAJOR, MINOR..=STAND_IN_MINOR) if is_npl => Some(AttachmentOwner::Npl),
        (0, 0) if is_npl => None,
        _ => Some(AttachmentOwner::Other(name.map_or_else(|| format!("a filter of kind {kind}"), str::to_owned))),
    }
}

/// Whether the agent must inspect a device's attachments: the device leads to Pods with mappings, or may be an uplink.
pub fn matters(device: &Device, lead_to_pods: &BTreeSet<u32>, uplinks: &DeviceSelection) -> bool {
    let may_be_uplink = match uplinks {
        DeviceSelection::Named(names) => names.contains(&device.name),
        DeviceSelection::Auto => {
            let is_routed = device.has_default_route || device.has_gateway_route;
            device.kind != DeviceKind::Veth || is_routed || !device.addresses.is_empty()
        }
    };
    may_be_uplink || lead_to_pods.contains(&device.ifindex)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use npl_common::names::ABI_VERSION;

    use super::{
        AttachmentOwner, DeviceAttachments, FIRST, LAST, STAND_IN_HANDLE, Side, filter_handle, matters, owner_of_filter,
    };
    use crate::core::devices::{Device, DeviceKind, DeviceSelection, LinkFacts, LinkLayer};

    fn with_queues(kinds: &[&str]) -> DeviceAttachments {
        DeviceAttachments {
            queues: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
            ..DeviceAttachments::default()
        }
    }

    #[test]
    fn qdiscs_that_shape_traffic_are_limits_and_default_qdiscs_are_not() {
        for plain in ["noqueue", "pfifo_fast", "fq_codel", "mq", "fq", "clsact", "ingress"] {
            assert!(!with_queues(&[plain]).has_limit(), "{plain}");
        }
        for limit in ["tbf", "htb", "hfsc", "netem", "cake", "prio", "red", "of a later kernel"] {
            assert!(with_queues(&[limit]).has_limit(), "{limit}");
            assert!(with_queues(&["mq", "clsact", limit]).has_limit(), "{limit} next to other qdiscs");
        }
    }

    #[test]
    fn filters_are_listed_only_on_qdiscs_that_can_have_them() {
        assert_eq!(with_queues(&["noqueue"]).filtered_sides(), []);
        assert_eq!(with_queues(&["noqueue", "ingress"]).filtered_sides(), [Side::Ingress]);
        assert_eq!(with_queues(&["tbf", "clsact"]).filtered_sides(), [Side::Ingress, Side::Egress]);
    }

    #[test]
    fn filters_of_npl_are_recognized_by_kind_priority_and_handle() {
        let other = |name: &str| Some(AttachmentOwner::Other(name.to_owned()));
        for priority in [FIRST, LAST] {
            for handle in [filter_handle(1), filter_handle(ABI_VERSION), STAND_IN_HANDLE] {
                assert_eq!(owner_of_filter("bpf", priority, handle, None), Some(AttachmentOwner::Npl));
            }
            assert_eq!(owner_of_filter("bpf", priority, (0, 0), None), None);
            assert_eq!(owner_of_filter("bpf", priority, (0, 1), Some("cil_from_netdev")), other("cil_from_netdev"));
            assert_eq!(owner_of_filter("u32", priority, (0, 0), None), other("a filter of kind u32"));
        }
        assert_eq!(owner_of_filter("bpf", 10, (0, 0), None), other("a filter of kind bpf"));
        assert_eq!(owner_of_filter("bpf", 10, filter_handle(ABI_VERSION), None), other("a filter of kind bpf"));
    }

    #[test]
    fn other_programs_behind_npl_are_distinguished_from_those_ahead() {
        use AttachmentOwner::Npl;
        let other = |name: &str| AttachmentOwner::Other(name.to_owned());
        let table = [
            (vec![], false, false, vec![]),
            (vec![Npl], false, false, vec![]),
            (vec![other("a"), Npl], true, false, vec!["a"]),
            (vec![Npl, other("a")], true, true, vec![]),
            (vec![other("a"), other("b"), Npl, other("c")], true, true, vec!["a", "b"]),
            (vec![other("a")], true, true, vec![]),
        ];
        for (ingress, has_others, has_others_behind, ahead) in table {
            let mut attachments = DeviceAttachments::default();
            attachments.add(Side::Ingress, ingress.iter().cloned());
            assert_eq!(attachments.has_others(Side::Ingress), has_others, "{ingress:?}");
            assert_eq!(attachments.has_others_behind_npl(), has_others_behind, "{ingress:?}");
            assert_eq!(attachments.ahead_of_npl(Side::Ingress), ahead, "{ingress:?}");
            assert!(!attachments.has_others(Side::Egress));
        }
    }

    #[test]
    fn devices_of_pods_without_a_mapping_do_not_matter() {
        let device = |kind, addresses: &[&str]| Device {
            ifindex: 7,
            name: "device".to_owned(),
            kind,
            link_layer: LinkLayer::Ethernet,
            master: None,
            peer_is_elsewhere: true,
            has_default_route: false,
            has_gateway_route: false,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            link: LinkFacts::default(),
        };
        let veth = device(DeviceKind::Veth, &[]);
        let auto = |device: &Device, lead_to_pods: &[u32]| {
            matters(device, &lead_to_pods.iter().copied().collect(), &DeviceSelection::Auto)
        };
        assert!(!auto(&veth, &[8]));
        assert!(auto(&veth, &[7]));
        assert!(auto(&device(DeviceKind::Veth, &["192.0.2.10"]), &[]));
        assert!(auto(&Device { has_default_route: true, ..veth.clone() }, &[]));
        assert!(auto(&Device { has_gateway_route: true, ..veth.clone() }, &[]), "an uplink without an address");
        assert!(auto(&device(DeviceKind::Physical, &[]), &[]));
        let named = |name: &str| matters(&veth, &BTreeSet::new(), &DeviceSelection::Named(vec![name.to_owned()]));
        assert!(named("device") && !named("another"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The measured cases.

use std::fmt;

use npl_testkit::meter::{Entry, Segment};

/// The number of mappings in most cases: enough for some hundred Pods.
pub(crate) const MAPPINGS: u16 = 500;
/// The largest measured number of mappings.
pub(crate) const MOST_MAPPINGS: u16 = 10_000;

/// The packets that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Requests of one established UDP flow, opened by two real requests to which the Pod responded.
    Established,
    /// Replies of an established UDP flow, sent by the Pod and counted at the client.
    Replies,
    /// TCP SYNs, each from a different client address or port, spread evenly over the mappings.
    NewFlows,
    /// TCP SYNs, each from a random client address and port that was not used before.
    SynFlood,
    /// TCP ACKs that belong to no connection, from random clients as in `SynFlood`.
    AckFlood,
    /// TCP RSTs from random clients as in `SynFlood`.
    RstFlood,
    /// TCP segments without flags from random clients as in `SynFlood`.
    NullFlood,
    /// TCP SYN-ACKs from random clients as in `SynFlood`.
    SynAckFlood,
    /// UDP datagrams from random clients as in `SynFlood`.
    UdpFlood,
    /// SCTP INITs from random clients as in `SynFlood`.
    SctpInitFlood,
    /// SCTP DATA chunks that belong to no association, from random clients as in `SynFlood`.
    SctpDataFlood,
    /// First fragments of UDP datagrams from random clients as in `SynFlood`. The other fragments are never sent.
    FragmentFlood,
}

impl Workload {
    /// All floods.
    pub(crate) const FLOODS: [Self; 9] = [
        Self::SynFlood,
        Self::AckFlood,
        Self::RstFlood,
        Self::NullFlood,
        Self::SynAckFlood,
        Self::UdpFlood,
        Self::FragmentFlood,
        Self::SctpInitFlood,
        Self::SctpDataFlood,
    ];

    /// The name in results.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Established => "established",
            Self::Replies => "replies",
            Self::NewFlows => "new_flows",
            Self::SynFlood => "syn_flood",
            Self::AckFlood => "ack_flood",
            Self::RstFlood => "rst_flood",
            Self::NullFlood => "null_flood",
            Self::SynAckFlood => "syn_ack_flood",
            Self::UdpFlood => "udp_flood",
            Self::FragmentFlood => "fragment_flood",
            Self::SctpInitFlood => "sctp_init_flood",
            Self::SctpDataFlood => "sctp_data_flood",
        }
    }

    /// The packets' kind.
    pub(crate) const fn segment(self) -> Segment {
        match self {
            Self::Established | Self::Replies | Self::UdpFlood => Segment::Datagram,
            Self::NewFlows | Self::SynFlood => Segment::Syn,
            Self::AckFlood => Segment::Ack,
            Self::RstFlood => Segment::Rst,
            Self::NullFlood => Segment::Null,
            Self::SynAckFlood => Segment::SynAck,
            Self::FragmentFlood => Segment::FirstFragment,
            Self::SctpInitFlood => Segment::SctpInit,
            Self::SctpDataFlood => Segment::SctpData,
        }
    }

    /// Whether all packets belong to one established flow.
    pub(crate) const fn is_one_flow(self) -> bool {
        matches!(self, Self::Established | Self::Replies)
    }
}

/// The way in which packets reach the Pod from the Node's uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Sent to the Pod's address and routed without translation.
    Routing,
    /// Routed without translation on a Node with NPL; the packets match no mapping.
    RoutingBesideOurs,
    /// Routed without translation on a Node with an empty BPF program at NPL's hook.
    RoutingBesideIdle,
    /// Routed without translation on a Node whose rules use kernel conntrack, like the rules of most CNI plug-ins.
    RoutingConntrack,
    /// Translated by iptables rules like Antrea's, one per mapping.
    Iptables(u16),
    /// Translated as in [`Self::Iptables`], with all flows to the newest mapping, whose rule is the last of the chain.
    IptablesNewest(u16),
    /// Translated by one nftables rule with a map.
    Nftables,
    /// Translated by NPL.
    Ours,
    /// Translated by NPL programs that were loaded without `CAP_PERFMON`, with the verifier's speculation barriers.
    OursMitigated,
    /// Translated by NPL and redirected, bypassing the host's stack.
    OursRedirect,
    /// Translated by NPL with offload, which bypasses the host's stack once the stack has forwarded a packet of the
    /// flow.
    OursOffload,
    /// Translated as in [`Self::OursOffload`], on a Node whose rules use kernel conntrack.
    OursOffloadConntrack,
    /// Translated by NPL with this number of mappings.
    OursOf(u16),
    /// Translated by NPL on a Node whose rules use kernel conntrack.
    OursConntrack,
    /// Routed without translation; packets are received by the uplink's driver instead of being inserted above the
    /// driver.
    RoutingWire,
    /// Received by the driver, and translated by NPL at the TC hook.
    OursWire,
    /// Received by the driver, and translated by NPL's XDP program in the driver.
    OursXdp,
    /// Sent to the Pod's address and redirected there by a minimal program: the upper bound for a bypass of the stack.
    Shortcut,
    /// Redirected as in [`Self::Shortcut`], by an XDP program in the uplink's driver.
    ShortcutXdp,
}

impl Mode {
    /// The name in results.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Routing => "routing".to_owned(),
            Self::RoutingBesideOurs => "routing_beside_ours".to_owned(),
            Self::RoutingBesideIdle => "routing_beside_idle".to_owned(),
            Self::RoutingConntrack => "routing_conntrack".to_owned(),
            Self::Iptables(mappings) => format!("iptables_{mappings}"),
            Self::IptablesNewest(mappings) => format!("iptables_{mappings}_newest"),
            Self::Nftables => "nftables".to_owned(),
            Self::Ours => "ours".to_owned(),
            Self::OursMitigated => "ours_mitigated".to_owned(),
            Self::OursRedirect => "ours_redirect".to_owned(),
            Self::OursOffload => "ours_offload".to_owned(),
            Self::OursOffloadConntrack => "ours_offload_conntrack".to_owned(),
            Self::OursOf(mappings) => format!("ours_{mappings}"),
            Self::OursConntrack => "ours_conntrack".to_owned(),
            Self::RoutingWire => "routing_wire".to_owned(),
            Self::OursWire => "ours_wire".to_owned(),
            Self::OursXdp => "ours_xdp".to_owned(),
            Self::Shortcut => "shortcut".to_owned(),
            Self::ShortcutXdp => "shortcut_xdp".to_owned(),
        }
    }

    /// The number of mappings on the Node, or of Pod ports in cases without mappings.
    pub(crate) const fn mappings(self) -> u16 {
        match self {
            Self::Iptables(mappings) | Self::IptablesNewest(mappings) | Self::OursOf(mappings) => mappings,
            Self::Routing
            | Self::RoutingBesideOurs
            | Self::RoutingBesideIdle
            | Self::RoutingConntrack
            | Self::Nftables
            | Self::Ours
            | Self::OursMitigated
            | Self::OursRedirect
            | Self::OursOffload
            | Self::OursOffloadConntrack
            | Self::OursConntrack
            | Self::RoutingWire
            | Self::OursWire
            | Self::OursXdp
            | Self::Shortcut
            | Self::ShortcutXdp => MAPPINGS,
        }
    }

    /// The index of the first mapping that receives packets, and the number of mappings that receive packets.
    pub(crate) const fn flows_to(self) -> (u16, u16) {
        match self {
            Self::IptablesNewest(mappings) => (mappings - 1, 1),
            Self::Iptables(_)
            | Self::Routing
            | Self::RoutingBesideOurs
            | Self::RoutingBesideIdle
            | Self::RoutingConntrack
            | Self::Nftables
            | Self::Ours
            | Self::OursMitigated
            | Self::OursRedirect
            | Self::OursOffload
            | Self::OursOffloadConntrack
            | Self::OursOf(_)
            | Self::OursConntrack
            | Self::RoutingWire
            | Self::OursWire
            | Self::OursXdp
            | Self::Shortcut
            | Self::ShortcutXdp => (0, self.mappings()),
        }
    }

    /// Whether the client sends to a node port.
    pub(crate) const fn is_translated(self) -> bool {
        !matches!(
            self,
            Self::Routing
                | Self::RoutingBesideOurs
                | Self::RoutingBesideIdle
                | Self::RoutingConntrack
                | Self::RoutingWire
                | Self::Shortcut
                | Self::ShortcutXdp
        )
    }

    /// Whether NPL's programs are attached to the Node's devices.
    pub(crate) const fn has_ours(self) -> bool {
        self.is_translated() && !matches!(self, Self::Iptables(_) | Self::IptablesNewest(_) | Self::Nftables)
            || matches!(self, Self::RoutingBesideOurs)
    }

    /// Returns the mode whose network this mode uses. Modes that share a network differ only in what is set up for each
    /// sample: whether NPL or an empty program is attached, and the number of NPL's mappings.
    const fn network(self) -> Self {
        match self {
            Self::Routing | Self::RoutingBesideOurs | Self::RoutingBesideIdle | Self::Ours => Self::Ours,
            Self::RoutingConntrack | Self::OursConntrack => Self::OursConntrack,
            Self::RoutingWire | Self::OursWire => Self::OursWire,
            Self::OursOf(_) => Self::OursOf(MOST_MAPPINGS),
            Self::Iptables(_)
            | Self::IptablesNewest(_)
            | Self::Nftables
            | Self::OursMitigated
            | Self::OursRedirect
            | Self::OursOffload
            | Self::OursOffloadConntrack
            | Self::OursXdp
            | Self::Shortcut
            | Self::ShortcutXdp => self,
        }
    }

    /// Whether the Node uses kernel conntrack, as all translation by netfilter does.
    pub(crate) const fn has_conntrack(self) -> bool {
        match self {
            Self::RoutingConntrack
            | Self::OursConntrack
            | Self::OursOffloadConntrack
            | Self::Iptables(_)
            | Self::IptablesNewest(_)
            | Self::Nftables => true,
            Self::Routing
            | Self::RoutingBesideOurs
            | Self::RoutingBesideIdle
            | Self::RoutingWire
            | Self::Ours
            | Self::OursMitigated
            | Self::OursRedirect
            | Self::OursOffload
            | Self::OursOf(_)
            | Self::OursWire
            | Self::OursXdp
            | Self::Shortcut
            | Self::ShortcutXdp => false,
        }
    }

    /// The place at which requests of this mode enter the Node.
    const fn entry(self) -> Entry {
        match self {
            Self::RoutingWire | Self::OursWire | Self::OursXdp => Entry::Wire,
            Self::ShortcutXdp => Entry::Pod,
            Self::Routing
            | Self::RoutingBesideOurs
            | Self::RoutingBesideIdle
            | Self::RoutingConntrack
            | Self::Iptables(_)
            | Self::IptablesNewest(_)
            | Self::Nftables
            | Self::Ours
            | Self::OursMitigated
            | Self::OursRedirect
            | Self::OursOffload
            | Self::OursOffloadConntrack
            | Self::OursOf(_)
            | Self::OursConntrack
            | Self::Shortcut => Entry::Uplink,
        }
    }
}

/// One measured case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) workload: Workload,
    pub(crate) mode: Mode,
}

impl Case {
    /// Returns the case that identifies this case's network: two cases share a network if this method returns the same
    /// case for both.
    pub(crate) const fn network(self) -> Self {
        Self { workload: self.workload, mode: self.mode.network() }
    }

    /// The place at which the packets of this case enter the Node.
    pub(crate) const fn entry(self) -> Entry {
        if matches!(self.workload, Workload::Replies) { Entry::PodUplink } else { self.mode.entry() }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.workload.name(), self.mode.name())
    }
}

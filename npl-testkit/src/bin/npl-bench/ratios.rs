// SPDX-License-Identifier: Apache-2.0
//! The ratios of packet rates that the bench reports, and the project's goals for these ratios.

use crate::cases::{Case, MAPPINGS, MOST_MAPPINGS, Mode, Workload};

/// Two cases that are compared round by round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio {
    /// The case in the numerator.
    pub(crate) numerator: Case,
    /// The case in the denominator, usually with the same workload.
    pub(crate) denominator: Case,
    /// The lower bound that the project aims for.
    pub(crate) aim: Option<f64>,
}

impl Ratio {
    /// The name in results and for `--only`.
    pub(crate) fn name(&self) -> String {
        let Self { numerator, denominator, aim: _ } = self;
        let base = denominator.mode.name();
        let base = if numerator.workload == denominator.workload {
            base
        } else {
            format!("{}_{base}", denominator.workload.name())
        };
        format!("{}_{}_vs_{base}", numerator.workload.name(), numerator.mode.name())
    }
}

/// Every comparison, in display order.
pub(crate) const RATIOS: [Ratio; 72] = {
    use Mode::{
        Iptables, IptablesNewest, Nftables, Ours, OursConntrack, OursMitigated, OursOf, OursOffload,
        OursOffloadConntrack, OursRedirect, OursWire, OursXdp, Routing, RoutingBesideIdle, RoutingBesideOurs,
        RoutingConntrack, RoutingWire, Shortcut, ShortcutXdp,
    };
    use Workload::{
        AckFlood, Established, FragmentFlood, NewFlows, NullFlood, Replies, RstFlood, SctpDataFlood, SctpInitFlood,
        SynAckFlood, SynFlood, UdpFlood,
    };
    [
        ratio(Established, Ours, Routing, Some(0.95)),
        ratio(Established, Ours, Iptables(1), Some(1.3)),
        ratio(Established, Ours, Nftables, None),
        ratio(Established, OursRedirect, Routing, Some(1.35)),
        ratio(Established, OursRedirect, Iptables(1), None),
        ratio(Established, OursOffload, Routing, Some(1.35)),
        ratio(Established, OursOffloadConntrack, RoutingConntrack, None),
        ratio(Established, RoutingBesideOurs, Routing, None),
        ratio(Established, OursConntrack, RoutingConntrack, None),
        ratio(Established, OursConntrack, Iptables(1), None),
        ratio(Established, OursMitigated, Ours, Some(0.85)),
        ratio(Established, OursWire, RoutingWire, None),
        ratio(Established, OursXdp, RoutingWire, None),
        ratio(Established, OursXdp, OursWire, Some(1.1)),
        ratio(Replies, Ours, Routing, Some(0.95)),
        ratio(Replies, Ours, Iptables(1), None),
        ratio(Replies, Ours, Nftables, None),
        ratio(Replies, OursRedirect, Routing, Some(1.5)),
        ratio(Replies, OursOffload, Routing, Some(1.5)),
        ratio(Replies, OursOffload, Ours, None),
        ratio(Replies, OursConntrack, RoutingConntrack, None),
        ratio(Replies, OursOffloadConntrack, RoutingConntrack, None),
        ratio(Replies, OursMitigated, Ours, Some(0.85)),
        ratio(NewFlows, Ours, Routing, Some(0.93)),
        ratio(NewFlows, Ours, Iptables(1), None),
        ratio(NewFlows, Ours, Iptables(MAPPINGS), Some(10.0)),
        ratio(NewFlows, Ours, IptablesNewest(MAPPINGS), Some(10.0)),
        ratio(NewFlows, Ours, Nftables, Some(4.0)),
        ratio(NewFlows, OursRedirect, Iptables(MAPPINGS), Some(12.0)),
        ratio(NewFlows, OursRedirect, IptablesNewest(MAPPINGS), Some(12.0)),
        ratio(NewFlows, OursRedirect, Nftables, None),
        ratio(NewFlows, OursOf(100), OursOf(1), Some(0.95)),
        ratio(NewFlows, OursOf(1000), OursOf(1), Some(0.95)),
        ratio(NewFlows, OursOf(MOST_MAPPINGS), OursOf(1), Some(0.95)),
        ratio(NewFlows, OursConntrack, RoutingConntrack, None),
        ratio(NewFlows, OursConntrack, Iptables(MAPPINGS), None),
        ratio(NewFlows, OursWire, RoutingWire, None),
        ratio(NewFlows, OursXdp, RoutingWire, None),
        ratio(NewFlows, OursXdp, OursWire, None),
        ratio(SynFlood, Ours, Routing, None),
        ratio(AckFlood, Ours, Routing, None),
        ratio(RstFlood, Ours, Routing, None),
        ratio(NullFlood, Ours, Routing, None),
        ratio(SynAckFlood, Ours, Routing, None),
        ratio(UdpFlood, Ours, Routing, None),
        ratio(FragmentFlood, Ours, Routing, None),
        ratio(SctpInitFlood, Ours, Routing, None),
        ratio(SctpDataFlood, Ours, Routing, None),
        beside_established(SynFlood, Ours),
        beside_established(AckFlood, Ours),
        beside_established(RstFlood, Ours),
        beside_established(NullFlood, Ours),
        beside_established(SynAckFlood, Ours),
        beside_established(UdpFlood, Ours),
        beside_established(FragmentFlood, Ours),
        beside_established(SctpInitFlood, Ours),
        beside_established(SctpDataFlood, Ours),
        ratio(UdpFlood, Ours, Nftables, None),
        // These ratios show the cost of any program at the hook, and the additional cost of NPL's program.
        ratio(Established, RoutingBesideIdle, Routing, None),
        ratio(Established, RoutingBesideOurs, RoutingBesideIdle, Some(0.98)),
        // Plain routing is the upper bound for translation in the stack, and a minimal redirect is the upper bound for
        // a bypass of the stack. These ratios compare the upper bounds with the alternatives, with each other and with
        // NPL.
        ratio(Established, Routing, Iptables(1), None),
        ratio(NewFlows, Routing, Iptables(MAPPINGS), None),
        ratio(NewFlows, Routing, IptablesNewest(MAPPINGS), None),
        ratio(NewFlows, Routing, Nftables, None),
        ratio(Established, Shortcut, Routing, None),
        ratio(Established, ShortcutXdp, Routing, None),
        ratio(Established, OursRedirect, Shortcut, Some(0.95)),
        ratio(NewFlows, Shortcut, Iptables(MAPPINGS), None),
        ratio(NewFlows, Shortcut, IptablesNewest(MAPPINGS), None),
        ratio(NewFlows, ShortcutXdp, Iptables(MAPPINGS), None),
        ratio(NewFlows, ShortcutXdp, IptablesNewest(MAPPINGS), None),
        ratio(NewFlows, OursRedirect, Shortcut, None),
    ]
};

const fn ratio(workload: Workload, mode: Mode, base: Mode, aim: Option<f64>) -> Ratio {
    Ratio { numerator: Case { workload, mode }, denominator: Case { workload, mode: base }, aim }
}

/// Returns the ratio of a flood's rate to the rate of an established flow.
const fn beside_established(flood: Workload, mode: Mode) -> Ratio {
    Ratio { denominator: Case { workload: Workload::Established, mode }, ..ratio(flood, mode, mode, None) }
}

/// Returns the cases that `ratios` compare, without duplicates. Cases that share a network are grouped and measured one
/// right after the other.
pub(crate) fn needed_for(ratios: &[Ratio]) -> Vec<Vec<Case>> {
    let mut networks: Vec<Vec<Case>> = Vec::new();
    for case in ratios.iter().flat_map(|ratio| [ratio.denominator, ratio.numerator]) {
        let shared = networks.iter_mut().find(|cases| cases.iter().any(|other| other.network() == case.network()));
        match shared {
            Some(cases) if cases.contains(&case) => {}
            Some(cases) => cases.push(case),
            None => networks.push(vec![case]),
        }
    }
    networks
}

// SPDX-License-Identifier: Apache-2.0
//! Decides which devices of the Node are uplinks, and on which uplinks XDP translates requests. The planner also
//! decides to which Pods packets are redirected, and on which addresses NPL serves node ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    Device, DeviceSelection, LinkFacts, UplinkReason,
    attachments::DeviceAttachments,
    choose,
    filter_order::{FilterOrder, ProgramsAhead},
    grace_periods::GracePeriods,
    local_addresses,
    plan::DevicePlan,
    redirect::{Forwarding, NetworkPolicy, PodNextHop, ProgramSet, RedirectRefusal, Route, next_hops},
    reply_routing::{Marking, ReplyRouteProblem, Routing},
    xdp::{self, Attach, XdpReason},
};
use crate::core::{
    model::Moment,
    networks::{RuleNames, bypassed_engines},
};

/// The reason why XDP translates the requests on an uplink (`Ok`), or why XDP does not translate them (`Err`).
pub type XdpDecision = Result<XdpReason, XdpReason>;

/// The agent's flags on which the decisions about devices depend.
#[derive(Debug, Clone)]
pub struct DevicePolicy {
    /// The value of the flag `--devices`.
    pub selection: DeviceSelection,
    /// The value of the flag `--forwarding`.
    pub forwarding: Forwarding,
    /// Whether the flag `--ignore-network-policy` is set.
    pub network_policy: NetworkPolicy,
    /// The value of the flag `--attach`.
    pub attach: Attach,
    /// Whether the nftables guard (NPL's nftables table) may mark connections, so that replies leave through the uplink
    /// of the request.
    pub marks_connections: bool,
}

impl DevicePolicy {
    /// Whether the decisions about devices depend on the policy engines of the Node.
    pub fn asks_for_policy_engines(&self) -> bool {
        self.forwarding == Forwarding::Redirect && self.network_policy == NetworkPolicy::Applies
    }
}

/// The settings of kernel conntrack that limit `--forwarding offload`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConntrackSettings {
    /// Whether kernel conntrack marks out-of-window TCP packets as invalid.
    pub is_strict: bool,
    /// Whether the timeout for unacknowledged data is shorter than the timeout for established connections. Kernel
    /// conntrack then times out idle offloaded connections early, because it does not see every acknowledgement.
    pub forgets_idle: bool,
}

/// The Node's network at the time of a decision.
#[derive(Debug)]
pub struct NodeNetwork<'a> {
    /// All network devices of the Node.
    pub devices: &'a [Device],
    /// The policy routing rules and default routes of the Node.
    pub routing: &'a Routing,
    /// The routes to Pods with mappings.
    pub routes: &'a BTreeMap<IpAddr, Route>,
    /// The programs, filters and qdiscs on each device that leads to Pods with mappings, or may be an uplink.
    pub attachments: &'a BTreeMap<u32, DeviceAttachments>,
    /// The published addresses of the Node; empty until the agent knows the addresses.
    pub node_ips: &'a [IpAddr],
    /// The Pods that have mappings.
    pub mapped_pods: &'a BTreeSet<IpAddr>,
    /// The addresses on which NPL serves node ports before this decision.
    pub held_addresses: &'a BTreeSet<IpAddr>,
    /// The ifindexes of the devices to which the programs of an uplink are attached.
    pub attached_uplinks: &'a BTreeSet<u32>,
    /// The settings of kernel conntrack that limit `--forwarding offload`.
    pub conntrack: ConntrackSettings,
    /// Whether XDP programs can process multi-buffer frames.
    pub has_xdp_frags: bool,
    /// Whether TC programs are attached as filters, because the kernel has no TCX (before Linux 6.6).
    pub are_filters: bool,
    /// The names of netfilter's tables and chains, or the error if they cannot be read; `None` if no decision depends
    /// on the names.
    pub rule_names: Option<Result<&'a RuleNames, &'a String>>,
}

/// The decisions about the Node's devices, with their reasons.
#[derive(Debug, Clone, Default)]
pub struct DeviceDecisions {
    /// The addresses on which NPL serves node ports, by priority.
    pub local_addresses: Vec<IpAddr>,
    /// By device name: the reason why the device is an uplink (`Ok`), or why the device is not an uplink (`Err`).
    pub uplinks: BTreeMap<String, Result<UplinkReason, UplinkReason>>,
    /// By the ifindex of each uplink: whether XDP translates requests there, and why.
    pub xdp: BTreeMap<u32, XdpDecision>,
    /// The next hop of each Pod to which packets are redirected, or why packets to the Pod are not redirected.
    pub next_hops: BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>,
    /// The connections to mark, so that replies of Pods with their own routing table leave through the interface on
    /// which the request arrived.
    pub markings: BTreeSet<Marking>,
    /// The reason why some replies leave through another interface than the one on which their requests arrived, and
    /// the affected addresses: addresses of Pods, or of the Node.
    pub reply_route_problem: Option<(ReplyRouteProblem, BTreeSet<IpAddr>)>,
    /// The names in `--devices` that no device of the Node has.
    pub missing_devices: BTreeSet<String>,
    /// By device: the programs of other software that stay ahead of NPL's programs.
    pub programs_ahead: ProgramsAhead,
    /// The names of the policy engines because of which the agent refuses redirect, or the error if the agent cannot
    /// read the rules by which it recognizes policy engines; `None` if redirect is not refused.
    pub redirect_refused_by: Option<String>,
    /// The programs and next hops that result from the decisions.
    pub plan: DevicePlan,
}

/// Makes all decisions about devices. Stores grace periods, failures to attach the XDP program, and moves of filters,
/// because the next decisions depend on them.
#[derive(Debug)]
pub struct DevicePlanner {
    policy: DevicePolicy,
    address_grace: GracePeriods<IpAddr>,
    device_grace: GracePeriods<u32>,
    /// By ifindex: the devices to which the XDP program could not be attached, each with the link's properties at that
    /// time and the reason.
    refused: BTreeMap<u32, (LinkFacts, XdpReason)>,
    filter_order: FilterOrder,
}

impl DevicePlanner {
    /// Creates a planner that has made no decision yet.
    pub fn new(policy: DevicePolicy) -> Self {
        Self {
            policy,
            address_grace: GracePeriods::default(),
            device_grace: GracePeriods::default(),
            refused: BTreeMap::new(),
            filter_order: FilterOrder::default(),
        }
    }

    /// The flags on which the decisions depend.
    pub const fn policy(&self) -> &DevicePolicy {
        &self.policy
    }

    /// The earliest time at which a current grace period ends.
    pub fn next_deadline(&self) -> Option<Moment> {
        let deadlines = [self.address_grace.next_deadline(), self.device_grace.next_deadline()];
        deadlines.into_iter().flatten().min()
    }

    /// Makes all decisions about the devices of this network.
    pub fn decide(&mut self, network: &NodeNetwork<'_>, now: Moment) -> DeviceDecisions {
        let local_addresses = self.decide_local_addresses(network, now);
        let uplinks = self.decide_uplinks(network, now);
        let is_uplink = |device: &&Device| matches!(uplinks.get(&device.name), Some(Ok(_)));
        let chosen: Vec<&Device> = network.devices.iter().filter(is_uplink).collect();
        let indexes: BTreeSet<u32> = chosen.iter().map(|device| device.ifindex).collect();
        self.refused.retain(|ifindex, _| indexes.contains(ifindex));
        let xdp =
            chosen.iter().map(|device| (device.ifindex, self.decide_xdp(device, network.has_xdp_frags))).collect();
        let redirect_refused_by = redirect_refused_by(network.rule_names);
        let mut next_hops = self.decide_next_hops(network, &indexes);
        if redirect_refused_by.is_some() {
            for hop in next_hops.values_mut() {
                *hop = Err(RedirectRefusal::NetworkPolicy);
            }
        }
        let reply_routes = network.routing.reply_routes(network.devices, &indexes).of(network.mapped_pods);
        let problem = reply_routes.problem(self.policy.forwarding, self.policy.marks_connections);
        let reply_route_problem = problem.map(|(problem, pods)| (problem, pods.clone()));
        let missing_devices = self.missing_devices(network.devices);
        let (moves, programs_ahead) = self.filter_order.decide(&chosen, network.attachments, network.are_filters, now);
        let plan = DevicePlan { moves, ..self.plan(&chosen, &xdp, &next_hops) };
        DeviceDecisions {
            local_addresses,
            uplinks,
            xdp,
            next_hops,
            markings: reply_routes.markings,
            reply_route_problem,
            missing_devices,
            programs_ahead,
            redirect_refused_by,
            plan,
        }
    }

    /// Records that a driver accepted the XDP program, or why the XDP program could not be attached.
    pub fn record_xdp(&mut self, device: &Device, outcome: Result<(), XdpReason>) {
        match outcome {
            Ok(()) => drop(self.refused.remove(&device.ifindex)),
            Err(reason) => drop(self.refused.insert(device.ifindex, (device.link.clone(), reason))),
        }
    }

    /// Returns the addresses on which NPL serves node ports. An address that has disappeared stays in the result until
    /// its grace period ends.
    fn decide_local_addresses(&mut self, network: &NodeNetwork<'_>, now: Moment) -> Vec<IpAddr> {
        let mut wanted = local_addresses(network.devices, network.node_ips);
        let present = wanted.iter().copied().collect();
        wanted.extend(self.address_grace.update(network.held_addresses, &present, now));
        wanted
    }

    fn decide_uplinks(
        &mut self,
        network: &NodeNetwork<'_>,
        now: Moment,
    ) -> BTreeMap<String, Result<UplinkReason, UplinkReason>> {
        let is_attached = |device: &Device| network.attached_uplinks.contains(&device.ifindex);
        let decisions: Vec<_> = network
            .devices
            .iter()
            .map(|device| (device, choose(device, &self.policy.selection, network.node_ips, is_attached(device))))
            .collect();
        let is_leaving = |(device, decision): &&(&Device, Result<UplinkReason, UplinkReason>)| {
            decision.is_err_and(UplinkReason::has_grace_period) && is_attached(device)
        };
        let leaving = decisions.iter().filter(is_leaving).map(|(device, _)| device.ifindex).collect();
        let in_grace = self.device_grace.update(&leaving, &BTreeSet::new(), now);
        let decide = |(device, decision): (&Device, Result<UplinkReason, UplinkReason>)| {
            let stays = in_grace.contains(&device.ifindex);
            (device.name.clone(), if stays { Ok(UplinkReason::InGracePeriod) } else { decision })
        };
        decisions.into_iter().map(decide).collect()
    }

    /// Decides whether XDP translates the requests on a device. If the XDP program could not be attached before, the
    /// agent tries again only if the properties of the link have changed, or if the reason may be temporary.
    fn decide_xdp(&self, device: &Device, has_frags: bool) -> XdpDecision {
        let decision = xdp::plan(device, self.policy.attach, self.policy.forwarding, has_frags);
        match self.refused.get(&device.ifindex) {
            Some((link, reason)) if *link == device.link && !reason.is_temporary() => decision.and(Err(*reason)),
            _ => decision,
        }
    }

    /// Returns the next hop of each Pod, or why packets to the Pod are not redirected. The result is empty in stack
    /// mode. In offload mode, the result is empty if kernel conntrack is strict: after some packets of a flow have
    /// bypassed the stack, strict conntrack would mark the flow's next packets as invalid.
    fn decide_next_hops(
        &self,
        network: &NodeNetwork<'_>,
        uplinks: &BTreeSet<u32>,
    ) -> BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>> {
        match self.policy.forwarding {
            Forwarding::Stack => return BTreeMap::new(),
            Forwarding::Offload if network.conntrack.is_strict => return BTreeMap::new(),
            Forwarding::Offload | Forwarding::Redirect => {}
        }
        let routed_by_mark = network.routing.families_routed_by_mark(uplinks);
        next_hops(network.devices, uplinks, network.routes, network.attachments, &routed_by_mark)
    }

    fn missing_devices(&self, devices: &[Device]) -> BTreeSet<String> {
        let DeviceSelection::Named(names) = &self.policy.selection else { return BTreeSet::new() };
        let is_missing = |name: &&String| devices.iter().all(|device| device.name != **name);
        names.iter().filter(is_missing).cloned().collect()
    }

    fn plan(
        &self,
        uplinks: &[&Device],
        xdp: &BTreeMap<u32, XdpDecision>,
        next_hops: &BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>,
    ) -> DevicePlan {
        let forwarding = self.policy.forwarding;
        let next_hops: BTreeMap<_, _> = next_hops.iter().filter_map(|(addr, hop)| Some((*addr, hop.ok()?))).collect();
        let of_pods = next_hops.values().map(|hop| (hop.ifindex, ProgramSet::pods(forwarding)));
        let of_uplinks = uplinks.iter().map(|it| (it.ifindex, ProgramSet::of_uplink(it, forwarding)));
        DevicePlan {
            programs: of_uplinks.chain(of_pods).collect(),
            xdp: xdp.iter().filter(|(_, decision)| decision.is_ok()).map(|(ifindex, _)| *ifindex).collect(),
            next_hops,
            ..DevicePlan::default()
        }
    }
}

/// Returns the policy engines whose rules a redirect would bypass. If netfilter's rules cannot be read, returns the
/// error: redirect is then refused, because the rules may belong to a policy engine.
fn redirect_refused_by(rule_names: Option<Result<&RuleNames, &String>>) -> Option<String> {
    match rule_names? {
        Ok(names) => {
            let engines: Vec<_> = bypassed_engines(names).into_iter().collect();
            (!engines.is_empty()).then(|| engines.join(", "))
        }
        Err(reason) => Some(format!("unknown: netfilter's rules cannot be read: {reason}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::devices::{DeviceKind, grace_periods::GRACE_MILLIS};

    const NODE_IP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 10));

    fn policy() -> DevicePolicy {
        DevicePolicy {
            selection: DeviceSelection::Auto,
            forwarding: Forwarding::Stack,
            network_policy: NetworkPolicy::Applies,
            attach: Attach::Auto,
            marks_connections: false,
        }
    }

    fn bridge(addresses: &[IpAddr]) -> Device {
        Device { addresses: addresses.to_vec(), ..Device::new(2, "br0", DeviceKind::Bridge) }
    }

    /// Makes the decisions for `devices`. `uplinks` and `addresses` are the uplinks and addresses of the previous
    /// decision.
    fn decide(
        planner: &mut DevicePlanner,
        devices: &[Device],
        (uplinks, addresses): (&[u32], &[IpAddr]),
        now: u64,
    ) -> DeviceDecisions {
        let network = NodeNetwork {
            devices,
            routing: &Routing::default(),
            routes: &BTreeMap::new(),
            attachments: &BTreeMap::new(),
            node_ips: &[NODE_IP],
            mapped_pods: &BTreeSet::new(),
            held_addresses: &addresses.iter().copied().collect(),
            attached_uplinks: &uplinks.iter().copied().collect(),
            conntrack: ConntrackSettings::default(),
            has_xdp_frags: true,
            are_filters: false,
            rule_names: None,
        };
        planner.decide(&network, Moment(now))
    }

    #[test]
    fn an_uplink_that_loses_its_address_keeps_programs_and_address_for_the_grace_period() {
        let mut planner = DevicePlanner::new(policy());
        let first = decide(&mut planner, &[bridge(&[NODE_IP])], (&[], &[]), 0);
        assert_eq!(first.uplinks["br0"], Ok(UplinkReason::HasNodeAddress));
        let held: (&[u32], &[IpAddr]) = (&[2], &[NODE_IP]);
        let second = decide(&mut planner, &[bridge(&[])], held, 1);
        assert_eq!(second.uplinks["br0"], Ok(UplinkReason::InGracePeriod));
        assert_eq!((second.local_addresses, second.plan.programs.len()), (vec![NODE_IP], 1));
        assert_eq!(planner.next_deadline(), Some(Moment(1 + GRACE_MILLIS)));
        let last = decide(&mut planner, &[bridge(&[])], held, 1 + GRACE_MILLIS);
        assert_eq!(last.uplinks["br0"], Err(UplinkReason::LeadsToPods));
        assert_eq!((last.local_addresses, last.plan), (vec![], DevicePlan::default()));
    }

    #[test]
    fn xdp_is_attached_again_after_a_rejection_once_the_device_has_changed() {
        let card = |mtu| {
            let link = LinkFacts { driver: Some("i40e".to_owned()), mtu, ..LinkFacts::default() };
            Device { kind: DeviceKind::Physical, link, ..bridge(&[NODE_IP]) }
        };
        let mut planner = DevicePlanner::new(policy());
        let decision = |planner: &mut DevicePlanner, mtu| decide(planner, &[card(mtu)], (&[], &[]), 0).xdp[&2];
        assert_eq!(decision(&mut planner, 1500), Ok(XdpReason::SafeDriver));
        planner.record_xdp(&card(1500), Err(XdpReason::DriverRefuses));
        assert_eq!(decision(&mut planner, 1500), Err(XdpReason::DriverRefuses));
        assert_eq!(decision(&mut planner, 1400), Ok(XdpReason::SafeDriver));
        planner.record_xdp(&card(1400), Err(XdpReason::Occupied));
        assert_eq!(
            decision(&mut planner, 1400),
            Ok(XdpReason::SafeDriver),
            "the other program may be detached at any time"
        );
    }

    /// Before Linux 6.6, the agent reads the attachments of devices in stack mode, too. The planner must not redirect
    /// packets in stack mode, even if it knows the attachments.
    #[test]
    fn no_pod_is_redirected_in_stack_mode() {
        let pod = IpAddr::from([10, 244, 1, 5]);
        let decide = |forwarding| {
            let devices = [bridge(&[NODE_IP]), Device::new(7, "cni0", DeviceKind::Bridge)];
            let attachments = [2, 7].map(|ifindex| (ifindex, DeviceAttachments::default())).into();
            let network = NodeNetwork {
                devices: &devices,
                routing: &Routing::default(),
                routes: &BTreeMap::from([(pod, Route { ifindex: 7, has_gateway: false, mtu: None })]),
                attachments: &attachments,
                node_ips: &[NODE_IP],
                mapped_pods: &BTreeSet::from([pod]),
                held_addresses: &BTreeSet::new(),
                attached_uplinks: &BTreeSet::new(),
                conntrack: ConntrackSettings::default(),
                has_xdp_frags: true,
                are_filters: true,
                rule_names: None,
            };
            let mut planner = DevicePlanner::new(DevicePolicy { forwarding, ..policy() });
            planner.decide(&network, Moment(0)).plan.next_hops.len()
        };
        assert_eq!([Forwarding::Stack, Forwarding::Redirect].map(decide), [0, 1]);
    }

    #[test]
    fn redirect_is_refused_with_a_policy_engine_in_netfilter_or_unreadable_rules() {
        let names = |chain: &str| RuleNames { chains: [chain.to_owned()].into(), ..RuleNames::default() };
        let unreadable = "EPERM".to_owned();
        assert_eq!(redirect_refused_by(None), None);
        assert_eq!(redirect_refused_by(Some(Ok(&names("KUBE-SERVICES")))), None);
        assert_eq!(redirect_refused_by(Some(Ok(&names("cali-FORWARD")))).as_deref(), Some("Calico"));
        assert!(redirect_refused_by(Some(Err(&unreadable))).unwrap().contains("EPERM"));
        for (forwarding, network_policy, asks) in [
            (Forwarding::Redirect, NetworkPolicy::Applies, true),
            (Forwarding::Redirect, NetworkPolicy::Ignored, false),
            (Forwarding::Offload, NetworkPolicy::Applies, false),
            (Forwarding::Stack, NetworkPolicy::Applies, false),
        ] {
            let policy = DevicePolicy { forwarding, network_policy, ..policy() };
            assert_eq!(policy.asks_for_policy_engines(), asks, "{forwarding:?} {network_policy:?}");
        }
    }

    #[test]
    fn named_devices_that_do_not_exist_are_missing() {
        let selection = DeviceSelection::Named(vec!["br0".to_owned(), "eth7".to_owned()]);
        let mut planner = DevicePlanner::new(DevicePolicy { selection, ..policy() });
        let decisions = decide(&mut planner, &[bridge(&[])], (&[], &[]), 0);
        assert_eq!(decisions.missing_devices, BTreeSet::from(["eth7".to_owned()]));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Attaches programs to the devices that [`DevicePlanner`] chooses, and writes the Node's addresses to the maps. When
//! devices or addresses change, updates the attached programs and the addresses in the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use super::apply::{Applied, apply};
use crate::{
    core::{
        devices::{
            Coverage, Device, DeviceSelection, Direction, UplinkReason,
            forged_sources::{ForgedSources, may_masquerade_at_egress},
            node_network::{PodRoutes, PodsOnNodeNetwork},
            plan::AttachedHooks,
            planner::{ConntrackSettings, DeviceDecisions, DevicePlanner, DevicePolicy, NodeNetwork, XdpDecision},
            redirect::{Forwarding, NetworkPolicy},
            reply_routing::Marking,
            xdp::{Attach, XdpReason},
        },
        model::Moment,
        networks::RuleNames,
    },
    datapath::{Datapath, DatapathError, preflight},
    netlink::{self, NetlinkError, Survey, SurveyTask, TcInspection},
    nft_guard::{self, GuardMode},
};

/// Decides to which devices programs are attached, and keeps the state that these decisions need.
#[derive(Debug)]
pub struct Uplinks {
    planner: DevicePlanner,
    /// The addresses of Pods that have mappings and whose routes the last survey looked up.
    pods: BTreeSet<IpAddr>,
    pod_routes: PodRoutes,
    markings: BTreeSet<Marking>,
    forged_sources: ForgedSources,
}

/// The decisions about devices, and the result of applying the decisions.
#[derive(Debug)]
pub struct DeviceReport {
    /// The number of chosen devices to which the programs are attached, and the number of those to which the programs
    /// could not be attached.
    pub coverage: Coverage,
    /// Whether clients can reach the Node through a device to which programs are attached.
    pub reaches_clients: bool,
    /// The names, by ifindex, of the uplinks to which the programs could not be attached.
    pub unattached: BTreeMap<u32, String>,
    /// The decision on every device: whether and why the programs are attached.
    pub decisions: DeviceDecisions,
    /// By name of each device to which programs are attached: whether the XDP program runs on the device, and why.
    pub xdp: BTreeMap<String, XdpDecision>,
    /// By device name: the error because of which the XDP program could not be attached to the device in this pass.
    pub xdp_errors: BTreeMap<String, DatapathError>,
    /// The settings of kernel conntrack on which offload depends; both are false in the other forwarding modes.
    pub conntrack: ConntrackSettings,
    /// Addresses of the Node that are not served because the maps have no room.
    pub left_out_addresses: Vec<IpAddr>,
    /// All failures of applying the decisions except those in `xdp_errors`.
    pub errors: Vec<DatapathError>,
}

/// Why the survey failed, or why its result could not be written to the maps.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// The kernel's devices, addresses, routes or rules could not be listed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An operation on a BPF map failed.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
}

impl FollowError {
    /// Whether the survey failed because devices, addresses or routes changed during each attempt to list them.
    pub const fn is_change(&self) -> bool {
        matches!(self, Self::Netlink(NetlinkError::Changing { .. }))
    }
}

impl Uplinks {
    /// Creates the state without devices and decisions. The first survey of the network adds the devices and the
    /// decisions.
    pub fn new(
        selection: DeviceSelection,
        (forwarding, network_policy): (Forwarding, NetworkPolicy),
        attach: Attach,
        guard: GuardMode,
    ) -> Self {
        let marks_connections = guard != GuardMode::Off;
        let policy = DevicePolicy { selection, forwarding, network_policy, attach, marks_connections };
        Self {
            planner: DevicePlanner::new(policy),
            pods: BTreeSet::new(),
            pod_routes: PodRoutes::default(),
            markings: BTreeSet::new(),
            forged_sources: ForgedSources::default(),
        }
    }

    /// The connections to mark, so that replies leave through the interface on which their requests arrived.
    pub const fn markings(&self) -> &BTreeSet<Marking> {
        &self.markings
    }

    /// By what the nftables guard recognizes forwarded packets with a forged node port as source.
    pub const fn forged_sources(&self) -> &ForgedSources {
        &self.forged_sources
    }

    /// Whether next hops are out of date, because the Pods with mappings are not the Pods to which the last survey
    /// looked up routes.
    pub fn are_out_of_date(&self, datapath: &Datapath) -> bool {
        self.planner.policy().forwarding != Forwarding::Stack && datapath.pod_addresses() != self.pods
    }

    /// Begins a survey of the Node's devices and of the routes to these Pods. If packets may be redirected, the survey
    /// includes the programs and filters of other software on the devices to which the routes lead. Before Linux 6.6,
    /// the survey always includes the filters on uplinks.
    pub fn survey(&self, datapath: &Datapath, pods: BTreeSet<IpAddr>) -> SurveyTask {
        let DevicePolicy { selection, forwarding, .. } = self.planner.policy();
        let with_pods = *forwarding != Forwarding::Stack;
        if !needs_attachments(datapath, *forwarding) {
            return netlink::survey(pods, None);
        }
        let own = datapath.hooks.own_programs();
        let programs_on = Box::new(move |ifindex| own.programs_on(ifindex));
        let read_names: fn() -> io::Result<RuleNames> = nft_guard::rule_names;
        let rule_names = self.planner.policy().asks_for_policy_engines().then_some(read_names);
        let inspection = TcInspection { uplinks: selection.clone(), with_pods, programs_on, rule_names };
        let of_redirect = if with_pods { datapath.pod_addresses() } else { BTreeSet::new() };
        netlink::survey(&pods | &of_redirect, Some(inspection))
    }

    /// Looks up the routes to new Pods, and returns the Pods that are on the Node's own network. The look-ups do not
    /// wait for the kernel's RTNL lock.
    ///
    /// # Errors
    ///
    /// If a netlink socket cannot be opened.
    pub async fn pods_on_node_network(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<PodsOnNodeNetwork, FollowError> {
        let new = self.pod_routes.retain(addresses);
        let routes = netlink::routes_to(&new).await?;
        self.pod_routes.add(new, routes);
        Ok(self.pod_routes.on_node_network())
    }

    /// Surveys the Node's devices and attaches the programs.
    ///
    /// # Errors
    ///
    /// If devices cannot be listed, or one of the errors of [`Self::apply`] occurs.
    pub async fn follow(&mut self, datapath: &mut Datapath, node_ips: &[IpAddr]) -> Result<Coverage, FollowError> {
        let survey = netlink::join_survey(&mut self.survey(datapath, BTreeSet::new())).await?;
        Ok(self.apply(datapath, survey, node_ips, Moment::default())?.coverage)
    }

    /// The time at which the next grace period of a vanished device or address ends; `None` without grace periods.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.planner.next_deadline()
    }

    /// Decides on the devices of a survey and applies the decisions.
    ///
    /// # Errors
    ///
    /// If an address cannot be written to the BPF maps, or the pins of attached programs cannot be listed. A program
    /// that cannot be attached to a device causes no error: the result names the device.
    pub fn apply(
        &mut self,
        datapath: &mut Datapath,
        survey: Survey,
        node_ips: &[IpAddr],
        now: Moment,
    ) -> Result<DeviceReport, DatapathError> {
        let Survey { pods, mut routes, devices, routing, attachments, rule_names } = survey;
        let mapped_pods = datapath.pod_addresses();
        self.pods = &pods & &mapped_pods;
        self.pod_routes.replace(&devices, node_ips, pods, routes.clone());
        routes.retain(|addr, _| mapped_pods.contains(addr));
        let is_offload = self.planner.policy().forwarding == Forwarding::Offload;
        let conntrack = if is_offload { preflight::conntrack_settings() } else { ConntrackSettings::default() };
        let attached = datapath.hooks.attached_hooks()?;
        let network = NodeNetwork {
            devices: &devices,
            routing: &routing,
            routes: &routes,
            attachments: &attachments,
            node_ips,
            mapped_pods: &mapped_pods,
            held_addresses: &datapath.tables.local_addresses()?,
            attached_uplinks: &uplinks_of(&attached),
            conntrack,
            has_xdp_frags: preflight::has_xdp_frags(),
            are_filters: datapath.hooks.are_filters(),
            rule_names: rule_names.as_ref().map(Result::as_ref),
        };
        let decisions = self.planner.decide(&network, now);
        let left_out_addresses = datapath.tables.set_local_addresses(&decisions.local_addresses)?;
        self.markings.clone_from(&decisions.markings);
        self.forged_sources = ForgedSources::of(&devices, &decisions.local_addresses);
        datapath.tables.set_final_sources(!may_masquerade_at_egress(&devices, &attachments))?;
        let applied = apply(datapath, &devices, &attached, &decisions.plan);
        let mut report = self.report(&devices, decisions, applied, (conntrack, left_out_addresses));
        let reason = |device: &Device| Some(report.xdp.get(&device.name)?.unwrap_or_else(|reason| reason));
        let reasons: BTreeMap<u32, XdpReason> =
            devices.iter().filter_map(|device| Some((device.ifindex, reason(device)?))).collect();
        report.errors.extend(datapath.hooks.note_reasons(&reasons).err());
        let is_refused = report.decisions.redirect_refused_by.is_some();
        report.errors.extend(datapath.hooks.note_redirect_refusal(is_refused).err());
        Ok(report)
    }

    fn report(
        &mut self,
        devices: &[Device],
        decisions: DeviceDecisions,
        applied: Applied,
        (conntrack, left_out_addresses): (ConntrackSettings, Vec<IpAddr>),
    ) -> DeviceReport {
        let Applied { attached, mut xdp_errors, errors } = applied;
        let (mut xdp, mut errors_by_name) = (BTreeMap::new(), BTreeMap::new());
        for device in devices.iter().filter(|device| attached.contains(&device.ifindex)) {
            let Some(mut decision) = decisions.xdp.get(&device.ifindex).copied() else { continue };
            if decision.is_ok() {
                let error = xdp_errors.remove(&device.ifindex);
                let outcome = error.as_ref().map_or(Ok(()), |error| Err(error.xdp_reason()));
                decision = decision.and_then(|reason| outcome.map(|()| reason));
                self.planner.record_xdp(device, outcome);
                errors_by_name.extend(error.map(|error| (device.name.clone(), error)));
            }
            xdp.insert(device.name.clone(), decision);
        }
        let unsupported = decisions.uplinks.values().filter(|it| it.is_err_and(UplinkReason::is_unsupported)).count();
        let is_chosen_for_clients = |name: &String| {
            decisions.uplinks.get(name).is_some_and(|decision| decision.is_ok_and(UplinkReason::reaches_clients))
        };
        let reaches_clients = xdp.keys().any(is_chosen_for_clients);
        let is_unattached =
            |device: &&Device| decisions.xdp.contains_key(&device.ifindex) && !attached.contains(&device.ifindex);
        let unattached = devices.iter().filter(is_unattached).map(|it| (it.ifindex, it.name.clone())).collect();
        let failed = decisions.xdp.len().saturating_sub(xdp.len()) + unsupported;
        DeviceReport {
            coverage: Coverage { attached: xdp.len(), failed },
            reaches_clients,
            unattached,
            decisions,
            xdp,
            xdp_errors: errors_by_name,
            conntrack,
            left_out_addresses,
            errors,
        }
    }
}

/// Whether decisions depend on the qdiscs, filters and programs of other software. Decisions depend on other software
/// if packets may be redirected, because a redirect would bypass that software. Decisions also depend on other software
/// if NPL's programs are filters, because filters of other software may run ahead of NPL's filters.
pub fn needs_attachments(datapath: &Datapath, forwarding: Forwarding) -> bool {
    forwarding != Forwarding::Stack || datapath.hooks.are_filters()
}

/// The ifindexes of devices on which uplink programs are attached, recognized by the program at TC egress.
fn uplinks_of(attached: &AttachedHooks) -> BTreeSet<u32> {
    attached.iter().filter(|(_, direction)| *direction == Direction::Egress).map(|(ifindex, _)| *ifindex).collect()
}

// SPDX-License-Identifier: Apache-2.0
//! Logs each change of the agent's state once, for example of the problems or the devices. Also logs failed operations,
//! each kind at most once per minute.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    agent::executor::OpError,
    core::{
        devices::{
            UplinkReason,
            filter_order::ProgramsAhead,
            planner::{ConntrackSettings, DeviceDecisions, XdpDecision},
            redirect::{PodNextHop, RedirectRefusal},
            reply_routing::ReplyRouteProblem,
            xdp::XdpReason,
        },
        model::{Family, Moment, last::Last, throttles::Throttles},
        op::Op,
        pages,
        ports::PortUsage,
        publish::{problem::Problem, report::Warnings},
        repairs::{Repair, RepairLimit},
        state::{PlannerState, Prerequisite, RetirementStep},
    },
    datapath::{DatapathError, ServedClients},
    devices::uplinks::DeviceReport,
    metrics::{Metrics, OpName, PortCounts},
    process::error_chain::ErrorChain,
};

/// Stores the last logged value of each observed state, such as the devices or the problems, so that only changes are
/// logged.
#[derive(Debug)]
pub struct ChangeLog {
    /// The current problems, which the recorder of Kubernetes Events reads.
    problems: watch::Sender<Vec<Problem>>,
    warnings: Warnings,
    retries: Throttles<OpName>,
    repairs: RepairLimit,
    prerequisites: Last<BTreeSet<Prerequisite>>,
    retirement: Last<BTreeSet<RetirementStep>>,
    kept_predecessors: Last<BTreeSet<String>>,
    local_clients: Last<Result<Option<ServedClients>, String>>,
    uplinks: Last<BTreeMap<String, Result<UplinkReason, UplinkReason>>>,
    missing_devices: Last<BTreeSet<String>>,
    programs_ahead: Last<ProgramsAhead>,
    redirect_refused_by: Last<Option<String>>,
    has_no_uplink: Last<bool>,
    xdp: Last<BTreeMap<String, XdpDecision>>,
    xdp_errors: Last<BTreeMap<String, XdpReason>>,
    next_hops: Last<BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>>,
    conntrack: Last<ConntrackSettings>,
    reply_route_problem: Last<Option<ReplyRouteProblem>>,
    left_out_addresses: Last<usize>,
    device_errors: Last<BTreeMap<String, &'static str>>,
}

impl ChangeLog {
    /// Creates a change log that has not logged any value yet.
    pub fn new(problems: watch::Sender<Vec<Problem>>) -> Self {
        let (mut conntrack, mut reply_route_problem, mut left_out_addresses) =
            (Last::default(), Last::default(), Last::default());
        let mut redirect_refused_by = Last::default();
        redirect_refused_by.update(None);
        // These default values count as already logged, so that a value is logged only if it differs from the default.
        conntrack.update(ConntrackSettings::default());
        reply_route_problem.update(None);
        left_out_addresses.update(0);
        Self {
            problems,
            warnings: Warnings::default(),
            retries: Throttles::default(),
            repairs: RepairLimit::default(),
            prerequisites: Last::default(),
            retirement: Last::default(),
            kept_predecessors: Last::default(),
            local_clients: Last::default(),
            uplinks: Last::default(),
            missing_devices: Last::default(),
            programs_ahead: Last::default(),
            redirect_refused_by,
            has_no_uplink: Last::default(),
            xdp: Last::default(),
            xdp_errors: Last::default(),
            next_hops: Last::default(),
            conntrack,
            reply_route_problem,
            left_out_addresses,
            device_errors: Last::default(),
        }
    }

    /// Logs the prerequisites that the agent still lacks before it publishes node ports, each time the set of missing
    /// prerequisites changes.
    pub(crate) fn log_readiness(&mut self, state: &PlannerState) {
        let missing = state.missing_prerequisites();
        if self.prerequisites.update(missing.clone()) {
            for prerequisite in &missing {
                info!("no node port is published yet: waiting for {prerequisite}");
            }
            if missing.is_empty() {
                info!("Pods, Services and Node are known: publishing mappings");
            }
        }
    }

    /// Logs each step of this Node's retirement once, when the agent begins to wait for that step.
    pub(crate) fn log_retirement(&mut self, state: &PlannerState) {
        let left = state.left_to_retire();
        for step in self.retirement.update_elements(left.keys().copied().collect()) {
            info!("retiring this Node: waiting for {}", left.get(&step).map_or("", String::as_str));
        }
    }

    /// Logs the devices that only the programs of an earlier agent serve, each device once.
    pub(crate) fn log_kept_predecessors(&mut self, devices: &BTreeSet<String>) {
        for iface in self.kept_predecessors.update_elements(devices.clone()) {
            warn!(
                see = pages::url(pages::ABI_UPGRADE),
                iface,
                "the programs and maps of an earlier agent stay, because only they serve this device: this agent's \
                 programs could not be attached to the device, and another log line of the device states why; the agent \
                 tries again at each resync"
            );
        }
    }

    /// Logs that an op failed and is retried. A warning is logged at most once per minute for each kind of op, because
    /// one cause may make the ops of a thousand Pods fail.
    pub(crate) fn log_retry(&mut self, op: &Op, error: &OpError, wait: Duration, now: Moment) {
        let (kind, err, retry_ms) = (OpName::of(op), ErrorChain(error), wait.as_millis());
        let Some(left_out) = self.retries.acquire(kind, now) else {
            return debug!(op = kind.as_str(), %err, retry_ms, "operation failed; the agent retries the operation");
        };
        warn!(
            see = pages::url(pages::SIGNALS),
            op = kind.as_str(),
            %err,
            retry_ms,
            left_out,
            "operation failed; the agent retries the operation. Failures of this kind are logged at most once per minute"
        );
    }

    /// Counts the repairs, and logs each repair, up to a limit per minute and kind of object.
    pub(crate) fn log_repairs(&mut self, repairs: Vec<Repair>, metrics: &Metrics, now: Moment) {
        for Repair { object, name } in repairs {
            metrics.count_repair(object);
            if let Some(left_out) = self.repairs.acquire(object, now) {
                warn!(
                    see = pages::url(pages::OTHER_SOFTWARE),
                    object = object.as_str(),
                    name,
                    left_out,
                    "other software removed or changed an object of NPL; the agent restores the object"
                );
            }
        }
    }

    /// Logs that another process holds a node port, which a Pod's annotation usually contains already. The warning is
    /// logged at most once per minute, because Antrea's agent, for example, holds the node ports of all Pods.
    pub(crate) fn log_taken(&mut self, op: &Op, error: &OpError, now: Moment) {
        let err = ErrorChain(error);
        let Some(left_out) = self.retries.acquire(OpName::of(op), now) else {
            return debug!(%err, "another process holds a node port, so the Pod gets another node port");
        };
        warn!(
            see = pages::url(pages::BOTH_AGENTS),
            %err,
            left_out,
            "another process holds a node port, so the Pod gets another node port: disable Antrea's NodePortLocal \
             before NPL starts, or find the process with `ss -tulnp`. This warning is logged at most once per minute"
        );
    }

    /// Logs new problems, and passes all problems on to Events and metrics. Does nothing if the problems have not
    /// changed since the previous pass, as is usual.
    pub(crate) fn log_problems(&mut self, state: &PlannerState, metrics: &Metrics, now: Moment) {
        if state.problems().eq(self.problems.borrow().iter().map(Cow::Borrowed)) {
            return;
        }
        let current: Vec<Problem> = state.problems().map(Cow::into_owned).collect();
        for problem in self.warnings.observe(&current, now) {
            warn!(see = pages::url(&pages::of_event(problem.reason())), reason = problem.reason(), "{problem}");
        }
        let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
        for problem in &current {
            *counts.entry(problem.reason()).or_default() += 1;
        }
        metrics.set_problems(&counts.into_iter().collect::<Vec<_>>());
        self.problems.send_replace(current);
    }

    /// Sets the metrics of mappings and node ports.
    pub(crate) fn count(state: &PlannerState, metrics: &Metrics) {
        for family in Family::ALL {
            metrics.set_mappings(family, state.mapping_count(family) as u64);
            for (protocol, PortUsage { active, draining, quarantined, free }) in state.port_usages(family) {
                let counts =
                    PortCounts { used: (active + draining) as u64, free: free as u64, quarantined: quarantined as u64 };
                metrics.set_ports(family, protocol, counts);
            }
        }
    }

    /// Logs whether local clients are served, and if not, why, each time this state changes.
    pub(crate) fn log_local_clients(&mut self, served: &Result<Option<ServedClients>, String>) {
        if !self.local_clients.update(served.clone()) {
            return;
        }
        match served {
            Ok(None) => {}
            Ok(Some(ServedClients { cgroup, has_loopback })) => {
                info!(
                    cgroup = %cgroup.display(),
                    "the local clients that --cgroup and --local-clients select can connect to node ports"
                );
                if !has_loopback {
                    info!(
                        "local clients cannot reach node ports through loopback addresses, because this requires \
                         Linux 5.14 or newer"
                    );
                }
            }
            Err(err) => warn!(
                see = pages::url(&pages::of_check("local_clients")),
                %err,
                "clients on the Node and in its Pods cannot connect to node ports; all other clients can. The agent \
                 tries again at each resync"
            ),
        }
    }

    /// Logs the changes in the report of a survey: devices, next hops, kernel conntrack settings, reply routes and XDP.
    pub(crate) fn log_devices(&mut self, report: DeviceReport) {
        let DeviceReport {
            coverage: _,
            reaches_clients: _,
            unattached: _,
            decisions,
            xdp,
            xdp_errors,
            conntrack,
            left_out_addresses,
            errors,
        } = report;
        let count = left_out_addresses.len();
        if self.left_out_addresses.update(count)
            && let Some(first) = left_out_addresses.first()
        {
            warn!(
                see = pages::url(&pages::of_check("addresses")),
                count,
                %first,
                "the Node has more addresses than the maps hold: node ports do not answer on the remaining addresses"
            );
        }
        self.log_uplinks(&decisions);
        self.log_redirect_refusal(decisions.redirect_refused_by.as_deref());
        self.log_next_hops(decisions.next_hops);
        self.log_conntrack(conntrack);
        self.log_reply_routes(decisions.reply_route_problem);
        self.log_xdp(xdp, &xdp_errors);
        self.log_device_errors(&errors);
    }

    fn log_uplinks(&mut self, decisions: &DeviceDecisions) {
        for (iface, decision) in self.uplinks.update_entries(decisions.uplinks.clone()) {
            match decision {
                Ok(reason) => info!(iface, reason = reason.as_str(), "the agent attaches the programs to the device"),
                Err(reason) if reason.is_unsupported() => warn!(
                    see = pages::url(&pages::of_check("devices")),
                    iface,
                    reason = reason.as_str(),
                    "the programs do not support the device: clients that reach the Node through this device are not \
                     served"
                ),
                Err(reason) => debug!(iface, reason = reason.as_str(), "device does not need the programs"),
            }
        }
        for iface in self.missing_devices.update_elements(decisions.missing_devices.clone()) {
            warn!(
                see = pages::url(&pages::of_check("devices")),
                iface,
                "--devices names a device that does not exist; the agent attaches the programs when the device exists"
            );
        }
        for (iface, programs) in self.programs_ahead.update_entries(decisions.programs_ahead.clone()) {
            warn!(
                see = pages::url(pages::PROGRAM_AHEAD),
                iface,
                ?programs,
                "programs of other software run ahead of NPL's on this device: if such a program returns a final \
                 verdict, clients that reach the Node through this device are not served"
            );
        }
        let has_none = !decisions.uplinks.values().flatten().any(|reason| reason.reaches_clients());
        if self.has_no_uplink.update(has_none) && has_none {
            warn!(
                see = pages::url(&pages::of_check("datapath")),
                "no device through which clients reach the Node has the programs, so clients outside the Node cannot \
                 connect to node ports: name the uplinks with --devices"
            );
        }
    }

    fn log_redirect_refusal(&mut self, engines: Option<&str>) {
        if !self.redirect_refused_by.update(engines.map(str::to_owned)) {
            return;
        }
        let Some(engines) = engines else {
            return info!("netfilter on this Node no longer has rules of a policy engine: packets are redirected");
        };
        warn!(
            see = pages::url(&pages::of_check("policy_engine")),
            engines,
            "--forwarding redirect is refused on this Node, because redirected packets would bypass NetworkPolicy: the \
             host's stack forwards all packets. Set --forwarding stack or offload, or --ignore-network-policy if node \
             ports need no NetworkPolicy"
        );
    }

    fn log_next_hops(&mut self, next_hops: BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>) {
        for (pod_ip, hop) in self.next_hops.update_entries(next_hops) {
            match hop {
                Ok(hop) => debug!(%pod_ip, by = hop.kind.as_str(), mtu = hop.mtu, "packets to this Pod are redirected"),
                Err(reason) => {
                    info!(%pod_ip, reason = reason.as_str(), "the host's stack forwards packets to this Pod");
                }
            }
        }
    }

    fn log_conntrack(&mut self, conntrack: ConntrackSettings) {
        if !self.conntrack.update(conntrack) {
            return;
        }
        if conntrack.is_strict {
            warn!(
                see = pages::url(&pages::of_check("conntrack_liberal")),
                "kernel conntrack would mark packets of offloaded flows as invalid, so no flow is offloaded: set \
                 net.netfilter.nf_conntrack_tcp_be_liberal=1 on this Node"
            );
        } else {
            info!("kernel conntrack accepts packets of offloaded flows");
        }
        if conntrack.forgets_idle {
            warn!(
                see = pages::url(&pages::of_check("conntrack_timeouts")),
                "kernel conntrack times out idle offloaded connections after some minutes, because it does not see \
                 every acknowledgement: set net.netfilter.nf_conntrack_tcp_timeout_unacknowledged as high as \
                 nf_conntrack_tcp_timeout_established on this Node"
            );
        }
    }

    fn log_reply_routes(&mut self, problem: Option<(ReplyRouteProblem, BTreeSet<IpAddr>)>) {
        let (problem, pods) = problem.unzip();
        if !self.reply_route_problem.update(problem) {
            return;
        }
        let pods = pods.unwrap_or_default();
        let (count, pod_ip) = (pods.len(), pods.first().map(tracing::field::display));
        match problem {
            None => info!("replies of Pods leave through the interface on which the request arrived"),
            Some(ReplyRouteProblem::NoMark) => warn!(
                see = pages::url(&pages::of_check("reply_routes")),
                count,
                pod_ip,
                "policy routing rules give Pods routing tables of their own, and no earlier rule routes marked packets \
                 through an uplink: replies leave through another interface than that of the request, and may be \
                 dropped; set --forwarding redirect, or add a rule that routes marked packets through an uplink"
            ),
            Some(ReplyRouteProblem::NodeAddress) => warn!(
                see = pages::url(&pages::of_check("reply_routes")),
                count,
                address = pod_ip,
                "policy routing rules give addresses of the Node routing tables of their own, which replies of Pods do not use: \
                 replies to clients of these addresses leave through the main table's uplink and may be dropped; set --forwarding \
                 redirect, or publish an address of the main table's uplink with --node-ip"
            ),
            Some(ReplyRouteProblem::MarkNotSet) => warn!(
                see = pages::url(&pages::of_check("reply_routes")),
                count,
                pod_ip,
                "policy routing rules give Pods routing tables of their own, and with --nft-guard off no connection is \
                 marked: replies leave through another interface than that of the request, and may be dropped; set \
                 --nft-guard auto"
            ),
        }
    }

    fn log_xdp(&mut self, xdp: BTreeMap<String, XdpDecision>, errors: &BTreeMap<String, DatapathError>) {
        let reasons = errors.iter().map(|(iface, error)| (iface.clone(), error.xdp_reason())).collect();
        for iface in self.xdp_errors.update_entries(reasons).keys() {
            if let Some(error) = errors.get(iface) {
                warn!(
                    see = pages::url(pages::OPTIONS),
                    iface,
                    err = %ErrorChain(error),
                    "the XDP program cannot be attached: TC translates requests"
                );
            }
        }
        for (iface, decision) in self.xdp.update_entries(xdp) {
            match decision {
                Ok(XdpReason::Forced) => warn!(
                    see = pages::url(pages::OPTIONS),
                    iface,
                    "XDP translates requests because of --attach xdp: packets with incomplete checksums are corrupted"
                ),
                Ok(reason) => info!(iface, reason = reason.as_str(), "XDP translates requests"),
                Err(XdpReason::NotRequested) => {}
                Err(reason) => info!(iface, reason = reason.as_str(), "TC translates requests"),
            }
        }
    }

    fn log_device_errors(&mut self, errors: &[DatapathError]) {
        let (gone, errors): (Vec<_>, Vec<_>) = errors.iter().partition(|error| error.is_of_gone_device());
        for error in gone {
            debug!(err = %ErrorChain(error), "a device was removed while programs were attached to it");
        }
        let effects = errors.into_iter().map(|error| (ErrorChain(error).to_string(), error.effect())).collect();
        for (err, effect) in self.device_errors.update_entries(effects) {
            warn!(see = pages::url(&pages::of_check("devices")), err, "{effect}");
        }
    }
}

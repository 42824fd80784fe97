// SPDX-License-Identifier: Apache-2.0
//! The state of the planner: desired and observed state, timers, and writes in flight.
//!
//! [`PlannerState::pass`] returns the next operations. The caller executes the operations and reports each result by
//! [`PlannerState::record_done`] or [`PlannerState::record_failed`]. An operation is returned only after its
//! precondition was observed. So if the agent stops after any operation, no annotation names a missing mapping
//! (exceptions: invariant 4 in ARCHITECTURE.md).

mod adopt;
mod assign;
mod contest;
mod plan;
mod problems;
mod publication;
mod retirement;
mod usage;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use self::{contest::Contests, publication::Write};
pub use self::{retirement::RetirementStep, usage::MappingView};
use super::{
    devices::node_network::PodsOnNodeNetwork,
    model::{
        Family, Frontend, Moment, PodKey, PodUid,
        observed::Observed,
        settings::Settings,
        snapshot::{Change, Snapshot},
    },
    op::{Failure, Op, RetryKey},
    ports::{PortTable, select::Wanted},
};

/// The delay in milliseconds before the agent tries again to reserve a node port that another process uses.
const TAKEN_MILLIS: u64 = 60_000;
/// The delay in milliseconds before the agent retries an operation that failed in an unexpected way.
const UNEXPECTED_MILLIS: u64 = 1_000;

/// The state of the planner, from which each pass plans operations.
#[derive(Debug)]
pub struct PlannerState {
    pub(in crate::core) settings: Settings,
    pub(in crate::core) snapshot: Snapshot,
    pub(in crate::core) node_ips: BTreeMap<Family, IpAddr>,
    /// Pods on the Node's own network, which get no mapping because their replies would bypass the Node.
    pub(in crate::core) on_node_network: PodsOnNodeNetwork,
    /// The observed state of the kernel and the sockets; `None` before the first observation.
    pub(in crate::core) observed: Option<Observed>,
    pub(in crate::core) is_adopted: bool,
    pub(in crate::core) ports: PortTable,
    pub(in crate::core) views: BTreeMap<PodKey, PodView>,
    /// The Pods to which the next pass must assign node ports again.
    pub(in crate::core) dirty: BTreeSet<PodKey>,
    /// The Pods that lack a node port because no node port is free.
    pub(in crate::core) waiting_for_port: BTreeSet<PodKey>,
    /// Frontends whose allowed sources do not fit into the kernel's map.
    pub(in crate::core) source_table_full: BTreeSet<Frontend>,
    /// The Pods with a requested port that is not served as requested.
    pub(in crate::core) with_problems: BTreeSet<PodKey>,
    /// The frontends that changed, and that may need an operation or a timer.
    pub(in crate::core) unsettled: BTreeSet<Frontend>,
    /// Frontends that wait only for a timer. If a frontend changes before its timer fires, the timer stays, and the
    /// pass examines the frontend once more without effect.
    pub(in crate::core) timers: BTreeSet<(Moment, Frontend)>,
    /// The Pods whose annotation or readiness gate may need a write.
    pub(in crate::core) unpublished: BTreeSet<PodKey>,
    pub(in crate::core) writes: BTreeMap<PodUid, Write>,
    /// For each Pod that needs a write, the time at which the write became necessary.
    pub(in crate::core) needs_write_since: BTreeMap<PodUid, Moment>,
    /// Deleted Pods with a patch in flight. The answer to the patch shows the Pod before the deletion, and must not add
    /// the Pod to the state again.
    deleted_in_flight: BTreeSet<PodUid>,
    pub(in crate::core) retries: BTreeMap<RetryKey, Moment>,
    contests: Contests,
}

/// The result of one run of the planner: operations, and the time of the next run if no event causes an earlier run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The operations, which the caller executes in this order.
    pub ops: Vec<Op>,
    /// The next time at which a timer requires a run of the planner; `None` if no timer is set.
    pub next_deadline: Option<Moment>,
}

/// A prerequisite of the first pass that assigns node ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Prerequisite {
    /// The agent has complete lists of Pods and Services.
    Lists,
    /// The agent knows an address of the Node to publish, in an IP family that the datapath serves.
    NodeAddress,
    /// The agent has read the kernel's maps and the state of the sockets.
    Observation,
}

impl fmt::Display for Prerequisite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lists => "the API server's lists of Pods and Services",
            Self::NodeAddress => "an address of the Node in a family that is served (--node-ip, status.addresses)",
            Self::Observation => "the first read of the kernel's maps",
        })
    }
}

/// The decision about a Pod's ports, and the frontends that the Pod's annotation names.
#[derive(Debug)]
pub(in crate::core) struct PodView {
    pub(in crate::core) wanted: Wanted,
    pub(in crate::core) named: BTreeSet<Frontend>,
}

impl PlannerState {
    /// Creates the state of an agent that has received no change and no observation yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            ports: PortTable::new(settings.port_range),
            node_ips: settings.node_ips(None, &BTreeMap::new()),
            snapshot: Snapshot::new(&settings.namespaces),
            settings,
            on_node_network: PodsOnNodeNetwork::new(),
            observed: None,
            is_adopted: false,
            views: BTreeMap::new(),
            dirty: BTreeSet::new(),
            waiting_for_port: BTreeSet::new(),
            source_table_full: BTreeSet::new(),
            with_problems: BTreeSet::new(),
            unsettled: BTreeSet::new(),
            timers: BTreeSet::new(),
            unpublished: BTreeSet::new(),
            writes: BTreeMap::new(),
            needs_write_since: BTreeMap::new(),
            deleted_in_flight: BTreeSet::new(),
            retries: BTreeMap::new(),
            contests: Contests::default(),
        }
    }

    /// Replaces the whole observed state, including the part that [`Self::record_done`] has changed.
    pub fn observe(&mut self, observed: Observed) {
        let changed = self.observed.take().unwrap_or_default().differences(&observed);
        self.observed = Some(observed);
        for frontend in changed {
            self.touch(frontend);
        }
    }

    /// Sets which Pod addresses are on the Node's own network, and schedules a new decision for each Pod whose address
    /// is affected.
    pub fn set_pods_on_node_network(&mut self, found: PodsOnNodeNetwork) {
        if found == self.on_node_network {
            return;
        }
        let before = std::mem::replace(&mut self.on_node_network, found);
        let changed = |ip: &IpAddr| before.get(ip) != self.on_node_network.get(ip);
        let affected = self.snapshot.pods().filter(|pod| pod.ips.iter().any(changed));
        self.dirty.extend(affected.map(|pod| pod.key.clone()));
    }

    /// The IP addresses of this Node's Pods, except finished Pods and Pods on the host network.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.snapshot.pod_addresses().collect()
    }

    /// Applies a change that a watch reports.
    pub fn apply(&mut self, change: Change) {
        if matches!(&change, Change::Pod(pod) if self.deleted_in_flight.contains(&pod.uid) || self.is_echo(pod)) {
            return;
        }
        if let Change::Pod(pod) = &change {
            self.record_overwrite(pod);
        }
        let change = if self.settings.is_retiring { change.without_services() } else { change };
        let touched = self.snapshot.apply(change);
        for (key, uid) in &touched.gone {
            self.views.remove(key);
            self.with_problems.remove(key);
            self.end_mappings_of(uid);
        }
        for node_port in touched.service_ports {
            let owners = self.ports.of_number(node_port).filter_map(|(_, claim)| claim.owner.as_ref());
            self.dirty.extend(owners.map(|owner| owner.pod.clone()));
            self.retry_waiting_for_port();
        }
        for key in touched.pods {
            self.recheck_write(&key);
            self.dirty.insert(key);
        }
        self.adopt_node_ips();
    }

    /// The prerequisites of the first pass that are not met yet.
    pub fn missing_prerequisites(&self) -> BTreeSet<Prerequisite> {
        let conditions = [
            (Prerequisite::Lists, self.snapshot.is_listed()),
            (Prerequisite::NodeAddress, !self.node_ips.is_empty() || self.is_retiring()),
            (Prerequisite::Observation, self.observed.is_some()),
        ];
        conditions
            .into_iter()
            .filter(|(_, is_met)| !is_met)
            .map(|(missing_prerequisites, _)| missing_prerequisites)
            .collect()
    }

    /// Whether all prerequisites are met. While a prerequisite is missing, a pass only reserves the ports of existing
    /// mappings.
    pub fn is_ready(&self) -> bool {
        self.missing_prerequisites().is_empty()
    }

    /// Plans the next operations. The caller executes the operations and calls this function again until the result
    /// contains no operation.
    pub fn pass(&mut self, now: Moment) -> Pass {
        if !self.is_ready() {
            return Pass { ops: adopt::reservations(self, now), next_deadline: None };
        }
        if !self.is_adopted {
            adopt::adopt(self);
            self.is_adopted = true;
        }
        self.plan(now)
    }

    /// Records that an operation succeeded.
    pub fn record_done(&mut self, op: &Op, now: Moment) {
        self.retries.remove(&RetryKey::of(op));
        let observed = self.observed.get_or_insert_default();
        match op {
            Op::Reserve(frontend, _) => {
                observed.reservations.insert(*frontend);
                self.ports.unmark_taken(*frontend);
                self.touch(*frontend);
            }
            Op::AllowSources(frontend, ranges) => {
                observed.sources.entry(*frontend).or_default().extend(ranges);
                self.source_table_full.remove(frontend);
                self.touch(*frontend);
            }
            Op::UpsertMapping(frontend, backend) => {
                observed.mappings.insert(*frontend, *backend);
                self.touch(*frontend);
            }
            Op::RemoveMapping(frontend) => {
                observed.mappings.remove(frontend);
                self.touch(*frontend);
            }
            Op::ForgetSources(frontend, ranges) => {
                if let Some(left) = observed.sources.get_mut(frontend) {
                    left.retain(|range| !ranges.contains(range));
                    if left.is_empty() {
                        observed.sources.remove(frontend);
                    }
                }
                self.touch(*frontend);
                self.retry_source_table_full();
            }
            Op::Release(frontend) => {
                observed.reservations.remove(frontend);
                self.touch(*frontend);
            }
            Op::WritePod { pod, uid, value } => {
                self.deleted_in_flight.remove(uid);
                self.writes.remove(uid);
                self.touch_all_of(uid);
                self.unpublished.insert(pod.clone());
                let is_stored = self.snapshot.pod(pod).is_none_or(|pod| value.is_stored_in(pod));
                if is_stored {
                    self.needs_write_since.remove(uid);
                } else {
                    self.delay_unstored_write(pod, uid, now);
                }
            }
        }
    }

    /// Records that an operation failed, or that its result is unknown.
    pub fn record_failed(&mut self, op: &Op, failure: Failure, now: Moment) {
        let at = match failure {
            Failure::Retry { at } | Failure::NoRoom { at } => at,
            Failure::PortTaken | Failure::RecentTraffic { .. } | Failure::Gone => now.plus(UNEXPECTED_MILLIS),
        };
        match (op, failure) {
            (Op::WritePod { uid, .. }, _) if self.deleted_in_flight.remove(uid) => return,
            (Op::Reserve(frontend, _), Failure::PortTaken) => {
                self.ports.mark_taken(*frontend, now.plus(TAKEN_MILLIS));
                return self.yield_port(*frontend);
            }
            (Op::Reserve(frontend, _), Failure::RecentTraffic { until }) => {
                self.ports.mark_recent_traffic(frontend.node_port, until);
                return self.yield_port(*frontend);
            }
            (Op::WritePod { uid, .. }, Failure::Gone) => {
                self.writes.insert(uid.clone(), Write::Gone);
                self.touch_all_of(uid);
                return;
            }
            (Op::WritePod { pod, uid, value }, _) => {
                self.writes.insert(uid.clone(), Write::Unconfirmed(value.clone()));
                self.touch_all_of(uid);
                self.unpublished.insert(pod.clone());
            }
            (Op::AllowSources(frontend, _), Failure::NoRoom { .. }) => {
                self.source_table_full.insert(*frontend);
                self.touch(*frontend);
            }
            (
                Op::Reserve(frontend, _)
                | Op::AllowSources(frontend, _)
                | Op::UpsertMapping(frontend, _)
                | Op::RemoveMapping(frontend)
                | Op::ForgetSources(frontend, _)
                | Op::Release(frontend),
                _,
            ) => self.touch(*frontend),
        }
        self.retries.insert(RetryKey::of(op), at);
    }

    /// The uids of all known Pods.
    pub fn pod_uids(&self) -> BTreeSet<PodUid> {
        self.snapshot.pods().map(|pod| pod.uid.clone()).collect()
    }

    /// The Pods that a change or a failure affects, and that no pass has examined since.
    pub const fn changed_pods(&self) -> &BTreeSet<PodKey> {
        &self.dirty
    }

    /// The published addresses of the Node; no address until the agent knows an address from the Node object or from
    /// `--node-ip`.
    pub fn node_ips(&self) -> impl Iterator<Item = IpAddr> {
        self.node_ips.values().copied()
    }

    /// Makes the next pass examine the frontend, and the annotation of the Pod to which the frontend is allocated.
    pub(in crate::core) fn touch(&mut self, frontend: Frontend) {
        self.unsettled.insert(frontend);
        if let Some(owner) = self.ports.get(frontend).and_then(|claim| claim.owner.as_ref()) {
            self.unpublished.insert(owner.pod.clone());
        }
    }

    /// Makes the next pass examine all frontends of a Pod, because the Pod's annotation decides the phases of these
    /// frontends.
    pub(in crate::core) fn touch_all_of(&mut self, uid: &PodUid) {
        self.unsettled.extend(self.ports.of_pod(uid).into_iter().map(|(_, frontend)| frontend));
    }

    /// Makes the next pass assign node ports to every Pod that lacks a node port.
    pub(in crate::core) fn retry_waiting_for_port(&mut self) {
        self.dirty.append(&mut self.waiting_for_port);
    }

    /// Makes the next pass examine every frontend whose allowed sources did not fit into the kernel's map.
    fn retry_source_table_full(&mut self) {
        for frontend in std::mem::take(&mut self.source_table_full) {
            if self.lacks_sources(frontend) {
                self.retries.remove(&RetryKey::AllowSources(frontend));
                self.touch(frontend);
                self.source_table_full.insert(frontend);
            }
        }
    }

    /// Ends all mappings of a deleted Pod immediately, because the Pod's address may soon belong to another Pod.
    fn end_mappings_of(&mut self, uid: &PodUid) {
        for (_, frontend) in self.ports.of_pod(uid) {
            if let Some(claim) = self.ports.get_mut(frontend)
                && claim.is_in_use()
            {
                claim.end();
            }
            self.unsettled.insert(frontend);
        }
        self.needs_write_since.remove(uid);
        if self.writes.remove(uid) == Some(Write::InFlight) {
            self.deleted_in_flight.insert(uid.clone());
        }
        self.retries.remove(&RetryKey::WritePod(uid.clone()));
        self.contests.remove(uid);
        self.retry_waiting_for_port();
    }

    /// Takes the published addresses from the Node object. If the Node object has no addresses, the known addresses
    /// stay, because these addresses still belong to this machine. Empty annotations would remove all Pods of this Node
    /// from the pools of load balancers.
    fn adopt_node_ips(&mut self) {
        let node_ips = self.settings.node_ips(self.snapshot.node(), &self.node_ips);
        if !node_ips.is_empty() && node_ips != self.node_ips {
            self.node_ips = node_ips;
            self.dirty.extend(self.snapshot.pods().map(|pod| pod.key.clone()));
        }
    }

    /// Begins to move a Pod port away from a node port that another process uses or that has recent traffic. An
    /// existing mapping stays until the new mapping is published; a claim without a mapping is dropped.
    fn yield_port(&mut self, frontend: Frontend) {
        self.touch(frontend);
        let pod = self.ports.get(frontend).and_then(|claim| Some(claim.owner.as_ref()?.pod.clone()));
        let is_mapped = self.observed.as_ref().is_some_and(|observed| observed.mappings.contains_key(&frontend));
        if !is_mapped {
            self.ports.remove(frontend);
        }
        self.dirty.extend(pod);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The port table: the owner and phase of each node port, and the next free one.

pub mod select;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    model::{
        Backend, Family, Frontend, Moment, NodePort, PodKey, PodUid, Protocol, settings::PortRange, sources::Sources,
    },
    op::RecentTraffic,
    ports::select::WantedPort,
};

/// The Pod's port that a node port is held for. Constant for the life of the Pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Owner {
    pub(in crate::core) pod: PodKey,
    pub(in crate::core) uid: PodUid,
    pub(in crate::core) port: WantedPort,
}

/// The phase of a claim's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A Service requests the port.
    Active,
    /// No Service requests the port; the mapping translates until consumers have stopped using it.
    Draining {
        /// When draining ends; `None` while an annotation may still name the port.
        until: Option<Moment>,
    },
    /// The port has no mapping and cannot be allocated, since clients may still send to it.
    Quarantined {
        /// When the port is free; `None` while its mapping exists or an annotation may still name it.
        until: Option<Moment>,
    },
}

/// A held node port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Claim {
    /// `None` for a mapping of a Pod that was deleted before this agent started.
    pub(in crate::core) owner: Option<Owner>,
    pub(in crate::core) phase: Phase,
    /// The desired value of the mapping; `None` while the Pod has no address of its own.
    pub(in crate::core) backend: Option<Backend>,
    /// The sources that may use the mapping.
    pub(in crate::core) sources: Sources,
    /// Whether a client can have learned of the port.
    pub(in crate::core) was_mapped: bool,
}

impl Claim {
    pub(in crate::core) const fn new(owner: Owner) -> Self {
        Self { owner: Some(owner), phase: Phase::Active, backend: None, sources: Sources::Anyone, was_mapped: false }
    }

    /// The claim of a mapping without a known owner.
    pub(in crate::core) const fn orphan() -> Self {
        Self {
            owner: None,
            phase: Phase::Quarantined { until: None },
            backend: None,
            sources: Sources::Anyone,
            was_mapped: true,
        }
    }

    /// Sets the desired mapping. Without `sources`, the allowed sources stay.
    pub(in crate::core) fn set_target(&mut self, backend: Option<Backend>, sources: Option<&Sources>) {
        if let Some(sources) = sources {
            self.sources.clone_from(sources);
        }
        self.backend = backend.map(|backend| Backend { is_restricted: self.sources.is_restricted(), ..backend });
    }

    /// Begins to drain an active claim.
    pub(in crate::core) fn drain(&mut self) {
        if self.phase == Phase::Active {
            self.phase = Phase::Draining { until: None };
        }
    }

    /// Ends the claim's mapping without draining.
    pub(in crate::core) const fn retire(&mut self) {
        self.backend = None;
        self.phase = Phase::Quarantined { until: None };
    }

    /// Whether the datapath may have a mapping for the claim.
    pub(in crate::core) const fn may_translate(&self) -> bool {
        !matches!(self.phase, Phase::Quarantined { until: Some(_) })
    }

    /// Whether the claim's mapping should translate.
    pub(in crate::core) const fn is_in_use(&self) -> bool {
        matches!(self.phase, Phase::Active | Phase::Draining { .. })
    }
}

/// How many node ports of a family and protocol are in each phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortUsage {
    /// Requested by a Service.
    pub active: usize,
    /// Translating until consumers have stopped using them.
    pub draining: usize,
    /// Not yet free to be allocated again.
    pub quarantined: usize,
    /// Free to be allocated.
    pub free: usize,
}

/// The claims of all node ports.
#[derive(Debug)]
pub(in crate::core) struct PortTable {
    range: PortRange,
    claims: BTreeMap<Frontend, Claim>,
    by_pod: BTreeMap<PodUid, BTreeSet<(WantedPort, Frontend)>>,
    /// Where the search for the next free port begins, for all protocols of a family.
    cursors: BTreeMap<Family, NodePort>,
    /// Ports that another process uses, and when to try them again.
    taken: BTreeMap<Frontend, Moment>,
    /// Ports that received datagrams without being mapped, and until when other ports are preferred.
    recent_traffic: BTreeMap<Frontend, Moment>,
}

impl PortTable {
    pub(in crate::core) const fn new(range: PortRange) -> Self {
        Self {
            range,
            claims: BTreeMap::new(),
            by_pod: BTreeMap::new(),
            cursors: BTreeMap::new(),
            taken: BTreeMap::new(),
            recent_traffic: BTreeMap::new(),
        }
    }

    pub(in crate::core) fn get(&self, frontend: Frontend) -> Option<&Claim> {
        self.claims.get(&frontend)
    }

    pub(in crate::core) fn get_mut(&mut self, frontend: Frontend) -> Option<&mut Claim> {
        self.claims.get_mut(&frontend)
    }

    pub(in crate::core) fn iter(&self) -> impl Iterator<Item = (&Frontend, &Claim)> {
        self.claims.iter()
    }

    /// The claims of a Pod, ordered by its ports.
    pub(in crate::core) fn of_pod(&self, uid: &PodUid) -> Vec<(WantedPort, Frontend)> {
        self.by_pod.get(uid).into_iter().flatten().copied().collect()
    }

    /// The claims for one port of a Pod; several while the port moves from one node port to another.
    pub(in crate::core) fn of_port(&self, uid: &PodUid, port: WantedPort) -> Vec<Frontend> {
        let claims = self.by_pod.get(uid).into_iter().flatten();
        claims.filter(|(claimed, _)| *claimed == port).map(|(_, frontend)| *frontend).collect()
    }

    pub(in crate::core) fn insert(&mut self, frontend: Frontend, claim: Claim) {
        if let Some(owner) = &claim.owner {
            self.by_pod.entry(owner.uid.clone()).or_default().insert((owner.port, frontend));
        }
        self.claims.insert(frontend, claim);
    }

    pub(in crate::core) fn remove(&mut self, frontend: Frontend) -> Option<Claim> {
        let claim = self.claims.remove(&frontend)?;
        if let Some(owner) = &claim.owner
            && let Some(ports) = self.by_pod.get_mut(&owner.uid)
        {
            ports.remove(&(owner.port, frontend));
            if ports.is_empty() {
                self.by_pod.remove(&owner.uid);
            }
        }
        Some(claim)
    }

    /// Whether a claim may keep its node port: it is in the range, and no other process uses it.
    pub(in crate::core) fn is_well_placed(&self, frontend: Frontend) -> bool {
        self.range.contains(frontend.node_port) && !self.taken.contains_key(&frontend)
    }

    pub(in crate::core) fn is_active(&self, frontend: Frontend) -> bool {
        self.rank(frontend) == 0
    }

    /// The distance of a claim from being active; a Pod's port gets its nearest claim back.
    pub(in crate::core) fn rank(&self, frontend: Frontend) -> u8 {
        match self.claims.get(&frontend).map(|claim| claim.phase) {
            Some(Phase::Active) => 0,
            Some(Phase::Draining { .. }) => 1,
            Some(Phase::Quarantined { .. }) | None => 2,
        }
    }

    pub(in crate::core) fn is_free(&self, frontend: Frontend) -> bool {
        self.is_well_placed(frontend) && !self.claims.contains_key(&frontend)
    }

    /// The next free port for which `is_usable` holds. The search continues after the last allocated port, so that a
    /// freed port is reused as late as possible.
    ///
    /// If all free ports have received datagrams recently, the port whose traffic ceased first is returned: a client
    /// that sends to every port must not keep Pods from getting a node port.
    pub(in crate::core) fn take_next_free(
        &mut self,
        family: Family,
        protocol: Protocol,
        is_usable: impl Fn(NodePort) -> bool,
    ) -> Option<Frontend> {
        let mut node_port = self.cursors.get(&family).copied().unwrap_or(self.range.start());
        for _ in 0..self.range.len() {
            let frontend = Frontend { family, node_port, protocol };
            node_port = self.range.after(node_port);
            if is_usable(frontend.node_port) && self.is_free(frontend) && !self.recent_traffic.contains_key(&frontend) {
                self.cursors.insert(family, node_port);
                return Some(frontend);
            }
        }
        let is_of_space = |frontend: &Frontend| frontend.family == family && frontend.protocol == protocol;
        let may_be_had =
            |frontend: &Frontend| is_of_space(frontend) && is_usable(frontend.node_port) && self.is_free(*frontend);
        let recent_traffic = self.recent_traffic.iter().filter(|(frontend, _)| may_be_had(frontend));
        recent_traffic.min_by_key(|(_, until)| **until).map(|(frontend, _)| *frontend)
    }

    /// Whether to refuse the port if it received datagrams recently. Applies to UDP only, whose clients do not notice
    /// that another Pod has the port, and only if this claim was never mapped.
    pub(in crate::core) fn recent_traffic_policy(&self, frontend: Frontend) -> RecentTraffic {
        let was_mapped = self.claims.get(&frontend).is_none_or(|claim| claim.was_mapped);
        let is_new = frontend.protocol == Protocol::Udp && !was_mapped && !self.recent_traffic.contains_key(&frontend);
        if is_new { RecentTraffic::Refused } else { RecentTraffic::Tolerated }
    }

    /// Records that a port receives datagrams without being mapped.
    pub(in crate::core) fn mark_recent_traffic(&mut self, frontend: Frontend, until: Moment) {
        self.recent_traffic.insert(frontend, until);
    }

    /// Places the cursors after the highest port in use. A restarted agent does not know which ports were freed last;
    /// they are likely below the newest one.
    pub(in crate::core) fn place_cursors(&mut self) {
        let inside = self.claims.keys().filter(|frontend| self.range.contains(frontend.node_port));
        // In ascending order, the last port of each family wins.
        let cursors = inside.map(|frontend| (frontend.family, self.range.after(frontend.node_port)));
        self.cursors = cursors.collect();
    }

    pub(in crate::core) fn mark_taken(&mut self, frontend: Frontend, until: Moment) {
        self.taken.insert(frontend, until);
    }

    /// Records that the port could be bound.
    pub(in crate::core) fn unmark_taken(&mut self, frontend: Frontend) {
        self.taken.remove(&frontend);
    }

    pub(in crate::core) fn is_taken(&self, frontend: Frontend) -> bool {
        self.taken.contains_key(&frontend)
    }

    /// Drops records that have expired, and returns the ports that may be free again.
    pub(in crate::core) fn expire_taken(&mut self, now: Moment) -> Vec<Frontend> {
        self.recent_traffic.retain(|_, until| *until > now);
        self.taken.extract_if(.., |_, until| *until <= now).map(|(frontend, _)| frontend).collect()
    }

    pub(in crate::core) fn next_taken_expiry(&self) -> Option<Moment> {
        self.taken.values().min().copied()
    }

    pub(in crate::core) fn usage(&self, family: Family, protocol: Protocol) -> PortUsage {
        let mut usage = PortUsage::default();
        let is_here = |frontend: &&Frontend| frontend.family == family && frontend.protocol == protocol;
        let inside = |frontend: &&Frontend| is_here(frontend) && self.range.contains(frontend.node_port);
        for (_, claim) in self.claims.iter().filter(|(frontend, _)| is_here(frontend)) {
            match claim.phase {
                Phase::Active => usage.active += 1,
                Phase::Draining { .. } => usage.draining += 1,
                Phase::Quarantined { .. } => usage.quarantined += 1,
            }
        }
        let claimed = self.claims.keys().filter(inside).count();
        let taken = self.taken.keys().filter(inside).filter(|taken| !self.claims.contains_key(taken)).count();
        usage.free = self.range.len().saturating_sub(claimed + taken);
        usage
    }
}

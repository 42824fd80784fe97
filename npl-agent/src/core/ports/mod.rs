// SPDX-License-Identifier: Apache-2.0
//! The port table: the owner and phase of each node port, and the search for the next free node port.

pub(in crate::core) mod request;
pub mod select;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    model::{
        Backend, Family, Frontend, Moment, NodePort, PodKey, PodUid, Protocol, settings::PortRange, sources::Sources,
    },
    op::RecentTraffic,
    ports::select::WantedPort,
    publish::request_problem::Obstacle,
};

/// The Pod port to which a node port is allocated. The owner of a claim does not change during the life of the Pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Owner {
    pub(in crate::core) pod: PodKey,
    pub(in crate::core) uid: PodUid,
    pub(in crate::core) port: WantedPort,
}

/// The phase in the life of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A Service requests the Pod port for which the node port is allocated.
    Active,
    /// No Service requests the Pod port any more, or the Pod port has another node port. The mapping translates packets
    /// until load balancers have had time to stop using the node port.
    Draining {
        /// The time at which the drain ends; `None` while an annotation may still name the node port.
        until: Option<Moment>,
    },
    /// The node port cannot be allocated, because clients may still send packets to the node port. The mapping of the
    /// node port is removed, or will be removed.
    Quarantined {
        /// The time at which the node port becomes free; `None` while the mapping exists, or while an annotation may
        /// still name the node port.
        until: Option<Moment>,
    },
}

/// An allocated node port, with its owner and phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Claim {
    /// The Pod port that holds the node port; `None` for a mapping of a Pod that was deleted before this agent started.
    pub(in crate::core) owner: Option<Owner>,
    pub(in crate::core) phase: Phase,
    /// The desired value of the mapping; `None` if no mapping is desired, for example while the Pod has no address of
    /// its own.
    pub(in crate::core) backend: Option<Backend>,
    /// The sources that may use the mapping.
    pub(in crate::core) sources: Sources,
    /// Whether the node port was ever mapped for this claim, so that a client may know the node port.
    pub(in crate::core) was_mapped: bool,
    /// The time at which this agent allocated the node port; `None` if an earlier agent allocated the node port.
    pub(in crate::core) allocated: Option<Moment>,
    /// The node port that the Pod requested when it got this node port, and the reason why it did not get the requested
    /// one.
    pub(in crate::core) refused: Option<(NodePort, Obstacle)>,
}

impl Claim {
    pub(in crate::core) const fn new(owner: Owner) -> Self {
        Self {
            owner: Some(owner),
            phase: Phase::Active,
            backend: None,
            sources: Sources::Anyone,
            was_mapped: false,
            allocated: None,
            refused: None,
        }
    }

    /// Creates the claim for a mapping whose Pod is not known.
    pub(in crate::core) const fn orphan() -> Self {
        Self {
            owner: None,
            phase: Phase::Quarantined { until: None },
            backend: None,
            sources: Sources::Anyone,
            was_mapped: true,
            allocated: None,
            refused: None,
        }
    }

    /// Sets the desired mapping. If `sources` is `None`, the allowed sources do not change.
    pub(in crate::core) fn set_target(&mut self, backend: Option<Backend>, sources: Option<&Sources>) {
        if let Some(sources) = sources {
            self.sources.clone_from(sources);
        }
        self.backend = backend.map(|backend| Backend { is_restricted: self.sources.is_restricted(), ..backend });
    }

    /// Begins to drain the claim if the claim is active.
    pub(in crate::core) fn drain(&mut self) {
        if self.phase == Phase::Active {
            self.phase = Phase::Draining { until: None };
        }
    }

    /// Ends the claim's mapping without a drain.
    pub(in crate::core) const fn end(&mut self) {
        self.backend = None;
        self.phase = Phase::Quarantined { until: None };
    }

    /// Whether the datapath may still have a mapping for the claim's node port.
    pub(in crate::core) const fn may_translate(&self) -> bool {
        !matches!(self.phase, Phase::Quarantined { until: Some(_) })
    }

    /// Whether the claim's mapping should translate packets.
    pub(in crate::core) const fn is_in_use(&self) -> bool {
        matches!(self.phase, Phase::Active | Phase::Draining { .. })
    }
}

/// The number of node ports of one IP family and protocol in each phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortUsage {
    /// Node ports whose Pod port a Service requests.
    pub active: usize,
    /// Node ports that are withdrawn from their Pod port, and that stay mapped until the drain ends.
    pub draining: usize,
    /// Node ports that cannot be allocated yet, because clients may still send packets to them.
    pub quarantined: usize,
    /// Port numbers that can be allocated: no protocol or family has a claim to the number, the number is not
    /// quarantined, and no other process uses the number for this family and protocol.
    pub free: usize,
}

/// The claims of all node ports. A port number belongs to one Pod for all protocols and families, because some load
/// balancers ignore the protocol of an annotation entry.
#[derive(Debug)]
pub(in crate::core) struct PortTable {
    range: PortRange,
    claims: BTreeMap<Frontend, Claim>,
    by_pod: BTreeMap<PodUid, BTreeSet<(WantedPort, Frontend)>>,
    /// The port at which the search for a free port begins; `None` means the first port of the range.
    cursor: Option<NodePort>,
    /// Node ports that another process uses, each with the time at which the agent tries again to reserve the port.
    taken: BTreeMap<Frontend, Moment>,
    /// Unmapped port numbers that received packets recently. Until the time in the map, the search for a free number
    /// prefers numbers without traffic. The protocol does not matter, because some load balancers ignore the protocol
    /// of an annotation entry.
    recent_traffic: BTreeMap<NodePort, Moment>,
    /// Port numbers that were quarantined when this agent started, each with the end of the quarantine. Until then, the
    /// search for a free number skips the number, because the agent does not know which Pod had the number.
    quarantined: BTreeMap<NodePort, Moment>,
}

impl PortTable {
    pub(in crate::core) const fn new(range: PortRange) -> Self {
        Self {
            range,
            claims: BTreeMap::new(),
            by_pod: BTreeMap::new(),
            cursor: None,
            taken: BTreeMap::new(),
            recent_traffic: BTreeMap::new(),
            quarantined: BTreeMap::new(),
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

    /// The node ports that a Pod has claimed, ordered by the Pod's ports.
    pub(in crate::core) fn of_pod(&self, uid: &PodUid) -> Vec<(WantedPort, Frontend)> {
        self.by_pod.get(uid).into_iter().flatten().copied().collect()
    }

    /// The node ports that are claimed for one port of a Pod. A Pod port has several node ports while it moves from one
    /// node port to another.
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

    /// The claims of a port number for any family and protocol.
    pub(in crate::core) fn of_number(&self, node_port: NodePort) -> impl Iterator<Item = (Frontend, &Claim)> {
        let frontends = Family::ALL.into_iter().flat_map(move |family| {
            Protocol::ALL.into_iter().map(move |protocol| Frontend { family, node_port, protocol })
        });
        frontends.filter_map(|frontend| Some((frontend, self.claims.get(&frontend)?)))
    }

    /// Whether a claim may keep its node port: the port is in the range, no other process uses the port, and the port's
    /// number does not belong to another Pod.
    pub(in crate::core) fn is_well_placed(&self, frontend: Frontend) -> bool {
        self.is_available(frontend) && !self.is_of_another_pod(frontend)
    }

    fn is_available(&self, frontend: Frontend) -> bool {
        self.range.contains(frontend.node_port) && !self.taken.contains_key(&frontend)
    }

    /// Whether the port number of the claim belongs to another Pod. The number of an adopted claim may belong to
    /// another Pod, because an earlier release could assign the protocols of one number to several Pods.
    fn is_of_another_pod(&self, frontend: Frontend) -> bool {
        let holder = self.of_number(frontend.node_port).min_by_key(|(rival, _)| (self.rank(*rival), *rival));
        let own = self.claims.get(&frontend);
        own.zip(holder).is_some_and(|(own, (_, holder))| uid_of(own) != uid_of(holder))
    }

    pub(in crate::core) fn is_active(&self, frontend: Frontend) -> bool {
        self.rank(frontend) == 0
    }

    /// The preference among several claims of one Pod port or of one port number, smallest first: 0 if the claim is
    /// active, 1 if it drains, 2 if it is quarantined or does not exist.
    pub(in crate::core) fn rank(&self, frontend: Frontend) -> u8 {
        match self.claims.get(&frontend).map(|claim| claim.phase) {
            Some(Phase::Active) => 0,
            Some(Phase::Draining { .. }) => 1,
            Some(Phase::Quarantined { .. }) | None => 2,
        }
    }

    /// Whether a Pod may claim the node port. The port must be in the range, no other process may use the port, and the
    /// port must have no claim yet. Also, no other Pod may have a claim to the port's number, for any protocol or
    /// family.
    pub(in crate::core) fn is_free_for(&self, frontend: Frontend, uid: &PodUid) -> bool {
        let is_its = |(_, claim): (Frontend, &Claim)| uid_of(claim) == Some(uid);
        self.is_available(frontend)
            && !self.claims.contains_key(&frontend)
            && self.of_number(frontend.node_port).all(is_its)
    }

    /// Whether the node port is allocated to this Pod port and may stay allocated to this Pod port.
    pub(in crate::core) fn is_well_held(&self, frontend: Frontend, uid: &PodUid, port: WantedPort) -> bool {
        let owner = self.claims.get(&frontend).and_then(|claim| claim.owner.as_ref());
        let is_its = owner.is_some_and(|owner| owner.uid == *uid && owner.port == port);
        is_its && self.is_well_placed(frontend)
    }

    /// Whether no Pod holds the port number or held it recently, and no other process uses the number for one of these
    /// protocols.
    fn is_free(&self, family: Family, node_port: NodePort, protocols: &[Protocol]) -> bool {
        let is_available = |protocol: &Protocol| self.is_available(Frontend { family, node_port, protocol: *protocol });
        let is_held = self.quarantined.contains_key(&node_port) || self.of_number(node_port).next().is_some();
        protocols.iter().all(is_available) && !is_held
    }

    /// Returns a free frontend whose number the Pod already uses for the same Pod port and protocol in the other IP
    /// family. With `any_protocol`, the numbers of the same Pod port's other protocols are also considered.
    pub(in crate::core) fn sibling(&self, uid: &PodUid, port: WantedPort, any_protocol: bool) -> Option<Frontend> {
        let WantedPort { pod_port, protocol, family } = port;
        let is_sibling = |(claimed, frontend): &&(WantedPort, Frontend)| {
            let is_same = any_protocol || claimed.protocol == protocol;
            claimed.pod_port == pod_port && is_same && self.is_active(*frontend)
        };
        let siblings = self.by_pod.get(uid).into_iter().flatten().filter(is_sibling);
        let same_number = siblings.map(|(_, sibling)| Frontend { family, node_port: sibling.node_port, protocol });
        same_number.into_iter().find(|frontend| self.is_free_for(*frontend, uid))
    }

    /// Returns a frontend that consists of the first free number at or after the cursor and the first of `protocols`.
    /// The number is free for all of `protocols`, and `is_usable` returns true for the number. The search continues
    /// after the number that was allocated last, so that a freed number is reused as late as possible.
    ///
    /// If all free ports have received packets recently, returns the port whose traffic ended first: a client that
    /// sends to every port must not prevent Pods from getting node ports.
    pub(in crate::core) fn take_next_free(
        &mut self,
        family: Family,
        protocols: &[Protocol],
        is_usable: impl Fn(NodePort) -> bool,
    ) -> Option<Frontend> {
        let protocol = *protocols.first()?;
        let mut node_port = self.cursor.unwrap_or(self.range.start());
        for _ in 0..self.range.len() {
            let frontend = Frontend { family, node_port, protocol };
            node_port = self.range.after(node_port);
            let is_quiet = !self.recent_traffic.contains_key(&frontend.node_port);
            if is_quiet && is_usable(frontend.node_port) && self.is_free(family, frontend.node_port, protocols) {
                self.cursor = Some(node_port);
                return Some(frontend);
            }
        }
        let busy = self.recent_traffic.iter().map(|(node_port, until)| {
            let frontend = Frontend { family, node_port: *node_port, protocol };
            (frontend, *until)
        });
        let usable = busy.filter(|(frontend, _)| {
            is_usable(frontend.node_port) && self.is_free(family, frontend.node_port, protocols)
        });
        usable.min_by_key(|(_, until)| *until).map(|(frontend, _)| frontend)
    }

    /// Returns whether to reserve the node port in spite of recent traffic. The agent refuses the port because of the
    /// traffic only if no claim of the port number was ever mapped, and if the traffic is not recorded yet. A port with
    /// recorded traffic was allocated because no other port was free.
    pub(in crate::core) fn recent_traffic_policy(&self, frontend: Frontend) -> RecentTraffic {
        let number = frontend.node_port;
        let was_mapped = self.of_number(number).any(|(_, claim)| claim.was_mapped);
        let is_new = self.claims.contains_key(&frontend) && !was_mapped && !self.recent_traffic.contains_key(&number);
        if is_new { RecentTraffic::Refused } else { RecentTraffic::Tolerated }
    }

    /// Records that an unmapped port number receives packets, so that the search prefers numbers without traffic until
    /// the time `until`.
    pub(in crate::core) fn mark_recent_traffic(&mut self, node_port: NodePort, until: Moment) {
        self.recent_traffic.insert(node_port, until);
    }

    /// Prevents a port number from being allocated before `until`.
    pub(in crate::core) fn quarantine(&mut self, node_port: NodePort, until: Moment) {
        self.quarantined.insert(node_port, until);
    }

    /// Lets the next search begin after the highest claimed port. A restarted agent does not know which ports were
    /// freed last; those ports are likely below the highest claimed port.
    pub(in crate::core) fn place_cursor(&mut self) {
        let numbers = self.claims.keys().map(|frontend| frontend.node_port);
        let newest = numbers.filter(|node_port| self.range.contains(*node_port)).max();
        self.cursor = newest.map(|node_port| self.range.after(node_port));
    }

    pub(in crate::core) fn mark_taken(&mut self, frontend: Frontend, until: Moment) {
        self.taken.insert(frontend, until);
    }

    /// Records that the agent could bind the node port, so no other process uses the port.
    pub(in crate::core) fn unmark_taken(&mut self, frontend: Frontend) {
        self.taken.remove(&frontend);
    }

    pub(in crate::core) fn is_taken(&self, frontend: Frontend) -> bool {
        self.taken.contains_key(&frontend)
    }

    /// Drops expired records of traffic, of quarantines and of ports that other processes use. Returns the ports that
    /// other processes may have released, and whether a port may be free again.
    pub(in crate::core) fn expire(&mut self, now: Moment) -> (Vec<Frontend>, bool) {
        self.recent_traffic.retain(|_, until| *until > now);
        let released: Vec<_> =
            self.taken.extract_if(.., |_, until| *until <= now).map(|(frontend, _)| frontend).collect();
        let has_freed = self.quarantined.extract_if(.., |_, until| *until <= now).count() > 0;
        let may_allocate = has_freed || !released.is_empty();
        (released, may_allocate)
    }

    pub(in crate::core) fn next_expiry(&self) -> Option<Moment> {
        self.taken.values().chain(self.quarantined.values()).min().copied()
    }

    /// The number of node ports in each phase for one family and protocol. A number that is allocated for another
    /// protocol or family is not free either.
    pub(in crate::core) fn usage(&self, family: Family, protocol: Protocol) -> PortUsage {
        let mut usage = PortUsage::default();
        let is_here = |frontend: &Frontend| frontend.family == family && frontend.protocol == protocol;
        for (_, claim) in self.claims.iter().filter(|(frontend, _)| is_here(frontend)) {
            match claim.phase {
                Phase::Active => usage.active += 1,
                Phase::Draining { .. } => usage.draining += 1,
                Phase::Quarantined { .. } => usage.quarantined += 1,
            }
        }
        let taken = self.taken.keys().filter(|frontend| is_here(frontend));
        let claimed: BTreeSet<NodePort> = self.claims.keys().map(|frontend| frontend.node_port).collect();
        let unclaimed: Vec<_> = self.quarantined.keys().filter(|node_port| !claimed.contains(node_port)).collect();
        usage.quarantined += unclaimed.len();
        let held = claimed.iter().chain(unclaimed).copied().chain(taken.map(|frontend| frontend.node_port));
        let held: BTreeSet<NodePort> = held.filter(|node_port| self.range.contains(*node_port)).collect();
        usage.free = self.range.len().saturating_sub(held.len());
        usage
    }
}

fn uid_of(claim: &Claim) -> Option<&PodUid> {
    claim.owner.as_ref().map(|owner| &owner.uid)
}

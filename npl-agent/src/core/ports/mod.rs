// SPDX-License-Identifier: Apache-2.0
//! The port table: who holds which node port, how far it is through its life, and which one is next.

pub mod select;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    model::{
        Backend, Family, Frontend, Moment, NodePort, PodKey, PodUid, Protocol, settings::PortRange, sources::Sources,
    },
    op::RecentTraffic,
    ports::select::WantedPort,
};

/// What a node port is held for. Stable for the life of the Pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Owner {
    pub(in crate::core) pod: PodKey,
    pub(in crate::core) uid: PodUid,
    pub(in crate::core) port: WantedPort,
}

/// How far a claim is through its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Somebody wants it.
    Active,
    /// Nobody wants it; it translates until consumers have stopped using it.
    Draining {
        /// When it stops; not set while an annotation may still name it.
        until: Option<Moment>,
    },
    /// It leads nowhere; the port is kept from everybody, for consumers may still send to it.
    Quarantined {
        /// When it is free; not set while its mapping is still there or an annotation may still name it.
        until: Option<Moment>,
    },
}

/// A held node port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) struct Claim {
    /// Not known for a mapping of a Pod that was gone before this agent started.
    pub(in crate::core) owner: Option<Owner>,
    pub(in crate::core) phase: Phase,
    /// Where the mapping is to lead; nowhere while the Pod has no address of its own.
    pub(in crate::core) backend: Option<Backend>,
    /// Who is to be let in.
    pub(in crate::core) sources: Sources,
    /// Whether a client can ever have reached it.
    pub(in crate::core) was_mapped: bool,
}

impl Claim {
    pub(in crate::core) const fn new(owner: Owner) -> Self {
        Self { owner: Some(owner), phase: Phase::Active, backend: None, sources: Sources::Anyone, was_mapped: false }
    }

    /// A mapping that nobody is known to own.
    pub(in crate::core) const fn orphan() -> Self {
        Self {
            owner: None,
            phase: Phase::Quarantined { until: None },
            backend: None,
            sources: Sources::Anyone,
            was_mapped: true,
        }
    }

    /// Has it lead there, for whom it is to be from now on; where nobody says, for the same as before.
    pub(in crate::core) fn set_target(&mut self, backend: Option<Backend>, sources: Option<&Sources>) {
        if let Some(sources) = sources {
            self.sources.clone_from(sources);
        }
        self.backend = backend.map(|backend| Backend { is_restricted: self.sources.is_restricted(), ..backend });
    }

    /// Nobody wants it any more: it drains, unless that has begun or is over.
    pub(in crate::core) fn drain(&mut self) {
        if self.phase == Phase::Active {
            self.phase = Phase::Draining { until: None };
        }
    }

    /// Stops it at once.
    pub(in crate::core) const fn retire(&mut self) {
        self.backend = None;
        self.phase = Phase::Quarantined { until: None };
    }

    /// Whether the datapath may hold its mapping at this moment.
    pub(in crate::core) const fn may_translate(&self) -> bool {
        !matches!(self.phase, Phase::Quarantined { until: Some(_) })
    }

    /// Whether a client is to be led by it.
    pub(in crate::core) const fn is_in_use(&self) -> bool {
        matches!(self.phase, Phase::Active | Phase::Draining { .. })
    }
}

/// How many node ports of a family are in which phase; per protocol, since each has its own port space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortUsage {
    /// Held for a port that is wanted.
    pub active: usize,
    /// Translating for consumers that have not yet stopped.
    pub draining: usize,
    /// Kept from everybody.
    pub quarantined: usize,
    /// Ready to be allocated.
    pub free: usize,
}

/// Who holds which node port.
#[derive(Debug)]
pub(in crate::core) struct PortTable {
    range: PortRange,
    claims: BTreeMap<Frontend, Claim>,
    by_pod: BTreeMap<PodUid, BTreeSet<(WantedPort, Frontend)>>,
    /// Where the search for the next port begins, one for all protocols of a family.
    cursors: BTreeMap<Family, NodePort>,
    /// Ports that another process has, and until when they are not tried again.
    taken: BTreeMap<Frontend, Moment>,
    /// Ports that somebody sent datagrams to when they led nowhere, and until when any other one is better.
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

    /// The claims of a Pod, in the order of its ports.
    pub(in crate::core) fn of_pod(&self, uid: &PodUid) -> Vec<(WantedPort, Frontend)> {
        self.by_pod.get(uid).into_iter().flatten().copied().collect()
    }

    /// The claims for one port of a Pod: several while it moves from one node port to another.
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

    /// Whether a claim may stay where it is: inside the range, and at no port that another process has.
    pub(in crate::core) fn is_well_placed(&self, frontend: Frontend) -> bool {
        self.range.contains(frontend.node_port) && !self.taken.contains_key(&frontend)
    }

    pub(in crate::core) fn is_active(&self, frontend: Frontend) -> bool {
        self.rank(frontend) == 0
    }

    /// How near a claim is to being active; the nearest is the first to be taken up again.
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

    /// The next free port that passes the test. The search goes on behind the last one found, round and round, so
    /// that a freed port is the last to be used again. Where somebody still sends to each, it is the one that may be silent
    /// first: whoever can send to all ports must not keep Pods from having any.
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

    /// Refused where nobody but the former owner's clients can have heard of a claim, and it matters to them who has it: a
    /// connection notices, datagrams do not. Not where the port was chosen although they were heard.
    pub(in crate::core) fn recent_traffic_policy(&self, frontend: Frontend) -> RecentTraffic {
        let was_mapped = self.claims.get(&frontend).is_none_or(|claim| claim.was_mapped);
        let is_new = frontend.protocol == Protocol::Udp && !was_mapped && !self.recent_traffic.contains_key(&frontend);
        if is_new { RecentTraffic::Refused } else { RecentTraffic::Tolerated }
    }

    /// Takes in that somebody still sends datagrams to a port that leads nowhere.
    pub(in crate::core) fn mark_recent_traffic(&mut self, frontend: Frontend, until: Moment) {
        self.recent_traffic.insert(frontend, until);
    }

    /// Places the cursors behind the highest port in use. A restarted agent does not know which ports were freed
    /// last; those are most likely below the newest one, and so are tried last.
    pub(in crate::core) fn place_cursors(&mut self) {
        let inside = self.claims.keys().filter(|frontend| self.range.contains(frontend.node_port));
        // Ascending order: the highest of each family comes last and stays.
        let cursors = inside.map(|frontend| (frontend.family, self.range.after(frontend.node_port)));
        self.cursors = cursors.collect();
    }

    pub(in crate::core) fn mark_taken(&mut self, frontend: Frontend, until: Moment) {
        self.taken.insert(frontend, until);
    }

    /// Takes in that the port could be bound after all.
    pub(in crate::core) fn unmark_taken(&mut self, frontend: Frontend) {
        self.taken.remove(&frontend);
    }

    pub(in crate::core) fn is_taken(&self, frontend: Frontend) -> bool {
        self.taken.contains_key(&frontend)
    }

    /// Forgets ports whose time is over and says which they were.
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

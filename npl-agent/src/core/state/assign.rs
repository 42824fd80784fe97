// SPDX-License-Identifier: Apache-2.0
//! Assigns node ports to the wanted ports of a Pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::core::{
    model::{Backend, Family, Frontend, NodePort, Pod, PodKey, Protocol, snapshot::Snapshot},
    ports::{
        Claim, Owner, Phase, PortTable,
        select::{Exposure, Selector, Wanted, WantedPort},
    },
    publish::{
        annotation::{self, SeenEntry},
        problem::{AffectedObject, Cause, Problem},
    },
    state::{PodView, State},
};

impl State {
    /// Assigns every Pod that changed, in the order of their keys.
    pub(in crate::core) fn assign_dirty(&mut self) {
        let mut exhausted = BTreeSet::new();
        while let Some(key) = self.dirty.pop_first() {
            self.assign_pod(key, &mut exhausted);
        }
    }

    fn assign_pod(&mut self, key: PodKey, exhausted: &mut BTreeSet<(Family, Protocol)>) {
        self.waiting_for_port.remove(&key);
        let Some(pod) = self.snapshot.pod(&key) else { return };
        let selector = Selector {
            settings: &self.settings,
            snapshot: &self.snapshot,
            node_ips: &self.node_ips,
            on_node_network: &self.on_node_network,
        };
        let pod_ip = |family| Some((family, selector.pod_ip(pod, family)?));
        let mut assignment = Assignment {
            pod,
            wanted: selector.wanted(pod),
            pod_ips: [Family::V4, Family::V6].into_iter().filter_map(pod_ip).collect(),
            snapshot: &self.snapshot,
            ports: &mut self.ports,
            exhausted,
            lacks_port: false,
            touched: Vec::new(),
        };
        assignment.update_claims();
        assignment.claim_wanted();
        let Assignment { wanted, lacks_port, touched, .. } = assignment;
        let view = PodView { wanted, named: annotation::named_by(pod).iter().map(SeenEntry::frontend).collect() };
        if lacks_port {
            self.waiting_for_port.insert(key.clone());
        }
        if view.wanted.problems.is_empty() {
            self.with_problems.remove(&key);
        } else {
            self.with_problems.insert(key.clone());
        }
        self.unsettled.extend(touched);
        self.unpublished.insert(key.clone());
        self.views.insert(key, view);
    }
}

/// The assignment of one Pod.
struct Assignment<'a> {
    pod: &'a Pod,
    wanted: Wanted,
    pod_ips: BTreeMap<Family, IpAddr>,
    snapshot: &'a Snapshot,
    ports: &'a mut PortTable,
    /// Families and protocols without a free port in this pass, so that a thousand waiting Pods do not search the range
    /// each.
    exhausted: &'a mut BTreeSet<(Family, Protocol)>,
    lacks_port: bool,
    touched: Vec<Frontend>,
}

impl Assignment<'_> {
    /// Updates the mappings of the Pod's claims, and drains claims that are no longer wanted.
    fn update_claims(&mut self) {
        for (port, frontend) in self.ports.of_pod(&self.pod.uid) {
            self.touched.push(frontend);
            let backend = self.backend(port);
            let is_wanted = self.wanted.ports.get(&port).copied().is_some_and(Exposure::needs_claim);
            let Some(claim) = self.ports.get_mut(frontend).filter(|claim| claim.is_in_use()) else { continue };
            claim.set_target(backend, self.wanted.sources.get(&port));
            if self.pod.is_finished {
                claim.retire();
            } else if !is_wanted {
                claim.drain();
            }
        }
    }

    fn claim_wanted(&mut self) {
        for (port, exposure) in self.wanted.ports.clone() {
            match exposure {
                Exposure::HostPort(node_port) => self.check_host_port(port, node_port),
                Exposure::Mapping => self.claim(port, true),
                Exposure::Pending => self.claim(port, false),
            }
        }
    }

    /// Finds the one claim of a port: the active one, else a former one, else a new one.
    fn claim(&mut self, port: WantedPort, may_allocate: bool) {
        let mut held = self.ports.of_port(&self.pod.uid, port);
        held.sort_by_key(|frontend| (self.ports.rank(*frontend), *frontend));
        // A claim without a mapping must not hide the `hostPort` of another Pod.
        let hides_no_other = |frontend: &Frontend| {
            let leads = self.ports.get(*frontend).is_some_and(|claim| claim.backend.is_some());
            leads || !self.snapshot.is_host_port(frontend.node_port, port.protocol)
        };
        let (held, lost): (Vec<_>, Vec<_>) = held.into_iter().partition(hides_no_other);
        let kept = held.iter().copied().find(|frontend| self.ports.is_well_placed(*frontend));
        let chosen = kept.or_else(|| if may_allocate { self.allocate(port) } else { None }).or_else(|| {
            // The Pod port must get another node port, and keeps its present one until another is free.
            held.iter().copied().find(|frontend| self.ports.get(*frontend).is_some_and(Claim::is_in_use))
        });
        for frontend in held.into_iter().chain(lost).filter(|frontend| Some(*frontend) != chosen) {
            if let Some(claim) = self.ports.get_mut(frontend) {
                claim.drain();
            }
        }
        let backend = self.backend(port);
        if let Some(frontend) = chosen
            && let Some(claim) = self.ports.get_mut(frontend)
        {
            claim.phase = Phase::Active;
            claim.set_target(backend, self.wanted.sources.get(&port));
            self.touched.push(frontend);
        } else if may_allocate {
            let WantedPort { pod_port, protocol, family } = port;
            self.blame(Cause::RangeExhausted { pod_port, protocol, family });
        }
    }

    fn allocate(&mut self, port: WantedPort) -> Option<Frontend> {
        let Self { pod, snapshot, ports, exhausted, .. } = self;
        let space = (port.family, port.protocol);
        let is_usable = |node_port| !snapshot.is_host_port(node_port, port.protocol);
        let free =
            if exhausted.contains(&space) { None } else { ports.take_next_free(port.family, port.protocol, is_usable) };
        if let Some(frontend) = free {
            ports.insert(frontend, Claim::new(Owner { pod: pod.key.clone(), uid: pod.uid.clone(), port }));
        } else {
            exhausted.insert(space);
            self.lacks_port = true;
        }
        free
    }

    /// A mapping takes precedence over a `hostPort` of the same number, so that host port does not lead to this Pod.
    fn check_host_port(&mut self, port: WantedPort, node_port: NodePort) {
        let WantedPort { protocol, family, .. } = port;
        let frontend = Frontend { family, node_port, protocol };
        let Some(claim) = self.ports.get_mut(frontend).filter(|claim| claim.may_translate()) else { return };
        if claim.backend.is_none() {
            // The owner has no address at present, and gets another node port later.
            claim.drain();
            self.touched.push(frontend);
        }
        self.wanted.ports.remove(&port);
        self.lacks_port = true;
        self.blame(Cause::HostPortConflict { node_port, protocol });
    }

    /// The mapping of a port; its allowed sources are the claim's.
    fn backend(&self, port: WantedPort) -> Option<Backend> {
        let pod_ip = *self.pod_ips.get(&port.family)?;
        let generation = self.pod.uid.generation();
        Some(Backend { pod_ip, pod_port: port.pod_port, generation, is_restricted: false })
    }

    fn blame(&mut self, cause: Cause) {
        let subject = AffectedObject::Pod(self.pod.key.clone(), self.pod.uid.clone());
        self.wanted.problems.insert(Problem { subject, cause });
    }
}

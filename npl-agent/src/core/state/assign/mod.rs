// SPDX-License-Identifier: Apache-2.0
//! Assigns node ports to the wanted ports of a Pod.

mod requests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::core::{
    model::{
        Backend, Family, Frontend, Moment, NodePort, Pod, PodKey, Protocol,
        settings::{ProtocolPairing, Settings},
        snapshot::Snapshot,
    },
    ports::{
        Claim, Owner, Phase, PortTable,
        select::{Exposure, Selector, Wanted, WantedPort},
    },
    publish::{
        annotation::{self, SeenEntry},
        problem::{AffectedObject, Cause, Problem},
    },
    state::{PlannerState, PodView},
};

impl PlannerState {
    /// Assigns node ports to every Pod whose decision may change, in the order of the Pods' keys. Pods that request
    /// certain node ports come first, so that no other Pod gets these node ports by chance in the same pass.
    pub(in crate::core) fn assign_dirty(&mut self, now: Moment) {
        let mut exhausted = BTreeSet::new();
        let has_requests = |key: &&PodKey| self.snapshot.pod(key).is_some_and(|pod| !pod.requests.is_empty());
        let requesting: Vec<_> = self.dirty.iter().filter(has_requests).cloned().collect();
        for key in requesting {
            self.dirty.remove(&key);
            self.assign_pod(key, &mut exhausted, now);
        }
        while let Some(key) = self.dirty.pop_first() {
            self.assign_pod(key, &mut exhausted, now);
        }
    }

    fn assign_pod(&mut self, key: PodKey, exhausted: &mut BTreeSet<(Family, Protocol)>, now: Moment) {
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
            now,
            settings: &self.settings,
            lacks_port: false,
            touched: Vec::new(),
        };
        assignment.update_claims();
        assignment.claim_wanted();
        assignment.check_annotation();
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

/// The data that the assignment of node ports to one Pod needs.
struct Assignment<'a> {
    pod: &'a Pod,
    wanted: Wanted,
    pod_ips: BTreeMap<Family, IpAddr>,
    snapshot: &'a Snapshot,
    ports: &'a mut PortTable,
    /// Families and protocols for which a search in this pass has found no free port. The search is not repeated for
    /// the waiting Pods, of which there may be a thousand.
    exhausted: &'a mut BTreeSet<(Family, Protocol)>,
    now: Moment,
    settings: &'a Settings,
    lacks_port: bool,
    touched: Vec<Frontend>,
}

impl Assignment<'_> {
    /// Updates the desired mappings of the Pod's claims. Drains each claim whose Pod port needs no node port any more,
    /// and ends the mappings of a finished Pod without a drain.
    fn update_claims(&mut self) {
        for (port, frontend) in self.ports.of_pod(&self.pod.uid) {
            self.touched.push(frontend);
            let backend = self.backend(port);
            let is_wanted = self.wanted.ports.get(&port).copied().is_some_and(Exposure::needs_claim);
            let Some(claim) = self.ports.get_mut(frontend).filter(|claim| claim.is_in_use()) else { continue };
            claim.set_target(backend, self.wanted.sources.get(&port));
            if self.pod.is_finished {
                claim.end();
            } else if !is_wanted {
                claim.drain();
            }
        }
    }

    /// Claims a node port for each wanted port. Ports that request a certain node port come first, so that no other
    /// port of the Pod gets this node port by chance.
    fn claim_wanted(&mut self) {
        let mut wanted: Vec<_> = self.wanted.ports.clone().into_iter().collect();
        // The sort is stable: ports with equal keys stay in the order of the map.
        wanted.sort_by_cached_key(|(port, _)| self.requested(*port).is_none());
        for (port, exposure) in wanted {
            match exposure {
                Exposure::HostPort(node_port) => {
                    self.check_request_of_host_port(port, node_port);
                    self.check_host_port(port, node_port);
                }
                Exposure::Mapping => self.claim(port, true),
                Exposure::Pending => self.claim(port, false),
            }
        }
    }

    /// Decides which claim a Pod port uses. Prefers a claim of this Pod port that may keep its node port: the active
    /// claim, then a draining or quarantined claim. Otherwise allocates a node port; if no node port is free, the Pod
    /// port keeps its present claim.
    fn claim(&mut self, port: WantedPort, may_allocate: bool) {
        let mut held = self.ports.of_port(&self.pod.uid, port);
        held.sort_by_key(|frontend| (self.ports.rank(*frontend), *frontend));
        // A claim for which no mapping is desired must not use the number of a Pod's `hostPort`.
        let hides_no_other = |frontend: &Frontend| {
            let leads = self.ports.get(*frontend).is_some_and(|claim| claim.backend.is_some());
            leads || !self.snapshot.is_host_port(frontend.node_port)
        };
        let (held, lost): (Vec<_>, Vec<_>) = held.into_iter().partition(hides_no_other);
        let shared = self.shared_number(port);
        let may_stay = |frontend: &Frontend| {
            self.ports.is_well_placed(*frontend)
                && self.snapshot.service_with_port(frontend.node_port).is_none()
                && (self.settings.protocol_pairing == ProtocolPairing::Separate || shared == Some(frontend.node_port))
        };
        let kept = held.iter().copied().find(may_stay);
        let chosen = kept.or_else(|| if may_allocate { self.allocate(port) } else { None }).or_else(|| {
            // The Pod port must move to another node port. Until a node port is free, the Pod port keeps its present
            // node port.
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
            self.check_service_port(frontend.node_port);
            if may_allocate {
                self.check_request(port, frontend);
            }
        } else if may_allocate {
            let WantedPort { pod_port, protocol, family } = port;
            self.blame(Cause::RangeExhausted { pod_port, protocol, family });
        }
    }

    fn allocate(&mut self, port: WantedPort) -> Option<Frontend> {
        let space = (port.family, port.protocol);
        let WantedPort { family, protocol, .. } = port;
        let (snapshot, group) = (self.snapshot, self.group(port));
        let is_usable = |node_port| !snapshot.is_used_by_others(node_port);
        let shared = self.shared_number(port).map(|node_port| Frontend { family, node_port, protocol });
        let shared = shared.filter(|frontend| self.ports.is_free_for(*frontend, &self.pod.uid));
        let mut free = shared.or_else(|| self.free_requested(port)).or_else(|| self.sibling(port, false));
        if free.is_none() && !self.exhausted.contains(&space) {
            free = self.ports.take_next_free(family, &group, is_usable);
        }
        if self.settings.protocol_pairing == ProtocolPairing::Separate {
            // A load balancer that ignores the protocol treats annotation entries with the same node port as one pool
            // member. This pool member is correct, because every protocol of the node port leads to the same Pod port.
            free = free.or_else(|| self.sibling(port, true));
        }
        if let Some(frontend) = free {
            let owner = Owner { pod: self.pod.key.clone(), uid: self.pod.uid.clone(), port };
            self.ports.insert(frontend, Claim { allocated: Some(self.now), ..Claim::new(owner) });
        } else {
            self.exhausted.insert(space);
            self.lacks_port = true;
        }
        free
    }

    /// Returns the protocols that must have the same node port number as `port`. The protocol of `port` is first. With
    /// [`ProtocolPairing::Merged`], the remaining requested protocols of the same Pod port follow.
    fn group(&self, port: WantedPort) -> Vec<Protocol> {
        let is_other = |(other, exposure): &(&WantedPort, &Exposure)| {
            let is_same_port = (other.pod_port, other.family) == (port.pod_port, port.family);
            is_same_port && other.protocol != port.protocol && exposure.needs_claim()
        };
        let others = self.wanted.ports.iter().filter(is_other).map(|(other, _)| other.protocol);
        let is_merged = self.settings.protocol_pairing == ProtocolPairing::Merged;
        [port.protocol].into_iter().chain(others.filter(|_| is_merged)).collect()
    }

    /// With [`ProtocolPairing::Merged`], returns the number of a node port that the Pod already has for any protocol or
    /// family of the Pod port, if all protocols of the Pod port can use this number.
    fn shared_number(&self, port: WantedPort) -> Option<NodePort> {
        if self.settings.protocol_pairing == ProtocolPairing::Separate {
            return None;
        }
        let uid = &self.pod.uid;
        let group = self.group(port);
        let suits = |node_port: NodePort| {
            let has_room = |protocol: &Protocol| {
                let WantedPort { pod_port, family, .. } = port;
                let frontend = Frontend { family, node_port, protocol: *protocol };
                let member = WantedPort { pod_port, protocol: *protocol, family };
                self.ports.is_free_for(frontend, uid) || self.ports.is_well_held(frontend, uid, member)
            };
            !self.snapshot.is_used_by_others(node_port) && group.iter().all(has_room)
        };
        let mut held = self.ports.of_pod(uid);
        held.retain(|(claimed, frontend)| claimed.pod_port == port.pod_port && suits(frontend.node_port));
        let nearest = held.into_iter().map(|(_, frontend)| frontend).min_by_key(|frontend| {
            (frontend.family != port.family, self.ports.rank(*frontend), frontend.node_port, frontend.protocol)
        });
        nearest.map(|frontend| frontend.node_port)
    }

    fn sibling(&self, port: WantedPort, any_protocol: bool) -> Option<Frontend> {
        let sibling = self.ports.sibling(&self.pod.uid, port, any_protocol)?;
        (!self.snapshot.is_used_by_others(sibling.node_port)).then_some(sibling)
    }

    /// Reports a problem if the number of the node port is also a Service's `nodePort` or `healthCheckNodePort`. The
    /// mapping takes precedence over the Service. The Pod keeps the node port only while no other port is free.
    fn check_service_port(&mut self, node_port: NodePort) {
        let Some((service, uid)) = self.snapshot.service_with_port(node_port) else { return };
        let subject = AffectedObject::Service(service.clone(), uid.clone());
        let cause = Cause::NodePortShadowed { node_port, pod: self.pod.key.clone() };
        self.wanted.problems.insert(Problem { subject, cause });
        self.blame(Cause::NodePortConflict { node_port, service: service.clone() });
    }

    /// Reports a problem if a mapping of another Pod uses the number of this Pod's `hostPort`. The mapping takes
    /// precedence, so traffic to the host port does not reach this Pod.
    fn check_host_port(&mut self, port: WantedPort, node_port: NodePort) {
        let WantedPort { protocol, family, .. } = port;
        let own = Frontend { family, node_port, protocol };
        let uid = &self.pod.uid;
        let is_rival = |(frontend, claim): &(Frontend, &Claim)| {
            let is_of_another_pod = claim.owner.as_ref().is_none_or(|owner| owner.uid != *uid);
            claim.may_translate() && (*frontend == own || is_of_another_pod)
        };
        let rivals: Vec<_> = self.ports.of_number(node_port).filter(is_rival).map(|(frontend, _)| frontend).collect();
        if rivals.is_empty() {
            return;
        }
        for frontend in rivals {
            if let Some(claim) = self.ports.get_mut(frontend).filter(|claim| claim.backend.is_none()) {
                // The claim's Pod has no address at present, so the claim gives up its number in favor of the
                // `hostPort`. When the claim's Pod has an address again, that Pod gets another node port.
                claim.drain();
                self.touched.push(frontend);
            }
        }
        self.wanted.ports.remove(&port);
        self.lacks_port = true;
        self.blame(Cause::HostPortConflict { node_port, protocol });
    }

    /// Returns the desired mapping of a Pod port. The flag `is_restricted` is not set yet: `Claim::set_target` sets the
    /// flag.
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

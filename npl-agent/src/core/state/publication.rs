// SPDX-License-Identifier: Apache-2.0
//! Decides the value of a Pod's annotation, the state of its readiness gate, and when the agent writes both.

use std::collections::BTreeSet;

use super::PlannerState;
use crate::core::{
    model::{Frontend, Gate, Moment, NodePort, Pod, PodKey, PodUid},
    op::{GateReason, Op, PodWrite, RetryKey},
    ports::{
        Claim, Owner,
        select::{Exposure, WantedPort},
    },
    publish::annotation::{self, Entry, SeenEntry},
};

/// The state of an outstanding write to a Pod: the watch has not shown the result of the write yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) enum Write {
    /// The write was sent to the executor, and the API server has not answered yet.
    InFlight,
    /// The write failed. The API server may have executed the write nevertheless, if only the answer was lost.
    Unconfirmed(PodWrite),
    /// The API server does not have the Pod. The agent does not write to the Pod until the watch reports the Pod again.
    Gone,
}

impl PodWrite {
    /// Whether the Pod is already in the state that this write would produce.
    pub(in crate::core) fn is_stored_in(&self, pod: &Pod) -> bool {
        match self {
            Self::Set(value) => pod.annotation.as_ref() == Some(value),
            Self::Withdraw => pod.annotation.is_none(),
            Self::OpenGate(_) => pod.gate == Gate::Open,
        }
    }
}

/// The write that a Pod's annotation or readiness gate needs next.
enum Publication {
    /// No write is needed now: annotation and gate are right for the Pod's present state, a write is in flight, or the
    /// Pod does not exist any more.
    Settled,
    /// A write may be needed, but is not sent yet: the Pod has kernel operations in this pass, or a delay of writes to
    /// the Pod has not ended.
    Waiting,
    /// The Pod needs this write now.
    Needs(PodUid, PodWrite),
}

impl PlannerState {
    /// Returns the writes that are due. The Pods in `blocked` have kernel operations in this pass, so their annotations
    /// are written in a later pass.
    pub(in crate::core) fn plan_annotations(&mut self, blocked: &BTreeSet<PodUid>, now: Moment) -> Vec<Op> {
        let mut ops = Vec::new();
        for pod in std::mem::take(&mut self.unpublished) {
            self.delay_contested_write(&pod, now);
            let publication = self.publication(&pod, blocked, now);
            self.time_write(&pod, !matches!(publication, Publication::Settled), now);
            match publication {
                Publication::Settled => {}
                Publication::Waiting => {
                    self.unpublished.insert(pod);
                }
                Publication::Needs(uid, value) => {
                    self.writes.insert(uid.clone(), Write::InFlight);
                    self.touch_all_of(&uid);
                    ops.push(Op::WritePod { pod, uid, value });
                }
            }
        }
        ops
    }

    /// Records the time at which a Pod began to need a write. Removes the recorded time if the Pod needs no write and
    /// no write is outstanding.
    fn time_write(&mut self, key: &PodKey, needs_write: bool, now: Moment) {
        let Some(uid) = self.snapshot.pod(key).map(|pod| &pod.uid) else { return };
        if needs_write {
            self.needs_write_since.entry(uid.clone()).or_insert(now);
        } else if !self.writes.contains_key(uid) {
            self.needs_write_since.remove(uid);
        }
    }

    /// Whether a watch event is only an echo of the agent's own write: the event reports no change, and no write waits
    /// for the event as its confirmation.
    pub(in crate::core) fn is_echo(&self, pod: &Pod) -> bool {
        self.snapshot.pod(&pod.key) == Some(pod) && !self.writes.contains_key(&pod.uid)
    }

    /// Removes the record of an outstanding write to the Pod if a watch event has shown the result of the write.
    pub(in crate::core) fn recheck_write(&mut self, key: &PodKey) {
        let Some(pod) = self.snapshot.pod(key) else { return };
        let is_certain = match self.writes.get(&pod.uid) {
            Some(Write::Gone) => true,
            Some(Write::Unconfirmed(value)) => value.is_stored_in(pod),
            Some(Write::InFlight) | None => false,
        };
        if is_certain {
            self.writes.remove(&pod.uid);
        }
    }

    /// Whether the agent will write the Pod's annotation without a further change of the cluster: the write, or an
    /// operation that precedes it, is outstanding. A Pod that only waits for a free node port does not await
    /// publication.
    pub fn awaits_publication(&self, key: &PodKey) -> bool {
        let Some(pod) = self.snapshot.pod(key) else { return false };
        let is_examined = !self.dirty.contains(key) && !self.unpublished.contains(key);
        let is_written = matches!(self.writes.get(&pod.uid), Some(Write::InFlight | Write::Unconfirmed(_)));
        let is_mapping = |(port, exposure): (&WantedPort, &Exposure)| {
            matches!(exposure, Exposure::Mapping) && self.working_node_port(&pod.uid, *port).is_none()
        };
        let wanted = self.views.get(key).map(|view| &view.wanted.ports).into_iter().flatten();
        let lacks_mapping = !self.waiting_for_port.contains(key) && wanted.into_iter().any(is_mapping);
        !is_examined || is_written || lacks_mapping
    }

    /// Whether load balancers may read the frontend in the Pod's annotation: the annotation names the frontend, or a
    /// write whose result is not known yet may add the frontend.
    pub(in crate::core) fn may_be_named(&self, owner: &Owner, frontend: Frontend) -> bool {
        let Owner { pod, uid, .. } = owner;
        let is_there = self.snapshot.pod(pod).is_some_and(|pod| pod.uid == *uid);
        let is_named = match self.writes.get(uid) {
            Some(Write::InFlight | Write::Unconfirmed(_)) => true,
            Some(Write::Gone) | None => self.views.get(pod).is_some_and(|view| view.named.contains(&frontend)),
        };
        is_there && is_named
    }

    fn publication(&self, key: &PodKey, blocked: &BTreeSet<PodUid>, now: Moment) -> Publication {
        let Some(pod) = self.snapshot.pod(key) else { return Publication::Settled };
        let is_unconfirmed = match self.writes.get(&pod.uid) {
            // The Pod is examined again when the API server answers the write, or when the watch reports the Pod.
            Some(Write::InFlight | Write::Gone) => return Publication::Settled,
            Some(Write::Unconfirmed(PodWrite::Set(_) | PodWrite::Withdraw)) => true,
            Some(Write::Unconfirmed(PodWrite::OpenGate(_))) | None => false,
        };
        if blocked.contains(&pod.uid) || self.is_delayed(&RetryKey::WritePod(pod.uid.clone()), now) {
            return Publication::Waiting;
        }
        let entries = self.entries(pod);
        if !is_unconfirmed && self.has_right_annotation(pod, &entries) {
            return self.gate(pod, &entries);
        }
        if !entries.is_empty() {
            let value = annotation::encode(&entries, &self.settings);
            return Publication::Needs(pod.uid.clone(), PodWrite::Set(value));
        }
        if !pod.is_terminating {
            return Publication::Needs(pod.uid.clone(), PodWrite::Withdraw);
        }
        // AKO never removes a Pod from its pools if the annotation is removed while the Pod is being deleted. So during
        // the deletion of a Pod, a correct annotation stays, and an incorrect annotation becomes `[]`.
        let kept = pod.annotation.clone().filter(|_| self.names_only_its_own(pod));
        if !is_unconfirmed && (kept.is_some() || pod.annotation.is_none()) {
            return Publication::Settled;
        }
        Publication::Needs(pod.uid.clone(), PodWrite::Set(kept.unwrap_or_else(|| "[]".to_owned())))
    }

    pub(in crate::core) fn has_right_annotation(&self, pod: &Pod, entries: &[Entry]) -> bool {
        match &pod.annotation {
            Some(seen) if !entries.is_empty() => annotation::is_right(seen, entries, &self.settings),
            Some(_) => false,
            None => entries.is_empty(),
        }
    }

    /// The gate opens after the API server has the annotation with every node port that the Pod can get, so that no
    /// load balancer finds a ready Pod whose annotation lacks such a node port. The gate of a Pod that is being deleted
    /// stays closed.
    fn gate(&self, pod: &Pod, entries: &[Entry]) -> Publication {
        let Gate::Closed { are_containers_ready } = pod.gate else { return Publication::Settled };
        let wanted = self.views.get(&pod.key).map(|view| &view.wanted);
        let (count, problems) = wanted.map_or((0, 0), |wanted| (wanted.ports.len(), wanted.problems.len()));
        if pod.is_terminating || entries.len() != count {
            return Publication::Settled;
        }
        let reason = match (entries.is_empty(), problems) {
            (false, 0) => GateReason::Published,
            // While the containers start, a Service may still be created or corrected, so the gate stays closed.
            _ if !are_containers_ready => return Publication::Settled,
            (false, _) => GateReason::PartlyPublished,
            (true, _) => GateReason::NoNodePorts,
        };
        Publication::Needs(pod.uid.clone(), PodWrite::OpenGate(reason))
    }

    fn names_only_its_own(&self, pod: &Pod) -> bool {
        let is_its = |entry: &SeenEntry| {
            let frontend = entry.frontend();
            let owner = self.ports.get(frontend).and_then(|claim| claim.owner.as_ref());
            let is_its_target = |owner: &Owner| owner.uid == pod.uid && owner.port.pod_port == entry.pod_port;
            owner.is_some_and(is_its_target) && (pod.is_finished || self.works(frontend))
        };
        annotation::named_by(pod).iter().all(is_its)
    }

    /// Returns the correct annotation entries of a Pod: each entry names a host port, or a node port whose mapping
    /// currently points to the Pod port.
    pub(in crate::core) fn entries(&self, pod: &Pod) -> Vec<Entry> {
        let wanted = self.views.get(&pod.key).map(|view| &view.wanted.ports);
        let entry = |(port, exposure): (&WantedPort, &Exposure)| {
            let node_port = match exposure {
                Exposure::HostPort(node_port) => *node_port,
                Exposure::Mapping => self.working_node_port(&pod.uid, *port)?,
                Exposure::Pending => return None,
            };
            let node_ip = *self.node_ips.get(&port.family)?;
            Some(Entry { node_ip, node_port, protocol: port.protocol, pod_port: port.pod_port })
        };
        wanted.into_iter().flatten().filter_map(entry).collect()
    }

    /// Returns the node port whose mapping points to the Pod port. While the Pod port moves to a new node port, the
    /// result is the old node port until the new mapping works.
    fn working_node_port(&self, uid: &PodUid, port: WantedPort) -> Option<NodePort> {
        let mut working = self.ports.of_port(uid, port);
        working.retain(|frontend| self.works(*frontend));
        working.sort_by_key(|frontend| (!self.ports.is_active(*frontend), *frontend));
        working.first().map(|frontend| frontend.node_port)
    }

    /// Whether the frontend's mapping exists and points to the Pod port that the claim requires.
    fn works(&self, frontend: Frontend) -> bool {
        self.ports.get(frontend).is_some_and(Claim::is_in_use) && self.mapping_is_current(frontend)
    }
}

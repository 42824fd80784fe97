// SPDX-License-Identifier: Apache-2.0
//! What a Pod's annotation should say, and when it may be written.

use std::collections::BTreeSet;

use super::State;
use crate::core::{
    model::{Frontend, Gate, Moment, NodePort, Pod, PodKey, PodUid},
    op::{Op, PodWrite, RetryKey},
    ports::{
        Claim, Owner,
        select::{Exposure, WantedPort},
    },
    publish::annotation::{self, Entry, SeenEntry},
};

/// What is known of the writes to a Pod's annotation beyond what the watcher shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::core) enum Write {
    /// Given out; neither done nor failed yet.
    InFlight,
    /// Failed, but an answer that was lost may have followed a write that was not.
    Unconfirmed(PodWrite),
    /// The API server knows no such Pod; nothing to write until a watcher says otherwise.
    Gone,
}

impl PodWrite {
    /// Whether the Pod, as seen, is as this write leaves it.
    pub(in crate::core) fn is_stored_in(&self, pod: &Pod) -> bool {
        match self {
            Self::Set(value) => pod.annotation.as_ref() == Some(value),
            Self::Withdraw => pod.annotation.is_none(),
            Self::OpenGate => pod.gate == Gate::Open,
        }
    }
}

/// What to do about a Pod's annotation and its gate.
enum Publication {
    /// It is right, or not ours to write.
    Settled,
    /// Something else has to happen first.
    Waiting,
    /// It needs this write.
    Needs(PodUid, PodWrite),
}

impl State {
    /// The writes that are due. Pods in `blocked` have kernel ops in this pass and are written once, after those.
    pub(in crate::core) fn plan_annotations(&mut self, blocked: &BTreeSet<PodUid>, now: Moment) -> Vec<Op> {
        let mut ops = Vec::new();
        for pod in std::mem::take(&mut self.unpublished) {
            match self.publication(&pod, blocked, now) {
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

    /// Whether the word about a Pod is known and nothing waits for it: the watch repeats what each write was answered.
    pub(in crate::core) fn is_echo(&self, pod: &Pod) -> bool {
        self.snapshot.pod(&pod.key) == Some(pod) && !self.writes.contains_key(&pod.uid)
    }

    /// Takes back what the watcher's word about the Pod has made certain.
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

    /// Whether a consumer may read the frontend in the Pod's annotation: it is seen there, or a write is on its way.
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
            // Whoever reports on the write has the Pod looked at again.
            Some(Write::InFlight | Write::Gone) => return Publication::Settled,
            Some(Write::Unconfirmed(PodWrite::Set(_) | PodWrite::Withdraw)) => true,
            Some(Write::Unconfirmed(PodWrite::OpenGate)) | None => false,
        };
        if blocked.contains(&pod.uid) || self.is_delayed(&RetryKey::WritePod(pod.uid.clone()), now) {
            return Publication::Waiting;
        }
        let entries = self.entries(pod);
        let is_right = match &pod.annotation {
            Some(seen) if !entries.is_empty() => annotation::is_right(seen, &entries, self.settings.annotation_format),
            Some(_) => false,
            None => entries.is_empty(),
        };
        if is_right && !is_unconfirmed {
            return self.gate(pod, &entries);
        }
        if !entries.is_empty() {
            let value = annotation::encode(&entries, self.settings.annotation_format);
            return Publication::Needs(pod.uid.clone(), PodWrite::Set(value));
        }
        if !pod.is_terminating {
            return Publication::Needs(pod.uid.clone(), PodWrite::Withdraw);
        }
        // AKO never forgets a Pod whose key is removed while it is being deleted, so what was true is left to the
        // deletion, and what is not, or no longer, is emptied. One that is finished will be gone in a moment.
        let kept = pod.annotation.clone().filter(|_| self.names_only_its_own(pod));
        if !is_unconfirmed && (kept.is_some() || pod.annotation.is_none()) {
            return Publication::Settled;
        }
        Publication::Needs(pod.uid.clone(), PodWrite::Set(kept.unwrap_or_else(|| "[]".to_owned())))
    }

    /// Once all is published that is to be: after the annotation, so that nobody finds the Pod ready and without it. A Pod
    /// that is being deleted is not to become ready any more.
    fn gate(&self, pod: &Pod, entries: &[Entry]) -> Publication {
        let wanted = self.views.get(&pod.key).map_or(0, |view| view.wanted.ports.len());
        if pod.gate == Gate::Closed && !pod.is_terminating && entries.len() == wanted {
            return Publication::Needs(pod.uid.clone(), PodWrite::OpenGate);
        }
        Publication::Settled
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

    /// The entries that are true: each leads to the Pod's port at this moment.
    fn entries(&self, pod: &Pod) -> Vec<Entry> {
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

    /// The node port that leads to the Pod's port: while it moves to another one, the old one until the new one does.
    fn working_node_port(&self, uid: &PodUid, port: WantedPort) -> Option<NodePort> {
        let mut working = self.ports.of_port(uid, port);
        working.retain(|frontend| self.works(*frontend));
        working.sort_by_key(|frontend| (!self.ports.is_active(*frontend), *frontend));
        working.first().map(|frontend| frontend.node_port)
    }

    /// Whether the frontend's clients are led to where they are to be led.
    fn works(&self, frontend: Frontend) -> bool {
        self.ports.get(frontend).is_some_and(Claim::is_in_use) && self.mapping_is_current(frontend)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Keeps the known objects of the cluster, and the member groups of its Services. After a change, only the groups of
//! affected Services are recomputed.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
};

use npl_agent::core::model::{ObjectKey, PodKey, ServiceKey, settings::PortRange};

use super::{
    draining::Draining,
    entries::{Claim, Claims, LeftOut, MOST_ENTRIES, Served, Target, Withdrawn, target},
    members,
    model::{Change, Node, Pod, Service},
    snapshot::{Group, PortKey, Snapshot},
    work::{self, Operation},
};

/// The maximum number of withdrawn entries that are kept for one Pod. The limit bounds the feed's memory if the entries
/// of an annotation change continuously.
const MOST_WITHDRAWN: usize = MOST_ENTRIES;

/// Reports that the left-out entries of a Pod have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The Pod with the annotation.
    pub pod: PodKey,
    /// The number of left-out entries by reason; empty if the feed no longer leaves out an entry of the Pod, for
    /// example because the Pod was deleted.
    pub left_out: BTreeMap<LeftOut, usize>,
}

/// The known Kubernetes objects, and the member groups that result from them.
#[derive(Debug)]
pub struct State {
    range: PortRange,
    /// The time in milliseconds for which the member of a withdrawn entry drains.
    drain: u64,
    /// The known Pods. The values are boxed to save memory: each node of a `BTreeMap` has room for eleven values, and
    /// may be half empty.
    pods: BTreeMap<PodKey, Box<Served>>,
    services: BTreeMap<ServiceKey, Service>,
    nodes: BTreeMap<Arc<str>, Node>,
    claims: Claims,
    draining: Draining,
    groups: BTreeMap<PortKey, Arc<Group>>,
    /// The Services whose groups must be recomputed.
    dirty: BTreeSet<ServiceKey>,
    /// The Pods whose left-out entries may have changed.
    refused: BTreeSet<PodKey>,
    reported: BTreeMap<PodKey, BTreeMap<LeftOut, usize>>,
    listed: (bool, bool, bool),
}

impl State {
    /// Creates the state of a cluster without objects. `drain` is in milliseconds.
    pub fn new(range: PortRange, drain: u64) -> Self {
        Self {
            range,
            drain,
            pods: BTreeMap::new(),
            services: BTreeMap::new(),
            nodes: BTreeMap::new(),
            claims: Claims::default(),
            draining: Draining::default(),
            groups: BTreeMap::new(),
            dirty: BTreeSet::new(),
            refused: BTreeSet::new(),
            reported: BTreeMap::new(),
            listed: (false, false, false),
        }
    }

    /// Returns whether Pods, Services and Nodes have been listed. Until all three kinds of objects are listed, a
    /// snapshot would lack members.
    pub const fn is_complete(&self) -> bool {
        matches!(self.listed, (true, true, true))
    }

    /// Applies a change of the cluster. `now` is the time of the monotonic clock, in milliseconds.
    pub fn apply(&mut self, change: Change, now: u64) {
        match change {
            Change::Pods(pods) => {
                self.listed.0 = true;
                let listed: BTreeSet<&PodKey> = pods.iter().map(|pod| &pod.object.key).collect();
                let absent: Vec<PodKey> = self.pods.keys().filter(|key| !listed.contains(key)).cloned().collect();
                for key in absent {
                    self.withdraw(&key, now);
                }
                for pod in pods {
                    self.put_pod(pod, now);
                }
            }
            Change::Pod(pod) => self.put_pod(*pod, now),
            Change::PodGone(key, uid) => {
                if self.pods.get(&key).is_some_and(|known| known.pod.object.uid == uid) {
                    self.remove_pod(&key);
                }
            }
            Change::Services(services) => {
                self.listed.1 = true;
                let listed: BTreeSet<&ServiceKey> = services.iter().map(|service| &service.object.key).collect();
                let gone: Vec<ServiceKey> = self.services.keys().filter(|key| !listed.contains(key)).cloned().collect();
                for key in gone {
                    self.remove_service(&key);
                }
                for service in services {
                    self.put_service(service);
                }
            }
            Change::Service(service) => self.put_service(*service),
            Change::ServiceGone(key) => self.remove_service(&key),
            Change::Nodes(nodes) => {
                self.listed.2 = true;
                let listed: BTreeSet<&str> = nodes.iter().map(|node| node.object.name.as_str()).collect();
                let gone: Vec<Arc<str>> =
                    self.nodes.keys().filter(|name| !listed.contains(&***name)).cloned().collect();
                for name in gone {
                    self.set_node(&name, None);
                }
                for node in nodes {
                    self.put_node(&node);
                }
            }
            Change::Node(node) => self.put_node(&node),
            Change::NodeGone(name) => self.set_node(&name, None),
        }
    }

    /// Returns the number of Pods that the state contains.
    pub fn pod_count(&self) -> usize {
        self.pods.len()
    }

    /// Returns the time at which the next drain of an entry ends, in milliseconds of the monotonic clock.
    pub fn next_end(&self) -> Option<u64> {
        self.draining.next_end()
    }

    /// Removes the withdrawn entries whose drain is over.
    pub fn expire(&mut self, now: u64) {
        for key in self.draining.ended(now) {
            self.keep_withdrawn(&key, |withdrawn| withdrawn.until > now);
        }
    }

    /// Recomputes the groups that changes have affected, and returns the snapshot; `None` if the snapshot's content has
    /// not changed since the last call.
    pub fn refresh(&mut self) -> Option<Snapshot> {
        let mut has_changed = false;
        for key in mem::take(&mut self.dirty) {
            has_changed |= self.compute(&key);
        }
        has_changed.then(|| Snapshot::new(self.groups.clone()))
    }

    /// Returns a snapshot of the groups as they were computed last, without recomputing them.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(self.groups.clone())
    }

    /// Returns the Pods whose left-out entries have changed since the last call.
    pub fn take_refusals(&mut self) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        for pod in mem::take(&mut self.refused) {
            let left_out = self.left_out(&pod);
            let known = self.reported.get(&pod).cloned().unwrap_or_default();
            if left_out == known {
                continue;
            }
            if left_out.is_empty() {
                self.reported.remove(&pod);
            } else {
                self.reported.insert(pod.clone(), left_out.clone());
            }
            refusals.push(Refusal { pod, left_out });
        }
        refusals
    }

    /// Returns the number of entries that are currently left out, by reason.
    pub fn left_out_by_reason(&self) -> BTreeMap<LeftOut, usize> {
        let mut sums = BTreeMap::new();
        for (reason, count) in self.reported.values().flatten() {
            *sums.entry(*reason).or_default() += count;
        }
        sums
    }

    /// Returns whether the index of the draining entries corresponds to the Pods.
    #[cfg(test)]
    pub(super) fn has_right_index(&self) -> bool {
        let mut draining = Draining::default();
        self.pods.iter().for_each(|(key, served)| draining.add(key, &served.withdrawn));
        self.draining == draining
    }

    fn left_out(&self, key: &PodKey) -> BTreeMap<LeftOut, usize> {
        let Some(served) = self.pods.get(key) else { return BTreeMap::new() };
        let mut left_out = served.left_out.clone();
        let contested = served.entries.iter().filter(|entry| !self.claims.is_held_by(&target(entry), key)).count();
        if contested > 0 {
            left_out.insert(LeftOut::Contested, contested);
        }
        left_out
    }

    fn put_pod(&mut self, pod: Pod, now: u64) {
        let key = pod.object.key.clone();
        if self.pods.get(&key).is_some_and(|known| is_same(&known.pod, &pod)) {
            return;
        }
        let is_same = |former: &Served| former.pod.object.uid == pod.object.uid && former.pod.node == pod.node;
        let former = self.detach_pod(&key).filter(is_same);
        let node = pod.node.as_ref().and_then(|name| self.nodes.get(name));
        let mut served = Served::new(pod, node, self.range);
        if let Some(former) = former.filter(|_| !served.pod.object.is_finished) {
            let until = now.saturating_add(self.drain);
            let withdrawn = former.entries.into_iter().map(|entry| Withdrawn { entry, until });
            let draining = former.withdrawn.into_iter().chain(withdrawn);
            let own: BTreeSet<Target> = served.entries.iter().map(target).collect();
            let is_free = |target: &Target| !own.contains(target) && !self.claims.has(target);
            served.withdrawn = draining.filter(|it| is_free(&target(&it.entry))).collect();
            let beyond = served.withdrawn.len().saturating_sub(MOST_WITHDRAWN);
            served.withdrawn.drain(..beyond);
        }
        self.attach_pod(served);
    }

    /// Withdraws all entries of a Pod that is not in a new list of Pods. A list contains only Pods with the annotation,
    /// so the Pod may be deleted, or its agent may have withdrawn the annotation. After a withdrawal, the mappings
    /// still translate packets during `--drain`, so the entries drain.
    fn withdraw(&mut self, key: &PodKey, now: u64) {
        let Some(served) = self.pods.get(key) else { return };
        let mut pod = served.pod.clone();
        pod.object.annotation = None;
        self.put_pod(pod, now);
    }

    fn remove_pod(&mut self, key: &PodKey) {
        self.detach_pod(key);
    }

    /// Adds a Pod to all indexes if the feed keeps the Pod ([`Served::is_kept`]).
    fn attach_pod(&mut self, served: Served) {
        if !served.is_kept() {
            return;
        }
        let key = served.pod.object.key.clone();
        for entry in &served.entries {
            self.claims.add(target(entry), Claim::of(&served.pod));
        }
        // If a Pod claims the target of another Pod's draining entry, the feed no longer serves the draining entry.
        let claimed: BTreeSet<Target> = served.entries.iter().map(target).collect();
        for other in self.draining.at(&claimed) {
            self.keep_withdrawn(&other, |withdrawn| !claimed.contains(&target(&withdrawn.entry)));
        }
        self.draining.add(&key, &served.withdrawn);
        self.pods.insert(key.clone(), Box::new(served));
        self.touch_pod(&key);
    }

    /// Removes a Pod from all indexes, and marks the affected Services for recomputation. Returns the Pod with only
    /// those entries whose targets the Pod held.
    fn detach_pod(&mut self, key: &PodKey) -> Option<Served> {
        self.touch_pod(key);
        let mut served = self.pods.remove(key)?;
        self.draining.remove(key, &served.withdrawn);
        let claim = Claim::of(&served.pod);
        served.entries.retain(|entry| {
            let is_held = self.claims.is_held_by(&target(entry), key);
            self.claims.remove(&target(entry), &claim);
            is_held
        });
        Some(*served)
    }

    /// Removes those withdrawn entries of a Pod that `keep` rejects, even before the end of their drain.
    fn keep_withdrawn(&mut self, key: &PodKey, keep: impl Fn(&Withdrawn) -> bool) {
        let Some(served) = self.pods.get_mut(key) else { return };
        work::count(Operation::Visit, 1);
        self.draining.remove(key, &served.withdrawn);
        let before = served.withdrawn.len();
        served.withdrawn.retain(keep);
        self.draining.add(key, &served.withdrawn);
        if served.withdrawn.len() == before {
            return;
        }
        let is_kept = served.is_kept();
        self.touch_pod(key);
        if !is_kept {
            self.remove_pod(key);
        }
    }

    /// Marks for recomputation the Services that select this Pod, or a Pod that does not hold a target because of this
    /// Pod's claim.
    fn touch_pod(&mut self, key: &PodKey) {
        self.refused.insert(key.clone());
        let Some(served) = self.pods.get(key) else { return };
        let mut pods = BTreeSet::from([key]);
        for entry in &served.entries {
            pods.extend(self.claims.displaced_by(&target(entry), key));
        }
        for pod in pods {
            let Some(other) = self.pods.get(pod) else { continue };
            work::count(Operation::Visit, 1);
            self.refused.insert(pod.clone());
            let services = in_namespace(&self.services, &pod.namespace);
            self.dirty.extend(
                services.filter(|it| it.object.selects(&other.pod.object)).map(|service| service.object.key.clone()),
            );
        }
    }

    fn put_service(&mut self, service: Service) {
        let key = service.object.key.clone();
        if !service.object.is_active() {
            self.remove_service(&key);
        } else if self.services.get(&key) != Some(&service) {
            self.services.insert(key.clone(), service);
            self.dirty.insert(key);
        }
    }

    fn remove_service(&mut self, key: &ServiceKey) {
        if self.services.remove(key).is_some() {
            self.dirty.insert(key.clone());
        }
    }

    fn put_node(&mut self, node: &Node) {
        let name: Arc<str> = node.object.name.as_str().into();
        self.set_node(&name, Some(node));
    }

    fn set_node(&mut self, name: &Arc<str>, node: Option<&Node>) {
        if self.nodes.get(name) == node {
            return;
        }
        match node {
            Some(node) => self.nodes.insert(Arc::clone(name), node.clone()),
            None => self.nodes.remove(name),
        };
        let of_node = self.pods.iter().filter(|(_, served)| served.pod.node.as_ref() == Some(name));
        let of_node: Vec<PodKey> = of_node.map(|(key, _)| key.clone()).collect();
        for key in of_node {
            if let Some(former) = self.detach_pod(&key) {
                let served = Served::new(former.pod, node, self.range);
                let withdrawn = if node.is_some() { former.withdrawn } else { Vec::new() };
                self.attach_pod(Served { withdrawn, ..served });
            }
        }
    }

    /// Recomputes the groups of a Service. Returns whether a group was added, changed or removed.
    fn compute(&mut self, key: &ServiceKey) -> bool {
        let first = PortKey { service: key.clone(), number: 0, protocol: npl_agent::core::model::Protocol::Tcp };
        let known = self.groups.range(first..).take_while(|(known, _)| known.service == *key);
        let mut former: BTreeMap<PortKey, Arc<Group>> =
            known.map(|(key, group)| (key.clone(), Arc::clone(group))).collect();
        let mut has_changed = false;
        if let Some(service) = self.services.get(key) {
            let selected: Vec<&Served> = in_namespace(&self.pods, &key.namespace)
                .map(|served| &**served)
                .filter(|served| service.object.selects(&served.pod.object))
                .collect();
            for group in members::groups(service, &selected, &self.claims) {
                if former.remove(&group.key).is_none_or(|former| former.version != group.version) {
                    has_changed = true;
                    self.groups.insert(group.key.clone(), Arc::new(group));
                }
            }
        }
        for gone in former.keys() {
            has_changed = true;
            self.groups.remove(gone);
        }
        has_changed
    }
}

/// Returns whether two versions of a Pod are equal except for the fields on which no group depends.
fn is_same(known: &Pod, pod: &Pod) -> bool {
    let mut known = known.clone();
    known.object.resource_version = pod.object.resource_version;
    known.object.gate = pod.object.gate;
    known == *pod
}

/// Returns the objects of a namespace. The objects of a namespace are adjacent in the map, because the namespace is the
/// first sort criterion of the keys.
fn in_namespace<'a, T>(objects: &'a BTreeMap<ObjectKey, T>, namespace: &'a str) -> impl Iterator<Item = &'a T> {
    let first = ObjectKey::new(namespace, "");
    objects.range(first..).take_while(move |(key, _)| &*key.namespace == namespace).map(|(_, object)| object)
}

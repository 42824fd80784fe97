// SPDX-License-Identifier: Apache-2.0
//! An in-memory model of kernel, sockets and API server, on which the core's ops run. The model rejects an op whose
//! precondition is not met.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::core::{
    model::{
        Backend, Family, Frontend, Gate, Moment, Node, NodePort, Pod, PodKey, PodUid, Protocol, Service, ServiceKey,
        namespaces::{Namespaces, ServiceScope},
        observed::Observed,
        settings::{AnnotationFormat, NodeIpSource, ProtocolPairing, Settings},
        snapshot::Change,
        sources::SourceRange,
    },
    op::{Failure, Op, PodWrite, RecentTraffic, RetryKey},
    publish::annotation::{self, SeenEntry},
    state::PlannerState,
};

/// Returns settings with this port range, and with default values for the rest.
pub(super) fn settings(port_range: &str) -> Settings {
    Settings {
        port_range: port_range.parse().unwrap(),
        node_ip: NodeIpSource::Internal,
        annotation_format: AnnotationFormat::V1_7,
        protocol_pairing: ProtocolPairing::Separate,
        namespaces: Namespaces::default(),
        families: vec![Family::V4, Family::V6],
        protocols: vec![Protocol::Tcp, Protocol::Udp],
        drain_millis: 30_000,
        quarantine_millis: 60_000,
        requested_node_ports: true,
        is_retiring: false,
    }
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) settings: Settings,
    pub(super) state: PlannerState,
    pub(super) now: Moment,
    /// The actual state of the kernel and the sockets, which may differ from the state that the agent has observed.
    pub(super) real: Observed,
    /// The number of allowed sources for which the kernel's map has room.
    pub(super) room: usize,
    /// Node ports that processes other than the agent have bound.
    pub(super) stolen: BTreeSet<Frontend>,
    /// Node ports that receive packets although they have no mapping.
    pub(super) recent_traffic: BTreeSet<Frontend>,
    /// The kernel's map of unmapped traffic: for each port, when the port's mapping was removed, or when the port last
    /// received a packet without a mapping.
    pub(super) last_unmapped: BTreeMap<NodePort, Moment>,
    pub(super) pods: BTreeMap<PodKey, Pod>,
    pub(super) services: BTreeMap<ServiceKey, Service>,
    pub(super) node: Option<Node>,
    pub(super) resource_version: u64,
    pub(super) patches: usize,
    pub(super) is_api_down: bool,
    /// For each node port that a Pod's annotation no longer names, the time at which the annotation last named the node
    /// port.
    withdrawn: BTreeMap<(NodePort, PodUid), Moment>,
    /// Whether only the agent writes annotations and mappings.
    pub(super) is_undisturbed: bool,
}

impl World {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            state: PlannerState::new(settings.clone()),
            settings,
            now: Moment(1_000),
            real: Observed::default(),
            room: usize::MAX,
            stolen: BTreeSet::new(),
            recent_traffic: BTreeSet::new(),
            last_unmapped: BTreeMap::new(),
            pods: BTreeMap::new(),
            services: BTreeMap::new(),
            node: None,
            resource_version: 1,
            patches: 0,
            is_api_down: false,
            withdrawn: BTreeMap::new(),
            is_undisturbed: false,
        }
    }

    /// Starts a new agent process: all sockets of the former process are closed, but the kernel's maps and the cluster
    /// do not change.
    pub(super) fn start(&mut self) {
        self.start_without_lists();
        self.list();
    }

    /// Starts a new agent process as [`Self::start`] does, but without the lists of the API server.
    pub(super) fn start_without_lists(&mut self) {
        self.real.reservations.clear();
        self.last_unmapped.extend(self.recent_traffic.iter().map(|recent| (recent.node_port, self.now)));
        self.forget_late_withdrawals();
        self.state = PlannerState::new(self.settings.clone());
        self.state.observe(self.real.clone());
        let ages = self.last_unmapped.iter().map(|(node_port, at)| (*node_port, self.now.0 - at.0));
        self.state.resume_quarantine(ages, self.now);
    }

    /// Delivers the API server's lists of Pods, Services and the Node to the agent.
    pub(super) fn list(&mut self) {
        self.list_pods();
        for scope in self.settings.namespaces.scopes() {
            self.list_services(&scope);
        }
        if let Some(node) = self.node.clone() {
            self.state.apply(Change::Node(node));
        }
    }

    /// Delivers the API server's list of Pods to the agent.
    pub(super) fn list_pods(&mut self) {
        self.state.apply(Change::Pods(self.pods.values().cloned().collect()));
    }

    /// Delivers the API server's list of the Services of one scope to the agent.
    pub(super) fn list_services(&mut self, scope: &ServiceScope) {
        let is_listed = |service: &&Service| scope.as_ref().is_none_or(|it| service.key.namespace == *it);
        let listed = self.services.values().filter(is_listed).cloned().collect();
        self.state.apply(Change::Services(scope.clone(), listed));
    }

    /// Changes the API server's copy of a Pod without a watch event.
    pub(super) fn store(&mut self, mut pod: Pod) -> Pod {
        self.resource_version += 1;
        pod.resource_version = self.resource_version;
        let former = self.pods.insert(pod.key.clone(), pod.clone());
        if let Some(former) = former {
            self.record_withdrawal(&former, Some(&pod).filter(|pod| pod.uid == former.uid));
        }
        pod
    }

    /// Removes a Pod from the API server without a watch event.
    pub(super) fn unstore(&mut self, key: &PodKey) -> Option<Pod> {
        let pod = self.pods.remove(key)?;
        self.record_withdrawal(&pod, None);
        Some(pod)
    }

    fn record_withdrawal(&mut self, former: &Pod, successor: Option<&Pod>) {
        let left = successor.map(annotation::named_by).unwrap_or_default();
        for entry in annotation::named_by(former).difference(&left) {
            self.withdrawn.insert((entry.node_port, former.uid.clone()), self.now);
        }
    }

    /// Replaces the times of withdrawal with times that a new agent can know. A new agent reads from the kernel when a
    /// mapping was removed, but cannot know when the annotation was withdrawn. If the mapping was removed first,
    /// because the Pod had finished or lost its address, the time of the removal replaces the time of the withdrawal.
    fn forget_late_withdrawals(&mut self) {
        for ((number, _), at) in &mut self.withdrawn {
            let is_mapped = self.real.mappings.keys().any(|frontend| frontend.node_port == *number);
            if let Some(unmapped) = self.last_unmapped.get(number).filter(|_| !is_mapped) {
                *at = (*at).min(*unmapped);
            }
        }
    }

    /// Asserts that no load balancer can mistake the mapping for a mapping of another Pod. Load balancers may ignore
    /// the protocol of an annotation entry, and may send to a withdrawn node port for some time.
    fn assert_belongs_to_one_pod(&self, frontend: Frontend, backend: Backend) {
        let number = frontend.node_port;
        for pod in self.pods.values().filter(|pod| pod.uid.generation() != backend.generation) {
            let names = self.published(&pod.key).iter().any(|entry| entry.node_port == number);
            assert!(!names, "{frontend} leads to {backend:?}, and the annotation of {} names the same number", pod.key);
        }
        for ((_, uid), at) in self.withdrawn.iter().filter(|((withdrawn, _), _)| *withdrawn == number) {
            let is_over = at.plus(self.settings.quarantine_millis) <= self.now;
            let is_same = uid.generation() == backend.generation;
            assert!(
                is_over || is_same,
                "{frontend} leads to {backend:?}, and {uid} withdrew the same number at {at:?}"
            );
        }
    }

    pub(super) fn put_pod(&mut self, pod: Pod) {
        let pod = self.store(pod);
        self.state.apply(Change::Pod(pod));
    }

    pub(super) fn remove_pod(&mut self, key: &PodKey) {
        let Some(pod) = self.unstore(key) else { return };
        self.state.apply(Change::PodGone(pod.key, pod.uid));
    }

    pub(super) fn put_service(&mut self, service: Service) {
        self.services.insert(service.key.clone(), service.clone());
        if self.settings.namespaces.contains(&service.key.namespace) {
            self.state.apply(Change::Service(service));
        }
    }

    pub(super) fn remove_service(&mut self, key: &ServiceKey) {
        self.services.remove(key);
        self.state.apply(Change::ServiceGone(key.clone()));
    }

    pub(super) fn put_node(&mut self, node: Node) {
        self.node = Some(node.clone());
        self.state.apply(Change::Node(node));
    }

    /// Runs passes until the core returns no op; returns the completed ops in order.
    pub(super) fn settle(&mut self) -> Vec<Op> {
        let mut done = Vec::new();
        for _ in 0..1_000 {
            let ops = self.state.pass(self.now).ops;
            if ops.is_empty() {
                return done;
            }
            for op in ops {
                match self.execute(&op) {
                    Ok(()) => self.state.record_done(&op, self.now),
                    Err(failure) => self.state.record_failed(&op, failure, self.now),
                }
                done.push(op);
            }
        }
        panic!("the state does not converge; the last ops were {:?}", done.split_off(done.len() - 20));
    }

    /// Advances the time by `millis`, and runs passes at every deadline in between.
    pub(super) fn wait(&mut self, millis: u64) -> Vec<Op> {
        let end = self.now.plus(millis);
        let mut done = self.settle();
        while let Some(deadline) = self.state.pass(self.now).next_deadline.filter(|at| *at <= end) {
            assert!(deadline > self.now, "a deadline in the past would cause a busy loop");
            self.now = deadline;
            done.extend(self.settle());
        }
        self.now = end;
        done.extend(self.settle());
        done
    }

    fn execute(&mut self, op: &Op) -> Result<(), Failure> {
        match op {
            Op::WritePod { pod, .. } => {
                self.assert_may_write(op);
                let result = if self.is_api_down { Err(self.later()) } else { self.patch(op) };
                if let (Ok(()), Some(pod)) = (&result, self.pods.get(pod)) {
                    self.state.apply(Change::Pod(pod.clone()));
                }
                result
            }
            Op::Reserve(..)
            | Op::AllowSources(..)
            | Op::UpsertMapping(..)
            | Op::RemoveMapping(_)
            | Op::ForgetSources(..)
            | Op::Release(_) => {
                let result = self.kernel(op);
                if matches!(result, Err(Failure::NoRoom { .. })) {
                    // The agent's adapter reads the kernel's state again after an op that took effect only in part, so
                    // the test does, too.
                    self.state.observe(self.real.clone());
                }
                result
            }
        }
    }

    /// Asserts that the op does not remove the annotation key of a Pod that the agent knows to be terminating.
    pub(super) fn assert_may_write(&self, op: &Op) {
        let Op::WritePod { pod, value: PodWrite::Withdraw, .. } = op else { return };
        let is_terminating = self.state.snapshot.pod(pod).is_some_and(|pod| pod.is_terminating);
        assert!(!is_terminating, "{op:?}: withdrawn from a terminating Pod");
    }

    pub(super) const fn later(&self) -> Failure {
        Failure::Retry { at: self.now.plus(1_000) }
    }

    /// Runs an op on the kernel or the sockets, and asserts its precondition.
    pub(super) fn kernel(&mut self, op: &Op) -> Result<(), Failure> {
        self.assert_is_in_range(op);
        match op {
            Op::Reserve(Frontend { node_port, .. }, RecentTraffic::Refused)
                if self.recent_traffic.iter().any(|recent| recent.node_port == *node_port) =>
            {
                return Err(Failure::RecentTraffic { until: self.now.plus(120_000) });
            }
            Op::Reserve(frontend, _) if self.stolen.contains(frontend) => {
                return Err(Failure::PortTaken);
            }
            Op::Reserve(frontend, _) => {
                assert!(self.real.reservations.insert(*frontend), "{op:?}: reserved twice");
            }
            Op::AllowSources(frontend, ranges) => return self.allow(*frontend, ranges),
            Op::UpsertMapping(frontend, backend) => {
                if self.is_undisturbed {
                    self.assert_belongs_to_one_pod(*frontend, *backend);
                }
                let former = self.real.mappings.insert(*frontend, *backend);
                let same_target = former.is_some_and(|former| former.has_same_target(backend));
                assert!(same_target || self.real.reservations.contains(frontend), "{op:?}: not reserved");
                assert_eq!(frontend.family, Family::of(backend.pod_ip), "{op:?}: family");
                assert_ne!(former, Some(*backend), "{op:?}: the mapping exists already");
                let was_restricted = former.is_some_and(|former| former.is_restricted);
                if backend.is_restricted && !was_restricted {
                    self.assert_allows_exactly_its_sources(*frontend);
                }
            }
            Op::ForgetSources(frontend, ranges) => {
                let there = self.real.sources.get_mut(frontend).unwrap();
                assert!(ranges.is_subset(there) && !ranges.is_empty(), "{op:?}: the kernel has only {there:?}");
                there.retain(|range| !ranges.contains(range));
                if there.is_empty() {
                    self.real.sources.remove(frontend);
                }
                let is_restricted = self.real.mappings.get(frontend).is_some_and(|mapping| mapping.is_restricted);
                let wanted = self.wanted_sources(*frontend);
                assert!(!is_restricted || ranges.is_disjoint(&wanted), "{op:?}: {wanted:?} must stay allowed");
            }
            Op::RemoveMapping(frontend) => {
                assert!(self.real.mappings.remove(frontend).is_some(), "{op:?}: no such mapping");
                self.last_unmapped.insert(frontend.node_port, self.now);
            }
            Op::Release(frontend) => {
                assert!(!self.real.mappings.contains_key(frontend), "{op:?}: still mapped");
                assert!(
                    !self.real.sources.contains_key(frontend),
                    "{op:?}: the next owner of the node port would inherit its allowed sources"
                );
                assert!(self.real.reservations.remove(frontend), "{op:?}: not reserved");
            }
            Op::WritePod { .. } => unreachable!("the kernel executes no patches"),
        }
        Ok(())
    }

    /// Asserts that the op allocates no node port outside of the port range. The node ports of an earlier agent with
    /// another range stay reserved until their quarantine is over.
    fn assert_is_in_range(&self, op: &Op) {
        if let Op::Reserve(frontend, RecentTraffic::Refused)
        | Op::AllowSources(frontend, _)
        | Op::UpsertMapping(frontend, _) = op
        {
            let range = self.settings.port_range;
            let is_known = range.contains(frontend.node_port) || self.real.mappings.contains_key(frontend);
            assert!(is_known, "{op:?}: outside of the port range {range}");
        }
    }

    fn allow(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), Failure> {
        let wanted = self.wanted_sources(frontend);
        assert!(
            ranges.is_subset(&wanted) && !ranges.is_empty(),
            "{ranges:?} for {frontend}, which should allow {wanted:?}"
        );
        for range in ranges {
            if self.real.sources.values().map(BTreeSet::len).sum::<usize>() >= self.room {
                return Err(Failure::NoRoom { at: self.now.plus(1_000) });
            }
            let is_new = self.real.sources.entry(frontend).or_default().insert(*range);
            assert!(is_new, "{range} of {frontend} is allowed already");
        }
        Ok(())
    }

    /// Returns the sources that the agent wants to allow for a frontend; no source if the frontend is not restricted.
    fn wanted_sources(&self, frontend: Frontend) -> BTreeSet<SourceRange> {
        self.state.ports.get(frontend).into_iter().flat_map(|claim| claim.sources.ranges()).collect()
    }

    /// Asserts that the kernel allows only sources that the agent wants to allow, and that the kernel allows all these
    /// sources unless the map was full.
    fn assert_allows_exactly_its_sources(&self, frontend: Frontend) {
        let there = self.real.sources.get(&frontend).cloned().unwrap_or_default();
        let wanted = self.wanted_sources(frontend);
        assert!(there.is_subset(&wanted), "{frontend} allows {there:?} instead of {wanted:?}");
        let may_lack = self.state.is_delayed(&RetryKey::AllowSources(frontend), self.now);
        assert!(may_lack || there == wanted, "{frontend} allows {there:?} instead of {wanted:?}");
    }

    /// Whether the mapping translates packets of a client.
    pub(super) fn lets_in(&self, frontend: Frontend, client: IpAddr) -> bool {
        let Some(backend) = self.real.mappings.get(&frontend) else { return false };
        let ranges = self.real.sources.get(&frontend).into_iter().flatten();
        // The comparison covers the bits of the prefix, as in the kernel's LPM trie.
        !backend.is_restricted
            || ranges.into_iter().any(|range| SourceRange::new(client, range.length()) == Some(*range))
    }

    /// Applies a patch in the API server, without a watch event.
    pub(super) fn patch(&mut self, op: &Op) -> Result<(), Failure> {
        let Op::WritePod { pod: key, uid, value } = op else { unreachable!("the API server executes only patches") };
        let Some(mut pod) = self.pods.get(key).filter(|pod| pod.uid == *uid).cloned() else {
            return Err(Failure::Gone);
        };
        match value {
            PodWrite::Set(value) => {
                pod.annotation = Some(value.clone());
                pod.annotation_manager = None;
            }
            PodWrite::Withdraw => pod.annotation = None,
            PodWrite::OpenGate(_) => pod.gate = Gate::Open,
        }
        self.patches += 1;
        self.store(pod);
        Ok(())
    }

    /// Returns the entries of a Pod's annotation in the API server.
    pub(super) fn published(&self, key: &PodKey) -> BTreeSet<SeenEntry> {
        self.pods.get(key).map(annotation::named_by).unwrap_or_default()
    }

    /// Whether the Pod has not finished, and has, for every family that its annotation names, an address that no other
    /// unfinished Pod has.
    pub(super) fn is_reachable(&self, pod: &Pod) -> bool {
        let shares = |ip: &IpAddr| {
            self.pods.values().any(|other| !other.is_finished && other.key != pod.key && other.ips.contains(ip))
        };
        let has_all = self.published(&pod.key).iter().all(|entry| pod.ip_of(entry.family).is_some());
        !pod.is_finished && !pod.ips.is_empty() && has_all && !pod.ips.iter().any(shares)
    }

    /// Asserts that every node port in the annotation of a reachable Pod has a mapping to the Pod, or is the Pod's host
    /// port.
    pub(super) fn assert_published_works(&self) {
        self.assert_published_works_but(&BTreeSet::new());
    }

    /// Asserts the same as [`Self::assert_published_works`], but not for the `excused` Pods.
    pub(super) fn assert_published_works_but(&self, excused: &BTreeSet<PodUid>) {
        for pod in self.pods.values().filter(|pod| !pod.host_network && self.is_reachable(pod)) {
            if excused.contains(&pod.uid) {
                continue;
            }
            for entry in self.published(&pod.key) {
                let is_host_port = pod.ports.iter().any(|port| port.host_port == Some(entry.node_port));
                let backend = self.real.mappings.get(&entry.frontend());
                let is_its = |backend: &Backend| {
                    backend.generation == pod.uid.generation() && backend.pod_port == entry.pod_port
                };
                assert!(is_host_port || backend.is_some_and(is_its), "{} has {entry:?} but {backend:?}", pod.key);
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A test environment that injects faults: ops fail before or after they take effect, patches are delayed, answers are
//! lost, and watches deliver changes late.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    iter,
    net::IpAddr,
};

use super::world::World;
use crate::core::{
    model::{
        Backend, Family, Frontend, NodePort, Pod, PodKey, PodPort, PodUid, Service, ServicePort, TargetPort,
        settings::ProtocolPairing, snapshot::Change, sources::SourceRange,
    },
    op::{Failure, Op, PodWrite},
    ports::select::WantedPort,
    publish::annotation,
};

/// The outcome of an op in the test environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Done,
    /// The op had no effect, and the agent sees a failure.
    Refused,
    /// The op took effect, but its answer was lost: the agent sees a failure.
    Lost,
}

/// The Pod address in a forged mapping, that is, a mapping that software other than the agent has changed. No Pod has
/// this address.
fn forged_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([10, 0, 0, 99]),
        Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x99]),
    }
}

#[derive(Debug)]
pub(super) struct Chaos {
    pub(super) world: World,
    in_flight: VecDeque<Op>,
    /// Answers of the API server that the agent has not received yet.
    answers: VecDeque<(Op, Result<Option<Pod>, Failure>)>,
    /// Changes that the watch of Pods has not delivered yet.
    lag: VecDeque<Change>,
    /// The Pods whose published node ports need not work: since the state last converged, the Pod was unreachable at
    /// some time, or software other than the agent has changed annotations, mappings or the use of ports.
    excused: BTreeSet<PodUid>,
    /// The node ports that were published when the state last converged.
    former: BTreeMap<(PodUid, WantedPort), Frontend>,
    may_move: bool,
    /// The numbers that have been a `nodePort` or `healthCheckNodePort` of a Service since the state last converged. A
    /// mapping with one of these numbers may move to another number at any later time, for example when the other
    /// number becomes free.
    service_ports: BTreeSet<NodePort>,
    /// Whether the running agent has run a pass since it received the lists. The first such pass adopts the mappings in
    /// the kernel.
    has_looked: bool,
}

impl Chaos {
    pub(super) fn new(mut world: World) -> Self {
        world.start();
        Self {
            world,
            in_flight: VecDeque::new(),
            answers: VecDeque::new(),
            lag: VecDeque::new(),
            excused: BTreeSet::new(),
            former: BTreeMap::new(),
            may_move: false,
            service_ports: BTreeSet::new(),
            has_looked: false,
        }
    }

    /// Changes a Pod in the API server. The watch delivers the change when [`Self::deliver`] is called.
    pub(super) fn put_pod(&mut self, mut pod: Pod) {
        if let Some(former) = self.world.pods.get(&pod.key)
            && former.uid != pod.uid
        {
            self.lag.push_back(Change::PodGone(former.key.clone(), former.uid.clone()));
            pod.annotation = None;
        }
        let pod = self.world.store(pod);
        self.lag.push_back(Change::Pod(pod));
        self.excuse_unreachable();
    }

    /// Creates or changes a Service. If the Service uses the number of a mapping's node port as a `nodePort`, the
    /// mapping may move to another node port.
    pub(super) fn put_service(&mut self, service: Service) {
        self.service_ports.extend(&service.node_ports);
        self.world.put_service(service);
    }

    pub(super) fn remove_pod(&mut self, key: &PodKey) {
        if let Some(pod) = self.world.unstore(key) {
            self.lag.push_back(Change::PodGone(pod.key, pod.uid));
        }
    }

    pub(super) fn tamper(&mut self, key: &PodKey, annotation: Option<String>) {
        if let Some(mut pod) = self.world.pods.get(key).cloned() {
            pod.annotation = annotation;
            self.excused.insert(pod.uid.clone());
            self.put_pod(pod);
        }
    }

    /// Changes the kernel's map as software other than the agent may do: removes a mapping, or changes the mapping's
    /// Pod address to an address that no Pod has.
    pub(super) fn meddle(&mut self, frontend: Frontend, is_forged: bool) {
        if is_forged {
            let pod_ip = forged_ip(frontend.family);
            self.world
                .real
                .mappings
                .insert(frontend, Backend { pod_ip, pod_port: PodPort(80), generation: 1, is_restricted: false });
        } else {
            self.world.real.mappings.remove(&frontend);
        }
        self.excused.extend(self.world.pods.values().map(|pod| pod.uid.clone()));
        // If the mapping and the annotation differ, an agent that starts cannot know which of them is forged.
        self.may_move |= !self.has_looked;
        self.world.state.observe(self.world.real.clone());
    }

    /// Changes the kernel's maps as software other than the agent may do. If the range has the family of the frontend,
    /// removes the range from the allowed sources, or adds the range if the range is absent. Otherwise toggles whether
    /// the mapping is restricted.
    pub(super) fn meddle_with_sources(&mut self, frontend: Frontend, range: SourceRange) {
        if range.family() == frontend.family {
            let ranges = self.world.real.sources.entry(frontend).or_default();
            if !ranges.remove(&range) {
                ranges.insert(range);
            }
            if ranges.is_empty() {
                self.world.real.sources.remove(&frontend);
            }
        } else if let Some(backend) = self.world.real.mappings.get_mut(&frontend) {
            backend.is_restricted = !backend.is_restricted;
        }
        self.world.state.observe(self.world.real.clone());
    }

    /// Binds the port for a process other than the agent, if the port is free at this moment.
    pub(super) fn steal(&mut self, frontend: Frontend) {
        if !self.world.real.reservations.contains(&frontend) {
            self.world.stolen.insert(frontend);
            self.may_move |= self.world.real.mappings.contains_key(&frontend);
        }
    }

    /// Kills the agent and starts a new agent. In between, another process binds the port `stolen`, if given.
    pub(super) fn restart(&mut self, stolen: Option<Frontend>) {
        while let Some(op) = self.in_flight.pop_front() {
            // The patches that the killed agent has sent may still reach the API server.
            if self.world.patch(&op) == Ok(()) {
                self.world.assert_published_works_but(&self.excused);
            }
        }
        self.answers.clear();
        self.lag.clear();
        self.world.stolen.extend(stolen);
        let is_forged = |(frontend, backend): (&Frontend, &Backend)| backend.pod_ip == forged_ip(frontend.family);
        // The agent that starts adopts forged mappings that the killed agent has not corrected, so a Pod may move to
        // another node port.
        self.may_move |= stolen.is_some() || self.world.real.mappings.iter().any(is_forged);
        self.forget_unlisted_objects();
        if stolen.is_some() {
            self.excused.extend(self.world.pods.values().map(|pod| pod.uid.clone()));
        }
        self.world.start_without_lists();
        while !self.pass(&mut iter::empty()) {}
        self.world.list();
        self.has_looked = false;
    }

    /// Removes from `former` the node ports that a restarted agent cannot know: a restarted agent reads the node port
    /// of each Pod port from the kernel and from annotations. If the kernel has no mapping, a `hostPort` takes
    /// precedence over an annotation.
    fn forget_unlisted_objects(&mut self) {
        let world = &self.world;
        self.former.retain(|(uid, port), frontend| {
            let is_host_port = |pod: &Pod| pod.ports.iter().any(|port| port.host_port == Some(frontend.node_port));
            let names = |pod: &Pod| {
                let mut published = world.published(&pod.key).into_iter();
                pod.uid == *uid && published.any(|it| it.frontend() == *frontend && it.pod_port == port.pod_port)
            };
            let is_named = world.pods.values().any(names) && !world.pods.values().any(is_host_port);
            let backend = world.real.mappings.get(frontend);
            is_named || backend.is_some_and(|backend| backend.generation == uid.generation())
        });
    }

    /// Delivers up to `count` changes from the watch of Pods to the agent.
    pub(super) fn deliver(&mut self, count: usize) {
        for _ in 0..count {
            let Some(change) = self.lag.pop_front() else { break };
            self.world.state.apply(change);
        }
        self.excuse_unreachable();
    }

    /// Runs one pass of the agent, and returns whether the pass had no op. `fates` determines the outcome of each op on
    /// the kernel or the sockets. Patches stay in flight until [`Self::serve`].
    pub(super) fn pass(&mut self, fates: &mut impl Iterator<Item = Fate>) -> bool {
        let ops = self.world.state.pass(self.world.now).ops;
        self.has_looked = true;
        let is_idle = ops.is_empty();
        for op in ops {
            if matches!(op, Op::WritePod { .. }) {
                self.assert_alone(&op);
                self.world.assert_may_write(&op);
                self.in_flight.push_back(op);
            } else {
                self.kernel(&op, fates.next().unwrap_or(Fate::Done));
            }
            self.world.assert_published_works_but(&self.excused);
        }
        is_idle
    }

    /// Makes the API server process up to `count` of the patches in flight, the oldest first.
    pub(super) fn serve(&mut self, count: usize, fates: &mut impl Iterator<Item = Fate>) {
        for _ in 0..count {
            let Some(op) = self.in_flight.pop_front() else { break };
            let fate = fates.next().unwrap_or(Fate::Done);
            let result = if fate == Fate::Refused { Err(self.world.later()) } else { self.world.patch(&op) };
            // The annotation may name a mapping of a Pod that lost its address while the patch was in flight.
            self.excuse_unreachable();
            self.world.assert_published_works_but(&self.excused);
            let Op::WritePod { pod, .. } = &op else { unreachable!("only patches are in flight") };
            let stored = self.world.pods.get(pod).cloned();
            let answer = result.and_then(|()| {
                self.lag.extend(stored.clone().map(Change::Pod));
                if fate == Fate::Lost { Err(self.world.later()) } else { Ok(stored) }
            });
            self.answers.push_back((op, answer));
        }
    }

    /// Delivers up to `count` answers of the API server to the agent, the oldest first.
    pub(super) fn answer(&mut self, count: usize) {
        for _ in 0..count {
            let Some((op, answer)) = self.answers.pop_front() else { break };
            match answer {
                Ok(stored) => {
                    if let Some(pod) = stored {
                        self.world.state.apply(Change::Pod(pod));
                    }
                    self.world.state.record_done(&op, self.world.now);
                }
                Err(failure) => self.world.state.record_failed(&op, failure, self.world.now),
            }
        }
    }

    /// Delivers all changes and answers, lets no further op fail, and asserts that the state converges.
    pub(super) fn settle(&mut self) {
        for _ in 0..200 {
            self.deliver(usize::MAX);
            self.serve(usize::MAX, &mut iter::empty());
            self.answer(usize::MAX);
            let is_idle = self.pass(&mut iter::empty());
            if is_idle && self.in_flight.is_empty() && self.lag.is_empty() {
                let room = self.world.room;
                match self.world.state.retries.values().min().copied() {
                    // A full map of allowed sources is enlarged, because ops that wait for room in the map may
                    // otherwise never succeed.
                    Some(_) if room < usize::MAX => self.world.room = usize::MAX,
                    Some(at) => self.world.now = at,
                    None => return self.assert_in_order(),
                }
            }
        }
        panic!("the state does not converge");
    }

    pub(super) fn wait(&mut self, millis: u64) {
        self.settle();
        let end = self.world.now.plus(millis);
        while let Some(at) = self.world.state.pass(self.world.now).next_deadline.filter(|at| *at <= end) {
            assert!(at > self.world.now, "a deadline in the past would cause a busy loop");
            self.world.now = at;
            self.settle();
        }
        self.world.now = end.max(self.world.now);
        self.settle();
    }

    fn kernel(&mut self, op: &Op, fate: Fate) {
        let failure = self.world.later();
        let result = if fate == Fate::Refused { Err(failure) } else { self.world.kernel(op) };
        match (result, fate) {
            (Err(failure @ Failure::NoRoom { .. }), _) => {
                self.world.state.record_failed(op, failure, self.world.now);
                self.world.state.observe(self.world.real.clone());
            }
            (Ok(()), Fate::Lost) => {
                self.world.state.record_failed(op, failure, self.world.now);
                // The agent's adapter reads the kernel's state again after a failure, so the test does, too.
                self.world.state.observe(self.world.real.clone());
            }
            (Ok(()), _) => self.world.state.record_done(op, self.world.now),
            (Err(failure), _) => self.world.state.record_failed(op, failure, self.world.now),
        }
    }

    fn assert_alone(&self, op: &Op) {
        let Op::WritePod { uid, .. } = op else { return };
        let same = |other: &&Op| matches!(other, Op::WritePod { uid: other, .. } if other == uid);
        assert_eq!(
            self.in_flight.iter().chain(self.answers.iter().map(|(op, _)| op)).find(same),
            None,
            "two patches of one Pod are in flight"
        );
    }

    /// Excludes unreachable Pods from the assertions, because an unreachable Pod may have no mapping. A Pod counts as
    /// unreachable if it is unreachable according to the API server's or the agent's copy of the Pod.
    fn excuse_unreachable(&mut self) {
        let world = &self.world;
        let seen = |pod: &Pod| world.state.snapshot.pod(&pod.key).filter(|seen| seen.uid == pod.uid).cloned();
        // The agent removes the mapping of a Pod that has lost its address, while a patch in flight may still name the
        // mapping.
        let has_what_is_on_its_way = |pod: &Pod| {
            let entries = |op: &Op| {
                let Op::WritePod { uid, value: PodWrite::Set(value), .. } = op else { return None };
                (*uid == pod.uid).then(|| annotation::seen_entries(value))
            };
            self.in_flight.iter().filter_map(entries).flatten().all(|entry| pod.ip_of(entry.family).is_some())
        };
        let is_served = |pod: &Pod| world.is_reachable(pod) && has_what_is_on_its_way(pod);
        let is_reachable = |pod: &Pod| is_served(pod) && seen(pod).is_none_or(|seen| is_served(&seen));
        let unreachable = world.pods.values().filter(|pod| !is_reachable(pod));
        self.excused.extend(unreachable.map(|pod| pod.uid.clone()));
    }

    fn assert_in_order(&mut self) {
        self.excused.clear();
        self.excuse_unreachable();
        self.world.assert_published_works_but(&self.excused);
        let known: Vec<_> = self.world.state.snapshot.pods().map(|pod| &pod.uid).collect();
        let real: Vec<_> = self.world.pods.values().map(|pod| &pod.uid).collect();
        assert_eq!(known, real, "the agent's Pods differ from the API server's");
        self.assert_mappings_are_current();
        self.assert_services_decide_which_clients_are_allowed();
        let mut published = BTreeMap::new();
        for pod in self.world.pods.values() {
            for entry in self.world.published(&pod.key) {
                let has_family = pod.ip_of(entry.family).is_some();
                assert!(has_family || pod.is_terminating, "{} has no address for {entry:?}", pod.key);
                let port = WantedPort { pod_port: entry.pod_port, protocol: entry.protocol, family: entry.family };
                let former = published.insert((pod.uid.clone(), port), entry.frontend());
                assert_eq!(former, None, "{}: a Pod port is published twice", pod.key);
            }
        }
        for (owner, frontend) in &published {
            let is_to_stay = |former: &&Frontend| !self.may_move && !self.service_ports.contains(&former.node_port);
            let former = self.former.get(owner).filter(is_to_stay);
            assert!(former.is_none_or(|former| former == frontend), "{owner:?} moved from {former:?} to {frontend:?}");
        }
        self.former = published;
        self.service_ports = self.world.services.values().flat_map(|service| &service.node_ports).copied().collect();
        // If a Service adds a protocol, all protocols of the Pod port may have to move to a number that is free for the
        // added protocol, too.
        self.may_move = self.world.settings.protocol_pairing == ProtocolPairing::Merged;
    }

    /// Asserts that a client may use a mapping if, and only if, a Service that requests the Pod port allows the client.
    /// A Service without a list of allowed sources allows every client.
    fn assert_services_decide_which_clients_are_allowed(&self) {
        let clients =
            ["198.51.100.7", "198.51.100.8", "198.51.7.7", "203.0.113.1", "192.0.2.1", "2001:db8::1", "fd00::1"];
        let clients: Vec<IpAddr> = clients.iter().map(|text| text.parse().unwrap()).collect();
        for (frontend, backend) in &self.world.real.mappings {
            let is_its = |pod: &&Pod| pod.uid.generation() == backend.generation;
            let Some(pod) = self.world.pods.values().find(is_its) else { continue };
            let names = |name: &String| {
                let mut ports = pod.ports.iter().filter(|port| port.name.as_ref() == Some(name));
                ports.any(|port| port.port == backend.pod_port && port.protocol == frontend.protocol)
            };
            let is_its_target = |port: &ServicePort| {
                let is_its = match &port.target {
                    TargetPort::Number(number) => *number == backend.pod_port,
                    TargetPort::Name(name) => names(name),
                };
                port.protocol == frontend.protocol && is_its
            };
            let asks = |service: &&Service| {
                service.is_active()
                    && service.key.namespace == pod.key.namespace
                    && service.selector.iter().all(|(label, value)| pod.labels.get(label) == Some(value))
                    && service.families.contains(&frontend.family)
                    && service.ports.iter().any(is_its_target)
            };
            let services: Vec<_> = self.world.services.values().filter(asks).collect();
            // If no Service requests the Pod port, the mapping drains and keeps its former allowed sources, so the
            // clients are not checked.
            for client in clients.iter().filter(|ip| Family::of(**ip) == frontend.family && !services.is_empty()) {
                let is_in = |range: SourceRange| SourceRange::new(*client, range.length()) == Some(range);
                let lets_in = |service: &&Service| {
                    let sources = &service.allow_list.sources;
                    !sources.is_restricted() || sources.ranges().any(is_in)
                };
                let expected = services.iter().any(lets_in);
                assert_eq!(self.world.lets_in(*frontend, *client), expected, "{client} at {frontend}: {services:?}");
            }
        }
        let of_nobody = self.world.real.sources.keys().find(|frontend| {
            let mapping = self.world.real.mappings.get(frontend);
            mapping.is_none_or(|mapping| !mapping.is_restricted)
        });
        assert_eq!(of_nobody, None, "the kernel has allowed sources for a node port without a restricted mapping");
    }

    fn assert_mappings_are_current(&self) {
        for (frontend, backend) in &self.world.real.mappings {
            let is_home = |pod: &&Pod| pod.uid.generation() == backend.generation && pod.ips.contains(&backend.pod_ip);
            let pod = self.world.pods.values().find(is_home);
            assert!(pod.is_some_and(|pod| !pod.is_finished), "{frontend} leads to no running Pod: {backend:?}");
            assert!(!self.world.stolen.contains(frontend) || !self.world.real.reservations.contains(frontend));
        }
    }
}

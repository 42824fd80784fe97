// SPDX-License-Identifier: Apache-2.0
//! A served Node with clients, and the verification of one change by other software: the agent must notice the change,
//! restore the object, and count and log the repair once.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
pub(super) use npl_agent::core::repairs::RepairedObject as Object;
use npl_agent::datapath::preflight;
use npl_common::names;
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::echo::Protocol;
use npl_testkit::foreign::{BOTH, Foreign, HANDS_ON, Place};
use npl_testkit::poll;
use npl_testkit::traffic::{self, Failure, Load};

use crate::world::{LIMIT, World};

pub(super) const PODS: [&str; 2] = ["web-0", "web-1"];

/// Part of the log line of each repair.
const LINE: &str = "other software removed or changed an object of NPL";
/// Part of the error of a request that a wrong Pod has answered.
const WRONG_POD: &str = "responded instead of";
/// Requests per second of the load.
const RATE: u32 = 40;

/// A change by other software, and its repairs.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) change: fn(&Scene),
    /// The expected numbers of repairs.
    pub(super) repairs: &'static [(Object, u64)],
    /// Whether a wrong Pod may answer before the repair, because the change directs requests to the wrong Pod.
    pub(super) may_mislead: bool,
}

/// A Node with an agent, two Pods, a load, an established connection, and a program of other software on the uplink.
pub(super) struct Scene {
    load: Option<Load>,
    load_started: Instant,
    connection: TcpStream,
    /// A program of other software on both hooks of the uplink, behind NPL's programs.
    foreign: Option<Foreign>,
    pub(super) world: World,
    pub(super) cgroup: ClientCgroup,
    /// The repairs of all earlier cases.
    expected: BTreeMap<Object, u64>,
}

impl Scene {
    pub(super) fn new(flags: &[&str]) -> Self {
        Self::prepared(flags, true, |_world| {})
    }

    /// Creates a scene with these flags of the agent. `prepare` changes the world before the agent starts.
    pub(super) fn prepared(flags: &[&str], has_foreign_program: bool, prepare: impl FnOnce(&World)) -> Self {
        let mut world = World::new();
        prepare(&world);
        let (cgroup, shown) = world.client_cgroup();
        world.create_node();
        world.start_agent(&[&["--resync", "1s", "--cgroup", &shown], flags].concat());
        world.serve(&PODS);
        let uplink = world.topology.client().uplink.clone();
        let attach = || Foreign::attach(&world.run, "beside", &uplink, HANDS_ON, Place::Behind, &BOTH).unwrap();
        let foreign = has_foreign_program.then(attach);
        let client = world.topology.client().netns.clone();
        let connection = traffic::tcp_connect(&client, world.address(PODS[0], Protocol::Tcp)).unwrap();
        let load = Load::start(&client, RATE, world.load_requests(&PODS));
        let load_started = Instant::now();
        let expected = Object::ALL.map(|object| (object, 0)).into();
        Self { load: Some(load), load_started, connection, foreign, world, cgroup, expected }
    }

    /// Makes the change, and verifies that the agent repairs it.
    pub(super) fn verify(&mut self, case: &Case) {
        let name = case.name;
        assert_eq!(self.world.repairs(), self.expected, "before `{name}`");
        let (log_before, begin) = (self.world.agent_log().len(), self.load_started.elapsed());
        (case.change)(self);
        for (object, count) in case.repairs {
            *self.expected.get_mut(object).unwrap() += count;
        }
        let expected = self.expected.clone();
        let is_counted = || self.world.repairs().iter().all(|(object, count)| *count >= expected[object]).then_some(());
        let waited = poll::until(&format!("the repair of `{name}`"), LIMIT, is_counted);
        assert!(waited.is_ok(), "{waited:?}: {:?}\n{}", self.world.repairs(), self.log_since(log_before));
        let repaired = self.load_started.elapsed();
        self.wait_until_served(name);
        // The agent compares everything again. A second comparison must find nothing to repair.
        self.wait_for_resync();
        let misled = self.misled_since(if case.may_mislead { repaired } else { begin });
        assert!(misled.is_empty(), "`{name}`: {misled:?}");
        let log = self.log_since(log_before);
        assert_eq!(self.world.repairs(), self.expected, "`{name}` must be repaired once: {log}");
        for (object, count) in case.repairs {
            let label = object.as_str();
            let lines = log.lines().filter(|line| line.contains(LINE) && line.contains(label)).count();
            assert_eq!(lines as u64, *count, "log lines about {label} after `{name}`: {log}");
        }
        self.assert_foreign_program_stays(name);
        let answer = traffic::tcp_ask(&self.connection, "who are you?");
        assert!(answer.as_ref().is_ok_and(|it| it.pod == PODS[0]), "established connection, `{name}`: {answer:?}");
    }

    /// Stops the load, and verifies that the load had answers of both Pods.
    pub(super) fn end(mut self) {
        let report = self.load.take().unwrap().stop();
        for pod in PODS {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                assert!(report.answered.get(&(pod.to_owned(), protocol)).is_some_and(|count| *count > 0), "{report:?}");
            }
        }
    }

    /// The requests since this time after the begin of the load that a wrong Pod has answered.
    fn misled_since(&self, time: Duration) -> Vec<Failure> {
        let failures = self.load.as_ref().map(|load| load.report().failures).unwrap_or_default();
        failures.into_iter().filter(|failure| failure.at > time && failure.error.contains(WRONG_POD)).collect()
    }

    fn log_since(&mut self, bytes: usize) -> String {
        self.world.agent_log().get(bytes..).unwrap_or_default().to_owned()
    }

    /// Waits until each Pod answers by both protocols, and a local client reaches the first Pod.
    fn wait_until_served(&self, name: &str) {
        let client = &self.world.topology.client().netns;
        for pod in PODS {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let server = self.world.address(pod, protocol);
                let is_served = || traffic::request(client, protocol, server, "who?").ok().filter(|it| it.pod == pod);
                let waited =
                    poll::until(&format!("an answer of {pod} over {protocol} after `{name}`"), LIMIT, is_served);
                let (answer, _) = waited.unwrap();
                assert_eq!(answer.client.ip(), self.world.client_ip());
            }
        }
        let server = self.world.address(PODS[0], Protocol::Tcp);
        let node = self.world.topology.node();
        let is_served = || self.cgroup.run(|| traffic::tcp_request(node, server, "who?")).ok()?.ok();
        let waited = poll::until(&format!("an answer to a local client after `{name}`"), LIMIT, is_served);
        assert_eq!(waited.unwrap().0.pod, PODS[0]);
    }

    /// Waits until the agent has finished a whole comparison of the kernel state with the desired state.
    fn wait_for_resync(&mut self) {
        // Each resync, and the survey that the resync starts, cause passes of the main loop. Six passes contain at least
        // one whole comparison.
        let before = self.world.passes();
        poll::until("two more comparisons", LIMIT, || (self.world.passes() >= before + 6).then_some(())).unwrap();
    }

    /// Verifies that the program of other software is still on both hooks of the uplink.
    fn assert_foreign_program_stays(&self, name: &str) {
        let Some(foreign) = self.foreign.as_ref().filter(|_| preflight::has_tcx()) else { return };
        let device = self.world.topology.client().uplink.name().to_owned();
        for hook in BOTH {
            let programs = self.programs_on(&device, hook);
            assert_eq!(programs.len(), 2, "`{name}`: the programs of NPL and of other software: {programs:?}");
            assert_eq!(programs.last(), Some(&foreign.program_id()), "`{name}`: {programs:?}");
        }
    }

    /// The program of other software on the uplink.
    pub(super) fn foreign(&self) -> &Foreign {
        self.foreign.as_ref().unwrap()
    }

    fn programs_on(&self, device: &str, hook: TcAttachType) -> Vec<u32> {
        let query = || SchedClassifier::query_tcx(device, hook);
        let (_, programs) = self.world.topology.node().run(query).unwrap().unwrap();
        programs.iter().map(ProgramInfo::id).collect()
    }

    /// The path of the pinned link of the uplink's TC or XDP program: `in`, `out` or `xdp`.
    pub(super) fn link(&self, suffix: &str) -> PathBuf {
        let ifindex = self.world.topology.client().uplink.ifindex().unwrap();
        self.world.pins().join(names::LINK_DIR).join(format!("{ifindex}_{suffix}"))
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The part of the fuzz targets that runs the planner on the model of kernel, sockets and API server. The model asserts
//! the precondition of each op; [`Chaos`] asserts the invariants that hold after any sequence of events.

use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use super::{
    chaos::Chaos,
    events::{Event, event, happen, keep_lasting_fields, node_with, start, start_with},
    world::{World, settings},
};
use crate::core::model::{Node, Pod, Service, observed::Observed, settings::ProtocolPairing};

/// The maximum number of events of one input.
const MAX_EVENTS: usize = 60;
/// Five minutes in milliseconds: longer than the drain and the quarantine together.
const MINUTES: u64 = 300_000;

/// Applies events that are generated as in the property tests. The first byte selects the protocol pairing. Each four
/// bytes after the first byte are the random seed of one event, so that a mutation of the input changes, removes or
/// repeats single events.
pub(crate) fn random_events(bytes: &[u8]) {
    let (pairing, bytes) = match bytes.split_first() {
        Some((first, rest)) if first % 2 == 1 => (ProtocolPairing::Merged, rest),
        Some((_, rest)) => (ProtocolPairing::Separate, rest),
        None => return,
    };
    let mut chaos = start_with(pairing);
    let (seeds, _rest) = bytes.as_chunks::<4>();
    for seed in seeds.iter().take(MAX_EVENTS) {
        if let Some(event) = generated(*seed) {
            happen(&mut chaos, event);
        }
    }
    chaos.settle();
}

fn generated(seed: [u8; 4]) -> Option<Event> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed.repeat(8));
    let mut runner = TestRunner::new_with_rng(Config { failure_persistence: None, ..Config::default() }, rng);
    Some(event().new_tree(&mut runner).ok()?.current())
}

/// A watch event or a step of the agent.
#[derive(Debug)]
pub(crate) enum Step {
    /// The API server has a new or changed Pod.
    Pod(Pod),
    /// The Pod is deleted.
    PodGone(Pod),
    /// The API server has a new or changed Service.
    Service(Service),
    /// The Service is deleted.
    ServiceGone(Service),
    /// The API server has a new or changed Node.
    Node(Node),
    /// The agent runs one pass.
    Pass,
    /// This number of seconds passes.
    Wait(u8),
    /// The agent is killed, and a new agent starts.
    Restart,
}

/// Applies the steps, and asserts the invariants after each op and at the end. Returns the texts of all problems that
/// the agent would report in Events.
pub(crate) fn run(steps: Vec<Step>) -> Vec<String> {
    let mut chaos = start();
    for step in steps {
        match step {
            Step::Pod(pod) => put(&mut chaos, pod),
            Step::PodGone(pod) => chaos.remove_pod(&pod.key),
            Step::Service(service) => chaos.put_service(service),
            Step::ServiceGone(service) => chaos.world.remove_service(&service.key),
            Step::Node(node) => chaos.world.put_node(node),
            Step::Pass => drop(chaos.pass(&mut std::iter::empty())),
            Step::Wait(seconds) => chaos.wait(u64::from(seconds) * 1_000),
            Step::Restart => chaos.restart(None),
        }
    }
    chaos.settle();
    chaos.world.state.problems().map(|problem| problem.to_string()).collect()
}

/// Puts a Pod with a state that the API server could report. The API server does not change the uid, the ports and the
/// host network of an existing Pod. A Pod that has finished or is being deleted stays in this state. Only the agent
/// writes the annotation, unless `pod` has an annotation.
fn put(chaos: &mut Chaos, mut pod: Pod) {
    let (key, annotation) = (pod.key.clone(), pod.annotation.take());
    if let Some(former) = chaos.world.pods.get(&key).filter(|former| former.uid == pod.uid) {
        keep_lasting_fields(&mut pod, former);
        pod.host_network = former.host_network;
    }
    chaos.put_pod(pod);
    if annotation.is_some() {
        chaos.tamper(&key, annotation);
    }
}

/// Starts an agent on a Node whose pinned maps have this content, without any Pod that could own a mapping. Asserts
/// that the agent removes all mappings and allowed sources, and that no node port stays reserved.
pub(crate) fn adopt(pinned: Observed) {
    let mut world = World::new(settings("61000-61005"));
    world.put_node(node_with("192.0.2.1 2001:db8:1::1"));
    world.real = pinned;
    world.start();
    world.wait(MINUTES);
    assert_eq!(world.real, Observed::default(), "state of an earlier agent without an owner is left");
}

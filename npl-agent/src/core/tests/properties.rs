// SPDX-License-Identifier: Apache-2.0
//! Tests properties of the planner that hold after any sequence of events.

use std::borrow::Cow;

use proptest::{prelude::*, sample::select};

use super::{
    chaos::Chaos,
    events::{Event, cluster_event, event, happen, pod, pod_key, requests, service, service_key, start, start_with},
};
use crate::core::{
    model::{Gate, ObjectKey, Pod, Service, settings::ProtocolPairing, snapshot::Change},
    op::{Op, PodWrite, RecentTraffic},
    ports::select::Exposure,
    publish::{
        problem::{Cause, Problem},
        request_problem::{Obstacle, RequestProblem},
    },
};

/// The current problems. A restarted agent does not know why a Pod did not get a requested node port, if the node port
/// has become free since, so all problems of this kind have the same obstacle.
fn problems(chaos: &Chaos) -> Vec<Problem> {
    let known = chaos.world.state.problems().map(Cow::into_owned).map(|mut problem| {
        if let Cause::NodePortRequest(RequestProblem::Refused { obstacle, .. }) = &mut problem.cause {
            *obstacle = Obstacle::Allocated;
        }
        problem
    });
    known.collect()
}

/// Asserts that each Pod port with a node port has the requested node port, or that a problem reports the refusal. A
/// Pod port without a node port must have the problem that no node port is free.
fn assert_requests_are_met_or_reported(chaos: &Chaos) {
    let state = &chaos.world.state;
    for (key, view) in &state.views {
        let pod = state.snapshot.pod(key).unwrap();
        let mapped = view.wanted.ports.iter().filter(|(_, exposure)| **exposure == Exposure::Mapping);
        for (port, _) in mapped {
            let Some(requested) = pod.requests.of(port.pod_port, port.protocol) else { continue };
            let held = state.ports.of_port(&pod.uid, *port).into_iter().find(|held| state.ports.is_active(*held));
            let Some(held) = held else {
                let exhausted =
                    Cause::RangeExhausted { pod_port: port.pod_port, protocol: port.protocol, family: port.family };
                assert!(view.wanted.problems.iter().any(|problem| problem.cause == exhausted), "{key} {port:?}");
                continue;
            };
            let is_reported = view.wanted.problems.iter().any(|problem| {
                matches!(&problem.cause, Cause::NodePortRequest(RequestProblem::Refused { pod_port, protocol, node_port, .. })
                    if (*pod_port, *protocol, *node_port) == (port.pod_port, port.protocol, requested))
            });
            assert_ne!(held.node_port == requested, is_reported, "{key} {port:?} {requested} {held:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// After every op, every published mapping works, even if earlier ops failed. When ops no longer fail, the state
    /// converges: no op is left.
    #[test]
    fn every_published_mapping_works(events in prop::collection::vec(event(), 0..60)) {
        let mut chaos = start();
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
    }

    /// If the cluster and the kernel do not change while no agent runs, a restarted agent only binds its sockets, and
    /// may set the annotation of a terminating Pod to `[]`.
    #[test]
    fn a_restart_without_other_changes_only_binds_sockets(events in prop::collection::vec(event(), 0..60)) {
        let mut chaos = start();
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.world.stolen.clear();
        chaos.world.room = usize::MAX;
        chaos.wait(300_000);
        let (before, sources) = (chaos.world.real.mappings.clone(), chaos.world.real.sources.clone());
        let problems = problems(&chaos);
        let is_exhausted = problems.iter().any(|problem| matches!(problem.cause, Cause::RangeExhausted { .. }));
        let is_held_for_later = chaos.world.state.mappings().any(|view| view.backend.is_none());
        let is_contested = problems.iter().any(|problem| matches!(problem.cause, Cause::NodePortConflict { .. }));
        // A node port that is reserved for a Pod without an address is in no annotation. So the restarted agent may
        // allocate the node port to another Pod, and does not know that a Service also has this node port.
        prop_assume!(!is_held_for_later || !(is_exhausted || is_contested));
        // If neither of two Pods with the same address has a mapping, the restarted agent cannot know which of them was
        // served.
        let is_without_trace = |problem: &Problem| {
            let Cause::AddressConflict { ip, .. } = problem.cause else { return false };
            before.values().all(|backend| backend.pod_ip != ip)
        };
        prop_assume!(!problems.iter().any(is_without_trace));
        chaos.world.start();
        for op in chaos.world.settle() {
            // The restarted agent may set the annotation of a terminating Pod to `[]`: the annotation stays only while
            // the agent that reserved the node port runs.
            let is_emptied = |key: &ObjectKey| chaos.world.pods[key].is_terminating;
            let is_expected = match &op {
                Op::Reserve(_, RecentTraffic::Tolerated) => true,
                Op::WritePod { pod, value: PodWrite::Set(value), .. } => value == "[]" && is_emptied(pod),
                Op::Reserve(_, RecentTraffic::Refused)
                | Op::AllowSources(..)
                | Op::UpsertMapping(..)
                | Op::WritePod { .. }
                | Op::RemoveMapping(_)
                | Op::ForgetSources(..)
                | Op::Release(_) => false,
            };
            prop_assert!(is_expected, "{op:?}");
        }
        prop_assert_eq!(problems, self::problems(&chaos));
        prop_assert_eq!(before, chaos.world.real.mappings);
        prop_assert_eq!(sources, chaos.world.real.sources);
    }

    /// A Pod port has the node port that the Pod requests, or a problem reports why not, after any events. If the
    /// requests of Pods change, no mapping moves, and no annotation is written.
    #[test]
    fn a_request_is_met_or_reported_and_never_moves_a_mapping(
        events in prop::collection::vec(event(), 0..60),
        changed in prop::collection::vec((pod_key(), requests()), 1..4),
        pairing in select(vec![ProtocolPairing::Separate, ProtocolPairing::Merged]),
    ) {
        let mut chaos = start_with(pairing);
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
        assert_requests_are_met_or_reported(&chaos);
        for (key, requests) in changed {
            let Some(pod) = chaos.world.pods.get(&key).cloned() else { continue };
            chaos.world.put_pod(Pod { requests, ..pod });
        }
        prop_assert_eq!(chaos.world.settle(), []);
        assert_requests_are_met_or_reported(&chaos);
    }

    /// Decisions do not depend on the order in which the watches deliver changes.
    #[test]
    fn the_order_of_events_makes_no_difference(
        scene in prop::collection::vec(cluster_event(), 0..20),
        pods in prop::collection::btree_map(pod_key(), pod(), 0..4),
        services in prop::collection::btree_map(service_key(), service(), 0..3),
        order in prop::collection::vec(any::<u32>(), 8),
    ) {
        let run = |is_shuffled: bool| {
            let mut chaos = start();
            for event in scene.clone() {
                happen(&mut chaos, event);
            }
            chaos.settle();
            let pods = pods.iter().zip(1_000_u64..).map(|((key, pod), resource_version)| {
                Change::Pod(Pod { key: key.clone(), resource_version, ..pod.clone() })
            });
            let services = services.iter().map(|(key, it)| Change::Service(Service { key: key.clone(), ..it.clone() }));
            let mut changes: Vec<_> = pods.chain(services).zip(&order).collect();
            if is_shuffled {
                changes.sort_by_key(|(_, rank)| **rank);
            }
            for (change, _) in changes {
                chaos.world.state.apply(change);
            }
            chaos.world.state.pass(chaos.world.now)
        };
        prop_assert_eq!(run(false), run(true));
    }
}

proptest! {
    /// The agent does not open the readiness gate of a Pod that is being deleted. Otherwise, a restarted agent would
    /// open a gate that the earlier agent has left closed.
    #[test]
    fn the_gate_of_a_pod_that_is_being_deleted_stays_closed(pod in pod()) {
        let mut chaos = start();
        let key = pod.key.clone();
        happen(&mut chaos, Event::Pod(Pod { is_terminating: true, ..pod }));
        chaos.wait(300_000);
        prop_assert_eq!(chaos.world.pods[&key].gate, Gate::Closed { are_containers_ready: true });
    }
}

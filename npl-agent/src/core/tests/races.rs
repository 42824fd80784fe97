// SPDX-License-Identifier: Apache-2.0
//! Tests races between a patch, the answer to the patch, and the watch event that shows the patched Pod.

use std::{collections::BTreeSet, iter};

use super::{
    chaos::{Chaos, Fate},
    script::{key, pod, service, with_service},
};
use crate::core::{
    model::{Pod, PodUid, snapshot::Change},
    op::{Op, PodWrite, RecentTraffic},
    ports::Phase,
};

/// Five minutes in milliseconds: longer than the drain and the quarantine together.
const MINUTES: u64 = 300_000;

/// Creates a cluster with a Pod whose first annotation is in flight to the API server.
fn about_to_publish() -> Chaos {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    let mut chaos = Chaos::new(world);
    while !chaos.pass(&mut iter::empty()) {}
    chaos
}

fn pass_often(chaos: &mut Chaos) {
    for _ in 0..5 {
        chaos.world.now = chaos.world.now.plus(MINUTES);
        chaos.pass(&mut iter::empty());
    }
}

#[test]
fn the_drain_waits_for_a_write_in_flight() {
    let mut chaos = about_to_publish();
    chaos.serve(1, &mut iter::once(Fate::Done));
    chaos.world.remove_service(&key("a/s"));
    pass_often(&mut chaos);
    assert_eq!(chaos.world.published(&key("a/p")).len(), 1);
    assert_eq!(chaos.world.real.mappings.len(), 1, "the published mapping must exist");
    chaos.wait(MINUTES);
    assert_eq!(chaos.world.real.mappings.len(), 0);
}

#[test]
fn a_write_without_an_answer_is_withdrawn_before_the_drain() {
    let mut chaos = about_to_publish();
    chaos.serve(1, &mut iter::once(Fate::Lost));
    chaos.answer(1);
    chaos.world.remove_service(&key("a/s"));
    pass_often(&mut chaos);
    assert_eq!(chaos.world.real.mappings.len(), 1, "a mapping that may be published must exist");
    chaos.serve(1, &mut iter::once(Fate::Done));
    assert_eq!(
        chaos.world.pods[&key("a/p")].annotation,
        None,
        "the annotation is withdrawn, although the agent never saw it"
    );
}

#[test]
fn a_write_without_an_answer_is_withdrawn_from_a_terminating_pod_too() {
    let mut chaos = about_to_publish();
    let former = chaos.world.pods[&key("a/p")].clone();
    chaos.put_pod(pod(&["a/p", "app=y", "10.0.0.5", "terminating"], Some(&former)));
    chaos.deliver(usize::MAX);
    chaos.serve(1, &mut iter::once(Fate::Refused));
    chaos.answer(1);
    chaos.wait(MINUTES);
    assert_eq!(chaos.world.published(&key("a/p")).len(), 0);
    assert_eq!(chaos.world.real.mappings.len(), 0, "the mapping is removed in the end");
}

#[test]
fn a_late_answer_does_not_recreate_the_state_of_a_deleted_pod() {
    let mut chaos = about_to_publish();
    chaos.serve(1, &mut iter::once(Fate::Done));
    chaos.remove_pod(&key("a/p"));
    chaos.deliver(usize::MAX);
    chaos.answer(1);
    chaos.wait(MINUTES);
    assert_eq!(chaos.world.state.mappings().count(), 0);
}

#[test]
fn an_outdated_watch_event_is_ignored() {
    let mut chaos = about_to_publish();
    let old = Pod { ips: Vec::new(), ..chaos.world.pods[&key("a/p")].clone() };
    chaos.settle();
    let writes = chaos.world.patches;
    chaos.world.state.apply(Change::Pod(old.clone()));
    chaos.world.state.apply(Change::PodGone(old.key, PodUid("another".into())));
    chaos.settle();
    assert_eq!(chaos.world.patches, writes);
    assert_eq!(chaos.world.real.mappings.len(), 1);
}

#[test]
fn a_pod_unknown_to_the_api_server_is_not_patched_until_the_next_watch_event() {
    let mut chaos = about_to_publish();
    let known = chaos.world.pods.remove(&key("a/p")).unwrap();
    chaos.serve(1, &mut iter::empty());
    chaos.answer(1);
    assert!(chaos.pass(&mut iter::empty()), "the agent plans no op for the Pod");
    chaos.world.pods.insert(known.key.clone(), known.clone());
    chaos.world.state.apply(Change::Pod(known));
    chaos.settle();
    assert_eq!(chaos.world.published(&key("a/p")).len(), 1);
}

#[test]
fn a_write_that_the_api_server_alters_is_repeated_with_a_delay() {
    let mut chaos = about_to_publish();
    let op = chaos.world.state.writes.keys().next().cloned().map(|uid| Op::WritePod {
        pod: key("a/p"),
        uid,
        value: PodWrite::Set("[a value that a webhook replaces]".to_owned()),
    });
    chaos.world.state.record_done(&op.unwrap(), chaos.world.now);
    let pass = chaos.world.state.pass(chaos.world.now);
    assert!(pass.ops.is_empty(), "{:?}", pass.ops);
    let again = chaos.world.state.pass(pass.next_deadline.unwrap());
    assert!(matches!(&again.ops[..], [Op::WritePod { .. }]), "{:?}", again.ops);
}

#[test]
fn a_forged_mapping_at_a_port_that_was_never_used_is_removed() {
    let mut world = with_service("61000-61001");
    for (name, ip) in [("a/p", "10.0.0.5"), ("a/q", "10.0.0.6"), ("a/waiting_for_port", "10.0.0.7")] {
        world.put_pod(pod(&[name, "app=x", ip], None));
    }
    let mut chaos = Chaos::new(world);
    chaos.pass(&mut iter::empty());
    let reserved = *chaos.world.real.reservations.first().unwrap();
    chaos.meddle(reserved, true);
    chaos.put_pod(pod(&["a/p", "app=y", "10.0.0.5"], chaos.world.pods.get(&key("a/p"))));
    chaos.settle();
    assert!(chaos.world.real.mappings.values().all(|backend| backend.generation != 1), "the forged mapping is removed");
    chaos.wait(MINUTES);
    assert_eq!(chaos.world.published(&key("a/waiting_for_port")).len(), 1);
}

#[test]
fn only_pods_that_a_change_affects_are_decided_again() {
    let mut chaos = about_to_publish();
    for number in 0..1_000 {
        let name = format!("b/off-{number}");
        chaos.world.put_service(service(&[&name, "app=x", "8080/tcp", "off"]));
    }
    chaos.world.put_pod(pod(&["b/p", "app=x", "10.0.0.6"], None));
    chaos.settle();
    let state = &mut chaos.world.state;
    assert!(
        state.dirty.is_empty() && state.unsettled.is_empty() && state.unpublished.is_empty(),
        "every change has been handled"
    );
    state.apply(Change::Service(service(&["b/s", "app=y", "8080/tcp"])));
    assert!(state.dirty.is_empty(), "the Service selects no Pod");
    state.apply(Change::Service(service(&["b/s", "app=x", "8080/tcp"])));
    assert_eq!(state.dirty.iter().collect::<Vec<_>>(), [&key("b/p")]);
}

#[test]
fn the_last_node_port_of_a_pod_is_withdrawn_by_the_op_withdraw() {
    let mut chaos = about_to_publish();
    chaos.settle();
    chaos.world.remove_service(&key("a/s"));
    let ops = chaos.world.state.pass(chaos.world.now).ops;
    assert!(matches!(&ops[..], [Op::WritePod { value: PodWrite::Withdraw, .. }]), "{ops:?}");
}

#[test]
fn a_frontend_that_waits_for_a_timer_is_not_examined_before_the_deadline() {
    let mut world = with_service("61000-61003");
    for (name, ip) in [("a/drains", "10.0.0.5"), ("a/goes", "10.0.0.6")] {
        world.put_pod(pod(&[name, "app=x", ip], None));
    }
    world.start();
    world.settle();
    world.remove_pod(&key("a/goes"));
    world.remove_service(&key("a/s"));
    world.settle();
    let phases: Vec<_> = world.state.mappings().map(|view| view.phase).collect();
    assert!(
        matches!(phases[..], [Phase::Draining { until: Some(_) }, Phase::Quarantined { until: Some(_) }]),
        "{phases:?}"
    );
    assert!(world.state.unsettled.is_empty(), "{:?}", world.state.unsettled);
    world.wait(MINUTES);
    assert_eq!(world.state.mappings().count(), 0);
    assert!(world.state.timers.is_empty() && world.state.unsettled.is_empty(), "{:?}", world.state);
}

#[test]
fn before_the_lists_arrive_the_agent_only_reserves_the_ports_of_mappings() {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.start();
    world.settle();
    let ports: Vec<_> = world.real.mappings.keys().copied().collect();
    // After the first agent has ended and before the second agent starts, another process binds one of the ports.
    world.stolen.insert(ports[1]);
    world.start_without_lists();
    assert_eq!(world.settle(), [ports[0], ports[1]].map(|port| Op::Reserve(port, RecentTraffic::Tolerated)));
    assert_eq!(world.real.reservations, BTreeSet::from([ports[0]]));
    let (kept, moved) = (world.published(&key("a/p")), world.published(&key("a/q")));
    world.list();
    world.settle();
    assert_eq!(world.published(&key("a/p")), kept);
    assert_ne!(world.published(&key("a/q")), moved, "the Pod gets another port after the lists arrive");
    world.assert_published_works();
}

#[test]
fn a_watch_event_that_repeats_an_answer_causes_no_decision() {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.start();
    world.settle();
    let published = world.pods[&key("a/p")].clone();
    assert!(published.annotation.is_some());
    world.state.apply(Change::Pod(published.clone()));
    assert!(world.state.dirty.is_empty());
    world.put_pod(Pod { annotation: None, ..published });
    assert!(!world.state.dirty.is_empty(), "another writer removed the annotation");
}

#[test]
fn a_restored_store_replaces_all_known_pods() {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    let backup = world.pods.clone();
    world.resource_version = 250;
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.start();
    world.settle();
    assert_eq!(world.published(&key("a/p")).len(), 1);
    world.pods = backup;
    world.resource_version = 60;
    world.state.apply(Change::StoreRestored);
    world.list();
    world.settle();
    assert_eq!(world.published(&key("a/p")).len(), 1, "the backup has no annotation, so the agent must write it again");
    assert!(!world.state.mappings().any(|mapping| mapping.pod == Some(&key("a/q")) && mapping.backend.is_some()));
}

/// An address claim from before the restore has a higher resource version than every claim after the restore, but must
/// not count as newer.
#[test]
fn after_a_restore_the_newest_claim_holds_an_address() {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.start();
    world.settle();
    world.resource_version = 1_000_000;
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.settle();
    world.resource_version = 900_000;
    world.pods.values_mut().for_each(|pod| pod.resource_version = 900_000);
    world.state.apply(Change::StoreRestored);
    world.list();
    world.settle();
    world.assert_published_works();
    let former = world.pods[&key("a/q")].clone();
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.5"], Some(&former)));
    world.settle();
    let generations: Vec<_> = world.real.mappings.values().map(|backend| backend.generation).collect();
    assert_eq!(generations, [former.uid.generation()], "only the Pod whose status is current is served");
}

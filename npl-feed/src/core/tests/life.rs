// SPDX-License-Identifier: Apache-2.0
//! Tests when members appear, drain and disappear.

use super::*;
use crate::core::work::{self, Operation};

fn one() -> Pod {
    pod("a", "n1", &annotation(8080, "192.0.2.1", 61000))
}

fn put(state: &mut State, pod: Pod, now: u64) {
    state.apply(Change::Pod(Box::new(pod)), now);
}

#[test]
fn the_state_is_complete_only_after_all_three_lists() {
    let mut state = state();
    state.apply(Change::Pods(Vec::new()), 0);
    state.apply(Change::Services(Vec::new()), 0);
    assert!(!state.is_complete());
    state.apply(Change::Nodes(Vec::new()), 0);
    assert!(state.is_complete());
}

#[test]
fn readiness_and_deletion_are_the_members_condition() {
    let mut state = cluster(vec![one()]);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 ready"]);
    let mut changed = one();
    changed.is_ready = false;
    put(&mut state, changed.clone(), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 not_ready"]);
    changed.object.is_terminating = true;
    put(&mut state, changed.clone(), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 draining"]);
    changed.object.is_finished = true;
    put(&mut state, changed, 0);
    assert_eq!(web(&mut state), Vec::<String>::new());
}

#[test]
fn a_withdrawn_member_drains_for_the_time_of_the_drain() {
    let mut state = cluster(vec![one()]);
    let mut withdrawn = one();
    withdrawn.object.annotation = Some("[]".to_owned());
    put(&mut state, withdrawn.clone(), 1_000);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 draining"]);
    withdrawn.object.annotation = None;
    put(&mut state, withdrawn, 2_000);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 draining"]);
    assert_eq!(state.next_end(), Some(1_000 + DRAIN));
    state.expire(1_000 + DRAIN - 1);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 draining"]);
    state.expire(1_000 + DRAIN);
    assert_eq!((web(&mut state), state.next_end()), (Vec::new(), None));
}

/// A list contains only Pods with the annotation. If a known Pod is absent from a list, its agent may have withdrawn
/// the annotation while the watch was interrupted, so the Pod's members drain. If the feed has already received the
/// withdrawal from the watch, the list does not prolong the drain.
#[test]
fn a_pod_that_a_list_lacks_drains_like_a_withdrawn_one() {
    let withdrawn = Pod { object: model::Pod { annotation: None, ..one().object }, ..one() };
    for (mut state, start) in [(cluster(vec![one()]), 5_000), (cluster(vec![one()]), 1_000)] {
        if start < 5_000 {
            put(&mut state, withdrawn.clone(), start);
        }
        state.apply(Change::Pods(Vec::new()), 5_000);
        assert_eq!(web(&mut state), ["a 192.0.2.1:61000 draining"]);
        assert_eq!(state.next_end(), Some(start + DRAIN), "a list does not prolong the drain");
        state.expire(start + DRAIN);
        assert_eq!((web(&mut state), state.pod_count()), (Vec::new(), 0));
    }
}

#[test]
fn a_pod_that_a_list_lacks_yields_its_node_port_to_a_listed_pod() {
    let mut state = cluster(vec![one()]);
    state.apply(Change::Pods(vec![pod("b", "n1", &annotation(8080, "192.0.2.1", 61000))]), 0);
    assert_eq!((web(&mut state), state.pod_count()), (vec!["b 192.0.2.1:61000 ready".to_owned()], 1));
}

#[test]
fn a_pod_without_annotation_is_kept_only_while_it_drains() {
    let withdrawn = Pod { object: model::Pod { annotation: None, ..one().object }, ..one() };
    for end in [
        |state: &mut State| state.expire(DRAIN),
        |state: &mut State| state.apply(Change::NodeGone("n1".into()), 1),
        |state: &mut State| {
            put(state, pod("b", "n1", &annotation(8080, "192.0.2.1", 61000)), 1);
            state.apply(Change::PodGone(ObjectKey::new("default", "b"), PodUid("b".into())), 1);
        },
    ] {
        let mut state = cluster(vec![one()]);
        put(&mut state, withdrawn.clone(), 0);
        assert_eq!((web(&mut state), state.pod_count()), (vec!["a 192.0.2.1:61000 draining".to_owned()], 1));
        end(&mut state);
        assert_eq!((web(&mut state), state.pod_count()), (Vec::new(), 0));
    }
}

/// While many Pods drain, each further change visits only the affected Pods.
#[test]
fn the_work_of_a_mass_withdrawal_grows_with_the_number_of_pods() {
    let visits = |pods: u16| {
        let all = (0..pods).map(|number| {
            let own = format!("192.0.2.{}", 1 + number % 2);
            pod(&format!("web-{number}"), &format!("n{}", 1 + number % 2), &annotation(8080, &own, 61000 + number / 2))
        });
        let all: Vec<Pod> = all.collect();
        let mut state = cluster(all.clone());
        work::during(Operation::Visit, || {
            for (mut pod, now) in all.into_iter().zip(0..) {
                state.expire(now);
                pod.object.annotation = None;
                put(&mut state, pod, now);
                assert_eq!(state.next_end(), Some(DRAIN));
            }
            assert_eq!(web(&mut state).len(), usize::from(pods));
            state.expire(2 * DRAIN);
            assert_eq!((web(&mut state).len(), state.pod_count()), (0, 0));
        })
    };
    let (few, many) = (visits(100), visits(1000));
    assert!(few >= 100 && many <= 10 * few, "100 Pods: {few} visits, 1000 Pods: {many} visits");
}

#[test]
fn a_node_port_that_gets_another_pod_port_does_not_drain() {
    let mut state = cluster(vec![one()]);
    put(&mut state, pod("a", "n1", &annotation(9090, "192.0.2.1", 61000)), 0);
    assert_eq!((web(&mut state), state.next_end()), (Vec::new(), None));
}

#[test]
fn a_node_port_that_returns_or_that_another_pod_gets_does_not_drain() {
    let mut state = cluster(vec![one()]);
    let mut withdrawn = one();
    withdrawn.object.annotation = Some("[]".to_owned());
    put(&mut state, withdrawn.clone(), 0);
    put(&mut state, one(), 1);
    assert_eq!((web(&mut state), state.next_end()), (vec!["a 192.0.2.1:61000 ready".to_owned()], None));
    put(&mut state, withdrawn, 2);
    put(&mut state, pod("b", "n1", &annotation(8080, "192.0.2.1", 61000)), 3);
    assert_eq!(web(&mut state), ["b 192.0.2.1:61000 ready"]);
}

#[test]
fn a_deleted_pod_does_not_drain() {
    let mut state = cluster(vec![one()]);
    assert_eq!(web(&mut state).len(), 1);
    state.apply(Change::PodGone(ObjectKey::new("default", "a"), PodUid("other".into())), 0);
    assert_eq!(web(&mut state).len(), 1, "the deletion of another Pod with the same name must change nothing");
    state.apply(Change::PodGone(ObjectKey::new("default", "a"), PodUid("a".into())), 0);
    assert_eq!(web(&mut state), Vec::<String>::new());
}

#[test]
fn only_active_services_have_ports() {
    let mut state = cluster(vec![one()]);
    assert_eq!(web(&mut state).len(), 1);
    for change in [
        |service: &mut Service| service.object.is_enabled = false,
        |service: &mut Service| service.object.service_type = ServiceType::NodePort,
        |service: &mut Service| service.object.selector = BTreeMap::new(),
    ] {
        let mut changed = service("web", 8080);
        change(&mut changed);
        state.apply(Change::Service(Box::new(changed)), 0);
        assert!(state.refresh().is_some_and(|snapshot| snapshot.groups().next().is_none()));
        state.apply(Change::Service(Box::new(service("web", 8080))), 0);
        assert_eq!(web(&mut state).len(), 1);
    }
}

#[test]
fn only_the_targeted_port_and_the_families_of_the_service_are_served() {
    let both = r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"},
                   {"podPort":8080,"nodeIP":"2001:db8::1","nodePort":61000,"protocol":"tcp","ipFamily":"IPv6"},
                   {"podPort":9090,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"tcp"},
                   {"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61002,"protocol":"udp"}]"#;
    let mut state = cluster(vec![pod("a", "n1", both)]);
    let mut dual = node("n1", "192.0.2.1", "");
    dual.object.internal_ips.push("2001:db8::1".parse().unwrap());
    state.apply(Change::Node(dual), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 ready"]);
    let mut changed = service("web", 8080);
    changed.object.families = vec![Family::V4, Family::V6];
    state.apply(Change::Service(Box::new(changed)), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 ready", "a 2001:db8::1:61000 ready"]);
}

#[test]
fn a_port_is_found_by_name_and_by_number() {
    let snapshot = snapshot(vec![one()]);
    assert!(snapshot.port("default", "web", "http").is_some());
    assert_eq!(snapshot.port("default", "web", "80"), snapshot.port("default", "web", "http"));
    assert!(snapshot.port("default", "web", "81").is_none());
    assert!(snapshot.port("default", "we", "http").is_none());
    assert!(snapshot.port("other", "web", "http").is_none());
}

#[test]
fn an_unchanged_cluster_gives_no_snapshot() {
    let mut state = cluster(vec![one()]);
    assert!(state.refresh().is_some());
    let mut same = one();
    same.object.resource_version = 2;
    put(&mut state, same, 0);
    state.apply(Change::Services(vec![service("web", 8080)]), 0);
    assert!(state.refresh().is_none());
}

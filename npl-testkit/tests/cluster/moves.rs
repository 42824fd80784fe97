// SPDX-License-Identifier: Apache-2.0
//! Workloads that move under load.

use std::collections::BTreeSet;
use std::time::Duration;

use npl_testkit::poll;

use crate::load::{self, NAMESPACE, Under};
use crate::world::{LIMIT, World};

/// Pods of a workload that is scaled up.
const MANY: usize = 40;

/// How late a consumer may be that collects events for a while: less than the time for which Pods drain.
const LATE: Duration = Duration::from_secs(2);

fn names(world: &World, app: &str) -> BTreeSet<String> {
    world.pods(NAMESPACE, &format!("app={app}")).into_iter().map(|pod| pod.name).collect()
}

pub(crate) fn a_rolling_update_loses_nothing(world: &mut World) {
    let mut before = BTreeSet::new();
    let report = Under::default().load(world, |world| {
        before = names(world, "web");
        load::renew(world, "deployment/web");
    });
    let after = names(world, "web");
    assert!(before.is_disjoint(&after), "every Pod is another: {before:?}, {after:?}");
    assert!(before.iter().all(|pod| report.pods.contains_key(pod)), "{:?}", report.pods);
}

pub(crate) fn pods_of_the_same_names_are_replaced_under_a_balancer_that_is_late(world: &mut World) {
    let uids =
        |world: &World| world.pods(NAMESPACE, "app=store").into_iter().map(|pod| pod.uid).collect::<BTreeSet<_>>();
    let (mut before, mut named) = (BTreeSet::new(), BTreeSet::new());
    Under { delay: LATE }.load(world, |world| {
        (before, named) = (uids(world), names(world, "store"));
        load::renew(world, "statefulset/store");
    });
    assert_eq!(names(world, "store"), named);
    assert!(before.is_disjoint(&uids(world)), "every Pod is another");
    println!("    for {} s after a Pod's end was known, requests still went to it", LATE.as_secs());
}

pub(crate) fn forty_pods_come_and_go(world: &mut World) {
    let scale = |world: &World, count: usize| {
        let replicas = format!("--replicas={count}");
        world.kubectl(&["scale", "deployment/elastic", &replicas, "--namespace", NAMESPACE]);
        let is_scaled = || (names(world, "elastic").len() == count).then_some(());
        poll::until("as many Pods as wanted", LIMIT, is_scaled).unwrap();
        world.wait_for_rollout(NAMESPACE, "deployment/elastic");
    };
    let report = Under::default().load(world, |world| {
        scale(world, MANY);
        // Every one of them is to be asked before it goes.
        let annotated = || {
            let pods = load::pods(world);
            pods.iter().all(|pod| pod.is_ready && pod.annotation.is_some()).then_some(())
        };
        poll::until("forty Pods with annotations", LIMIT, annotated).unwrap();
        scale(world, 1);
    });
    assert!(report.pods.len() >= MANY, "Pods that answered: {}", report.pods.len());
}

pub(crate) fn a_node_is_drained_and_comes_back(world: &mut World) {
    Under::default().load(world, |world| {
        let on_node = |world: &World| load::pods(world).iter().filter(|pod| pod.node == "node-2").count();
        // Where a scheduler has put few of them there, it is asked again.
        for _ in 0..5 {
            if on_node(world) <= 2 {
                load::renew(world, "deployment/web");
            }
        }
        assert!(on_node(world) > 2, "more Pods than may be evicted at once");
        world.kubectl(&["drain", "node-2", "--ignore-daemonsets", "--timeout=60s"]);
        assert_eq!(on_node(world), 0);
        world.kubectl(&["uncordon", "node-2"]);
        load::renew(world, "deployment/web");
        assert!(on_node(world) > 0, "a Node that is back has Pods");
    });
}

pub(crate) fn a_container_that_crashes_beside_disturbs_nobody(world: &mut World) {
    let crashing = r#"[{"op": "add", "path": "/spec/template/spec/containers/-",
        "value": {"name": "crashing", "image": "localhost/npl-echo:0.1.0", "args": ["--no-such-flag"]}}]"#;
    let whole = r#"[{"op": "remove", "path": "/spec/template/spec/containers/1"}]"#;
    let patch = |world: &World, change: &str| {
        let words = ["patch", "deployment/elastic", "--namespace", NAMESPACE, "--type=json", "--patch", change];
        world.kubectl(&words);
    };
    Under::default().load(world, |world| {
        patch(world, crashing);
        let restarts = || {
            let words = ["get", "pods", "--namespace", NAMESPACE, "--selector", "app=elastic", "--output"];
            let counts = "jsonpath={.items[*].status.containerStatuses[?(@.name==\"crashing\")].restartCount}";
            let shown = world.kubectl(&[&words[..], &[counts]].concat());
            shown.split_whitespace().any(|count| count.parse::<u32>().is_ok_and(|count| count >= 2)).then_some(())
        };
        poll::until("a container that has crashed again", LIMIT, restarts).unwrap();
        // It has an address and an annotation, and is ready for no longer than the container takes to crash.
        let is_published =
            || load::pods(world).iter().any(|pod| !pod.is_ready && pod.annotation.is_some()).then_some(());
        poll::until("the annotation of the Pod that is not ready", LIMIT, is_published).unwrap();
        patch(world, whole);
        world.wait_for_rollout(NAMESPACE, "deployment/elastic");
    });
}

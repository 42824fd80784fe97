// SPDX-License-Identifier: Apache-2.0
//! Updates, scales and reschedules workloads under load.

use std::collections::BTreeSet;
use std::time::Duration;

use npl_testkit::cluster::timeout_option;
use npl_testkit::poll;

use crate::load::{self, NAMESPACE, Under};
use crate::world::{LIMIT, World};

/// The number of Pods to which the workload `elastic` is scaled.
const MANY: usize = 40;

/// The delay of a load balancer that collects changes before it applies them. The delay is shorter than the time for
/// which a terminating Pod still answers, so no request may be lost.
const LATE: Duration = Duration::from_secs(2);

fn names(world: &World, app: &str) -> BTreeSet<String> {
    world.pods(NAMESPACE, &format!("app={app}")).into_iter().map(|pod| pod.name).collect()
}

pub(crate) fn a_rolling_update_loses_no_request(world: &mut World) {
    let mut before = BTreeSet::new();
    let report = Under::default().load(world, |world| {
        before = names(world, "web");
        load::renew(world, "deployment/web");
    });
    let after = names(world, "web");
    assert!(before.is_disjoint(&after), "every Pod must be replaced: {before:?}, {after:?}");
    assert!(before.iter().all(|pod| report.pods.contains_key(pod)), "{:?}", report.pods);
}

pub(crate) fn pods_are_replaced_under_the_same_names_with_a_delayed_balancer(world: &mut World) {
    let uids =
        |world: &World| world.pods(NAMESPACE, "app=store").into_iter().map(|pod| pod.uid).collect::<BTreeSet<_>>();
    let (mut before, mut named) = (BTreeSet::new(), BTreeSet::new());
    Under { delay: LATE, ..Under::default() }.load(world, |world| {
        (before, named) = (uids(world), names(world, "store"));
        load::renew(world, "statefulset/store");
    });
    assert_eq!(names(world, "store"), named);
    assert!(before.is_disjoint(&uids(world)), "every Pod must be replaced");
    println!("    each terminating Pod still received requests for {} s", LATE.as_secs());
}

/// Scales the workload `elastic` and waits until its Pods are ready.
pub(crate) fn scale(world: &World, count: usize) {
    let replicas = format!("--replicas={count}");
    world.kubectl(&["scale", "deployment/elastic", &replicas, "--namespace", NAMESPACE]);
    let is_scaled = || (names(world, "elastic").len() == count).then_some(());
    poll::until(&format!("{count} Pods"), LIMIT, is_scaled).unwrap();
    world.wait_for_rollout(NAMESPACE, "deployment/elastic");
}

pub(crate) fn forty_pods_are_created_and_deleted(world: &mut World) {
    let report = Under::default().load(world, |world| {
        scale(world, MANY);
        // Delete the Pods only after every Pod is ready and has an annotation, so that the balancer can send requests
        // to all of them.
        let annotated = || {
            let pods = load::pods(world);
            pods.iter().all(|pod| pod.is_ready && pod.annotation.is_some()).then_some(())
        };
        poll::until("forty annotated Pods", LIMIT, annotated).unwrap();
        scale(world, 1);
    });
    assert!(report.pods.len() >= MANY, "only {} Pods responded", report.pods.len());
}

/// Drains a Node that has Pods under load, and makes it schedulable again.
pub(crate) fn drain(world: &World) {
    let on_node = |world: &World| load::pods(world).iter().filter(|pod| pod.node == "node-2").count();
    // Repeat the rollout if the scheduler has placed too few Pods on the Node.
    for _ in 0..5 {
        if on_node(world) <= 2 {
            load::renew(world, "deployment/web");
        }
    }
    assert!(on_node(world) > 2, "the Node must have more Pods than may be evicted at the same time");
    world.kubectl(&["drain", "node-2", "--ignore-daemonsets", timeout_option()]);
    assert_eq!(on_node(world), 0);
    world.kubectl(&["uncordon", "node-2"]);
}

pub(crate) fn a_node_is_drained_and_uncordoned(world: &mut World) {
    Under::default().load(world, |world| {
        drain(world);
        load::renew(world, "deployment/web");
        let has_pods = load::pods(world).iter().any(|pod| pod.node == "node-2");
        assert!(has_pods, "the uncordoned Node must have Pods");
    });
}

pub(crate) fn a_crashing_container_affects_no_other_pod(world: &mut World) {
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
        poll::until("repeated crashes of the container", LIMIT, restarts).unwrap();
        // Wait for the annotation only: the Pod becomes ready only briefly between crashes.
        let is_published =
            || load::pods(world).iter().any(|pod| !pod.is_ready && pod.annotation.is_some()).then_some(());
        poll::until("the annotation of the unready Pod", LIMIT, is_published).unwrap();
        patch(world, whole);
        world.wait_for_rollout(NAMESPACE, "deployment/elastic");
    });
}

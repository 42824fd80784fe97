// SPDX-License-Identifier: Apache-2.0
//! Measures the time between annotation and readiness, because some consumers read the annotation only when a Pod
//! becomes ready. With the readiness gate in the Pod template, no Pod is ready before it is annotated. Without the
//! gate, Pods may be ready earlier. See `docs/design/0005-readiness-gate.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use npl_testkit::echo::Protocol;
use npl_testkit::real_cluster::publication::{Seen, watch_pods};
use npl_testkit::tools;

use crate::clients;
use crate::world::World;

const NAMESPACE: &str = "crowd";
const PODS: usize = 200;

/// The test fails if the numbers of ready and of annotated Pods do not change for this time. All 200 Pods become ready
/// within one to two minutes on two idle processors.
const CROWD_LIMIT: Duration = Duration::from_mins(3);

pub(crate) fn two_hundred_pods_at_once_are_published_before_they_are_ready(world: &mut World) {
    let crowd = watch_crowd(world);
    let annotated = crowd.values().filter(|seen| seen.annotated.is_some()).count();
    let ready = crowd.values().filter(|seen| seen.ready.is_some()).count();
    assert_eq!(
        (annotated, ready),
        (PODS, PODS),
        "the numbers of annotated and of ready Pods, {} s after the last change of either number",
        CROWD_LIMIT.as_secs()
    );
    tell("time from address to annotation", crowd.values().filter_map(Seen::delay));
    tell("time from annotation to readiness", crowd.values().filter_map(Seen::margin));
    let late: Vec<&String> = crowd.iter().filter(|(_, seen)| seen.margin().is_none()).map(|(name, _)| name).collect();
    assert!(late.is_empty(), "Pods that were ready before they were annotated: {late:?}");

    let outside = clients::outside(world);
    for (name, seen) in &crowd {
        let answer = outside.ask(Protocol::Tcp, seen.frontend.unwrap()).unwrap();
        assert_eq!(&answer.pod, name);
    }
}

/// Creates the Pods and watches them until all are ready and annotated.
fn watch_crowd(world: &World) -> BTreeMap<String, Seen> {
    let manifest = tools::repository_file("npl-testkit/tests/cluster/manifests/crowd.yaml");
    let make = || {
        world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
        Ok(())
    };
    watch_pods(world.cluster.cluster().client(), NAMESPACE, "app=crowd", PODS, CROWD_LIMIT, make).unwrap()
}

fn tell(what: &str, times: impl Iterator<Item = Duration>) {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |share: usize| times.get(share * times.len().saturating_sub(1) / 100).copied().unwrap_or_default();
    let [min, median, most, max] = [0, 50, 99, 100].map(|share| at(share).as_millis());
    println!("    {what}: {} Pods, minimum {min} ms, median {median} ms, p99 {most} ms, maximum {max} ms", times.len());
}

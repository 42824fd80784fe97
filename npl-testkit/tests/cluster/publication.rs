// SPDX-License-Identifier: Apache-2.0
//! How much earlier than readiness the annotation is there: some consumers look when a Pod becomes ready, and never
//! again. With the gate in its template, no Pod is ready before; without it, nobody could promise that: see
//! `docs/design/0005-publication-and-readiness.md`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Entry, MAPPING_ANNOTATION};
use npl_testkit::echo::Protocol;
use npl_testkit::real_cluster::is_ready;
use npl_testkit::tools;
use serde_json::Value;

use crate::clients;
use crate::world::World;

const NAMESPACE: &str = "crowd";
const PODS: usize = 200;

/// Two processors start 200 containers within a minute or two.
const CROWD_LIMIT: Duration = Duration::from_mins(4);

/// What a watch showed of one Pod, and when.
#[derive(Clone, Debug, Default)]
struct Seen {
    addressed: Option<Instant>,
    annotated: Option<Instant>,
    ready: Option<Instant>,
    frontend: Option<SocketAddr>,
}

pub(crate) fn two_hundred_pods_at_once_are_published_before_they_are_ready(world: &mut World) {
    let crowd = watch_crowd(world);
    let annotated = crowd.values().filter(|seen| seen.annotated.is_some()).count();
    let ready = crowd.values().filter(|seen| seen.ready.is_some()).count();
    assert_eq!((annotated, ready), (PODS, PODS), "annotated and ready Pods after {} s", CROWD_LIMIT.as_secs());
    tell("from address to annotation", crowd.values().filter_map(|seen| Some(seen.annotated? - seen.addressed?)));
    let earlier = |seen: &Seen| seen.ready?.checked_duration_since(seen.annotated?).filter(|margin| !margin.is_zero());
    tell("annotated ahead of readiness", crowd.values().filter_map(earlier));
    let late: Vec<&String> = crowd.iter().filter(|(_, seen)| earlier(seen).is_none()).map(|(name, _)| name).collect();
    assert!(late.is_empty(), "ready before they were annotated: {late:?}");

    let outside = clients::outside(world);
    for (name, seen) in &crowd {
        let answer = outside.ask(Protocol::Tcp, seen.frontend.unwrap()).unwrap();
        assert_eq!(&answer.pod, name);
    }
}

/// Makes the crowd, and watches it until all of it is ready and annotated.
fn watch_crowd(world: &World) -> BTreeMap<String, Seen> {
    let manifest = tools::repository_file("npl-testkit/tests/cluster/manifests/crowd.yaml");
    let client = world.cluster.cluster().client();
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    let version = client.get(&path).unwrap()["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut crowd = BTreeMap::new();
            let path = format!("{path}?resourceVersion={version}");
            let watched = client.watch(&path, CROWD_LIMIT, |event| {
                record(&mut crowd, &event["object"]);
                crowd.values().filter(|seen| seen.ready.is_some() && seen.annotated.is_some()).count() < PODS
            });
            watched.map(|()| crowd)
        });
        world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
        watching.join().unwrap().unwrap()
    })
}

fn record(crowd: &mut BTreeMap<String, Seen>, pod: &Value) {
    let now = Instant::now();
    let Some(name) = pod.pointer("/metadata/name").and_then(Value::as_str) else { return };
    let seen = crowd.entry(name.to_owned()).or_default();
    if pod.pointer("/status/podIP").is_some() {
        seen.addressed.get_or_insert(now);
    }
    // A change that shows both at once does not show the annotation first.
    if is_ready(pod) {
        seen.ready.get_or_insert(now);
    }
    let annotation = pod.pointer("/metadata/annotations").and_then(|all| all[MAPPING_ANNOTATION].as_str());
    if let Some([entry]) = annotation.and_then(|text| Entry::parse(text).ok()).as_deref() {
        seen.annotated.get_or_insert(now);
        seen.frontend = Some(entry.address());
    }
}

fn tell(what: &str, times: impl Iterator<Item = Duration>) {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |share: usize| times.get(share * times.len().saturating_sub(1) / 100).copied().unwrap_or_default();
    let [min, median, most, max] = [0, 50, 99, 100].map(|share| at(share).as_millis());
    println!(
        "    {what}: {} Pods, {min} ms at least, {median} ms median, {most} ms p99, {max} ms at most",
        times.len()
    );
}

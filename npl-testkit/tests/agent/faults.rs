// SPDX-License-Identifier: Apache-2.0
//! Tests faults of the API server and of the connection to it. After each fault, the agent reaches the desired state
//! with the minimum number of writes; unaffected Pods are served without interruption.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use npl_testkit::cluster::{PodObject, Port, ServiceObject};
use npl_testkit::control_plane::AGENT_USER;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Load};
use serde_json::{Value, json};

use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

/// A Pod that is served before the fault, with a load that must not be affected.
pub(crate) struct Bystander {
    load: Load,
    node_ports: Vec<Value>,
}

const BYSTANDER: &str = "bystander";

/// The duration of the API server's outage.
const AWAY: Duration = Duration::from_mins(1);

impl Bystander {
    pub(crate) fn begin(world: &mut World) -> Self {
        world.create_service();
        Self::begin_with(world)
    }

    /// Begins the load as [`Self::begin`] does, with an existing Service.
    fn begin_with(world: &mut World) -> Self {
        world.enable_service();
        world.create_pod(BYSTANDER);
        world.assert_served(BYSTANDER);
        let load = Load::start(&world.topology.client().netns, 100, world.load_requests(&[BYSTANDER]));
        Self { load, node_ports: node_ports(world) }
    }

    /// Verifies that each request of the load was answered, that the node ports are unchanged, and that the agent has
    /// not written to the Pod again.
    pub(crate) fn end(self, world: &World) {
        // Wait for enough requests, because the fault may have lasted less than a tenth of a second.
        let has_run = || (self.load.report().total() > 20).then_some(());
        poll::until("requests of the load", LIMIT, has_run).unwrap();
        assert_eq!(self.load.stop().failures, []);
        assert_eq!(node_ports(world), self.node_ports);
        assert_eq!(world.writes(BYSTANDER), 1, "{:?}", world.annotations.history(BYSTANDER));
    }
}

impl World {
    /// Waits until the watch of Pods has failed to connect `times` times. The duration depends only on the agent's
    /// back-off.
    fn wait_for_unreachable(&mut self, times: u64) {
        const LABELS: &str = r#"npl_watch_errors_total{subject="pods",kind="unreachable"} "#;
        let limit = LIMIT + Duration::from_mins(2);
        let agent = self.agent();
        let count = |text: String| text.lines().find_map(|line| line.strip_prefix(LABELS)?.parse::<u64>().ok());
        let is_reached = || (agent.metrics().ok().and_then(count)? >= times).then_some(());
        poll::until("the agent to retry the connection to the API server", limit, is_reached).unwrap();
    }
}

/// Returns the node ports of the bystander's mappings.
fn node_ports(world: &World) -> Vec<Value> {
    let pod = world.topology.pods().iter().find(|pod| pod.name == BYSTANDER).unwrap();
    let leads_there = |mapping: &&Value| mapping["podIp"] == pod.ip().to_string();
    world.kernel_mappings().iter().filter(leads_there).map(|mapping| mapping["nodePort"].clone()).collect()
}

#[test]
fn changes_during_an_api_server_outage_are_applied_afterwards() {
    let mut world = World::behind_proxy(&[]);
    world.create_service();
    world.create_pod("goes");
    let bystander = Bystander::begin_with(&mut world);
    world.assert_served("goes");
    world.proxy().close();
    world.delete_pod("goes");
    world.create_pod("comes");
    world.wait_for_log("is interrupted: the agent retries");
    world.assert_served(BYSTANDER);
    assert_eq!(world.writes("comes"), 0);
    world.proxy().open();
    world.assert_served("comes");
    world.wait_for_kernel_mappings(4);
    assert_eq!((world.writes("goes"), world.writes("comes")), (1, 1));
    bystander.end(&world);
}

#[test]
fn an_api_server_outage_of_a_minute_causes_no_write() {
    let mut world = World::with_own_plane();
    world.create_node();
    world.start_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    world.own_plane().stop_api_server().unwrap();
    let stopped = Instant::now();
    // The back-off doubles with each failure; after nine failures, it has reached its maximum of ten seconds.
    world.wait_for_unreachable(9);
    poll::until("a minute to pass", AWAY, || (stopped.elapsed() >= AWAY).then_some(())).unwrap();
    world.own_plane().start_api_server().unwrap();
    world.annotations = world.cluster.watch_mappings(NAMESPACE, Duration::from_mins(10)).unwrap();
    world.wait_for_log("watch has recovered");
    world.create_pod("web-1");
    world.assert_served("web-1");
    bystander.end(&world);
}

#[test]
fn interrupted_watches_miss_no_change() {
    let mut world = World::behind_proxy(&[]);
    let bystander = Bystander::begin(&mut world);
    let pods = ["web-1", "web-2", "web-3", "web-4"];
    for pod in pods {
        world.create_pod(pod);
        world.proxy().cut();
    }
    for pod in pods {
        world.assert_served(pod);
        assert_eq!(world.writes(pod), 1, "{pod}: {:?}", world.annotations.history(pod));
    }
    bystander.end(&world);
}

/// A proxy whose API server has disappeared still acknowledges the agent's TCP segments, so TCP keep-alive does not
/// detect this fault. The agent must detect the fault and open new connections.
#[test]
fn connections_whose_data_a_proxy_swallows_are_replaced_within_half_a_minute() {
    let mut world = World::behind_proxy(&[]);
    let bystander = Bystander::begin(&mut world);
    world.proxy().swallow();
    let (swallowed, limit) = (Instant::now(), Duration::from_secs(30));
    let limit_before = poll::extended(limit);
    world.wait_for_log("watch of pods is interrupted");
    let (noticed, limit) = (swallowed.elapsed(), poll::extended(limit).max(limit_before));
    assert!(noticed <= limit, "the agent noticed the dead connection after {noticed:?}, later than {limit:?}");
    world.create_pod("web-1");
    world.assert_served("web-1");
    bystander.end(&world);
}

#[test]
fn an_expired_watch_restarts_from_a_list() {
    let mut world = World::with_own_plane().through_proxy();
    world.start_agent(&[]);
    world.create_service();
    world.create_pod("goes");
    let bystander = Bystander::begin_with(&mut world);
    world.assert_served("goes");
    world.proxy().close();
    world.delete_pod("goes");
    world.create_pod("comes");
    // The agent's watches expire, because the API server no longer has the revision from which the agent resumes: the
    // compaction removes this revision from etcd, and the restart empties the watch cache.
    world.own_plane().compact().unwrap();
    world.own_plane().stop_api_server().unwrap();
    world.own_plane().start_api_server().unwrap();
    world.annotations = world.cluster.watch_mappings(NAMESPACE, Duration::from_mins(10)).unwrap();
    world.proxy().open();
    world.assert_served("comes");
    world.wait_for_kernel_mappings(4);
    let metrics = world.agent().metrics().unwrap();
    assert!(metrics.contains(r#"npl_watch_errors_total{subject="pods",kind="expired"}"#), "{metrics}");
    bystander.end(&world);
}

/// The number of writes between the backup and its restoration. The agent detects the restoration by the lower revision
/// of the restored store. Without these writes, this revision would soon reach the revision at which the agent's
/// watches ended.
const WRITES: usize = 250;
/// The time within which an agent follows a restored store, extended on slow machines: the agent's back-off is at most
/// ten seconds, and two attempts may fail.
const RESTORED_WITHIN: Duration = Duration::from_secs(40);

#[test]
fn an_etcd_restored_from_a_backup_is_followed_within_seconds() {
    let mut world = World::with_own_plane();
    world.create_node();
    world.start_agent(&["--drain", "1s", "--quarantine", "1s"]);
    world.serve(&["a"]);
    let address_of =
        |world: &World, name: &str| world.topology.pods().iter().find(|pod| pod.name == name).unwrap().ip().to_string();
    world.own_plane().back_up_etcd().unwrap();
    // Only the object of `a` is deleted. The Pod's network and server stay, because `a` exists again after the
    // restoration.
    world.cluster.delete_pod(NAMESPACE, "a").unwrap();
    world.wait_for_kernel_mappings(0);
    world.create_pod("b");
    world.assert_served("b");
    let (a, b) = (address_of(&world, "a"), address_of(&world, "b"));
    let lost = world.address("b", Protocol::Tcp);
    for number in 0..WRITES {
        let annotation = json!({"metadata": {"annotations": {"example.org/number": number.to_string()}}});
        world.cluster.client().merge_patch(&format!("/api/v1/nodes/{NODE}"), &annotation).unwrap();
    }
    world.own_plane().restore_etcd().unwrap();
    let mapped = |world: &World| -> Vec<String> {
        world.kernel_mappings().iter().map(|mapping| mapping["podIp"].as_str().unwrap().to_owned()).collect()
    };
    let is_restored = || (mapped(&world) == [a.clone(), a.clone()]).then_some(());
    let waited = poll::until("the mappings of the restored store", RESTORED_WITHIN, is_restored);
    assert!(waited.is_ok(), "{waited:?}: {:?}; {a} is restored, and {b} is not", mapped(&world));
    world.annotations = world.cluster.watch_mappings(NAMESPACE, Duration::from_mins(10)).unwrap();
    world.assert_served("a");
    // `b` must not answer at its node port: the connection fails, unless the node port now belongs to `a`.
    let answer = traffic::tcp_request(&world.topology.client().netns, lost, "who?");
    assert!(answer.as_ref().is_ok_and(|answer| answer.pod == "a") || answer.is_err(), "{answer:?}");
    world.create_pod("c");
    world.assert_served("c");
    world.wait_for_metric(r#"npl_watch_errors_total{subject="pods",kind="restored"} 1"#);
}

#[test]
fn requests_rejected_by_an_overloaded_api_server_are_retried() {
    let mut world = World::with_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    let flow = "/apis/flowcontrol.apiserver.k8s.io/v1";
    let level = json!({
        "metadata": {"name": "nothing"},
        "spec": {"type": "Limited", "limited": {"nominalConcurrencyShares": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}},
    });
    let schema = json!({
        "metadata": {"name": "agent"},
        "spec": {
            "priorityLevelConfiguration": {"name": "nothing"},
            "matchingPrecedence": 2,
            "rules": [{
                "subjects": [{"kind": "User", "user": {"name": AGENT_USER}}],
                "resourceRules": [{"verbs": ["patch"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"]}],
            }],
        },
    });
    world.cluster.client().create(&format!("{flow}/prioritylevelconfigurations"), &level).unwrap();
    world.cluster.client().create(&format!("{flow}/flowschemas"), &schema).unwrap();
    let levels = || world.cluster.client().text("/debug/api_priority_and_fairness/dump_priority_levels").unwrap();
    poll::until("the API server to apply the priority level", LIMIT, || levels().contains("nothing").then_some(()))
        .unwrap();
    // The API server rejects requests of the agent, because the priority level admits one request at a time, and the
    // agent sends up to eight.
    let crowd: Vec<String> = (1..=40).map(|number| format!("crowd-{number}")).collect();
    for (pod, last) in crowd.iter().zip(1..) {
        world.cluster.create_pod(&PodObject::new(NAMESPACE, pod, NODE, "crowd")).unwrap();
        world.cluster.set_pod_running(NAMESPACE, pod, world.node_ip(), &[IpAddr::from([10, 99, 0, last])]).unwrap();
    }
    let port = Port::new("http", 80, Protocol::Tcp).to(POD_PORT);
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "crowd", "crowd", vec![port]).enabled()).unwrap();
    for pod in &crowd {
        world.wait_for_entries(pod, 1);
        assert_eq!(world.writes(pod), 1);
    }
    let metrics = world.agent().metrics().unwrap();
    assert!(metrics.contains(r#"npl_annotation_patches_total{outcome="unavailable"}"#), "{metrics}");
    bystander.end(&world);
}

#[test]
fn a_failed_patch_is_retried() {
    let mut world = World::with_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    let hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    let broken = json!({
        "metadata": {"name": "broken"},
        "webhooks": [{
            "name": "broken.example.org",
            "clientConfig": {"url": "https://127.0.0.1:1/"},
            "rules": [{"operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/status"]}],
            "matchConditions": [{"name": "agent", "expression": format!("request.userInfo.username == '{AGENT_USER}'")}],
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": 1,
        }],
    });
    world.cluster.client().create(hooks, &broken).unwrap();
    let mut number = 0;
    let refused = || {
        number += 1;
        world.create_pod(&format!("web-{number}"));
        let metrics = world.agent().metrics().ok()?;
        metrics.contains(r#"npl_annotation_patches_total{outcome="unavailable"}"#).then_some(())
    };
    poll::until("a failed patch", LIMIT, refused).unwrap();
    world.cluster.client().delete(&format!("{hooks}/broken")).unwrap();
    for pod in (1..=number).map(|number| format!("web-{number}")) {
        world.assert_served(&pod);
        assert_eq!(world.writes(&pod), 1);
    }
    bystander.end(&world);
}

#[test]
fn a_slow_api_server_receives_each_write_once() {
    let mut world = World::behind_proxy(&[]);
    let bystander = Bystander::begin(&mut world);
    world.proxy().delay(Duration::from_millis(400));
    for pod in ["web-1", "web-2", "web-3"] {
        world.create_pod(pod);
    }
    for pod in ["web-1", "web-2", "web-3"] {
        world.assert_served(pod);
        assert_eq!(world.writes(pod), 1);
    }
    world.delete_pod("web-2");
    world.wait_for_kernel_mappings(6);
    bystander.end(&world);
}

#[test]
fn revoked_permissions_change_nothing_until_they_are_restored() {
    let mut world = World::behind_proxy(&[]);
    let bystander = Bystander::begin(&mut world);
    world.cluster.kubectl(&["delete", "clusterrole", "npl-agent"]).unwrap();
    world.wait_until_denied("watch", "", "pods");
    world.cut_until_logged("may not list and watch pods: apply deploy/npl.yaml", 0);
    world.create_pod("web-1");
    world.assert_served(BYSTANDER);
    world.cluster.apply_access(&crate::world::manifest()).unwrap();
    world.assert_served("web-1");
    assert_eq!(world.writes("web-1"), 1);
    bystander.end(&world);
}

#[test]
fn a_pod_that_others_update_continuously_is_written_once() {
    let mut world = World::with_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    let (client, path) = (world.cluster.client().clone(), format!("/api/v1/namespaces/{NAMESPACE}/pods/web-1"));
    world.create_unready_pod("web-1");
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for number in 0..100 {
                let patch = json!({"metadata": {"annotations": {"example.org/number": number.to_string()}}});
                client.merge_patch(&path, &patch).unwrap();
            }
        });
        world.assert_served("web-1");
        writer.join().unwrap();
    });
    assert_eq!(world.writes("web-1"), 1);
    bystander.end(&world);
}

#[test]
fn a_service_toggled_a_hundred_times_ends_in_its_original_state() {
    let mut world = World::with_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    let before = world.wait_for_entries(BYSTANDER, 2);
    for number in 0..100 {
        world.cluster.set_service_enabled(NAMESPACE, "web", number % 2 == 1).unwrap();
    }
    // The annotation of another Pod shows that the agent has processed all earlier changes.
    world.create_pod("web-1");
    world.assert_served("web-1");
    assert_eq!(world.wait_for_entries(BYSTANDER, 2), before);
    assert_eq!(bystander.load.stop().failures, []);
    assert!(world.writes(BYSTANDER) <= 1 + 100 * 2, "{}", world.writes(BYSTANDER));
    assert_eq!(world.writes("web-1"), 1);
}

#[test]
fn five_hundred_pods_created_and_deleted_at_once_are_each_written_once() {
    let mut world = World::with_agent(&[]);
    let bystander = Bystander::begin(&mut world);
    let node_ip = world.node_ip();
    let name = |number: u32| format!("crowd-{number}");
    let cluster = &world.cluster;
    let in_parallel = |work: &(dyn Fn(u32) + Sync)| {
        thread::scope(|scope| {
            for first in 0..4 {
                scope.spawn(move || (first..500).step_by(4).for_each(work));
            }
        });
    };
    in_parallel(&|number| {
        let ip = IpAddr::from([10, 99, u8::try_from(number / 250).unwrap(), u8::try_from(number % 250 + 1).unwrap()]);
        let declared = vec![Port::new("web", POD_PORT, Protocol::Tcp)];
        let pod = PodObject::new(NAMESPACE, &name(number), NODE, "web").with_ports(declared);
        cluster.create_pod(&pod).unwrap();
        cluster.set_pod_running(NAMESPACE, &name(number), node_ip, &[ip]).unwrap();
    });
    for number in 0..500 {
        world.wait_for_entries(&name(number), 2);
    }
    world.wait_for_kernel_mappings(1002);
    in_parallel(&|number| cluster.delete_pod(NAMESPACE, &name(number)).unwrap());
    world.wait_for_kernel_mappings(2);
    for number in 0..500 {
        assert_eq!(world.writes(&name(number)), 1, "{:?}", world.annotations.history(&name(number)));
    }
    bystander.end(&world);
}

#[test]
fn a_pod_replaced_between_two_events_gets_other_node_ports() {
    let mut world = World::behind_proxy(&[]);
    let bystander = Bystander::begin(&mut world);
    world.create_pod("web-1");
    let former = world.wait_for_entries("web-1", 2);
    world.proxy().close();
    world.delete_pod("web-1");
    world.create_pod("web-1");
    world.proxy().open();
    let is_new = |value: Option<&str>| {
        value.is_some_and(|text| former.iter().all(|entry| !text.contains(&entry.node_port.to_string())))
    };
    world.annotations.wait_for("web-1", LIMIT, |value| value.is_some() && is_new(value)).unwrap();
    world.assert_served("web-1");
    assert_eq!(world.address("web-1", Protocol::Tcp).ip(), world.node_ip());
    bystander.end(&world);
}

// SPDX-License-Identifier: Apache-2.0
//! Tests behavior on which consumers of the annotation rely and that no other test covers. docs/antrea-compatibility.md
//! lists all such behavior.

use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, Load, Transfer};
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, POD_PORT, World};

/// The tolerance: the time by which a drain or a quarantine may be shorter than configured.
const ROUNDED: Duration = Duration::from_millis(100);

#[test]
fn a_pod_is_published_before_it_is_ready_and_stays_published_until_it_is_deleted() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_unready_pod("web-0");
    world.assert_served("web-0");
    let status = format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0/status");
    for (is_ready, restarts) in [("True", 0), ("False", 1), ("True", 2)] {
        let change = json!({"status": {
            "conditions": [{"type": "Ready", "status": is_ready}],
            "containerStatuses": [{"name": "echo", "restartCount": restarts, "image": "", "imageID": "",
                                   "ready": is_ready == "True"}],
        }});
        world.cluster.client().merge_patch(&status, &change).unwrap();
        world.assert_served("web-0");
    }
    // No kubelet completes the deletion after the grace period, so the Pod stays terminating. The agent must serve a
    // terminating Pod.
    world.cluster.kubectl(&["delete", "pod", "web-0", "--namespace", NAMESPACE, "--wait=false"]).unwrap();
    world.create_pod("web-1");
    world.assert_served("web-1");
    world.assert_served("web-0");
    assert_eq!(world.writes("web-0"), 1);
}

#[test]
fn a_withdrawn_port_serves_during_the_drain_and_is_reused_only_after_the_quarantine() {
    let mut world = World::new();
    world.create_node();
    let holder = world.topology.node().run(|| TcpListener::bind("0.0.0.0:61001").unwrap()).unwrap();
    // The drain and the quarantine are longer on a slow machine, because the client must send at least one request
    // during each of them.
    let [drain, quarantine] = [4, 8].map(|seconds| poll::extended(Duration::from_secs(seconds)).as_secs());
    let (drained_after, reused_after) = (Duration::from_secs(drain), Duration::from_secs(drain + quarantine));
    let [drain, quarantine] = [drain, quarantine].map(|seconds| format!("{seconds}s"));
    world.start_agent(&["--drain", &drain, "--quarantine", &quarantine, "--port-range", "61000-61001"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let server = world.address("web-0", Protocol::Tcp);
    let client = world.topology.client().netns.clone();
    let relabel = json!({"metadata": {"labels": {"app": "other"}}});
    // The agent withdraws the port later than `before`. Therefore, even on a slow machine, requests must be served for
    // at least the drain time after `before`, and the port must not be reused for at least the sum of drain time and
    // quarantine after `before`.
    let before = Instant::now();
    world.cluster.client().merge_patch(&format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0"), &relabel).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    // The second Pod gets no node port for TCP: another process uses one of the two ports of the range, and the agent
    // still keeps the other port for the first Pod.
    world.create_pod("web-1");
    let (mut served, mut is_refused, mut first_error) = (0, false, None);
    let successor = || match traffic::tcp_request(&client, server, "who?") {
        Ok(answer) if answer.pod == "web-0" => {
            served += 1;
            None
        }
        Ok(answer) => Some((answer.pod, Instant::now())),
        // A request that is in progress when the mapping is removed may time out instead of being refused.
        Err(error) => {
            first_error.get_or_insert_with(Instant::now);
            is_refused |= format!("{error:#}").contains("refused");
            None
        }
    };
    let ((pod, at), _) = poll::until("a response of the successor", LIMIT + reused_after, successor).unwrap();
    assert_eq!(pod, "web-1");
    assert!(served > 0, "the withdrawn port was not served during the drain");
    assert!(is_refused, "no connection was refused between the drain and the reuse of the port");
    let unanswered = first_error.expect("a refusal is an error");
    let (drained, rested) = (unanswered.duration_since(before), at.duration_since(before));
    assert!(drained + ROUNDED >= drained_after, "the withdrawn port was served for {drained:?} instead of {drain}");
    assert!(
        rested + ROUNDED >= reused_after,
        "the port was reused {rested:?} after the change, before {drain} and {quarantine} had passed"
    );
    world.assert_served("web-1");
    drop(holder);
}

#[test]
fn an_open_udp_flow_reaches_the_new_pod_of_a_reused_port_and_never_the_previous_one() {
    let mut world = World::new();
    world.create_node();
    // Only one port is available for UDP, so the agent gives this port to the next Pod, although the previous Pod's
    // client still sends to the port.
    let holder = world.topology.node().run(|| UdpSocket::bind("0.0.0.0:61000").unwrap()).unwrap();
    world.start_agent(&["--quarantine", "0s", "--port-range", "61000-61001"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let server = world.address("web-0", Protocol::Udp);
    let socket = traffic::udp_socket(&world.topology.client().netns, server, true).unwrap();
    for _ in 0..3 {
        assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-0");
    }
    // Only the Pod object is deleted. The previous Pod's server still runs and would respond to requests, as if the
    // kubelet had not stopped the containers yet.
    world.cluster.delete_pod(NAMESPACE, "web-0").unwrap();
    world.wait_for_kernel_mappings(0);
    world.create_pod("web-1");
    assert_eq!(world.address("web-1", Protocol::Udp), server, "the agent must reuse the only port");
    for _ in 0..3 {
        assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-1");
    }
    drop(holder);
}

#[test]
fn a_port_with_traffic_for_its_previous_pod_is_reused_last() {
    // The removal of a mapping counts as traffic to its port. The range therefore has eight ports, so that each of the
    // four Pods can get two ports that no earlier Pod has had.
    let mut world = World::with_agent(&["--quarantine", "0s", "--port-range", "61000-61007"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let former = world.address("web-0", Protocol::Udp);
    let socket = traffic::udp_socket(&world.topology.client().netns, former, true).unwrap();
    assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-0");
    world.cluster.delete_pod(NAMESPACE, "web-0").unwrap();
    world.wait_for_kernel_mappings(0);
    // Three Pods are created, because an allocator that alternates between two ports would give the former port to
    // every second Pod.
    for pod in ["web-1", "web-2", "web-3"] {
        world.create_pod(pod);
        assert_ne!(world.address(pod, Protocol::Udp), former, "{pod}");
        assert!(
            traffic::udp_ask(&socket, "who?").is_err(),
            "a client of the previous Pod on {former} received a response"
        );
        if pod != "web-3" {
            world.cluster.delete_pod(NAMESPACE, pod).unwrap();
            world.wait_for_kernel_mappings(0);
        }
    }
    world.assert_served("web-3");
}

#[test]
fn ports_of_several_services_share_an_annotation_that_is_written_once_per_change() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let before = world.wait_for_entries("web-0", 2);
    let same = Port::new("same", 8000, Protocol::Tcp).to(POD_PORT);
    let another = Port::new("another", 9000, Protocol::Tcp);
    let second = ServiceObject::new(NAMESPACE, "second", "web", vec![same, another]).enabled();
    world.cluster.create_service(&second).unwrap();
    let united = world.wait_for_entries("web-0", 3);
    assert!(before.iter().all(|entry| united.contains(entry)), "{before:?} {united:?}");
    world.cluster.delete_service(NAMESPACE, "second").unwrap();
    assert_eq!(world.wait_for_entries("web-0", 2), before);
    assert_eq!(world.writes("web-0"), 3);
    world.assert_served("web-0");
}

#[test]
fn a_new_address_of_the_node_is_published_and_breaks_no_connection() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let former = world.wait_for_entries("web-0", 2);
    let uplink = world.topology.client().uplink.name().to_owned();
    world.topology.node().ip(&format!("addr add 192.0.2.77/32 dev {uplink}")).unwrap();
    let load = Load::start(&world.topology.client().netns, 200, world.load_requests(&["web-0"]));
    let server = world.address("web-0", Protocol::Tcp);
    let transfer =
        Transfer::start(&world.topology.client().netns, server, Direction::Upload, 16 << 20, 16 << 20).unwrap();
    world.cluster.set_node_addresses(crate::world::NODE, &["192.0.2.77".parse().unwrap()]).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_some_and(|text| text.contains("192.0.2.77"))).unwrap();
    let published = world.wait_for_entries("web-0", 2);
    assert!(former.iter().zip(&published).all(|(one, other)| one.node_port == other.node_port), "{published:?}");
    world.assert_served("web-0");
    transfer.wait_for_share(1.0, LIMIT).unwrap();
    transfer.join().unwrap();
    assert_eq!(load.stop().failures, []);
    assert_eq!(world.writes("web-0"), 2);
}

// SPDX-License-Identifier: Apache-2.0
//! What consumers rely on, where no other test shows it; docs/antrea-compatibility.md has the whole list.

use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, Load, Transfer};
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, POD_PORT, World};

#[test]
fn a_pod_is_published_before_it_is_ready_and_stays_so_whatever_becomes_of_its_readiness() {
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
    // Terminating, and still served until it is gone: `delete` with a grace period, as a kubelet sees it.
    world.cluster.kubectl(&["delete", "pod", "web-0", "--namespace", NAMESPACE, "--wait=false"]).unwrap();
    world.create_pod("web-1");
    world.assert_served("web-1");
    world.assert_served("web-0");
    assert_eq!(world.writes("web-0"), 1);
}

#[test]
fn a_withdrawn_port_serves_through_the_drain_and_nobody_has_it_before_the_quarantine_is_over() {
    let mut world = World::new();
    world.create_node();
    let holder = world.topology.node().run(|| TcpListener::bind("0.0.0.0:61001").unwrap()).unwrap();
    world.start_agent(&["--drain", "2s", "--quarantine", "3s", "--port-range", "61000-61001"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let server = world.address("web-0", Protocol::Tcp);
    let client = world.topology.client().netns.clone();
    let relabel = json!({"metadata": {"labels": {"app": "other"}}});
    world.cluster.client().merge_patch(&format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0"), &relabel).unwrap();
    let withdrawn = world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap().at;
    // Wants the port that the first Pod still has, for there is no other.
    world.create_pod("web-1");
    let (mut served_until, mut refusals) = (withdrawn, 0);
    let successor = || match traffic::tcp_request(&client, server, "who?") {
        Ok(answer) if answer.pod == "web-0" => {
            served_until = Instant::now();
            None
        }
        Ok(answer) => Some((answer.pod, Instant::now())),
        // A request that is under way when the mapping goes may also hang.
        Err(error) => {
            refusals += usize::from(format!("{error:#}").contains("refused"));
            None
        }
    };
    let ((pod, at), _) = poll::until("the successor", LIMIT, successor).unwrap();
    assert_eq!(pod, "web-1");
    assert!(refusals > 0, "nobody answers in between");
    let (drained, rested) = (served_until.duration_since(withdrawn), at.duration_since(withdrawn));
    assert!(drained >= Duration::from_millis(1_500), "served for {drained:?} of 2 s after the withdrawal");
    assert!(rested >= Duration::from_millis(4_900), "used again {rested:?} after the withdrawal, not 5 s");
    world.assert_served("web-1");
    drop(holder);
}

#[test]
fn an_open_flow_of_datagrams_goes_to_the_ports_new_pod_and_never_to_the_former() {
    let mut world = World::new();
    world.create_node();
    // Of two ports, datagrams have one: where there is no other, it is given although its client has not ceased.
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
    // The object goes; the former Pod's network stays, as if its kubelet were slow, and would answer.
    world.cluster.delete_pod(NAMESPACE, "web-0").unwrap();
    world.wait_for_kernel_mappings(0);
    world.create_pod("web-1");
    assert_eq!(world.address("web-1", Protocol::Udp), server, "the port is used again");
    for _ in 0..3 {
        assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-1");
    }
    drop(holder);
}

#[test]
fn a_port_that_a_client_sends_to_for_its_former_pod_is_the_last_that_a_new_one_gets() {
    // Room for two Pods, each with a port of both protocols.
    let mut world = World::with_agent(&["--quarantine", "0s", "--port-range", "61000-61003"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let former = world.address("web-0", Protocol::Udp);
    let socket = traffic::udp_socket(&world.topology.client().netns, former, true).unwrap();
    assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-0");
    world.cluster.delete_pod(NAMESPACE, "web-0").unwrap();
    world.wait_for_kernel_mappings(0);
    // Each of these would have the port again within two, by its turn.
    for pod in ["web-1", "web-2", "web-3"] {
        world.create_pod(pod);
        assert_ne!(world.address(pod, Protocol::Udp), former, "{pod}");
        assert!(traffic::udp_ask(&socket, "who?").is_err(), "nobody answers who means {former}'s former Pod");
        if pod != "web-3" {
            world.cluster.delete_pod(NAMESPACE, pod).unwrap();
            world.wait_for_kernel_mappings(0);
        }
    }
    world.assert_served("web-3");
}

#[test]
fn ports_of_several_services_are_one_annotation_written_once_for_each_change() {
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

// SPDX-License-Identifier: Apache-2.0
//! Tests Pods that request certain node ports: which Pod answers at the requested node port, and the Event of a request
//! that is refused.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use npl_common::names;
use npl_testkit::cluster::{PodObject, Port};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::traffic;

use crate::events::{text, wait_for_event};
use crate::foreign_changes::maps;
use crate::world::{NAMESPACE, NODE, POD_PORT, World};

const KEY: &str = "nodeportlocal.antrea.io/requested-node-ports";
const REASON: &str = "NodePortRequestRefused";
const REQUESTED: u16 = 61_005;
/// A time for which a packet to an unmapped node port counts as recent. The agent's time is two minutes.
const RECENT: Duration = Duration::from_mins(1);

/// Creates a cluster with an enabled Service, and an agent with these flags.
fn world(flags: &[&str]) -> World {
    let world = World::with_agent(flags);
    world.create_service();
    world.enable_service();
    world
}

/// Creates a Pod with these requests. Its echo server answers with the name `server`, which distinguishes the Pod from
/// another Pod of the same name.
fn create_pod(world: &mut World, name: &str, server: &str, requests: &str) {
    let pod = world.topology.add_pod(&world.run, name).unwrap();
    world.servers.push(EchoServer::start_in(&pod.netns, server, &[POD_PORT]).unwrap());
    let ports = vec![Port::new("web", POD_PORT, Protocol::Tcp)];
    let object = PodObject::new(NAMESPACE, name, NODE, "web").with_ports(ports).with_annotation(KEY, requests);
    let ip = pod.ip().into();
    world.cluster.create_pod(&object).unwrap();
    world.cluster.set_pod_running(NAMESPACE, name, world.node_ip(), &[ip]).unwrap();
}

/// Waits until the Pod is published, asserts that its echo server `server` answers at the published node ports, and
/// returns the node ports of TCP and UDP.
fn served_at(world: &World, pod: &str, server: &str) -> [u16; 2] {
    [Protocol::Tcp, Protocol::Udp].map(|protocol| {
        let address = world.address(pod, protocol);
        world.assert_answers(protocol, address, server);
        address.port()
    })
}

#[test]
fn a_pod_is_served_at_the_node_port_that_it_requests_also_after_a_restart() {
    let mut world = world(&["--requested-node-ports"]);
    create_pod(&mut world, "web-0", "web-0", "8080=61005");
    assert_eq!(served_at(&world, "web-0", "web-0"), [REQUESTED; 2]);
    create_pod(&mut world, "web-1", "web-1", "8080/tcp=61007, 8080/udp=61006");
    assert_eq!(served_at(&world, "web-1", "web-1"), [61_007, 61_006]);
    world.agent().kill().unwrap();
    world.agent().restart().unwrap();
    world.wait_for_metric(r#"npl_ops_total{op="reserve",outcome="done"} 4"#);
    assert_eq!(served_at(&world, "web-0", "web-0"), [REQUESTED; 2]);
    assert_eq!(served_at(&world, "web-1", "web-1"), [61_007, 61_006]);
    assert_eq!((world.writes("web-0"), world.writes("web-1")), (1, 1));
    let metrics = world.agent().metrics().unwrap();
    assert!(!metrics.contains(REASON), "{metrics}");
}

#[test]
fn of_two_pods_that_request_one_node_port_the_first_keeps_it_and_the_second_gets_an_event() {
    let mut world = world(&["--requested-node-ports"]);
    create_pod(&mut world, "web-0", "web-0", "8080=61005");
    assert_eq!(served_at(&world, "web-0", "web-0"), [REQUESTED; 2]);
    create_pod(&mut world, "web-1", "web-1", "8080/tcp=61005");
    assert!(!served_at(&world, "web-1", "web-1").contains(&REQUESTED));
    let event = wait_for_event(&world, "web-1", REASON);
    assert_eq!(
        text(&event),
        "pod port 8080/tcp does not get the requested node port 61005, which belongs to pod shop/web-0: request another \
         node port for one of the two pods"
    );
    world.wait_for_metric(r#"npl_problems{reason="NodePortRequestRefused"} 1"#);
    let chain = world.agent_options(&[]).command(&["why", "pod/shop/web-1:8080"]).unwrap();
    assert!(chain.contains("does not get the requested node port 61005"), "{chain}");
    assert_eq!(served_at(&world, "web-0", "web-0"), [REQUESTED; 2]);
}

/// A Pod of a `StatefulSet` is deleted and created again with the same name and requests. A client of the deleted Pod
/// still uses its node port.
#[test]
fn a_successor_in_the_quarantine_gets_another_node_port_and_an_event() {
    let mut world = world(&["--requested-node-ports", "--quarantine", "10m"]);
    create_pod(&mut world, "web-0", "first", "8080=61005");
    let former = world.address("web-0", Protocol::Tcp);
    assert_eq!(served_at(&world, "web-0", "first"), [REQUESTED; 2]);
    world.delete_pod("web-0");
    world.wait_for_kernel_mappings(0);
    create_pod(&mut world, "web-0", "second", "8080=61005");
    world.wait_for_kernel_mappings(2);
    assert!(!served_at(&world, "web-0", "second").contains(&REQUESTED));
    let answer = traffic::tcp_request(&world.topology.client().netns, former, "who?");
    assert!(answer.is_err(), "the node port of the deleted Pod leads to {answer:?}");
    let event = wait_for_event(&world, "web-0", REASON);
    let note = text(&event);
    let start = "pod port 8080/tcp does not get the requested node port 61005, which is in quarantine because pod \
                 shop/web-0 had it: request another node port, or delete the pod after ";
    assert!(note.starts_with(start), "{note}");
    assert!(note.ends_with("(1 more like this)"), "both protocols of the Pod port request the node port: {note}");
}

#[test]
fn a_successor_after_the_quarantine_gets_the_requested_node_port() {
    let mut world = world(&["--requested-node-ports", "--quarantine", "1s"]);
    create_pod(&mut world, "web-0", "first", "8080=61005");
    assert_eq!(served_at(&world, "web-0", "first"), [REQUESTED; 2]);
    world.delete_pod("web-0");
    for protocol in ["tcp", "udp"] {
        world.wait_for_metric(&format!(
            r#"npl_node_ports{{family="IPv4",protocol="{protocol}",state="quarantined"}} 0"#
        ));
    }
    // The agent recorded the removal of the mapping. The record counts as traffic to the node port for two minutes.
    maps::map(&world, names::MAP_UNMAPPED_V4).set(&u32::from(REQUESTED).to_le_bytes(), &[0; 8]);
    create_pod(&mut world, "web-0", "second", "8080=61005");
    world.wait_for_kernel_mappings(2);
    assert_eq!(served_at(&world, "web-0", "second"), [REQUESTED; 2]);
}

/// A load balancer still probes the node port of a Pod that was removed long ago.
#[test]
fn a_node_port_that_receives_packets_is_not_given_on_request() {
    let mut world = world(&["--requested-node-ports"]);
    create_pod(&mut world, "web-0", "web-0", "");
    let address = world.address("web-0", Protocol::Tcp);
    assert!(!served_at(&world, "web-0", "web-0").contains(&REQUESTED));
    for number in 1.. {
        let (pod, probed) = (format!("web-{number}"), Instant::now());
        let probe = SocketAddr::new(address.ip(), REQUESTED);
        assert!(traffic::tcp_request(&world.topology.client().netns, probe, "who?").is_err());
        create_pod(&mut world, &pod, &pod, "8080/tcp=61005");
        let node_ports = served_at(&world, &pod, &pod);
        // The packet counts for two minutes.
        if probed.elapsed() < RECENT {
            assert!(!node_ports.contains(&REQUESTED));
            let event = wait_for_event(&world, &pod, REASON);
            assert!(text(&event).contains("61005, which received packets or had a mapping"), "{event}");
            return;
        }
        world.delete_pod(&pod);
    }
}

#[test]
fn a_request_that_cannot_be_met_is_reported_and_the_pod_is_served() {
    let mut world = world(&["--requested-node-ports"]);
    let long = "8080=61005,".repeat(20_000);
    for (pod, requests, expected) in [
        (
            "out-of-range",
            "8080/tcp=22",
            "pod port 8080/tcp does not get the requested node port 22, which is outside of the agent's --port-range \
             61000-62000: request a node port of this range",
        ),
        (
            "faulty",
            "http=61005, 8080=x",
            "entry 1 of requested-node-ports, \"http=61005\" (and 1 more faulty entries), is not a pod port and a node \
             port and requests no node port: write it as 8080=61005 or 53/udp=61006",
        ),
        ("long", &long, "requested-node-ports is longer than 4096 bytes and requests no node port: shorten the list"),
    ] {
        create_pod(&mut world, pod, pod, requests);
        assert!(!served_at(&world, pod, pod).contains(&22));
        assert_eq!(text(&wait_for_event(&world, pod, REASON)), expected);
    }
}

#[test]
fn a_request_without_the_flag_has_no_effect_and_is_reported() {
    let mut world = world(&[]);
    create_pod(&mut world, "web-0", "web-0", "8080=61005");
    assert!(!served_at(&world, "web-0", "web-0").contains(&REQUESTED));
    let event = wait_for_event(&world, "web-0", REASON);
    assert_eq!(
        text(&event),
        "the pod requests node ports, which the agent does not permit, and gets ordinary node ports: set the agent's \
         --requested-node-ports, or remove the annotation requested-node-ports from the pod"
    );
}

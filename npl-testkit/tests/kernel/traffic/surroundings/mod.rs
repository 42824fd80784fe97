// SPDX-License-Identifier: Apache-2.0
//! Beside the rules and routes of others: one set of requests and transfers passes on a Node of each CNI.
//!
//! Rules are written as nftables takes them, whatever the CNI itself uses: to the kernel they are the same hooks, verdicts
//! and marks.

use std::io::ErrorKind;
use std::net::IpAddr;

use npl_agent::core::model::Protocol;
use npl_agent::core::redirect::Forwarding;
use npl_testkit::echo::EchoServer;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{self, Direction, UdpOptions, tcp_connect, tcp_request, transfer, udp_exchange};

use crate::lab::mapping;
use crate::world::{NODE_PORT, POD_PORT, World, is_emulated};

const FLANNEL: &str = include_str!("flannel.nft");
const CALICO: &str = include_str!("calico.nft");
const ANTREA: &str = include_str!("antrea.nft");
const KUBE_ROUTER: &str = include_str!("kube-router.nft");
const AWS_VPC: &str = include_str!("aws-vpc.nft");
const KUBE_PROXY: &str = include_str!("kube-proxy.nft");

/// A node port whose Pod port nobody listens on.
const CLOSED: u16 = 61_050;

/// Where somebody outside of the cluster listens.
const OUTSIDE: u16 = 9090;

/// Two Pods on a Node with these rules.
fn node_with(rules: &[&str]) -> World {
    let mut world = World::new(2);
    world.node().nft(&rules.concat()).unwrap();
    let (frontend, backend) = mapping(Protocol::Tcp, CLOSED, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world
}

/// By the host's stack, past it, and past it as long as it lets flows through.
fn everything_passes_either_way(mut world: World) {
    everything_passes(&world);
    world.follow(Forwarding::Redirect);
    everything_passes(&world);
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    everything_passes(&world);
}

/// What passes on every Node, whose rules hide its Pods behind it.
fn everything_passes(world: &World) {
    let size = if is_emulated() { 1 << 17 } else { 4 << 20 };
    for _ in 0..3 {
        world.assert_answers();
    }
    for (frontend, client) in world.frontends().into_iter().zip(world.client_ips()) {
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, size).unwrap().bytes, size);
        }
        for (question, answer) in [(4000, 512), (512, 4000)] {
            let answer = udp_exchange(world.client(), frontend, question, answer).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client));
        }
    }
    let without = UdpOptions { checksum: false, ..UdpOptions::default() };
    let answer = traffic::udp_request(world.client(), world.frontend(), b"no checksum", without).unwrap().answer;
    assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", world.client_ip()));
    assert_eq!(refusal(world, CLOSED), ErrorKind::ConnectionRefused, "by the Pod itself");
    assert_eq!(refusal(world, CLOSED + 1), ErrorKind::ConnectionRefused, "by the host");
    nothing_was_invalid(world);
    assert_eq!(seen_outside_as(world), world.node_ip(), "the rules are there");
}

/// No rule has met a packet that belongs to no connection, or one that nobody allowed.
fn nothing_was_invalid(world: &World) {
    let rules = world.node().nft("list ruleset").unwrap();
    let dropped: Vec<&str> =
        rules.lines().filter(|line| line.contains("counter") && !line.contains("packets 0 bytes 0")).collect();
    assert!(dropped.is_empty(), "{dropped:?}");
}

/// As whom somebody outside sees the first Pod.
fn seen_outside_as(world: &World) -> IpAddr {
    let _outside = EchoServer::start_in(world.client(), "outside", &[OUTSIDE]).unwrap();
    let answer = tcp_request(&world.pod().netns, (world.client_ip(), OUTSIDE).into(), "as whom?").unwrap();
    assert_eq!(answer.pod, "outside");
    answer.client.ip()
}

/// How the client is turned away.
fn refusal(world: &World, node_port: u16) -> ErrorKind {
    let error = tcp_connect(world.client(), (world.node_ip(), node_port).into()).unwrap_err();
    error.downcast_ref::<std::io::Error>().unwrap().kind()
}

#[test]
fn everything_passes_beside_flannel() {
    everything_passes_either_way(node_with(&[FLANNEL, KUBE_PROXY]));
}

#[test]
fn everything_passes_beside_calico() {
    everything_passes_either_way(node_with(&[CALICO, KUBE_PROXY]));
}

#[test]
fn everything_passes_beside_antrea_with_strict_reverse_paths() {
    let world = node_with(&[ANTREA, KUBE_PROXY]);
    for device in ["all", "default", "eth0", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "1").unwrap();
    }
    everything_passes_either_way(world);
}

#[test]
fn everything_passes_beside_kube_router_and_what_it_rejects_is_refused() {
    let world = node_with(&[KUBE_ROUTER, KUBE_PROXY]);
    everything_passes(&world);
    // The Node speaks in the Pod's place, and the client learns it of the address that it knows.
    assert_eq!(refusal(&world, NODE_PORT + 1), ErrorKind::ConnectionRefused);
}

/// The second Pod's own packets leave by the second interface, where nobody expects the Node's address.
#[test]
fn answers_return_by_the_interface_of_the_request_beside_the_aws_vpc_cni() {
    let mut world = World::with_options(2, Options { clients: 2, ..Options::default() });
    world.node().nft(AWS_VPC).unwrap();
    let second = world.pods[1].0.ip();
    world
        .node()
        .ip(&format!(
            "route add default via 203.0.113.2 dev eth1 table 100
rule add to 10.244.0.0/24 lookup main priority 512
rule add fwmark 0x80/0x80 lookup main priority 1024
rule add from {second} lookup 100 priority 1536"
        ))
        .unwrap();
    for device in ["all", "eth0", "eth1"] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "2").unwrap();
    }
    every_pod_answers(&world);
    world.follow(Forwarding::Redirect);
    every_pod_answers(&world);
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    every_pod_answers(&world);
}

#[track_caller]
fn every_pod_answers(world: &World) {
    for (node_port, (pod, _)) in (NODE_PORT..).zip(&world.pods) {
        for _ in 0..3 {
            let server = (world.node_ip(), node_port).into();
            let tcp = tcp_request(world.client(), server, "who are you?").unwrap();
            assert_eq!((tcp.pod.as_str(), tcp.client.ip()), (pod.name.as_str(), world.client_ip()));
            let udp = traffic::udp_request(world.client(), server, b"and you?", UdpOptions::default()).unwrap().answer;
            assert_eq!((udp.pod.as_str(), udp.client.ip()), (pod.name.as_str(), world.client_ip()));
        }
    }
}

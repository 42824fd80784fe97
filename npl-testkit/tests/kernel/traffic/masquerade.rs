// SPDX-License-Identifier: Apache-2.0
//! Tests masqueraded connections of Pods whose source port on the Node is also a mapped node port. NPL passes the
//! replies of these connections to the host.

use std::io::{self, ErrorKind};
use std::iter;
use std::net::SocketAddr;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::networks::CILIUM_HOST;
use npl_testkit::echo::{Answer, EchoServer};
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::topology::{Options, Pod};
use npl_testkit::traffic::{self, UdpOptions, request_limit};

use crate::world::{NODE_PORT, World};

/// Ports of servers outside of the cluster. The tests need several ports, because all connections are masqueraded to
/// one port of the Node, and this port can have only one connection to each server port.
const OUTSIDE: [u16; 3] = [7070, 7071, 7072];

/// Rules that masquerade connections of Pods and give them the source port 61000, which is also the first Pod's node
/// port. `MASQUERADE --random-fully` may choose this port by chance.
const MASQUERADE: &str = "
table inet npl_test {
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 meta l4proto { tcp, udp } masquerade to :61000
    ip6 saddr fd00:10:244::/64 ip6 daddr != fd00:10:244::/64 meta l4proto { tcp, udp } masquerade to :61000
  }
}";

/// Creates a Node for each path that a request may take: stack, redirect, offload and XDP. `prepare` is called before the
/// agent's code surveys the Node's devices.
fn worlds(prepare: fn(&World)) -> impl Iterator<Item = (&'static str, World)> {
    let driver = iter::once_with(move || {
        let mut world = World::with_options(2, Options::default());
        prepare(&world);
        world.follow(Forwarding::Stack);
        let uplink = world.uplinks().remove(0);
        world.add_xdp(&uplink);
        ("driver", world)
    });
    let modes = [("stack", Forwarding::Stack), ("redirect", Forwarding::Redirect), ("offload", Forwarding::Offload)];
    let modes = modes.into_iter().map(move |(name, forwarding)| {
        let mut world = World::new(2);
        prepare(&world);
        world.node().set_liberal_tracking(true).unwrap();
        world.follow(forwarding);
        (name, world)
    });
    modes.chain(driver)
}

#[test]
fn replies_to_connections_masqueraded_behind_a_node_port_reach_the_node() {
    for (name, world) in worlds(|_| ()) {
        // The rule does not affect replies of mapped flows, because kernel conntrack has an entry for the client's
        // connection.
        world.node().nft(MASQUERADE).unwrap();
        let _outside = EchoServer::start_in(world.client(), "outside", &OUTSIDE).unwrap();
        let pod = &world.pods[1].0.netns;
        for (client_ip, node_ip) in world.client_ips().into_iter().zip(world.node_ips()) {
            for port in OUTSIDE {
                let server = SocketAddr::new(client_ip, port);
                let masqueraded = SocketAddr::new(node_ip, NODE_PORT);
                let stream = traffic::tcp_connect(pod, server).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                for question in ["who are you?", "still there?"] {
                    let answer = traffic::tcp_ask(&stream, question).unwrap();
                    assert_eq!((answer.pod.as_str(), answer.client), ("outside", masqueraded), "{name}");
                }
                let udp = traffic::udp_request(pod, server, b"and you?", UdpOptions::default()).unwrap().answer;
                assert_eq!((udp.pod.as_str(), udp.client), ("outside", masqueraded), "{name}");
            }
        }
        // Clients of the mapping must still be served.
        world.assert_answers();
    }
}

/// Replaces the source of a Pod's packets after they have left the Node, as a TC program after NPL's would do. The
/// outside host sees the Node's address and port 61000 as the source. Replies that NPL passes to the host are
/// translated back and reach the Pod.
fn masquerade_behind_npl(world: &World, pod: &Pod, pod_port: u16, protocols: &[&str]) {
    let device = world.topology.client().device.name();
    for (family, (node_ip, pod_ip)) in ["ip", "ip6"].into_iter().zip(world.node_ips().into_iter().zip(pod.ips())) {
        let out = |protocol: &&str| {
            format!(
                "{family} saddr {pod_ip} {protocol} sport {pod_port} {protocol} sport set {NODE_PORT} {family} saddr set {node_ip}\n"
            )
        };
        let back = |protocol: &&str| {
            format!(
                "{family} daddr {node_ip} {protocol} dport {NODE_PORT} {protocol} dport set {pod_port} {family} daddr set {pod_ip}\n"
            )
        };
        let table = |name: &str, hook: &str, rules: Vec<String>| {
            format!("table {name} {{\n chain mangle {{\n type filter hook {hook};\n {} }}\n }}\n", rules.concat())
        };
        let (out, back) = (protocols.iter().map(out).collect(), protocols.iter().map(back).collect());
        let ingress = format!("ingress device {device} priority 0");
        world.client().nft(&table(&format!("netdev npl_out_{family}"), &ingress, out)).unwrap();
        world.node().nft(&table(&format!("{family} npl_back"), "prerouting priority raw", back)).unwrap();
    }
    pod.netns.sysctl("net/ipv4/ip_local_port_range", &format!("{pod_port} {pod_port}")).unwrap();
}

/// Sends a UDP request from a namespace with a single local port. Retries while a child process that another test is
/// starting has a copy of the previous request's socket.
fn ask_from_the_only_port(pod: &Netns, server: SocketAddr) -> Answer {
    let is_in_use = |error: &anyhow::Error| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::AddrInUse)
    };
    let request = || match traffic::udp_request(pod, server, b"and you?", UdpOptions::default()) {
        Err(error) if is_in_use(&error) => None,
        answered => Some(answered),
    };
    let (answered, _waited) = poll::until("the local port to be free", request_limit() * 10, request).unwrap();
    answered.unwrap().answer
}

/// Creates the device by which the agent recognizes Cilium.
fn add_cilium_host(world: &World) {
    world.node().ip(&format!("link add {CILIUM_HOST} type veth peer name cilium_net")).unwrap();
}

/// Simulates Cilium's BPF masquerade, which keeps the source port of a Pod's connection if the port is free.
#[test]
fn replies_to_connections_masqueraded_behind_npls_program_reach_the_node() {
    for (name, world) in worlds(add_cilium_host) {
        let pod = &world.pods[1].0;
        masquerade_behind_npl(&world, pod, NODE_PORT, &["tcp", "udp"]);
        let _outside = EchoServer::start_in(world.client(), "outside", &OUTSIDE).unwrap();
        for (client_ip, node_ip) in world.client_ips().into_iter().zip(world.node_ips()) {
            let masqueraded = SocketAddr::new(node_ip, NODE_PORT);
            for port in OUTSIDE {
                let server = SocketAddr::new(client_ip, port);
                let stream =
                    traffic::tcp_connect(&pod.netns, server).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                for question in ["who are you?", "still there?"] {
                    let answer = traffic::tcp_ask(&stream, question).unwrap();
                    assert_eq!((answer.pod.as_str(), answer.client), ("outside", masqueraded), "{name}");
                }
                let udp = ask_from_the_only_port(&pod.netns, server);
                assert_eq!((udp.pod.as_str(), udp.client), ("outside", masqueraded), "{name}");
            }
        }
        world.assert_answers();
    }
}

/// NPL must also pass ICMP errors about masqueraded connections to the host, for example errors of path MTU discovery.
/// Otherwise, these errors would not reach the Pod.
#[test]
fn icmp_errors_about_connections_masqueraded_behind_a_node_port_reach_the_pod() {
    for (name, world) in worlds(|_| ()) {
        world.node().nft(MASQUERADE).unwrap();
        let pod = &world.pods[1].0.netns;
        for client_ip in world.client_ips() {
            // No server listens on this port, so an ICMP error returns.
            let server = SocketAddr::new(client_ip, OUTSIDE[0]);
            let socket = traffic::udp_socket(pod, server, true).unwrap();
            socket.set_read_timeout(Some(request_limit())).unwrap();
            socket.send(b"hello").unwrap();
            let error = poll::uninterrupted(|| socket.recv(&mut [0; 16])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{name}, {client_ip}");
        }
    }
}

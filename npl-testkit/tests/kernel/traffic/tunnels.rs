// SPDX-License-Identifier: Apache-2.0
//! Requests and replies that come or go by a tunnel to another Node, on the devices that the agent itself chooses: with
//! Ethernet inside, and without a link-layer header, which has programs of its own.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use aya::util::KernelVersion;
use npl_agent::core::devices::UplinkReason;
use npl_agent::core::model::Family;
use npl_testkit::netns::Netns;
use npl_testkit::tools;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{Direction, UdpOptions, tcp_connect, tcp_request, transfer, udp_request};

use super::devices::{chosen, has, install, names};
use super::wireguard;
use crate::world::{NODE_PORT, World};

/// A Pod of another Node, which is the client here.
const FAR_POD: [&str; 2] = ["10.244.9.1", "fd00:10:244:9::1"];

/// By which gateway the other Node is reached without the tunnel.
const GATEWAY: [&str; 2] = ["192.0.2.1", "2001:db8:0:1::1"];

/// Of every tunnel, so that what is around a packet finds room.
const MTU: u16 = 1380;

/// Bytes of a transfer; what else goes the same way is far less.
const SIZE: u64 = 1 << 17;

/// One end of a tunnel.
struct End {
    /// Where the tunnel's packets come from, so that what is inside takes another way than the tunnel itself.
    outside: &'static str,
    /// Its addresses inside.
    inside: [&'static str; 2],
}

const NODE_END: End = End { outside: "192.0.2.20", inside: ["10.244.0.200", "fd00:10:244::c8"] };
const FAR_END: End = End { outside: "198.51.100.2", inside: ["10.244.9.0", "fd00:10:244:9::"] };

/// A kind of tunnel.
struct Tunnel {
    kind: &'static str,
    /// What it is made with, from the end where it is made to the other.
    settings: fn(&End, &End) -> String,
    /// How a route leads through it to the other end.
    way: fn(&End, usize) -> String,
    families: &'static [Family],
    /// The first kernel by which requests that arrive by it are ours.
    requests_since: KernelVersion,
}

/// Every kernel that we run on.
const ALWAYS: KernelVersion = KernelVersion::new(5, 10, 0);

/// Kernels before showed programs the tunnel's own headers, as if they were the link layer's.
const WITHOUT_OUTER_HEADERS: KernelVersion = KernelVersion::new(5, 14, 0);

/// What takes the tunnel; the rest takes the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inside {
    Requests,
    Replies,
    Both,
}

/// The far Pod and the Node, joined by a tunnel, with the programs on all that the agent chooses.
struct Scene {
    world: World,
    tunnel: &'static Tunnel,
}

impl Scene {
    /// None where the kernel has no such devices.
    fn new(tunnel: &'static Tunnel) -> Option<Self> {
        let mut world = World::bare(1, Options::default());
        let make = |own: &End, other: &End| {
            format!("link add tun0 mtu {MTU} type {} {}", tunnel.kind, (tunnel.settings)(own, other))
        };
        if !has(tunnel.kind, world.node(), &make(&NODE_END, &FAR_END)) {
            return None;
        }
        let (node, client) = (world.node(), world.client());
        client.ip(&make(&FAR_END, &NODE_END)).unwrap();
        let (near, far) = (NODE_END.outside, FAR_END.outside);
        node.ip(&format!("addr add {near}/24 dev eth0\nroute add {far}/32 via 192.0.2.1 dev eth0 src {near}")).unwrap();
        client.ip(&format!("route add {near}/32 dev eth0 src {far}")).unwrap();
        if tunnel.kind == "wireguard" {
            let [first, second] = &wireguard::KEYS;
            let at = |end: &End| -> Ipv4Addr { end.outside.parse().unwrap() };
            wireguard::connect(node, "tun0", first, second, at(&FAR_END));
            wireguard::connect(client, "tun0", second, first, at(&NODE_END));
        }
        for (netns, end) in [(node, &NODE_END), (client, &FAR_END)] {
            let [v4, v6] = end.inside;
            let lines = format!("link set tun0 up\naddr add {v4}/32 dev tun0\naddr add {v6}/128 dev tun0 nodad");
            netns.ip(&lines).unwrap();
        }
        let [v4, v6] = FAR_POD;
        client.ip(&format!("addr add {v4}/32 dev lo\naddr add {v6}/128 dev lo nodad")).unwrap();
        let chosen = chosen(&world);
        assert_eq!(names(&chosen), [("eth0", UplinkReason::HasNodeAddress), ("tun0", UplinkReason::IsTunnel)]);
        install(&mut world, &chosen);
        Some(Self { world, tunnel })
    }

    /// Has requests and replies of a family, by its place, take the tunnel or the uplink.
    fn route(&self, at: usize, inside: Inside) {
        let (node_ip, far, gateway) = (self.world.node_ips()[at], FAR_POD[at], GATEWAY[at]);
        let to = |other: &End| (self.tunnel.way)(other, at);
        let requests = if inside == Inside::Replies { "dev eth0".to_owned() } else { to(&NODE_END) };
        let replies = if inside == Inside::Requests { format!("via {gateway} dev eth0") } else { to(&FAR_END) };
        self.world.client().ip(&format!("route replace {node_ip} {requests} src {far}")).unwrap();
        self.world.node().ip(&format!("route replace {far} {replies}")).unwrap();
    }

    /// A request by each protocol and a transfer each way, of a family by its place.
    #[track_caller]
    fn assert_served(&self, at: usize) {
        let (world, client) = (&self.world, self.world.client());
        let (server, far): (_, IpAddr) = ((world.node_ips()[at], NODE_PORT).into(), FAR_POD[at].parse().unwrap());
        let tcp = tcp_request(client, server, "who are you?").unwrap();
        assert_eq!((tcp.pod.as_str(), tcp.client.ip()), ("web-0", far));
        let udp = udp_request(client, server, b"and you?", UdpOptions::default()).unwrap().answer;
        assert_eq!((udp.pod.as_str(), udp.client.ip()), ("web-0", far));
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(client, server, direction, SIZE).unwrap().bytes, SIZE);
        }
    }

    /// The host answers, as it would without us.
    #[track_caller]
    fn assert_refused(&self, at: usize) {
        let error = tcp_connect(self.world.client(), (self.world.node_ips()[at], NODE_PORT).into()).unwrap_err();
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "{error:#}");
    }
}

/// Bytes that a device has received.
pub(super) fn received(netns: &Netns, device: &str) -> u64 {
    let mut command = Command::new("ip");
    command.args(["-n", netns.name(), "-s", "-j", "link", "show", "dev", device]);
    let shown: serde_json::Value = serde_json::from_str(&tools::output(&mut command).unwrap()).unwrap();
    shown[0]["stats64"]["rx"]["bytes"].as_u64().unwrap()
}

/// Whatever takes the tunnel, requests reach the Pod and replies are the Node's, in every family that the tunnel carries.
#[track_caller]
fn carries_requests_and_replies(tunnel: &'static Tunnel) {
    let Some(scene) = Scene::new(tunnel) else { return };
    let came = || [scene.world.node(), scene.world.client()].map(|netns| received(netns, "tun0"));
    for family in tunnel.families {
        let at = usize::from(*family == Family::V6);
        for inside in [Inside::Replies, Inside::Requests, Inside::Both] {
            scene.route(at, inside);
            if inside != Inside::Replies && KernelVersion::current().unwrap() < tunnel.requests_since {
                scene.assert_refused(at);
                continue;
            }
            let before = came();
            scene.assert_served(at);
            let [requests, replies] = [0, 1].map(|end| came()[end] - before[end] > SIZE);
            assert_eq!([requests, replies], [inside != Inside::Replies, inside != Inside::Requests], "{inside:?}");
        }
    }
}

/// A route of Ethernet's, which asks for the other end's address.
fn by_neighbour(other: &End, at: usize) -> String {
    format!("via {} dev tun0 onlink", other.inside[at])
}

/// A route into a device that knows its other end.
fn by_device(_other: &End, _at: usize) -> String {
    "dev tun0".to_owned()
}

/// A route that tells its device the other end, packet by packet.
fn by_encapsulation(other: &End, _at: usize) -> String {
    format!("encap ip id 7 dst {} dev tun0", other.outside)
}

#[test]
fn vxlan_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "vxlan",
        settings: |own, other| format!("id 7 dstport 4789 local {} remote {}", own.outside, other.outside),
        way: by_neighbour,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

/// Without a link-layer header, on every kernel.
#[test]
fn vxlan_without_ethernet_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "vxlan",
        settings: |_own, _other| "dstport 4790 gpe external".to_owned(),
        way: by_encapsulation,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn geneve_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "geneve",
        settings: |_own, other| format!("id 7 remote {}", other.outside),
        way: by_neighbour,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn wireguard_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "wireguard",
        settings: |_own, _other| String::new(),
        way: by_device,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn ipip_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "ipip",
        settings: |own, other| format!("local {} remote {}", own.outside, other.outside),
        way: by_device,
        families: &[Family::V4],
        requests_since: WITHOUT_OUTER_HEADERS,
    });
}

#[test]
fn gre_carries_requests_and_replies() {
    carries_requests_and_replies(&Tunnel {
        kind: "gre",
        settings: |own, other| format!("local {} remote {}", own.outside, other.outside),
        way: by_device,
        families: &Family::ALL,
        requests_since: WITHOUT_OUTER_HEADERS,
    });
}

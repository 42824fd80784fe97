// SPDX-License-Identifier: Apache-2.0
//! Tests requests and replies through a tunnel to another Node. The agent selects the tunnel devices. Packets of some
//! tunnel devices have inner Ethernet headers; other tunnel devices have no link-layer header, and get separate
//! programs.

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

/// A Pod of another Node, which is the client in these tests.
const REMOTE_POD: [&str; 2] = ["10.244.9.1", "fd00:10:244:9::1"];

/// The gateways to the other Node outside of the tunnel.
const GATEWAY: [&str; 2] = ["192.0.2.1", "2001:db8:0:1::1"];

/// MTU of every tunnel, which leaves room for the outer headers.
const MTU: u16 = 1380;

/// Bytes of a transfer, far more than all other traffic in the tunnel, so that the device's counter shows the
/// transfer's path.
const SIZE: u64 = 1 << 17;

/// One end of a tunnel.
struct TunnelEnd {
    /// The source of the tunnel's outer packets. The address is used for nothing else, so that inner packets can be
    /// routed differently.
    outside: &'static str,
    /// The inner addresses of this end.
    inside: [&'static str; 2],
}

const NODE_END: TunnelEnd = TunnelEnd { outside: "192.0.2.20", inside: ["10.244.0.200", "fd00:10:244::c8"] };
const REMOTE_END: TunnelEnd = TunnelEnd { outside: "198.51.100.2", inside: ["10.244.9.0", "fd00:10:244:9::"] };

/// A tunnel type.
struct Tunnel {
    kind: &'static str,
    /// Settings of `ip link add`, from the device's own end to the other.
    settings: fn(&TunnelEnd, &TunnelEnd) -> String,
    /// The route through the tunnel to the other end.
    route: fn(&TunnelEnd, usize) -> String,
    families: &'static [Family],
    /// The first kernel with which requests that arrive on the tunnel are translated.
    requests_since: KernelVersion,
}

/// The oldest supported kernel.
const ALWAYS: KernelVersion = KernelVersion::new(5, 10, 0);

/// The first kernel that does not show a tunnel's outer headers to programs as the link-layer header.
const WITHOUT_OUTER_HEADERS: KernelVersion = KernelVersion::new(5, 14, 0);

/// The directions (requests, replies or both) that use the tunnel. Other packets use the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tunneled {
    Requests,
    Replies,
    Both,
}

/// The remote Pod and the Node, connected by a tunnel, with the programs on all devices that the agent selects.
struct Scene {
    world: World,
    tunnel: &'static Tunnel,
}

impl Scene {
    /// Creates the scene; `None` if the kernel does not support the tunnel type.
    fn new(tunnel: &'static Tunnel) -> Option<Self> {
        let mut world = World::bare(1, Options::default());
        let make = |own: &TunnelEnd, other: &TunnelEnd| {
            format!("link add tun0 mtu {MTU} type {} {}", tunnel.kind, (tunnel.settings)(own, other))
        };
        if !has(tunnel.kind, world.node(), &make(&NODE_END, &REMOTE_END)) {
            return None;
        }
        let (node, client) = (world.node(), world.client());
        client.ip(&make(&REMOTE_END, &NODE_END)).unwrap();
        let (near, far) = (NODE_END.outside, REMOTE_END.outside);
        node.ip(&format!("addr add {near}/24 dev eth0\nroute add {far}/32 via 192.0.2.1 dev eth0 src {near}")).unwrap();
        client.ip(&format!("route add {near}/32 dev eth0 src {far}")).unwrap();
        if tunnel.kind == "wireguard" {
            let [first, second] = &wireguard::KEYS;
            let at = |end: &TunnelEnd| -> Ipv4Addr { end.outside.parse().unwrap() };
            wireguard::connect(node, "tun0", first, second, at(&REMOTE_END));
            wireguard::connect(client, "tun0", second, first, at(&NODE_END));
        }
        for (netns, end) in [(node, &NODE_END), (client, &REMOTE_END)] {
            let [v4, v6] = end.inside;
            let lines = format!("link set tun0 up\naddr add {v4}/32 dev tun0\naddr add {v6}/128 dev tun0 nodad");
            netns.ip(&lines).unwrap();
        }
        let [v4, v6] = REMOTE_POD;
        client.ip(&format!("addr add {v4}/32 dev lo\naddr add {v6}/128 dev lo nodad")).unwrap();
        let chosen = chosen(&world);
        assert_eq!(names(&chosen), [("eth0", UplinkReason::HasNodeAddress), ("tun0", UplinkReason::IsTunnel)]);
        install(&mut world, &chosen);
        Some(Self { world, tunnel })
    }

    /// Routes requests and replies of the family with this index through the tunnel or by the uplink.
    fn route(&self, at: usize, inside: Tunneled) {
        let (node_ip, far, gateway) = (self.world.node_ips()[at], REMOTE_POD[at], GATEWAY[at]);
        let to = |other: &TunnelEnd| (self.tunnel.route)(other, at);
        let requests = if inside == Tunneled::Replies { "dev eth0".to_owned() } else { to(&NODE_END) };
        let replies = if inside == Tunneled::Requests { format!("via {gateway} dev eth0") } else { to(&REMOTE_END) };
        self.world.client().ip(&format!("route replace {node_ip} {requests} src {far}")).unwrap();
        self.world.node().ip(&format!("route replace {far} {replies}")).unwrap();
    }

    /// Asserts that requests over both protocols and transfers in both directions are served, in the family with this
    /// index.
    #[track_caller]
    fn assert_served(&self, at: usize) {
        let (world, client) = (&self.world, self.world.client());
        let (server, far): (_, IpAddr) = ((world.node_ips()[at], NODE_PORT).into(), REMOTE_POD[at].parse().unwrap());
        let tcp = tcp_request(client, server, "who are you?").unwrap();
        assert_eq!((tcp.pod.as_str(), tcp.client.ip()), ("web-0", far));
        let udp = udp_request(client, server, b"and you?", UdpOptions::default()).unwrap().answer;
        assert_eq!((udp.pod.as_str(), udp.client.ip()), ("web-0", far));
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(client, server, direction, SIZE).unwrap().bytes, SIZE);
        }
    }

    /// Asserts that the host rejects the connection, as it does without NPL.
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

/// Asserts that requests reach the Pod and replies come from the node port in every family of the tunnel, for each
/// combination of directions in the tunnel.
#[track_caller]
fn assert_requests_and_replies(tunnel: &'static Tunnel) {
    let Some(scene) = Scene::new(tunnel) else { return };
    let received_bytes = || [scene.world.node(), scene.world.client()].map(|netns| received(netns, "tun0"));
    for family in tunnel.families {
        let at = usize::from(*family == Family::V6);
        for inside in [Tunneled::Replies, Tunneled::Requests, Tunneled::Both] {
            scene.route(at, inside);
            if inside != Tunneled::Replies && KernelVersion::current().unwrap() < tunnel.requests_since {
                scene.assert_refused(at);
                continue;
            }
            let before = received_bytes();
            scene.assert_served(at);
            let [requests, replies] = [0, 1].map(|side| received_bytes()[side] - before[side] > SIZE);
            assert_eq!([requests, replies], [inside != Tunneled::Replies, inside != Tunneled::Requests], "{inside:?}");
        }
    }
}

/// Returns a route of an Ethernet tunnel, which resolves the other end's link-layer address.
fn route_by_gateway(other: &TunnelEnd, at: usize) -> String {
    format!("via {} dev tun0 onlink", other.inside[at])
}

/// Returns a route to a device with a fixed remote address.
fn route_by_device(_other: &TunnelEnd, _at: usize) -> String {
    "dev tun0".to_owned()
}

/// Returns a route that sets the remote address for each packet.
fn route_by_encapsulation(other: &TunnelEnd, _at: usize) -> String {
    format!("encap ip id 7 dst {} dev tun0", other.outside)
}

#[test]
fn requests_and_replies_pass_through_vxlan() {
    assert_requests_and_replies(&Tunnel {
        kind: "vxlan",
        settings: |own, other| format!("id 7 dstport 4789 local {} remote {}", own.outside, other.outside),
        route: route_by_gateway,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

/// On every kernel, VXLAN-GPE without Ethernet shows no link-layer header to programs.
#[test]
fn requests_and_replies_pass_through_vxlan_gpe_without_ethernet() {
    assert_requests_and_replies(&Tunnel {
        kind: "vxlan",
        settings: |_own, _other| "dstport 4790 gpe external".to_owned(),
        route: route_by_encapsulation,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn requests_and_replies_pass_through_geneve() {
    assert_requests_and_replies(&Tunnel {
        kind: "geneve",
        settings: |_own, other| format!("id 7 remote {}", other.outside),
        route: route_by_gateway,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn requests_and_replies_pass_through_wireguard() {
    assert_requests_and_replies(&Tunnel {
        kind: "wireguard",
        settings: |_own, _other| String::new(),
        route: route_by_device,
        families: &Family::ALL,
        requests_since: ALWAYS,
    });
}

#[test]
fn requests_and_replies_pass_through_ipip() {
    assert_requests_and_replies(&Tunnel {
        kind: "ipip",
        settings: |own, other| format!("local {} remote {}", own.outside, other.outside),
        route: route_by_device,
        families: &[Family::V4],
        requests_since: WITHOUT_OUTER_HEADERS,
    });
}

#[test]
fn requests_and_replies_pass_through_gre() {
    assert_requests_and_replies(&Tunnel {
        kind: "gre",
        settings: |own, other| format!("local {} remote {}", own.outside, other.outside),
        route: route_by_device,
        families: &Family::ALL,
        requests_since: WITHOUT_OUTER_HEADERS,
    });
}

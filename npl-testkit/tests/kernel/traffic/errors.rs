// SPDX-License-Identifier: Apache-2.0
//! Tests ICMP errors with real connections: path MTU discovery and closed ports.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::model::Protocol;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, transfer};

use crate::lab::mapping;
use crate::world::{POD_PORT, World, is_emulated};

/// MTU of the narrow link, which exceeds IPv6's minimum of 1280.
const NARROW: u32 = 1300;
const CLOSED_NODE_PORT: u16 = 61_050;
/// The time limit for an error to arrive. A wait takes this long only if the error is lost.
const LIMIT: Duration = Duration::from_secs(30);

/// Number of bytes, enough for many full-size packets.
fn bytes() -> u64 {
    if is_emulated() { 1 << 20 } else { 8 << 20 }
}

/// Returns a client whose router is the first client; the link between them has a small MTU.
///
/// The route, and not the device, has the small MTU, because a device would drop larger packets on receipt.
fn client_behind_a_narrow_link(world: &World) -> (Netns, [IpAddr; 2]) {
    let (router, far) = (world.client(), world.run.netns("far").unwrap());
    for netns in [router, &far] {
        netns.sysctl("net/ipv6/conf/default/accept_dad", "0").unwrap();
    }
    router.sysctl("net/ipv4/ip_forward", "1").unwrap();
    router.sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
    router
        .ip(&format!(
            "link add far type veth peer name eth0 netns {}
addr add 203.0.113.129/25 dev far
addr add 2001:db8:0:8::1/64 dev far nodad
link set far up
route add 203.0.113.130/32 dev far mtu {NARROW}
route add 2001:db8:0:8::2/128 dev far mtu {NARROW}",
            far.name()
        ))
        .unwrap();
    far.ip("link set eth0 up
addr add 203.0.113.130/25 dev eth0
addr add 2001:db8:0:8::2/64 dev eth0 nodad
route add default via 203.0.113.129
route add default via 2001:db8:0:8::1")
        .unwrap();
    (far, ["203.0.113.130".parse().unwrap(), "2001:db8:0:8::2".parse().unwrap()])
}

/// Asserts that the sender has learned the path MTU.
#[track_caller]
fn assert_path_mtu_learned(sender: &Netns, receiver: IpAddr) {
    let route = sender.ip(&format!("route get {receiver}")).unwrap();
    assert!(route.contains(&format!(" mtu {NARROW}")), "{route}");
}

#[test]
fn pod_discovers_the_path_mtu_to_its_client() {
    let world = World::new(1);
    let (far, addresses) = client_behind_a_narrow_link(&world);
    for (frontend, address) in world.frontends().into_iter().zip(addresses) {
        let report = transfer(&far, frontend, Direction::Download, bytes()).unwrap();
        assert_eq!(report.bytes, bytes());
        assert_path_mtu_learned(&world.pod().netns, address);
        let answer = traffic::tcp_request(&far, frontend, "who are you?").unwrap();
        assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", address));
    }
}

#[test]
fn client_discovers_the_path_mtu_to_its_pod() {
    let world = World::new(1);
    let device = world.pod().host_device.name();
    for ip in world.pod().ips() {
        let (length, scope) = if ip.is_ipv4() { (32, " scope link") } else { (128, "") };
        world.node().ip(&format!("route replace {ip}/{length} dev {device}{scope} mtu {NARROW}")).unwrap();
    }
    for frontend in world.frontends() {
        let report = transfer(world.client(), frontend, Direction::Upload, bytes()).unwrap();
        assert_eq!(report.bytes, bytes());
        assert_path_mtu_learned(world.client(), frontend.ip());
    }
}

/// Maps a Pod port on which no server listens, in both families. Returns the NAT addresses.
fn map_closed_port(world: &mut World) -> [SocketAddr; 2] {
    for pod_ip in world.pod().ips() {
        let (frontend, backend) = mapping(Protocol::Udp, CLOSED_NODE_PORT, (pod_ip, POD_PORT + 1).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
    world.node_ips().map(|ip| (ip, CLOSED_NODE_PORT).into())
}

#[test]
fn closed_pod_port_refuses_a_datagram() {
    let mut world = World::new(1);
    for server in map_closed_port(&mut world) {
        let socket = traffic::udp_socket(world.client(), server, true).unwrap();
        socket.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
        socket.send(b"hello").unwrap();
        let error = poll::uninterrupted(|| socket.recv(&mut [0; 64])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{server}");
    }
    world.assert_answers();
}

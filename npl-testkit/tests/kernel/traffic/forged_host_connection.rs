// SPDX-License-Identifier: Apache-2.0
//! Tests that Pods and hosts cannot forge records of host connections, because of which NPL would pass the UDP datagrams
//! of another Pod's client to the host.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::Family;
use npl_agent::core::repairs::RepairJournal;
use npl_agent::nft_guard::{self, Guard, GuardMode};
use npl_testkit::packet::Packet;
use npl_testkit::poll;
use npl_testkit::topology::Device;
use npl_testkit::traffic;
use socket2::{Domain, Socket, Type};

use crate::prog_run::fragments::pieces;
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, World, port_range};

const LIMIT: Duration = Duration::from_secs(30);
const RESYNC: Duration = Duration::from_millis(200);
/// The first of the client's ports. Every forged packet names another port, so that no record affects a later request.
const CLIENT_PORT: u16 = 40_000;
/// The identification of a datagram's fragments, and the payload bytes of each fragment.
const FRAGMENTS: (u32, usize) = (0x4e51, 504);

/// Counts the forwarded packets with a node address as source, ahead of the guard.
const COUNT_FORGED: &str = "
table inet npl_test {
  counter forged { }
  chain forward {
    type filter hook forward priority -20;
    ip6 saddr 2001:db8:0:1::10 counter name forged
  }
}";

/// A Node for each forwarding mode, with two Pods.
fn worlds() -> impl Iterator<Item = (Forwarding, World)> {
    [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload]
        .into_iter()
        .map(|forwarding| (forwarding, World::new(2)))
}

/// Runs the guard, and waits until it has installed or removed its rules.
fn guard(world: &mut World, mode: GuardMode, forwarding: Forwarding) {
    world.guard =
        Some(world.node().run(|| Guard::start(mode, port_range(), RESYNC, RepairJournal::default())).unwrap());
    world.follow(forwarding);
    let is_there = || world.node().nft_table(nft_guard::TABLE).is_some_and(|table| table.contains("drop"));
    poll::until("the guard", LIMIT, || (is_there() == (mode != GuardMode::Off)).then_some(())).unwrap();
}

/// Asks the first Pod over UDP from a port of the client, and returns the name of the Pod that answers.
fn ask(world: &World, client: SocketAddr) -> anyhow::Result<String> {
    let server = world.frontends()[usize::from(client.is_ipv6())];
    let open = || Socket::new(Domain::for_address(server), Type::DGRAM, None);
    let socket = world.client().run(open)??;
    socket.bind(&client.into())?;
    socket.connect(&server.into())?;
    socket.set_read_timeout(Some(poll::extended(LIMIT)))?;
    Ok(traffic::udp_ask(&socket.into(), "who are you?")?.pod)
}

/// Sends datagrams from the first Pod's NAT address to ports of the client, whole and in fragments, through `device`.
/// Returns the ports.
fn forge(world: &World, device: &Device, peer: &Device) -> [SocketAddr; 2] {
    let wire = wire::open_for(Family::V6, device, peer);
    let counted = || world.node().packets_counted("inet npl_test forged").unwrap();
    let clients = [0, 1].map(|number| SocketAddr::new(world.client_ips()[1], CLIENT_PORT + number));
    for (client, is_fragmented) in clients.into_iter().zip([false, true]) {
        let forged = Packet::udp(world.frontends()[1], client, &[7; 1000]);
        let (before, (id, size)) = (counted(), FRAGMENTS);
        let frames = if is_fragmented { pieces(&forged, id, size) } else { vec![with_header(&wire, forged)] };
        for mut frame in frames {
            let header = wire.ethernet();
            frame[..6].copy_from_slice(&header.destination);
            frame[6..12].copy_from_slice(&header.source);
            wire.send(&frame).unwrap();
        }
        poll::until("the forged datagram", LIMIT, || (counted() > before).then_some(())).unwrap();
    }
    clients
}

fn with_header(wire: &Wire, packet: Packet) -> Vec<u8> {
    Packet { ethernet: Some(wire.ethernet()), ..packet }.build()
}

/// Another Pod sends datagrams with the first Pod's NAT address as source. At the uplink, these datagrams look like
/// masqueraded ones.
#[test]
fn node_port_that_another_pod_forges_diverts_no_datagrams() {
    for (forwarding, mut world) in worlds() {
        guard(&mut world, GuardMode::Auto, forwarding);
        world.node().nft(COUNT_FORGED).unwrap();
        let attacker = &world.pods[1].0;
        for client in forge(&world, &attacker.device, &attacker.host_device) {
            assert_eq!(ask(&world, client).unwrap(), "web-0", "{forwarding:?}, from {client}");
        }
        world.assert_answers();
    }
}

/// A host on the Node's link sends the datagrams, which the Node forwards through the device on which they arrived.
#[test]
fn node_port_that_a_host_on_the_link_forges_diverts_no_datagrams() {
    for (forwarding, mut world) in worlds() {
        guard(&mut world, GuardMode::Auto, forwarding);
        world.node().nft(COUNT_FORGED).unwrap();
        let link = world.topology.client();
        for client in forge(&world, &link.device, &link.uplink) {
            assert_eq!(ask(&world, client).unwrap(), "web-0", "{forwarding:?}, from {client}");
        }
    }
}

/// Without the guard, forged datagrams divert the client's datagrams. This test shows that the tests with the guard send
/// effective datagrams.
#[test]
fn forged_node_port_diverts_datagrams_without_the_guard() {
    for (forwarding, mut world) in worlds() {
        guard(&mut world, GuardMode::Off, forwarding);
        world.node().nft(COUNT_FORGED).unwrap();
        let attacker = &world.pods[1].0;
        for client in forge(&world, &attacker.device, &attacker.host_device) {
            assert!(ask(&world, client).is_err(), "{forwarding:?}, from {client}");
        }
    }
}

/// A Pod needs no privilege to send from its own address and a port of the port range. On a Node that does not
/// masquerade, such a datagram is no packet of a host connection.
#[test]
fn datagrams_of_a_pod_from_the_port_range_divert_no_datagrams() {
    for (forwarding, mut world) in worlds() {
        world.follow(forwarding);
        let pod = &world.pods[1].0;
        for (client_ip, pod_ip) in world.client_ips().into_iter().zip(pod.ips()) {
            let client = SocketAddr::new(client_ip, CLIENT_PORT);
            let receiver = world.client().run(|| UdpSocket::bind(client)).unwrap().unwrap();
            let sender = pod.netns.run(|| UdpSocket::bind(local(pod_ip))).unwrap().unwrap();
            sender.send_to(b"hello", client).unwrap();
            receiver.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
            let (_, from) = poll::uninterrupted(|| receiver.recv_from(&mut [0; 16])).unwrap();
            assert_eq!(from, local(pod_ip), "{forwarding:?}: the Node must not masquerade");
            drop(receiver);
            let answer = poll::until("the port to be free", LIMIT, || match ask(&world, client) {
                Err(error) if is_in_use(&error) => None,
                answer => Some(answer),
            });
            assert_eq!(answer.unwrap().0.unwrap(), "web-0", "{forwarding:?}, from {client}");
        }
    }
}

const fn local(pod_ip: IpAddr) -> SocketAddr {
    SocketAddr::new(pod_ip, NODE_PORT)
}

/// Whether a child process that another test starts still has a copy of the socket.
fn is_in_use(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
}

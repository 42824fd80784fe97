// SPDX-License-Identifier: Apache-2.0
//! Tests a flood of fragments of incomplete datagrams, and the effect of the flood on other clients.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use npl_agent::core::model::{Family, NodePort, Protocol};
use npl_common::fragment::SLOTS;
use npl_common::reason::Reason;
use npl_common::traffic::random_client;
use npl_testkit::packet::Packet;
use npl_testkit::poll;
use npl_testkit::traffic::{self, request_limit};

use super::fragments::{ORDERS, request_in_every_order};
use crate::prog_run::fragments::pieces;
use crate::sys::stay_on_this_processor;
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, World, is_emulated};

/// The node port of the second Pod, which receives the flood. The first Pod is spared, because a Pod's stack stores
/// only a few incomplete datagrams.
const FLOODED_PORT: u16 = NODE_PORT + 1;

/// Pairs of flood fragments between two fragments of a legitimate datagram: far more than the fragment buffer of a
/// processor can store.
const BETWEEN: u64 = 64;

/// Identifications of the legitimate datagrams. The values are chosen so that the flood does not overwrite the tracking
/// records of these datagrams. With random identifications, the flood would overwrite the records of about one in
/// several hundred datagrams.
const FIRST_ID: u32 = 0x6000;
const DATAGRAMS: u32 = 16;

/// The number of pairs of flood fragments before the legitimate datagrams. Unless the processor is emulated, these
/// pairs fill about two thirds of the fragment tracking records.
fn pairs() -> u64 {
    if is_emulated() { 500 } else { SLOTS.into() }
}

/// Sends fragments, each from another client address.
struct Flood {
    wire: Wire,
    server: SocketAddr,
    sent: u64,
}

impl Flood {
    fn new(world: &World, server: SocketAddr) -> Self {
        let client = world.topology.client();
        Self { wire: wire::open_for(Family::of(server.ip()), &client.device, &client.uplink), server, sent: 0 }
    }

    /// Sends this number of early fragments, and the same number of first fragments without later ones.
    fn send(&mut self, pairs: u64) {
        for at in [1, 0].repeat(usize::try_from(pairs).unwrap()) {
            let (address, port) = random_client(self.sent);
            let source = match self.server {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(0x1000_0000 + address)),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(0x2001_0db8_00ff_u128 << 80 | u128::from(address))),
            };
            let mut datagram = Packet::udp((source, port).into(), self.server, &[0x4e; 64]);
            datagram.ethernet = Some(self.wire.ethernet());
            self.wire.send(&pieces(&datagram, port.into(), 32)[at]).unwrap();
            self.sent += 1;
        }
    }
}

/// A client that sends legitimate datagrams of four fragments.
struct Sender {
    wire: Wire,
    socket: UdpSocket,
    client: SocketAddr,
    server: SocketAddr,
}

impl Sender {
    fn new(world: &World, client_ip: IpAddr, server: SocketAddr) -> Self {
        let link = world.topology.client();
        let socket = traffic::udp_socket(world.client(), server, true).unwrap();
        let client = (client_ip, socket.local_addr().unwrap().port()).into();
        // Establish the flow before the flood. Each first fragment of the flood opens a half-open flow, whose entry may
        // overwrite that of another half-open flow. A client whose flow is half-open would therefore lose the reply to
        // one in several hundred datagrams.
        for question in ["hello", "hello again"] {
            assert_eq!(traffic::udp_ask(&socket, question).unwrap().pod, "web-0");
        }
        Self { wire: wire::open_for(Family::of(client_ip), &link.device, &link.uplink), socket, client, server }
    }

    /// Sends a datagram's fragments in this order, and calls `before` before each fragment. Returns the payload.
    fn send(&self, id: u32, order: [usize; 4], mut before: impl FnMut()) -> Vec<u8> {
        let question = format!("{id:05}").repeat(1000).into_bytes();
        let mut datagram = Packet::udp(self.client, self.server, &question);
        datagram.ethernet = Some(self.wire.ethernet());
        let frames = pieces(&datagram, id, 1400);
        for at in order {
            before();
            self.wire.send(&frames[at]).unwrap();
        }
        question
    }

    #[track_caller]
    fn assert_answered(&self, question: &[u8]) {
        let answer = traffic::udp_receive(&self.socket, question, request_limit()).unwrap();
        let answer = answer.unwrap_or_else(|| panic!("no reply from {}", self.server));
        assert_eq!((answer.pod.as_str(), answer.client), ("web-0", self.client));
    }

    /// Asserts that the Pod has not replied. Call this after the Pod has replied to a later datagram.
    #[track_caller]
    fn assert_not_answered(&self) {
        self.socket.set_nonblocking(true).unwrap();
        assert_eq!(self.socket.recv(&mut [0; 64]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

/// Returns counts of early fragments, and of packets that were translated to the second Pod.
fn counted(world: &mut World, family: Family) -> [u64; 2] {
    let tables = &world.datapath().tables;
    let (_, early) =
        tables.reasons().unwrap().into_iter().find(|(reason, _)| *reason == Reason::EarlyFragment).unwrap();
    let records = tables.records().unwrap();
    let flooded = records.iter().find(|record| {
        let frontend = record.frontend;
        (frontend.family, frontend.node_port, frontend.protocol) == (family, NodePort(FLOODED_PORT), Protocol::Udp)
    });
    [early, flooded.unwrap().stats.request_packets]
}

/// Asserts that clients are served during the flood.
#[track_caller]
fn assert_served(world: &World, flood: &mut Flood, client_ip: IpAddr, server: SocketAddr) {
    let stream = traffic::tcp_connect(world.client(), server).unwrap();
    let socket = traffic::udp_socket(world.client(), server, true).unwrap();
    let sender = Sender::new(world, client_ip, server);
    let (in_order, first_last) = (ORDERS[0], ORDERS[2]);
    for id in FIRST_ID..FIRST_ID + DATAGRAMS {
        sender.assert_answered(&sender.send(id, in_order, || flood.send(BETWEEN)));
        for answer in [traffic::tcp_ask(&stream, "still connected?"), traffic::udp_ask(&socket, "and you?")] {
            assert_eq!(answer.unwrap().pod, "web-0");
        }
    }
    // The flood's early fragments evict those of this datagram, so the Pod must not answer it. This shows that the
    // flood exceeds the fragment buffer.
    let late = Sender::new(world, client_ip, server);
    late.send(FIRST_ID + DATAGRAMS, first_last, || flood.send(BETWEEN));
    sender.assert_answered(&sender.send(FIRST_ID + DATAGRAMS + 1, in_order, || {}));
    late.assert_not_answered();
}

#[test]
fn fragment_flood_does_not_affect_ordered_datagrams_and_has_no_lasting_effect() {
    let mut world = World::new(2);
    // The requests create neighbor entries. The thread stays on one processor, because early fragments are saved per
    // processor.
    world.assert_answers();
    stay_on_this_processor();
    for (server, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        let mut flood = Flood::new(&world, (server.ip(), FLOODED_PORT).into());
        let before = counted(&mut world, Family::of(client_ip));
        flood.send(pairs());
        let mut received = [0; 2];
        let waited = poll::until("the program to receive the whole flood", request_limit(), || {
            let after = counted(&mut world, Family::of(client_ip));
            received = [0, 1].map(|which| after[which] - before[which]);
            (received == [pairs(); 2]).then_some(())
        });
        assert!(waited.is_ok(), "{waited:?}: {received:?} of {}", pairs());
        assert_served(&world, &mut flood, client_ip, server);
    }
    assert_eq!(request_in_every_order(&world, world.frontends()), ["web-0"; 10]);
}

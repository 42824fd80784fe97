// SPDX-License-Identifier: Apache-2.0
//! Tests fragmented datagrams between a client and a Pod.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use npl_agent::core::model::Protocol;
use npl_testkit::echo::EchoServer;
use npl_testkit::packet::Packet;
use npl_testkit::poll;
use npl_testkit::topology::{Device, Offload};
use npl_testkit::traffic::{self, request_limit, udp_exchange};

use super::firewall::load_rules;
use crate::lab::mapping;
use crate::prog_run::fragments::pieces;
use crate::sys::stay_on_this_processor;
use crate::wire;
use crate::world::{POD_PORT, World};

/// Payload lengths of requests and replies: 4000 and 9000 bytes result in three and seven fragments, 512 bytes in none.
const SIZES: [(usize, usize); 4] = [(4000, 512), (512, 4000), (9000, 9000), (4000, 9000)];

#[track_caller]
fn exchange_large_datagrams(world: &World) {
    for (frontend, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        for (question, answer) in SIZES {
            for _ in 0..3 {
                let answer = udp_exchange(world.client(), frontend, question, answer).unwrap();
                assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client_ip));
                assert_eq!(answer.received, question as u64);
            }
        }
    }
}

#[test]
fn large_datagrams_are_translated_in_both_directions() {
    let world = World::new(1);
    exchange_large_datagrams(&world);
    for device in [&world.topology.client().device, &world.pod().device] {
        device.set_offloads(&Offload::ALL, false).unwrap();
    }
    exchange_large_datagrams(&world);
}

/// Kernel conntrack reassembles the fragments, and the Node fragments the datagram again when it forwards the datagram.
#[test]
fn large_datagrams_are_translated_on_a_node_with_kernel_conntrack() {
    let world = World::new(1);
    load_rules(&world);
    exchange_large_datagrams(&world);
}

/// The Node fragments replies that exceed the uplink's MTU before the egress program runs, so the program must
/// translate fragments.
#[test]
fn replies_that_the_node_fragments_are_translated() {
    let mut world = World::new(1);
    for device in [&world.pod().device, &world.pod().host_device] {
        device.set_mtu(9200).unwrap();
    }
    // With this sysctl, sockets that are opened later allow the Node to fragment their datagrams. Only IPv4 is tested,
    // because in IPv6 only the sender fragments.
    world.pod().netns.sysctl("net/ipv4/ip_no_pmtu_disc", "1").unwrap();
    let _server = EchoServer::start_in(&world.pod().netns, "no-pmtud", &[POD_PORT + 1]).unwrap();
    let (frontend, backend) = mapping(Protocol::Udp, 61_050, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    let answer = udp_exchange(world.client(), (world.node_ip(), 61_050).into(), 512, 9000).unwrap();
    assert_eq!((answer.pod.as_str(), answer.client.ip()), ("no-pmtud", world.client_ip()));
}

/// The orders in which the tests send the four fragments of a datagram.
pub(super) const ORDERS: [[usize; 4]; 5] = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0], [2, 0, 3, 1], [1, 0, 2, 3]];

/// Identification of the next datagram. Each datagram needs a new identification, because early fragments with a known
/// identification would be translated immediately.
static NEXT_ID: AtomicU32 = AtomicU32::new(0x4e50);

/// Sends datagrams of four fragments to each server, one datagram in each order of [`ORDERS`]. Returns the names of the
/// Pods that reply.
pub(super) fn request_in_every_order(world: &World, servers: [SocketAddr; 2]) -> Vec<String> {
    // All fragments must arrive on one processor, because early fragments are saved per processor.
    stay_on_this_processor();
    let wire = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    let mut names = Vec::new();
    for (server, client_ip) in servers.into_iter().zip(world.client_ips()) {
        let socket = traffic::udp_socket(world.client(), server, true).unwrap();
        let client = (client_ip, socket.local_addr().unwrap().port()).into();
        for (number, order) in (0_u8..).zip(ORDERS) {
            let question = vec![b'a' + number; 5000];
            let mut datagram = Packet::udp(client, server, &question);
            datagram.ethernet = Some(wire.ethernet());
            let frames = pieces(&datagram, NEXT_ID.fetch_add(1, Ordering::Relaxed), 1400);
            for at in order {
                wire.send(&frames[at]).unwrap();
            }
            let answer = traffic::udp_receive(&socket, &question, request_limit()).unwrap();
            names.push(answer.unwrap_or_else(|| panic!("no reply from {server} to fragments in order {order:?}")).pod);
        }
    }
    names
}

#[test]
fn fragmented_requests_are_translated_in_any_order() {
    let world = World::new(1);
    // These requests create neighbor entries. Without an entry, a fragment would wait for neighbor resolution, and
    // arrive after later fragments.
    world.assert_answers();
    assert_eq!(request_in_every_order(&world, world.frontends()), ["web-0"; 10]);
    load_rules(&world);
    assert_eq!(request_in_every_order(&world, world.frontends()), ["web-0"; 10]);
}

#[test]
fn fragmented_requests_to_the_node_arrive_in_any_order() {
    let world = World::new(1);
    world.assert_answers();
    let _server = EchoServer::start_in(world.node(), "node", &[9090]).unwrap();
    assert_eq!(request_in_every_order(&world, world.node_ips().map(|ip| (ip, 9090).into())), ["node"; 10]);
}

/// Sends replies of four fragments from the first Pod's device, whose link peer is `gateway`, one reply in each order
/// of [`ORDERS`]. Asserts that the client of an established flow receives all replies complete and from the NAT
/// address.
#[track_caller]
pub(super) fn reply_in_every_order(world: &World, gateway: &Device) {
    stay_on_this_processor();
    let wire = wire::open(&world.pod().device, gateway);
    for (server, pod_ip) in world.frontends().into_iter().zip(world.pod().ips()) {
        let socket = traffic::udp_socket(world.client(), server, true).unwrap();
        let client = traffic::udp_ask(&socket, "hello").unwrap().client;
        for (number, order) in (0_u32..).zip(ORDERS) {
            let answer = format!("answer {number} of {} ", world.pod().name).repeat(5000).into_bytes()[..5000].to_vec();
            let mut datagram = Packet::udp((pod_ip, POD_PORT).into(), client, &answer);
            datagram.ethernet = Some(wire.ethernet());
            let frames = pieces(&datagram, 0x4e50 + number, 1400);
            for at in order {
                wire.send(&frames[at]).unwrap();
            }
            socket.set_read_timeout(Some(request_limit())).unwrap();
            let mut arrived = vec![0; usize::from(u16::MAX)];
            let length = poll::uninterrupted(|| socket.recv(&mut arrived));
            let length = length.unwrap_or_else(|err| panic!("no reply in order {order:?} from {server}: {err}"));
            assert!(
                arrived[..length] == answer,
                "{order:?} from {server}: {}",
                String::from_utf8_lossy(&arrived[..60])
            );
        }
    }
}

#[test]
fn fragmented_replies_are_translated_in_any_order() {
    let world = World::new(1);
    world.assert_answers();
    reply_in_every_order(&world, &world.pod().host_device);
}

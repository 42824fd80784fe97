// SPDX-License-Identifier: Apache-2.0
//! Tests large transfers with and without the devices' segmentation, merging and checksum offloads.

use std::net::UdpSocket;

use aya::util::KernelVersion;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::UdpGsoSegment;
use npl_agent::core::model::{Family, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::packet::{Checksum, Packet};
use npl_testkit::poll;
use npl_testkit::topology::{Offload, Options};
use npl_testkit::traffic::{self, Direction, request_limit, transfer};

use crate::lab::mapping;
use crate::wire;
use crate::world::{World, is_emulated};

/// Number of bytes, large enough for TCP windows to grow until the largest segments are used; fewer on a slow emulated
/// processor.
pub(super) fn bytes() -> u64 {
    if is_emulated() { 2 << 20 } else { 48 << 20 }
}

fn transfer_both_ways(world: &World) {
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            let report = transfer(world.client(), frontend, direction, bytes()).unwrap();
            assert_eq!(report.bytes, bytes());
        }
    }
}

#[test]
fn transfer_is_complete_with_segmentation_offload() {
    let world = World::new(1);
    for device in world.path_devices() {
        device.set_offloads(&Offload::ALL, true).unwrap();
    }
    transfer_both_ways(&world);
}

#[test]
fn transfer_is_complete_without_device_offloads() {
    let world = World::new(1);
    for device in world.path_devices() {
        device.set_offloads(&Offload::ALL, false).unwrap();
    }
    transfer_both_ways(&world);
}

#[test]
fn transfer_is_complete_with_receive_merging() {
    let world = World::new(1);
    for device in world.path_devices() {
        device.set_offloads(&[Offload::Tso, Offload::Gso], false).unwrap();
        device.set_offloads(&[Offload::Gro], true).unwrap();
    }
    transfer_both_ways(&world);
}

/// NPL translates only the first datagram of a fraglist. The kernel must translate the others when it splits the
/// fraglist into packets (openwrt/openwrt#19190 reports a kernel that does not).
#[test]
fn every_datagram_of_a_fraglist_is_translated() {
    const DATAGRAMS: u8 = 8;
    const LENGTH: u16 = 1000;
    const POD_PORT: u16 = 9999;
    /// The first kernel with GRO on veth devices without an XDP program.
    const VETH_GRO_SINCE: KernelVersion = KernelVersion::new(5, 13, 0);
    let mut world = World::new(1);
    let [client, uplink, _, host_device] = world.path_devices();
    uplink.set_offloads(&[Offload::Gro, Offload::GroFraglist], true).unwrap();
    for device in [&client, &host_device] {
        device.set_offloads(&[Offload::Gso], false).unwrap();
    }
    let pod_ips = world.pod().ips();
    for (index, (pod_ip, client_ip)) in pod_ips.into_iter().zip(world.client_ips()).enumerate() {
        let node_port = 61_050;
        let (frontend, backend) = mapping(Protocol::Udp, node_port, (pod_ip, POD_PORT).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
        let receiver = world.pod().netns.run(|| UdpSocket::bind((pod_ip, POD_PORT))).unwrap().unwrap();
        receiver.set_read_timeout(Some(request_limit())).unwrap();
        let sender = traffic::udp_socket(world.client(), (world.node_ips()[index], node_port).into(), true).unwrap();
        // With this option, one call sends all datagrams, so that they arrive in one poll of the uplink's driver.
        setsockopt(&sender, UdpGsoSegment, &LENGTH.into()).unwrap();
        let payload: Vec<u8> = (0..DATAGRAMS).flat_map(|number| vec![number; LENGTH.into()]).collect();
        sender.send(&payload).unwrap();
        for number in 0..DATAGRAMS {
            let mut datagram = [0; 2048];
            let (length, from) = poll::uninterrupted(|| receiver.recv_from(&mut datagram)).unwrap();
            assert_eq!((&datagram[..length], from.ip()), (vec![number; LENGTH.into()].as_slice(), client_ip));
        }
        let records = world.datapath().tables.records().unwrap();
        let counted = records.iter().find(|record| record.frontend == frontend).unwrap().stats.request_packets;
        let is_joined = counted < DATAGRAMS.into();
        assert!(is_joined || KernelVersion::current().unwrap() < VETH_GRO_SINCE, "GRO has not joined the datagrams");
    }
}

/// If a driver receives a frame into several buffers, the headers may not be in the linear part of the skb. The
/// programs must translate such packets too.
#[test]
fn request_with_nonlinear_headers_is_answered() {
    let world = World::with_options(1, Options { mtu: 9000, ..Options::default() });
    let [client, uplink, ..] = world.path_devices();
    for (frontend, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        let socket = world.client().run(|| UdpSocket::bind((client_ip, 0))).unwrap().unwrap();
        socket.set_read_timeout(Some(request_limit())).unwrap();
        let wire = wire::open_for(Family::of(client_ip), &client, &uplink);
        let mut packet = Packet::udp(socket.local_addr().unwrap(), frontend, &[7; 5000]);
        packet.ethernet = Some(wire.ethernet());
        wire.send_in_parts(&packet.build()).unwrap();
        let (_, from) = poll::uninterrupted(|| socket.recv_from(&mut [0; 8192])).unwrap();
        assert_eq!(from, frontend);
    }
}

/// Tests every combination of checksum offload at client, Pod and Node. If a rewrite mistakes a partial checksum for a
/// complete one, or the reverse, no packet of one combination arrives.
#[test]
fn transfer_is_complete_with_every_combination_of_checksum_offloads() {
    let world = World::new(1);
    let [client, uplink, pod, host_device] = world.path_devices();
    for at_client in [true, false] {
        for at_pod in [true, false] {
            for at_node in [true, false] {
                client.set_offloads(&[Offload::TxChecksum], at_client).unwrap();
                pod.set_offloads(&[Offload::TxChecksum], at_pod).unwrap();
                for device in [&uplink, &host_device] {
                    device.set_offloads(&[Offload::TxChecksum], at_node).unwrap();
                }
                for frontend in world.frontends() {
                    for direction in [Direction::Upload, Direction::Download] {
                        transfer(world.client(), frontend, direction, 1 << 20).unwrap();
                    }
                }
                world.assert_answers();
            }
        }
    }
}

/// A packet whose sender computes the checksum itself is unverified on arrival. The programs must not make the kernel
/// treat the packet as verified.
#[test]
fn datagram_with_a_wrong_checksum_is_dropped_by_the_pod() {
    let world = World::new(1);
    world.assert_answers();
    let wire = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    for (server, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        let socket = traffic::udp_socket(world.client(), server, true).unwrap();
        let client = (client_ip, socket.local_addr().unwrap().port()).into();
        let before = wrong_checksums(&world.pod().netns);
        let mut damaged = Packet::udp(client, server, b"damaged");
        damaged.ethernet = Some(wire.ethernet());
        let mut whole = Packet::udp(client, server, b"whole");
        whole.ethernet = Some(wire.ethernet());
        *damaged.transport.checksum_mut().unwrap() = Checksum::Wrong(0x4e50);
        wire.send(&damaged.build()).unwrap();
        wire.send(&whole.build()).unwrap();
        let answer = traffic::udp_receive(&socket, b"whole", request_limit()).unwrap();
        assert_eq!(answer.unwrap_or_else(|| panic!("no reply from {server}")).pod, "web-0");
        assert_eq!(wrong_checksums(&world.pod().netns), before + 1, "at {server}");
    }
}

/// Number of UDP datagrams of both families that were dropped for a wrong checksum.
fn wrong_checksums(netns: &Netns) -> u64 {
    ["Udp", "Udp6"].into_iter().map(|protocol| netns.counter(protocol, "InCsumErrors").unwrap()).sum()
}

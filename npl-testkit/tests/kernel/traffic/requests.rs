// SPDX-License-Identifier: Apache-2.0
//! Tests single requests: which Pod answers, and which client address the Pod sees.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use npl_agent::core::model::{Family, Frontend, NodePort, Protocol};
use npl_testkit::poll;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{self, UdpOptions};

use crate::lab::mapping;
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

/// The time limit for a frame to arrive. A wait takes this long only if the frame is lost.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn each_node_port_reaches_its_pod_which_sees_the_client() {
    let world = World::new(3);
    for (index, (pod, _)) in world.pods.iter().enumerate() {
        for (node_ip, client_ip) in world.node_ips().into_iter().zip(world.client_ips()) {
            let server = (node_ip, NODE_PORT + u16::try_from(index).unwrap()).into();
            let tcp = traffic::tcp_request(world.client(), server, "by tcp").unwrap();
            assert_eq!((tcp.pod.as_str(), tcp.client.ip()), (pod.name.as_str(), client_ip));
            let udp = traffic::udp_request(world.client(), server, b"by udp", UdpOptions::default()).unwrap().answer;
            assert_eq!((udp.pod.as_str(), udp.client.ip()), (pod.name.as_str(), client_ip));
        }
    }
}

#[test]
fn datagrams_with_and_without_checksum_are_answered() {
    let world = World::new(1);
    for checksum in [true, false] {
        let options = UdpOptions { checksum, ..UdpOptions::default() };
        let answer = traffic::udp_request(world.client(), world.frontend(), b"hello", options).unwrap().answer;
        assert_eq!((answer.received, answer.client.ip()), (5, world.client_ip()));
    }
}

#[test]
fn connections_of_one_client_are_distinguished() {
    let world = World::new(1);
    let streams: Vec<_> = (0..16).map(|_| traffic::tcp_connect(world.client(), world.frontend()).unwrap()).collect();
    for (number, stream) in streams.iter().enumerate() {
        let answer = traffic::tcp_ask(stream, &format!("connection {number}")).unwrap();
        assert_eq!(answer.client.port(), stream.local_addr().unwrap().port());
    }
}

#[test]
fn each_of_two_uplinks_serves_its_client_by_either_address() {
    let mut world = World::with_options(1, Options { clients: 2, ..Options::default() });
    let addresses = [world.node_ip(), Ipv4Addr::new(203, 0, 113, 10)];
    set_addresses(world.datapath(), &addresses.map(Into::into));
    for client in world.topology.clients() {
        for address in addresses {
            let server = (address, NODE_PORT).into();
            let tcp = traffic::tcp_request(&client.netns, server, "who are you?").unwrap();
            assert_eq!(tcp.client.ip(), client.addresses.v4);
            let udp = traffic::udp_request(&client.netns, server, b"and you?", UdpOptions::default()).unwrap().answer;
            assert_eq!(udp.client.ip(), client.addresses.v4);
        }
    }
}

#[test]
fn address_that_is_added_while_running_is_served() {
    let mut world = World::new(1);
    let added = Ipv4Addr::new(192, 0, 2, 11);
    world.node().ip("addr add 192.0.2.11/24 dev eth0").unwrap();
    let server = (added, NODE_PORT).into();
    assert_eq!(refusal(&world, (added, NODE_PORT)), ErrorKind::ConnectionRefused);
    let [v4, v6] = world.node_ips();
    let addresses = [v4, v6, added.into()];
    set_addresses(world.datapath(), &addresses);
    assert_eq!(traffic::tcp_request(world.client(), server, "hello").unwrap().pod, "web-0");
    world.assert_answers();
}

#[test]
fn closed_pod_port_refuses_at_once() {
    let mut world = World::new(1);
    let (frontend, backend) = mapping(Protocol::Tcp, 61_050, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    assert_eq!(refusal(&world, (world.node_ip(), 61_050)), ErrorKind::ConnectionRefused);
    let records = world.datapath().tables.records().unwrap();
    let record = records.iter().find(|record| record.frontend == frontend).unwrap();
    assert_eq!(
        (record.stats.request_packets, record.stats.reply_packets),
        (1, 1),
        "the Pod must refuse the connection"
    );
}

#[test]
fn unmapped_port_of_the_range_is_refused_by_the_host() {
    let world = World::new(1);
    assert_eq!(refusal(&world, (world.node_ip(), 61_099)), ErrorKind::ConnectionRefused);
}

#[test]
fn removed_mapping_is_refused_by_the_host_until_it_is_added_again() {
    let mut world = World::new(1);
    let frontend = Frontend { family: Family::V4, node_port: NodePort(NODE_PORT), protocol: Protocol::Tcp };
    let backend = world.datapath().mappings().unwrap()[&frontend];
    world.datapath().remove_mapping(frontend).unwrap();
    assert_eq!(refusal(&world, (world.node_ip(), NODE_PORT)), ErrorKind::ConnectionRefused);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world.assert_answers();
}

/// Returns the error of a rejected connection.
#[track_caller]
fn refusal(world: &World, server: (Ipv4Addr, u16)) -> ErrorKind {
    let error = traffic::tcp_connect(world.client(), server.into()).unwrap_err();
    error.downcast_ref::<std::io::Error>().unwrap().kind()
}

#[test]
fn capture_on_the_uplink_shows_untranslated_requests() {
    let world = World::new(1);
    let client = world.topology.client();
    let wire = wire::capture(&client.uplink, &client.device);
    for (node_ip, client_ip) in world.node_ips().into_iter().zip(world.client_ips()) {
        // A sent TCP segment is shared between the socket's retransmission queue and packet captures, so the programs
        // must not change a shared buffer.
        let answer = traffic::tcp_request(world.client(), (node_ip, NODE_PORT).into(), PAYLOAD).unwrap();
        assert_eq!(answer.client.ip(), client_ip);
        let frame = captured_request(&wire);
        let endpoints =
            [&address_bytes(node_ip)[..], &answer.client.port().to_be_bytes(), &NODE_PORT.to_be_bytes()].concat();
        assert!(
            frame.windows(endpoints.len()).any(|window| window == endpoints),
            "{node_ip} and the ports are not in {frame:02x?}"
        );
    }
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The payload by which the test finds the request's frame.
const PAYLOAD: &str = "a request that is captured";

/// Finds the request's frame among the frames that the capture has received.
fn captured_request(wire: &Wire) -> Vec<u8> {
    loop {
        let frame = wire.receive(poll::extended(LIMIT)).unwrap().unwrap();
        if frame.windows(PAYLOAD.len()).any(|window| window == PAYLOAD.as_bytes()) {
            return frame;
        }
    }
}

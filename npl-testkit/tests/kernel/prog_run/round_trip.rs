// SPDX-License-Identifier: Apache-2.0
//! Tests requests and replies between random endpoints with random payloads. Each reply comes from the address to which
//! the request was sent.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::sctp_chunks::{DATA, INIT, INIT_ACK, SACK};
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Packet, Transport};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::scene::{GENERATION, from, sctp, tcp, to, udp, with_family};
use crate::lab::{Lab, NEXT, Outcome};
use crate::oracle::PROTOCOLS;

/// The number of random exchanges for each family.
const CASES: u32 = 100;
/// The transmission sequence number (TSN) of a client's DATA chunk. The Pod's SACK acknowledges this TSN.
const CLIENT_TSN: u32 = 0x2000_0000;
/// Length of the type, flags and length of an SCTP chunk in bytes. The TSN of a DATA chunk follows.
const CHUNK_HEADER: usize = 4;

/// A request and its reply.
#[derive(Clone, Debug)]
struct Exchange {
    protocol: Protocol,
    client: SocketAddr,
    node: SocketAddr,
    pod: SocketAddr,
    /// Whether the request opens a connection. Otherwise, it belongs to a connection whose handshake no program has
    /// seen.
    opens: bool,
    question: Vec<u8>,
    answer: Vec<u8>,
}

impl Exchange {
    fn request(&self) -> Packet {
        let Self { protocol, client, node, question, .. } = self;
        match protocol {
            Protocol::Tcp => tcp(*client, *node, if self.opens { SYN } else { PSH | ACK }, question),
            Protocol::Udp => udp(*client, *node, question),
            Protocol::Sctp if self.opens => sctp(*client, *node, INIT, question),
            Protocol::Sctp => sctp(*client, *node, DATA, &[&CLIENT_TSN.to_be_bytes()[..], question].concat()),
        }
    }

    /// Returns the reply of a Pod that received this packet and has no other information about the client.
    fn reply(&self, received: &Packet) -> Packet {
        let mut transport = received.transport.clone();
        let (source, destination) = transport.ports_mut().unwrap();
        let (pod, client) = ((received.destination_ip(), *destination).into(), (received.source_ip(), *source).into());
        let answer = &self.answer;
        match transport {
            Transport::Tcp(received) => {
                let mut reply = tcp(pod, client, if self.opens { SYN | ACK } else { ACK }, answer);
                if let Transport::Tcp(segment) = &mut reply.transport {
                    segment.sequence = received.acknowledgement;
                    segment.acknowledgement = received.sequence.wrapping_add(u32::from(self.opens));
                }
                reply
            }
            Transport::Sctp(_) if self.opens => sctp(pod, client, INIT_ACK, answer),
            Transport::Sctp(received) => {
                let tsn = &received.chunks[CHUNK_HEADER..][..size_of::<u32>()];
                let mut reply = sctp(pod, client, SACK, &[tsn, &[0; 8]].concat());
                if let Transport::Sctp(sack) = &mut reply.transport {
                    sack.add_chunk(DATA, answer);
                }
                reply
            }
            Transport::Udp(_) | Transport::Icmp(_) | Transport::Raw { .. } => udp(pod, client, answer),
        }
    }

    fn play(&self, lab: &mut Lab) {
        lab.set_addresses(&[self.node.ip()]);
        lab.add(self.protocol, self.node.port(), self.pod, GENERATION);
        let request = self.request();
        let received = parsed(&lab.ingress(&request));
        assert_eq!(received, to(&request, self.pod), "the Pod must receive the translated request");
        let reply = self.reply(&received);
        let answered = parsed(&lab.egress(&reply));
        assert_eq!(answered, from(&to(&reply, self.client), self.node), "the client must receive the translated reply");
        lab.remove(Family::of(self.pod.ip()), self.protocol, self.node.port());
    }
}

/// Returns the packet that the program passed. The parser also verifies the checksums.
fn parsed(outcome: &Outcome) -> Packet {
    assert_eq!(outcome.action, NEXT);
    Packet::parse(&outcome.bytes).unwrap()
}

fn exchanges(family: Family) -> impl Strategy<Value = Exchange> {
    let ports = || prop_oneof![4 => any::<u16>(), 1 => select(&[0, 1, 0x00ff, 0xff00, 0xffff][..])];
    let endpoints = (ips(family), ports(), ips(family), 61_000..=61_100_u16, ips(family), 1..=u16::MAX);
    let contents = || prop_oneof![vec(any::<u8>(), 0..40), vec(any::<u8>(), 0..1400)];
    let exchange = (select(&PROTOCOLS[..]), endpoints, any::<bool>(), contents(), contents());
    exchange
        .prop_map(|(protocol, (client, client_port, node, node_port, pod, pod_port), opens, question, answer)| {
            let (client, node, pod) = ((client, client_port).into(), (node, node_port).into(), (pod, pod_port).into());
            Exchange { protocol, client, node, pod, opens, question, answer }
        })
        .prop_filter("three different addresses", |case| {
            case.client.ip() != case.node.ip() && case.node.ip() != case.pod.ip() && case.pod.ip() != case.client.ip()
        })
}

/// Returns addresses of hosts, neither multicast nor loopback.
fn ips(family: Family) -> BoxedStrategy<IpAddr> {
    if family == Family::V4 {
        let is_host_address = |ip: &Ipv4Addr| !matches!(ip.octets()[0], 0 | 127 | 224..);
        return any::<u32>()
            .prop_map(Ipv4Addr::from)
            .prop_filter("a host's address", is_host_address)
            .prop_map_into()
            .boxed();
    }
    // The prefixes of global and of unique local addresses.
    let prefixes = select(&[0x2000_u16, 0x2001, 0x3fff, 0xfc00, 0xfdff][..]);
    let address = |(prefix, suffix): (u16, u128)| Ipv6Addr::from(u128::from(prefix) << 112 | suffix >> 16);
    (prefixes, any::<u128>()).prop_map(address).prop_map_into().boxed()
}

#[test]
fn reply_comes_from_the_address_that_the_client_sent_to() {
    for family in Family::ALL {
        with_family(family, |lab| {
            let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
            // The seed is fixed, so that every run tests the same cases.
            let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[0x4e; 32]);
            let lab = RefCell::new(lab);
            let play = |exchange: Exchange| {
                exchange.play(&mut lab.borrow_mut());
                Ok(())
            };
            TestRunner::new_with_rng(config, rng).run(&exchanges(family), play).unwrap();
        });
    }
}

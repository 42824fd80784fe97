// SPDX-License-Identifier: Apache-2.0
//! Tests uplinks without a link-layer header, where packets may be shorter than the shortest Ethernet frame.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use npl_testkit::packet::Packet;
use npl_testkit::poll;
use npl_testkit::topology::Options;
use npl_testkit::tun::{self, Tun};

use crate::prog_run::fragments::{L3, V4_HEADER, pieces};
use crate::sys::stay_on_this_processor;
use crate::world::World;

/// The address of a client that the Node reaches through the uplink.
const CLIENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
const LIMIT: Duration = Duration::from_secs(30);
/// The payload size of the first fragment in bytes.
const FIRST: usize = 24;
const UDP_HEADER: usize = 8;

/// Whether an IPv4 packet is a datagram with these endpoints.
fn is_from_to(packet: &[u8], from: SocketAddr, to: SocketAddr) -> bool {
    let head = &Packet::udp(from, to, b"").build()[L3..];
    let (addresses, ports) = (12..V4_HEADER, V4_HEADER..V4_HEADER + 4);
    packet.get(addresses.clone()) == head.get(addresses) && packet.get(ports.clone()) == head.get(ports)
}

/// Without a link-layer header, a last fragment with a payload of a few bytes is shorter than any Ethernet frame. The
/// program must translate such a fragment, even if the fragment arrives before the first one.
#[test]
fn last_fragment_of_a_few_bytes_is_translated_without_a_link_layer_header() {
    // All fragments must arrive on one processor, because early fragments are saved per processor.
    stay_on_this_processor();
    let mut world = World::bare(1, Options::default());
    let uplink = Tun::create(world.node(), "tun0", tun::NO_HEADER).unwrap();
    world.node().ip(&format!("link set tun0 up\nroute add {CLIENT}/32 dev tun0")).unwrap();
    let device = world.devices().into_iter().find(|device| device.name == "tun0").unwrap();
    world.install_on(&[device]);
    let node = world.frontend();
    for last in 1..=9_u8 {
        let client: SocketAddr = (CLIENT, 5000 + u16::from(last)).into();
        let question = vec![b'a'; FIRST - UDP_HEADER + usize::from(last)];
        let frames = pieces(&Packet::udp(client, node, &question).to_this_machine(), last.into(), FIRST);
        assert_eq!(frames.len(), 2);
        for frame in frames.iter().rev() {
            uplink.send(&frame[L3..]).unwrap();
        }
        let mut is_answered = || uplink.receive().unwrap().filter(|packet| is_from_to(packet, node, client));
        let what = format!("the answer to a datagram whose last fragment has {last} bytes");
        poll::until(&what, LIMIT, &mut is_answered).unwrap();
    }
}

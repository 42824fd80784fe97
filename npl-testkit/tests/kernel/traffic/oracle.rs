// SPDX-License-Identifier: Apache-2.0
//! What the kernel's own address translation makes of ICMP errors, by nftables, is what ours has to make of them.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use npl_agent::core::model::Protocol;
use npl_testkit::packet::{Ethernet, Packet, Transport};
use npl_testkit::topology::Options;
use npl_testkit::{tools, traffic};

use crate::lab::mapping;
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

const CLIENT_PORT: u16 = 40_000;
/// Its Pod port is closed.
const CLOSED: u16 = NODE_PORT + 50;
/// An address of the Node that it does not answer from by itself.
const SECOND_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);
/// A router on the way to the client.
const ROUTER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// Far longer than an error needs; nobody waits for it unless one is lost.
const LIMIT: Duration = Duration::from_secs(5);

/// The same mappings, by nftables.
fn install_rules(world: &World) {
    let pod = world.pod().ip();
    let rules = format!(
        "table ip npl_oracle {{
  chain prerouting {{
    type nat hook prerouting priority dstnat;
    ip daddr {{ {}, {SECOND_ADDRESS} }} udp dport {NODE_PORT} dnat to {pod}:{POD_PORT}
    ip daddr {{ {}, {SECOND_ADDRESS} }} udp dport {CLOSED} dnat to {pod}:{}
  }}
}}",
        world.node_ip(),
        world.node_ip(),
        POD_PORT + 1
    );
    tools::output_with_input(world.node().command("nft").unwrap().args(["-f", "-"]), &rules).unwrap();
}

fn install_ours(world: &mut World) {
    world.install();
    let (frontend, backend) = mapping(Protocol::Udp, CLOSED, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    let addresses = [world.node_ip().into(), SECOND_ADDRESS.into()];
    set_addresses(world.datapath(), &addresses);
}

/// Sends from one end, and gives what `is_wanted` of what is seen at another.
fn observe(from: &Wire, packet: &Packet, at: &Wire, is_wanted: impl Fn(&Packet) -> bool) -> Packet {
    let mut sent = packet.clone();
    sent.ethernet = Some(Ethernet { destination: from.gateway, source: from.address, vlans: Vec::new() });
    from.send(&sent.build()).unwrap();
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        let Some(frame) = at.receive(LIMIT).unwrap() else { break };
        let Ok(mut seen) = Packet::parse(&frame) else { continue };
        if is_wanted(&seen) {
            // Of this run alone: addresses of devices, and the sender's number of the packet.
            seen.ethernet = None;
            seen.ipv4_mut().unwrap().identification = 0;
            return seen;
        }
    }
    panic!("nothing came of {packet:?}");
}

fn is_error(packet: &Packet) -> bool {
    matches!(&packet.transport, Transport::Icmp(icmp) if matches!(icmp.kind, 3 | 11 | 12))
}

/// All errors as they arrive, from either side.
fn errors(world: &World) -> Vec<Packet> {
    let client = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    let pod = wire::open(&world.pod().device, &world.pod().host_device);
    let mut seen = Vec::new();
    // Each by a port of its own: where two flows would be one to the Pod, the kernel gives one of them another port.
    for (address, client_port) in [(world.node_ip(), CLIENT_PORT), (SECOND_ADDRESS, CLIENT_PORT + 1)] {
        let from = SocketAddr::from((world.topology.client().addresses.v4, client_port));
        // Without a socket the client would send errors of its own.
        let _receiver = world.client().run(|| UdpSocket::bind(from)).unwrap().unwrap();
        let closed = Packet::udp(from, (address, CLOSED).into(), b"anybody there?");
        seen.push(observe(&client, &closed, &client, is_error));

        let node = SocketAddr::from((address, NODE_PORT));
        let request = Packet::udp(from, node, b"who are you?");
        let answer = observe(&client, &request, &client, |packet| {
            packet.source_ip() == address && matches!(&packet.transport, Transport::Udp(_))
        });
        assert_eq!(answer.destination_ip(), from.ip());
        let mut last_hop = request.clone();
        last_hop.ipv4_mut().unwrap().ttl = 1;
        seen.push(observe(&client, &last_hop, &client, is_error));

        let reply = Packet::udp(node, from, b"what the Pod has answered");
        for (kind, code) in [(3, 1), (3, 4), (11, 0), (12, 0)] {
            for bytes in [8, 33] {
                let error = Packet::icmp_error(ROUTER.into(), kind, code, &reply, bytes);
                seen.push(observe(&client, &error, &pod, is_error));
            }
        }
    }
    seen
}

#[test]
fn errors_arrive_as_by_the_kernels_own_translation() {
    let observed = [false, true].map(|is_ours| {
        let mut world = World::bare(1, Options::default());
        world.node().ip(&format!("addr add {SECOND_ADDRESS}/24 dev eth0")).unwrap();
        // Neighbours must be known: a frame that waits for one would come later than those after it.
        let direct = (world.pod().ip(), POD_PORT).into();
        traffic::tcp_request(world.client(), direct, "warm up").unwrap();
        // Errors are not to be saved at.
        for netns in [world.node(), &world.pod().netns] {
            netns.sysctl("net/ipv4/icmp_ratelimit", "0").unwrap();
        }
        if is_ours {
            install_ours(&mut world);
        } else {
            install_rules(&world);
        }
        errors(&world)
    });
    let [theirs, ours] = observed;
    assert_eq!(ours, theirs);
}

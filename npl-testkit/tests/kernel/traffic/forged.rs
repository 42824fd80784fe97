// SPDX-License-Identifier: Apache-2.0
//! Tests forged frames against live sockets. A second host, in another network of the Node, sends frames with the
//! client's source address and wrong sequence and acknowledgement numbers, while the client and the Pod have a
//! connection open.

use std::fmt::Debug;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::{Family, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::packet::sctp_chunks::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Packet, SCTP_TAG, Transport};
use npl_testkit::poll;
use npl_testkit::topology::Options;
use npl_testkit::traffic::has_sctp;
use socket2::{Domain, Socket, Type};

use crate::lab::mapping;
use crate::prog_run::forged::{ALL_FLAGS, forged_isns};
use crate::prog_run::fragments::pieces;
use crate::prog_run::scene::with_isns;
use crate::wire::{self, Wire};
use crate::world::{POD_PORT, World, set_addresses};

/// The Pod port of the tests' own servers, and its node port.
const SERVER_PORT: u16 = POD_PORT + 1;
const NODE_PORT: u16 = 61_050;
/// The time limit of waits, which is reached only if a packet is lost.
const LIMIT: Duration = Duration::from_secs(30);
/// More than the idle timeout of every flow.
const IDLE: Duration = Duration::from_hours(24 * 6);
/// The payload size of a forged fragment in bytes.
const FRAGMENT: usize = 64;

/// A Node with the addresses of two networks: the client is in the first network, the attacker in the second one.
struct Scene {
    world: World,
    /// The attacker's device.
    wire: Wire,
}

/// The address to which the client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Mapped,
    Direct,
}

impl Scene {
    /// Returns a Node for each forwarding mode.
    fn of_each_mode() -> impl Iterator<Item = Self> {
        let modes = [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload];
        modes.into_iter().map(Self::new)
    }

    fn new(forwarding: Forwarding) -> Self {
        let mut world = World::with_options(1, Options { clients: 2, ..Options::default() });
        if forwarding != Forwarding::Stack {
            world.follow(forwarding);
        }
        for setting in ["all", "eth0", "eth1"] {
            world.node().sysctl(&format!("net/ipv4/conf/{setting}/rp_filter"), "0").unwrap();
        }
        let addresses = Family::ALL.map(|family| [node_ip(&world, family), other_node_ip(family)]).concat();
        set_addresses(world.datapath(), &addresses);
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
            for pod_ip in world.pod().ips() {
                let (frontend, backend) = mapping(protocol, NODE_PORT, (pod_ip, SERVER_PORT).into(), 1);
                world.datapath().upsert_mapping(frontend, backend).unwrap();
            }
        }
        // These requests create neighbor entries, so that no forged frame waits for neighbor resolution.
        world.assert_answers();
        let attacker = &world.topology.clients()[1];
        let wire = wire::open(&attacker.device, &attacker.uplink);
        Self { world, wire }
    }

    fn pod(&self, family: Family) -> SocketAddr {
        (of(&self.world.pod().ips(), family), SERVER_PORT).into()
    }

    fn server(&self, family: Family, path: Path) -> SocketAddr {
        match path {
            Path::Mapped => (node_ip(&self.world, family), NODE_PORT).into(),
            Path::Direct => self.pod(family),
        }
    }

    /// Returns the three destinations by which a client reaches the Pod port: the node port at each of the two node
    /// addresses, and the Pod port at the Pod's own address.
    fn destinations(&self, family: Family) -> [SocketAddr; 3] {
        let other = (other_node_ip(family), NODE_PORT).into();
        [self.server(family, Path::Mapped), other, self.pod(family)]
    }

    /// Creates a socket that is bound to a free port of the client.
    fn client_socket(&self, family: Family, kind: Type, protocol: i32) -> Socket {
        let socket = socket(self.world.client(), family, kind, protocol);
        socket.bind(&SocketAddr::new(of(&self.world.client_ips(), family), 0).into()).unwrap();
        socket
    }

    /// Creates a socket that is bound to the Pod's port.
    fn pod_socket(&self, family: Family, kind: Type, protocol: i32) -> Socket {
        let socket = socket(&self.world.pod().netns, family, kind, protocol);
        socket.bind(&self.pod(family).into()).unwrap();
        socket
    }

    /// Opens a connection from a new client socket to a new Pod socket. Calls `attack` with the client's address before
    /// the client connects.
    fn connect(&self, family: Family, path: Path, protocol: i32, attack: impl FnOnce(SocketAddr)) -> Pair {
        let listener = self.pod_socket(family, Type::STREAM, protocol);
        listener.listen(16).unwrap();
        let client = self.client_socket(family, Type::STREAM, protocol);
        let address = client.local_addr().unwrap().as_socket().unwrap();
        attack(address);
        let (device, uplink) = (&self.world.topology.client().device, &self.world.topology.client().uplink);
        let wire = wire::open_for(family, device, uplink);
        let server = self.server(family, path);
        client.connect_timeout(&server.into(), LIMIT).unwrap_or_else(|error| panic!("connect to {server}: {error}"));
        let (pod, _) = poll::uninterrupted(|| listener.accept()).unwrap();
        pod.set_read_timeout(Some(LIMIT)).unwrap();
        Pair { client: client.into(), pod: pod.into(), address, server, wire }
    }

    /// Sends forged segments: each of [`ALL_FLAGS`] to each address, and some segments in fragments. Returns the number
    /// of unfragmented segments.
    fn attack_tcp(&self, client: SocketAddr, isns: [(u32, u32); 3]) -> u64 {
        let mut sent = 0;
        for (number, destination) in self.destinations(Family::of(client.ip())).into_iter().enumerate() {
            for flags in ALL_FLAGS {
                // The length of `ALL_FLAGS` is a multiple of 3. Without `number`, each destination would get the same
                // numbers with the same flags.
                let isns = isns[(sent + number) % isns.len()];
                // No flag determines alone whether the segment has a payload.
                let payload: &[u8] = if flags.count_ones() % 2 == 1 { b"" } else { b"forged" };
                self.send(&with_isns(Packet::tcp(client, destination, flags, payload), isns));
                if sent.is_multiple_of(5) {
                    self.send_parts(&with_isns(Packet::tcp(client, destination, flags, &[7; 200]), isns));
                }
                sent += 1;
            }
        }
        sent as u64
    }

    /// Sends forged ICMP errors to each address. Each error quotes a packet from this address to the client; `reply`
    /// returns the packet.
    fn attack_by_errors(&self, client: SocketAddr, reply: impl Fn(SocketAddr) -> Packet) {
        let family = Family::of(client.ip());
        let kinds =
            if family == Family::V4 { [(3, 1), (3, 3), (3, 4), (11, 0)] } else { [(1, 0), (1, 4), (2, 0), (3, 0)] };
        let router = of(&self.world.topology.clients()[1].addresses.ips(), family);
        for destination in self.destinations(family) {
            for (kind, code) in kinds {
                for bytes in [8, 20, 64] {
                    let mut error = Packet::icmp_error(router, kind, code, &reply(destination), bytes);
                    let Transport::Icmp(icmp) = &mut error.transport else { unreachable!("the packet is an error") };
                    icmp.rest = [0, 0, 5, 20];
                    self.send(&error);
                }
            }
        }
    }

    fn send(&self, packet: &Packet) {
        let packet = Packet { ethernet: Some(self.wire.ethernet()), ..packet.clone() };
        self.wire.send(&packet.build()).unwrap();
    }

    /// Sends all fragments of a packet but the last one, and of another packet only the last fragment.
    fn send_parts(&self, packet: &Packet) {
        let packet = Packet { ethernet: Some(self.wire.ethernet()), ..packet.clone() };
        let (first, second) = (pieces(&packet, 0x4e51, FRAGMENT), pieces(&packet, 0x4e52, FRAGMENT));
        for frame in first[..first.len() - 1].iter().chain(second.last()) {
            self.wire.send(frame).unwrap();
        }
    }

    /// Removes all flows from the flow table, as if no packet had arrived for longer than every idle timeout.
    fn expire_flows(&mut self, path: Path) {
        let now: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
        let removed = self.world.datapath().tables.remove_expired_flows(now + IDLE, |_, _| {}).unwrap();
        assert!(removed > 0 || path == Path::Direct, "the mapped flow is not in the flow table");
    }

    /// The number of IP packets that the Pod's stack has received.
    fn packets_at_pod(&self, family: Family) -> u64 {
        let protocol = if family == Family::V4 { "Ip" } else { "Ip6" };
        self.world.pod().netns.counter(protocol, "InReceives").unwrap()
    }

    /// The number of segments that the Pod's stack has received.
    fn segments_at_pod(&self) -> u64 {
        self.world.pod().netns.counter("Tcp", "InSegs").unwrap()
    }
}

/// Both ends of a connection.
struct Pair {
    client: TcpStream,
    pod: TcpStream,
    /// The client's address and port.
    address: SocketAddr,
    server: SocketAddr,
    /// Frames that have arrived at the client since the client connected.
    wire: Wire,
}

impl Pair {
    /// Sends a question and the Pod's answer.
    #[track_caller]
    fn talk(&self) {
        transfer(&self.client, &self.pod, b"which Pod?", self.server);
        transfer(&self.pod, &self.client, b"Pod web-0", self.server);
    }

    /// Sends data from the Pod to the client, and then exchanges data in both directions.
    #[track_caller]
    fn pod_speaks_first(&self) {
        transfer(&self.pod, &self.client, b"Pod web-0 first", self.server);
        self.talk();
    }

    /// The initial sequence numbers of the client and of the Pod, from the SYN-ACK that the client has received.
    fn isns(&self) -> (u32, u32) {
        while let Some(frame) = self.wire.receive(LIMIT).unwrap() {
            let Ok(Packet { transport: Transport::Tcp(segment), .. }) = Packet::parse(&frame) else { continue };
            let is_syn_ack = segment.flags & (SYN | ACK) == SYN | ACK;
            if is_syn_ack && [segment.source, segment.destination] == [self.server.port(), self.address.port()] {
                return (segment.acknowledgement.wrapping_sub(1), segment.sequence);
            }
        }
        panic!("no SYN-ACK of {} has arrived", self.server)
    }
}

/// Sends bytes from one end of a connection to the other, and asserts that exactly these bytes arrive.
#[track_caller]
fn transfer(mut from: &TcpStream, mut to: &TcpStream, bytes: &[u8], server: impl Debug) {
    from.write_all(bytes).unwrap_or_else(|error| panic!("{server:?}: {error}"));
    let mut arrived = vec![0; bytes.len()];
    poll::uninterrupted(|| to.read_exact(&mut arrived)).unwrap_or_else(|error| panic!("{server:?}: {error}"));
    assert_eq!(arrived, bytes, "{server:?}");
}

fn socket(netns: &Netns, family: Family, kind: Type, protocol: i32) -> Socket {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = netns.run(|| Socket::new(domain, kind, Some(protocol.into()))).unwrap().unwrap();
    if family == Family::V6 {
        socket.set_only_v6(true).unwrap();
    }
    socket.set_reuse_address(true).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Returns the address of one family.
fn of(ips: &[IpAddr], family: Family) -> IpAddr {
    ips.iter().copied().find(|ip| Family::of(*ip) == family).unwrap()
}

fn node_ip(world: &World, family: Family) -> IpAddr {
    of(&world.node_ips(), family)
}

/// The Node's address in the network of the attacker.
fn other_node_ip(family: Family) -> IpAddr {
    let text = if family == Family::V4 { "203.0.113.10" } else { "2001:db8:0:3::10" };
    text.parse().unwrap()
}

/// Runs `test` for each forwarding mode, each family, and each path.
fn in_each_case(mut test: impl FnMut(&mut Scene, Family, Path)) {
    for mut scene in Scene::of_each_mode() {
        for family in Family::ALL {
            for path in [Path::Mapped, Path::Direct] {
                test(&mut scene, family, path);
            }
        }
    }
}

#[test]
fn forged_frames_do_not_harm_a_live_tcp_connection() {
    in_each_case(|scene, family, path| {
        let unknown = forged_isns((0x1234_5678, 0x9abc_def0));
        let pair = scene.connect(family, path, libc::IPPROTO_TCP, |client| {
            scene.attack_tcp(client, unknown);
        });
        let isns = pair.isns();
        let forged = forged_isns(isns);
        let attack = |scene: &Scene| {
            let before = scene.segments_at_pod();
            let sent = scene.attack_tcp(pair.address, forged);
            scene.attack_by_errors(pair.address, |from| {
                let (client_isn, pod_isn) = forged[0];
                with_isns(Packet::tcp(from, pair.address, ACK, &[7; 100]), (pod_isn, client_isn))
            });
            let is_there = || (scene.segments_at_pod() >= before + sent).then_some(());
            poll::until("the arrival of the forged segments", LIMIT, is_there).unwrap();
        };
        attack(scene);
        pair.talk();
        attack(scene);
        pair.pod_speaks_first();
        scene.expire_flows(path);
        attack(scene);
        pair.pod_speaks_first();
        attack(scene);
        pair.talk();
    });
}

/// UDP has no sequence numbers: forged datagrams on other paths than the client's may divert the Pod's datagrams until
/// the client sends again. Forged datagrams on the client's own path and forged ICMP errors change nothing.
#[test]
fn forged_frames_do_not_harm_a_live_udp_flow() {
    in_each_case(|scene, family, path| {
        let pod: UdpSocket = scene.pod_socket(family, Type::DGRAM, libc::IPPROTO_UDP).into();
        let client: UdpSocket = scene.client_socket(family, Type::DGRAM, libc::IPPROTO_UDP).into();
        let (server, address) = (scene.server(family, path), client.local_addr().unwrap());
        client.connect(server).unwrap();
        let attack = |scene: &Scene, destinations: &[SocketAddr]| {
            let payloads = [&b""[..], b"forged", &[7; 200]];
            for destination in destinations {
                for payload in payloads {
                    scene.send(&Packet::udp(address, *destination, payload));
                }
                scene.send_parts(&Packet::udp(address, *destination, &[7; 200]));
            }
            let mut datagram = [0; 1024];
            for _forged in 0..destinations.len() * payloads.len() {
                let (length, from) = poll::uninterrupted(|| pod.recv_from(&mut datagram)).unwrap();
                assert!(payloads.contains(&&datagram[..length]) && from == address, "{length} bytes of {from}");
            }
        };
        let errors = |scene: &Scene| {
            scene.attack_by_errors(address, |from| Packet::udp(from, address, &[7; 100]));
        };
        let answers = |text: &[u8]| {
            pod.send_to(text, address).unwrap();
            let mut answer = [0; 64];
            let length =
                poll::uninterrupted(|| client.recv(&mut answer)).unwrap_or_else(|error| panic!("{server}: {error}"));
            assert_eq!(&answer[..length], text, "{server}");
        };
        let asks = || {
            client.send(b"which Pod?").unwrap();
            let mut question = [0; 1024];
            let (length, from) = poll::uninterrupted(|| pod.recv_from(&mut question)).unwrap();
            assert_eq!((&question[..length], from), (&b"which Pod?"[..], address));
        };
        for _exchange in 0..3 {
            attack(scene, &scene.destinations(family));
            asks();
            errors(scene);
            answers(b"Pod web-0");
            attack(scene, &[server]);
            answers(b"Pod web-0 again");
        }
        scene.expire_flows(path);
        attack(scene, &[server]);
        errors(scene);
        answers(b"Pod web-0 first");
        asks();
        answers(b"Pod web-0");
    });
}

/// If the kernel lacks SCTP, the test does nothing; the tests of single packets cover the same chunks.
#[test]
fn forged_frames_do_not_harm_a_live_sctp_association() {
    const KINDS: [u8; 11] = [
        INIT,
        INIT_ACK,
        COOKIE_ECHO,
        COOKIE_ACK,
        DATA,
        HEARTBEAT,
        ERROR,
        SHUTDOWN,
        SHUTDOWN_ACK,
        SHUTDOWN_COMPLETE,
        ABORT,
    ];
    if !has_sctp() {
        return;
    }
    for scene in Scene::of_each_mode() {
        for (family, path) in
            Family::ALL.into_iter().flat_map(|family| [(family, Path::Mapped), (family, Path::Direct)])
        {
            let pair = scene.connect(family, path, libc::IPPROTO_SCTP, |_| {});
            pair.talk();
            for _attack in 0..2 {
                let (before, mut sent) = (scene.packets_at_pod(family), 0);
                for destination in scene.destinations(family) {
                    for kind in KINDS {
                        scene.send(&Packet::sctp(pair.address, destination, kind, &[7; 16]));
                        scene.send_parts(&Packet::sctp(pair.address, destination, kind, &[7; 200]));
                        sent += 1;
                    }
                }
                let is_there = || (scene.packets_at_pod(family) >= before + sent).then_some(());
                poll::until("the arrival of the forged packets", LIMIT, is_there).unwrap();
                scene.attack_by_errors(pair.address, |from| {
                    let mut reply = Packet::sctp(from, pair.address, DATA, &[7; 100]);
                    let Transport::Sctp(packet) = &mut reply.transport else { unreachable!("the packet is SCTP") };
                    packet.tag = SCTP_TAG + 1;
                    reply
                });
                pair.pod_speaks_first();
            }
        }
    }
}

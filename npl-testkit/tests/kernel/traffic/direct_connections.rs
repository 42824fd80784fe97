// SPDX-License-Identifier: Apache-2.0
//! Tests a client that connects to a Pod alternately through a mapping and directly, from the same address and port.
//! Both connections have the same flow tuple.

use std::io::Read as _;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::netns::Netns;
use npl_testkit::topology::Options;
use npl_testkit::{poll, traffic};
use socket2::{Domain, Protocol, Socket, Type};

use crate::world::{POD_PORT, World};

const CLIENT_PORT: u16 = 40_000;
const LIMIT: Duration = Duration::from_secs(20);
/// Number of connections through each address.
const ROUNDS: usize = 3;

/// Creates a Node for each path that a request may take: stack, XDP, stack with XDP on another uplink, redirect and
/// offload.
fn worlds() -> impl Iterator<Item = (&'static str, World)> {
    let follow = |forwarding| {
        let mut world = World::new(1);
        world.follow(forwarding);
        world
    };
    let stack = iter::once_with(|| ("stack", World::new(1)));
    let driver = iter::once_with(|| ("driver", World::with_xdp(Options::default())));
    // Requests arrive on the first uplink, where only the TC program runs; the XDP program is on the second uplink.
    let other_driver = iter::once_with(|| {
        let mut world = World::with_options(1, Options { clients: 2, ..Options::default() });
        let second = world.uplinks().remove(1);
        world.add_xdp(&second);
        ("another uplink's driver", world)
    });
    let bypass = [("redirect", Forwarding::Redirect), ("offload", Forwarding::Offload)];
    stack
        .chain(driver)
        .chain(other_driver)
        .chain(bypass.into_iter().map(move |(name, forwarding)| (name, follow(forwarding))))
}

/// Returns the first Pod's NAT address and its own address, in each family.
fn server_addresses(world: &World) -> [[SocketAddr; 2]; 2] {
    let [v4, v6] = world.frontends();
    let pod = world.pod().addresses;
    [[v4, (pod.v4, POD_PORT).into()], [v6, (pod.v6, POD_PORT).into()]]
}

/// Creates a socket that is bound to the client's port.
fn socket(from: &Netns, server: SocketAddr, kind: Type, protocol: Protocol) -> Socket {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = from.run(|| Socket::new(Domain::for_address(server), kind, Some(protocol))).unwrap().unwrap();
    // Without this option, the bind would fail, because an earlier connection from this port to another server has
    // ended only recently.
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::new(any, CLIENT_PORT).into()).unwrap();
    socket.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
    socket
}

/// Closes a connection, and returns when its server has closed it too.
fn close(mut stream: TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    let mut unread = Vec::new();
    stream.read_to_end(&mut unread).unwrap();
    assert!(unread.is_empty(), "{unread:?}");
}

#[test]
fn tcp_connections_of_one_client_port_alternate_between_mapped_and_direct() {
    for (name, world) in worlds() {
        for server in
            server_addresses(&world).into_iter().flat_map(|server_addresses| [server_addresses; ROUNDS].concat())
        {
            let socket = socket(world.client(), server, Type::STREAM, Protocol::TCP);
            socket
                .connect_timeout(&server.into(), poll::extended(LIMIT))
                .unwrap_or_else(|error| panic!("{name}, {server}: {error}"));
            let stream = TcpStream::from(socket);
            for question in ["who are you?", "still there?"] {
                let answer = traffic::tcp_ask(&stream, question).unwrap();
                assert_eq!((answer.pod.as_str(), answer.client.port()), ("web-0", CLIENT_PORT));
            }
            close(stream);
        }
    }
}

#[test]
fn datagrams_of_one_client_port_alternate_between_mapped_and_direct() {
    for (name, world) in worlds() {
        for server_addresses in server_addresses(&world) {
            let socket = UdpSocket::from(socket(world.client(), server_addresses[0], Type::DGRAM, Protocol::UDP));
            for server in [server_addresses; ROUNDS].concat() {
                for _question in 0..3 {
                    socket.send_to(b"who are you?", server).unwrap();
                    let mut answer = [0; 2048];
                    let (_, from) = poll::uninterrupted(|| socket.recv_from(&mut answer)).unwrap();
                    assert_eq!(from, server, "{name}");
                }
            }
        }
    }
}

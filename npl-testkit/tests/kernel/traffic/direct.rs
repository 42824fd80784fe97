// SPDX-License-Identifier: Apache-2.0
//! One end of a client that talks to a Pod through a mapping and directly, by turns: to the Pod the two are one.

use std::io::Read as _;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::netns::Netns;
use npl_testkit::topology::Options;
use npl_testkit::traffic;
use socket2::{Domain, Protocol, Socket, Type};

use crate::world::{POD_PORT, World};

const CLIENT_PORT: u16 = 40_000;
const LIMIT: Duration = Duration::from_secs(20);
/// How often each way is taken.
const TURNS: usize = 3;

/// One for each way that a request may take through the Node.
fn worlds() -> impl Iterator<Item = (&'static str, World)> {
    let follow = |forwarding| {
        let mut world = World::new(1);
        world.follow(forwarding);
        world
    };
    let stack = iter::once_with(|| ("stack", World::new(1)));
    let driver = iter::once_with(|| ("driver", World::with_xdp(Options::default())));
    // What comes by the first uplink no driver has seen.
    let other_driver = iter::once_with(|| {
        let mut world = World::with_options(1, Options { clients: 2, ..Options::default() });
        let second = world.uplinks().remove(1);
        world.add_xdp(&second);
        ("another uplink's driver", world)
    });
    let past = [("redirect", Forwarding::Redirect), ("offload", Forwarding::Offload)];
    stack
        .chain(driver)
        .chain(other_driver)
        .chain(past.into_iter().map(move |(name, forwarding)| (name, follow(forwarding))))
}

/// Where the first Pod is reached, through the mapping and directly, in each family.
fn ways(world: &World) -> [[SocketAddr; 2]; 2] {
    let [v4, v6] = world.frontends();
    let pod = world.pod().addresses;
    [[v4, (pod.v4, POD_PORT).into()], [v6, (pod.v6, POD_PORT).into()]]
}

/// A socket with the one end of the client's.
fn socket(from: &Netns, server: SocketAddr, kind: Type, protocol: Protocol) -> Socket {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = from.run(|| Socket::new(Domain::for_address(server), kind, Some(protocol))).unwrap().unwrap();
    // The last connection, to somebody else, is not long ago.
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::new(any, CLIENT_PORT).into()).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Ends a connection, and returns when its server has too.
fn end(mut stream: TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{rest:?}");
}

#[test]
fn connections_of_one_client_end_through_a_mapping_and_directly_take_turns() {
    for (name, world) in worlds() {
        for server in ways(&world).into_iter().flat_map(|ways| [ways; TURNS].concat()) {
            let socket = socket(world.client(), server, Type::STREAM, Protocol::TCP);
            socket.connect_timeout(&server.into(), LIMIT).unwrap_or_else(|error| panic!("{name}, {server}: {error}"));
            let stream = TcpStream::from(socket);
            for question in ["who are you?", "still there?"] {
                let answer = traffic::tcp_ask(&stream, question).unwrap();
                assert_eq!((answer.pod.as_str(), answer.client.port()), ("web-0", CLIENT_PORT));
            }
            end(stream);
        }
    }
}

#[test]
fn datagrams_of_one_client_end_through_a_mapping_and_directly_take_turns() {
    for (name, world) in worlds() {
        for ways in ways(&world) {
            let socket = UdpSocket::from(socket(world.client(), ways[0], Type::DGRAM, Protocol::UDP));
            for server in [ways; TURNS].concat() {
                for _question in 0..3 {
                    socket.send_to(b"who are you?", server).unwrap();
                    let mut answer = [0; 2048];
                    let (_, from) = socket.recv_from(&mut answer).unwrap();
                    assert_eq!(from, server, "{name}");
                }
            }
        }
    }
}

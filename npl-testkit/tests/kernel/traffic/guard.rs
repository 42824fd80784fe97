// SPDX-License-Identifier: Apache-2.0
//! Tests the nftables guard. On a Node that masquerades Pods, replies must keep their source address after kernel
//! conntrack has lost the connection's entry.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use npl_agent::core::model::Protocol;
use npl_agent::core::repairs::RepairJournal;
use npl_agent::nft_guard::{self, Guard, GuardMode};
use npl_testkit::poll;
use npl_testkit::topology::MASQUERADE;

use crate::lab::mapping;
use crate::world::{World, port_range};

/// A Pod port that the tests serve themselves.
const PORT: u16 = 9000;
const NODE_PORT: u16 = 61_050;
const LIMIT: Duration = Duration::from_secs(30);
const RESYNC: Duration = Duration::from_millis(200);
/// Counts packets that arrive at the client with another source port than the node port that the client uses: the
/// kernel has masqueraded these packets before NPL's program could translate their source.
const COUNT_MASQUERADED: &str = "
table inet npl_test {
  counter tcp_masqueraded { }
  counter udp_masqueraded { }
  chain prerouting {
    type filter hook prerouting priority raw;
    meta nfproto NFPROTO tcp sport != 61050 counter name tcp_masqueraded
    meta nfproto NFPROTO udp sport != 61050 counter name udp_masqueraded
  }
}";

/// Creates a Node that masquerades its Pods, with a mapping for a Pod port on which no server listens yet.
fn masquerading() -> World {
    let mut world = World::new(1);
    world.node().nft(MASQUERADE).unwrap();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for pod_ip in world.pod().ips() {
            let (frontend, backend) = mapping(protocol, NODE_PORT, (pod_ip, PORT).into(), 1);
            world.datapath().upsert_mapping(frontend, backend).unwrap();
        }
    }
    world
}

fn guarded(world: &mut World, mode: GuardMode) -> Guard {
    let mappings = world.datapath().mappings().unwrap();
    let guard = world.node().run(|| Guard::start(mode, port_range(), RESYNC, RepairJournal::default())).unwrap();
    guard.observe(&mappings);
    guard
}

/// Returns the guard's table as `nft` prints it; `None` if there is no table.
fn table(world: &World) -> Option<String> {
    world.node().nft_table(nft_guard::TABLE)
}

/// Returns the nftables set element of the Pod's TCP endpoint.
fn element(pod_ip: IpAddr) -> String {
    format!("{pod_ip} . 6 . {PORT}")
}

fn has_both_families(world: &World) -> bool {
    let elements: Vec<_> = world.pod().ips().iter().map(|ip| element(*ip)).collect();
    table(world).is_some_and(|table| elements.iter().all(|element| table.contains(element)))
}

fn frontend(node_ip: IpAddr) -> SocketAddr {
    (node_ip, NODE_PORT).into()
}

/// The Pod's server sockets, for both protocols and families.
struct Served {
    listener: TcpListener,
    socket: UdpSocket,
}

impl Served {
    fn by(world: &World) -> Self {
        let everywhere = (Ipv6Addr::UNSPECIFIED, PORT);
        let pod = &world.pod().netns;
        let listener = pod.run(|| TcpListener::bind(everywhere)).unwrap().unwrap();
        let socket = pod.run(|| UdpSocket::bind(everywhere)).unwrap().unwrap();
        socket.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
        Self { listener, socket }
    }
}

/// A client's connection and UDP socket, to which the Pod has sent data after kernel conntrack has lost both flows.
struct Pushed {
    client: TcpStream,
    socket: UdpSocket,
    /// The Pod's end of the connection, which retransmits the data until this value is dropped.
    _server: TcpStream,
}

fn push(world: &World, served: &Served, node_ip: IpAddr) -> Pushed {
    let limit = poll::extended(LIMIT);
    let mut client = world.client().run(|| TcpStream::connect_timeout(&frontend(node_ip), limit)).unwrap().unwrap();
    let (mut server, _) = served.listener.accept().unwrap();
    server.set_read_timeout(Some(limit)).unwrap();
    let mut question = [0; 8];
    client.write_all(b"question").unwrap();
    server.read_exact(&mut question).unwrap();

    let unspecified: IpAddr = if node_ip.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = world.client().run(|| UdpSocket::bind((unspecified, 0))).unwrap().unwrap();
    socket.connect(frontend(node_ip)).unwrap();
    socket.set_read_timeout(Some(limit)).unwrap();
    socket.send(b"question").unwrap();
    let (_, client_addr) = poll::uninterrupted(|| served.socket.recv_from(&mut question)).unwrap();
    served.socket.send_to(b"answer", client_addr).unwrap();
    let mut answer = [0; 8];
    assert_eq!(poll::uninterrupted(|| socket.recv(&mut answer)).unwrap(), 6);

    client.set_read_timeout(Some(limit)).unwrap();
    world.node().forget_connections().unwrap();
    server.write_all(b"pushed").unwrap();
    served.socket.send_to(b"pushed", client_addr).unwrap();
    Pushed { client, socket, _server: server }
}

impl Pushed {
    /// Whether the Pod's data arrives on the connection and at the UDP socket.
    fn is_received(&mut self) -> [bool; 2] {
        let mut data = [0; 8];
        let is_pushed = |read: io::Result<usize>, bytes: &[u8]| read.is_ok_and(|count| bytes[..count] == *b"pushed");
        let by_tcp = poll::uninterrupted(|| self.client.read(&mut data));
        let by_tcp = is_pushed(by_tcp, &data);
        let by_udp = poll::uninterrupted(|| self.socket.recv(&mut data));
        [by_tcp, is_pushed(by_udp, &data)]
    }

    /// Does the same as [`Pushed::is_received`], for data that has already arrived.
    fn has_arrived(&mut self) -> [bool; 2] {
        self.client.set_nonblocking(true).unwrap();
        self.socket.set_nonblocking(true).unwrap();
        self.is_received()
    }
}

#[test]
fn guard_keeps_the_source_of_replies_after_conntrack_has_lost_the_connection() {
    let mut world = masquerading();
    let _guard = guarded(&mut world, GuardMode::Auto);
    poll::until("the guard", LIMIT, || has_both_families(&world).then_some(())).unwrap();
    let served = Served::by(&world);
    for node_ip in world.node_ips() {
        assert_eq!(push(&world, &served, node_ip).is_received(), [true; 2], "by {node_ip}");
    }
}

/// Without the guard, replies are masqueraded after kernel conntrack has lost the connection's entry. This test shows
/// that the tests with the guard can detect masquerading.
#[test]
fn replies_of_a_lost_connection_are_masqueraded_without_the_guard() {
    let mut world = masquerading();
    let _guard = guarded(&mut world, GuardMode::Off);
    let served = Served::by(&world);
    for node_ip in world.node_ips() {
        let family = if node_ip.is_ipv4() { "ipv4" } else { "ipv6" };
        world.client().nft(&COUNT_MASQUERADED.replace("NFPROTO", family)).unwrap();
        let mut pushed = push(&world, &served, node_ip);
        let count = |name| world.client().packets_counted(&format!("inet npl_test {name}")).unwrap();
        let are_masqueraded = || (count("tcp_masqueraded") > 0 && count("udp_masqueraded") > 0).then_some(());
        poll::until("masqueraded packets with the Pod's data at the client", LIMIT, are_masqueraded).unwrap();
        assert_eq!(pushed.has_arrived(), [false; 2], "by {node_ip}");
        world.client().nft("delete table inet npl_test").unwrap();
    }
}

#[test]
fn guard_follows_mappings_is_restored_and_ends_with_masquerading() {
    let mut world = World::new(1);
    let guard = guarded(&mut world, GuardMode::Auto);
    world.node().nft(MASQUERADE).unwrap();
    poll::until("the guard", LIMIT, || table(&world)).unwrap();
    let (frontend, backend) = mapping(Protocol::Tcp, NODE_PORT, (world.pod().ips()[0], PORT).into(), 1);
    let element = element(world.pod().ips()[0]);
    let has_it = || table(&world).is_some_and(|table| table.contains(&element));
    guard.record(&npl_agent::core::op::Op::UpsertMapping(frontend, backend));
    poll::until("a new mapping", LIMIT, || has_it().then_some(())).unwrap();
    world.node().nft(&format!("delete table {}", nft_guard::TABLE)).unwrap();
    poll::until("the restored table", LIMIT, || has_it().then_some(())).unwrap();
    world.node().nft(&format!("flush chain {} replies", nft_guard::TABLE)).unwrap();
    let is_whole = || table(&world).is_some_and(|table| table.matches("snat").count() == 2);
    poll::until("the restored rules", LIMIT, || is_whole().then_some(())).unwrap();
    guard.record(&npl_agent::core::op::Op::RemoveMapping(frontend));
    poll::until("the removal of a mapping", LIMIT, || (!has_it()).then_some(())).unwrap();
    world.node().nft("delete table inet npl_test").unwrap();
    poll::until("the removal of the guard's table", LIMIT, || table(&world).is_none().then_some(())).unwrap();
}

#[test]
fn guard_covers_thousands_of_mappings_and_is_removed() {
    let world = World::new(1);
    let guard =
        world.node().run(|| Guard::start(GuardMode::On, port_range(), RESYNC, RepairJournal::default())).unwrap();
    let pod_ips = world.pod().ips();
    let of_port = |port| {
        let of_ip = move |pod_ip: &IpAddr| mapping(Protocol::Udp, 20_000 + port, (*pod_ip, 10_000 + port).into(), 1);
        pod_ips.iter().map(of_ip).collect::<Vec<_>>()
    };
    let all = (0..1_500_u16).flat_map(of_port);
    guard.observe(&all.collect());
    let count = || table(&world).map_or(0, |table| table.matches(" . 17 . ").count());
    poll::until("all mappings", LIMIT, || (count() == 3_000).then_some(())).unwrap();
    drop(guard);
    assert!(world.node().run(nft_guard::remove).unwrap().unwrap());
    assert_eq!(table(&world), None);
    assert!(!world.node().run(nft_guard::remove).unwrap().unwrap(), "the table is already removed");
}

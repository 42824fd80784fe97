// SPDX-License-Identifier: Apache-2.0
//! Tests socket reverse NAT, which determines the peer address that local clients see, and the counters of local
//! clients.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use npl_agent::core::model::{Family, Protocol};
use npl_agent::datapath::Pins;
use npl_agent::datapath::tables::Tables;
use npl_common::socket_rnat::LISTED_PEERS;
use npl_common::stats::MappingStats;
use npl_testkit::echo::Answer;
use npl_testkit::{poll, traffic};

use super::scene::{Scene, loopback_addresses, mapped};
use crate::lab::mapping;
use crate::world::{NODE_PORT, POD_PORT, World};

/// Time limit for a port to become free, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(10);

/// Sends to `server` from an unconnected socket, and returns the answer and its source address.
#[track_caller]
pub(super) fn ask(socket: &UdpSocket, server: SocketAddr) -> (Answer, SocketAddr) {
    socket.send_to(b"who are you?", server).unwrap();
    receive(socket)
}

#[track_caller]
fn receive(socket: &UdpSocket) -> (Answer, SocketAddr) {
    let mut buffer = [0; 2048];
    let (length, source) = poll::uninterrupted(|| socket.recv_from(&mut buffer)).unwrap();
    (serde_json::from_slice(&buffer[..length]).unwrap(), source)
}

#[test]
fn reply_to_an_unconnected_socket_comes_from_the_nat_address() {
    let scene = Scene::new(2);
    for server in scene.server_addresses().into_iter().chain(loopback_addresses()) {
        let socket = scene.socket(scene.world.node(), server);
        let mut second = server;
        second.set_port(server.port() + 1);
        for (server, pod) in [(server, "web-0"), (second, "web-1"), (server, "web-0")] {
            let (answer, source) = ask(&socket, server);
            assert_eq!((answer.pod.as_str(), source), (pod, server));
        }
    }
}

#[test]
fn reply_to_a_connected_socket_comes_from_the_nat_address() {
    let scene = Scene::new(1);
    for server in scene.server_addresses().into_iter().chain(loopback_addresses()) {
        let open = || traffic::udp_socket(scene.world.node(), server, true).unwrap();
        let socket = scene.cgroup.run(open).unwrap();
        socket.set_read_timeout(Some(traffic::request_limit())).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), server);
        socket.send(b"who are you?").unwrap();
        let (answer, source) = receive(&socket);
        assert_eq!((answer.pod.as_str(), source), ("web-0", server));
    }
}

#[test]
fn peer_of_a_tcp_connection_is_the_nat_address() {
    let scene = Scene::new(1);
    for from in [scene.world.node(), &scene.world.pod().netns] {
        for server in scene.server_addresses() {
            let stream = scene.cgroup.run(|| traffic::tcp_connect(from, server).unwrap()).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), server);
            assert_eq!(traffic::tcp_ask(&stream, "who are you?").unwrap().pod, "web-0");
        }
    }
    for server in loopback_addresses() {
        let stream = scene.cgroup.run(|| traffic::tcp_connect(scene.world.node(), server).unwrap()).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), server);
    }
}

#[test]
fn socket_that_sends_to_the_pod_directly_sees_the_pods_address() {
    let scene = Scene::new(1);
    for (server, pod_ip) in scene.world.frontends().into_iter().zip(scene.world.pod().ips()) {
        let direct = (pod_ip, POD_PORT).into();
        let socket = scene.socket(scene.world.node(), server);
        for destination in [direct, server, direct, server] {
            let (answer, source) = ask(&socket, destination);
            assert_eq!((answer.pod.as_str(), source), ("web-0", destination));
        }
    }
}

/// A socket has used a mapping, and sends to the Pod's own address after the mapping was removed. The answer must come
/// from the Pod's address and not from the NAT address, because another Pod may have the node port by then.
#[test]
fn socket_that_sends_directly_after_the_mapping_was_removed_sees_the_pods_address() {
    let mut scene = Scene::new(1);
    for (server, pod_ip) in scene.world.frontends().into_iter().zip(scene.world.pod().ips()) {
        let socket = scene.socket(scene.world.node(), server);
        assert_eq!(ask(&socket, server).1, server);
        let (frontend, _) = mapping(Protocol::Udp, NODE_PORT, (pod_ip, POD_PORT).into(), 1);
        scene.world.datapath().remove_mapping(frontend).unwrap();
        let direct = (pod_ip, POD_PORT).into();
        assert_eq!(ask(&socket, direct).1, direct);
    }
}

/// An earlier Pod's mapping was removed, and a later Pod with the same address sends a datagram to the client. The
/// client must see the Pod's address as the source and not the NAT address, because another Pod may have the node port
/// by then.
#[test]
fn datagram_of_a_later_pod_does_not_come_from_the_earlier_pods_mapping() {
    assert_later_pod_is_not_translated(|world| {
        world.datapath().purge_flows().unwrap();
    });
}

/// The killed agent has not purged the flows between local clients and an earlier Pod. A later Pod with the same
/// address sends a datagram. The client must see the Pod's address as the source: the mapping of the later Pod prevents
/// the translation.
#[test]
fn datagram_of_a_later_pod_is_not_translated_after_the_agent_was_killed() {
    assert_later_pod_is_not_translated(|world| {
        world.datapath = None;
        let mut next = world.open();
        assert!(next.mappings().unwrap().is_empty());
        for pod_ip in world.pod().ips() {
            let (frontend, backend) = mapping(Protocol::Udp, NODE_PORT + 5, (pod_ip, POD_PORT).into(), 2);
            next.upsert_mapping(frontend, backend).unwrap();
        }
        world.datapath = Some(next);
    });
}

/// Asserts that a later Pod's datagram reaches a local client with the Pod's address as source. Before that, the client
/// sends to an earlier Pod with the same address through a mapping, the mapping is removed, and `agent` performs the
/// agent's further steps.
#[track_caller]
fn assert_later_pod_is_not_translated(agent: impl FnOnce(&mut World)) {
    let mut scene = Scene::new(1);
    let servers = scene.world.frontends();
    let sockets = servers.map(|server| scene.socket(scene.world.node(), server));
    let asked = [0, 1].map(|family: usize| ask(&sockets[family], servers[family]));
    assert_eq!(asked.each_ref().map(|(_, source)| *source), servers);
    for frontend in scene.world.datapath().mappings().unwrap().into_keys() {
        scene.world.datapath().remove_mapping(frontend).unwrap();
    }
    agent(&mut scene.world);
    let (pod, earlier) = scene.world.pods.remove(0);
    drop(earlier);
    for ((socket, pod_ip), (answer, _)) in sockets.iter().zip(pod.ips()).zip(asked) {
        // Retry, because a child process that another test forks keeps the earlier Pod's sockets open until the child
        // executes its program.
        let bind = || UdpSocket::bind((pod_ip, POD_PORT)).ok();
        let later = pod.netns.run(|| poll::until("the earlier Pod's port", LIMIT, bind)).unwrap().unwrap().0;
        later.send_to(b"unasked", answer.client).unwrap();
        let source = poll::uninterrupted(|| socket.recv_from(&mut [0; 64])).unwrap().1;
        assert_eq!(source, (pod_ip, POD_PORT).into());
    }
}

#[test]
fn socket_that_connects_to_the_pod_directly_sees_the_pods_address() {
    let scene = Scene::new(1);
    for (server, pod_ip) in
        scene.server_addresses().into_iter().zip([0, 1, 0].map(|family| scene.world.pod().ips()[family]))
    {
        let direct = if server.is_ipv4() { (pod_ip, POD_PORT).into() } else { mapped((pod_ip, POD_PORT).into()) };
        let socket = scene.socket(scene.world.node(), server);
        for peer in [server, direct, server] {
            scene.world.node().run(|| socket.connect(peer)).unwrap().unwrap();
            assert_eq!(socket.peer_addr().unwrap(), peer);
            socket.send(b"who are you?").unwrap();
            let (answer, source) = receive(&socket);
            assert_eq!((answer.pod.as_str(), source), ("web-0", peer));
        }
    }
}

#[test]
fn socket_may_use_several_addresses_of_the_node() {
    let scene = Scene::new(1);
    let mut names = loopback_addresses();
    names.retain(SocketAddr::is_ipv4);
    names.push(scene.world.frontend());
    let socket = scene.socket(scene.world.node(), scene.world.frontend());
    for server in names.iter().chain(&names) {
        let (answer, source) = ask(&socket, *server);
        assert_eq!((answer.pod.as_str(), source), ("web-0", *server));
    }
}

#[test]
fn each_local_connection_counts_as_one_new_flow() {
    let mut scene = Scene::new(1);
    let before = totals(&mut scene.world);
    let server = scene.world.frontend();
    let socket = scene.socket(scene.world.node(), server);
    for _ in 0..3 {
        assert_eq!(ask(&socket, server).1, server);
    }
    drop(scene.cgroup.run(|| traffic::tcp_connect(scene.world.node(), server).unwrap()).unwrap());
    let after = totals(&mut scene.world);
    assert_eq!(after, MappingStats { new_flows: before.new_flows + 2, ..before }, "one UDP flow and one TCP flow");
}

fn totals(world: &mut World) -> MappingStats {
    world.datapath().tables.totals(Family::V4).unwrap()
}

/// The numbers of socket reverse NAT entries of IPv4 and of IPv6.
fn rnat_entries(tables: &Tables) -> [usize; 2] {
    Family::ALL.map(|family| tables.socket_rnat_fill(family).unwrap().0)
}

/// Waits until the entries of closed sockets are removed: a child process that another test forks keeps the sockets open
/// until the child executes its program.
#[track_caller]
fn wait_for_no_entries(tables: &Tables) {
    let are_freed = || (rnat_entries(tables) == [0, 0]).then_some(());
    poll::until("the release of the sockets", LIMIT, are_freed).unwrap();
}

/// The entries of a socket in the socket reverse NAT maps must be freed when the socket is closed, even if the socket's
/// connection was refused and the kernel has therefore disconnected the socket.
#[test]
fn entries_of_a_closed_socket_are_freed() {
    const NO_SERVER: u16 = NODE_PORT + 9;
    let mut scene = Scene::fresh(1);
    let tables = Tables::open(&Pins::new(scene.world.bpffs.path())).unwrap();
    let entries = || rnat_entries(&tables);
    for pod_ip in scene.world.pod().ips() {
        let (frontend, backend) = mapping(Protocol::Tcp, NO_SERVER, (pod_ip, POD_PORT + 9).into(), 1);
        scene.world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
    for from in [scene.world.node(), &scene.world.pod().netns] {
        for server in scene.server_addresses() {
            assert_eq!(entries(), [0, 0]);
            let tcp = scene.cgroup.run(|| traffic::tcp_connect(from, server).unwrap()).unwrap();
            assert_eq!(tcp.peer_addr().unwrap(), server);
            let connected = scene.cgroup.run(|| traffic::udp_socket(from, server, true).unwrap()).unwrap();
            let unconnected = scene.socket(from, server);
            assert_eq!(ask(&unconnected, server).1, server);
            assert_eq!(entries().iter().sum::<usize>(), 6, "each socket must have two entries");
            let mut refused = server;
            refused.set_port(NO_SERVER);
            scene.cgroup.run(|| traffic::tcp_connect(from, refused).unwrap_err()).unwrap();
            drop((tcp, connected, unconnected));
            wait_for_no_entries(&tables);
        }
    }
}

/// The entries for all Pods to which a datagram socket has sent must be freed when the socket is closed. A socket that
/// sends to the same Pods again and again must not fill the list of its peers.
#[test]
fn entries_of_a_closed_datagram_socket_are_freed_for_all_its_pods() {
    let mut scene = Scene::fresh(1);
    let tables = Tables::open(&Pins::new(scene.world.bpffs.path())).unwrap();
    let entries = || rnat_entries(&tables);
    let ports: Vec<u16> = (0..=u16::try_from(LISTED_PEERS).unwrap()).collect();
    for pod_ip in scene.world.pod().ips() {
        for port in &ports {
            let to = (pod_ip, POD_PORT + 20 + port).into();
            let (frontend, backend) = mapping(Protocol::Udp, NODE_PORT + 20 + port, to, 1);
            scene.world.datapath().upsert_mapping(frontend, backend).unwrap();
        }
    }
    for from in [scene.world.node(), &scene.world.pod().netns] {
        for server in scene.server_addresses() {
            assert_eq!(entries(), [0, 0]);
            let socket = scene.socket(from, server);
            for port in ports.iter().chain(&ports).chain(&ports) {
                socket.send_to(b"hello", (server.ip(), NODE_PORT + 20 + port)).unwrap();
            }
            let expected = 2 * ports.len();
            assert!(
                entries().iter().sum::<usize>() >= expected,
                "{:?}: an entry and a list entry for each Pod",
                entries()
            );
            drop(socket);
            wait_for_no_entries(&tables);
        }
    }
}

/// A socket that answers masqueraded clients has an entry for each of the clients. These entries must be freed when the
/// socket is closed.
#[test]
fn entries_of_masqueraded_clients_are_freed_with_the_socket() {
    let scene = Scene::fresh(1);
    let tables = Tables::open(&Pins::new(scene.world.bpffs.path())).unwrap();
    let entries = || rnat_entries(&tables);
    for (nat, server_ip) in scene.world.frontends().into_iter().zip(scene.world.pod().ips()) {
        let server = scene.socket(&scene.world.pod().netns, nat);
        let server_address = (server_ip, server.local_addr().unwrap().port());
        for port in 1..=3 {
            // These sockets have the address and port that the Node's masquerading gives to clients.
            let bind = || UdpSocket::bind((nat.ip(), NODE_PORT + port)).unwrap();
            let client = scene.world.node().run(bind).unwrap();
            client.send_to(b"who are you?", server_address).unwrap();
            let sender = poll::uninterrupted(|| server.recv_from(&mut [0; 64])).unwrap().1;
            assert_eq!(sender, client.local_addr().unwrap());
        }
        assert_eq!(entries().iter().sum::<usize>(), 6, "an entry and a list entry for each client");
        drop(server);
        wait_for_no_entries(&tables);
    }
}

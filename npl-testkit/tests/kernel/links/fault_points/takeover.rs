// SPDX-License-Identifier: Apache-2.0
//! An agent is killed at steps of its start on a Node with the programs and maps of ABI 1.

use std::mem;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};

use npl_testkit::abi::{pretend_to_be, version};
use npl_testkit::echo::Protocol;
use npl_testkit::topology::Offload;
use npl_testkit::traffic::{self, Direction, Load, Request, Transfer};

use super::start::{Mechanism, Start};
use super::{LIMIT, assert_complete, fault_points, from_attachment, kill_at_fault_points, perform_in_process, state};
use crate::links::versions::change_handles;
use crate::world::{NODE_PORT, World, is_emulated, load_rate};

/// The size of a transfer, and its rate in bytes per second, by which the transfer outlasts a takeover.
const TRANSFER: (u64, u64) = (16 << 20, 1 << 18);

#[test]
fn no_packet_is_lost_when_the_agent_that_takes_over_from_abi_1_is_killed_at_any_step() {
    kill_takeovers(Mechanism::Links);
}

#[test]
fn no_packet_is_lost_when_the_agent_whose_filters_take_over_from_abi_1_is_killed_at_any_step() {
    kill_takeovers(Mechanism::Filters);
}

#[test]
fn no_packet_is_lost_when_the_agent_whose_xdp_program_takes_over_from_abi_1_is_killed_at_any_step() {
    kill_takeovers(Mechanism::LinksAndXdp);
}

/// Established flows of the client with each Pod, over both protocols in both families, and transfers with the first
/// Pod.
#[derive(Default)]
struct Flows {
    tcp: Vec<(TcpStream, String, IpAddr)>,
    udp: Vec<(UdpSocket, String, IpAddr)>,
    transfers: Vec<Transfer>,
    /// The number in the last question of each flow.
    sequence: u32,
}

impl Flows {
    fn open(world: &World) -> Self {
        let client = world.client();
        let servers = || targets(world).into_iter();
        let tcp = servers().map(|(server, pod, ip)| (traffic::tcp_connect(client, server).unwrap(), pod, ip));
        let udp = servers().map(|(server, pod, ip)| (traffic::udp_socket(client, server, true).unwrap(), pod, ip));
        let (bytes, rate) = TRANSFER;
        let directions = [Direction::Upload, Direction::Download].into_iter();
        let transfers = world.frontends().into_iter().zip(directions);
        let transfers =
            transfers.map(|(server, direction)| Transfer::start(client, server, direction, bytes, rate).unwrap());
        let mut flows = Self { tcp: tcp.collect(), udp: udp.collect(), transfers: transfers.collect(), sequence: 0 };
        flows.ask("before the takeover");
        flows
    }

    /// Asks one question over each flow. The flow's Pod must answer the question, and must observe the client's
    /// address. No segment and no datagram may be lost.
    fn ask(&mut self, stage: &str) {
        self.sequence += 1;
        let question = format!("question {}", self.sequence);
        for (stream, pod, client) in &self.tcp {
            let answer = traffic::tcp_ask(stream, &question).unwrap_or_else(|err| panic!("{stage}, {pod}: {err:#}"));
            assert_eq!((&answer.pod, answer.client.ip()), (pod, *client), "{stage}");
            assert!(!traffic::has_lost_segments(stream).unwrap(), "{stage}, {pod}: a segment was lost");
        }
        for (socket, pod, client) in &self.udp {
            let answer = traffic::udp_ask(socket, &question).unwrap_or_else(|err| panic!("{stage}, {pod}: {err:#}"));
            assert_eq!((&answer.pod, answer.client.ip()), (pod, *client), "{stage}");
        }
        assert!(!self.transfers.iter().any(Transfer::is_interrupted), "{stage}: a transfer was interrupted");
    }

    /// Completes the transfers, whose bytes must arrive unchanged.
    fn complete(self) {
        self.transfers.iter().for_each(Transfer::remove_rate_limit);
        self.transfers.into_iter().for_each(|transfer| assert_eq!(transfer.join().unwrap().bytes, TRANSFER.0));
    }
}

/// The NAT addresses of all Pods, each with the Pod's name and the client's address.
fn targets(world: &World) -> Vec<(SocketAddr, String, IpAddr)> {
    let of_pod = |(node_port, name): (u16, &String)| {
        let ips = world.node_ips().into_iter().zip(world.client_ips());
        ips.map(|(ip, client)| ((ip, node_port).into(), name.clone(), client)).collect::<Vec<_>>()
    };
    (NODE_PORT..).zip(world.pods.iter().map(|(pod, _)| &pod.name)).flat_map(of_pod).collect()
}

/// Requests to all Pods.
fn requests(world: &World) -> Vec<Request> {
    let both = |(server, pod, client): (SocketAddr, String, IpAddr)| {
        [Protocol::Tcp, Protocol::Udp].map(|protocol| Request { protocol, server, pod: pod.clone(), client })
    };
    targets(world).into_iter().flat_map(both).collect()
}

/// Makes the Node's state that of an agent of ABI 1.
fn become_abi_1(world: &World, mechanism: Mechanism) {
    if mechanism == Mechanism::Filters {
        change_handles(world, 1);
    }
    pretend_to_be(world.bpffs.path(), 1).unwrap();
}

fn kill_takeovers(mechanism: Mechanism) {
    if is_emulated() {
        // The initial RAM disk of emulated kernels has no strace.
        return;
    }
    let world = World::without_state(2);
    if mechanism == Mechanism::LinksAndXdp {
        world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    }
    let start = Start::new(&world, mechanism);
    drop(world.node().run(|| start.perform(|| {})).unwrap());
    let expected = state(&world);
    world.assert_answers();
    become_abi_1(&world, mechanism);
    let (_, trace) = perform_in_process(&world, &start, None, &|| {});
    let points = fault_points(&trace);
    let points = if mechanism == Mechanism::Links { &points } else { from_attachment(&points) };
    assert_complete(&world, &start, &expected, "after a complete takeover", &|| {});

    become_abi_1(&world, mechanism);
    let load = Load::start(world.client(), load_rate(), requests(&world));
    // `replace` returns when all requests of before are answered.
    let await_replies = || load.replace(requests(&world));
    let mut flows = Flows::open(&world);
    let answered = |flows: &mut Flows, stage: &str| {
        flows.ask(stage);
        load.wait_for_answers(16, LIMIT).unwrap();
        assert_eq!(load.report().failures, [], "{stage}");
    };
    kill_at_fault_points(&world, &start, points, &await_replies, |point| {
        answered(&mut flows, &format!("without an agent, killed at {point}"));
        let stage = format!("with the next agent, killed at {point}");
        assert_complete(&world, &start, &expected, &stage, &await_replies);
        assert!(!version(world.bpffs.path(), 1).exists(), "{stage}: pins of ABI 1 are left");
        answered(&mut flows, &stage);
        // A change of handles interrupts translation, so no request may be in progress.
        load.replace(Vec::new());
        mem::take(&mut flows).complete();
        become_abi_1(&world, mechanism);
        load.replace(requests(&world));
        flows = Flows::open(&world);
    });
    assert_eq!(load.stop().failures, []);
    flows.complete();
}

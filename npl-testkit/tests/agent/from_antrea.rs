// SPDX-License-Identifier: Apache-2.0
//! Tests the migration from Antrea's NodePortLocal and the way back, under load, with a model of Antrea's agent.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use npl_testkit::antrea::{self, Antrea, Format, Mapping};
use npl_testkit::cluster::MAPPING_ANNOTATION;
use npl_testkit::echo::Protocol;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::topology::MASQUERADE;
use npl_testkit::traffic::{self, Direction, Load, Transfer};
use serde_json::json;

use crate::redirect::wait_for_redirected_pods;
use crate::world::{LIMIT, NAMESPACE, POD_PORT, World};

const MIB: u64 = 1024 * 1024;
const PODS: [&str; 2] = ["web-0", "web-1"];
const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];
/// The rate of the load in requests per second.
const RATE: u32 = 50;
/// The first node port of the range.
const FIRST_PORT: u16 = 61000;

/// Returns the mappings that Antrea gives to a Pod, with consecutive node ports.
fn mappings(world: &World, index: u16) -> [Mapping; 2] {
    let pod_ip = world.topology.pods()[usize::from(index)].ip();
    let mapping = |(number, protocol)| Mapping {
        node_port: FIRST_PORT + 2 * index + number,
        protocol,
        pod_ip,
        pod_port: POD_PORT,
    };
    [(0, Protocol::Tcp), (1, Protocol::Udp)].map(mapping)
}

fn all_mappings(world: &World) -> Vec<Mapping> {
    (0..2).flat_map(|index| mappings(world, index)).collect()
}

/// Writes a Pod's annotation as Antrea's agent does.
fn annotate(world: &World, pod: &str, value: &str) {
    let patch = json!({"metadata": {"annotations": {MAPPING_ANNOTATION: value}}});
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status");
    world.cluster.client().merge_patch(&path, &patch).unwrap();
}

/// Creates a Node with two Pods whose node ports Antrea's agent serves. The Node also has nftables rules that
/// masquerade Pods, like those of a CNI.
fn world_with_antrea(format: Format) -> (World, Antrea) {
    let mut world = World::new();
    world.topology.node().nft(MASQUERADE).unwrap();
    world.create_node();
    world.create_service();
    world.enable_service();
    for pod in PODS {
        world.create_pod(pod);
    }
    let antrea = Antrea::start(world.topology.node(), &all_mappings(&world)).unwrap();
    for (index, pod) in (0..).zip(PODS) {
        annotate(&world, pod, &antrea::annotation(format, world.node_ip(), &mappings(&world, index)));
        world.assert_served(pod);
    }
    (world, antrea)
}

/// Connections that are open during the whole migration.
struct OpenConnections {
    transfers: [Transfer; 2],
    idle: TcpStream,
    datagrams: Datagrams,
}

/// A UDP flow with about one request per second, so that the flow's entry in kernel conntrack does not expire.
struct Datagrams {
    stop: mpsc::Sender<()>,
    exchanges: JoinHandle<u64>,
}

impl Datagrams {
    fn start(client: &Netns, server: SocketAddr) -> Self {
        let socket = traffic::udp_socket(client, server, true).unwrap();
        assert_datagram_answers(&socket);
        let (stop, stopped) = mpsc::channel();
        let exchanges = thread::spawn(move || {
            let mut exchanges = 0;
            while stopped.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                assert_datagram_answers(&socket);
                exchanges += 1;
            }
            exchanges
        });
        Self { stop, exchanges }
    }

    /// Asserts that every datagram was answered, and returns the number of exchanges.
    fn finish(self) -> u64 {
        drop(self.stop);
        self.exchanges.join().unwrap()
    }
}

/// Sends a datagram. The Pod must see the client's port.
fn assert_datagram_answers(socket: &UdpSocket) {
    let answer = traffic::udp_ask(socket, "still there?").unwrap();
    assert_eq!((answer.pod.as_str(), answer.client.port()), ("web-0", socket.local_addr().unwrap().port()));
}

impl OpenConnections {
    fn start(world: &World) -> Self {
        let client = &world.topology.client().netns;
        let [tcp, udp] = PROTOCOLS.map(|protocol| world.address("web-0", protocol));
        let transfers = [Direction::Upload, Direction::Download]
            .map(|direction| Transfer::start(client, tcp, direction, 64 * MIB, 8 * MIB).unwrap());
        let idle = traffic::tcp_connect(client, tcp).unwrap();
        let open = Self { transfers, idle, datagrams: Datagrams::start(client, udp) };
        open.assert_idle_answers();
        open
    }

    /// Sends a request on the idle connection. The Pod must still see the same client port.
    fn assert_idle_answers(&self) {
        let answer = traffic::tcp_ask(&self.idle, "still there?").unwrap();
        assert_eq!((answer.pod.as_str(), answer.client), ("web-0", self.idle.local_addr().unwrap()));
    }

    /// Asserts that the idle connection and the UDP flow still work, and waits until the transfers have ended.
    fn finish(self) {
        self.assert_idle_answers();
        assert!(self.datagrams.finish() > 0);
        for transfer in self.transfers {
            transfer.join().unwrap();
        }
    }
}

fn written(world: &World) -> [usize; 2] {
    PODS.map(|pod| world.annotations.history(pod).len())
}

/// The number of flows that NPL has translated.
fn translated_by_npl(world: &World) -> u64 {
    world.kernel_mappings().iter().map(|row| row["newFlows"].as_u64().unwrap()).sum()
}

fn wait_for_answers(load: &Load, step: &str) {
    load.wait_for_answers(u64::from(RATE), LIMIT).unwrap();
    assert_eq!(load.report().failures, [], "{step}");
}

/// Migrates in the order of docs/antrea-compatibility.md: stops Antrea's agent, starts NPL's agent, and removes
/// Antrea's rules. `rewrites` is the number of times that NPL's agent writes each annotation.
fn migrate(format: Format, flags: &[&str], rewrites: usize) {
    let (mut world, antrea) = world_with_antrea(format);
    // `nf_conntrack_tcp_be_liberal` is set only for offload, which needs it. In other modes, the sysctl would hide the
    // following error. If NPL translated some packets of a connection that Antrea's rules translate, strict conntrack
    // would classify the connection's other packets as out of window, and the test would fail.
    world.topology.node().set_liberal_tracking(flags.contains(&"offload")).unwrap();
    let ports = PODS.map(|pod| world.wait_for_entries(pod, 2));
    let before = written(&world);
    let client = world.topology.client().netns.clone();
    let open = OpenConnections::start(&world);
    let load = Load::start(&client, RATE, world.load_requests(&PODS));
    wait_for_answers(&load, "Antrea serves");

    drop(antrea);
    wait_for_answers(&load, "Antrea's NodePortLocal is disabled");

    world.start_agent(flags);
    world.wait_for_kernel_mappings(4);
    let by_antrea = antrea::translated(world.topology.node()).unwrap();
    let by_npl = translated_by_npl(&world);
    wait_for_answers(&load, "NPL serves");
    assert!(translated_by_npl(&world) >= by_npl + u64::from(RATE) / 2, "NPL must translate new flows");
    let more = antrea::translated(world.topology.node()).unwrap() - by_antrea;
    assert!(more <= 4, "{more} new flows still used Antrea's rules");
    open.assert_idle_answers();
    if flags.iter().any(|flag| ["redirect", "offload"].contains(flag)) {
        wait_for_redirected_pods(&world, 2);
    }

    antrea::flush(world.topology.node()).unwrap();
    wait_for_answers(&load, "Antrea's rules are removed");
    open.finish();
    assert_eq!(load.stop().failures, []);
    assert_eq!(PODS.map(|pod| world.wait_for_entries(pod, 2)), ports, "the node ports must not change");
    assert_eq!(written(&world), before.map(|count| count + rewrites), "wrong number of writes");
}

#[test]
fn a_migration_from_antrea_1_7_loses_nothing_and_writes_nothing() {
    migrate(Format::V1_7, &[], 0);
}

/// Antrea's annotations have the format of Antrea 2.6. NPL's agent publishes its default format, v1.7, which differs,
/// so the agent rewrites each annotation once. The node ports do not change.
#[test]
fn a_migration_from_antrea_2_6_with_redirect_loses_nothing_and_adds_fields() {
    migrate(Format::V2_6, &["--forwarding", "redirect"], 1);
}

#[test]
fn a_migration_from_antrea_2_0_with_offload_loses_nothing_and_writes_nothing() {
    migrate(Format::V2_0, &["--forwarding", "offload", "--annotation-format", "v2.0"], 0);
}

#[test]
fn a_migration_from_antrea_1_4_with_xdp_loses_nothing_and_adds_a_field() {
    migrate(Format::V1_4, &["--attach", "xdp"], 1);
}

/// Antrea's agent still runs: its sockets hold the node ports, and it replaces each annotation that differs from its
/// own. NPL's agent must report both problems, and every request to Antrea's node ports must be answered.
#[test]
fn an_agent_beside_antrea_reports_the_sockets_and_the_other_writer_and_loses_nothing() {
    let (mut world, antrea) = world_with_antrea(Format::V1_7);
    let client = world.topology.client().netns.clone();
    let load = Load::start(&client, RATE, world.load_requests(&PODS));
    let own = antrea::annotation(Format::V1_7, world.node_ip(), &mappings(&world, 0));
    world.start_agent(&[]);
    world.wait_for_log("another process has bound this port");
    // In the role of Antrea's agent, the test replaces each annotation value that NPL writes, until NPL reports the
    // other writer.
    let contested = "keeps changing the annotation";
    poll::until("the report of the other writer", LIMIT, || {
        let value = world.cluster.pod_annotation(NAMESPACE, "web-0").unwrap();
        if value.is_some_and(|value| value != own) {
            annotate(&world, "web-0", &own);
        }
        world.agent_log().contains(contested).then_some(())
    })
    .unwrap();
    wait_for_answers(&load, "both agents run");
    assert_eq!(load.stop().failures, []);

    // If the operator stops NPL first, Antrea serves as before.
    world.agent().kill().unwrap();
    world.agent_options(&[]).command(&["cleanup"]).unwrap();
    let first = mappings(&world, 0)[0].node_port;
    world.assert_answers(Protocol::Tcp, (world.node_ip(), first).into(), "web-0");
    drop(antrea);
}

/// The way back: NPL's agent is stopped, Antrea's agent restores its rules from the annotations, and only then are
/// NPL's programs removed. New requests are served throughout, except that the test sends none while the programs are
/// removed, because the cleanup resets open connections.
#[test]
fn a_rollback_to_antrea_loses_no_new_request_and_writes_nothing() {
    let (mut world, antrea) = world_with_antrea(Format::V1_7);
    drop(antrea);
    world.start_agent(&[]);
    world.wait_for_kernel_mappings(4);
    antrea::flush(world.topology.node()).unwrap();
    let before = written(&world);
    let client = world.topology.client().netns.clone();
    let load = Load::start(&client, RATE, world.load_requests(&PODS));
    wait_for_answers(&load, "NPL serves");

    world.agent().kill().unwrap();
    wait_for_answers(&load, "no agent runs");
    let antrea = Antrea::start(world.topology.node(), &all_mappings(&world)).unwrap();
    wait_for_answers(&load, "Antrea's agent has restored its rules");
    assert_eq!(antrea::translated(world.topology.node()).unwrap(), 0, "NPL's programs still translate");

    let idle = traffic::tcp_connect(&client, world.address("web-0", Protocol::Tcp)).unwrap();
    traffic::tcp_ask(&idle, "before the cleanup").unwrap();
    // No request of the load is in progress during the cleanup, because the cleanup resets open connections.
    load.replace(Vec::new());
    world.agent_options(&[]).command(&["cleanup"]).unwrap();
    load.replace(world.load_requests(&PODS));
    wait_for_answers(&load, "Antrea serves");
    assert!(
        traffic::tcp_ask(&idle, "after the cleanup").is_err(),
        "the cleanup must reset the open connection, as the documentation says"
    );
    assert_eq!(load.stop().failures, []);
    assert!(antrea::translated(world.topology.node()).unwrap() >= u64::from(RATE));
    assert_eq!(written(&world), before);
    drop(antrea);
}

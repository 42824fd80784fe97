// SPDX-License-Identifier: Apache-2.0
//! Tests that a SYN flood from random sources to one Pod does not affect connections to another Pod.

mod busy_connections;
mod new_clients;
mod source;

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use npl_agent::core::model::{Family, NodePort, Protocol};
use npl_agent::datapath::Tables;
use npl_testkit::process::{self, joined};
use npl_testkit::traffic;

use self::busy_connections::BusyConnections;
use self::new_clients::NewClients;
use self::source::Source;
use crate::world::{NODE_PORT, World, is_emulated};

/// The node port of the second Pod, which receives the flood.
const FLOODED_PORT: u16 = NODE_PORT + 1;

/// The number of threads that send and receive on the connections.
const TRAFFIC_THREADS: usize = 4;

/// Open files per connection: both ends are in this process, and the test needs further files.
const FILES_EACH: usize = 4;

/// The number of SYNs that the flood sends between two checks of whether enough new clients have been counted.
const FURTHER_SYNS: u64 = 1000;

/// Share of new clients that must be answered within the time limit, per mille.
const SERVED_PER_MILLE: usize = 990;

/// Share of SYNs that must be translated, per mille. The kernel may lack memory for a few frames.
const TRANSLATED_PER_MILLE: u64 = 999;
/// Share of SYNs that must arrive at the Pod, per mille. A few may be lost if the queue between the Node and the Pod
/// overflows.
const ARRIVED_PER_MILLE: u64 = 990;

/// Size of the test. An emulated processor is about a hundred times slower.
struct Size {
    syns: u64,
    connections: usize,
    /// Minimum number of new clients of each protocol during the flood. On a slow machine, the flood continues until
    /// this number is reached.
    new_clients: usize,
}

fn size() -> Size {
    if is_emulated() {
        Size { syns: 20_000, connections: 40, new_clients: 2 }
    } else {
        Size { syns: 10_000_000, connections: 1000, new_clients: 100 }
    }
}

#[test]
fn syn_flood_loses_no_connection_and_refuses_no_client() {
    let Size { syns, connections, new_clients: enough } = size();
    process::allow_open_files((connections * FILES_EACH).try_into().unwrap()).unwrap();
    let mut world = World::new(2);
    let mut datapath = world.datapath.take().unwrap();
    let client = world.client().clone();
    // The client needs many ports, because the port of a closed connection is unusable for a minute.
    client.sysctl("net/ipv4/ip_local_port_range", "1024 65535").unwrap();
    let (frontend, client_ip) = (world.frontend(), world.client_ip());
    let streams = (0..connections).map(|_| traffic::tcp_connect(&client, frontend).unwrap());
    let streams: Vec<TcpStream> = streams.collect();
    let mut groups: Vec<BusyConnections<'_>> = streams
        .chunks(connections.div_ceil(TRAFFIC_THREADS))
        .map(|group| BusyConnections::new(group, &world.pod().name))
        .collect();
    // One round establishes every flow, because both sides send data.
    groups.iter_mut().for_each(BusyConnections::run_round);

    let before = requests(&datapath.tables);
    let source = Source::new(&world, datapath.hooks.load_program(npl_common::names::PROG_INGRESS).unwrap());
    let (is_over, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    let send = || {
        let mut sent = source.send(syns, &is_over);
        while count.load(Ordering::Relaxed) < enough && !is_over.load(Ordering::Relaxed) {
            sent += source.send(FURTHER_SYNS, &is_over);
        }
        sent
    };
    let (sent, rounds, new_clients) = thread::scope(|scope| {
        let flood = scope.spawn(|| until_over(&is_over, send));
        let carry = |group: BusyConnections<'_>| until_over(&is_over, || group.run_until(&is_over));
        let mut threads = Vec::new();
        for group in groups {
            threads.push(scope.spawn(move || carry(group)));
        }
        let (is_over, count, client) = (&is_over, &count, &client);
        let connect = move || NewClients::connect_repeatedly(client, frontend, client_ip, is_over, count);
        let new_clients = scope.spawn(move || until_over(is_over, connect));
        (joined(flood), threads.into_iter().map(joined).collect::<Vec<u64>>(), joined(new_clients))
    });
    let arrived = source.arrived(sent);
    drop(source);
    let translated = requests(&datapath.tables) - before;
    println!("{sent} SYNs, {translated} translated, {arrived:?} arrived; rounds {rounds:?}; {new_clients}");

    assert!(sent >= syns, "the flood ended after {sent} SYNs");
    assert!(translated >= sent * TRANSLATED_PER_MILLE / 1000, "{translated} of {sent} SYNs were translated");
    assert!(arrived.is_none_or(|count| count >= sent * ARRIVED_PER_MILLE / 1000), "{arrived:?} of {sent} SYNs arrived");
    new_clients.assert_served(enough, SERVED_PER_MILLE);
}

/// Runs `work` and sets `is_over` when `work` ends, even if `work` panics.
fn until_over<T>(is_over: &AtomicBool, work: impl FnOnce() -> T) -> T {
    struct SetOnDrop<'a>(&'a AtomicBool);
    impl Drop for SetOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let _end = SetOnDrop(is_over);
    work()
}

/// Number of translated requests of the flooded mapping.
fn requests(tables: &Tables) -> u64 {
    let is_flooded = |frontend: &npl_agent::core::model::Frontend| {
        (frontend.family, frontend.node_port, frontend.protocol) == (Family::V4, NodePort(FLOODED_PORT), Protocol::Tcp)
    };
    let records = tables.records().unwrap();
    records.iter().find(|record| is_flooded(&record.frontend)).unwrap().stats.request_packets
}

// SPDX-License-Identifier: Apache-2.0
//! A flood of SYNs from random clients to one Pod, and what those of another notice of it: nothing.

mod conversations;
mod newcomers;
mod source;

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use npl_agent::core::model::{Family, NodePort, Protocol};
use npl_agent::datapath::Tables;
use npl_testkit::process::{self, joined};
use npl_testkit::traffic;

use self::conversations::Conversations;
use self::newcomers::Newcomers;
use self::source::Source;
use crate::world::{NODE_PORT, World, is_emulated};

/// The node port of the second Pod, which gets the flood.
const FLOODED_PORT: u16 = NODE_PORT + 1;

/// Threads that keep the connections busy.
const CARRIERS: usize = 4;

/// Open files per connection, both ends being in this process; and all others.
const FILES_EACH: usize = 4;

/// Of a thousand, new clients that must be answered in time.
const SERVED_PER_MILLE: usize = 990;

/// Of a thousand, SYNs that must be translated: the kernel may run short of memory for a frame.
const TRANSLATED_PER_MILLE: u64 = 999;
/// Of a thousand, SYNs that must arrive at the Pod: between the Node and the Pod is a queue, which may be full.
const ARRIVED_PER_MILLE: u64 = 990;

/// How large the test is. An emulated processor takes a hundred times as long for a packet.
struct Size {
    syns: u64,
    connections: usize,
    /// New clients that there must have been, to judge by.
    newcomers: usize,
}

fn size() -> Size {
    if is_emulated() {
        Size { syns: 20_000, connections: 40, newcomers: 2 }
    } else {
        Size { syns: 10_000_000, connections: 1000, newcomers: 100 }
    }
}

#[test]
fn flood_of_syns_costs_no_connection_and_keeps_no_client_out() {
    let Size { syns, connections, newcomers: enough } = size();
    process::allow_open_files((connections * FILES_EACH).try_into().unwrap()).unwrap();
    let mut world = World::new(2);
    let mut datapath = world.datapath.take().unwrap();
    let client = world.client().clone();
    // Clients that come and go leave ports behind that rest for a minute.
    client.sysctl("net/ipv4/ip_local_port_range", "1024 65535").unwrap();
    let (frontend, client_ip) = (world.frontend(), world.client_ip());
    let streams = (0..connections).map(|_| traffic::tcp_connect(&client, frontend).unwrap());
    let streams: Vec<TcpStream> = streams.collect();
    let mut groups: Vec<Conversations<'_>> = streams
        .chunks(connections.div_ceil(CARRIERS))
        .map(|group| Conversations::new(group, &world.pod().name))
        .collect();
    // A flow is established once both sides have spoken.
    groups.iter_mut().for_each(Conversations::go_round);

    let before = requests(&datapath.tables);
    let source = Source::new(&world, datapath.hooks.load_program(npl_common::names::PROG_INGRESS).unwrap());
    let is_over = AtomicBool::new(false);
    let (sent, rounds, newcomers) = thread::scope(|scope| {
        let flood = scope.spawn(|| until_over(&is_over, || source.send(syns, &is_over)));
        let carry = |group: Conversations<'_>| until_over(&is_over, || group.go_on(&is_over));
        let mut carriers = Vec::new();
        for group in groups {
            carriers.push(scope.spawn(move || carry(group)));
        }
        let newcomers =
            scope.spawn(|| until_over(&is_over, || Newcomers::come(&client, frontend, client_ip, &is_over)));
        (joined(flood), carriers.into_iter().map(joined).collect::<Vec<u64>>(), joined(newcomers))
    });
    let arrived = source.arrived(sent);
    drop(source);
    let translated = requests(&datapath.tables) - before;
    println!("{sent} SYNs, {translated} translated, {arrived:?} arrived; rounds {rounds:?}; {newcomers}");

    assert_eq!(sent, syns);
    assert!(translated >= syns * TRANSLATED_PER_MILLE / 1000, "{translated} of {syns} SYNs were translated");
    assert!(arrived.is_none_or(|it| it >= syns * ARRIVED_PER_MILLE / 1000), "{arrived:?} of {syns} SYNs arrived");
    newcomers.assert_served(enough, SERVED_PER_MILLE);
}

/// Runs `work`; however it ends, it is over for the others too.
fn until_over<T>(is_over: &AtomicBool, work: impl FnOnce() -> T) -> T {
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let _end = End(is_over);
    work()
}

/// Packets to the flooded mapping that were translated.
fn requests(tables: &Tables) -> u64 {
    let is_flooded = |it: &npl_agent::core::model::Frontend| {
        (it.family, it.node_port, it.protocol) == (Family::V4, NodePort(FLOODED_PORT), Protocol::Tcp)
    };
    let records = tables.records().unwrap();
    records.iter().find(|record| is_flooded(&record.frontend)).unwrap().stats.request_packets
}

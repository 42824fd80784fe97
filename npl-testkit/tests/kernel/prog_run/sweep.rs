// SPDX-License-Identifier: Apache-2.0
//! Flows that nothing more is to come of leave the table, and no others.

use std::path::Path;
use std::time::Duration;

use aya::maps::{HashMap, MapData};
use nix::time::{ClockId, clock_gettime};
use npl_agent::agent::sweeper::Sweeper;
use npl_agent::core::model::{Family, Protocol};
use npl_common::flow::{FlowKeyV4, FlowState, FlowV4, MAX_FLOWS};
use npl_common::names::MAP_FLOW_V4;
use npl_testkit::packet::tcp_flags::{ACK, FIN, SYN};
use npl_testkit::poll;

use super::scene::{Tcp, Udp, client, establish, flow, node, pod, tcp, udp, with_family, with_mappings};
use crate::lab::{Lab, open};
use crate::left::BPFFS;
/// More than a connection that ended is waited for, a datagram, and the turns of the sweeper.
const ENDED: Duration = Duration::from_secs(31);
const NOT_ENDED: Duration = Duration::from_secs(29);
const DATAGRAMS: Duration = Duration::from_secs(301);
const TURNS: Duration = Duration::from_mins(1);
/// More than the kernel reads in one go.
const MANY: u32 = 20_000;

/// The clock of the flow table.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into()
}

fn swept(lab: &mut Lab, later: Duration) -> usize {
    lab.datapath.tables.remove_expired_flows(now() + later).unwrap()
}

#[test]
fn what_ended_is_forgotten_soon_and_what_is_open_is_not() {
    with_mappings(|lab| {
        establish(lab);
        for _packet in 0..2 {
            lab.ingress(&udp(client(), node(), b"question"));
            lab.egress(&udp(pod(), client(), b"answer"));
        }
        assert_eq!(swept(lab, ENDED), 0);
        lab.ingress(&tcp(client(), node(), FIN | ACK, b""));
        lab.egress(&tcp(pod(), client(), FIN | ACK, b""));
        assert_eq!(swept(lab, Duration::ZERO), 0, "the last acknowledgement may be lost");
        assert_eq!(swept(lab, ENDED), 1);
        assert_eq!((lab.flow(flow(Tcp)), lab.flow(flow(Udp)).is_some()), (None, true));
        assert_eq!(swept(lab, DATAGRAMS), 1);
        assert_eq!(lab.flow(flow(Udp)), None);
    });
}

/// A flow of one of many clients that was last seen when the machine started.
fn insert(flows: &mut HashMap<MapData, FlowKeyV4, FlowV4>, protocol: Protocol, client: u32, [ours, theirs]: [u8; 2]) {
    let [.., high, low] = client.to_be_bytes();
    let client_addr = [198, 51, 100, u8::try_from(client >> 16).unwrap()];
    let (pod_addr, client_port) = ([10, 0, 0, 5], u16::from_be_bytes([high, low]));
    let key = FlowKeyV4 { client_addr, pod_addr, client_port, pod_port: 8080, protocol: protocol.number().into() };
    let state = FlowState {
        last_seen_ns: 0,
        generation: 1,
        refreshed: 0,
        ifindex: 0,
        node_port: 61_000,
        client_tcp_flags: theirs,
        pod_tcp_flags: ours,
    };
    flows.insert(key, FlowV4 { state, node_addr: [192, 0, 2, 10], pad: 0 }, 0).unwrap();
}

/// Many connections, of which every so many-th has ended.
fn fill(every: u32) {
    let mut flows = open(MAP_FLOW_V4);
    for client in 0..MANY {
        insert(&mut flows, Tcp, client, [ACK | FIN, if client % every == 0 { ACK | FIN } else { ACK }]);
    }
}

/// Nobody has answered one, and one was answered: each look is ten seconds after the last.
#[test]
fn attempts_that_nothing_comes_of_are_forgotten_and_flows_are_not() {
    with_mappings(|lab| {
        establish(lab);
        lab.ingress(&udp(client(), node(), b"question"));
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let mut attempts = Default::default();
        let mut looks = |lab: &mut Lab, count| {
            let forgotten = (0..count).map(|_| lab.datapath.tables.remove_expired_half_open(&mut attempts).unwrap());
            forgotten.sum::<usize>()
        };
        assert_eq!((looks(lab, 3), looks(lab, 1)), (0, 2));
        assert_eq!((lab.slot(flow(Udp)), lab.attempt(flow(Tcp)), lab.slot(flow(Tcp)).is_some()), (None, None, true));
        lab.ingress(&udp(client(), node(), b"question"));
        lab.egress(&udp(pod(), client(), b"answer"));
        assert_eq!((looks(lab, 30), looks(lab, 1), looks(lab, 40)), (0, 1, 0));
        assert!(lab.flow(flow(Tcp)).is_some());
    });
}

/// Silent connections would be taken out of a full table first: datagrams are asked and answered all the time.
#[test]
fn datagrams_make_room_where_there_is_a_crowd() {
    with_family(Family::V4, |lab| {
        let mut flows = open(MAP_FLOW_V4);
        insert(&mut flows, Tcp, 0, [ACK, ACK]);
        for client in 1..MAX_FLOWS / 2 {
            insert(&mut flows, Udp, client, [0, 0]);
        }
        let mut swept = |after| lab.datapath.tables.remove_expired_flows(after).unwrap();
        assert_eq!(swept(ENDED), 0, "there is room");
        insert(&mut flows, Udp, MAX_FLOWS, [0, 0]);
        assert_eq!(swept(NOT_ENDED), 0, "an answer may be under way");
        assert_eq!(swept(ENDED), MAX_FLOWS as usize / 2);
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), 1, "the connection");
    });
}

#[test]
fn a_table_of_many_is_looked_through_to_its_end() {
    with_family(Family::V4, |lab| {
        fill(2);
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), MANY as usize);
        // As long after the start as what has ended is waited for, and no longer.
        let swept = lab.datapath.tables.remove_expired_flows(ENDED).unwrap();
        assert_eq!((swept, lab.datapath.tables.flow_count().unwrap()), (MANY as usize / 2, MANY as usize / 2));
    });
}

#[test]
fn the_agent_sweeps_by_itself() {
    with_family(Family::V4, |lab| {
        fill(1);
        let _sweeper = Sweeper::start(Path::new(BPFFS)).unwrap();
        let is_swept = || (lab.datapath.tables.flow_count().unwrap() == 0).then_some(());
        poll::until("the end of what has ended", TURNS, is_swept).unwrap();
    });
}

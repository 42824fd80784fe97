// SPDX-License-Identifier: Apache-2.0
//! Tests that the sweeper removes timed-out flows from the flow table, and keeps all other flows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aya::maps::{HashMap, MapData};
use nix::time::{ClockId, clock_gettime};
use npl_agent::agent::sweeper::Sweeper;
use npl_agent::core::model::{Family, Protocol};
use npl_agent::datapath::{FlowTableFill, SweptFlows};
use npl_agent::metrics::{Counts, DatapathCounters, Format, Metrics};
use npl_common::flow::{FlowKeyV4, FlowState, FlowV4};
use npl_common::names::{FLOW_TABLES_V4, MAP_FLOW_V4, MAP_UDP_FLOW_V4};
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::tcp_flags::{ACK, FIN, SYN};
use npl_testkit::poll;

use super::scene::{
    NODE_PORT, Tcp, Udp, client, establish, establishes, family, flow, from, is_reply_translated, node, pod, tcp, udp,
    with_family, with_mappings, with_mappings_of,
};
use super::sctp_flows;
use crate::bpffs_pool::BPFFS;
use crate::counters::reason;
use crate::lab::{Lab, open};

struct NoCounters;

impl DatapathCounters for NoCounters {
    fn read(&self) -> Counts {
        Counts::default()
    }
}

/// One second more, and one second less, than the timeout of a closed TCP connection.
const AFTER_CLOSED: Duration = Duration::from_secs(31);
const BEFORE_CLOSED: Duration = Duration::from_secs(29);
const AFTER_UDP: Duration = Duration::from_secs(301);
const SWEEP_LIMIT: Duration = Duration::from_mins(1);
/// More than the idle timeout of every flow.
const AFTER_ALL: Duration = Duration::from_hours(24 * 6);
/// The number of sweeps after which the half-open entries of all flows without an entry in the flow table have timed
/// out.
const ALL_SWEEPS: usize = 31;
/// More entries than one batch read returns.
const MANY: u32 = 20_000;

/// Returns the time by the clock of the flow table entries, `CLOCK_MONOTONIC`.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into()
}

fn swept(lab: &mut Lab, later: Duration) -> usize {
    lab.datapath.tables.remove_expired_flows(now() + later, |_, _| {}).unwrap()
}

/// Removes every entry from the flow tables, as if no packet had arrived for longer than every idle timeout. The
/// half-open cache keeps the entries of the flows, but an entry of an established flow gets the phase "replied".
pub(super) fn expire_flows(lab: &mut Lab) {
    swept(lab, AFTER_ALL);
}

/// Sweeps the half-open cache repeatedly, until every entry whose flow is not in the flow table has timed out. Returns
/// the number of removed entries.
pub(super) fn expire_words(lab: &mut Lab) -> usize {
    let mut expiry = Default::default();
    (0..ALL_SWEEPS).map(|_| lab.datapath.tables.remove_expired_half_open(&mut expiry).unwrap()).sum()
}

#[test]
fn closed_connections_time_out_soon_and_open_ones_do_not() {
    with_mappings(|lab| {
        establish(lab);
        for _packet in 0..2 {
            lab.ingress(&udp(client(), node(), b"question"));
            lab.egress(&udp(pod(), client(), b"answer"));
        }
        assert_eq!(swept(lab, AFTER_CLOSED), 0);
        lab.ingress(&tcp(client(), node(), FIN | ACK, b""));
        lab.egress(&tcp(pod(), client(), FIN | ACK, b""));
        assert_eq!(
            swept(lab, Duration::ZERO),
            0,
            "the closed flow must stay until its timeout, because the last ACK may be retransmitted"
        );
        assert_eq!(swept(lab, AFTER_CLOSED), 1);
        assert_eq!((lab.flow(flow(Tcp)), lab.flow(flow(Udp)).is_some()), (None, true));
        assert_eq!(swept(lab, AFTER_UDP), 1);
        assert_eq!(lab.flow(flow(Udp)), None);
    });
}

/// Inserts a flow of one of many clients, last seen at boot.
fn insert(
    flows: &mut HashMap<MapData, FlowKeyV4, FlowV4>,
    protocol: Protocol,
    client: u32,
    [pod_flags, client_flags]: [u8; 2],
) {
    let [.., high, low] = client.to_be_bytes();
    let client_addr = [198, 51, 100, u8::try_from(client >> 16).unwrap()];
    let (pod_addr, client_port) = ([10, 0, 0, 5], u16::from_be_bytes([high, low]));
    let key = FlowKeyV4 { client_addr, pod_addr, client_port, pod_port: 8080, protocol: protocol.number().into() };
    let state = FlowState {
        last_seen_ns: 0,
        generation: 1,
        refreshed: 0,
        pod_acknowledgement: 0,
        node_port: 61_000,
        client_tcp_flags: client_flags,
        pod_tcp_flags: pod_flags,
    };
    flows.insert(key, FlowV4 { state, node_addr: [192, 0, 2, 10], pad: 0 }, 0).unwrap();
}

/// Inserts [`MANY`] TCP connections, on each of which the Pod has sent a FIN. One in `every` has ended, because the
/// client has sent a FIN too.
fn fill(every: u32) {
    let mut flows = open(MAP_FLOW_V4);
    for client in 0..MANY {
        insert(&mut flows, Tcp, client, [ACK | FIN, if client % every == 0 { ACK | FIN } else { ACK }]);
    }
}

/// The sweeper runs every ten seconds. The fourth sweep removes the half-open entries of a SYN and of an unanswered
/// datagram. The 31st sweep removes the half-open entry of an answered datagram. The entries of an established flow
/// stay.
#[test]
fn half_open_entries_time_out_and_established_flows_do_not() {
    with_mappings(|lab| {
        establish(lab);
        lab.ingress(&udp(client(), node(), b"question"));
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let mut half_open = Default::default();
        let mut passes = |lab: &mut Lab, count| {
            let removed = (0..count).map(|_| lab.datapath.tables.remove_expired_half_open(&mut half_open).unwrap());
            removed.sum::<usize>()
        };
        assert_eq!((passes(lab, 3), passes(lab, 1)), (0, 2));
        assert_eq!((lab.slot(flow(Udp)), lab.handshake(flow(Tcp)), lab.slot(flow(Tcp)).is_some()), (None, None, true));
        lab.ingress(&udp(client(), node(), b"question"));
        lab.egress(&udp(pod(), client(), b"answer"));
        assert_eq!((passes(lab, 30), passes(lab, 1), passes(lab, 40)), (0, 1, 0));
        assert!(lab.flow(flow(Tcp)).is_some());
    });
}

/// When a flow's entry in the flow table has timed out, the copy in the half-open cache must time out too. Otherwise,
/// NPL would use this copy to translate the Pod's packets until another flow overwrites the copy.
#[test]
fn word_of_an_expired_flow_times_out_too() {
    with_mappings(|lab| {
        establish(lab);
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        for _packet in 0..2 {
            lab.ingress(&question);
            lab.egress(&answer);
        }
        let words = |lab: &mut Lab| [Tcp, Udp].map(|it| lab.own_slot(flow(it)).map(half_open::phase));
        assert_eq!((expire_words(lab), words(lab)), (0, [Some(Phase::ESTABLISHED); 2]));
        expire_flows(lab);
        assert_eq!(words(lab), [Some(Phase::REPLIED); 2]);
        assert_eq!(lab.egress(&answer).bytes, from(&answer, node()).build(), "a late answer must be translated");
        expire_flows(lab);
        assert_eq!((expire_words(lab), words(lab)), (2, [None; 2]));
        lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
        let segment = tcp(pod(), client(), ACK, b"");
        lab.egress(&segment).is(&segment, reason(Reason::UntrackedReply));
    });
}

#[test]
fn word_of_a_removed_endpoints_flow_times_out() {
    with_mappings(|lab| {
        establish(lab);
        lab.remove(family(), Tcp, NODE_PORT);
        lab.datapath.purge_flows().unwrap();
        assert_eq!(lab.own_slot(flow(Tcp)).map(half_open::phase), Some(Phase::REPLIED));
        assert_eq!((expire_words(lab), lab.own_slot(flow(Tcp))), (1, None));
    });
}

#[test]
fn clients_next_packet_establishes_an_expired_flow_again() {
    with_mappings(|lab| {
        establish(lab);
        expire_flows(lab);
        establishes(lab);
        is_reply_translated(lab, ACK);
        assert_eq!(expire_words(lab), 0);
        assert!(lab.flow(flow(Tcp)).is_some());
    });
}

/// If the UDP flow table is crowded, UDP flows get a shorter timeout. Otherwise, the table would become full and evict
/// flows that are idle but still in use.
#[test]
fn udp_flows_time_out_sooner_in_a_crowded_flow_table() {
    with_family(Family::V4, |lab| {
        insert(&mut open(MAP_FLOW_V4), Tcp, 0, [ACK, ACK]);
        let mut flows = open(MAP_UDP_FLOW_V4);
        let [_, capacity, _] = lab.datapath.tables.flow_capacities(Family::V4);
        let half = u32::try_from(capacity / 2).unwrap();
        for client in 0..half {
            insert(&mut flows, Udp, client, [0, 0]);
        }
        let mut left = BTreeMap::new();
        let mut swept = |after| {
            let report = |family, swept: SweptFlows| left.extend([(family, swept.left)]);
            lab.datapath.tables.remove_expired_flows(after, report).unwrap()
        };
        assert_eq!(swept(AFTER_CLOSED), 0, "the table is not crowded");
        insert(&mut flows, Udp, half, [0, 0]);
        assert_eq!(swept(BEFORE_CLOSED), 0, "a reply may still arrive");
        assert_eq!(swept(AFTER_CLOSED), capacity / 2 + 1);
        assert_eq!(left, BTreeMap::from([(Family::V4, [1, 0, 0]), (Family::V6, [0; 3])]));
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), 1, "only the TCP connection must be left");
    });
}

/// The flow table must have more elements than the number of flows that the agent states as its capacity. The kernel
/// reserves free elements for each CPU. A CPU without free elements evicts entries, even if free elements are reserved
/// for other CPUs.
#[test]
fn the_stated_number_of_flows_is_available_without_evictions() {
    with_family(Family::V4, |lab| {
        let capacities = lab.datapath.tables.flow_capacities(Family::V4);
        for (index, protocol) in Protocol::ALL.into_iter().enumerate() {
            let (name, capacity) = (FLOW_TABLES_V4[index], capacities[index]);
            let threads = aya::util::nr_cpus().unwrap();
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    scope.spawn(move || {
                        let mut flows = open(name);
                        for client in (thread..capacity).step_by(threads) {
                            insert(&mut flows, protocol, client.try_into().unwrap(), [ACK, ACK]);
                        }
                    });
                }
            });
            let fill = lab.datapath.tables.flow_tables(Family::V4).unwrap()[index];
            assert_eq!(fill, FlowTableFill { map: name, used: capacity, capacity });
        }
    });
}

/// A flood of one protocol, such as forged datagrams to a Pod that answers them, may fill the table of this protocol,
/// but evicts no flow of another protocol.
#[test]
fn full_flow_table_of_one_protocol_evicts_no_flows_of_others() {
    /// The number of the flood's first client. The client of `scene` has a smaller number.
    const FLOOD: u32 = 16 << 16;
    for (flooded, protocol) in Protocol::ALL.into_iter().enumerate() {
        with_mappings_of(Family::V4, |lab| {
            establish(lab);
            for _packet in 0..2 {
                lab.ingress(&udp(client(), node(), b"question"));
                lab.egress(&udp(pod(), client(), b"answer"));
            }
            sctp_flows::establish(lab);
            let mut flows = open(FLOW_TABLES_V4[flooded]);
            let capacity = lab.datapath.tables.flow_capacities(Family::V4)[flooded];
            for client in FLOOD..FLOOD + u32::try_from(capacity * 2).unwrap() {
                insert(&mut flows, protocol, client, [0, 0]);
            }
            let fills = lab.datapath.tables.flow_tables(Family::V4).unwrap();
            assert!(fills[flooded].used >= capacity, "the flood must fill the table: {fills:?}");
            for (other, fill) in Protocol::ALL.into_iter().zip(fills) {
                let is_alone = fill.used == 1 && lab.flow(flow(other)).is_some();
                assert!(is_alone || other == protocol, "a flood of {protocol} must not change the table of {other}");
            }
        });
    }
}

#[test]
fn sweep_covers_a_table_of_many_flows() {
    with_family(Family::V4, |lab| {
        fill(2);
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), MANY as usize);
        // At this time since boot, the timeout of the closed connections has just passed.
        let swept = lab.datapath.tables.remove_expired_flows(AFTER_CLOSED, |_, _| {}).unwrap();
        assert_eq!((swept, lab.datapath.tables.flow_count().unwrap()), (MANY as usize / 2, MANY as usize / 2));
    });
}

#[test]
fn sweeper_thread_removes_ended_flows() {
    with_family(Family::V4, |lab| {
        fill(1);
        let metrics = Metrics::new(Arc::new(NoCounters));
        let _sweeper = Sweeper::start(Path::new(BPFFS), metrics.clone()).unwrap();
        let is_swept = || (lab.datapath.tables.flow_count().unwrap() == 0).then_some(());
        poll::until("the removal of ended connections", SWEEP_LIMIT, is_swept).unwrap();
        let has_gauge = || {
            let text = metrics.encode(Format::Plain).unwrap();
            text.contains("npl_flow_table_entries{family=\"IPv4\",protocol=\"tcp\"} 0\n").then_some(())
        };
        poll::until("the number of entries", SWEEP_LIMIT, has_gauge).unwrap();
    });
}

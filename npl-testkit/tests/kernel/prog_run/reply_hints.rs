// SPDX-License-Identifier: Apache-2.0
//! Hints of replies: they spare two look-ups for a moment, and never say anything but what those would.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, MapData};
use npl_agent::core::model::Family;
use npl_common::lookup_cache::CachedReply;
use npl_common::mapping::{Endpoint, EndpointV4, EndpointV6};
use npl_common::names::{
    MAP_ENDPOINT_V4, MAP_ENDPOINT_V6, MAP_REPLY_CACHE_V4, MAP_REPLY_CACHE_V6, PROG_EGRESS, PROG_PODS_REDIRECT,
};
use npl_common::next_hop::PodNextHop;
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN};
use npl_testkit::test_run;

use super::hints::{ALL_BITS, AtTheEnd};
use super::redirect::{WAY, lead};
use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, SECOND_NODE_PORT, Tcp, bare, client, establish, family, flow, from, is_answered,
    node, pod, pod_ip, second_node_ip, tcp, third_node_ip, with_mappings,
};
use crate::counters::{reason, reply};
use crate::lab::{hash, open};
use crate::world::is_emulated;

/// A hint counts within one interval of the kernel's, between 0.25 s and 2.6 s long, so now and then one is left just before
/// the next begins.
const TRIALS: usize = 50;
const MOST: usize = 40;
/// More than an interval.
const LATER: Duration = Duration::from_secs(10);

/// What the Pod says on the flow.
fn answer() -> Packet {
    tcp(pod(), client(), ACK, b"")
}

/// All hints, and the place of the flow's.
fn hints() -> (Array<MapData, CachedReply>, u32) {
    let name = if family() == Family::V4 { MAP_REPLY_CACHE_V4 } else { MAP_REPLY_CACHE_V6 };
    (open(name), half_open::slot(hash(flow(Tcp))))
}

/// The flow's hint.
fn hint() -> CachedReply {
    let (hints, place) = hints();
    hints.get(&place, 0).unwrap()
}

/// Takes the endpoint away as nobody does who knows of hints, or puts it back.
fn set_endpoint_by_hand(endpoint: Option<Endpoint>) {
    fn set<K: aya::Pod>(name: &str, key: K, endpoint: Option<Endpoint>) {
        let mut endpoints: HashMap<MapData, K, Endpoint> = open(name);
        match endpoint {
            Some(endpoint) => endpoints.insert(key, endpoint, 0).unwrap(),
            None => endpoints.remove(&key).unwrap(),
        }
    }
    let (pod_port, protocol, pad) = (POD_PORT, Tcp.number(), 0);
    match pod_ip() {
        IpAddr::V4(pod) => {
            set(MAP_ENDPOINT_V4, EndpointV4 { pod_addr: pod.octets(), pod_port, protocol, pad }, endpoint);
        }
        IpAddr::V6(pod) => {
            set(MAP_ENDPOINT_V6, EndpointV6 { pod_addr: pod.octets(), pod_port, protocol, pad }, endpoint);
        }
    }
}

#[test]
fn a_reply_leaves_one_that_spares_the_next_both_look_ups() {
    with_mappings(|lab| {
        let translated = from(&answer(), node()).build();
        let is_spared = |_trial: &usize| {
            establish(lab);
            is_answered(lab, ACK);
            let endpoint = hint().endpoint;
            lab.evict(flow(Tcp));
            set_endpoint_by_hand(None);
            let outcome = lab.egress(&answer());
            set_endpoint_by_hand(Some(endpoint));
            outcome.bytes == translated
        };
        let spared = (0..TRIALS).filter(is_spared).count();
        assert!(spared >= MOST, "{spared} of {TRIALS}");
    });
}

/// The kernel takes what was not asked for out of a full table first, and this is in use.
#[test]
fn the_flow_table_is_asked_again_after_a_moment() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.evict(flow(Tcp));
        let since = Instant::now();
        while lab.slot(flow(Tcp)).map(half_open::phase) != Some(Phase::REPLIED) {
            assert!(since.elapsed() < LATER, "what the table has lost is not noticed");
            is_answered(lab, ACK);
        }
    });
}

#[test]
fn end_of_a_connection_is_noted_whatever_a_hint_says() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.egress(&tcp(pod(), client(), FIN | ACK, b""));
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags & FIN, FIN);
    });
}

/// Another processor has replies all the time, and leaves what it has found: before a change, or after it.
#[test]
fn what_was_found_before_a_mapping_went_does_not_count_after_it() {
    let changes = if is_emulated() { 300 } else { 10_000 };
    with_mappings(|lab| {
        establish(lab);
        let program = lab.program(PROG_EGRESS).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
        let (frame, is_over) = (answer().build(), AtomicBool::new(false));
        thread::scope(|scope| {
            let _end = AtTheEnd(&is_over);
            let _other = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    test_run::run(program.as_fd(), &frame, &test_run::Options::default()).unwrap();
                }
            });
            let (mut strays, mut answered) = (0, 0);
            for _change in 0..changes {
                lab.remove(family(), Tcp, NODE_PORT);
                strays += u32::from(lab.egress(&answer()).bytes != frame);
                lab.add(Tcp, NODE_PORT, pod(), GENERATION);
                answered += u32::from(lab.egress(&answer()).bytes != frame);
            }
            assert_eq!((strays, answered), (0, changes), "replies without a mapping, and with one, of {changes}");
        });
    });
}

/// Of two mappings of one Pod port, replies count for one that is there.
#[test]
fn what_is_left_of_several_mappings_counts_at_once() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.add(Tcp, SECOND_NODE_PORT, pod(), GENERATION);
        lab.remove(family(), Tcp, NODE_PORT);
        lab.egress(&answer()).is(&from(&answer(), node()), reply("61001/tcp", bare()));
    });
}

/// The place of an address that the Node lost is the next one's.
#[test]
fn reply_does_not_come_from_an_address_that_took_anothers_place() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.set_addresses(&[second_node_ip()]);
        lab.set_addresses(&[second_node_ip(), third_node_ip()]);
        is_answered(lab, ACK);
        is_answered(lab, ACK);
    });
}

/// Of what two processors have left at the same time, some bytes may be of the one and some of the other.
#[test]
fn what_nobody_has_left_is_none_and_is_replaced() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        let (mut hints, place) = hints();
        let left = hint();
        assert_eq!(left.endpoint.generation, GENERATION);
        for index in 0..size_of::<CachedReply>() {
            let mut changed = left;
            // SAFETY: an `aya::Pod` has no padding, and any bytes are a value of it.
            #[expect(unsafe_code, reason = "a hint is changed byte by byte")]
            let bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut changed).cast::<u8>(), size_of_val(&left)) };
            bytes[index] ^= ALL_BITS;
            hints.set(place, changed, 0).unwrap();
            is_answered(lab, ACK);
            assert_eq!(hint().endpoint, left.endpoint, "byte {index}");
            assert_ne!(hint(), changed, "byte {index}");
        }
    });
}

/// One client end, two node ends: the table knows which has the replies, and the slot may have been written last for the
/// other.
#[test]
fn slot_that_contradicts_the_table_has_no_hint() {
    with_mappings(|lab| {
        for (address, port) in [(0, SECOND_NODE_PORT), (1, NODE_PORT)] {
            establish(lab);
            is_answered(lab, ACK);
            lab.set_slot(flow(Tcp), half_open::entry(hash(flow(Tcp)), Phase::ESTABLISHED, address, port));
            is_answered(lab, ACK);
            is_answered(lab, ACK);
        }
    });
}

#[test]
fn slot_of_another_flow_has_no_hint_of_this_one() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.set_slot(flow(Tcp), half_open::entry(!hash(flow(Tcp)), Phase::ESTABLISHED, 0, NODE_PORT));
        let left = hint();
        is_answered(lab, ACK);
        assert_eq!(hint(), left, "what the other flow may have left there stays");
        lab.evict(flow(Tcp));
        lab.egress(&answer()).is(&answer(), reason(Reason::UntrackedReply));
    });
}

/// Past the host's stack, a hint does not say where a packet came from.
#[test]
fn packet_from_elsewhere_than_the_pod_is_not_redirected_by_a_hint() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lead(pod_ip(), PodNextHop { ifindex: WAY.ifindex + 1, ..WAY });
        let outcome = lab.run(PROG_PODS_REDIRECT, &answer().build());
        assert_eq!((outcome.bytes, outcome.changes), (answer().build(), vec![]));
    });
}

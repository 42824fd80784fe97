// SPDX-License-Identifier: Apache-2.0
//! Tests the lookup cache of replies, which saves two map lookups per reply and must never change the results of these
//! lookups.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData};
use npl_agent::core::model::Family;
use npl_common::lookup_cache::CachedReply;
use npl_common::mapping::{Endpoint, EndpointV4, EndpointV6};
use npl_common::names::{
    MAP_ENDPOINT_V4, MAP_ENDPOINT_V6, MAP_REPLY_CACHE_V4, MAP_REPLY_CACHE_V6, PROG_EGRESS, PROG_PODS_REDIRECT,
};
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN};
use npl_testkit::{poll, test_run};

use super::lookup_cache::{ALL_BITS, SetOnDrop};
use super::redirect::{NEXT_HOP, REDIRECT, TESTED_NEXT_HOP, after_one_hop, set_next_hop, with_route_to_client};
use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, SECOND_NODE_PORT, Tcp, bare, client, establish, family, flow, from,
    is_reply_translated, node, pod, pod_ip, second_node_ip, tcp, third_node_ip, with_mappings,
};
use crate::counters::{reason, reply};
use crate::lab::{NEXT, hash, open};
use crate::world::is_emulated;

/// The number of attempts that must use a cache entry. Not every attempt succeeds: a cache entry is valid only within
/// one interval of 256 jiffies (0.25 s to 2.6 s), and the interval may end during the attempt, especially on a slow
/// machine. Without the cache, no attempt would succeed.
const REQUIRED: usize = 40;
/// Time limit that is longer than 256 jiffies.
const LIMIT: Duration = Duration::from_secs(30);

/// The Pod's reply on the flow.
fn answer() -> Packet {
    tcp(pod(), client(), ACK, b"")
}

/// The reply cache, and the slot of the flow.
fn cache() -> (Array<MapData, CachedReply>, u32) {
    let map = if family() == Family::V4 { MAP_REPLY_CACHE_V4 } else { MAP_REPLY_CACHE_V6 };
    (open(map), half_open::slot(hash(flow(Tcp))))
}

/// The flow's cache entry.
fn cache_entry() -> CachedReply {
    let (cache, slot) = cache();
    cache.get(&slot, 0).unwrap()
}

/// Removes or restores the endpoint without invalidating the reply cache.
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
fn second_reply_uses_the_reply_cache() {
    with_mappings(|lab| {
        let translated = from(&answer(), node()).build();
        let mut is_spared = || {
            establish(lab);
            is_reply_translated(lab, ACK);
            let endpoint = cache_entry().endpoint;
            lab.evict(flow(Tcp));
            set_endpoint_by_hand(None);
            let outcome = lab.egress(&answer());
            set_endpoint_by_hand(Some(endpoint));
            outcome.bytes == translated
        };
        let mut spared = 0;
        let are_enough = || {
            spared += usize::from(is_spared());
            (spared == REQUIRED).then_some(())
        };
        poll::until("enough replies that use the cache entry", LIMIT, are_enough).unwrap();
    });
}

/// A cached reply must expire, so that the program looks up the flow table again. The flow table evicts the entries
/// that were least recently looked up, so a program must regularly look up an entry that is in use.
#[test]
fn reply_cache_entry_expires_and_the_flow_table_is_looked_up_again() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.evict(flow(Tcp));
        let is_looked_up = || {
            is_reply_translated(lab, ACK);
            (lab.slot(flow(Tcp)).map(half_open::phase) == Some(Phase::REPLIED)).then_some(())
        };
        poll::until("a look-up in the flow table instead of the use of the cached reply", LIMIT, is_looked_up).unwrap();
    });
}

#[test]
fn fin_is_recorded_despite_a_reply_cache_entry() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.egress(&tcp(pod(), client(), FIN | ACK, b""));
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags & FIN, FIN);
    });
}

/// Another processor translates replies continuously, and may cache the endpoint just before each removal. After the
/// removal, no reply may be translated by the cached endpoint.
#[test]
fn cached_reply_is_not_used_after_a_concurrent_removal() {
    let changes = if is_emulated() { 300 } else { 10_000 };
    with_mappings(|lab| {
        establish(lab);
        let program = lab.program(PROG_EGRESS).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
        let (frame, is_over) = (answer().build(), AtomicBool::new(false));
        thread::scope(|scope| {
            let _end = SetOnDrop(&is_over);
            let _other = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    test_run::run(program.as_fd(), &frame, &test_run::Options::default()).unwrap();
                }
            });
            let (mut misdirected, mut answered) = (0, 0);
            for _change in 0..changes {
                lab.remove(family(), Tcp, NODE_PORT);
                misdirected += u32::from(lab.egress(&answer()).bytes != frame);
                lab.add(Tcp, NODE_PORT, pod(), GENERATION);
                answered += u32::from(lab.egress(&answer()).bytes != frame);
            }
            assert_eq!(
                (misdirected, answered),
                (0, changes),
                "translated replies without a mapping and with one, in {changes} changes"
            );
        });
    });
}

/// A Pod port has two mappings. After one of the two mappings is removed, replies are counted for the other mapping.
#[test]
fn replies_are_counted_for_a_remaining_mapping_at_once() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.add(Tcp, SECOND_NODE_PORT, pod(), GENERATION);
        lab.remove(family(), Tcp, NODE_PORT);
        lab.egress(&answer()).is(&from(&answer(), node()), reply("61001/tcp", bare()));
    });
}

/// The next new node address gets the index of a removed one. Replies of an earlier flow must still come from the
/// removed address, so a cached reply must not use the address that now has the index. The agent also clears the flow's
/// slot of the half-open cache, but another processor may restore a word that the processor has read before. The test
/// restores the slot in the same way, so that only the epoch invalidates the cached reply.
#[test]
fn cached_reply_does_not_use_a_node_address_with_a_reused_index() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        let word = lab.slot(flow(Tcp)).unwrap();
        lab.set_addresses(&[second_node_ip()]);
        lab.set_addresses(&[second_node_ip(), third_node_ip()]);
        assert_eq!(lab.slot(flow(Tcp)), None, "the agent must clear a slot with a reused index");
        lab.set_slot(flow(Tcp), word);
        is_reply_translated(lab, ACK);
        is_reply_translated(lab, ACK);
    });
}

/// If two processors write a cache entry concurrently, its bytes may be a mixture of both writes. Such an entry must be
/// ignored.
#[test]
fn corrupt_cache_entry_is_ignored_and_replaced() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        let (mut cache, slot) = cache();
        let cached = cache_entry();
        assert_eq!(cached.endpoint.generation, GENERATION);
        for index in 0..size_of::<CachedReply>() {
            let mut changed = cached;
            // SAFETY: an `aya::Pod` has no padding, and any bytes are a value of it.
            #[expect(unsafe_code, reason = "a cache entry is changed byte by byte")]
            let bytes =
                unsafe { std::slice::from_raw_parts_mut((&raw mut changed).cast::<u8>(), size_of_val(&cached)) };
            bytes[index] ^= ALL_BITS;
            cache.set(slot, changed, 0).unwrap();
            is_reply_translated(lab, ACK);
            assert_eq!(cache_entry().endpoint, cached.endpoint, "byte {index}");
            assert_ne!(cache_entry(), changed, "byte {index}");
        }
    });
}

/// One client endpoint uses two NAT addresses. The flow table decides which of the two is the source of the replies. If
/// the flow's slot of the half-open cache names the other NAT address, the reply cache must not store that address.
#[test]
fn slot_that_contradicts_the_flow_table_is_not_cached() {
    with_mappings(|lab| {
        for (address, port) in [(0, SECOND_NODE_PORT), (1, NODE_PORT)] {
            establish(lab);
            is_reply_translated(lab, ACK);
            lab.set_slot(flow(Tcp), half_open::entry(hash(flow(Tcp)), Phase::ESTABLISHED, address, port));
            is_reply_translated(lab, ACK);
            is_reply_translated(lab, ACK);
        }
    });
}

#[test]
fn reply_is_not_cached_in_another_flows_slot() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.set_slot(flow(Tcp), half_open::entry(!hash(flow(Tcp)), Phase::ESTABLISHED, 0, NODE_PORT));
        let cached = cache_entry();
        is_reply_translated(lab, ACK);
        assert_eq!(cache_entry(), cached, "the slot belongs to another flow, so the reply must not be cached");
        lab.evict(flow(Tcp));
        lab.egress(&answer()).is(&answer(), reason(Reason::UntrackedReply));
    });
}

/// In redirect mode, the program must check the device of each packet: a cache entry does not prove that the packet
/// arrived from the Pod's device.
#[test]
fn packet_from_another_device_is_not_redirected_by_the_reply_cache() {
    with_route_to_client(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        set_next_hop(pod_ip(), NEXT_HOP);
        let outcome = lab.run(PROG_PODS_REDIRECT, &answer().build());
        assert_eq!((outcome.action, outcome.bytes, outcome.changes), (NEXT, answer().build(), vec![]));
        set_next_hop(pod_ip(), TESTED_NEXT_HOP);
        let outcome = lab.run(PROG_PODS_REDIRECT, &answer().build());
        let expected = after_one_hop(&from(&answer(), node())).build();
        assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected), "the Pod's own device");
    });
}

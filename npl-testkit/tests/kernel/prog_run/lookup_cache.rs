// SPDX-License-Identifier: Apache-2.0
//! Tests the lookup cache of mappings, which saves a map lookup and must never change the result of the lookup.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aya::maps::{Array, HashMap, MapData};
use npl_agent::core::model::Family;
use npl_common::config::Config;
use npl_common::lookup_cache::{CachedMappingV4, CachedMappingV6, slot};
use npl_common::mapping::{BackendV4, BackendV6, Frontend, protocol};
use npl_common::names::{
    MAP_CONFIG, MAP_LOOKUP_CACHE_V4, MAP_LOOKUP_CACHE_V6, MAP_MAPPING_V4, MAP_MAPPING_V6, PROG_INGRESS,
    PROG_INGRESS_REDIRECT,
};
use npl_common::reason::Reason;
use npl_testkit::test_run;

use super::redirect::{NEXT_HOP, REDIRECT, after_one_hop, set_next_hop};
use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, Udp, client, client_ip, family, node, node_ip, other_pod_ip, pod, pod_ip,
    router_ip, to, udp, with_mappings,
};
use crate::counters::reason;
use crate::lab::{DROP, Lab, NEXT, open};
use crate::world::is_emulated;

const FRONTEND: Frontend = Frontend { node_port: NODE_PORT, protocol: protocol::UDP, pad: 0 };
/// The mask that flips every bit of a byte by XOR.
pub(super) const ALL_BITS: u8 = 0xff;

/// Returns a Pod that is not the mapping's backend.
fn other_pod() -> SocketAddr {
    (other_pod_ip(), POD_PORT).into()
}

/// Asserts that a datagram to a node port arrives at `pod`.
#[track_caller]
fn goes_to(lab: &mut Lab, node_port: u16, pod: SocketAddr) {
    let request = udp(client(), (node_ip(), node_port).into(), b"hello");
    let outcome = lab.ingress(&request);
    assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&request, pod).build()));
}

/// Returns the mapping's cache entry as bytes, after overwriting it with `replaced_by` if given.
fn cache_entry(replaced_by: Option<Vec<u8>>) -> Vec<u8> {
    fn of<H: aya::Pod>(name: &str, replaced_by: Option<Vec<u8>>) -> Vec<u8> {
        let mut map: Array<MapData, H> = open(name);
        if let Some(bytes) = replaced_by {
            // SAFETY: any bytes are a valid `aya::Pod`, and their number is the size of the type.
            #[expect(unsafe_code, reason = "a corrupt cache entry is made from bytes")]
            let cache_entry = unsafe { bytes.as_ptr().cast::<H>().read_unaligned() };
            map.set(slot(FRONTEND), cache_entry, 0).unwrap();
        }
        let cache_entry = map.get(&slot(FRONTEND), 0).unwrap();
        // SAFETY: an `aya::Pod` has no padding.
        #[expect(unsafe_code, reason = "a cache entry is compared byte by byte")]
        unsafe { std::slice::from_raw_parts((&raw const cache_entry).cast::<u8>(), size_of::<H>()) }.to_vec()
    }
    match family() {
        Family::V4 => of::<CachedMappingV4>(MAP_LOOKUP_CACHE_V4, replaced_by),
        Family::V6 => of::<CachedMappingV6>(MAP_LOOKUP_CACHE_V6, replaced_by),
    }
}

/// Changes or removes the mapping without invalidating the lookup cache, as an agent without such a cache would.
fn change_by_hand(to: Option<SocketAddr>) {
    match (family(), to) {
        (Family::V4, to) => {
            let mut map: HashMap<MapData, Frontend, BackendV4> = open(MAP_MAPPING_V4);
            let old = map.get(&FRONTEND, 0).unwrap();
            map.remove(&FRONTEND).unwrap();
            if let Some(SocketAddr::V4(to)) = to {
                map.insert(FRONTEND, BackendV4 { pod_addr: to.ip().octets(), pod_port: to.port(), ..old }, 0).unwrap();
            }
        }
        (Family::V6, to) => {
            let mut map: HashMap<MapData, Frontend, BackendV6> = open(MAP_MAPPING_V6);
            let old = map.get(&FRONTEND, 0).unwrap();
            map.remove(&FRONTEND).unwrap();
            if let Some(SocketAddr::V6(to)) = to {
                map.insert(FRONTEND, BackendV6 { pod_addr: to.ip().octets(), pod_port: to.port(), ..old }, 0).unwrap();
            }
        }
    }
}

#[test]
fn second_request_uses_the_lookup_cache() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        change_by_hand(None);
        goes_to(lab, NODE_PORT, pod());
    });
}

/// The program for stack mode and the program for redirect mode may run at the same time and share the lookup cache: on
/// devices without and with Ethernet headers, or while `--forwarding` changes. Each program must handle requests in its
/// own mode, whichever of the two has stored the cached mapping.
#[test]
fn stack_and_redirect_programs_share_the_lookup_cache() {
    with_mappings(|lab| {
        let request = udp(client(), node(), b"hello");
        let arrived = to(&request, pod());
        goes_to(lab, NODE_PORT, pod());
        set_next_hop(pod_ip(), NEXT_HOP);
        for _turn in 0..2 {
            let direct = lab.run(PROG_INGRESS_REDIRECT, &request.build());
            assert_eq!((direct.action, direct.bytes), (REDIRECT, after_one_hop(&arrived).build()));
            goes_to(lab, NODE_PORT, pod());
        }
    });
}

#[test]
fn changes_of_the_agent_invalidate_the_lookup_cache_at_once() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        lab.add(Udp, NODE_PORT, other_pod(), GENERATION + 1);
        goes_to(lab, NODE_PORT, other_pod());
        lab.add_restricted(Udp, NODE_PORT, pod(), GENERATION, &router_ip().to_string());
        let request = udp(client(), node(), b"hello");
        let refused = lab.ingress(&request);
        assert_eq!((refused.action, refused.changes), (DROP, reason(Reason::SourceRefused)));
        lab.add_restricted(Udp, NODE_PORT, pod(), GENERATION, &client_ip().to_string());
        goes_to(lab, NODE_PORT, pod());
        lab.remove(family(), Udp, NODE_PORT);
        let unmapped = lab.ingress(&request);
        assert_eq!((unmapped.bytes, unmapped.changes), (request.build(), reason(Reason::NoMapping)));
    });
}

/// Another processor looks up the mapping continuously, and may cache the former mapping around each change. No request
/// after the change may be translated by the former mapping.
#[test]
fn cached_mapping_is_not_used_after_a_concurrent_change() {
    let changes = if is_emulated() { 500 } else { 20_000 };
    with_mappings(|lab| {
        let request = udp(client(), node(), b"hello");
        let program = lab.program(PROG_INGRESS).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
        let (frame, is_over) = (request.build(), AtomicBool::new(false));
        thread::scope(|scope| {
            // The guard sets the flag even if the test panics. Otherwise, the scope would never stop waiting for the
            // other thread.
            let _end = SetOnDrop(&is_over);
            let _other = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    test_run::run(program.as_fd(), &frame, &test_run::Options::default()).unwrap();
                }
            });
            let mut misdirected = 0;
            for change in 1..=changes {
                let pod = [pod(), other_pod()][change as usize % 2];
                lab.add(Udp, NODE_PORT, pod, GENERATION + change);
                misdirected += u32::from(lab.ingress(&request).bytes != to(&request, pod).build());
            }
            assert_eq!(
                misdirected, 0,
                "requests that were not translated to the mapping's current Pod, in {changes} changes"
            );
        });
    });
}

/// A guard that sets the flag when it is dropped.
pub(super) struct SetOnDrop<'a>(pub(super) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// If two processors write a cache entry concurrently, its bytes may be a mixture of both writes. Such an entry must be
/// ignored.
#[test]
fn corrupt_cache_entry_is_ignored_and_replaced() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        let cached = cache_entry(None);
        assert!(cached.iter().any(|byte| *byte != 0), "{cached:?}");
        for index in 0..cached.len() {
            let mut bytes = cached.clone();
            bytes[index] ^= ALL_BITS;
            assert_eq!(cache_entry(Some(bytes.clone())), bytes);
            goes_to(lab, NODE_PORT, pod());
            assert_eq!(cache_entry(None), cached, "byte {index}");
        }
    });
}

#[test]
fn frontends_that_share_a_cache_slot_keep_their_own_pods() {
    const FAR: u16 = NODE_PORT - 16_384;
    assert_eq!(slot(Frontend { node_port: FAR, ..FRONTEND }), slot(FRONTEND));
    with_mappings(|lab| {
        lab.datapath.configure("40000-62000".parse().unwrap(), || 1).unwrap();
        lab.add(Udp, FAR, other_pod(), GENERATION);
        for _turn in 0..3 {
            goes_to(lab, NODE_PORT, pod());
            goes_to(lab, FAR, other_pod());
        }
    });
}

/// An earlier agent's entries may be outdated: an agent without a lookup cache may have run since, and may have
/// restarted the epochs. A starting agent must therefore invalidate all entries.
#[test]
fn starting_agent_invalidates_entries_of_earlier_agents() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        let config = lab.datapath.tables.config().unwrap();
        change_by_hand(Some(other_pod()));
        let mut map: Array<MapData, Config> = open(MAP_CONFIG);
        map.set(0, Config { epoch: config.epoch - 1, ..config }, 0).unwrap();
        lab.datapath.configure("61000-61100".parse().unwrap(), || 1).unwrap();
        let begun = lab.datapath.tables.config().unwrap().epoch;
        assert_eq!(begun, config.epoch, "the new epoch must equal that of the cached entry");
        goes_to(lab, NODE_PORT, other_pod());
    });
}

// SPDX-License-Identifier: Apache-2.0
//! Hints of mappings: they spare the look-up, and never say anything but what it would.

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

use super::redirect::{REDIRECT, WAY, lead, one_hop_on};
use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, Udp, client, client_ip, family, node, node_ip, other_pod_ip, pod, pod_ip,
    router_ip, to, udp, with_mappings,
};
use crate::counters::reason;
use crate::lab::{DROP, Lab, NEXT, open};
use crate::world::is_emulated;

const FRONTEND: Frontend = Frontend { node_port: NODE_PORT, protocol: protocol::UDP, pad: 0 };
/// Flips every bit of a byte.
pub(super) const ALL_BITS: u8 = 0xff;

/// A Pod that the mapping does not lead to.
fn other_pod() -> SocketAddr {
    (other_pod_ip(), POD_PORT).into()
}

/// A datagram to a node port arrives at this Pod.
#[track_caller]
fn goes_to(lab: &mut Lab, node_port: u16, pod: SocketAddr) {
    let request = udp(client(), (node_ip(), node_port).into(), b"hello");
    let outcome = lab.ingress(&request);
    assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&request, pod).build()));
}

/// The hint of the mapping, byte by byte, or other bytes in its place.
fn hint(replaced_by: Option<Vec<u8>>) -> Vec<u8> {
    fn of<H: aya::Pod>(name: &str, replaced_by: Option<Vec<u8>>) -> Vec<u8> {
        let mut map: Array<MapData, H> = open(name);
        if let Some(bytes) = replaced_by {
            // SAFETY: any bytes are a value of an `aya::Pod`, and these are as many as it has.
            #[expect(unsafe_code, reason = "bytes are made a hint that nobody has left")]
            let hint = unsafe { bytes.as_ptr().cast::<H>().read_unaligned() };
            map.set(slot(FRONTEND), hint, 0).unwrap();
        }
        let hint = map.get(&slot(FRONTEND), 0).unwrap();
        // SAFETY: an `aya::Pod` has no padding.
        #[expect(unsafe_code, reason = "a hint is looked at byte by byte")]
        unsafe { std::slice::from_raw_parts((&raw const hint).cast::<u8>(), size_of::<H>()) }.to_vec()
    }
    match family() {
        Family::V4 => of::<CachedMappingV4>(MAP_LOOKUP_CACHE_V4, replaced_by),
        Family::V6 => of::<CachedMappingV6>(MAP_LOOKUP_CACHE_V6, replaced_by),
    }
}

/// What an agent that knows nothing of hints does to the mapping: it leads to another Pod, or is gone.
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
fn a_request_leaves_one_that_spares_the_next_the_look_up() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        change_by_hand(None);
        goes_to(lab, NODE_PORT, pod());
    });
}

/// Where devices are without Ethernet headers, and while the way of forwarding changes.
#[test]
fn programs_of_both_ways_leave_them_for_each_other() {
    with_mappings(|lab| {
        let request = udp(client(), node(), b"hello");
        let arrived = to(&request, pod());
        goes_to(lab, NODE_PORT, pod());
        lead(pod_ip(), WAY);
        for _turn in 0..2 {
            let direct = lab.run(PROG_INGRESS_REDIRECT, &request.build());
            assert_eq!((direct.action, direct.bytes), (REDIRECT, one_hop_on(&arrived).build()));
            goes_to(lab, NODE_PORT, pod());
        }
    });
}

#[test]
fn what_the_agent_changes_counts_at_once() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        lab.add(Udp, NODE_PORT, other_pod(), GENERATION + 1);
        goes_to(lab, NODE_PORT, other_pod());
        lab.add_for(Udp, NODE_PORT, pod(), GENERATION, &router_ip().to_string());
        let request = udp(client(), node(), b"hello");
        let refused = lab.ingress(&request);
        assert_eq!((refused.action, refused.changes), (DROP, reason(Reason::SourceRefused)));
        lab.add_for(Udp, NODE_PORT, pod(), GENERATION, &client_ip().to_string());
        goes_to(lab, NODE_PORT, pod());
        lab.remove(family(), Udp, NODE_PORT);
        let unmapped = lab.ingress(&request);
        assert_eq!((unmapped.bytes, unmapped.changes), (request.build(), reason(Reason::NoMapping)));
    });
}

/// Another processor looks the mapping up all the time, and leaves what it has found: before a change, or after it.
#[test]
fn what_was_looked_up_before_a_change_does_not_count_after_it() {
    let changes = if is_emulated() { 500 } else { 20_000 };
    with_mappings(|lab| {
        let request = udp(client(), node(), b"hello");
        let program = lab.program(PROG_INGRESS).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
        let (frame, is_over) = (request.build(), AtomicBool::new(false));
        thread::scope(|scope| {
            // Also when the test fails: the other one would be waited for.
            let _end = AtTheEnd(&is_over);
            let _other = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    test_run::run(program.as_fd(), &frame, &test_run::Options::default()).unwrap();
                }
            });
            let mut strays = 0;
            for change in 1..=changes {
                let pod = [pod(), other_pod()][change as usize % 2];
                lab.add(Udp, NODE_PORT, pod, GENERATION + change);
                strays += u32::from(lab.ingress(&request).bytes != to(&request, pod).build());
            }
            assert_eq!(strays, 0, "requests to where the mapping has led before, of {changes}");
        });
    });
}

/// Says so when it is dropped.
pub(super) struct AtTheEnd<'a>(pub(super) &'a AtomicBool);

impl Drop for AtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Of what two processors have left at the same time, some bytes may be of the one and some of the other.
#[test]
fn what_nobody_has_left_is_none_and_is_replaced() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        let left = hint(None);
        assert!(left.iter().any(|byte| *byte != 0), "{left:?}");
        for index in 0..left.len() {
            let mut bytes = left.clone();
            bytes[index] ^= ALL_BITS;
            assert_eq!(hint(Some(bytes.clone())), bytes);
            goes_to(lab, NODE_PORT, pod());
            assert_eq!(hint(None), left, "byte {index}");
        }
    });
}

#[test]
fn frontends_of_one_place_each_lead_to_their_own_pod() {
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

/// An agent of a version without hints may have been there in between, and have begun its epochs anew.
#[test]
fn a_starting_agent_discards_those_of_earlier_ones() {
    with_mappings(|lab| {
        goes_to(lab, NODE_PORT, pod());
        let config = lab.datapath.tables.config().unwrap();
        change_by_hand(Some(other_pod()));
        let mut map: Array<MapData, Config> = open(MAP_CONFIG);
        map.set(0, Config { epoch: config.epoch - 1, ..config }, 0).unwrap();
        lab.datapath.configure("61000-61100".parse().unwrap(), || 1).unwrap();
        let begun = lab.datapath.tables.config().unwrap().epoch;
        assert_eq!(begun, config.epoch, "nothing else keeps it from counting");
        goes_to(lab, NODE_PORT, other_pod());
    });
}

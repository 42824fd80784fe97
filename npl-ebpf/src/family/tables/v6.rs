// SPDX-License-Identifier: GPL-2.0-only
//! IPv6's.

use core::mem::transmute;

use npl_common::{
    config::Config,
    direct::{PodV6, PodWay},
    flow::{FlowKeyV6, FlowState, FlowV6},
    hint::ReplyHint,
    mapping::{BackendV6, Endpoint, EndpointV6, Frontend, LocalAddressV6, SourceV6},
    offload::Passed,
    peer::{PeerKeyV6, PeerV6},
    syn,
};

use super::{SourceKey, Tables};
use crate::{
    family::{Backend, End, Ends, Peer, V6, v6::Addr},
    hint::{self, Asked},
    maps::{
        ALLOW_V6, ENDPOINT_V6, FLOW_V6, FRAGMENT_V6, HINT_V6, HOST_V6, LOCAL_ADDRESS_V6, LOCAL_V6, MAPPING_V6,
        PASSED_V6, PEER_V6, POD_V6, REPLY_HINT_V6, STRAY_V6, SYN_V6,
    },
};

impl Tables for V6 {
    type Addr = Addr;
    type FlowKey = FlowKeyV6;
    type Flow = FlowV6;

    #[inline(always)]
    fn pod_way(addr: Addr) -> Option<PodWay> {
        // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
        unsafe { POD_V6.get(&PodV6 { addr: bytes(addr) }) }.copied()
    }

    #[inline(always)]
    fn hash(seed: u64, client: Addr, pod: Addr, ports_and_protocol: u64) -> u64 {
        let word = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let seed = syn::absorb_both(seed, word(client[0], client[1]), word(client[2], client[3]));
        let seed = syn::absorb(seed, word(pod[0], pod[1]));
        syn::hash(seed, word(pod[2], pod[3]), ports_and_protocol)
    }

    #[inline(always)]
    fn local_index(_config: &Config, addr: Addr) -> Option<u8> {
        // SAFETY: the agent alone writes this map, and never changes an element in place.
        let local = unsafe { LOCAL_V6.get(&LocalAddressV6 { addr: bytes(addr) }) }?;
        Some(local.index as u8)
    }

    #[inline(always)]
    fn local_address(index: u8) -> Option<Addr> {
        let addr = words(&LOCAL_ADDRESS_V6.get(u32::from(index))?.addr);
        if addr == [0; 4] { None } else { Some(addr) }
    }

    #[inline(always)]
    fn backend(frontend: Frontend) -> Option<Backend<Self>> {
        mapping(frontend).map(backend)
    }

    #[inline(always)]
    fn backend_by_hint<const WAY: u8>(config: &Config, frontend: Frontend) -> Option<(Backend<Self>, Option<PodWay>)> {
        let slot = HINT_V6.get_ptr_mut(hint::slot(frontend))?.cast();
        let asked = Asked::new(config, frontend);
        if let Some(words) = hint::read(slot, config, asked) {
            // SAFETY: the same bytes, as they were left.
            let copy = unsafe { transmute::<[u64; 5], Copied>(words) };
            if hint::is_enough::<WAY>(&copy.way) {
                return Some((backend(&copy.backend), hint::way(copy.way)));
            }
        }
        let found = mapping(asked.frontend)?;
        let way = hint::way_to_leave::<WAY>(|| Self::pod_way(words(&found.pod_addr)));
        let copy = Copied { backend: *found, pad: 0, way };
        // SAFETY: the same bytes, of integers without padding.
        hint::write(slot, config, asked, unsafe { transmute::<Copied, [u64; 5]>(copy) });
        Some((backend(found), hint::way(way)))
    }

    #[inline(always)]
    fn is_allowed(frontend: Frontend, source: Addr) -> bool {
        let key = SourceKey::new(SourceV6 { frontend, addr: bytes(source) });
        ALLOW_V6.get(key.as_key()).is_some()
    }

    #[inline(always)]
    fn endpoint(sender: &End<Self>, protocol: u8, zero: u8) -> Option<&'static Endpoint> {
        let End { addr, port } = *sender;
        let key = EndpointV6 { pod_addr: bytes(addr), pod_port: port, protocol, pad: zero };
        // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
        unsafe { ENDPOINT_V6.get(&key) }
    }

    #[inline(always)]
    fn flow_key(ends: &Ends<Self>, protocol: u8) -> FlowKeyV6 {
        FlowKeyV6 {
            client_addr: bytes(ends.client),
            pod_addr: bytes(ends.pod),
            client_port: ends.client_port,
            pod_port: ends.pod_port,
            protocol: u32::from(protocol),
        }
    }

    #[inline(always)]
    fn flow(key: &FlowKeyV6) -> Option<*mut FlowV6> {
        FLOW_V6.get_ptr_mut(key)
    }

    #[inline(always)]
    fn new_flow(state: FlowState, node: Addr) -> FlowV6 {
        FlowV6 { state, node_addr: bytes(node) }
    }

    #[inline(always)]
    fn state(flow: &mut FlowV6) -> &mut FlowState {
        &mut flow.state
    }

    #[inline(always)]
    fn node_address(flow: &FlowV6) -> Addr {
        words(&flow.node_addr)
    }

    #[inline(always)]
    fn insert_flow(key: &FlowKeyV6, flow: &FlowV6) -> Option<()> {
        FLOW_V6.insert(key, flow, 0).ok()
    }

    #[inline(always)]
    fn remove_flow(key: &FlowKeyV6) -> Option<()> {
        FLOW_V6.remove(key).ok()
    }

    #[inline(always)]
    fn slot(index: u32) -> Option<*mut u64> {
        SYN_V6.get_ptr_mut(index)
    }

    #[inline(always)]
    fn reply_hint(index: u32) -> Option<*mut u64> {
        REPLY_HINT_V6.get_ptr_mut(index).map(<*mut ReplyHint>::cast)
    }

    #[inline(always)]
    fn fragment_slot(index: u32) -> Option<*mut u64> {
        FRAGMENT_V6.get_ptr_mut(index)
    }

    #[inline(always)]
    fn host_slot(index: u32) -> Option<*mut u64> {
        HOST_V6.get_ptr_mut(index)
    }

    #[inline(always)]
    fn stray(port: u16) -> Option<*mut u64> {
        STRAY_V6.get_ptr_mut(u32::from(port))
    }

    #[inline(always)]
    fn offload_slot(index: u32) -> Option<*mut Passed> {
        PASSED_V6.get_ptr_mut(index)
    }

    #[inline(always)]
    fn asked(peer: &Peer<Self>) -> Option<End<Self>> {
        // SAFETY: an element of a preallocated map; one that changes meanwhile names two things that were asked for.
        let asked = unsafe { PEER_V6.get(&peer_key(peer)) }?;
        Some(End { addr: words(&asked.node_addr), port: asked.node_port })
    }

    #[inline(always)]
    fn remember_asked(peer: &Peer<Self>, asked: &End<Self>) {
        let value = PeerV6 { node_addr: bytes(asked.addr), node_port: asked.port, pad: 0 };
        // Refused, the client is shown the Pod's address; the conversation itself needs nothing of it.
        let _refused = PEER_V6.insert(&peer_key(peer), &value, 0);
    }

    #[inline(always)]
    fn forget_asked(peer: &Peer<Self>) {
        // What is not there is as good as forgotten.
        let _missing = PEER_V6.remove(&peer_key(peer));
    }
}

#[inline(always)]
fn peer_key(peer: &Peer<V6>) -> PeerKeyV6 {
    PeerKeyV6 { socket: peer.socket, pod_addr: bytes(peer.pod.addr), pod_port: peer.pod.port, pad: 0, pad_to_word: 0 }
}

/// An address as maps hold it.
#[inline(always)]
fn bytes(addr: Addr) -> [u8; 16] {
    // SAFETY: the same sixteen bytes in the same order.
    unsafe { transmute(addr) }
}

/// An address as packets hold it.
#[inline(always)]
#[expect(clippy::cast_ptr_alignment, reason = "map types are aligned to four bytes, and so are addresses in them")]
fn words(addr: &[u8; 16]) -> Addr {
    // SAFETY: every value of these types has such a field at a multiple of four bytes.
    unsafe { *core::ptr::from_ref(addr).cast::<Addr>() }
}

/// What a hint has a copy of.
#[repr(C)]
struct Copied {
    backend: BackendV6,
    pad: u32,
    way: PodWay,
}

/// A mapping.
#[inline(always)]
fn mapping(frontend: Frontend) -> Option<&'static BackendV6> {
    // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
    unsafe { MAPPING_V6.get(&frontend) }
}

#[inline(always)]
fn backend(backend: &BackendV6) -> Backend<V6> {
    Backend {
        addr: words(&backend.pod_addr),
        port: backend.pod_port,
        generation: backend.generation,
        stats_index: backend.stats_index,
        flags: backend.flags,
    }
}

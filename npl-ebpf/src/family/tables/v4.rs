// SPDX-License-Identifier: GPL-2.0-only
//! IPv4's.

use core::mem::{offset_of, transmute};

use npl_common::{
    config::Config,
    direct::{PodV4, PodWay},
    flow::{FlowKeyV4, FlowState, FlowV4},
    hint::ReplyHint,
    mapping::{BackendV4, Endpoint, EndpointV4, Frontend, LocalAddressV4, SourceV4},
    offload::Passed,
    peer::{PeerKeyV4, PeerV4},
    syn,
};

use super::{SourceKey, Tables};
use crate::{
    family::{Backend, End, Ends, Peer, V4},
    hint::{self, Asked},
    maps::{
        ALLOW_V4, ENDPOINT_V4, FLOW_V4, FRAGMENT_V4, HINT_V4, HOST_V4, LOCAL_ADDRESS_V4, LOCAL_V4, MAPPING_V4,
        PASSED_V4, PEER_V4, POD_V4, REPLY_HINT_V4, STRAY_V4, SYN_V4,
    },
};

/// Which 64-bit word of the configuration holds the primary address and its index.
const PRIMARY_WORD: usize = offset_of!(Config, primary_v4) / size_of::<u64>();

impl Tables for V4 {
    type Addr = u32;
    type FlowKey = FlowKeyV4;
    type Flow = FlowV4;

    #[inline(always)]
    fn pod_way(addr: u32) -> Option<PodWay> {
        // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
        unsafe { POD_V4.get(&PodV4 { addr: addr.to_ne_bytes() }) }.copied()
    }

    #[inline(always)]
    fn hash(seed: u64, client: u32, pod: u32, ports_and_protocol: u64) -> u64 {
        syn::hash(seed, u64::from(client) << 32 | u64::from(pod), ports_and_protocol)
    }

    #[inline(always)]
    fn is_primary(config: &Config, addr: u32) -> bool {
        u32::from_ne_bytes(config.primary_v4) == addr
    }

    #[inline(always)]
    fn local_index(config: &Config, addr: u32) -> Option<u8> {
        // SAFETY: in the map's element, aligned; address and index are read as the one little-endian word that they are
        // written as.
        let primary = unsafe { core::ptr::from_ref(config).cast::<u64>().add(PRIMARY_WORD).read_volatile() };
        if primary as u32 == addr && addr != 0 {
            return Some((primary >> u32::BITS) as u8);
        }
        // SAFETY: the agent alone writes this map, and never changes an element in place.
        let local = unsafe { LOCAL_V4.get(&LocalAddressV4 { addr: addr.to_ne_bytes() }) }?;
        Some(local.index as u8)
    }

    #[inline(always)]
    fn local_address(index: u8) -> Option<u32> {
        let addr = u32::from_ne_bytes(LOCAL_ADDRESS_V4.get(u32::from(index))?.addr);
        if addr == 0 { None } else { Some(addr) }
    }

    #[inline(always)]
    fn backend(frontend: Frontend) -> Option<Backend<Self>> {
        mapping(frontend).map(backend)
    }

    #[inline(always)]
    fn backend_by_hint<const WAY: u8>(config: &Config, frontend: Frontend) -> Option<(Backend<Self>, Option<PodWay>)> {
        let slot = HINT_V4.get_ptr_mut(hint::slot(frontend))?.cast();
        let asked = Asked::new(config, frontend);
        if let Some(words) = hint::read(slot, config, asked) {
            // SAFETY: the same bytes, as they were left.
            let copy = unsafe { transmute::<[u64; 3], Copied>(words) };
            if hint::is_enough::<WAY>(&copy.way) {
                return Some((backend(&copy.backend), hint::way(copy.way)));
            }
        }
        let found = mapping(asked.frontend)?;
        let way = hint::way_to_leave::<WAY>(|| Self::pod_way(u32::from_ne_bytes(found.pod_addr)));
        let copy = Copied { backend: *found, way };
        // SAFETY: the same bytes, of integers without padding.
        hint::write(slot, config, asked, unsafe { transmute::<Copied, [u64; 3]>(copy) });
        Some((backend(found), hint::way(way)))
    }

    #[inline(always)]
    fn is_allowed(frontend: Frontend, source: u32) -> bool {
        let key = SourceKey::new(SourceV4 { frontend, addr: source.to_ne_bytes() });
        ALLOW_V4.get(key.as_key()).is_some()
    }

    #[inline(always)]
    fn endpoint(sender: &End<Self>, protocol: u8, zero: u8) -> Option<&'static Endpoint> {
        let End { addr, port } = *sender;
        let key = EndpointV4 { pod_addr: addr.to_ne_bytes(), pod_port: port, protocol, pad: zero };
        // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
        unsafe { ENDPOINT_V4.get(&key) }
    }

    #[inline(always)]
    fn flow_key(ends: &Ends<Self>, protocol: u8) -> FlowKeyV4 {
        FlowKeyV4 {
            client_addr: ends.client.to_ne_bytes(),
            pod_addr: ends.pod.to_ne_bytes(),
            client_port: ends.client_port,
            pod_port: ends.pod_port,
            protocol: u32::from(protocol),
        }
    }

    #[inline(always)]
    fn flow(key: &FlowKeyV4) -> Option<*mut FlowV4> {
        FLOW_V4.get_ptr_mut(key)
    }

    #[inline(always)]
    fn new_flow(state: FlowState, node: u32) -> FlowV4 {
        FlowV4 { state, node_addr: node.to_ne_bytes(), pad: 0 }
    }

    #[inline(always)]
    fn state(flow: &mut FlowV4) -> &mut FlowState {
        &mut flow.state
    }

    #[inline(always)]
    fn node_address(flow: &FlowV4) -> u32 {
        u32::from_ne_bytes(flow.node_addr)
    }

    #[inline(always)]
    fn insert_flow(key: &FlowKeyV4, flow: &FlowV4) -> Option<()> {
        FLOW_V4.insert(key, flow, 0).ok()
    }

    #[inline(always)]
    fn remove_flow(key: &FlowKeyV4) -> Option<()> {
        FLOW_V4.remove(key).ok()
    }

    #[inline(always)]
    fn slot(index: u32) -> Option<*mut u64> {
        SYN_V4.get_ptr_mut(index)
    }

    #[inline(always)]
    fn reply_hint(index: u32) -> Option<*mut u64> {
        REPLY_HINT_V4.get_ptr_mut(index).map(<*mut ReplyHint>::cast)
    }

    #[inline(always)]
    fn fragment_slot(index: u32) -> Option<*mut u64> {
        FRAGMENT_V4.get_ptr_mut(index)
    }

    #[inline(always)]
    fn host_slot(index: u32) -> Option<*mut u64> {
        HOST_V4.get_ptr_mut(index)
    }

    #[inline(always)]
    fn stray(port: u16) -> Option<*mut u64> {
        STRAY_V4.get_ptr_mut(u32::from(port))
    }

    #[inline(always)]
    fn offload_slot(index: u32) -> Option<*mut Passed> {
        PASSED_V4.get_ptr_mut(index)
    }

    #[inline(always)]
    fn asked(peer: &Peer<Self>) -> Option<End<Self>> {
        // SAFETY: an element of a preallocated map; one that changes meanwhile names two things that were asked for.
        let asked = unsafe { PEER_V4.get(&peer_key(peer)) }?;
        Some(End { addr: u32::from_ne_bytes(asked.node_addr), port: asked.node_port })
    }

    #[inline(always)]
    fn remember_asked(peer: &Peer<Self>, asked: &End<Self>) {
        let value = PeerV4 { node_addr: asked.addr.to_ne_bytes(), node_port: asked.port, pad: 0 };
        // Refused, the client is shown the Pod's address; the conversation itself needs nothing of it.
        let _refused = PEER_V4.insert(&peer_key(peer), &value, 0);
    }

    #[inline(always)]
    fn forget_asked(peer: &Peer<Self>) {
        // What is not there is as good as forgotten.
        let _missing = PEER_V4.remove(&peer_key(peer));
    }
}

#[inline(always)]
fn peer_key(peer: &Peer<V4>) -> PeerKeyV4 {
    PeerKeyV4 { socket: peer.socket, pod_addr: peer.pod.addr.to_ne_bytes(), pod_port: peer.pod.port, pad: 0 }
}

/// What a hint has a copy of.
#[repr(C)]
struct Copied {
    backend: BackendV4,
    way: PodWay,
}

/// A mapping.
#[inline(always)]
fn mapping(frontend: Frontend) -> Option<&'static BackendV4> {
    // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
    unsafe { MAPPING_V4.get(&frontend) }
}

#[inline(always)]
fn backend(backend: &BackendV4) -> Backend<V4> {
    Backend {
        addr: u32::from_ne_bytes(backend.pod_addr),
        port: backend.pod_port,
        generation: backend.generation,
        stats_index: backend.stats_index,
        flags: backend.flags,
    }
}

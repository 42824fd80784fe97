// SPDX-License-Identifier: GPL-2.0-only
//! IPv4.

use core::mem::{offset_of, transmute};

use aya_ebpf::{
    bindings::{bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    programs::TcContext,
};
use npl_common::{
    config::Config,
    csum,
    direct::{PodV4, PodWay},
    flow::{FlowKeyV4, FlowState, FlowV4},
    hint::ReplyHint,
    mapping::{BackendV4, Endpoint, EndpointV4, Frontend, LocalAddressV4, SourceV4},
    offload::Passed,
    peer::{PeerKeyV4, PeerV4},
    syn,
};

use super::{Backend, End, Ends, Family, Fragment, Location, Peer, SourceKey, Walk};
use crate::{
    hint::{self, Asked},
    maps::{
        ALLOW_V4, ENDPOINT_V4, FLOW_V4, FRAGMENT_V4, HINT_V4, HOST_V4, LOCAL_ADDRESS_V4, LOCAL_V4, MAPPING_V4,
        PASSED_V4, PEER_V4, POD_V4, REPLY_HINT_V4, STRAY_V4, SYN_V4,
    },
    packet::{self, Access, ETHERNET, Other},
    redirect::{self, Routing},
};

/// IPv4.
pub struct V4;

/// The part of an IPv4 header that every packet has (RFC 791).
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version_and_length: u8,
    tos: u8,
    total_length: u16,
    id: u16,
    fragment: u16,
    tail: Tail,
}

/// The header from its time to live on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail {
    rest: Rest,
    source: u32,
    destination: u32,
}

/// Time to live, protocol and checksum.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rest {
    ttl: u8,
    protocol: u8,
    check: u16,
}

/// More-fragments flag and fragment offset, as loaded.
const FRAGMENT_MASK: u16 = 0x3fff_u16.to_be();
/// The fragment offset alone, as loaded.
const FRAGMENT_OFFSET_MASK: u16 = 0x1fff_u16.to_be();
/// Version 4, and no options.
const PLAIN: u8 = 0x45;
/// Types of ICMP messages that quote a packet (RFC 792).
mod icmp {
    pub const UNREACHABLE: u8 = 3;
    /// Nobody should send it any more (RFC 6633); whoever gets it knows.
    pub const SOURCE_QUENCH: u8 = 4;
    pub const TIME_EXCEEDED: u8 = 11;
    pub const PARAMETER_PROBLEM: u8 = 12;
}
/// The kernel's number of the family.
const AF_INET: u8 = 2;
/// First byte of every loopback address.
const LOOPBACK_NETWORK: u8 = 127;
/// The smallest header.
const MIN: usize = size_of::<Header>();
/// Which 64-bit word of the configuration holds the primary address and its index.
const PRIMARY_WORD: usize = offset_of!(Config, primary_v4) / size_of::<u64>();

impl Family for V4 {
    const ETHER_TYPE: u32 = 0x0800_u16.to_be() as u32;
    /// The header's own checksum and the address cancel out in `skb->csum`.
    const STORE_FLAGS: u64 = 0;
    const TAIL: usize = offset_of!(Header, tail);
    const LENGTH: usize = MIN;
    const ICMP: u8 = 1;
    const ICMP_COVERS_ADDRESSES: bool = false;

    type Addr = u32;
    type Tail = Tail;
    type Rest = Rest;
    type FlowKey = FlowKeyV4;
    type Flow = FlowV4;

    #[inline(always)]
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Location<Self>, Other> {
        let ip = ctx.read::<Header, L2>().ok_or(Other::Foreign)?;
        let Tail { rest, source, destination } = ip.tail;
        let protocol = rest.protocol;
        if !packet::is_common(protocol) {
            let is_unusual = protocol == Self::ICMP || packet::has_ports(protocol);
            return Err(if is_unusual { Other::Unusual } else { Other::Foreign });
        }
        if ip.version_and_length != PLAIN || ip.fragment & FRAGMENT_MASK != 0 {
            return Err(Other::Unusual);
        }
        Ok(Location { source, destination, rest, protocol, l4: L2 + MIN, is_plain: true })
    }

    #[inline(always)]
    fn walk(ctx: &TcContext, l3: usize) -> Option<Walk<Self>> {
        let ip = packet::load::<Header>(ctx, l3)?;
        let Tail { rest, source, destination } = ip.tail;
        let length = usize::from(ip.version_and_length & 0x0f) * 4;
        if ip.version_and_length >> 4 != 4 || length < MIN {
            return None;
        }
        let protocol = rest.protocol;
        let is_later = ip.fragment & FRAGMENT_OFFSET_MASK != 0;
        let is_first = !is_later && ip.fragment & FRAGMENT_MASK != 0;
        Some(Walk {
            l3,
            location: Location { source, destination, rest, protocol, l4: l3 + length, is_plain: false },
            fragment: Fragment { id: u32::from(ip.id), protocol, is_later, is_first },
            end: l3 + usize::from(u16::from_be(ip.total_length)),
        })
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        matches!(kind, icmp::UNREACHABLE | icmp::SOURCE_QUENCH | icmp::TIME_EXCEEDED | icmp::PARAMETER_PROBLEM)
    }

    #[inline(always)]
    fn read_behind<T: Copy, const L2: usize>(ctx: &impl Access) -> Option<T> {
        match L2 {
            0 => ctx.read::<T, MIN>(),
            _ => ctx.read::<T, { ETHERNET + MIN }>(),
        }
    }

    #[inline(always)]
    fn write_tail<T: Copy, const L2: usize>(ctx: &impl Access, value: T) -> bool {
        match L2 {
            0 => ctx.write::<T, { Self::TAIL }>(value),
            _ => ctx.write::<T, { ETHERNET + Self::TAIL }>(value),
        }
    }

    #[inline(always)]
    fn difference(old: u32, new: u32) -> u32 {
        csum::difference32(old, new)
    }

    #[inline(always)]
    fn tail(rest: Rest, source: u32, destination: u32, difference: u32) -> Tail {
        let check = !csum::fold(u32::from(!rest.check) + difference);
        Tail { rest: Rest { check, ..rest }, source, destination }
    }

    #[inline(always)]
    fn one_hop_less(rest: Rest) -> Option<Rest> {
        if rest.ttl <= 1 {
            return None;
        }
        let ttl = rest.ttl - 1;
        let word = |ttl| u16::from_ne_bytes([ttl, rest.protocol]);
        Some(Rest { ttl, check: csum::replace16(rest.check, word(rest.ttl), word(ttl)), ..rest })
    }

    #[inline(always)]
    fn routing<const L2: usize>(ctx: &TcContext, source: u32, destination: u32) -> Option<Routing> {
        let ip = ctx.read::<Header, L2>()?;
        let mut routing = redirect::NOWHERE;
        routing.family = AF_INET;
        routing.__bindgen_anon_1.tot_len = u16::from_be(ip.total_length);
        routing.__bindgen_anon_2.tos = ip.tos;
        routing.__bindgen_anon_3.ipv4_src = source;
        routing.__bindgen_anon_4.ipv4_dst = destination;
        Some(routing)
    }

    #[inline(always)]
    fn length<const L2: usize>(ctx: &TcContext, _rest: Rest) -> Option<u16> {
        ctx.read::<Header, L2>().map(|ip| u16::from_be(ip.total_length))
    }

    #[inline(always)]
    fn next_hop(answer: &Routing) -> Option<u32> {
        if answer.family != AF_INET {
            return None;
        }
        // SAFETY: all of this union is integers, and the kernel has filled in the next hop's address.
        Some(unsafe { answer.__bindgen_anon_4.ipv4_dst })
    }

    #[inline(always)]
    fn neighbour(addr: u32) -> bpf_redir_neigh {
        let ipv6_nh = [addr, 0, 0, 0];
        bpf_redir_neigh { nh_family: u32::from(AF_INET), __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh } }
    }

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
    fn is_loopback(addr: u32) -> bool {
        addr.to_ne_bytes()[0] == LOOPBACK_NETWORK
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

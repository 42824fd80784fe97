// SPDX-License-Identifier: GPL-2.0-only
//! Implements the traits of [`super`] for IPv4 and IPv6.

use core::{
    mem::{offset_of, transmute},
    ptr::from_ref,
    sync::atomic::{Ordering, compiler_fence},
};

use aya_ebpf::{btf_maps::lpm_trie::Key, helpers::bpf_map_lookup_elem};
use npl_common::{
    config::Config,
    flow::FlowState,
    lookup_cache::CachedReply,
    mapping::{Endpoint, Frontend, protocol},
    next_hop::PodNextHop,
    offload::StackSeen,
};

use super::{Family, FlowTable, LookupCaches, Mappings, NodeAddresses, SlotArrays, SocketReverseNat};
use crate::{
    base::cell::Cell,
    net::{V4, V6, family::SocketAddr},
    state::tuple::{Backend, FlowTuple, SocketFlow},
};

/// Protocol numbers in keys of the flow tables.
const TCP: u32 = protocol::TCP as u32;
const UDP: u32 = protocol::UDP as u32;

/// The allow-list key of one source address. This type is used in place of [`Key`], because [`Key`] is packed, so the
/// compiler would write a [`Key`] byte by byte.
#[repr(C)]
struct SourceKey<K> {
    prefix_length: u32,
    source: K,
}

impl<K> SourceKey<K> {
    #[inline(always)]
    const fn new(source: K) -> Self {
        const { assert!(size_of::<Self>() == size_of::<Key<K>>(), "both types must have the same size") };
        Self { prefix_length: size_of::<K>() as u32 * u8::BITS, source }
    }

    #[inline(always)]
    const fn as_key(&self) -> &Key<K> {
        // SAFETY: [`Key`] has the same fields at the same offsets, and needs a smaller alignment.
        unsafe { &*from_ref(self).cast::<Key<K>>() }
    }
}

mod v4 {
    use super::{SocketFlow, V4};
    pub(super) use npl_common::{
        flow::{FlowKeyV4 as FlowKey, FlowV4 as FlowEntry},
        lookup_cache::CachedMappingV4 as CachedMapping,
        mapping::{
            BackendV4 as BackendValue, EndpointV4 as EndpointKey, NodeAddressV4 as NodeAddress, SourceV4 as Source,
        },
        next_hop::PodAddressV4 as PodAddress,
        socket_rnat::{SocketRnatKeyV4 as SocketRnatKey, SocketRnatV4 as SocketRnat},
    };

    pub(super) use crate::base::maps::{
        ALLOW_V4 as ALLOW, ENDPOINT_V4 as ENDPOINT, FLOW_V4 as FLOW, FRAGMENT_V4 as FRAGMENT,
        HALF_OPEN_V4 as HALF_OPEN, HOST_CONNECTION_V4 as HOST_CONNECTION, LOOKUP_CACHE_V4 as LOOKUP_CACHE,
        MAPPING_V4 as MAPPING, NEXT_HOP_V4 as NEXT_HOP, NODE_ADDRESS_BY_INDEX_V4 as NODE_ADDRESS_INDEX,
        NODE_ADDRESS_V4 as NODE_ADDRESS, REPLY_CACHE_V4 as REPLY_CACHE, SCTP_FLOW_V4 as SCTP_FLOW,
        SOCKET_RNAT_V4 as SOCKET_RNAT, STACK_SEEN_V4 as STACK_SEEN, UDP_FLOW_V4 as UDP_FLOW, UNMAPPED_V4 as UNMAPPED,
    };

    pub(super) type Addr = u32;
    pub(super) const UNSPECIFIED: Addr = 0;

    #[inline(always)]
    pub(super) const fn bytes(addr: Addr) -> [u8; 4] {
        addr.to_ne_bytes()
    }

    #[inline(always)]
    pub(super) const fn addr(bytes: &[u8; 4]) -> Addr {
        u32::from_ne_bytes(*bytes)
    }

    #[inline(always)]
    pub(super) fn socket_rnat_key(flow: &SocketFlow<V4>) -> SocketRnatKey {
        SocketRnatKey { socket: flow.socket, pod_addr: bytes(flow.pod.addr), pod_port: flow.pod.port, pad: 0 }
    }
}

mod v6 {
    use super::{SocketFlow, V6};
    pub(super) use npl_common::{
        flow::{FlowKeyV6 as FlowKey, FlowV6 as FlowEntry},
        lookup_cache::CachedMappingV6 as CachedMapping,
        mapping::{
            BackendV6 as BackendValue, EndpointV6 as EndpointKey, NodeAddressV6 as NodeAddress, SourceV6 as Source,
        },
        next_hop::PodAddressV6 as PodAddress,
        socket_rnat::{SocketRnatKeyV6 as SocketRnatKey, SocketRnatV6 as SocketRnat},
    };

    pub(super) use crate::base::maps::{
        ALLOW_V6 as ALLOW, ENDPOINT_V6 as ENDPOINT, FLOW_V6 as FLOW, FRAGMENT_V6 as FRAGMENT,
        HALF_OPEN_V6 as HALF_OPEN, HOST_CONNECTION_V6 as HOST_CONNECTION, LOOKUP_CACHE_V6 as LOOKUP_CACHE,
        MAPPING_V6 as MAPPING, NEXT_HOP_V6 as NEXT_HOP, NODE_ADDRESS_BY_INDEX_V6 as NODE_ADDRESS_INDEX,
        NODE_ADDRESS_V6 as NODE_ADDRESS, REPLY_CACHE_V6 as REPLY_CACHE, SCTP_FLOW_V6 as SCTP_FLOW,
        SOCKET_RNAT_V6 as SOCKET_RNAT, STACK_SEEN_V6 as STACK_SEEN, UDP_FLOW_V6 as UDP_FLOW, UNMAPPED_V6 as UNMAPPED,
    };

    pub(super) type Addr = [u32; 4];
    pub(super) const UNSPECIFIED: Addr = [0; 4];

    #[inline(always)]
    pub(super) fn bytes(addr: Addr) -> [u8; 16] {
        // SAFETY: both types consist of sixteen bytes in the same order.
        unsafe { core::mem::transmute(addr) }
    }

    #[inline(always)]
    #[expect(clippy::cast_ptr_alignment, reason = "map types are aligned to four bytes, and so are addresses in them")]
    pub(super) fn addr(bytes: &[u8; 16]) -> Addr {
        // SAFETY: callers pass a field of a struct that `map_type!` declares. Each such struct with an address has an
        // alignment of at least four bytes, and the offset of the address is a multiple of four. Only `nat_address`
        // passes a copy of the field alone, for which Rust guarantees no alignment: if the copy is on the stack, the
        // kernel rejects a program that reads the copy at a misaligned offset.
        unsafe { *core::ptr::from_ref(bytes).cast::<Addr>() }
    }

    #[inline(always)]
    pub(super) fn socket_rnat_key(flow: &SocketFlow<V6>) -> SocketRnatKey {
        let pod_addr = bytes(flow.pod.addr);
        SocketRnatKey { socket: flow.socket, pod_addr, pod_port: flow.pod.port, pad: 0, pad_to_word: 0 }
    }
}

/// Reads a next hop from a map as one word.
///
/// If the code read an `Option` or single fields, the compiler would test the pointer several times. If the loader
/// lacks `CAP_PERFMON`, the verifier of Linux 6.12 rejects a program that tests the same pointer twice.
#[inline(always)]
fn read_next_hop(element: Option<*const PodNextHop>) -> PodNextHop {
    static UNREACHABLE: u64 = 0;
    let word = element.map_or(&raw const UNREACHABLE, <*const PodNextHop>::cast);
    // SAFETY: the kernel aligns each element to 8 bytes. Only the agent writes the map of next hops, and each write
    // replaces the whole element. The kernel may reuse the replaced element at once, but this code reads one aligned
    // 64-bit word and keeps no reference.
    unsafe { transmute::<u64, PodNextHop>(word.read_volatile()) }
}

/// Looks up an entry of a map. Returns a null pointer if there is no entry.
///
/// Unlike `get_ptr_mut`, the function does not test the pointer. If the loader lacks `CAP_PERFMON`, the verifier of
/// Linux 6.12 rejects a program that tests the same pointer twice.
#[inline(always)]
fn look_up<M, K, V>(map: *const M, key: &K) -> *mut V {
    // SAFETY: the callers pass a map and a key of the map's type.
    unsafe { bpf_map_lookup_elem(map.cast_mut().cast(), from_ref(key).cast()) }.cast()
}

macro_rules! family_maps {
    ($family:ty, $of:ident, $words:literal, { $($more:item)* }) => {
        impl Family for $family {}

        impl NodeAddresses for $family {
            $($more)*

            #[inline(always)]
            fn lookup_node_address(addr: Self::Addr) -> Option<u8> {
                // SAFETY: only the agent writes this map, and each write replaces the whole element. The kernel may
                // reuse the replaced element at once, but this code reads one aligned 32-bit word and keeps no
                // reference.
                let local = unsafe { $of::NODE_ADDRESS.get(&$of::NodeAddress { addr: $of::bytes(addr) }) }?;
                Some(local.index as u8)
            }

            #[inline(always)]
            fn node_address(index: u8) -> Option<Self::Addr> {
                let addr = $of::addr(&$of::NODE_ADDRESS_INDEX.get(u32::from(index))?.addr);
                if addr == $of::UNSPECIFIED { None } else { Some(addr) }
            }
        }

        impl Mappings for $family {
            type BackendValue = $of::BackendValue;

            #[inline(always)]
            fn mapping(frontend: Frontend) -> Option<&'static $of::BackendValue> {
                // SAFETY: only the agent writes this map; the kernel replaces an element atomically.
                unsafe { $of::MAPPING.get(&frontend) }
            }

            #[inline(always)]
            fn backend(value: &$of::BackendValue) -> Backend<Self> {
                Backend {
                    addr: $of::addr(&value.pod_addr),
                    port: value.pod_port,
                    generation: value.generation,
                    stats_index: value.stats_index,
                    flags: value.flags,
                }
            }

            #[inline(always)]
            fn is_allowed(frontend: Frontend, source: Self::Addr) -> bool {
                let key = SourceKey::new($of::Source { frontend, addr: $of::bytes(source) });
                $of::ALLOW.get(key.as_key()).is_some()
            }

            #[inline(always)]
            fn endpoint(sender: &SocketAddr<Self>, protocol: u8, zero: u8) -> Option<&'static Endpoint> {
                let SocketAddr { addr, port } = *sender;
                let key = $of::EndpointKey { pod_addr: $of::bytes(addr), pod_port: port, protocol, pad: zero };
                // SAFETY: only the agent writes this map; the kernel replaces an element atomically.
                unsafe { $of::ENDPOINT.get(&key) }
            }

            #[inline(always)]
            fn next_hop(addr: Self::Addr) -> PodNextHop {
                let element = $of::NEXT_HOP.get_ptr(&$of::PodAddress { addr: $of::bytes(addr) });
                read_next_hop(element)
            }
        }

        impl LookupCaches for $family {
            type CacheWords = [u64; $words];
            const NO_CACHE_WORDS: Self::CacheWords = [0; $words];

            #[inline(always)]
            fn cached_mapping(slot: u32) -> Option<Cell<u64>> {
                $of::LOOKUP_CACHE.get_ptr_mut(slot).map(|slot| Cell::new(slot.cast()))
            }

            #[inline(always)]
            fn cache_words(value: &$of::BackendValue, next_hop: PodNextHop) -> Self::CacheWords {
                let copy = $of::CachedMapping { backend: *value, next_hop, ..$of::CachedMapping::NONE };
                // SAFETY: the two types have the same size, and consist of integers without padding.
                let [words @ .., _checksum] = unsafe { transmute::<$of::CachedMapping, [u64; $words + 1]>(copy) };
                words
            }

            #[inline(always)]
            fn from_cache_words(words: Self::CacheWords) -> (Backend<Self>, PodNextHop) {
                let mut with_checksum = [0; $words + 1];
                with_checksum[..$words].copy_from_slice(&words);
                // SAFETY: the two types have the same size, and consist of integers without padding.
                let copy = unsafe { transmute::<[u64; $words + 1], $of::CachedMapping>(with_checksum) };
                (Self::backend(&copy.backend), copy.next_hop)
            }

            #[inline(always)]
            fn cached_reply(slot: u32) -> Option<Cell<u64>> {
                $of::REPLY_CACHE.get_ptr_mut(slot).map(|slot: *mut CachedReply| Cell::new(slot.cast()))
            }
        }

        impl FlowTable for $family {
            type FlowKey = $of::FlowKey;
            type FlowEntry = $of::FlowEntry;

            #[inline(always)]
            fn flow_key(tuple: &FlowTuple<Self>, protocol: u8) -> $of::FlowKey {
                $of::FlowKey {
                    client_addr: $of::bytes(tuple.client),
                    pod_addr: $of::bytes(tuple.pod),
                    client_port: tuple.client_port,
                    pod_port: tuple.pod_port,
                    protocol: u32::from(protocol),
                }
            }

            #[inline(always)]
            fn flow_entry(key: &$of::FlowKey) -> Option<*mut $of::FlowEntry> {
                // The callers have no free stack space, so the look-up is not inlined.
                #[inline(never)]
                fn find(key: &$of::FlowKey) -> *mut $of::FlowEntry {
                    if key.protocol == TCP {
                        return look_up(&raw const $of::FLOW, key);
                    }
                    let entry = match key.protocol {
                        UDP => look_up(&raw const $of::UDP_FLOW, key),
                        _ => look_up(&raw const $of::SCTP_FLOW, key),
                    };
                    // The fence keeps the compiler from merging the two calls of the helper. The kernel replaces a call by
                    // the map's own function, which is faster, only if the call always has the same map.
                    compiler_fence(Ordering::SeqCst);
                    entry
                }
                let entry = find(key);
                if entry.is_null() { None } else { Some(entry) }
            }

            #[inline(always)]
            fn new_flow_entry(state: FlowState, node: Self::Addr) -> $of::FlowEntry {
                $of::FlowEntry::new(state, $of::bytes(node))
            }

            #[inline(always)]
            fn nat_address(entry: *mut $of::FlowEntry) -> Self::Addr {
                // SAFETY: `entry` comes from `flow_entry`, so its memory is a valid entry; programs write the address
                // only together with the whole entry.
                $of::addr(&unsafe { (&raw const (*entry).node_addr).read() })
            }

            #[inline(never)]
            fn insert_flow(key: &$of::FlowKey, entry: &$of::FlowEntry) -> Option<()> {
                match key.protocol {
                    TCP => $of::FLOW.insert(key, entry, 0),
                    UDP => $of::UDP_FLOW.insert(key, entry, 0),
                    _ => $of::SCTP_FLOW.insert(key, entry, 0),
                }
                .ok()
            }

            #[inline(never)]
            fn remove_flow(key: &$of::FlowKey) -> Option<()> {
                match key.protocol {
                    TCP => $of::FLOW.remove(key),
                    UDP => $of::UDP_FLOW.remove(key),
                    _ => $of::SCTP_FLOW.remove(key),
                }
                .ok()
            }
        }

        impl SlotArrays for $family {
            #[inline(always)]
            fn half_open(slot: u32) -> Option<Cell<u64>> {
                $of::HALF_OPEN.get_ptr_mut(slot).map(Cell::new)
            }

            #[inline(always)]
            fn fragment(slot: u32) -> Option<Cell<u64>> {
                $of::FRAGMENT.get_ptr_mut(slot).map(Cell::new)
            }

            #[inline(always)]
            fn host_connection(slot: u32) -> Option<Cell<u64>> {
                $of::HOST_CONNECTION.get_ptr_mut(slot).map(Cell::new)
            }

            #[inline(always)]
            fn unmapped(port: u16) -> Option<Cell<u64>> {
                $of::UNMAPPED.get_ptr_mut(u32::from(port)).map(Cell::new)
            }

            #[inline(always)]
            fn stack_seen(slot: u32) -> Option<*mut StackSeen> {
                $of::STACK_SEEN.get_ptr_mut(slot)
            }
        }

        impl SocketReverseNat for $family {
            #[inline(always)]
            fn socket_rnat(flow: &SocketFlow<Self>) -> Option<SocketAddr<Self>> {
                let key = $of::socket_rnat_key(flow);
                // SAFETY: the map is preallocated, so the element's memory stays valid. If another CPU writes the
                // element during the read, the result may be a mixture of two values; the client then sees a wrong
                // address in this one call.
                let nat = unsafe { $of::SOCKET_RNAT.get(&key) }?;
                Some(SocketAddr { addr: $of::addr(&nat.node_addr), port: nat.node_port })
            }

            #[inline(always)]
            fn insert_socket_rnat(flow: &SocketFlow<Self>, nat: &SocketAddr<Self>) {
                let key = $of::socket_rnat_key(flow);
                let value = $of::SocketRnat { node_addr: $of::bytes(nat.addr), node_port: nat.port, pad: 0 };
                // If the insertion fails, the client's connection still works, but the client sees the Pod's address.
                let _refused = $of::SOCKET_RNAT.insert(&key, &value, 0);
            }

            #[inline(always)]
            fn remove_socket_rnat(flow: &SocketFlow<Self>) {
                let key = $of::socket_rnat_key(flow);
                let _missing = $of::SOCKET_RNAT.remove(&key);
            }
        }
    };
}

/// Index of the 64-bit word of [`Config`] that contains the primary address and the index of this address.
const PRIMARY_WORD: usize = offset_of!(Config, primary_v4) / size_of::<u64>();

family_maps!(V4, v4, 3, {
    #[inline(always)]
    fn primary(config: &Config) -> Option<u32> {
        let addr = u32::from_ne_bytes(config.primary_v4);
        if addr == 0 { None } else { Some(addr) }
    }

    #[inline(always)]
    fn is_primary(config: &Config, addr: u32) -> bool {
        u32::from_ne_bytes(config.primary_v4) == addr
    }

    #[inline(always)]
    fn primary_index(config: &Config, addr: u32) -> Option<u8> {
        // SAFETY: the pointer points to an aligned word of the map's element; the agent writes the primary address and
        // its index as one little-endian word.
        let primary = unsafe { from_ref(config).cast::<u64>().add(PRIMARY_WORD).read_volatile() };
        if primary as u32 == addr && addr != 0 { Some((primary >> u32::BITS) as u8) } else { None }
    }
});

family_maps!(V6, v6, 5, {
    #[inline(always)]
    fn primary(config: &Config) -> Option<[u32; 4]> {
        Self::node_address(config.primary_v6_index())
    }
});

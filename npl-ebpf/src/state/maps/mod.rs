// SPDX-License-Identifier: GPL-2.0-only
//! Defines the traits that access the maps of an IP family. Each trait is for one group of maps. One macro implements
//! the traits for IPv4 and for IPv6.

mod families;

use npl_common::{
    config::Config,
    flow::FlowState,
    mapping::{Endpoint, Frontend},
    next_hop::PodNextHop,
    offload::StackSeen,
};

use super::tuple::{Backend, FlowTuple, SocketFlow};
use crate::{
    base::cell::Cell,
    net::{
        family::{HeaderLayout, SocketAddr},
        route::Routing,
    },
};

/// An IP family with all of its maps.
pub trait Family:
    Routing + NodeAddresses + Mappings + LookupCaches + FlowTable + SlotArrays + SocketReverseNat
{
}

/// The Node's addresses: the primary addresses in `npl_config`, and all addresses with their indexes in
/// `npl_addr2idx_*` and `npl_idx2addr_*`.
pub trait NodeAddresses: HeaderLayout {
    /// Returns the index of `addr` if `addr` is the Node's primary IPv4 address. The primary address is in
    /// `npl_config`, so the program needs no look-up in `npl_addr2idx_v4`.
    #[inline(always)]
    fn primary_index(_config: &Config, _addr: Self::Addr) -> Option<u8> {
        None
    }
    /// Returns whether an address is the Node's primary IPv4 address; always false for IPv6.
    #[inline(always)]
    fn is_primary(_config: &Config, _addr: Self::Addr) -> bool {
        false
    }
    /// Returns the index of `addr` if `addr` is a node address; otherwise `None`.
    #[inline(always)]
    fn node_address_index(config: &Config, addr: Self::Addr) -> Option<u8> {
        match Self::primary_index(config, addr) {
            Some(index) => Some(index),
            None => Self::lookup_node_address(addr),
        }
    }
    /// Returns the Node's primary address of this IP family; `None` if the Node has no address of the family.
    fn primary(config: &Config) -> Option<Self::Addr>;
    fn lookup_node_address(addr: Self::Addr) -> Option<u8>;
    /// Returns the node address with this index; `None` if the index is free.
    fn node_address(index: u8) -> Option<Self::Addr>;
}

/// Mappings, source allow-lists, endpoints and next hops. Only the agent writes these maps.
pub trait Mappings: HeaderLayout {
    type BackendValue: 'static;

    fn mapping(frontend: Frontend) -> Option<&'static Self::BackendValue>;
    fn backend(value: &Self::BackendValue) -> Backend<Self>;
    /// Returns whether the source allow-list of a restricted mapping contains this source.
    fn is_allowed(frontend: Frontend, source: Self::Addr) -> bool;
    /// Returns the endpoint with this address, port and protocol. `zero` is [`super::lookup_cache::Epoch::zero`] if the
    /// caller caches the result, and otherwise 0.
    fn endpoint(sender: &SocketAddr<Self>, protocol: u8, zero: u8) -> Option<&'static Endpoint>;
    /// Returns the next hop of a Pod in redirect and offload mode;
    /// [`npl_common::lookup_cache::no_next_hop::UNREACHABLE`] if the map has no next hop for this address.
    fn next_hop(addr: Self::Addr) -> PodNextHop;
}

/// The lookup caches of mappings and of replies.
pub trait LookupCaches: Mappings {
    /// The words of a cached mapping, without the checksum after them.
    type CacheWords: AsRef<[u64]> + AsMut<[u64]> + Copy;
    const NO_CACHE_WORDS: Self::CacheWords;

    /// Returns the words of a slot in the lookup cache of mappings: the copy, then its checksum.
    fn cached_mapping(slot: u32) -> Option<Cell<u64>>;
    fn cache_words(value: &Self::BackendValue, next_hop: PodNextHop) -> Self::CacheWords;
    fn from_cache_words(words: Self::CacheWords) -> (Backend<Self>, PodNextHop);
    /// Returns the two words of a slot in the reply cache: the copy of an [`Endpoint`], then its checksum.
    fn cached_reply(slot: u32) -> Option<Cell<u64>>;
}

/// The flow table.
pub trait FlowTable: HeaderLayout {
    type FlowKey;
    /// An entry of the flow table. The first field of an entry is a [`FlowState`].
    type FlowEntry: Copy;

    fn flow_key(tuple: &FlowTuple<Self>, protocol: u8) -> Self::FlowKey;
    /// Returns the flow table's entry for a key. The memory remains a valid entry while the program runs, even if the
    /// kernel reuses the element for another flow.
    fn flow_entry(key: &Self::FlowKey) -> Option<*mut Self::FlowEntry>;
    fn new_flow_entry(state: FlowState, node: Self::Addr) -> Self::FlowEntry;
    /// Returns the node address in the NAT address of a flow table entry.
    fn nat_address(entry: *mut Self::FlowEntry) -> Self::Addr;
    /// Inserts an entry in the flow table; `None` if the kernel returns an error.
    fn insert_flow(key: &Self::FlowKey, entry: &Self::FlowEntry) -> Option<()>;
    /// Removes an entry from the flow table; `None` if the flow table has no entry with this key.
    fn remove_flow(key: &Self::FlowKey) -> Option<()>;
}

/// The arrays with state of flows, datagrams, host connections and ports. A hash or a port selects the slot in an
/// array.
pub trait SlotArrays {
    fn half_open(slot: u32) -> Option<Cell<u64>>;
    fn fragment(slot: u32) -> Option<Cell<u64>>;
    fn host_connection(slot: u32) -> Option<Cell<u64>>;
    fn unmapped(port: u16) -> Option<Cell<u64>>;
    fn stack_seen(slot: u32) -> Option<*mut StackSeen>;
}

/// The socket reverse NAT table, for local clients: clients on the Node and in its Pods.
pub trait SocketReverseNat: HeaderLayout {
    /// Returns the value of a socket's entry for this Pod: the address and port that the local client connected to.
    /// `None` if the socket has no such entry. [`npl_common::socket_rnat`] describes the entries with other values.
    fn socket_rnat(flow: &SocketFlow<Self>) -> Option<SocketAddr<Self>>;
    fn insert_socket_rnat(flow: &SocketFlow<Self>, nat: &SocketAddr<Self>);
    fn remove_socket_rnat(flow: &SocketFlow<Self>);
}

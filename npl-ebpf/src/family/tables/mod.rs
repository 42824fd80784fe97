// SPDX-License-Identifier: GPL-2.0-only
//! The maps that hold addresses of a family: one of each for each, with keys and values of its own.

mod v4;
mod v6;

use aya_ebpf::btf_maps::lpm_trie::Key;
use npl_common::{
    config::Config,
    direct::PodWay,
    flow::FlowState,
    mapping::{Endpoint, Frontend},
    offload::Passed,
};

use super::{Backend, End, Ends, Peer};

/// What a family's maps know.
pub trait Tables: Sized {
    /// As loaded from a packet: network order in memory.
    type Addr: Copy + PartialEq;
    /// Key and value of the flow table.
    type FlowKey;
    type Flow;

    /// How a Pod is reached past the host's stack, if it can be.
    fn pod_way(addr: Self::Addr) -> Option<PodWay>;
    /// The hash of a flow.
    fn hash(seed: u64, client: Self::Addr, pod: Self::Addr, ports_and_protocol: u64) -> u64;

    /// Whether an address is the one of the Node's that most clients use, where that is known.
    #[inline(always)]
    fn is_primary(_config: &Config, _addr: Self::Addr) -> bool {
        false
    }
    /// The position of an address among the Node's; nothing if it is not one of them.
    fn local_index(config: &Config, addr: Self::Addr) -> Option<u8>;
    /// The Node's address at a position.
    fn local_address(index: u8) -> Option<Self::Addr>;
    /// The Pod behind a node port.
    fn backend(frontend: Frontend) -> Option<Backend<Self>>;
    /// The same and, for a program that goes on by a `WAY` past the host's stack, how it is reached there: by the hint if
    /// there is one; else one is left.
    fn backend_by_hint<const WAY: u8>(config: &Config, frontend: Frontend) -> Option<(Backend<Self>, Option<PodWay>)>;
    /// Whether a restricted mapping is there for this source.
    fn is_allowed(frontend: Frontend, source: Self::Addr) -> bool;
    /// What is known of a sender of replies; `zero` may be of an [`crate::hint::Epoch`].
    fn endpoint(sender: &End<Self>, protocol: u8, zero: u8) -> Option<&'static Endpoint>;

    fn flow_key(ends: &Ends<Self>, protocol: u8) -> Self::FlowKey;
    /// The flow table's entry; memory of its type for as long as the program runs, even if another takes its place.
    fn flow(key: &Self::FlowKey) -> Option<*mut Self::Flow>;
    fn new_flow(state: FlowState, node: Self::Addr) -> Self::Flow;
    fn state(flow: &mut Self::Flow) -> &mut FlowState;
    fn node_address(flow: &Self::Flow) -> Self::Addr;
    /// Nothing if the table refuses.
    fn insert_flow(key: &Self::FlowKey, flow: &Self::Flow) -> Option<()>;
    /// Nothing if it was not there.
    fn remove_flow(key: &Self::FlowKey) -> Option<()>;
    /// A slot of the half-open cache.
    fn slot(index: u32) -> Option<*mut u64>;
    /// The hint beside a slot.
    fn reply_hint(index: u32) -> Option<*mut u64>;
    /// A slot of the records of fragmented datagrams.
    fn fragment_slot(index: u32) -> Option<*mut u64>;
    /// A slot of the notes of what the host has under way.
    fn host_slot(index: u32) -> Option<*mut u64>;
    /// When the last stray datagram came to a node port, by [`crate::fragment::now`].
    fn stray(port: u16) -> Option<*mut u64>;
    /// A slot of the record of what the host's stack has let through.
    fn offload_slot(index: u32) -> Option<*mut Passed>;

    /// What a local client asked for when it was led to this Pod.
    fn asked(peer: &Peer<Self>) -> Option<End<Self>>;
    fn remember_asked(peer: &Peer<Self>, asked: &End<Self>);
    fn forget_asked(peer: &Peer<Self>);
}

/// A [`Key`] of the allowed sources for one address. That type is packed, and would be written byte by byte.
#[repr(C)]
struct SourceKey<K> {
    prefix_length: u32,
    source: K,
}

impl<K> SourceKey<K> {
    #[inline(always)]
    const fn new(source: K) -> Self {
        const { assert!(size_of::<Self>() == size_of::<Key<K>>(), "the same bytes") };
        Self { prefix_length: size_of::<K>() as u32 * u8::BITS, source }
    }

    #[inline(always)]
    const fn as_key(&self) -> &Key<K> {
        // SAFETY: the same fields in the same places, and of less alignment.
        unsafe { &*core::ptr::from_ref(self).cast::<Key<K>>() }
    }
}

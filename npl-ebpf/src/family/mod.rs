// SPDX-License-Identifier: GPL-2.0-only
//! What IPv4 and IPv6 do differently: headers, addresses, and the maps that hold them. Everything else is written once
//! and compiled for each.

mod extension;
mod v4;
mod v6;

use aya_ebpf::{bindings::bpf_redir_neigh, btf_maps::lpm_trie::Key, programs::TcContext};
use npl_common::{
    config::Config,
    direct::PodWay,
    flow::FlowState,
    mapping::{Endpoint, FLAG_RESTRICTED, Frontend},
    offload::Passed,
};

use crate::{
    packet::{Access, Other},
    redirect::Routing,
};

pub use v4::V4;
pub use v6::V6;

/// A family of addresses. Addresses are as loaded from a packet: network order in memory.
pub trait Family: Sized {
    /// `EtherType`, as it stands in `__sk_buff::protocol`.
    const ETHER_TYPE: u32;
    /// What `bpf_skb_store_bytes` has to do for [`Self::Tail`]: whether `skb->csum` changes by what is written.
    const STORE_FLAGS: u64;
    /// Offset of [`Self::Tail`] in the IP header.
    const TAIL: usize;
    /// Length of the header of a plain packet.
    const LENGTH: usize;

    type Addr: Copy + PartialEq;
    /// The end of the IP header, from the first byte that a rewrite changes.
    type Tail: Copy;
    /// What that has beside the addresses.
    type Rest: Copy;
    /// Key and value of the flow table.
    type FlowKey;
    type Flow;

    /// ICMP's number in this family.
    const ICMP: u8;
    /// Whether ICMP's checksum covers the addresses of the packet that it is in.
    const ICMP_COVERS_ADDRESSES: bool;

    /// Reads the IP header `L2` bytes in, and finds the transport header of a plain packet.
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Location<Self>, Other>;
    /// Reads the IP header at any offset, and goes over all that stands between it and the transport header. Nothing if
    /// it is none, or leads to no transport header that is for its destination.
    fn walk(ctx: &TcContext, l3: usize) -> Option<Walk<Self>>;
    /// Whether an ICMP message of this type tells of a packet that did not arrive.
    fn is_error(kind: u8) -> bool;
    /// Copies the beginning of what follows at once on the IP header.
    fn read_behind<T: Copy, const L2: usize>(ctx: &impl Access) -> Option<T>;
    /// Writes over the IP header's end and what follows at once, if that is possible without the kernel's help.
    fn write_tail<T: Copy, const L2: usize>(ctx: &impl Access, value: T) -> bool;
    /// What a sum over the old address gains when it becomes the new one.
    fn difference(old: Self::Addr, new: Self::Addr) -> u32;
    /// The header's end with other addresses, whose sum differs by `difference`.
    fn tail(rest: Self::Rest, source: Self::Addr, destination: Self::Addr, difference: u32) -> Self::Tail;
    /// The rest of the header for one hop less. Nothing if that was the last.
    fn one_hop_less(rest: Self::Rest) -> Option<Self::Rest>;
    /// The question where a packet from and to these addresses goes, with all that the header `L2` bytes in says.
    fn routing<const L2: usize>(ctx: &TcContext, source: Self::Addr, destination: Self::Addr) -> Option<Routing>;
    /// Bytes of a packet with its header, which is `L2` bytes in.
    fn length<const L2: usize>(ctx: &TcContext, rest: Self::Rest) -> Option<u16>;
    /// The neighbour that an answer names, if it is one of this family.
    fn next_hop(answer: &Routing) -> Option<Self::Addr>;
    /// A neighbour, by its address.
    fn neighbour(addr: Self::Addr) -> bpf_redir_neigh;
    /// How a Pod is reached past the host's stack, if it can be.
    fn pod_way(addr: Self::Addr) -> Option<PodWay>;
    /// The hash of a flow.
    fn hash(seed: u64, client: Self::Addr, pod: Self::Addr, ports_and_protocol: u64) -> u64;

    /// Whether an address is the one of the Node's that most clients use, where that is known.
    #[inline(always)]
    fn is_primary(_config: &Config, _addr: Self::Addr) -> bool {
        false
    }
    /// The destination of a packet behind whose IP header, at this offset, others may stand that lead nowhere.
    #[inline(always)]
    fn destination_of_chain(_ctx: &TcContext, _l3: usize) -> Option<Self::Addr> {
        None
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

    /// Whether the address never leaves the network namespace that it is used in.
    fn is_loopback(addr: Self::Addr) -> bool;
    /// What a local client asked for when it was led to this Pod.
    fn asked(peer: &Peer<Self>) -> Option<End<Self>>;
    fn remember_asked(peer: &Peer<Self>, asked: &End<Self>);
    fn forget_asked(peer: &Peer<Self>);
}

/// Where a packet's transport header is.
pub struct Location<F: Family> {
    pub source: F::Addr,
    pub destination: F::Addr,
    /// The rest of the IP header's end.
    pub rest: F::Rest,
    /// The transport protocol.
    pub protocol: u8,
    /// Offset of the transport header.
    pub l4: usize,
    /// Whether the transport header follows the IP header at once, so that both are at constant offsets.
    pub is_plain: bool,
}

/// A packet, or the quote of one, that was walked through header by header.
pub struct Walk<F: Family> {
    /// Offset of the IP header.
    pub l3: usize,
    pub location: Location<F>,
    pub fragment: Fragment,
    /// Where the packet ends, as its header says.
    pub end: usize,
}

/// Which part of a datagram a packet carries.
pub struct Fragment {
    /// What the fragments of a datagram have in common beside their addresses, as loaded.
    pub id: u32,
    /// The same, and zero where a later fragment does not tell.
    pub protocol: u8,
    /// Whether others precede it, so that it has no ports.
    pub is_later: bool,
    /// Whether it is the first of several.
    pub is_first: bool,
}

impl Fragment {
    /// A whole datagram.
    pub const NONE: Self = Self { id: 0, protocol: 0, is_later: false, is_first: false };
}

/// The Pod behind a mapping.
pub struct Backend<F: Family> {
    pub addr: F::Addr,
    /// Host order.
    pub port: u16,
    pub generation: u32,
    pub stats_index: u32,
    /// Bit set of `FLAG_*`.
    pub flags: u16,
}

impl<F: Family> Backend<F> {
    /// Whether this source may not use the mapping. Most mappings are for everybody, which one bit tells.
    #[inline(always)]
    pub fn refuses(&self, frontend: Frontend, source: F::Addr) -> bool {
        self.flags & FLAG_RESTRICTED != 0 && !F::is_allowed(frontend, source)
    }
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

/// The two ends of a flow as the Pod sees it; ports in host order.
pub struct Ends<F: Family> {
    pub client: F::Addr,
    pub client_port: u16,
    pub pod: F::Addr,
    pub pod_port: u16,
}

/// An address and a port, in host order.
pub struct End<F: Family> {
    pub addr: F::Addr,
    pub port: u16,
}

/// A socket of a local client, and the Pod that it talks to.
pub struct Peer<F: Family> {
    pub socket: u64,
    pub pod: End<F>,
}

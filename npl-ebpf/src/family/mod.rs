// SPDX-License-Identifier: GPL-2.0-only
//! What IPv4 and IPv6 do differently: headers, addresses, and the maps that hold them. Everything else is written once
//! and compiled for each.

mod extension;
mod tables;
mod v4;
mod v6;

use aya_ebpf::{bindings::bpf_redir_neigh, programs::TcContext};
use npl_common::mapping::{FLAG_RESTRICTED, Frontend};

use crate::{
    packet::{Access, Other},
    redirect::Routing,
};

pub use tables::Tables;
pub use v4::V4;
pub use v6::V6;

/// A family of addresses. Addresses are as loaded from a packet: network order in memory.
pub trait Family: Tables {
    /// `EtherType`, as it stands in `__sk_buff::protocol`.
    const ETHER_TYPE: u32;
    /// What `bpf_skb_store_bytes` has to do for [`Self::Tail`]: whether `skb->csum` changes by what is written.
    const STORE_FLAGS: u64;
    /// Offset of [`Self::Tail`] in the IP header.
    const TAIL: usize;
    /// Length of the header of a plain packet.
    const LENGTH: usize;

    /// The end of the IP header, from the first byte that a rewrite changes.
    type Tail: Copy;
    /// What that has beside the addresses.
    type Rest: Copy;

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
    /// What an address adds to a sum. Of two such, with two words more, the sum still fits.
    fn sum(addr: Self::Addr) -> u32;
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
    /// The destination of a packet behind whose IP header, at this offset, others may stand that lead nowhere.
    #[inline(always)]
    fn destination_of_chain(_ctx: &TcContext, _l3: usize) -> Option<Self::Addr> {
        None
    }
    /// Whom a socket means by this address: the loopback one by that of nobody, as the kernel takes it.
    fn named(addr: Self::Addr) -> Self::Addr;
    /// Whether the address never leaves the network namespace that it is used in.
    fn is_loopback(addr: Self::Addr) -> bool;
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

impl<F: Family> Walk<F> {
    /// Bytes of the whole that this is the last fragment of.
    #[inline(always)]
    pub const fn whole(&self) -> usize {
        self.fragment.ahead as usize + self.end - self.location.l4
    }
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
    /// Whether it is the last of several.
    pub is_last: bool,
    /// What the whole begins with, as this one says: the number of a transport protocol, or of another header.
    pub content: u8,
    /// Bytes of the whole ahead of this one's.
    pub ahead: u16,
}

impl Fragment {
    /// A whole datagram.
    pub const NONE: Self =
        Self { id: 0, protocol: 0, is_later: false, is_first: false, is_last: false, content: 0, ahead: 0 };
}

/// The Pod behind a mapping.
pub struct Backend<F: Tables> {
    pub addr: F::Addr,
    /// Host order.
    pub port: u16,
    pub generation: u32,
    pub stats_index: u32,
    /// Bit set of `FLAG_*`.
    pub flags: u16,
}

impl<F: Tables> Backend<F> {
    /// Whether this source may not use the mapping. Most mappings are for everybody, which one bit tells.
    #[inline(always)]
    pub fn refuses(&self, frontend: Frontend, source: F::Addr) -> bool {
        self.flags & FLAG_RESTRICTED != 0 && !F::is_allowed(frontend, source)
    }
}

/// The two ends of a flow as the Pod sees it; ports in host order.
pub struct Ends<F: Tables> {
    pub client: F::Addr,
    pub client_port: u16,
    pub pod: F::Addr,
    pub pod_port: u16,
}

/// An address and a port, in host order.
pub struct End<F: Tables> {
    pub addr: F::Addr,
    pub port: u16,
}

/// A socket of a local client, and the Pod that it talks to.
pub struct Peer<F: Tables> {
    pub socket: u64,
    pub pod: End<F>,
}

// SPDX-License-Identifier: GPL-2.0-only
//! Defines the traits that describe addresses and header layout. IPv4 and IPv6 implement these traits. The code that
//! tracks and translates packets (`path`, `act`, `state`) is generic over these traits.

use aya_ebpf::programs::TcContext;

use crate::base::{context::Access, error::Unparsed};

/// Addresses of a family, in network byte order as loaded from a packet.
pub trait Addressing: Sized {
    type Addr: Copy + PartialEq;

    /// Returns the address in which every 32-bit word is `word`.
    fn of_repeated(word: u32) -> Self::Addr;
    /// Returns the contribution of an address to the sum of an Internet checksum. The contributions of two addresses,
    /// plus two 16-bit words, fit in 32 bits.
    fn sum(addr: Self::Addr) -> u32;
    /// Returns the change of the sum of an Internet checksum if the address `new` replaces `old`.
    fn difference(old: Self::Addr, new: Self::Addr) -> u32;
    /// Returns the seeded hash of a flow: client address, Pod address, ports and protocol.
    fn hash(seed: u64, client: Self::Addr, pod: Self::Addr, ports_and_protocol: u64) -> u64;
    /// Replaces the unspecified address by the loopback address, as the kernel does when a socket connects.
    fn unspecified_as_loopback(addr: Self::Addr) -> Self::Addr;
    /// Returns whether the address is a loopback address.
    fn is_loopback(addr: Self::Addr) -> bool;
}

/// Layout of a family's IP header, and access to the headers after the IP header.
pub trait HeaderLayout: Addressing {
    /// `EtherType`, in the byte order of `__sk_buff::protocol`.
    const ETHER_TYPE: u32;
    /// Flags of `bpf_skb_store_bytes` for a write of [`Self::Tail`]: whether the kernel must update `skb->csum`.
    const STORE_FLAGS: u64;
    /// Offset in bytes of [`Self::Tail`] in the IP header.
    const TAIL: usize;
    /// Length in bytes of the IP header without options.
    const LENGTH: usize;
    /// ICMP's protocol number.
    const ICMP: u8;
    /// Whether the ICMP checksum covers the addresses in the IP header.
    const ICMP_COVERS_ADDRESSES: bool;

    /// The last part of the IP header: from the first byte that a rewrite changes to the end of the destination
    /// address.
    type Tail: Copy;
    /// The fields of [`Self::Tail`] before the addresses. In IPv4, these are TTL, protocol and checksum; in IPv6,
    /// payload length, next header and hop limit.
    type TtlFields: Copy;

    /// Reads the IP header at offset `L2`, and locates the transport header of a fast-path packet.
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Headers<Self>, Unparsed>;
    /// Reads the IP header at offset `l3`, and skips the IPv4 options or IPv6 extension headers up to the transport
    /// header. `None` if the packet has no IP header, if the headers are cut off, if there are too many extension
    /// headers, or if a source route has segments left.
    fn parse_chain(ctx: &TcContext, l3: usize) -> Option<HeaderChain<Self>>;
    /// Returns whether an ICMP type is that of an error message.
    fn is_error(kind: u8) -> bool;
    /// Copies the transport header of a packet whose IP header has no options.
    fn read_transport<T: Copy, const L2: usize>(ctx: &impl Access) -> Option<T>;
    /// Overwrites the packet with `value`, starting at [`Self::Tail`]. Returns `false` in the same cases as
    /// [`Access::write`].
    fn write_tail<T: Copy, const L2: usize>(ctx: &impl Access, value: T) -> bool;
    /// Returns [`Self::Tail`] with new addresses. `difference` is the checksum contribution of the new addresses minus
    /// that of the old addresses.
    fn tail(ttl_fields: Self::TtlFields, source: Self::Addr, destination: Self::Addr, difference: u32) -> Self::Tail;
    /// Returns the change of `skb->csum` by a rewrite that also updates the transport checksum. `difference` is the
    /// change of the addresses' checksum contribution. `ttl_fields` are the fields after the rewrite; the packet itself
    /// still has the fields from before the rewrite.
    fn sum_change<const L2: usize>(ctx: &impl Access, ttl_fields: Self::TtlFields, difference: u32) -> u16;
    /// Returns `ttl_fields` with a decremented TTL (IPv6: hop limit); `None` if the TTL would reach 0.
    fn decrement_ttl(ttl_fields: Self::TtlFields) -> Option<Self::TtlFields>;
    /// Returns the length of a packet in bytes according to its IP header, which starts at offset `L2`.
    fn packet_length<const L2: usize>(ctx: &impl Access, ttl_fields: Self::TtlFields) -> Option<u16>;
    /// Returns the destination of a packet whose extension headers [`Self::parse_chain`] could not parse; `None` in
    /// IPv4.
    #[inline(always)]
    fn destination_of_chain(_ctx: &TcContext, _l3: usize) -> Option<Self::Addr> {
        None
    }
}

/// A parsed IP header and the offset of the transport header.
pub struct Headers<F: HeaderLayout> {
    pub source: F::Addr,
    pub destination: F::Addr,
    pub ttl_fields: F::TtlFields,
    /// The transport protocol.
    pub protocol: u8,
    /// Offset in bytes of the transport header in the packet.
    pub l4: usize,
    /// Whether this is a fast-path packet: its transport header follows the IP header directly, so that both headers
    /// are at constant offsets.
    pub is_fast_path: bool,
}

/// The parsed IP header, options and extension headers of a packet, or of the packet that an ICMP error quotes.
pub struct HeaderChain<F: HeaderLayout> {
    /// Offset in bytes of the IP header in the packet.
    pub l3: usize,
    pub headers: Headers<F>,
    pub fragment: Fragment,
    /// Offset in bytes of the packet's end, according to the IP header.
    pub end: usize,
}

impl<F: HeaderLayout> HeaderChain<F> {
    /// Returns the length in bytes of the whole datagram without IP headers. The result is valid only if this packet is
    /// the datagram's last fragment.
    #[inline(always)]
    pub const fn datagram_length(&self) -> usize {
        self.fragment.offset as usize + self.end - self.headers.l4
    }
}

/// Whether and how a packet is a fragment of a datagram.
pub struct Fragment {
    /// The datagram's identification, in network byte order.
    pub id: u32,
    /// In IPv4, the transport protocol, which is part of the datagram's identity. Always 0 in IPv6, where later
    /// fragments need not name the transport protocol.
    pub protocol: u8,
    /// Whether the packet is a later fragment, which has no ports.
    pub is_later: bool,
    /// Whether the packet is the first fragment of a fragmented datagram.
    pub is_first: bool,
    /// Whether the packet is the last fragment of a fragmented datagram.
    pub is_last: bool,
    /// Protocol number of the first header in the fragmented part of the datagram, according to this fragment's IP
    /// header.
    pub content: u8,
    /// The fragment offset, in bytes.
    pub offset: u16,
}

impl Fragment {
    /// The value for a datagram that is not fragmented.
    pub const NONE: Self =
        Self { id: 0, protocol: 0, is_later: false, is_first: false, is_last: false, content: 0, offset: 0 };
}

/// An address and a port, the port in host byte order.
pub struct SocketAddr<F: Addressing> {
    pub addr: F::Addr,
    pub port: u16,
}

impl<F: Addressing> SocketAddr<F> {
    /// Returns whether two values have the same address and port.
    #[inline(always)]
    pub fn is_same(&self, other: &Self) -> bool {
        self.addr == other.addr && self.port == other.port
    }
}

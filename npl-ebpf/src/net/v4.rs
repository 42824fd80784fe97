// SPDX-License-Identifier: GPL-2.0-only
//! Reads and rewrites IPv4 headers.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    programs::TcContext,
};
use npl_common::{csum, hash};

use super::{
    family::{Addressing, Fragment, HeaderChain, HeaderLayout, Headers},
    headers::{has_ports, is_fast_path_protocol},
    route::{self, ClassAndLength, RouteLookup, Routing},
};
use crate::base::{
    context::{self, Access, ETHERNET},
    error::Unparsed,
};

/// IPv4.
pub struct V4;

/// An IPv4 header without options (RFC 791).
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

/// The end of the IPv4 header, starting at the time to live.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail {
    ttl_fields: TtlFields,
    source: u32,
    destination: u32,
}

/// The fields of the IPv4 header before the addresses: time to live, protocol and checksum.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtlFields {
    ttl: u8,
    protocol: u8,
    check: u16,
}

/// Mask of more-fragments flag and fragment offset, in network byte order.
const FRAGMENT_MASK: u16 = 0x3fff_u16.to_be();
/// Mask of the fragment offset alone, in network byte order.
const FRAGMENT_OFFSET_MASK: u16 = 0x1fff_u16.to_be();
/// More-fragments flag of the IPv4 field with flags and fragment offset, in network byte order.
const MORE_FRAGMENTS: u16 = 0x2000_u16.to_be();
/// First byte of a header with version 4 and no options.
const VERSION_WITHOUT_OPTIONS: u8 = 0x45;
/// Types of ICMP errors (RFC 792).
mod icmp {
    pub const UNREACHABLE: u8 = 3;
    /// Source quench, deprecated by RFC 6633; receivers ignore this error.
    pub const SOURCE_QUENCH: u8 = 4;
    pub const TIME_EXCEEDED: u8 = 11;
    pub const PARAMETER_PROBLEM: u8 = 12;
}
/// `AF_INET`: the kernel's number of the IPv4 address family.
const AF_INET: u8 = 2;
/// `127.0.0.1`.
const LOOPBACK: u32 = 0x7f00_0001_u32.to_be();
/// First byte of every loopback address.
const LOOPBACK_NETWORK: u8 = 127;
/// Length in bytes of the IPv4 header without options.
const LENGTH: usize = size_of::<Header>();

impl Addressing for V4 {
    type Addr = u32;

    #[inline(always)]
    fn of_repeated(word: u32) -> u32 {
        word
    }

    #[inline(always)]
    fn sum(addr: u32) -> u32 {
        csum::sum32(addr)
    }

    #[inline(always)]
    fn difference(old: u32, new: u32) -> u32 {
        csum::difference32(old, new)
    }

    #[inline(always)]
    fn hash(seed: u64, client: u32, pod: u32, ports_and_protocol: u64) -> u64 {
        hash::flow_v4(seed, client, pod, ports_and_protocol)
    }

    #[inline(always)]
    fn unspecified_as_loopback(addr: u32) -> u32 {
        if addr == 0 { LOOPBACK } else { addr }
    }

    #[inline(always)]
    fn is_loopback(addr: u32) -> bool {
        addr.to_ne_bytes()[0] == LOOPBACK_NETWORK
    }
}

impl HeaderLayout for V4 {
    const ETHER_TYPE: u32 = 0x0800_u16.to_be() as u32;
    /// No flag is set, because in `skb->csum`, the change of the address and the change of the IPv4 header checksum add
    /// up to zero.
    const STORE_FLAGS: u64 = 0;
    const TAIL: usize = offset_of!(Header, tail);
    const LENGTH: usize = LENGTH;
    const ICMP: u8 = 1;
    const ICMP_COVERS_ADDRESSES: bool = false;

    type Tail = Tail;
    type TtlFields = TtlFields;

    #[inline(always)]
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Headers<Self>, Unparsed> {
        let ip = ctx.read::<Header, L2>().ok_or(Unparsed::Unrelated)?;
        let Tail { ttl_fields, source, destination } = ip.tail;
        let protocol = ttl_fields.protocol;
        if !is_fast_path_protocol(protocol) {
            let is_slow_path = protocol == Self::ICMP || has_ports(protocol);
            return Err(if is_slow_path { Unparsed::SlowPath } else { Unparsed::Unrelated });
        }
        if ip.version_and_length != VERSION_WITHOUT_OPTIONS || ip.fragment & FRAGMENT_MASK != 0 {
            return Err(Unparsed::SlowPath);
        }
        Ok(Headers { source, destination, ttl_fields, protocol, l4: L2 + LENGTH, is_fast_path: true })
    }

    #[inline(always)]
    fn parse_chain(ctx: &TcContext, l3: usize) -> Option<HeaderChain<Self>> {
        let ip = context::load::<Header>(ctx, l3)?;
        let Tail { ttl_fields, source, destination } = ip.tail;
        let length = usize::from(ip.version_and_length & 0x0f) * 4;
        if ip.version_and_length >> 4 != 4 || length < LENGTH {
            return None;
        }
        let protocol = ttl_fields.protocol;
        let is_later = ip.fragment & FRAGMENT_OFFSET_MASK != 0;
        let is_first = !is_later && ip.fragment & FRAGMENT_MASK != 0;
        let is_last = is_later && ip.fragment & MORE_FRAGMENTS == 0;
        let offset = u16::from_be(ip.fragment & FRAGMENT_OFFSET_MASK) * 8;
        Some(HeaderChain {
            l3,
            headers: Headers { source, destination, ttl_fields, protocol, l4: l3 + length, is_fast_path: false },
            fragment: Fragment {
                id: u32::from(ip.id),
                protocol,
                is_later,
                is_first,
                is_last,
                content: protocol,
                offset,
            },
            // A GSO packet of more than 64 KiB has a total length of 0. The end of a packet with this length is set to
            // the end of its IP header.
            end: l3 + usize::from(u16::from_be(ip.total_length)).max(length),
        })
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        matches!(kind, icmp::UNREACHABLE | icmp::SOURCE_QUENCH | icmp::TIME_EXCEEDED | icmp::PARAMETER_PROBLEM)
    }

    #[inline(always)]
    fn read_transport<T: Copy, const L2: usize>(ctx: &impl Access) -> Option<T> {
        match L2 {
            0 => ctx.read::<T, LENGTH>(),
            _ => ctx.read::<T, { ETHERNET + LENGTH }>(),
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
    fn tail(ttl_fields: TtlFields, source: u32, destination: u32, difference: u32) -> Tail {
        let check = !csum::fold(u32::from(!ttl_fields.check) + difference);
        Tail { ttl_fields: TtlFields { check, ..ttl_fields }, source, destination }
    }

    /// Only the change of the transport checksum changes `skb->csum`: the changes of address, TTL and IP header
    /// checksum add up to zero.
    #[inline(always)]
    fn sum_change<const L2: usize>(_ctx: &impl Access, _ttl_fields: TtlFields, difference: u32) -> u16 {
        !csum::fold(difference)
    }

    #[inline(always)]
    fn decrement_ttl(ttl_fields: TtlFields) -> Option<TtlFields> {
        if ttl_fields.ttl <= 1 {
            return None;
        }
        let ttl = ttl_fields.ttl - 1;
        let word = |ttl| u16::from_ne_bytes([ttl, ttl_fields.protocol]);
        let check = csum::replace16(ttl_fields.check, word(ttl_fields.ttl), word(ttl));
        Some(TtlFields { ttl, check, ..ttl_fields })
    }

    #[inline(always)]
    fn packet_length<const L2: usize>(ctx: &impl Access, _ttl_fields: TtlFields) -> Option<u16> {
        ctx.read::<Header, L2>().map(|ip| u16::from_be(ip.total_length))
    }
}

impl Routing for V4 {
    #[inline(always)]
    fn class_and_length<const L2: usize, const WITH_CLASS: bool>(
        ctx: &TcContext,
        _ttl_fields: TtlFields,
    ) -> Option<ClassAndLength> {
        let ip = ctx.read::<Header, L2>()?;
        Some(ClassAndLength { class: u32::from_ne_bytes([ip.tos, 0, 0, 0]), length: u16::from_be(ip.total_length) })
    }

    #[inline(always)]
    fn route_lookup(class: u32, source: u32, destination: u32) -> RouteLookup {
        let mut lookup = route::EMPTY;
        lookup.family = AF_INET;
        lookup.__bindgen_anon_2.flowinfo = class;
        lookup.__bindgen_anon_3.ipv4_src = source;
        lookup.__bindgen_anon_4.ipv4_dst = destination;
        lookup
    }

    #[inline(always)]
    fn neighbor_of(answer: &RouteLookup) -> Option<u32> {
        if answer.family != AF_INET {
            return None;
        }
        // SAFETY: every member of this union consists of integers, and the kernel has filled in the next hop's address.
        Some(unsafe { answer.__bindgen_anon_4.ipv4_dst })
    }

    #[inline(always)]
    fn redirect_neighbor(addr: u32) -> bpf_redir_neigh {
        let ipv6_nh = [addr, 0, 0, 0];
        bpf_redir_neigh { nh_family: u32::from(AF_INET), __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh } }
    }
}

// SPDX-License-Identifier: GPL-2.0-only
//! Reads and rewrites IPv6 headers.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{BPF_F_RECOMPUTE_CSUM, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    programs::TcContext,
};
use npl_common::{csum, hash};

use super::{
    extension::{is_extension, skip_extensions},
    family::{Addressing, Fragment, HeaderChain, HeaderLayout, Headers},
    headers::{has_ports, is_fast_path_protocol},
    route::{self, ClassAndLength, RouteLookup, Routing},
};
use crate::base::{
    context::{self, Access, ETHERNET},
    error::Unparsed,
};

/// IPv6.
pub struct V6;

/// An address as four 32-bit words in network byte order, because headers are aligned to only four bytes.
pub type Addr = [u32; 4];

/// An IPv6 header (RFC 8200).
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version_class_and_label: u32,
    tail: Tail,
}

/// The end of the IPv6 header, starting at the payload length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail {
    ttl_fields: TtlFields,
    source: Addr,
    destination: Addr,
}

/// The fields of the IPv6 header before the addresses, without the first word: payload length, next header and hop
/// limit.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtlFields {
    payload_length: u16,
    protocol: u8,
    hop_limit: u8,
}

/// The lowest `ICMPv6` type of an informational message. Types below this number are errors (RFC 4443, section 2.1).
const FIRST_INFORMATION: u8 = 128;
/// `AF_INET6`: the kernel's number of the IPv6 address family.
const AF_INET6: u8 = 10;
/// Mask of traffic class and flow label in a header's first word, in network byte order.
const CLASS_AND_LABEL: u32 = 0x0fff_ffff_u32.to_be();
/// `::1`.
const LOOPBACK: Addr = [0, 0, 0, 1_u32.to_be()];
/// Length in bytes of the IPv6 header.
const LENGTH: usize = size_of::<Header>();

impl Addressing for V6 {
    type Addr = Addr;

    #[inline(always)]
    fn of_repeated(word: u32) -> Addr {
        [word; 4]
    }

    #[inline(always)]
    fn sum(addr: Addr) -> u32 {
        csum::sum32(addr[0]) + csum::sum32(addr[1]) + csum::sum32(addr[2]) + csum::sum32(addr[3])
    }

    #[inline(always)]
    fn difference(old: Addr, new: Addr) -> u32 {
        csum::difference32(old[0], new[0])
            + csum::difference32(old[1], new[1])
            + csum::difference32(old[2], new[2])
            + csum::difference32(old[3], new[3])
    }

    #[inline(always)]
    fn hash(seed: u64, client: Addr, pod: Addr, ports_and_protocol: u64) -> u64 {
        let word = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let halves = |addr: Addr| [word(addr[0], addr[1]), word(addr[2], addr[3])];
        hash::flow_v6(seed, halves(client), halves(pod), ports_and_protocol)
    }

    #[inline(always)]
    fn unspecified_as_loopback(addr: Addr) -> Addr {
        if addr == [0; 4] { LOOPBACK } else { addr }
    }

    #[inline(always)]
    fn is_loopback(addr: Addr) -> bool {
        addr == LOOPBACK
    }
}

impl HeaderLayout for V6 {
    const ETHER_TYPE: u32 = 0x86dd_u16.to_be() as u32;
    /// The IPv6 header has no checksum that would compensate for the change of the address in `skb->csum`, so the
    /// kernel must update `skb->csum`.
    const STORE_FLAGS: u64 = BPF_F_RECOMPUTE_CSUM as u64;
    const TAIL: usize = offset_of!(Header, tail);
    const LENGTH: usize = LENGTH;
    const ICMP: u8 = 58;
    const ICMP_COVERS_ADDRESSES: bool = true;

    type Tail = Tail;
    type TtlFields = TtlFields;

    #[inline(always)]
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Headers<Self>, Unparsed> {
        let ip = ctx.read::<Header, L2>().ok_or(Unparsed::Unrelated)?;
        let Tail { ttl_fields, source, destination } = ip.tail;
        let protocol = ttl_fields.protocol;
        if !is_fast_path_protocol(protocol) {
            let is_slow_path = protocol == Self::ICMP || has_ports(protocol) || is_extension(protocol);
            return Err(if is_slow_path { Unparsed::SlowPath } else { Unparsed::Unrelated });
        }
        Ok(Headers { source, destination, ttl_fields, protocol, l4: L2 + LENGTH, is_fast_path: true })
    }

    #[inline(always)]
    fn parse_chain(ctx: &TcContext, l3: usize) -> Option<HeaderChain<Self>> {
        let ip = context::load::<Header>(ctx, l3)?;
        if ip.version_class_and_label.to_ne_bytes()[0] >> 4 != 6 {
            return None;
        }
        let Tail { ttl_fields, source, destination } = ip.tail;
        let protocol = ttl_fields.protocol;
        let mut chain = HeaderChain {
            l3,
            headers: Headers { source, destination, ttl_fields, protocol, l4: l3 + LENGTH, is_fast_path: false },
            fragment: Fragment::NONE,
            end: 0,
        };
        skip_extensions(ctx, &mut chain)?;
        // The end is computed after the function call, because the callers have no free stack space to keep the end
        // during the call.
        chain.end = l3 + LENGTH + usize::from(u16::from_be(ttl_fields.payload_length));
        Some(chain)
    }

    #[inline(always)]
    fn destination_of_chain(ctx: &TcContext, l3: usize) -> Option<Self::Addr> {
        context::load(ctx, l3 + Self::TAIL + offset_of!(Tail, destination))
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        kind < FIRST_INFORMATION
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
    fn tail(ttl_fields: TtlFields, source: Addr, destination: Addr, _difference: u32) -> Tail {
        Tail { ttl_fields, source, destination }
    }

    /// Only the change of the hop limit changes `skb->csum`: the change of the address and the change of the transport
    /// checksum add up to zero.
    #[inline(always)]
    fn sum_change<const L2: usize>(ctx: &impl Access, ttl_fields: TtlFields, _difference: u32) -> u16 {
        let Some(ip) = ctx.read::<Header, L2>() else { return 0 };
        let word = |fields: TtlFields| u16::from_ne_bytes([fields.protocol, fields.hop_limit]);
        let (old, new) = (word(ip.tail.ttl_fields), word(ttl_fields));
        if old == new { 0 } else { csum::fold(u32::from(new) + u32::from(!old)) }
    }

    #[inline(always)]
    fn decrement_ttl(ttl_fields: TtlFields) -> Option<TtlFields> {
        if ttl_fields.hop_limit <= 1 {
            return None;
        }
        Some(TtlFields { hop_limit: ttl_fields.hop_limit - 1, ..ttl_fields })
    }

    #[inline(always)]
    fn packet_length<const L2: usize>(_ctx: &impl Access, ttl_fields: TtlFields) -> Option<u16> {
        Some(packet_length(ttl_fields))
    }
}

impl Routing for V6 {
    #[inline(always)]
    fn class_and_length<const L2: usize, const WITH_CLASS: bool>(
        ctx: &TcContext,
        ttl_fields: TtlFields,
    ) -> Option<ClassAndLength> {
        let class = if WITH_CLASS { ctx.read::<Header, L2>()?.version_class_and_label & CLASS_AND_LABEL } else { 0 };
        Some(ClassAndLength { class, length: packet_length(ttl_fields) })
    }

    #[inline(always)]
    fn route_lookup(class: u32, source: Addr, destination: Addr) -> RouteLookup {
        let mut lookup = route::EMPTY;
        lookup.family = AF_INET6;
        lookup.__bindgen_anon_2.flowinfo = class;
        lookup.__bindgen_anon_3.ipv6_src = source;
        lookup.__bindgen_anon_4.ipv6_dst = destination;
        lookup
    }

    #[inline(always)]
    fn neighbor_of(answer: &RouteLookup) -> Option<Addr> {
        if answer.family != AF_INET6 {
            return None;
        }
        // SAFETY: every member of this union consists of integers, and the kernel has filled in the next hop's address.
        Some(unsafe { answer.__bindgen_anon_4.ipv6_dst })
    }

    #[inline(always)]
    fn redirect_neighbor(ipv6_nh: Addr) -> bpf_redir_neigh {
        bpf_redir_neigh { nh_family: u32::from(AF_INET6), __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh } }
    }
}

/// Returns the length of a packet in bytes, including the IPv6 header.
#[inline(always)]
const fn packet_length(ttl_fields: TtlFields) -> u16 {
    u16::from_be(ttl_fields.payload_length).saturating_add(LENGTH as u16)
}

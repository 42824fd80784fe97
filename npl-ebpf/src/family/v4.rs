// SPDX-License-Identifier: GPL-2.0-only
//! IPv4's headers.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    programs::TcContext,
};
use npl_common::csum;

use super::{Family, Fragment, Location, Walk};
use crate::{
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
/// More-fragments flag in the same word.
const MORE_FRAGMENTS: u16 = 0x2000_u16.to_be();
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
/// `127.0.0.1`.
const LOOPBACK: u32 = 0x7f00_0001_u32.to_be();
/// First byte of every loopback address.
const LOOPBACK_NETWORK: u8 = 127;
/// The smallest header.
const MIN: usize = size_of::<Header>();

impl Family for V4 {
    const ETHER_TYPE: u32 = 0x0800_u16.to_be() as u32;
    /// The header's own checksum and the address cancel out in `skb->csum`.
    const STORE_FLAGS: u64 = 0;
    const TAIL: usize = offset_of!(Header, tail);
    const LENGTH: usize = MIN;
    const ICMP: u8 = 1;
    const ICMP_COVERS_ADDRESSES: bool = false;

    type Tail = Tail;
    type Rest = Rest;

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
        let is_last = is_later && ip.fragment & MORE_FRAGMENTS == 0;
        let ahead = u16::from_be(ip.fragment & FRAGMENT_OFFSET_MASK) * 8;
        Some(Walk {
            l3,
            location: Location { source, destination, rest, protocol, l4: l3 + length, is_plain: false },
            fragment: Fragment {
                id: u32::from(ip.id),
                protocol,
                is_later,
                is_first,
                is_last,
                content: protocol,
                ahead,
            },
            // A segment of more than 64 KiB says 0.
            end: l3 + usize::from(u16::from_be(ip.total_length)).max(length),
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
    fn sum(addr: u32) -> u32 {
        csum::sum32(addr)
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
    fn named(addr: u32) -> u32 {
        if addr == 0 { LOOPBACK } else { addr }
    }

    #[inline(always)]
    fn is_loopback(addr: u32) -> bool {
        addr.to_ne_bytes()[0] == LOOPBACK_NETWORK
    }
}

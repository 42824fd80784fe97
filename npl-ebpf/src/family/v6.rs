// SPDX-License-Identifier: GPL-2.0-only
//! IPv6's headers.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{BPF_F_RECOMPUTE_CSUM, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    programs::TcContext,
};
use npl_common::csum;

use super::{
    Family, Fragment, Location, Walk,
    extension::{is_extension, skip_extensions},
};
use crate::{
    packet::{self, Access, ETHERNET, Other},
    redirect::{self, Routing},
};

/// IPv6.
pub struct V6;

/// Sixteen bytes, as four words as loaded: what a header is aligned to.
pub type Addr = [u32; 4];

/// An IPv6 header (RFC 8200).
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version_class_and_label: u32,
    tail: Tail,
}

/// The header from its length on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail {
    rest: Rest,
    source: Addr,
    destination: Addr,
}

/// Length, protocol and hop limit.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rest {
    payload_length: u16,
    protocol: u8,
    hop_limit: u8,
}

/// The first type of an `ICMPv6` message that is no error; one of an unknown type below is one too (RFC 4443 section 2.1).
const FIRST_INFORMATION: u8 = 128;

/// The kernel's number of the family.
const AF_INET6: u8 = 10;
/// All of a header's first word but the version, as loaded.
const CLASS_AND_LABEL: u32 = 0x0fff_ffff_u32.to_be();

/// `::1`.
const LOOPBACK: Addr = [0, 0, 0, 1_u32.to_be()];
/// Length of the header.
const LENGTH: usize = size_of::<Header>();

impl Family for V6 {
    const ETHER_TYPE: u32 = 0x86dd_u16.to_be() as u32;
    /// No checksum of the header makes up for the address.
    const STORE_FLAGS: u64 = BPF_F_RECOMPUTE_CSUM as u64;
    const TAIL: usize = offset_of!(Header, tail);
    const LENGTH: usize = LENGTH;
    const ICMP: u8 = 58;
    const ICMP_COVERS_ADDRESSES: bool = true;

    type Tail = Tail;
    type Rest = Rest;

    #[inline(always)]
    fn locate<const L2: usize>(ctx: &impl Access) -> Result<Location<Self>, Other> {
        let ip = ctx.read::<Header, L2>().ok_or(Other::Foreign)?;
        let Tail { rest, source, destination } = ip.tail;
        let protocol = rest.protocol;
        if !packet::is_common(protocol) {
            let is_unusual = protocol == Self::ICMP || packet::has_ports(protocol) || is_extension(protocol);
            return Err(if is_unusual { Other::Unusual } else { Other::Foreign });
        }
        Ok(Location { source, destination, rest, protocol, l4: L2 + LENGTH, is_plain: true })
    }

    #[inline(always)]
    fn walk(ctx: &TcContext, l3: usize) -> Option<Walk<Self>> {
        let ip = packet::load::<Header>(ctx, l3)?;
        if ip.version_class_and_label.to_ne_bytes()[0] >> 4 != 6 {
            return None;
        }
        let Tail { rest, source, destination } = ip.tail;
        let mut walk = Walk {
            l3,
            location: Location { source, destination, rest, protocol: rest.protocol, l4: l3 + LENGTH, is_plain: false },
            fragment: Fragment::NONE,
            end: l3 + LENGTH + usize::from(u16::from_be(rest.payload_length)),
        };
        skip_extensions(ctx, &mut walk)?;
        Some(walk)
    }

    #[inline(always)]
    fn destination_of_chain(ctx: &TcContext, l3: usize) -> Option<Self::Addr> {
        packet::load(ctx, l3 + Self::TAIL + offset_of!(Tail, destination))
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        kind < FIRST_INFORMATION
    }

    #[inline(always)]
    fn read_behind<T: Copy, const L2: usize>(ctx: &impl Access) -> Option<T> {
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
    fn tail(rest: Rest, source: Addr, destination: Addr, _difference: u32) -> Tail {
        Tail { rest, source, destination }
    }

    #[inline(always)]
    fn one_hop_less(rest: Rest) -> Option<Rest> {
        if rest.hop_limit <= 1 { None } else { Some(Rest { hop_limit: rest.hop_limit - 1, ..rest }) }
    }

    #[inline(always)]
    fn routing<const L2: usize>(ctx: &TcContext, source: Addr, destination: Addr) -> Option<Routing> {
        let ip = ctx.read::<Header, L2>()?;
        let mut routing = redirect::NOWHERE;
        routing.family = AF_INET6;
        routing.__bindgen_anon_1.tot_len = length(ip.tail.rest);
        routing.__bindgen_anon_2.flowinfo = ip.version_class_and_label & CLASS_AND_LABEL;
        routing.__bindgen_anon_3.ipv6_src = source;
        routing.__bindgen_anon_4.ipv6_dst = destination;
        Some(routing)
    }

    #[inline(always)]
    fn length<const L2: usize>(_ctx: &TcContext, rest: Rest) -> Option<u16> {
        Some(length(rest))
    }

    #[inline(always)]
    fn next_hop(answer: &Routing) -> Option<Addr> {
        if answer.family != AF_INET6 {
            return None;
        }
        // SAFETY: all of this union is integers, and the kernel has filled in the next hop's address.
        Some(unsafe { answer.__bindgen_anon_4.ipv6_dst })
    }

    #[inline(always)]
    fn neighbour(ipv6_nh: Addr) -> bpf_redir_neigh {
        bpf_redir_neigh { nh_family: u32::from(AF_INET6), __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh } }
    }

    #[inline(always)]
    fn named(addr: Addr) -> Addr {
        if addr == [0; 4] { LOOPBACK } else { addr }
    }

    #[inline(always)]
    fn is_loopback(addr: Addr) -> bool {
        addr == LOOPBACK
    }
}

/// Bytes of a packet with its header.
#[inline(always)]
const fn length(rest: Rest) -> u16 {
    u16::from_be(rest.payload_length).saturating_add(LENGTH as u16)
}

// SPDX-License-Identifier: GPL-2.0-only
//! Rewrites packet headers. No other module translates a packet; [`crate::state::fragment_buffer`] and
//! [`crate::state::sctp_reassembly`] only overwrite a packet with a saved frame.
//!
//! A rewrite of TCP or UDP updates the transport checksum, `skb->csum` and, in IPv4, the IP header checksum. With
//! checksum offload, the transport checksum field contains only the sum of the pseudo-header, and hardware completes
//! the checksum. `__sk_buff` does not show whether a packet uses checksum offload. If the checksum field of a request
//! certainly contains a complete checksum, the program updates the field without the kernel's helper, because a rewrite
//! spends most of its time in helpers. For other packets, the helper updates the field for the new address. The program
//! then compares the new and the old value: the difference shows whether the field contains a complete checksum or a
//! pseudo-header sum ([`csum::field_kind`]).
//!
//! SCTP's checksum does not cover the addresses, so only a change of the ports changes the checksum. With checksum
//! offload, the SCTP checksum field is 0, and stays 0.

mod sctp;

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::generated::{bpf_csum_update, bpf_l4_csum_replace, bpf_skb_store_bytes},
    programs::TcContext,
};
use npl_common::{
    csum::{self, Field},
    mapping::protocol,
};

use crate::{
    base::{
        context::{Access, gso_size, load, skb},
        error::RewriteError,
    },
    net::{
        family::{HeaderChain, HeaderLayout, Headers},
        headers::{IcmpHeader, Ports, TcpHeader, UdpHeader},
        icmp::IcmpError,
        packet::Packet,
        sctp::SctpHeader,
    },
};

/// Values of the parameter `SIDE`, which states whether a rewrite changes the source address and port or the destination
/// address and port.
pub const SOURCE: bool = false;
pub const DESTINATION: bool = true;

/// A transport header that has ports and a checksum over the pseudo-header.
trait ChecksummedHeader: Copy {
    /// Offset of the checksum field in the header.
    const CHECK: usize;
    /// The flags for the helper `bpf_l4_csum_replace` that this transport protocol needs.
    const FLAGS: u64;

    fn check(&self) -> u16;
    /// Returns the length field of the transport header, which equals the length in the pseudo-header; `None` if the
    /// header has no length field.
    fn length(&self) -> Option<u16>;
    fn with(self, ports: Ports, check: u16) -> Self;
}

impl ChecksummedHeader for TcpHeader {
    const CHECK: usize = offset_of!(Self, check);
    const FLAGS: u64 = 0;

    #[inline(always)]
    fn check(&self) -> u16 {
        self.check
    }

    #[inline(always)]
    fn length(&self) -> Option<u16> {
        None
    }

    #[inline(always)]
    fn with(self, ports: Ports, check: u16) -> Self {
        Self { ports, check, ..self }
    }
}

impl ChecksummedHeader for UdpHeader {
    const CHECK: usize = offset_of!(Self, check);
    /// In UDP, a checksum field of 0 means "no checksum", so the helper writes a computed checksum of 0 as 0xffff.
    const FLAGS: u64 = BPF_F_MARK_MANGLED_0 as u64;

    #[inline(always)]
    fn check(&self) -> u16 {
        self.check
    }

    #[inline(always)]
    fn length(&self) -> Option<u16> {
        Some(u16::from_be(self.length))
    }

    #[inline(always)]
    fn with(self, ports: Ports, check: u16) -> Self {
        Self { ports, check, ..self }
    }
}

/// The end of the IP header ([`HeaderLayout::Tail`]) and the transport header. In a packet without IP options, the two
/// are adjacent in the packet, so the program rewrites both with one write.
#[repr(C)]
#[derive(Clone, Copy)]
struct Adjacent<T, H> {
    ip: T,
    transport: H,
}

/// Rewrites the source or destination address and port of a packet to `addr` and `port`, which are in network byte
/// order.
#[inline(always)]
pub fn apply<F: HeaderLayout, const SIDE: bool, const L2: usize, const FAST_PATH: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    match packet.headers.protocol {
        protocol::TCP => write::<F, TcpHeader, SIDE, L2, FAST_PATH>(ctx, packet, addr, port),
        protocol::SCTP if !FAST_PATH => sctp::write::<F, SIDE>(ctx, packet, addr, port),
        _ => write::<F, UdpHeader, SIDE, L2, FAST_PATH>(ctx, packet, addr, port),
    }
}

#[inline(always)]
fn write<F: HeaderLayout, H: ChecksummedHeader, const SIDE: bool, const L2: usize, const FAST_PATH: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    let header = packet.read_transport::<H, L2>(ctx).ok_or(RewriteError)?;
    let has_checksum = has_checksum(&header);
    let AddressChange { source, destination, ports, difference, port } = AddressChange::new::<SIDE>(packet, addr, port);
    let headers = &packet.headers;
    // In `skb->csum`, the change of the port and the change of the transport checksum add up to zero. In a UDP packet
    // without a checksum, only the port changes, so the kernel must update `skb->csum`.
    let flags = if has_checksum { F::STORE_FLAGS } else { u64::from(BPF_F_RECOMPUTE_CSUM) };
    let (offset, ip) = (packet.l3 + F::TAIL, F::tail(headers.ttl_fields, source, destination, difference));
    if !FAST_PATH {
        // The end of the IP header is written before the transport header, so that the compiler does not keep `ip` on
        // the stack.
        store(ctx, offset, &ip, flags)?;
    }
    let is_complete_checksum =
        FAST_PATH && SIDE == DESTINATION && has_checksum && is_complete_checksum::<F, H, L2>(ctx, headers, &header);
    let check = if is_complete_checksum {
        add_to_sum(ctx, F::sum_change::<L2>(ctx, headers.ttl_fields, difference));
        updated_checksum::<H>(header.check(), difference, port)
    } else if has_checksum {
        transport_check::<F, H, L2>(ctx, packet, header.check(), difference, port)?
    } else {
        header.check()
    };
    let transport = header.with(ports, check);
    if !FAST_PATH {
        return store(ctx, headers.l4, &transport, flags);
    }
    // The program writes requests directly, because a helper call costs as much as the rest of the program. The program
    // writes replies by a helper. If the reply program contained direct writes, the kernel would copy the headers of
    // every packet that a socket still references, even if the packet matches no mapping.
    let needs_no_sum = flags == 0 || is_complete_checksum;
    if SIDE == DESTINATION && needs_no_sum && F::write_tail::<_, L2>(ctx, Adjacent { ip, transport }) {
        return Ok(());
    }
    store(ctx, offset, &Adjacent { ip, transport }, flags)
}

/// Like [`apply`], but for the destination address and port of an XDP frame. The transport checksum must be complete,
/// as it is in frames that arrive at a network card.
#[inline(always)]
pub fn apply_to_frame<F: HeaderLayout, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    match packet.headers.protocol {
        protocol::TCP => write_to_frame::<F, TcpHeader, L2>(ctx, packet, addr, port),
        _ => write_to_frame::<F, UdpHeader, L2>(ctx, packet, addr, port),
    }
}

#[inline(always)]
fn write_to_frame<F: HeaderLayout, H: ChecksummedHeader, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    let header = packet.read_transport::<H, L2>(ctx).ok_or(RewriteError)?;
    let AddressChange { source, destination, ports, difference, port } =
        AddressChange::new::<DESTINATION>(packet, addr, port);
    let check =
        if has_checksum(&header) { updated_checksum::<H>(header.check(), difference, port) } else { header.check() };
    let ip = F::tail(packet.headers.ttl_fields, source, destination, difference);
    let is_written = F::write_tail::<_, L2>(ctx, Adjacent { ip, transport: header.with(ports, check) });
    if is_written { Ok(()) } else { Err(RewriteError) }
}

/// The addresses and ports of a packet after its rewrite, and the changes by which the checksums are updated.
struct AddressChange<F: HeaderLayout> {
    source: F::Addr,
    destination: F::Addr,
    ports: Ports,
    difference: u32,
    /// The value of the rewritten port before and after the rewrite.
    port: (u16, u16),
}

impl<F: HeaderLayout> AddressChange<F> {
    #[inline(always)]
    fn new<const SIDE: bool>(packet: &Packet<F>, addr: F::Addr, port: u16) -> Self {
        let (headers, old) = (&packet.headers, packet.ports);
        if SIDE == SOURCE {
            let (source, destination, ports) = (addr, headers.destination, Ports { source: port, ..old });
            let difference = F::difference(headers.source, addr);
            Self { source, destination, ports, difference, port: (old.source, port) }
        } else {
            let (source, destination, ports) = (headers.source, addr, Ports { destination: port, ..old });
            let difference = F::difference(headers.destination, addr);
            Self { source, destination, ports, difference, port: (old.destination, port) }
        }
    }
}

/// Returns whether the packet has a transport checksum. In UDP, a checksum field of 0 means that the packet has no
/// checksum.
#[inline(always)]
fn has_checksum<H: ChecksummedHeader>(header: &H) -> bool {
    H::FLAGS & u64::from(BPF_F_MARK_MANGLED_0) == 0 || header.check() != 0
}

/// Updates a complete transport checksum for the change of the address (`difference`) and the change of the port
/// (`port`: before, after).
#[inline(always)]
fn updated_checksum<H: ChecksummedHeader>(check: u16, difference: u32, port: (u16, u16)) -> u16 {
    let check = !csum::fold(u32::from(!check) + difference);
    as_transmitted::<H>(csum::replace16(check, port.0, port.1))
}

/// Rewrites the source or destination address of a later fragment, which has no ports.
#[inline(always)]
pub fn apply_address<F: HeaderLayout, const SIDE: bool>(
    ctx: &TcContext,
    chain: &HeaderChain<F>,
    addr: F::Addr,
) -> Result<(), RewriteError> {
    write_address::<F, SIDE>(ctx, chain.l3, &chain.headers, addr)
}

#[inline(always)]
fn write_address<F: HeaderLayout, const SIDE: bool>(
    ctx: &TcContext,
    l3: usize,
    headers: &Headers<F>,
    addr: F::Addr,
) -> Result<(), RewriteError> {
    let (old, source, destination) = if SIDE == SOURCE {
        (headers.source, addr, headers.destination)
    } else {
        (headers.destination, headers.source, addr)
    };
    let tail = F::tail(headers.ttl_fields, source, destination, F::difference(old, addr));
    store(ctx, l3 + F::TAIL, &tail, F::STORE_FLAGS)
}

/// Translates an ICMP error: the source or destination in the error's IP header, and the opposite address and port in
/// the quoted packet. `addr` and `port` are in network byte order.
///
/// In the ICMP checksum of IPv4, the change of the quoted address and the change of the quoted IP header checksum add
/// up to zero, so the program adds neither change.
#[inline(always)]
pub fn apply_error<F: HeaderLayout, const SIDE: bool>(
    ctx: &TcContext,
    error: &IcmpError<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    let (outer, quoted) = (&error.outer.headers, &error.quote.headers);
    let ports = error.quote.ports;
    let (outer_addr, source, destination) =
        if SIDE == SOURCE { (outer.source, addr, outer.destination) } else { (outer.destination, outer.source, addr) };
    let (quoted_addr, quoted_source, quoted_destination) = if SIDE == SOURCE {
        (quoted.destination, quoted.source, addr)
    } else {
        (quoted.source, addr, quoted.destination)
    };
    let (quoted_port, quoted_ports) = if SIDE == SOURCE {
        (ports.destination, Ports { destination: port, ..ports })
    } else {
        (ports.source, Ports { source: port, ..ports })
    };
    let difference = F::difference(outer_addr, addr);
    let quoted_difference = F::difference(quoted_addr, addr);
    let mut check = csum::replace16(error.header.check, quoted_port, port);
    if F::ICMP_COVERS_ADDRESSES {
        check = !csum::fold(u32::from(!check) + difference);
        check = !csum::fold(u32::from(!check) + quoted_difference);
    }
    let covered = u64::from(BPF_F_RECOMPUTE_CSUM);
    if quoted.protocol == protocol::SCTP {
        if let Some((before, after)) = sctp::quoted_check(ctx, error, quoted_ports) {
            check = csum::replace32(check, before, after);
            store(ctx, quoted.l4 + offset_of!(SctpHeader, check), &after, covered)?;
        }
    } else if let Some((offset, before)) = quoted_check(ctx, error) {
        let after = !csum::fold(u32::from(!before) + quoted_difference);
        let after = csum::replace16(after, quoted_port, port);
        let after = if quoted.protocol == protocol::UDP { as_transmitted::<UdpHeader>(after) } else { after };
        check = csum::replace16(check, before, after);
        store(ctx, offset, &after, covered)?;
    }
    let tail = F::tail(outer.ttl_fields, source, destination, difference);
    store(ctx, error.outer.l3 + F::TAIL, &tail, covered)?;
    store(ctx, outer.l4 + offset_of!(IcmpHeader, check), &check, covered)?;
    let tail = F::tail(quoted.ttl_fields, quoted_source, quoted_destination, quoted_difference);
    store(ctx, error.quote.l3 + F::TAIL, &tail, covered)?;
    store(ctx, quoted.l4, &quoted_ports, covered)
}

/// Returns the offset and value of the quoted transport checksum. `None` if the quoted packet has no checksum, or if
/// the quote ends before the checksum.
#[inline(always)]
fn quoted_check<F: HeaderLayout>(ctx: &TcContext, error: &IcmpError<F>) -> Option<(usize, u16)> {
    let headers = &error.quote.headers;
    let is_tcp = headers.protocol == protocol::TCP;
    let offset = headers.l4 + if is_tcp { TcpHeader::CHECK } else { UdpHeader::CHECK };
    if offset + size_of::<u16>() > error.outer.end {
        return None;
    }
    let check = load::<u16>(ctx, offset)?;
    // In UDP, a checksum field of 0 means that the packet has no checksum.
    if check == 0 && !is_tcp { None } else { Some((offset, check)) }
}

/// Returns whether the transport checksum field certainly contains a complete checksum. With checksum offload, the
/// field contains the pseudo-header sum, so a field with any other value contains a complete checksum. Returns `false`
/// for a GSO packet, because the program does not know the length in the pseudo-header of a GSO packet.
///
/// One complete checksum in 65 535 equals the pseudo-header sum by chance; the kernel's helper then updates the field.
#[inline(always)]
fn is_complete_checksum<F: HeaderLayout, H: ChecksummedHeader, const L2: usize>(
    ctx: &TcContext,
    headers: &Headers<F>,
    header: &H,
) -> bool {
    if gso_size(ctx) != 0 {
        return false;
    }
    let of_packet =
        || F::packet_length::<L2>(ctx, headers.ttl_fields).map(|length| length.wrapping_sub(F::LENGTH as u16));
    let Some(length) = header.length().or_else(of_packet) else { return false };
    let ends = F::sum(headers.source) + F::sum(headers.destination);
    !csum::same(header.check(), csum::pseudo_header(ends, headers.protocol, length))
}

/// Adds `summand` to `skb->csum`, if the device has stored the sum of the packet's bytes in `skb->csum`
/// (`CHECKSUM_COMPLETE`).
#[inline(always)]
fn add_to_sum(ctx: &TcContext, summand: u16) {
    if summand == 0 {
        return;
    }
    // SAFETY: the context is valid, and the helper changes no packet byte.
    let _sum_or_none = unsafe { bpf_csum_update(skb(ctx), u32::from(summand)) };
}

/// Returns the value of the transport checksum field after the rewrite. The kernel's helper updates the field for the
/// new address.
#[inline(always)]
fn transport_check<F: HeaderLayout, H: ChecksummedHeader, const L2: usize>(
    ctx: &TcContext,
    packet: &Packet<F>,
    before: u16,
    difference: u32,
    port: (u16, u16),
) -> Result<u16, RewriteError> {
    let offset = (packet.headers.l4 + H::CHECK) as u32;
    change(ctx, offset, 0, u64::from(difference), H::FLAGS | u64::from(BPF_F_PSEUDO_HDR))?;
    let after = packet.read_transport::<H, L2>(ctx).ok_or(RewriteError)?.check();
    match csum::field_kind(before, after, difference) {
        Some(Field::Checksum) => Ok(as_transmitted::<H>(csum::replace16(after, port.0, port.1))),
        // The field contains the pseudo-header sum, which does not cover the ports; hardware adds the ports.
        Some(Field::PseudoHeader) => Ok(after),
        // The old and the new address have the same sum, so the helper's result does not show what the field contains.
        // The program therefore calls the helper again, for the change of the port.
        None => {
            change(ctx, offset, u64::from(port.0), u64::from(port.1), H::FLAGS | size_of::<u16>() as u64)?;
            packet.read_transport::<H, L2>(ctx).map(|header| header.check()).ok_or(RewriteError)
        }
    }
}

/// Returns the value of the checksum field for a computed checksum: UDP sends a computed checksum of 0 as 0xffff.
#[inline(always)]
const fn as_transmitted<H: ChecksummedHeader>(check: u16) -> u16 {
    if check == 0 && H::FLAGS & BPF_F_MARK_MANGLED_0 as u64 != 0 { 0xffff } else { check }
}

/// Updates the transport checksum with the helper `bpf_l4_csum_replace`.
#[inline(always)]
fn change(ctx: &TcContext, offset: u32, from: u64, to: u64, flags: u64) -> Result<(), RewriteError> {
    // SAFETY: the context is valid, and the program holds no pointer into the packet, which the helper may move.
    let status = unsafe { bpf_l4_csum_replace(skb(ctx), offset, from, to, flags) };
    if status == 0 { Ok(()) } else { Err(RewriteError) }
}

#[inline(always)]
fn store<T>(ctx: &TcContext, offset: usize, value: &T, flags: u64) -> Result<(), RewriteError> {
    let from = core::ptr::from_ref(value).cast();
    // SAFETY: the context is valid, `value` is on the stack, and the program holds no pointer into the packet, which
    // the helper may move.
    let status = unsafe { bpf_skb_store_bytes(skb(ctx), offset as u32, from, size_of::<T>() as u32, flags) };
    if status == 0 { Ok(()) } else { Err(RewriteError) }
}

// SPDX-License-Identifier: GPL-2.0-only
//! The one place that writes packet bytes.
//!
//! Of TCP and UDP, three checksums have to stay right: the IP header's, the transport's, and the kernel's own idea of either
//! (`skb->csum` and `skb->ip_summed`). Only the kernel knows whether the transport field holds a checksum or, with
//! offload, the sum of the pseudo-header that hardware completes. Of a request whose field is no such sum, it is known
//! without the kernel; elsewhere the kernel's helper changes it for the new address, and what came out tells which it was
//! (`csum::field_kind`). Calls are what a rewrite costs.
//!
//! SCTP's covers no address, and with offload its field is zero.

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
    family::{Family, Location, Walk},
    icmp::Error,
    packet::{Access, IcmpHeader, Packet, Ports, TcpHeader, UdpHeader, load, skb},
    sctp::SctpHeader,
};

/// The kernel refused a write; the packet may be half rewritten.
pub struct Refused;

/// The ends of a packet.
pub const SOURCE: bool = false;
pub const DESTINATION: bool = true;

/// A transport header that has ports and a checksum over the pseudo-header.
trait Checked: Copy {
    /// Offset of the checksum.
    const CHECK: usize;
    /// What the kernel's helper has to know of the protocol.
    const FLAGS: u64;

    fn check(&self) -> u16;
    /// How long its pseudo-header says that it is, with what follows it, if that is not for the IP header to say.
    fn length(&self) -> Option<u16>;
    fn with(self, ports: Ports, check: u16) -> Self;
}

impl Checked for TcpHeader {
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

impl Checked for UdpHeader {
    const CHECK: usize = offset_of!(Self, check);
    /// A checksum that comes out as zero would mean "none": the kernel writes its other form.
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

/// The end of the IP header and the transport header, which follows at once where there are no options.
#[repr(C)]
#[derive(Clone, Copy)]
struct Headers<T, H> {
    ip: T,
    transport: H,
}

/// Gives one end of the packet another address and port. Words as loaded from a packet.
#[inline(always)]
pub fn apply<F: Family, const END: bool, const L2: usize, const IS_PLAIN: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    match packet.location.protocol {
        protocol::TCP => write::<F, TcpHeader, END, L2, IS_PLAIN>(ctx, packet, addr, port),
        protocol::SCTP if !IS_PLAIN => sctp::write::<F, END>(ctx, packet, addr, port),
        _ => write::<F, UdpHeader, END, L2, IS_PLAIN>(ctx, packet, addr, port),
    }
}

#[inline(always)]
fn write<F: Family, H: Checked, const END: bool, const L2: usize, const IS_PLAIN: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    let header = packet.read_transport::<H, L2>(ctx).ok_or(Refused)?;
    let has_checksum = has_checksum(&header);
    let Change { source, destination, ports, difference, port } = Change::new::<END>(packet, addr, port);
    let location = &packet.location;
    // In `skb->csum` the port and the transport checksum cancel out. A port that no checksum covers does not, so the
    // kernel has to add up what is written.
    let flags = if has_checksum { F::STORE_FLAGS } else { u64::from(BPF_F_RECOMPUTE_CSUM) };
    let (offset, ip) = (packet.l3 + F::TAIL, F::tail(location.rest, source, destination, difference));
    if !IS_PLAIN {
        // At once, so that it does not wait on the stack.
        store(ctx, offset, &ip, flags)?;
    }
    let is_certain = IS_PLAIN && END == DESTINATION && has_checksum && is_certain::<F, H, L2>(ctx, location, &header);
    let check = if is_certain {
        if F::STORE_FLAGS == 0 {
            // What the kernel's sum loses with the checksum. The address is made up for by the header's own.
            add_to_sum(ctx, !csum::fold(difference));
        }
        moved::<H>(header.check(), difference, port)
    } else if has_checksum {
        transport_check::<F, H, L2>(ctx, packet, header.check(), difference, port)?
    } else {
        header.check()
    };
    let transport = header.with(ports, check);
    if !IS_PLAIN {
        return store(ctx, location.l4, &transport, flags);
    }
    // A request is written to at once, since a call costs as much as all that is decided of it. Replies are not: that
    // a program has such writes makes the kernel copy what it shares with a socket, also of packets that are not ours.
    let needs_no_sum = flags == 0 || is_certain;
    if END == DESTINATION && needs_no_sum && F::write_tail::<_, L2>(ctx, Headers { ip, transport }) {
        return Ok(());
    }
    store(ctx, offset, &Headers { ip, transport }, flags)
}

/// As [`apply`], of the destination of a frame that no `skb` speaks of yet: its checksums are in it, or nowhere.
#[inline(always)]
pub fn apply_to_frame<F: Family, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    match packet.location.protocol {
        protocol::TCP => write_to_frame::<F, TcpHeader, L2>(ctx, packet, addr, port),
        _ => write_to_frame::<F, UdpHeader, L2>(ctx, packet, addr, port),
    }
}

#[inline(always)]
fn write_to_frame<F: Family, H: Checked, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    let header = packet.read_transport::<H, L2>(ctx).ok_or(Refused)?;
    let Change { source, destination, ports, difference, port } = Change::new::<DESTINATION>(packet, addr, port);
    let check = if has_checksum(&header) { moved::<H>(header.check(), difference, port) } else { header.check() };
    let ip = F::tail(packet.location.rest, source, destination, difference);
    let is_written = F::write_tail::<_, L2>(ctx, Headers { ip, transport: header.with(ports, check) });
    if is_written { Ok(()) } else { Err(Refused) }
}

/// What a packet's ends become, and by how much the sums over them change.
struct Change<F: Family> {
    source: F::Addr,
    destination: F::Addr,
    ports: Ports,
    difference: u32,
    /// The port that changes, before and after.
    port: (u16, u16),
}

impl<F: Family> Change<F> {
    #[inline(always)]
    fn new<const END: bool>(packet: &Packet<F>, addr: F::Addr, port: u16) -> Self {
        let (location, old) = (&packet.location, packet.ports);
        if END == SOURCE {
            let (source, destination, ports) = (addr, location.destination, Ports { source: port, ..old });
            let difference = F::difference(location.source, addr);
            Self { source, destination, ports, difference, port: (old.source, port) }
        } else {
            let (source, destination, ports) = (location.source, addr, Ports { destination: port, ..old });
            let difference = F::difference(location.destination, addr);
            Self { source, destination, ports, difference, port: (old.destination, port) }
        }
    }
}

/// A datagram may go without a checksum, and then gets none.
#[inline(always)]
fn has_checksum<H: Checked>(header: &H) -> bool {
    H::FLAGS & u64::from(BPF_F_MARK_MANGLED_0) == 0 || header.check() != 0
}

/// A transport checksum for another address and port.
#[inline(always)]
fn moved<H: Checked>(check: u16, difference: u32, port: (u16, u16)) -> u16 {
    let check = !csum::fold(u32::from(!check) + difference);
    finished::<H>(csum::replace16(check, port.0, port.1))
}

/// Gives one end of a packet that has no transport header another address.
#[inline(always)]
pub fn apply_address<F: Family, const END: bool>(
    ctx: &TcContext,
    walk: &Walk<F>,
    addr: F::Addr,
) -> Result<(), Refused> {
    write_address::<F, END>(ctx, walk.l3, &walk.location, addr)
}

#[inline(always)]
fn write_address<F: Family, const END: bool>(
    ctx: &TcContext,
    l3: usize,
    location: &Location<F>,
    addr: F::Addr,
) -> Result<(), Refused> {
    let (old, source, destination) = if END == SOURCE {
        (location.source, addr, location.destination)
    } else {
        (location.destination, location.source, addr)
    };
    let tail = F::tail(location.rest, source, destination, F::difference(old, addr));
    store(ctx, l3 + F::TAIL, &tail, F::STORE_FLAGS)
}

/// Turns an ICMP error that names one side of a translation into one that names the other: the address that it goes to
/// or comes from, and the opposite end of the packet that it quotes. Words as loaded from a packet.
///
/// In IPv4, the quoted header's own checksum makes up for the address; ICMP's then changes by the rest.
#[inline(always)]
pub fn apply_error<F: Family, const END: bool>(
    ctx: &TcContext,
    error: &Error<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    let (outer, quoted) = (&error.outer.location, &error.quote.location);
    let ports = error.quote.ports;
    let (outer_addr, source, destination) =
        if END == SOURCE { (outer.source, addr, outer.destination) } else { (outer.destination, outer.source, addr) };
    let (quoted_addr, quoted_source, quoted_destination) = if END == SOURCE {
        (quoted.destination, quoted.source, addr)
    } else {
        (quoted.source, addr, quoted.destination)
    };
    let (quoted_port, quoted_ports) = if END == SOURCE {
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
        let after = if quoted.protocol == protocol::UDP { finished::<UdpHeader>(after) } else { after };
        check = csum::replace16(check, before, after);
        store(ctx, offset, &after, covered)?;
    }
    let tail = F::tail(outer.rest, source, destination, difference);
    store(ctx, error.outer.l3 + F::TAIL, &tail, covered)?;
    store(ctx, outer.l4 + offset_of!(IcmpHeader, check), &check, covered)?;
    let tail = F::tail(quoted.rest, quoted_source, quoted_destination, quoted_difference);
    store(ctx, error.quote.l3 + F::TAIL, &tail, covered)?;
    store(ctx, quoted.l4, &quoted_ports, covered)
}

/// Where a quoted packet's transport checksum is and what it says, if it has one and the quote is long enough.
#[inline(always)]
fn quoted_check<F: Family>(ctx: &TcContext, error: &Error<F>) -> Option<(usize, u16)> {
    let location = &error.quote.location;
    let is_tcp = location.protocol == protocol::TCP;
    let offset = location.l4 + if is_tcp { TcpHeader::CHECK } else { UdpHeader::CHECK };
    if offset + size_of::<u16>() > error.outer.end {
        return None;
    }
    let check = load::<u16>(ctx, offset)?;
    // A datagram may go without a checksum, and then gets none.
    if check == 0 && !is_tcp { None } else { Some((offset, check)) }
}

/// Whether the transport's field is a checksum, and that is certain: it is not the sum that hardware would complete, which a
/// sender who leaves it to hardware has to put there. Of a large packet, which will be cut, nobody says how long that is.
///
/// Of the checksums themselves, one in 65 535 is the same number, and is for the kernel to tell.
#[inline(always)]
fn is_certain<F: Family, H: Checked, const L2: usize>(ctx: &TcContext, location: &Location<F>, header: &H) -> bool {
    // SAFETY: the context is valid for the program's run; the verifier allows this field.
    if unsafe { (*skb(ctx)).gso_size } != 0 {
        return false;
    }
    let of_packet = || F::length::<L2>(ctx, location.rest).map(|length| length.wrapping_sub(F::LENGTH as u16));
    let Some(length) = header.length().or_else(of_packet) else { return false };
    let ends = F::sum(location.source) + F::sum(location.destination);
    !csum::same(header.check(), csum::pseudo_header(ends, location.protocol, length))
}

/// Adds to the sum that a device has made of the packet, if it has.
#[inline(always)]
fn add_to_sum(ctx: &TcContext, summand: u16) {
    // SAFETY: the context is valid.
    let _sum_or_none = unsafe { bpf_csum_update(skb(ctx), u32::from(summand)) };
}

/// The transport checksum field for another address and port, of which the kernel does its part for the address.
#[inline(always)]
fn transport_check<F: Family, H: Checked, const L2: usize>(
    ctx: &TcContext,
    packet: &Packet<F>,
    before: u16,
    difference: u32,
    port: (u16, u16),
) -> Result<u16, Refused> {
    let offset = (packet.location.l4 + H::CHECK) as u32;
    change(ctx, offset, 0, u64::from(difference), H::FLAGS | u64::from(BPF_F_PSEUDO_HDR))?;
    let after = packet.read_transport::<H, L2>(ctx).ok_or(Refused)?.check();
    match csum::field_kind(before, after, difference) {
        Some(Field::Checksum) => Ok(finished::<H>(csum::replace16(after, port.0, port.1))),
        // Hardware adds the ports up.
        Some(Field::PseudoHeader) => Ok(after),
        // The addresses' sums are the same, as one pair of 65 535 is: only the kernel knows.
        None => {
            change(ctx, offset, u64::from(port.0), u64::from(port.1), H::FLAGS | size_of::<u16>() as u64)?;
            packet.read_transport::<H, L2>(ctx).map(|header| header.check()).ok_or(Refused)
        }
    }
}

/// A checksum as it is sent.
#[inline(always)]
const fn finished<H: Checked>(check: u16) -> u16 {
    if check == 0 && H::FLAGS & BPF_F_MARK_MANGLED_0 as u64 != 0 { 0xffff } else { check }
}

/// Lets the kernel change the transport checksum.
#[inline(always)]
fn change(ctx: &TcContext, offset: u32, from: u64, to: u64, flags: u64) -> Result<(), Refused> {
    // SAFETY: the context is valid, and no pointer into the packet is held.
    let status = unsafe { bpf_l4_csum_replace(skb(ctx), offset, from, to, flags) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

#[inline(always)]
fn store<T>(ctx: &TcContext, offset: usize, value: &T, flags: u64) -> Result<(), Refused> {
    let from = core::ptr::from_ref(value).cast();
    // SAFETY: the context is valid, `value` is on the stack, and no pointer into the packet is held.
    let status = unsafe { bpf_skb_store_bytes(skb(ctx), offset as u32, from, size_of::<T>() as u32, flags) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

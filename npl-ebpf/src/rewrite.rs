// SPDX-License-Identifier: GPL-2.0-only
//! The one place that writes packet bytes.
//!
//! Three checksums have to stay right: the IP header's, the transport's, and the kernel's own idea of either
//! (`skb->csum` and `skb->ip_summed`). Only the kernel's helper knows whether the transport field holds a checksum or,
//! with offload, the sum of the pseudo-header that hardware completes; so the transport's is always changed by it.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::generated::{bpf_l4_csum_replace, bpf_skb_store_bytes},
    programs::TcContext,
};
use npl_common::{csum, mapping::protocol};

use crate::packet::{Ipv4Header, PacketV4, Ports, Transport, skb};

/// The kernel refused a write; the packet may be half rewritten.
pub struct Refused;

/// Which end of a packet is rewritten.
#[derive(Clone, Copy)]
enum End {
    Source,
    Destination,
}

/// Sends the packet to another address and port. Words as loaded from a packet.
#[inline(always)]
pub fn destination(
    ctx: &TcContext,
    packet: &PacketV4,
    transport: Transport,
    addr: u32,
    port: u16,
) -> Result<(), Refused> {
    rewrite(ctx, packet, transport, End::Destination, addr, port)
}

/// Lets the packet come from another address and port. Words as loaded from a packet.
#[inline(always)]
pub fn source(ctx: &TcContext, packet: &PacketV4, transport: Transport, addr: u32, port: u16) -> Result<(), Refused> {
    rewrite(ctx, packet, transport, End::Source, addr, port)
}

/// The IP header from its checksum on.
#[repr(C)]
#[derive(Clone, Copy)]
struct CheckAndAddresses {
    check: u16,
    source: [u16; 2],
    destination: [u16; 2],
}

/// The same and the ports, which follow at once where there are no IP options.
#[repr(C)]
struct CheckToPorts {
    header: CheckAndAddresses,
    ports: Ports,
}

const _: () = assert!(
    offset_of!(CheckAndAddresses, destination) == offset_of!(Ipv4Header, destination) - offset_of!(Ipv4Header, check)
        && offset_of!(CheckToPorts, ports) == size_of::<Ipv4Header>() - offset_of!(Ipv4Header, check),
    "what is stored lies in the packet as it does here"
);

#[inline(always)]
fn rewrite(
    ctx: &TcContext,
    packet: &PacketV4,
    transport: Transport,
    end: End,
    addr: u32,
    port: u16,
) -> Result<(), Refused> {
    let (ip, ports) = (&packet.ip, &packet.ports);
    let (old_addr, old_port) = match end {
        End::Source => (ip.source, ports.source),
        End::Destination => (ip.destination, ports.destination),
    };
    if transport.has_checksum {
        transport_checksum(ctx, packet, (old_addr, addr), (old_port, port))?;
    }
    let (source, destination, ports) = match end {
        End::Source => (addr, ip.destination, Ports { source: port, ..*ports }),
        End::Destination => (ip.source, addr, Ports { destination: port, ..*ports }),
    };
    let header = CheckAndAddresses {
        check: csum::replace32(ip.check, old_addr, addr),
        source: halves(source),
        destination: halves(destination),
    };
    // In `skb->csum` the header's checksum and address cancel out, and so do the port and the transport checksum. A port
    // that no checksum covers does not, so the kernel has to add up what is written.
    let flags = if transport.has_checksum { 0 } else { u64::from(BPF_F_RECOMPUTE_CSUM) };
    let check_offset = packet.l3 + offset_of!(Ipv4Header, check);
    if packet.has_options() {
        store(ctx, check_offset, &header, flags)?;
        store(ctx, packet.l4, &ports, flags)
    } else {
        store(ctx, check_offset, &CheckToPorts { header, ports }, flags)
    }
}

#[inline(always)]
fn transport_checksum(ctx: &TcContext, packet: &PacketV4, addr: (u32, u32), port: (u16, u16)) -> Result<(), Refused> {
    // A UDP checksum that comes out as zero would mean "none": the kernel writes its other form.
    let flags = if packet.ip.protocol == protocol::UDP { u64::from(BPF_F_MARK_MANGLED_0) } else { 0 };
    let offset = packet.check_offset();
    let pseudo_header = flags | u64::from(BPF_F_PSEUDO_HDR);
    replace::<u32>(ctx, offset, u64::from(addr.0), u64::from(addr.1), pseudo_header)?;
    replace::<u16>(ctx, offset, u64::from(port.0), u64::from(port.1), flags)
}

/// Tells the kernel that a word of `size_of::<T>()` bytes under the transport checksum changed.
#[inline(always)]
fn replace<T>(ctx: &TcContext, offset: u32, old: u64, new: u64, flags: u64) -> Result<(), Refused> {
    // SAFETY: the context is valid, and no pointer into the packet is held.
    let status = unsafe { bpf_l4_csum_replace(skb(ctx), offset, old, new, flags | size_of::<T>() as u64) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

#[inline(always)]
fn store<T>(ctx: &TcContext, offset: usize, value: &T, flags: u64) -> Result<(), Refused> {
    let from = core::ptr::from_ref(value).cast();
    // SAFETY: the context is valid, `value` is on the stack, and no pointer into the packet is held.
    let status = unsafe { bpf_skb_store_bytes(skb(ctx), offset as u32, from, size_of::<T>() as u32, flags) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

/// A word as two halves in memory order, so that it can follow a 16-bit field without padding.
#[inline(always)]
fn halves(word: u32) -> [u16; 2] {
    let [a, b, c, d] = word.to_ne_bytes();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
}

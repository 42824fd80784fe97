// SPDX-License-Identifier: GPL-2.0-only
//! Rewrites SCTP packets. SCTP's checksum is a CRC of the whole packet; the program updates the CRC incrementally for
//! the new ports.

use aya_ebpf::{bindings::BPF_F_RECOMPUTE_CSUM, programs::TcContext};
use npl_common::crc;

use super::{SOURCE, store, write_address};
use crate::{
    base::{context::load, error::RewriteError, maps::CRC},
    net::{family::HeaderLayout, headers::Ports, icmp::IcmpError, packet::Packet, sctp::SctpHeader},
};

/// Like [`write()`](super::write), but for an SCTP packet.
#[inline(always)]
pub(super) fn write<F: HeaderLayout, const SIDE: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), RewriteError> {
    let header = load::<SctpHeader>(ctx, packet.headers.l4).ok_or(RewriteError)?;
    let old = packet.ports;
    let ports = if SIDE == SOURCE { Ports { source: port, ..old } } else { Ports { destination: port, ..old } };
    let check = sctp_check(
        header.check,
        old.as_u32(),
        ports.as_u32(),
        packet.end.ok_or(RewriteError)?.get() - packet.headers.l4,
    );
    write_address::<F, SIDE>(ctx, packet.l3, &packet.headers, addr)?;
    // In `skb->csum`, the change of the CRC and the change of the ports do not add up to zero, so the kernel must
    // update `skb->csum`.
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    store(ctx, packet.headers.l4, &SctpHeader { ports, check, ..header }, flags)
}

/// Returns the SCTP checksum of the quoted packet before and after the change of the ports; `None` if the quote ends
/// before the end of the checksum, or if the length of the quoted SCTP datagram is unknown. The CRC covers the whole
/// SCTP packet, so the program needs the packet's length from the quoted IP header.
#[inline(always)]
pub(super) fn quoted_check<F: HeaderLayout>(ctx: &TcContext, error: &IcmpError<F>, ports: Ports) -> Option<(u32, u32)> {
    let quote = &error.quote;
    let (l4, end) = (quote.headers.l4, quote.end?.get());
    if l4 + size_of::<SctpHeader>() > error.outer.end || l4 > end {
        return None;
    }
    let before = load::<SctpHeader>(ctx, l4)?.check;
    Some((before, sctp_check(before, quote.ports.as_u32(), ports.as_u32(), end - l4)))
}

/// Returns the SCTP checksum after a change of the ports. A checksum of 0 stays 0, because the value 0 means that
/// hardware will compute the checksum. One computed checksum in 2^32 is 0 by chance: this checksum also stays 0, and
/// the receiver drops the packet as corrupt.
#[inline(always)]
fn sctp_check(check: u32, ports: u32, new_ports: u32, length: usize) -> u32 {
    if check == 0 { 0 } else { crc::replace_ports(check, ports, new_ports, length as u16, times_element) }
}

/// Returns the product of a polynomial and an element of the CRC table. Every index has an element, so the default of 0
/// is never used, but the verifier requires a check of each look-up.
#[inline(never)]
fn times_element(polynomial: u32, index: u32) -> u32 {
    crc::times_element(polynomial, index, |index| CRC.get(index).copied().unwrap_or(0))
}

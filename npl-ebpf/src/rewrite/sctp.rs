// SPDX-License-Identifier: GPL-2.0-only
//! SCTP: its checksum is a CRC of the packet, which is changed with the ports and never computed anew.

use aya_ebpf::{bindings::BPF_F_RECOMPUTE_CSUM, programs::TcContext};
use npl_common::crc;

use super::{Refused, SOURCE, store, write_address};
use crate::{
    family::Family,
    icmp::Error,
    maps::CRC,
    packet::{Packet, Ports, load},
    sctp::SctpHeader,
};

/// As [`write()`](super::write), of an SCTP packet, which is whole.
#[inline(always)]
pub(super) fn write<F: Family, const END: bool>(
    ctx: &TcContext,
    packet: &Packet<F>,
    addr: F::Addr,
    port: u16,
) -> Result<(), Refused> {
    let header = load::<SctpHeader>(ctx, packet.location.l4).ok_or(Refused)?;
    let old = packet.ports;
    let ports = if END == SOURCE { Ports { source: port, ..old } } else { Ports { destination: port, ..old } };
    let check =
        sctp_check(header.check, old.word(), ports.word(), packet.end.ok_or(Refused)?.get() - packet.location.l4);
    write_address::<F, END>(ctx, packet.l3, &packet.location, addr)?;
    // A CRC does not cancel out in a sum.
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    store(ctx, packet.location.l4, &SctpHeader { ports, check, ..header }, flags)
}

/// What a quoted SCTP packet's checksum says, and what it has to say for other ports, if the quote is long enough: how
/// long the packet was is quoted too.
#[inline(always)]
pub(super) fn quoted_check<F: Family>(ctx: &TcContext, error: &Error<F>, ports: Ports) -> Option<(u32, u32)> {
    let quote = &error.quote;
    let (l4, end) = (quote.location.l4, quote.end?.get());
    if l4 + size_of::<SctpHeader>() > error.outer.end || l4 > end {
        return None;
    }
    let before = load::<SctpHeader>(ctx, l4)?.check;
    Some((before, sctp_check(before, quote.ports.word(), ports.word(), end - l4)))
}

/// SCTP's checksum for other ports. One that is left to hardware is zero and stays so; of those that are right, one in
/// four thousand million is, and is then lost as a packet on the wire may be.
#[inline(always)]
fn sctp_check(check: u32, ports: u32, new_ports: u32, length: usize) -> u32 {
    if check == 0 { 0 } else { crc::replace_ports(check, ports, new_ports, length as u16, times_element) }
}

/// Every index has an element. A checksum that stayed as it is for want of one would be wrong, and the packet lost.
#[inline(never)]
fn times_element(polynomial: u32, index: u32) -> u32 {
    crc::times_element(polynomial, index, |index| CRC.get(index).copied()).unwrap_or(0)
}

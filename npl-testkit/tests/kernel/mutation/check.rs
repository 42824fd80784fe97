// SPDX-License-Identifier: Apache-2.0
//! Compares a translated frame with the original frame: only the fields of the translation may differ, and each
//! checksum must be as right or as wrong as before.

use std::net::IpAddr;

use npl_testkit::packet::protocol_number::{SCTP, TCP, UDP};

use super::headers::{Chain, ICMP_HEADER, Part, bytes, word};
use super::oracle::{Change, Side, Target};
use super::scene::{ROUTER_MAC, UPLINK_MAC};

/// Returns the sum of an Internet checksum over parts of even length, modulo 65535.
fn sum(parts: &[&[u8]]) -> u64 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let value = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or_default());
    words.map(value).sum::<u64>() % 0xffff
}

/// Checks a translated frame. `is_hop` says that the TTL must be decremented.
pub(super) fn check(before: &[u8], after: &[u8], chain: &Chain, target: &Target, is_hop: bool) -> Result<(), String> {
    let mut expected = before.to_vec();
    let has_new_mac = after[..12] == [ROUTER_MAC, UPLINK_MAC].concat();
    if is_hop && has_new_mac && target.side == Side::Source {
        expected[..12].copy_from_slice(&after[..12]);
    }
    readdress(&mut expected, chain, target.side, target.to.ip());
    if is_hop {
        expected[chain.ttl_at()] = before[chain.ttl_at()].checked_sub(1).ok_or("the TTL was 0")?;
    }
    let mut changed_checks: Vec<_> = ipv4_check(chain).into_iter().collect();
    match &target.change {
        Change::Packet => {
            write_port(&mut expected, chain, target.side, target.to.port());
            changed_checks.extend(transport_check(chain));
        }
        Change::Fragment => {}
        Change::Error { quote } => {
            let opposite = opposite(target.side);
            readdress(&mut expected, quote, opposite, target.to.ip());
            write_port(&mut expected, quote, opposite, target.to.port());
            changed_checks.extend(ipv4_check(quote));
            let check = transport_check(quote).filter(|field| field.end <= chain.end && field.end <= before.len());
            changed_checks.extend(check);
            changed_checks.push(chain.l4 + 2..chain.l4 + 4);
        }
    }
    for field in changed_checks {
        expected[field.clone()].copy_from_slice(&after[field]);
    }
    if let Some(at) = (0..before.len()).find(|at| expected[*at] != after[*at]) {
        return Err(format!("byte {at} is {:02x} instead of {:02x}", after[at], expected[at]));
    }
    check_ipv4_header(before, after, chain)?;
    match &target.change {
        Change::Packet => check_transport(before, after, chain, before.len()),
        Change::Fragment => Ok(()),
        Change::Error { quote } => check_error(before, after, chain, quote),
    }
}

fn opposite(side: Side) -> Side {
    if side == Side::Source { Side::Destination } else { Side::Source }
}

fn readdress(frame: &mut [u8], chain: &Chain, side: Side, address: IpAddr) {
    let (source, destination) = chain.addresses_at();
    let at = if side == Side::Source { source } else { destination };
    match address {
        IpAddr::V4(address) => frame[at..at + 4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => frame[at..at + 16].copy_from_slice(&address.octets()),
    }
}

fn write_port(frame: &mut [u8], chain: &Chain, side: Side, port: u16) {
    let at = chain.l4 + if side == Side::Source { 0 } else { 2 };
    frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
}

/// The checksum field of the IPv4 header.
fn ipv4_check(chain: &Chain) -> Option<std::ops::Range<usize>> {
    chain.is_v4().then_some(chain.l3 + 10..chain.l3 + 12)
}

/// The checksum field of the transport header.
fn transport_check(chain: &Chain) -> Option<std::ops::Range<usize>> {
    match chain.protocol {
        TCP => Some(chain.l4 + 16..chain.l4 + 18),
        UDP => Some(chain.l4 + 6..chain.l4 + 8),
        SCTP => Some(chain.l4 + 8..chain.l4 + 12),
        _ => None,
    }
}

/// Checks that the header checksum of IPv4 is as right or as wrong as before.
fn check_ipv4_header(before: &[u8], after: &[u8], chain: &Chain) -> Result<(), String> {
    let header = |frame: &[u8]| sum(&[&frame[chain.l3..chain.l3 + 20]]);
    if chain.is_v4() && header(before) != header(after) {
        return Err("the IPv4 header checksum does not match the change".to_owned());
    }
    Ok(())
}

/// Checks that the transport checksum is as right or as wrong as before. Bytes from `end` on do not belong to the packet.
fn check_transport(before: &[u8], after: &[u8], chain: &Chain, end: usize) -> Result<(), String> {
    let Some(field) = transport_check(chain).filter(|field| field.end <= end) else { return Ok(()) };
    if chain.protocol == SCTP {
        return check_crc(before, after, chain);
    }
    let (source, destination) = chain.addresses_at();
    let length = if chain.is_v4() { 4 } else { 16 };
    let parts = |frame: &[u8]| {
        let addresses = [&frame[source..source + length], &frame[destination..destination + length]];
        sum(&[addresses[0], addresses[1], &frame[chain.l4..chain.l4 + 4], &frame[field.clone()]])
    };
    let is_absent = chain.protocol == UDP && before[field.clone()] == [0, 0];
    if is_absent && after[field.clone()] != [0, 0] {
        return Err("a datagram without a checksum has got one".to_owned());
    }
    if !is_absent && chain.protocol == UDP && after[field.clone()] == [0, 0] {
        return Err("the datagram has lost its checksum".to_owned());
    }
    if !is_absent && parts(before) != parts(after) {
        return Err("the transport checksum does not match the change".to_owned());
    }
    Ok(())
}

/// Checks that the CRC has changed as the CRC of the packet has. The CRC is linear: bytes that did not change
/// contribute nothing to the difference.
fn check_crc(before: &[u8], after: &[u8], chain: &Chain) -> Result<(), String> {
    // A first fragment is not checked: its CRC covers the whole datagram, and the length of the datagram is not known
    // here.
    if chain.part != Part::Whole || chain.end < chain.l4 + 12 {
        return Ok(());
    }
    let at = chain.l4 + 8;
    let crc = |frame: &[u8]| bytes::<4>(frame, at).map(u32::from_le_bytes).unwrap_or_default();
    let (old, new) = (crc(before), crc(after));
    let mut difference = vec![0; chain.end - chain.l4];
    for (place, (old, new)) in difference.iter_mut().zip(before[chain.l4..].iter().zip(&after[chain.l4..])).take(4) {
        *place = old ^ new;
    }
    let change = if old == 0 { 0 } else { linear_crc(&difference) };
    if old ^ new == change {
        Ok(())
    } else {
        Err(format!("the CRC changes by {:08x} instead of {change:08x}", old ^ new))
    }
}

/// The CRC-32C without the inversions of its start and end, which makes the CRC linear. Whole zero bytes at the end are
/// appended by repeated squaring.
fn linear_crc(bytes: &[u8]) -> u32 {
    let mut register = 0_u32;
    let used = bytes.len().min(4);
    for byte in &bytes[..used] {
        register = step(register ^ u32::from(*byte));
    }
    // The linear map of one zero byte, as the images of the 32 unit vectors; squared for each bit of the length.
    let mut map: Vec<u32> = (0..32).map(|bit| step(1 << bit)).collect();
    let apply = |map: &[u32], value: u32| {
        (0..32_usize).filter(|bit| value >> bit & 1 == 1).fold(0, |image, bit| image ^ map[bit])
    };
    let mut zeros = bytes.len() - used;
    while zeros > 0 {
        if zeros & 1 == 1 {
            register = apply(&map, register);
        }
        map = map.iter().map(|image| apply(&map, *image)).collect();
        zeros >>= 1;
    }
    register
}

/// Shifts the register by one byte.
fn step(mut register: u32) -> u32 {
    for _bit in 0..8 {
        register = register >> 1 ^ if register & 1 == 1 { 0x82f6_3b78 } else { 0 };
    }
    register
}

/// Checks the checksums of an ICMP error and of its quote.
fn check_error(before: &[u8], after: &[u8], outer: &Chain, quote: &Chain) -> Result<(), String> {
    check_ipv4_header(before, after, quote).map_err(|error| format!("in the quote, {error}"))?;
    let is_first = quote.part == Part::First && quote.protocol == SCTP;
    if !is_first {
        let end = outer.end.min(before.len());
        check_transport(before, after, quote, end).map_err(|error| format!("in the quote, {error}"))?;
    }
    let covered = |frame: &[u8]| {
        let (source, destination) = outer.addresses_at();
        let message = &frame[outer.l4..];
        if outer.is_v4() {
            return sum(&[message]);
        }
        sum(&[&frame[source..source + 16], &frame[destination..destination + 16], message])
    };
    assert!(word(before, outer.l4 + ICMP_HEADER).is_some(), "an error that is translated has a quote");
    if covered(before) == covered(after) {
        Ok(())
    } else {
        Err("the ICMP checksum does not match the change".to_owned())
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Deterministic mutations of packets.

use npl_testkit::random::Random;

use super::headers::word;

/// The longest frame that the mutations create. All frames fit the kernel's buffer for a test run.
const LONGEST: usize = 2600;
/// The shortest frame that the kernel's test run accepts.
const SHORTEST: usize = 14;
/// Numbers at which length checks are most likely to be wrong.
const BOUNDARIES: [u16; 16] = [0, 1, 4, 5, 7, 8, 12, 19, 20, 28, 40, 0x1fff, 0x2000, 0x7fff, 0xfff8, 0xffff];
/// The types of IPv6 extension headers and of transport headers.
const PROTOCOLS: [u8; 14] = [0, 1, 4, 6, 17, 41, 43, 44, 50, 51, 58, 59, 60, 132];

/// Returns a frame that is derived from `base`; `others` are frames of the corpus whose parts may be spliced in. The IP
/// header of `base` starts at offset `l3`. `words` are ports and other numbers that have a meaning in the scene, and
/// `addresses` are addresses that have a meaning.
pub(super) fn mutated(
    random: &mut Random,
    base: &[u8],
    others: &[Vec<u8>],
    l3: usize,
    (words, addresses): (&[u16], &[Vec<u8>]),
) -> Vec<u8> {
    let mut frame = base.to_vec();
    if random.once_in(64) {
        let length = SHORTEST + random.below(200);
        frame = random.bytes(length);
        if l3 > 0 && random.once_in(2) {
            frame[..SHORTEST].copy_from_slice(&base[..SHORTEST]);
        }
    }
    let count = random.below(4);
    for _ in 0..count {
        mutate(random, &mut frame, others, l3, words, addresses);
        frame.truncate(LONGEST);
        if frame.len() < SHORTEST {
            frame.resize(SHORTEST, 0);
        }
    }
    frame
}

fn mutate(
    random: &mut Random,
    frame: &mut Vec<u8>,
    others: &[Vec<u8>],
    l3: usize,
    words: &[u16],
    addresses: &[Vec<u8>],
) {
    let length = frame.len();
    match random.below(22) {
        0 => {
            let bit = 1 << random.below(8);
            frame[random.below(length)] ^= bit;
        }
        1 => frame[random.below(length)] = random.byte(),
        2 => put(frame, random.below(length), &random.choose(&BOUNDARIES).to_be_bytes()),
        3 => put(frame, random.below(length), &random.choose(words).to_be_bytes()),
        4 => put(frame, random.below(length), random.choose::<Vec<u8>>(addresses)),
        5 | 6 => frame.truncate(SHORTEST + random.below(length - SHORTEST + 1)),
        7 => {
            let added = if random.once_in(8) { 2000 } else { 64 };
            let added = random.below(added);
            frame.extend(random.bytes(added));
        }
        8 => {
            let other = random.choose(others);
            let any = random.below(length);
            let cut = *random.choose(&[14, 18, 20, 34, 38, 40, 42, 54, 62, 74, 82, any]);
            let from = if random.once_in(2) { cut } else { random.below(other.len()) };
            frame.truncate(cut.max(SHORTEST));
            frame.extend(other.get(from..).unwrap_or_default());
        }
        9 => {
            let start = random.below(length);
            let end = (start + random.below(64)).min(length);
            let tail = random.bytes(end - start);
            frame[start..end].copy_from_slice(&tail);
        }
        10 => {
            // An IEEE 802.1Q tag.
            let tag = [0x81, 0, random.byte() & 0xe0, if random.once_in(2) { 0 } else { random.byte() }];
            frame.splice(12.min(length)..12.min(length), tag);
        }
        11 => frame[random.below(6.min(length))] = random.byte(),
        _ => mutate_header(random, frame, l3),
    }
}

/// Changes a field of the IP header, or a header after the IP header.
fn mutate_header(random: &mut Random, frame: &mut Vec<u8>, l3: usize) {
    let Some(version) = frame.get(l3).map(|byte| byte >> 4) else { return };
    if version == 4 { mutate_v4(random, frame, l3) } else { mutate_v6(random, frame, l3) }
}

fn mutate_v4(random: &mut Random, frame: &mut Vec<u8>, l3: usize) {
    let l4 = l3 + usize::from(frame[l3] & 15) * 4;
    match random.below(9) {
        0 => frame[l3] = random.byte() & 15 | if random.once_in(4) { random.byte() } else { 0x40 },
        1 => {
            let total = near(random, frame.len() - l3);
            put(frame, l3 + 2, &total.to_be_bytes());
        }
        2 => put(frame, l3 + 6, &fragment_field(random).to_be_bytes()),
        3 => put(frame, l3 + 8, &[*random.choose(&[0, 1, 2, 255])]),
        4 => put(frame, l3 + 9, &[*random.choose(&PROTOCOLS)]),
        5 => mutate_transport(random, frame, l4),
        6 => {
            // Options: the transport header moves, with the matching header length or without.
            let words = random.below(11);
            let options = if random.once_in(2) { vec![1; words * 4] } else { random.bytes(words * 4) };
            let at = (l3 + 20).min(frame.len());
            frame.splice(at..at, options);
            if !random.once_in(4) {
                frame[l3] = 0x45 + u8::try_from(words).unwrap();
                let total = u16::try_from(frame.len() - l3).unwrap();
                put(frame, l3 + 2, &total.to_be_bytes());
            }
        }
        7 => mutate_quote(random, frame, l4),
        _ => put(frame, l3 + 10, &random.word().to_be_bytes()),
    }
}

fn mutate_v6(random: &mut Random, frame: &mut Vec<u8>, l3: usize) {
    let l4 = l3 + 40;
    match random.below(8) {
        0 => frame[l3] = random.byte(),
        1 => {
            let length = near(random, frame.len().saturating_sub(l4));
            put(frame, l3 + 4, &length.to_be_bytes());
        }
        2 => put(frame, l3 + 7, &[*random.choose(&[0, 1, 2, 255])]),
        3 => put(frame, l3 + 6, &[*random.choose(&PROTOCOLS)]),
        4 | 5 => {
            let count = 1 + random.below(7);
            for _ in 0..count {
                insert_extension(random, frame, l3);
            }
        }
        6 => mutate_quote(random, frame, l4),
        _ => mutate_transport(random, frame, l4),
    }
}

/// Inserts an extension header after the IPv6 header; mostly, the header is complete and names the next header.
fn insert_extension(random: &mut Random, frame: &mut Vec<u8>, l3: usize) {
    let at = l3 + 40;
    let Some(next) = frame.get(l3 + 6).copied().filter(|_| at <= frame.len()) else { return };
    let kind = *random.choose(&[0_u8, 43, 44, 60, 60, 0]);
    let units = if kind == 44 { 0 } else { random.below(3) };
    let mut header = vec![0; units * 8 + 8];
    header[0] = if random.once_in(16) { random.byte() } else { next };
    header[1] = if random.once_in(16) { random.byte() } else { u8::try_from(units).unwrap() };
    match kind {
        43 => header[3] = u8::from(random.once_in(4)),
        44 => {
            header[2..4].copy_from_slice(&(fragment_field(random) << 3 | random.word() & 1).to_be_bytes());
            header[7] = random.byte() & 3;
        }
        _ => header[2..8].copy_from_slice(&[1, 4, 0, 0, 0, 0]),
    }
    frame.splice(at..at, header);
    frame[l3 + 6] = kind;
    if let Some(length) = word(frame, l3 + 4) {
        put(frame, l3 + 4, &length.wrapping_add(u16::try_from(units * 8 + 8).unwrap()).to_be_bytes());
    }
}

/// Changes the header at `l4`, as if it were TCP, UDP, SCTP or ICMP.
fn mutate_transport(random: &mut Random, frame: &mut [u8], l4: usize) {
    match random.below(7) {
        0 => put(frame, l4 + 12, &[random.byte() & 0xf0]),
        1 => put(frame, l4 + 13, &[random.byte()]),
        2 => put(frame, l4 + *random.choose(&[6, 8, 16, 2]), &random.word().to_be_bytes()),
        3 => put(frame, l4 + *random.choose(&[6, 16]), &[0, 0]),
        4 => {
            let length = near(random, frame.len().saturating_sub(l4));
            put(frame, l4 + 4, &length.to_be_bytes());
        }
        // A chunk's type and length.
        5 => put(frame, l4 + 12, &[*random.choose(&[0, 1, 2, 3, 4, 6, 7, 14, 64, 192]), 0, 0, random.byte()]),
        _ => put(frame, l4, &[random.byte(), random.byte()]),
    }
}

/// Changes a header of the packet that an ICMP error quotes.
fn mutate_quote(random: &mut Random, frame: &mut Vec<u8>, l4: usize) {
    put(frame, l4, &[*random.choose(&[1, 2, 3, 4, 11, 12, 127, 128, 8])]);
    if !random.once_in(3) {
        mutate_header(random, frame, l4 + 8);
    }
}

/// Returns a length near `length`, or a boundary.
fn near(random: &mut Random, length: usize) -> u16 {
    if random.once_in(2) {
        return *random.choose(&BOUNDARIES);
    }
    u16::try_from(length).unwrap_or(u16::MAX).wrapping_add(u16::try_from(random.below(49)).unwrap()).wrapping_sub(24)
}

/// Returns a flags-and-offset field of IPv4: more fragments, or a small or random offset, or both.
fn fragment_field(random: &mut Random) -> u16 {
    let other = random.word() & 0x1fff;
    let offset = *random.choose(&[0, 0, 1, 5, 63, 125, 0x1fff, other]);
    offset | *random.choose(&[0, 0x2000, 0x4000])
}

/// Overwrites bytes of the frame, as far as the frame has them.
fn put(frame: &mut [u8], at: usize, bytes: &[u8]) {
    for (place, byte) in frame.iter_mut().skip(at).zip(bytes) {
        *place = *byte;
    }
}

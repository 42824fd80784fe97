// SPDX-License-Identifier: Apache-2.0
//! Whether two worlds saw the same, unless they differ as they should.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use npl_agent::core::model::Family;
use npl_testkit::packet::ones_complement_sum;

use super::exception::Exception;
use super::talk::Step;
use super::tap::Frame;
use super::translate::{header_length, untagged};
use super::twin::{End, Seen, Twin, node_addresses};
use crate::prog_run::extensions::HOP_BY_HOP;
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};

/// How much was compared.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Packets that were sent and came to the same in both worlds.
    pub(super) compared: u64,
    pub(super) seen: u64,
    /// Steps that came to exactly this difference.
    pub(super) exceptions: BTreeMap<Exception, u64>,
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compared, seen, exceptions } = self;
        write!(f, "{compared} packets compared, {seen} seen by clients and Pods alike")?;
        exceptions.iter().try_for_each(|(exception, count)| write!(f, ", {count} {exception:?}"))
    }
}

/// Plays a step in both worlds and compares what everybody sees.
pub(super) fn play(twin: &mut Twin, step: &Step, account: &mut Account) -> Result<(), String> {
    let ours = twin.ours.deliver(step.from, &step.frames);
    let mut theirs = twin.theirs.deliver(step.from, &step.frames);
    let is_redirected = twin.way.is_short();
    let is_refused = theirs.at(step.receiver()).is_empty();
    let not_routed = is_redirected && is_refused && step.frames.iter().any(|frame| is_for_routers(&untagged(frame)));
    let exception = step.exception.or(not_routed.then_some(Exception::NotRouted));
    let compared = match exception {
        Some(exception) if !exception.is_possible_only() => Err(String::new()),
        _ => compare(step, [ours.clone(), theirs.clone()], is_redirected),
    };
    match (compared, exception) {
        (Ok(seen), _) => {
            account.compared += u64::try_from(step.frames.len()).unwrap_or_default();
            account.seen += u64::try_from(seen).unwrap_or_default();
            Ok(())
        }
        (Err(_), Some(exception)) => {
            *account.exceptions.entry(exception).or_default() += 1;
            exception.hold(step, [ours, theirs], is_redirected)
        }
        (Err(difference), None) => Err(difference),
    }
}

/// How many frames everybody has seen alike.
fn compare(step: &Step, [mut ours, mut theirs]: [Seen; 2], is_redirected: bool) -> Result<usize, String> {
    let mut seen = 0;
    for end in End::ALL {
        let (ours, theirs) = (ours.at(end), theirs.at(end));
        seen += theirs.len();
        if end != step.from {
            forget_early(ours);
        }
        for frames in [&mut *ours, &mut *theirs] {
            normalise(frames, end == step.from, step.frames.len() > 1);
            if is_redirected {
                forget_hop(frames, end);
            }
        }
        if ours != theirs {
            return Err(tell(step, end, ours, theirs));
        }
    }
    Ok(seen)
}

/// Takes out fragments that left as they were, before the first of their datagram, where they left translated after it too.
fn forget_early(frames: &mut Vec<Frame>) {
    let of_node = |frame: &Frame| source(&frame.bytes).is_some_and(is_node);
    let translated: Vec<u16> =
        frames.iter().filter(|frame| of_node(frame)).map(|frame| fragment_offset(&frame.bytes)).collect();
    frames.retain(|frame| of_node(frame) || !translated.contains(&fragment_offset(&frame.bytes)));
}

/// Who a frame's packet is from.
fn source(frame: &[u8]) -> Option<IpAddr> {
    match frame[12] {
        0x08 => Some(<[u8; 4]>::try_from(frame.get(L3 + 12..L3 + 16)?).ok()?.into()),
        0x86 => Some(<[u8; 16]>::try_from(frame.get(L3 + 8..L3 + 24)?).ok()?.into()),
        _ => None,
    }
}

/// Takes out what the kernel chooses: the numbers of packets that the Node makes itself, and the order and, in IPv6, the
/// number of fragments that it has put together and cut again.
fn normalise(frames: &mut [Frame], is_from_node: bool, are_fragments: bool) {
    for Frame { bytes, .. } in frames.iter_mut() {
        match (bytes[12], is_from_node) {
            (0x08, true) => {
                bytes[18..20].fill(0);
                bytes[24..26].fill(0);
            }
            (0x86, true) => bytes[15..18].fill(0),
            _ => {}
        }
        if are_fragments && bytes[12] == 0x86 && bytes[20] == 44 {
            bytes[58..62].fill(0);
        }
    }
    if are_fragments {
        frames.sort_by_key(|frame| fragment_offset(&frame.bytes));
    }
}

/// Whether routers have to look at more than where a frame's packet goes.
fn is_for_routers(frame: &[u8]) -> bool {
    let is_cut = end_of_packet(frame) > frame.len();
    match frame[12] {
        0x08 => {
            let header = &frame[L3..L3 + header_length(frame)];
            let is_nobody = matches!(header[12], 0 | 127 | 224..) || source(frame).is_some_and(is_node);
            is_cut || is_nobody || ones_complement_sum(header) != 0xffff
        }
        0x86 => {
            let source: [u8; 16] = frame[L3 + 8..L3 + 24].try_into().unwrap();
            let is_nobody = source[..15] == [0; 15] || source[0] == 0xff || is_node(IpAddr::from(source));
            is_cut || is_nobody || frame[L3] >> 4 != 6 || frame[L3 + 6] == HOP_BY_HOP
        }
        _ => false,
    }
}

fn is_node(ip: IpAddr) -> bool {
    Family::ALL.into_iter().any(|family| node_addresses(family).contains(&ip))
}

/// Where a frame's packet ends, as its header says, if it is there.
pub(super) fn end_of_packet(frame: &[u8]) -> usize {
    let (at, ahead) = match frame[12] {
        0x08 => (L3 + 2, L3),
        0x86 => (L3 + 4, L3 + V6_HEADER),
        _ => return frame.len(),
    };
    let Some(&[high, low]) = frame.get(at..at + 2) else { return frame.len() };
    ahead + usize::from(u16::from_be_bytes([high, low]))
}

/// Takes out what a host writes that a packet passes through, other than the time to live: link-layer addresses, of which
/// a frame that is redirected to a Pod's device keeps its own, IPv4 options, which may record the hop, and padding.
pub(super) fn forget_hop(frames: &mut [Frame], end: End) {
    for Frame { bytes, .. } in frames.iter_mut() {
        if end != End::Client {
            bytes[..12].fill(0);
        }
        bytes.truncate(end_of_packet(bytes));
        let length = header_length(bytes);
        if bytes[12] == 0x08 && length > V4_HEADER {
            bytes[L3 + 10..L3 + 12].fill(0);
            bytes[L3 + V4_HEADER..L3 + length].fill(0);
        }
    }
}

fn fragment_offset(frame: &[u8]) -> u16 {
    let at = if frame[12] == 0x08 { 20 } else { 56 };
    let word = frame.get(at..at + 2).map_or(0, |it| u16::from_be_bytes([it[0], it[1]]));
    if frame[12] == 0x08 { word & 0x1fff } else { word >> 3 }
}

fn tell(step: &Step, end: End, ours: &[Frame], theirs: &[Frame]) -> String {
    let mut text = format!("{:?} sends", step.from);
    let mut list = |title: &str, frames: &mut dyn Iterator<Item = &[u8]>| {
        for frame in frames {
            text.extend(["\n  ", title, " "]);
            text.extend(
                frame.iter().flat_map(|byte| [byte >> 4, byte & 0xf]).filter_map(|it| char::from_digit(it.into(), 16)),
            );
        }
    };
    list("sent  ", &mut step.frames.iter().map(Vec::as_slice));
    list("ours  ", &mut ours.iter().map(|frame| frame.bytes.as_slice()));
    list("theirs", &mut theirs.iter().map(|frame| frame.bytes.as_slice()));
    text + &format!("\nat {end:?}, tags {:?} and {:?}", tags(ours), tags(theirs))
}

fn tags(frames: &[Frame]) -> Vec<Option<u16>> {
    frames.iter().map(|frame| frame.tag).collect()
}

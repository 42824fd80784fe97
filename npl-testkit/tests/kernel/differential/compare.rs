// SPDX-License-Identifier: Apache-2.0
//! Compares what the client and the Pods receive through two Nodes, one with NPL and one with the kernel's NAT. The
//! received frames must be equal, except for the allowed differences.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use npl_agent::core::model::Family;
use npl_testkit::packet::ones_complement_sum;

use super::connection::Step;
use super::exception::Exception;
use super::node_pair::{Endpoint, NodePair, Received, node_addresses};
use super::tap::Frame;
use super::translate::{header_length, untagged};
use crate::prog_run::extensions::HOP_BY_HOP;
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};

/// Numbers of compared packets and of allowed differences.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// Number of packets with the same result on both Nodes.
    pub(super) compared: u64,
    pub(super) seen: u64,
    /// Number of steps with each allowed difference.
    pub(super) exceptions: BTreeMap<Exception, u64>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compared, seen, exceptions } = self;
        write!(
            f,
            "{compared} packets sent with equal results on both Nodes, {seen} frames received by clients and Pods"
        )?;
        exceptions.iter().try_for_each(|(exception, count)| write!(f, ", {count} {exception:?}"))
    }
}

/// Sends a step through both Nodes and compares what all endpoints receive.
pub(super) fn play(pair: &mut NodePair, step: &Step, summary: &mut Summary) -> Result<(), String> {
    let npl = pair.npl.deliver(step.from, &step.frames);
    let mut kernel = pair.kernel.deliver(step.from, &step.frames);
    let is_redirected = pair.mode.is_redirected();
    let is_refused = kernel.at(step.receiver()).is_empty();
    let not_routed = is_redirected && is_refused && step.frames.iter().any(|frame| needs_router(&untagged(frame)));
    let exception = step.exception.or(not_routed.then_some(Exception::NotRouted));
    let compared = match exception {
        Some(exception) if !exception.is_possible_only() => Err(String::new()),
        _ => compare(step, [npl.clone(), kernel.clone()], is_redirected),
    };
    match (compared, exception) {
        (Ok(seen), _) => {
            summary.compared += u64::try_from(step.frames.len()).unwrap_or_default();
            summary.seen += u64::try_from(seen).unwrap_or_default();
            Ok(())
        }
        (Err(_), Some(exception)) => {
            *summary.exceptions.entry(exception).or_default() += 1;
            exception.check(step, [npl, kernel], is_redirected)
        }
        (Err(difference), None) => Err(difference),
    }
}

/// Compares the frames that each endpoint received on both Nodes. Returns the number of received frames on one Node.
fn compare(step: &Step, [mut npl, mut kernel]: [Received; 2], is_redirected: bool) -> Result<usize, String> {
    let mut seen = 0;
    for endpoint in Endpoint::ALL {
        let (npl, kernel) = (npl.at(endpoint), kernel.at(endpoint));
        seen += kernel.len();
        if endpoint != step.from {
            remove_early_fragments(npl);
        }
        for frames in [&mut *npl, &mut *kernel] {
            normalize(frames, endpoint == step.from, step.frames.len() > 1);
            if is_redirected {
                clear_hop_fields(frames, endpoint);
            }
        }
        if npl != kernel {
            return Err(difference(step, endpoint, npl, kernel));
        }
    }
    Ok(seen)
}

/// Removes untranslated early fragments whose translated copies were also sent. NPL passes an early fragment on
/// untranslated, and sends a translated copy when the first fragment arrives.
fn remove_early_fragments(frames: &mut Vec<Frame>) {
    let of_node = |frame: &Frame| source(&frame.bytes).is_some_and(is_node);
    let translated: Vec<u16> =
        frames.iter().filter(|frame| of_node(frame)).map(|frame| fragment_offset(&frame.bytes)).collect();
    frames.retain(|frame| of_node(frame) || !translated.contains(&fragment_offset(&frame.bytes)));
}

/// Returns the source address of a frame's packet.
fn source(frame: &[u8]) -> Option<IpAddr> {
    match frame[12] {
        0x08 => Some(<[u8; 4]>::try_from(frame.get(L3 + 12..L3 + 16)?).ok()?.into()),
        0x86 => Some(<[u8; 16]>::try_from(frame.get(L3 + 8..L3 + 24)?).ok()?.into()),
        _ => None,
    }
}

/// Clears fields whose values each Node's kernel chooses: in the Node's own packets, the IPv4 identification and header
/// checksum, and the IPv6 flow label; in IPv6 fragments, the identification. Sorts fragments by offset.
fn normalize(frames: &mut [Frame], is_from_node: bool, are_fragments: bool) {
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

/// Whether a router would drop or specially process a frame's packet because of the packet's source, header or options.
fn needs_router(frame: &[u8]) -> bool {
    let is_cut = end_of_packet(frame) > frame.len();
    match frame[12] {
        0x08 => {
            let header = &frame[L3..L3 + header_length(frame)];
            let is_invalid_source = matches!(header[12], 0 | 127 | 224..) || source(frame).is_some_and(is_node);
            is_cut || is_invalid_source || ones_complement_sum(header) != 0xffff
        }
        0x86 => {
            let source: [u8; 16] = frame[L3 + 8..L3 + 24].try_into().unwrap();
            let is_invalid_source = source[..15] == [0; 15] || source[0] == 0xff || is_node(IpAddr::from(source));
            is_cut || is_invalid_source || frame[L3] >> 4 != 6 || frame[L3 + 6] == HOP_BY_HOP
        }
        _ => false,
    }
}

fn is_node(ip: IpAddr) -> bool {
    Family::ALL.into_iter().any(|family| node_addresses(family).contains(&ip))
}

/// Returns the end of a frame's packet according to its IP header, or the end of the frame if the header is truncated.
pub(super) fn end_of_packet(frame: &[u8]) -> usize {
    let (length_field, header_end) = match frame[12] {
        0x08 => (L3 + 2, L3),
        0x86 => (L3 + 4, L3 + V6_HEADER),
        _ => return frame.len(),
    };
    let Some(&[high, low]) = frame.get(length_field..length_field + 2) else { return frame.len() };
    header_end + usize::from(u16::from_be_bytes([high, low]))
}

/// Clears the fields that a forwarding host writes, other than the TTL: link-layer addresses, IPv4 options (which may
/// record the hop), and padding. The link-layer addresses are cleared only in frames to Pods, because a frame that is
/// redirected to a Pod's device keeps its addresses.
pub(super) fn clear_hop_fields(frames: &mut [Frame], endpoint: Endpoint) {
    for Frame { bytes, .. } in frames.iter_mut() {
        if endpoint != Endpoint::Client {
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
    let field = frame.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    if frame[12] == 0x08 { field & 0x1fff } else { field >> 3 }
}

fn difference(step: &Step, endpoint: Endpoint, npl: &[Frame], kernel: &[Frame]) -> String {
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
    list("NPL   ", &mut npl.iter().map(|frame| frame.bytes.as_slice()));
    list("kernel", &mut kernel.iter().map(|frame| frame.bytes.as_slice()));
    text + &format!("\nat {endpoint:?}, VLAN tags {:?} and {:?}", tags(npl), tags(kernel))
}

fn tags(frames: &[Frame]) -> Vec<Option<u16>> {
    frames.iter().map(|frame| frame.tag).collect()
}

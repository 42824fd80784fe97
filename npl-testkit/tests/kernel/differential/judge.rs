// SPDX-License-Identifier: Apache-2.0
//! Whether two worlds saw the same, and where they may differ.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use npl_agent::core::model::{Family, Protocol};
use npl_agent::core::redirect::Forwarding;
use npl_testkit::packet::ones_complement_sum;

use super::talk::Step;
use super::tap::Frame;
use super::twin::{End, Seen, Twin, node_addresses};
use crate::prog_run::extensions::HOP_BY_HOP;
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};

/// Why what comes of a step may differ; what each side makes of it is checked all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Exception {
    /// Connection tracking takes it for no packet of a connection, and the host gets it. Requests are translated packet
    /// by packet, so it goes to the Pod, whose own stack judges it.
    NotTracked,
    /// The same, where only one of many broken fields is known: either the Pod or the host gets it.
    Broken,
    /// The kernel drops an ICMP error whose own checksum is wrong; ours stays as wrong as it was.
    WrongIcmpChecksum,
    /// The kernel drops an error that quotes less than eight bytes of the transport; ours needs the ports alone.
    ShortQuote,
    /// The quote ends right behind the TCP checksum: the kernel leaves that as it was, ours changes it with the ports.
    QuoteEndsAtChecksum,
    /// Of SCTP the kernel computes a quoted checksum from what is quoted; ours changes what it was with the ports.
    QuotedCrc,
    /// A header that covers the addresses, a route that goes on, or more headers than anybody needs: not ours, so that
    /// nothing that cannot be right reaches the Pod.
    Untranslatable,
    /// The kernel hands on whole datagrams only, and forgets the rest; ours hands on what it gets.
    NotWhole,
    /// A fragment header that a datagram has no need of is lost in the kernel, and kept in ours.
    LoneFragment,
    /// One client port by two of the Node's ends to one Pod port: the kernel gives the second flow another client port,
    /// ours keeps the client's own, and the Pod answers one of the two.
    Collision,
    /// Only where ours redirects: what a router has to look at, a wrong header checksum, hop-by-hop options, a sender that
    /// nobody has. The kernel's forwarding drops it; past the stack it is for the Pod's own to judge.
    NotRouted,
}

/// Who gets a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives,
    Stays,
    Either,
}

impl Exception {
    /// What may differ in an error that quotes so many bytes of a transport.
    pub(super) fn of_quote(protocol: Protocol, bytes: usize) -> Option<Self> {
        match bytes {
            4..8 => Some(Self::ShortQuote),
            18..20 if protocol == Protocol::Tcp => Some(Self::QuoteEndsAtChecksum),
            12.. if protocol == Protocol::Sctp => Some(Self::QuotedCrc),
            _ => None,
        }
    }

    /// Whether the receiver gets anything: in ours, and in the kernel's.
    const fn fates(self) -> [Fate; 2] {
        use Fate::{Arrives, Either, Stays};
        match self {
            Self::NotTracked | Self::WrongIcmpChecksum | Self::ShortQuote | Self::NotWhole => [Arrives, Stays],
            Self::Broken | Self::NotRouted => [Either, Stays],
            Self::QuoteEndsAtChecksum | Self::QuotedCrc | Self::LoneFragment | Self::Collision => [Arrives, Arrives],
            Self::Untranslatable => [Stays, Either],
        }
    }
}

/// How much was compared.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) sent: u64,
    pub(super) seen: u64,
    pub(super) exceptions: BTreeMap<Exception, u64>,
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, seen, exceptions } = self;
        write!(f, "{sent} packets sent, {seen} seen by clients and Pods alike")?;
        exceptions.iter().try_for_each(|(exception, count)| write!(f, ", {count} {exception:?}"))
    }
}

/// Plays a step in both worlds and compares what everybody sees.
pub(super) fn play(twin: &mut Twin, step: &Step, account: &mut Account) -> Result<(), String> {
    let mut ours = twin.ours.deliver(step.from, &step.frames);
    let mut theirs = twin.theirs.deliver(step.from, &step.frames);
    account.sent += u64::try_from(step.frames.len()).unwrap_or_default();
    let is_redirected = twin.forwarding != Forwarding::Stack;
    let is_refused = arrivals(step, &theirs) == 0;
    let not_routed = is_redirected && is_refused && step.frames.iter().any(|frame| is_for_routers(&untagged(frame)));
    if let Some(exception) = step.exception.or(not_routed.then_some(Exception::NotRouted)) {
        *account.exceptions.entry(exception).or_default() += 1;
        return hold_to(exception, step, [&ours, &theirs]);
    }
    for end in [End::Client, End::Pod(0), End::Pod(1), End::Pod(2)] {
        let (ours, theirs) = (ours.at(end), theirs.at(end));
        account.seen += u64::try_from(theirs.len()).unwrap_or_default();
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
    Ok(())
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

/// A frame without its tag.
fn untagged(frame: &[u8]) -> Vec<u8> {
    let behind = if frame[12..14] == [0x81, 0x00] { 16 } else { 12 };
    [&frame[..12], &frame[behind..]].concat()
}

fn is_node(ip: IpAddr) -> bool {
    Family::ALL.into_iter().any(|family| node_addresses(family).contains(&ip))
}

/// Where a frame's packet ends, as its header says.
fn end_of_packet(frame: &[u8]) -> usize {
    let word = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
    match frame[12] {
        0x08 => L3 + word(L3 + 2),
        0x86 => L3 + V6_HEADER + word(L3 + 4),
        _ => frame.len(),
    }
}

/// Takes out what a host writes that a packet passes through, other than the time to live: link-layer addresses, of which
/// a frame that is redirected to a Pod's device keeps its own, IPv4 options, which may record the hop, and padding.
fn forget_hop(frames: &mut [Frame], end: End) {
    for Frame { bytes, .. } in frames.iter_mut() {
        if end != End::Client {
            bytes[..12].fill(0);
        }
        let length = header_length(bytes);
        bytes.truncate(end_of_packet(bytes));
        if bytes[12] == 0x08 && length > V4_HEADER {
            bytes[L3 + 10..L3 + 12].fill(0);
            bytes[L3 + V4_HEADER..L3 + length].fill(0);
        }
    }
}

/// Of IPv4.
fn header_length(frame: &[u8]) -> usize {
    let length = usize::from(frame[L3] & 0x0f) * 4;
    length.clamp(V4_HEADER, frame.len() - L3)
}

fn fragment_offset(frame: &[u8]) -> u16 {
    let at = if frame[12] == 0x08 { 20 } else { 56 };
    let word = frame.get(at..at + 2).map_or(0, |it| u16::from_be_bytes([it[0], it[1]]));
    if frame[12] == 0x08 { word & 0x1fff } else { word >> 3 }
}

/// How many frames the other side got.
fn arrivals(step: &Step, seen: &Seen) -> usize {
    match step.from {
        End::Client => seen.pods.iter().map(Vec::len).sum(),
        End::Pod(_) => seen.client.len(),
    }
}

/// Checks that an exception is what it is said to be.
fn hold_to(exception: Exception, step: &Step, seen: [&Seen; 2]) -> Result<(), String> {
    for ((fate, seen), name) in exception.fates().into_iter().zip(seen).zip(["ours", "the kernel's"]) {
        let arrived = arrivals(step, seen);
        let holds = match fate {
            Fate::Arrives => arrived > 0,
            Fate::Stays => arrived == 0,
            Fate::Either => true,
        };
        if !holds {
            return Err(format!("{exception:?}, but {arrived} packets of {name} arrived: {step:02x?}"));
        }
    }
    Ok(())
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

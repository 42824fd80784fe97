// SPDX-License-Identifier: Apache-2.0
//! Allowed differences between NPL and the kernel's NAT, and the exact check of each.

use std::net::SocketAddr;

use npl_agent::core::model::Protocol;
use npl_testkit::packet::{Packet, crc32c};

use super::compare::clear_hop_fields;
use super::connection::Step;
use super::node_pair::{Endpoint, Received};
use super::tap::Frame;
use super::translate::{Layout, Side, adjust, adjust_transport, family, readdress, translated, untagged};
use crate::prog_run::fragments::{L3, V6_HEADER};

/// An allowed difference between the results of a step on both Nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Exception {
    /// Kernel conntrack assigns the packet to no connection, so the kernel does not translate the packet. NPL
    /// translates each request regardless of the state of its connection, and the Pod's stack accepts or rejects the
    /// packet.
    NotTracked,
    /// As [`Self::NotTracked`], for a packet in which one header byte has a random value: the results may differ or be
    /// equal.
    Broken,
    /// The kernel drops an ICMP error with a wrong checksum; NPL forwards it, and the checksum stays wrong.
    WrongIcmpChecksum,
    /// The kernel drops an ICMP error that quotes fewer than eight bytes of the transport header. NPL translates the
    /// error, because NPL needs only the ports.
    ShortQuote,
    /// The quote ends right after the TCP checksum: the kernel leaves the checksum unchanged, NPL updates it.
    QuoteEndsAtChecksum,
    /// The kernel computes a quoted SCTP CRC from the quoted part; NPL updates the original CRC.
    QuotedCrc,
    /// The packet has an authentication header, a source route with segments left, or too many extension headers. NPL
    /// passes the packet to the host. No receiver could use a translated packet with one of the first two headers.
    Untranslatable,
    /// The fragments overlap, or do not form a complete datagram. The kernel forwards only complete datagrams without
    /// overlapping fragments; NPL forwards every fragment.
    NotWhole,
    /// The kernel removes the fragment header of an unfragmented datagram; NPL keeps it.
    LoneFragment,
    /// One client port reaches one Pod port through two NAT addresses. The kernel gives the second connection another
    /// client port; NPL keeps the client port. With UDP, replies follow the newer request. With TCP, the first
    /// connection is not affected.
    TupleConflict,
    /// Only in redirect and offload mode: a packet that no router forwards, because of a wrong header checksum,
    /// hop-by-hop options or an invalid source. The kernel's forwarding drops the packet. With NPL, the packet bypasses
    /// the Node's stack, and the Pod's stack accepts or rejects the packet.
    NotRouted,
}

impl Exception {
    /// Returns the allowed difference for an ICMP error that quotes `bytes` bytes from the transport header on; `None`
    /// if the results on both Nodes must be equal.
    pub(super) fn of_quote(protocol: Protocol, bytes: usize) -> Option<Self> {
        match bytes {
            4..8 => Some(Self::ShortQuote),
            18..20 if protocol == Protocol::Tcp => Some(Self::QuoteEndsAtChecksum),
            12.. if protocol == Protocol::Sctp => Some(Self::QuotedCrc),
            _ => None,
        }
    }

    /// Whether the results on both Nodes may also be equal. With all other exceptions, the results must differ.
    pub(super) const fn is_possible_only(self) -> bool {
        matches!(self, Self::Broken | Self::NotRouted)
    }

    /// Checks that the results on both Nodes differ exactly as the exception describes.
    pub(super) fn check(
        self,
        step: &Step,
        [mut npl, mut kernel]: [Received; 2],
        is_redirected: bool,
    ) -> Result<(), String> {
        let receiver = step.receiver();
        if is_redirected {
            for endpoint in Endpoint::ALL {
                clear_hop_fields(npl.at(endpoint), endpoint);
                clear_hop_fields(kernel.at(endpoint), endpoint);
            }
        }
        let mut expected = Received::default();
        let forward = |expected: &mut Received| {
            *expected.at(receiver) = translated(step).into_iter().map(Frame::from).collect();
            if is_redirected {
                clear_hop_fields(expected.at(receiver), receiver);
            }
        };
        match self {
            Self::NotTracked
            | Self::Broken
            | Self::WrongIcmpChecksum
            | Self::ShortQuote
            | Self::NotWhole
            | Self::NotRouted => {
                forward(&mut expected);
                kernel.at(receiver).is_empty().then_some(()).ok_or("the kernel forwards the packet")?;
            }
            Self::LoneFragment => {
                forward(&mut expected);
                self.compare(step, &Frame::from(reassembled(expected.at(receiver))), kernel.at(receiver))?;
            }
            Self::TupleConflict => {
                forward(&mut expected);
                self.check_other_port(step, expected.at(receiver), kernel.at(receiver))?;
            }
            Self::QuoteEndsAtChecksum | Self::QuotedCrc => {
                expected = kernel;
                self.amend(&step.frames[0], expected.at(receiver))?;
            }
            Self::Untranslatable => expected.client.clone_from(&npl.client),
        }
        if npl == expected {
            return Ok(());
        }
        Err(format!("{self:?}, but NPL forwards {npl:02x?}\ninstead of {expected:02x?}\nfor {step:02x?}"))
    }

    fn compare(self, step: &Step, expected: &Frame, frames: &[Frame]) -> Result<(), String> {
        if frames == std::slice::from_ref(expected) {
            return Ok(());
        }
        Err(format!("{self:?}, but the kernel forwards {frames:02x?}\ninstead of {expected:02x?}\nfor {step:02x?}"))
    }

    /// Checks that the kernel's frame equals NPL's expected frame, except for the client port.
    fn check_other_port(self, step: &Step, expected: &[Frame], kernel: &[Frame]) -> Result<(), String> {
        let [Frame { bytes, tag }] = expected else { return Err(format!("{self:?} of {expected:02x?}")) };
        let mut other = bytes.clone();
        let port = kernel.first().and_then(|frame| source(&frame.bytes)).ok_or("the kernel forwards nothing")?;
        if Some(port) == source(bytes) {
            return Err(format!("{self:?}, but the kernel keeps the port {port}"));
        }
        readdress(family(bytes), &mut other[L3..], Side::Source, port);
        self.compare(step, &Frame { bytes: other, tag: *tag }, kernel)
    }

    /// Replaces the quoted checksum that the kernel wrote by the one that NPL must write: the original checksum,
    /// updated for the translated addresses and ports.
    fn amend(self, sent: &[u8], frames: &mut [Frame]) -> Result<(), String> {
        let [Frame { bytes, .. }] = frames else {
            return Err(format!("{self:?}, but there are {} frames", frames.len()));
        };
        let no_quote = "there is no quote";
        let sent = untagged(sent);
        let family = family(&sent);
        let (layout_before, error) =
            (Layout::of(family, &sent[L3..]).ok_or(no_quote)?, Layout::of(family, &bytes[L3..]).ok_or(no_quote)?);
        let (message, old) = (&mut bytes[L3..][error.transport..], &sent[L3..][layout_before.transport..]);
        let before = message.to_vec();
        let (quote, old) = (&mut message[QUOTE..], &old[QUOTE..]);
        let layout = Layout::of(family, quote).ok_or(no_quote)?;
        let end = layout.transport + if self == Self::QuotedCrc { 12 } else { 18 };
        let field = end - if self == Self::QuotedCrc { 4 } else { 2 }..end;
        let mut by_kernel = old[field.clone()].to_vec();
        if self == Self::QuotedCrc {
            let mut quoted = quote.to_vec();
            quoted[field.clone()].fill(0);
            by_kernel = crc32c(&quoted[layout.transport..]).to_le_bytes().to_vec();
        }
        if quote[field.clone()] != by_kernel {
            return Err(format!("{self:?}, but the kernel quotes the checksum {:02x?}", &quote[field]));
        }
        quote[field.clone()].copy_from_slice(&old[field]);
        adjust_transport(quote, &old[..quote.len()], layout);
        let after = message.to_vec();
        adjust(&mut bytes[L3..], error.transport + 2, &before, &after);
        Ok(())
    }
}

/// Length of an ICMP error's header, which precedes the quote.
const QUOTE: usize = 8;

/// Returns the source address and port of a frame.
fn source(frame: &[u8]) -> Option<SocketAddr> {
    let mut packet = Packet::parse(frame).ok()?;
    let ip = packet.source_ip();
    let (port, _) = packet.transport.ports_mut()?;
    Some((ip, *port).into())
}

/// Reassembles IPv6 fragments that are in order and have no other extension headers.
fn reassembled(fragments: &[Frame]) -> Vec<u8> {
    const PAYLOAD: usize = L3 + V6_HEADER + 8;
    let mut frame = fragments[0].bytes[..L3 + V6_HEADER].to_vec();
    frame[L3 + 6] = fragments[0].bytes[L3 + V6_HEADER];
    frame.extend(fragments.iter().flat_map(|fragment| &fragment.bytes[PAYLOAD..]));
    let length = u16::try_from(frame.len() - L3 - V6_HEADER).unwrap();
    frame[L3 + 4..L3 + 6].copy_from_slice(&length.to_be_bytes());
    frame
}

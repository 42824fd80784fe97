// SPDX-License-Identifier: Apache-2.0
//! Where the two worlds differ, and exactly how.

use std::net::SocketAddr;

use npl_agent::core::model::Protocol;
use npl_testkit::packet::{Packet, crc32c};

use super::judge::forget_hop;
use super::talk::Step;
use super::tap::Frame;
use super::translate::{Layout, Side, adjust, adjust_transport, family, readdress, translated, untagged};
use super::twin::{End, Seen};
use crate::prog_run::fragments::{L3, V6_HEADER};

/// Why what comes of a step differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Exception {
    /// Connection tracking takes it for no packet of a connection, and the host gets it. Requests are translated packet
    /// by packet, so it goes to the Pod, whose own stack judges it.
    NotTracked,
    /// The same, where only one of many broken fields is known: the Pod gets it, or both worlds do the same.
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
    TupleConflict,
    /// Only where ours redirects: what a router has to look at, a wrong header checksum, hop-by-hop options, a sender that
    /// nobody has. The kernel's forwarding drops it; past the stack it is for the Pod's own to judge.
    NotRouted,
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

    /// Whether the worlds may as well do the same, and this is none then.
    pub(super) const fn is_possible_only(self) -> bool {
        matches!(self, Self::Broken | Self::NotRouted)
    }

    /// Checks that the step makes the difference that this is, and no other.
    pub(super) fn hold(
        self,
        step: &Step,
        [mut ours, mut theirs]: [Seen; 2],
        is_redirected: bool,
    ) -> Result<(), String> {
        let other = step.receiver();
        if is_redirected {
            for end in End::ALL {
                forget_hop(ours.at(end), end);
                forget_hop(theirs.at(end), end);
            }
        }
        let mut expected = Seen::default();
        let hands_on = |expected: &mut Seen| {
            *expected.at(other) = translated(step).into_iter().map(Frame::from).collect();
            if is_redirected {
                forget_hop(expected.at(other), other);
            }
        };
        match self {
            Self::NotTracked
            | Self::Broken
            | Self::WrongIcmpChecksum
            | Self::ShortQuote
            | Self::NotWhole
            | Self::NotRouted => {
                hands_on(&mut expected);
                theirs.at(other).is_empty().then_some(()).ok_or("the kernel's own hands it on")?;
            }
            Self::LoneFragment => {
                hands_on(&mut expected);
                self.compare(step, &Frame::from(put_together(expected.at(other))), theirs.at(other))?;
            }
            Self::TupleConflict => {
                hands_on(&mut expected);
                self.is_by_another_port(step, expected.at(other), theirs.at(other))?;
            }
            Self::QuoteEndsAtChecksum | Self::QuotedCrc => {
                expected = theirs;
                self.amend(&step.frames[0], expected.at(other))?;
            }
            Self::Untranslatable => expected.client.clone_from(&ours.client),
        }
        if ours == expected {
            return Ok(());
        }
        Err(format!("{self:?}, but {ours:02x?}\ninstead of {expected:02x?}\nof {step:02x?}"))
    }

    fn compare(self, step: &Step, expected: &Frame, frames: &[Frame]) -> Result<(), String> {
        if frames == std::slice::from_ref(expected) {
            return Ok(());
        }
        Err(format!(
            "{self:?}, but the kernel's own hands on {frames:02x?}\ninstead of {expected:02x?}\nof {step:02x?}"
        ))
    }

    /// The kernel's frame is the one that was expected of ours, but for the client's port.
    fn is_by_another_port(self, step: &Step, expected: &[Frame], theirs: &[Frame]) -> Result<(), String> {
        let [Frame { bytes, tag }] = expected else { return Err(format!("{self:?} of {expected:02x?}")) };
        let mut other = bytes.clone();
        let port = theirs.first().and_then(|frame| source(&frame.bytes)).ok_or("the kernel's own hands nothing on")?;
        if Some(port) == source(bytes) {
            return Err(format!("{self:?}, but the kernel's own keeps the port {port}"));
        }
        readdress(family(bytes), &mut other[L3..], Side::Source, port);
        self.compare(step, &Frame { bytes: other, tag: *tag }, theirs)
    }

    /// Changes the quoted checksum in what the kernel hands on from what that makes of it to what was asked for: its own,
    /// as it was sent, changed by what has changed under it.
    fn amend(self, sent: &[u8], frames: &mut [Frame]) -> Result<(), String> {
        let [Frame { bytes, .. }] = frames else { return Err(format!("{self:?}, but there are {}", frames.len())) };
        let cut = "there is no quote";
        let sent = untagged(sent);
        let family = family(&sent);
        let (asked, error) =
            (Layout::of(family, &sent[L3..]).ok_or(cut)?, Layout::of(family, &bytes[L3..]).ok_or(cut)?);
        let (message, old) = (&mut bytes[L3..][error.transport..], &sent[L3..][asked.transport..]);
        let before = message.to_vec();
        let (quote, old) = (&mut message[QUOTE..], &old[QUOTE..]);
        let layout = Layout::of(family, quote).ok_or(cut)?;
        let end = layout.transport + if self == Self::QuotedCrc { 12 } else { 18 };
        let field = end - if self == Self::QuotedCrc { 4 } else { 2 }..end;
        let mut by_kernel = old[field.clone()].to_vec();
        if self == Self::QuotedCrc {
            let mut quoted = quote.to_vec();
            quoted[field.clone()].fill(0);
            by_kernel = crc32c(&quoted[layout.transport..]).to_le_bytes().to_vec();
        }
        if quote[field.clone()] != by_kernel {
            return Err(format!("{self:?}, but the kernel's own quotes the checksum {:02x?}", &quote[field]));
        }
        quote[field.clone()].copy_from_slice(&old[field]);
        adjust_transport(quote, &old[..quote.len()], layout);
        let after = message.to_vec();
        adjust(&mut bytes[L3..], error.transport + 2, &before, &after);
        Ok(())
    }
}

/// Bytes of an ICMP error ahead of what it quotes.
const QUOTE: usize = 8;

/// Who has sent a frame.
fn source(frame: &[u8]) -> Option<SocketAddr> {
    let mut packet = Packet::parse(frame).ok()?;
    let ip = packet.source_ip();
    let (port, _) = packet.transport.ports_mut()?;
    Some((ip, *port).into())
}

/// The datagram of these fragments of IPv6, in their order, which have no other extension headers.
fn put_together(fragments: &[Frame]) -> Vec<u8> {
    const BEHIND: usize = L3 + V6_HEADER + 8;
    let mut frame = fragments[0].bytes[..L3 + V6_HEADER].to_vec();
    frame[L3 + 6] = fragments[0].bytes[L3 + V6_HEADER];
    frame.extend(fragments.iter().flat_map(|fragment| &fragment.bytes[BEHIND..]));
    let length = u16::try_from(frame.len() - L3 - V6_HEADER).unwrap();
    frame[L3 + 4..L3 + 6].copy_from_slice(&length.to_be_bytes());
    frame
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The verification tags of an SCTP association (RFC 9260, section 8.5), in its flow table entry.
//!
//! Both sides choose a random tag in the handshake, and each packet carries the tag that its receiver chose. The tags
//! distinguish two associations with the same flow tuple, and an off-path sender does not know the tags.

/// Both tags of an association, each folded to 16 bits, in one word of a flow table entry. A tag is 0 until a packet
/// with the tag was translated. A wrong tag matches with a probability of 1 in 65 536.
///
/// A packet with chunk flag T (ABORT, SHUTDOWN COMPLETE) carries the tag that its sender received, so a packet of
/// either side may carry either tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tags(pub u32);

impl Tags {
    /// The tags of a new entry, after a client's packet with this verification tag (host order). The tag of the Pod's
    /// packets is still unknown.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn of_client_packet(tag: u32) -> Self {
        Self(fold(tag))
    }

    /// A copy in which the tag of the Pod's packets, if it was unknown, is the verification tag of this packet (host
    /// order).
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    #[must_use]
    pub const fn with_pod_packet(self, tag: u32) -> Self {
        if self.of_pod_packets() == 0 { Self(self.0 | fold(tag) << u16::BITS) } else { self }
    }

    /// Whether a Pod's packet with this verification tag, host order, belongs to the association: its tag matches, or
    /// the tag of the Pod's packets is unknown.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn admit_pod_packet(self, tag: u32) -> bool {
        self.of_pod_packets() == 0 || self.has(tag)
    }

    /// Whether a client's packet with this verification tag, host order, belongs to the association: its tag matches,
    /// or the tag of the client's packets is unknown.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn admit_client_packet(self, tag: u32) -> bool {
        self.of_client_packets() == 0 || self.has(tag)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    const fn has(self, tag: u32) -> bool {
        let folded = fold(tag);
        folded == self.of_client_packets() || folded == self.of_pod_packets()
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    const fn of_client_packets(self) -> u32 {
        self.0 & LOW
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    const fn of_pod_packets(self) -> u32 {
        self.0 >> u16::BITS
    }
}

const LOW: u32 = u16::MAX as u32;

/// Folds a tag to 16 bits other than zero.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
const fn fold(tag: u32) -> u32 {
    let folded = (tag ^ tag >> u16::BITS) & LOW;
    if folded == 0 { LOW } else { folded }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT_PACKETS: u32 = 0x1234_5678;
    const POD_PACKETS: u32 = 0x9abc_def0;
    const FORGED: u32 = 0x0bad_cafe;

    #[test]
    fn unknown_tag_admits_every_packet() {
        for tag in [0, CLIENT_PACKETS, POD_PACKETS, FORGED, u32::MAX] {
            assert!(Tags(0).admit_client_packet(tag) && Tags(0).admit_pod_packet(tag), "{tag:#x}");
            assert!(Tags::of_client_packet(CLIENT_PACKETS).admit_pod_packet(tag), "{tag:#x}");
        }
    }

    #[test]
    fn known_tags_admit_only_packets_with_one_of_them() {
        let tags = Tags::of_client_packet(CLIENT_PACKETS).with_pod_packet(POD_PACKETS);
        for tag in [CLIENT_PACKETS, POD_PACKETS] {
            assert!(tags.admit_client_packet(tag) && tags.admit_pod_packet(tag), "{tag:#x}");
        }
        for tag in [0, FORGED, CLIENT_PACKETS + 1, POD_PACKETS ^ 1 << 31] {
            assert!(!tags.admit_client_packet(tag) && !tags.admit_pod_packet(tag), "{tag:#x}");
        }
    }

    #[test]
    fn client_tag_is_required_before_the_pod_has_sent_a_packet() {
        let tags = Tags::of_client_packet(CLIENT_PACKETS);
        assert!(tags.admit_client_packet(CLIENT_PACKETS) && !tags.admit_client_packet(FORGED));
    }

    #[test]
    fn known_tag_of_the_pods_packets_is_kept() {
        let tags = Tags::of_client_packet(CLIENT_PACKETS).with_pod_packet(POD_PACKETS);
        assert_eq!(tags.with_pod_packet(FORGED), tags);
    }

    #[test]
    fn tag_whose_halves_are_equal_is_known() {
        let tags = Tags::of_client_packet(0x7777_7777).with_pod_packet(0x5555_5555);
        assert!(!tags.admit_client_packet(FORGED) && !tags.admit_pod_packet(FORGED));
        assert!(tags.admit_client_packet(0x7777_7777) && tags.admit_pod_packet(0x5555_5555));
    }
}

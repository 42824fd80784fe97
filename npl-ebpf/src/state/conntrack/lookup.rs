// SPDX-License-Identifier: GPL-2.0-only
//! Looks up the entry to which a packet belongs: by the flow tuple, or by the flow tuple and the packet's sequence and
//! acknowledgement numbers.

use npl_common::{
    conntrack::{Numbers, Phase, Segment, handshake_key, is_handshake_reply, mid_stream_key, reply_key},
    half_open,
    mapping::protocol,
};

use super::{Flow, has_handshake};
use crate::{
    base::cell::{Cell, field},
    net::headers::tcp_flag,
    state::{
        flow_entry::{flow_state, state_of},
        half_open_slots as slots,
        maps::Family,
        tuple::FlowTuple,
    },
};

impl<F: Family> Flow<'_, F> {
    /// Returns the flow table's entry for a Pod's packet. `None` if the entry belongs to another generation of the Pod.
    /// Also `None` if the packet has the SYN flag and cannot be a retransmitted SYN-ACK, because with such a packet,
    /// the Pod accepts or opens another connection.
    #[inline(always)]
    pub fn entry_of_reply(&self, reply: Segment, generation: u32) -> Option<*mut F::FlowEntry> {
        let entry = self.table_entry()?;
        let state = flow_state::<F>(entry);
        let is_of_pod = field!(state, generation).load() == generation;
        let is_of_flow = reply.flags & tcp_flag::SYN == 0 || state_of(state).may_repeat_syn_ack();
        if is_of_pod && is_of_flow { Some(entry) } else { None }
    }

    /// For a Pod's packet that accepts or rejects a connection, returns the half-open entry of this connection. The
    /// function looks for the entry of the handshake with the packet's acknowledgement number, then for the flow's
    /// mid-stream entry, and then for a half-open entry in the flow's own slot.
    ///
    /// If the packet's acknowledgement number matches a handshake, the phase of the handshake's entry does not matter.
    /// Late packets of a rejected handshake are therefore translated.
    #[inline(always)]
    pub fn opening_of_reply(&self, reply: Segment) -> Option<Cell<u64>> {
        if !is_handshake_reply(reply.flags) {
            return None;
        }
        if let Some(slot) = self.acknowledged_handshake(reply) {
            // All SCTP packets of the Pod have the tag of the client's INIT as verification tag. An ABORT after the
            // INIT ACK therefore also matches the handshake, although the ABORT belongs to the association in the flow
            // table.
            let is_of_association = self.protocol == protocol::SCTP
                && reply.flags & tcp_flag::SYN == 0
                && !half_open::phase(slot.load()).is(Phase::REQUESTED);
            return if is_of_association { None } else { Some(slot) };
        }
        // The entry in the flow's own slot is half-open if the flow's entry was removed from the flow table.
        let slot = self
            .mid_stream_of_reply(reply)
            .or_else(|| self.refused_of_reply(reply))
            .or_else(|| self.half_open().map(|_| self.entry))?;
        if half_open::phase(slot.load()).is_opening() { Some(slot) } else { None }
    }

    /// Returns the half-open entry by which a Pod's packet is translated. The function first looks for an entry in the
    /// flow's own slot. Otherwise, it looks for an entry in the flow's datagram slot (UDP), or for an entry that
    /// matches the packet's sequence and acknowledgement numbers (TCP, SCTP). `sctp_numbers` returns the numbers of an
    /// SCTP packet. If these numbers answer the client's packet that opened the mid-stream entry, this entry becomes
    /// the two entries of a handshake.
    #[inline(always)]
    pub fn half_open_of_reply(
        &self,
        reply: Segment,
        sctp_numbers: impl FnOnce() -> Option<Numbers>,
    ) -> Option<Cell<u64>> {
        if self.half_open().is_some() {
            return Some(self.entry);
        }
        if self.protocol == protocol::SCTP {
            let numbers = sctp_numbers()?;
            if numbers.0 != 0 {
                self.accept_answer(numbers, reply.acknowledgement());
            }
            // In SCTP, the sequence number of a packet other than INIT and INIT ACK is its verification tag; for an
            // ICMP error, the verification tag of the quoted packet.
            return self
                .acknowledged_handshake(reply)
                .or_else(|| F::half_open(index_of_tag::<F>(self.hash, reply.sequence())));
        }
        if has_handshake(self.protocol) {
            return self.acknowledged_handshake(reply).or_else(|| self.mid_stream_of_reply(reply));
        }
        // If the datagram slot is empty, another processor may have established the flow after the own slot was read.
        // That processor writes the own slot before it clears the datagram slot, so the own slot is read again.
        slots::find_datagram_flow::<F>(self.hash).or_else(|| self.half_open().map(|_| self.entry))
    }

    /// Returns the entry of the handshake whose SYN or INIT a Pod's packet acknowledges.
    #[inline(always)]
    fn acknowledged_handshake(&self, reply: Segment) -> Option<Cell<u64>> {
        if !has_handshake(self.protocol) {
            return None;
        }
        slots::find_handshake::<F>(handshake_key(self.hash, reply.acknowledgement())).map(|(slot, _)| slot)
    }

    /// Replaces the flow's mid-stream entry by the two entries of a handshake, if the Pod's SCTP packet answers the
    /// client's packet that opened the mid-stream entry. Both verification tags of the association are then known, as
    /// after a handshake, and packets with other tags match neither entry. `reply` contains the numbers of the Pod's
    /// packet, and `tag` is the packet's verification tag.
    ///
    /// If the flow still has an entry under [`handshake_key`] with another NAT address or phase, for example because
    /// only the entry under [`reply_key`] was lost, the answer changes no entry.
    #[inline(always)]
    fn accept_answer(&self, reply: Numbers, tag: u32) {
        let answered = answered_packet::<F>(self.hash, reply);
        if answered != 0 && store_replied::<F>(handshake_key(self.hash, tag), answered) {
            store_replied::<F>(reply_key(self.hash, (answered >> u32::BITS) as u32), answered);
            // The mid-stream entry is removed last, so that another processor always finds an entry. One of the new
            // entries may have overwritten the mid-stream entry.
            slots::remove_handshake::<F>(mid_stream_key(self.hash));
        }
    }

    /// Returns the mid-stream entry that a client's segment in the middle of a TCP connection opened, if the numbers of
    /// the Pod's segment match this entry.
    #[inline(always)]
    fn mid_stream_of_reply(&self, reply: Segment) -> Option<Cell<u64>> {
        if self.protocol != protocol::TCP {
            return None;
        }
        let key = mid_stream_key(self.hash);
        let (slot, index) = slots::find_handshake::<F>(key)?;
        let numbers = stored_numbers::<F>(key, slot.load(), index)?;
        if numbers.admit(reply) { Some(slot) } else { None }
    }

    /// Returns the mid-stream entry of an SCTP flow, if the Pod's packet is an ABORT that refuses the client's packet.
    /// The ABORT of a Pod without the association repeats the verification tag of the client's packet.
    #[inline(always)]
    fn refused_of_reply(&self, reply: Segment) -> Option<Cell<u64>> {
        if self.protocol != protocol::SCTP || reply.flags & tcp_flag::RST == 0 {
            return None;
        }
        F::half_open(index_of_tag::<F>(self.hash, reply.acknowledgement()))
    }

    /// Returns the slot and the key of the half-open entry that a client's packet establishes or aborts: the entry of a
    /// handshake, or the datagram entry of a UDP flow.
    #[inline(always)]
    pub(super) fn opened_by(&self, segment: &Segment) -> Option<(Cell<u64>, u64)> {
        if has_handshake(self.protocol) {
            return self.handshake_of_request(segment);
        }
        Some((slots::find_datagram_flow::<F>(self.hash)?, self.hash))
    }

    /// The slot and the key of the handshake that a client's packet completes or aborts.
    #[inline(always)]
    fn handshake_of_request(&self, segment: &Segment) -> Option<(Cell<u64>, u64)> {
        let is_reset =
            self.protocol == protocol::TCP && segment.flags & (tcp_flag::RST | tcp_flag::ACK) == tcp_flag::RST;
        let key = if is_reset {
            handshake_key(self.hash, segment.sequence())
        } else {
            reply_key(self.hash, segment.acknowledgement())
        };
        let (slot, _) = slots::find_handshake::<F>(key)?;
        Some((slot, key))
    }
}

/// Returns whether a client has a flow to a Pod through a mapping, in any phase. `numbers` are the sequence and
/// acknowledgement numbers of a segment of the Pod, by which handshakes are looked up.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
pub fn has_flow<F: Family>(seed: u64, tuple: &FlowTuple<F>, protocol: u8, numbers: Numbers) -> bool {
    let reply = Segment { numbers, flags: 0 };
    let key = F::flow_key(tuple, protocol);
    // The order of the look-ups matters, because another processor may replace an entry at the same time. The entries
    // of a handshake replace a mid-stream entry, and the flow's own entry replaces the entries of a handshake or a
    // datagram entry. A program writes the new entries before it removes the old entry, so this function looks up the
    // old entry first.
    Flow::<F>::new(seed, tuple, protocol, &key).is_some_and(|flow| {
        slots::find_handshake::<F>(mid_stream_key(flow.hash)).is_some()
            || flow.acknowledged_handshake(reply).is_some()
            || slots::find_handshake::<F>(reply_key(flow.hash, reply.sequence().wrapping_add(1))).is_some()
            || slots::find_datagram_flow::<F>(flow.hash).is_some()
            || flow.half_open().is_some()
            || flow.table_entry().is_some()
    })
}

/// Returns the stored numbers of a mid-stream entry: the sequence and acknowledgement numbers of the client's segment.
#[inline(always)]
pub(super) fn stored_numbers<F: Family>(key: u64, entry: u64, index: u32) -> Option<Numbers> {
    let cached = F::cached_reply(index)?;
    let numbers = Numbers(cached.load());
    let requested = half_open::with_phase(entry, Phase::REQUESTED);
    if cached.at(1).load() == numbers.checksum(key, requested) { Some(numbers) } else { None }
}

/// If the Pod's packet with the numbers `reply` answers the client's SCTP packet that opened the flow's mid-stream
/// entry, returns one word about the client's packet; otherwise 0. The high half of the word is the verification tag.
/// The low half is the NAT address, with the same bits as in a word of the half-open cache; all other bits are 0.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn answered_packet<F: Family>(hash: u64, reply: Numbers) -> u64 {
    let key = mid_stream_key(hash);
    let Some((slot, index)) = slots::find_handshake_inlined::<F>(key) else { return 0 };
    let entry = slot.load();
    let Some((numbers, tag)) = stored_packet::<F>(key, entry, index) else { return 0 };
    if !half_open::phase(entry).is_opening() || !numbers.are_answered_by(reply) {
        return 0;
    }
    let nat = half_open::entry(0, Phase::REQUESTED, half_open::address_index(entry), half_open::node_port(entry));
    u64::from(tag) << u32::BITS | nat
}

/// Writes the entry of an accepted handshake with the NAT address of the word `nat`, unless the half-open cache has an
/// entry with this key and another NAT address or phase. Returns whether the entry was written.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn store_replied<F: Family>(key: u64, nat: u64) -> bool {
    let Some((slot, _)) = slots::of_handshake::<F>(key) else { return false };
    let replied = half_open::entry(key, Phase::REPLIED, half_open::address_index(nat), half_open::node_port(nat));
    let known = slot.load();
    if half_open::matches(known, key) && known != replied {
        return false;
    }
    slot.store(replied);
    true
}

/// Returns the index of the flow's mid-stream entry, if a client's SCTP packet with the verification tag `tag` opened
/// the entry; otherwise, or if `tag` is 0, [`slots::NONE`]. A Pod that does not know the association answers with the
/// tag of the client's packet.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn index_of_tag<F: Family>(hash: u64, tag: u32) -> u32 {
    let key = mid_stream_key(hash);
    let Some((slot, index)) = slots::find_handshake_inlined::<F>(key) else { return slots::NONE };
    let Some((_, stored)) = stored_packet::<F>(key, slot.load(), index) else { return slots::NONE };
    if tag != 0 && tag == stored { index } else { slots::NONE }
}

/// Returns the numbers ([`Numbers::are_answered_by`]) and the verification tag that an SCTP flow's mid-stream entry
/// stores.
#[inline(always)]
fn stored_packet<F: Family>(key: u64, entry: u64, index: u32) -> Option<(Numbers, u32)> {
    let cached = F::cached_reply(index)?;
    let (numbers, word) = (Numbers(cached.load()), cached.at(1).load());
    let (requested, tag) = (half_open::with_phase(entry, Phase::REQUESTED), word as u32);
    if word == numbers.checksum_with_tag(key, requested, tag) { Some((numbers, tag)) } else { None }
}

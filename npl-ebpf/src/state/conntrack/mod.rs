// SPDX-License-Identifier: GPL-2.0-only
//! Tracks connections for reverse NAT. Requests are translated without a conntrack entry, and the client's next packet
//! recreates a lost entry.
//!
//! [`npl_common::conntrack`] contains the state machine. This module looks up a packet's entry, checks whether the
//! packet's sequence numbers match the entry, and executes the action of the state machine. A flow tuple can have
//! several entries at the same time:
//!
//! * The established flow has an entry in the flow table, and a copy of this entry in the flow's slot of the half-open
//!   cache.
//! * Each handshake has an entry.
//! * A packet other than a SYN or INIT can open one more entry: a mid-stream entry in TCP and SCTP, or a datagram entry
//!   in UDP.
//!
//! Entries of handshakes, mid-stream entries and datagram entries do not affect the entry of the established flow until
//! a reply of the Pod matches one of them.

mod lookup;

use npl_common::{
    conntrack::{
        Action, Event, Numbers, Phase, Segment, State, handshake_key, is_near_acknowledgement, mid_stream_key,
        reply_key, step,
    },
    flow::FlowState,
    half_open,
    mapping::{Endpoint, protocol},
    reason::Reason,
};

pub use self::lookup::has_flow;
use self::lookup::stored_numbers;
use super::{
    flow_entry::{flow_state, new_entry, refresh, state_of},
    half_open_slots as slots,
    lookup_cache::{self, Epoch},
    maps::Family,
    tuple::{FlowTuple, NatAddress},
};
use crate::{
    base::{
        cell::{Cell, field},
        stats::count_reason,
    },
    net::headers::tcp_flag,
};

/// A flow's key in the flow table, and its slot in the half-open cache.
///
/// The key is a reference to the caller's stack, not a copy. The compiler could place a copy in a stack slot that
/// previously held a pointer. If the loader lacks `CAP_PERFMON`, the verifier rejects this reuse of a stack slot.
pub struct Flow<'k, F: Family> {
    key: &'k F::FlowKey,
    pub protocol: u8,
    pub hash: u64,
    entry: Cell<u64>,
    slot: u32,
}

/// The properties of a client's packet that connection tracking needs.
pub struct Request<F: Family> {
    pub nat: NatAddress<F>,
    pub generation: u32,
    pub segment: Segment,
}

/// How a packet changed the state of its flow, for the counters of the mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    Unchanged,
    New,
    Established,
    /// The packet belongs to a host connection: see [`super::host_connection`].
    HostConnection,
}

/// Opens the entry of a handshake for a client's SYN. A retransmitted SYN leaves the entry unchanged. `payload` is the
/// number of payload bytes in the SYN.
///
/// The function neither reads nor writes the entry of an established flow. A SYN flood therefore costs little, and a
/// forged SYN does not affect an established connection. SYNs with different sequence numbers have different entries,
/// so a forged SYN does not affect another handshake with the same flow tuple.
#[inline(always)]
pub fn open_handshake<F: Family>(hash: u64, request: &Request<F>, payload: u32) -> Transition {
    let acknowledgement = request.segment.sequence().wrapping_add(1);
    let nat = &request.nat;
    let open = |key| open::<F>(key, half_open::entry(key, Phase::REQUESTED, nat.addr_index, nat.port));
    if payload != 0 {
        // TCP Fast Open: the Pod acknowledges either the SYN and its payload, or only the SYN.
        open(handshake_key(hash, acknowledgement.wrapping_add(payload)));
    }
    if open(handshake_key(hash, acknowledgement)) { Transition::New } else { Transition::Unchanged }
}

/// Writes the entry of a handshake to the half-open cache, with the phase "requested". Returns whether the handshake is
/// new.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn open<F: Family>(key: u64, requested: u64) -> bool {
    let Some((slot, _)) = slots::of_handshake::<F>(key) else { return false };
    let entry = slot.load();
    let phase = half_open::phase(entry);
    let same = half_open::with_phase(requested, phase);
    let state = State::half_open(if entry == same { phase } else { Phase::ABSENT });
    let (_, action) = step(state, Event::ClientSegment { flags: tcp_flag::SYN, is_proven: false });
    if action != Action::Open {
        return false;
    }
    if entry != same && half_open::matches(entry, key) {
        count_reason(Reason::TupleConflict as u32);
    }
    slot.store(requested);
    true
}

impl<'k, F: Family> Flow<'k, F> {
    /// Returns the flow with this flow tuple; `key` is the tuple's [`super::maps::FlowTable::flow_key`].
    #[inline(always)]
    pub fn new(seed: u64, tuple: &FlowTuple<F>, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        Self::with_hash(tuple.hash(seed, protocol), protocol, key)
    }

    /// Like [`Self::new`], but for a caller that has already computed the tuple's hash.
    #[inline(always)]
    pub fn with_hash(hash: u64, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        let (entry, slot) = slots::of_flow::<F>(hash)?;
        Some(Self { key, protocol, hash, entry, slot })
    }

    /// Returns the flow's entry in the flow table.
    #[inline(always)]
    pub fn table_entry(&self) -> Option<*mut F::FlowEntry> {
        F::flow_entry(self.key)
    }

    /// Removes the flow table's entry after the Pod has rejected the connection, although the client had completed the
    /// handshake. The copy in the half-open cache gets the phase "refused".
    #[inline(always)]
    fn remove_refused(&self) {
        // An error means that the flow table has no entry for the key.
        let _missing = F::remove_flow(self.key);
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) {
            self.entry.store(half_open::with_phase(entry, Phase::REFUSED));
        }
    }

    /// Removes the flow's entries from the flow table, and from the flow's own slot and datagram slot of the half-open
    /// cache: the action of [`Event::DirectConnection`]. If there was an entry, counts a tuple conflict.
    #[inline(always)]
    pub fn remove(&self) {
        const { assert!(matches!(step(State::established(0, 0), Event::DirectConnection).1, Action::Remove)) };
        let mut is_in_cache = half_open::matches(self.entry.load(), self.hash);
        if is_in_cache {
            self.entry.store(0);
        }
        is_in_cache |= slots::remove_datagram_flow::<F>(self.hash);
        if F::remove_flow(self.key).is_some() || is_in_cache {
            count_reason(Reason::TupleConflict as u32);
        }
    }

    /// Tracks a datagram that a client sends to the Pod directly: removes the entries of the translated UDP flow with
    /// the same flow tuple, if there are any. The Pod's next datagrams answer the direct datagram, so the programs must
    /// not translate them.
    ///
    /// If the flow's slot in the half-open cache is empty, the function does not look up the flow table, because the
    /// table then usually has no entry of the flow. In two cases, the table has an entry although the slot is empty.
    /// The agent may have copied the table's entry from the map of an earlier agent, or another flow may have
    /// overwritten the slot before that flow was removed.
    #[inline(always)]
    pub fn remove_if_direct(&self) {
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash)
            || (entry != 0 && self.table_entry().is_some())
            || slots::find_datagram_flow::<F>(self.hash).is_some()
        {
            self.remove();
        }
    }

    /// Returns the flow's slot of the half-open cache. The slot may contain the entry of another flow.
    #[inline(always)]
    pub const fn own_slot(&self) -> Cell<u64> {
        self.entry
    }

    /// Returns the content of the flow's slot of the half-open cache, if this content is an entry of the flow.
    #[inline(always)]
    fn half_open(&self) -> Option<u64> {
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) { Some(entry) } else { None }
    }

    /// Returns the flow's entry in the half-open cache, and the flow's endpoint from the reply cache. `None` if one of
    /// the two is missing or invalid. The reply cache has a valid copy of the endpoint only if the flow is established
    /// with the NAT address of the entry.
    #[inline(always)]
    pub fn cached_reply(&self, epoch: Epoch) -> Option<(u64, Endpoint)> {
        let entry = self.half_open()?;
        let endpoint = lookup_cache::load_reply(F::cached_reply(self.slot)?, self.hash, entry, epoch)?;
        Some((entry, endpoint))
    }

    /// Stores the endpoint of an established flow in the reply cache, if the flow's entry in the half-open cache has
    /// the same NAT address.
    #[inline(always)]
    pub fn cache_reply(&self, epoch: Epoch, endpoint: Endpoint, nat: &NatAddress<F>) {
        let entry = self.entry.load();
        let index = half_open::address_index(entry);
        if entry == half_open::entry(self.hash, Phase::ESTABLISHED, index, nat.port)
            && F::node_address(index).is_some_and(|addr| addr == nat.addr)
            && let Some(cached) = F::cached_reply(self.slot)
        {
            lookup_cache::store_reply(cached, self.hash, entry, epoch, &endpoint);
        }
    }

    /// Tracks a client's packet other than a SYN; [`open_handshake`] tracks SYNs.
    ///
    /// Most packets belong to an established flow whose slot in the half-open cache has the request's NAT address and
    /// the phase "established". For these packets, tracking takes only one load from memory. If a packet has no entry,
    /// `is_host_connection` decides whether the packet belongs to a host connection. `sctp_numbers` returns the numbers
    /// of an SCTP packet ([`Numbers::are_answered_by`]), and `None` for other protocols.
    #[inline(always)]
    pub fn track_request(
        &self,
        request: &Request<F>,
        is_host_connection: impl FnOnce() -> bool,
        sctp_numbers: impl FnOnce() -> Option<Numbers>,
    ) -> Transition {
        let entry = self.entry.load();
        let phase = half_open::phase(entry);
        if entry == self.entry_of(phase, &request.nat) && phase.is(Phase::ESTABLISHED) {
            if request.segment.flags & tcp_flag::OPENS_OR_ENDS == 0 {
                return Transition::Unchanged;
            }
        } else {
            // Other entries are looked up only if the flow's slot in the half-open cache has no entry of this flow.
            let is_own = half_open::matches(entry, self.hash);
            let opened = if is_own { Some((self.entry, self.hash)) } else { self.opened_by(&request.segment) };
            if let Some((slot, key)) = opened {
                let opening = slot.load();
                let phase = half_open::phase(opening);
                let same = half_open::entry(key, phase, request.nat.addr_index, request.nat.port);
                if opening == same && phase.is_opening() {
                    // Only the key of a handshake's entry depends on a sequence or acknowledgement number of the
                    // packet. A packet that matches another entry may be forged, so its FIN and RST do not count.
                    let is_proven = key != self.hash;
                    let counted = if is_proven { u8::MAX } else { !(tcp_flag::FIN | tcp_flag::RST) };
                    return self.track_half_open(request, request.segment.flags & counted, is_proven, slot, phase);
                }
            }
        }
        self.track_by_table(request, entry, is_host_connection, sctp_numbers)
    }

    /// Applies a client's packet to the half-open entry in `slot`: the flow's own slot, the flow's datagram slot, or the
    /// slot of a handshake whose numbers match the packet.
    #[inline(always)]
    fn track_half_open(
        &self,
        request: &Request<F>,
        flags: u8,
        is_proven: bool,
        slot: Cell<u64>,
        phase: Phase,
    ) -> Transition {
        let event = Event::from_client(self.protocol, flags, true);
        let (state, action) = step(State::half_open(phase), event);
        match action {
            Action::Store => {
                slot.store(half_open::with_phase(slot.load(), state.phase));
                Transition::Unchanged
            }
            Action::Establish => self.establish_and_clear(request, flags, is_proven),
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Replace | Action::Remove => {
                Transition::Unchanged
            }
        }
    }

    /// Tracks a client's packet by the flow table, if [`Self::track_request`] cannot track the packet by the half-open
    /// cache alone. For example, the cache has no entry of the flow or an entry with another NAT address, or the packet
    /// has the flag FIN or RST. If the flow table has no entry either, the packet belongs to a host connection, or is
    /// the first packet of a new flow.
    #[inline(always)]
    fn track_by_table(
        &self,
        request: &Request<F>,
        cached: u64,
        is_host_connection: impl FnOnce() -> bool,
        sctp_numbers: impl FnOnce() -> Option<Numbers>,
    ) -> Transition {
        if let Some(entry) = self.table_entry() {
            let state = flow_state::<F>(entry);
            let is_same =
                field!(state, node_port).load() == request.nat.port && F::nat_address(entry) == request.nat.addr;
            if is_same && field!(state, generation).load() == request.generation {
                let is_proven = self.refresh_by_client(state, request.segment);
                // A segment copies the table's entry to an empty slot only if the segment is proven, or if the
                // connection in the table is not ending. The slot is also empty after the Pod has accepted a new
                // connection with this flow tuple, while the table still has the entry of the previous connection. If a
                // forged segment restored the copy of this entry, the client's acknowledgement would match the copy,
                // and would not establish the new connection. The new connection would then have the short idle timeout
                // of an ended connection. If the connection in the table is not ending, no proof is required, because
                // in a fast upload, the client's sequence numbers are far ahead of the recorded acknowledgement number.
                if cached == 0 && (is_proven || !state_of(state).is_ending()) {
                    // With the copy, later packets need no look-up in the flow table. The copy is written only to an
                    // empty slot, because two active flows with the same slot would otherwise overwrite each other's
                    // copies with each packet.
                    self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
                }
                return Transition::Unchanged;
            }
            if !is_same {
                count_reason(Reason::TupleConflict as u32);
            }
            let mismatch = Event::ClientMismatch { protocol: self.protocol, is_same_nat: is_same };
            if step(State::established(0, 0), mismatch).1 == Action::Keep {
                return Transition::Unchanged;
            }
            // The segment is not proven for the new flow, so its FIN or RST does not count.
            let unproven = Segment { flags: 0, ..request.segment };
            // SAFETY: see `Family::flow_entry`. During the write, another processor may translate one reply with the
            // old NAT address.
            unsafe { entry.write(new_entry::<F>(&request.nat, request.generation, unproven)) };
            if half_open::matches(cached, self.hash) {
                // The copy in the flow's slot also gets the new NAT address; otherwise the client's next request would
                // be counted as a tuple conflict.
                self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
            }
            return Transition::Unchanged;
        }
        if is_host_connection() {
            return Transition::HostConnection;
        }
        if has_handshake(self.protocol) {
            if half_open::matches(cached, self.hash) && !half_open::phase(cached).is(Phase::REFUSED) {
                // Replies continue to use the NAT address of the entry in the flow's slot.
                let nat = &request.nat;
                if half_open::address_index(cached) != nat.addr_index || half_open::node_port(cached) != nat.port {
                    count_reason(Reason::TupleConflict as u32);
                }
                return Transition::Unchanged;
            }
            let Some(numbers) = sctp_numbers() else { return self.track_mid_stream(request) };
            if !request.segment.is_mid_stream() {
                return Transition::Unchanged;
            }
            let (key, nat) = (mid_stream_key(self.hash), &request.nat);
            let entry = half_open::entry(key, Phase::REQUESTED, nat.addr_index, nat.port);
            let index = slots::index_for_handshake::<F>(key);
            let is_new = open_mid_stream::<F>(index, key, entry, numbers, request.segment.acknowledgement());
            return if is_new { Transition::New } else { Transition::Unchanged };
        }
        let (state, action) = step(State::ABSENT, Event::ClientDatagram);
        if action == Action::Open {
            // If the flow's own slot contains an entry of this flow with another NAT address, the new entry replaces
            // this entry. Otherwise, replies would find the old entry, because they are looked up in the own slot
            // before the datagram slot.
            let slot = if half_open::matches(cached, self.hash) {
                self.entry
            } else {
                let Some((slot, _)) = slots::of_datagram_flow::<F>(self.hash) else { return Transition::Unchanged };
                slot
            };
            slot.store(self.entry_of(state.phase, &request.nat));
            return Transition::New;
        }
        Transition::Unchanged
    }

    /// Tracks a client's segment in the middle of a TCP connection that is not in the flow table. The segment opens a
    /// mid-stream entry, or is applied to the existing one. A reply matches the mid-stream entry if the numbers of the
    /// reply are near those of the segment.
    #[inline(always)]
    fn track_mid_stream(&self, request: &Request<F>) -> Transition {
        let key = mid_stream_key(self.hash);
        let Some((slot, index)) = slots::of_handshake::<F>(key) else { return Transition::Unchanged };
        let (entry, nat) = (slot.load(), &request.nat);
        let phase = half_open::phase(entry);
        let is_same = entry == half_open::entry(key, phase, nat.addr_index, nat.port);
        let state = State::half_open(if is_same { phase } else { Phase::ABSENT });
        let is_proven = is_same
            && stored_numbers::<F>(key, entry, index).is_some_and(|numbers| numbers.is_near(request.segment.numbers));
        let (next, action) = step(state, Event::from_client(self.protocol, request.segment.flags, is_proven));
        if action == Action::Establish {
            return self.establish_and_clear(request, request.segment.flags, true);
        }
        if action == Action::Store {
            slot.store(half_open::with_phase(entry, next.phase));
            return Transition::Unchanged;
        }
        if !request.segment.is_mid_stream() || !next.phase.is(Phase::REQUESTED) {
            return Transition::Unchanged;
        }
        let entry = half_open::entry(key, Phase::REQUESTED, nat.addr_index, nat.port);
        if let Some(cached) = F::cached_reply(index) {
            let numbers = request.segment.numbers;
            cached.store(numbers.0);
            cached.at(1).store(numbers.checksum(key, entry));
        }
        if action == Action::Open {
            slot.store(entry);
            return Transition::New;
        }
        Transition::Unchanged
    }

    #[inline(always)]
    fn establish_and_clear(&self, request: &Request<F>, flags: u8, is_proven: bool) -> Transition {
        if let Some(cached) = F::cached_reply(self.slot) {
            // The reply cache may still have a copy for the previous connection with the same flow tuple.
            lookup_cache::invalidate_reply(cached);
        }
        let transition = self.establish(request, flags, is_proven);
        if transition != Transition::Established {
            return transition;
        }
        slots::remove_datagram_flow::<F>(self.hash);
        if has_handshake(self.protocol) {
            let (sequence, acknowledgement) = (request.segment.sequence(), request.segment.acknowledgement());
            slots::remove_handshake::<F>(reply_key(self.hash, acknowledgement));
            slots::remove_handshake::<F>(handshake_key(self.hash, sequence));
            slots::remove_handshake::<F>(mid_stream_key(self.hash));
        }
        transition
    }

    /// Establishes the flow: writes an entry to the flow table, and a copy with the phase "established" to the flow's
    /// slot of the half-open cache.
    #[inline(always)]
    fn establish(&self, request: &Request<F>, flags: u8, is_proven: bool) -> Transition {
        let mut segment = Segment { flags, ..request.segment };
        if self.protocol == protocol::SCTP && !is_proven {
            // A packet that is not proven may be forged. An ABORT with the recorded tag shortens the idle timeout, so
            // the program must not record a tag that an attacker has chosen. The program records a part of the flow's
            // hash instead, which the attacker does not know.
            segment.numbers = Numbers(self.hash);
        }
        if F::insert_flow(self.key, &new_entry::<F>(&request.nat, request.generation, segment)).is_none() {
            count_reason(Reason::FlowTableFull as u32);
            return Transition::Unchanged;
        }
        self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
        Transition::Established
    }

    /// Applies a Pod's packet to the half-open entry in `slot`: the flow's own slot, the flow's datagram slot, or the
    /// slot of a handshake whose numbers match the packet.
    #[inline(always)]
    pub fn track_half_open_reply(
        &self,
        reply: Segment,
        slot: Cell<u64>,
        nat: &NatAddress<F>,
        endpoint: Endpoint,
    ) -> Transition {
        let entry = slot.load();
        // The caller has found no entry of this Pod in the flow table, but the entry in the half-open cache may
        // nevertheless have the phase "established". In this case, the kernel has evicted the table's entry, or the
        // table's entry belongs to an earlier Pod.
        let (state, _) = step(State::half_open(half_open::phase(entry)), Event::Eviction);
        let (state, action) = step(state, Event::from_pod(self.protocol, reply.flags, true));
        match action {
            Action::Establish => {
                let nat = NatAddress { ..*nat };
                let (generation, segment) = (endpoint.generation, Segment::DATAGRAM);
                let transition = self.establish(&Request { nat, generation, segment }, 0, true);
                if transition == Transition::Established {
                    slots::remove_datagram_flow::<F>(self.hash);
                }
                return transition;
            }
            Action::Store => {
                // The Pod's packet matches the mid-stream entry of an SCTP association only by the verification tag of
                // the client's packet. A Pod also repeats this tag if the association does not exist. The mid-stream
                // entry therefore stays "requested" until a packet of the Pod answers the client's packet.
                let is_unanswered = self.protocol == protocol::SCTP
                    && state.phase.is(Phase::REPLIED)
                    && half_open::matches(entry, mid_stream_key(self.hash));
                if !is_unanswered {
                    slot.store(half_open::with_phase(entry, state.phase));
                }
            }
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Replace | Action::Remove => {}
        }
        if reply.flags & tcp_flag::SYN != 0 && state.phase.is(Phase::REPLIED) {
            self.accept_handshake(reply, nat);
        }
        Transition::Unchanged
    }

    /// Records that the Pod has accepted a handshake with a SYN-ACK. Writes an entry under [`reply_key`], which the
    /// client's acknowledgement will match. Clears the flow's slot, because the slot's entry belongs to the previous
    /// connection with the same flow tuple.
    #[inline(always)]
    fn accept_handshake(&self, syn_ack: Segment, nat: &NatAddress<F>) {
        let key = reply_key(self.hash, syn_ack.sequence().wrapping_add(1));
        let replied = half_open::entry(key, Phase::REPLIED, nat.addr_index, nat.port);
        if let Some((slot, _)) = slots::of_handshake::<F>(key) {
            slot.store(replied);
        }
        if let Some(previous) = self.half_open() {
            self.entry.store(0);
            if !half_open::has_same_nat_address(previous, replied) {
                count_reason(Reason::TupleConflict as u32);
            }
        }
    }

    /// Applies a Pod's packet to the flow's entry in the flow table. Returns `false` if the entry was removed because
    /// of the packet.
    #[inline(always)]
    pub fn track_established_reply(&self, entry: *mut F::FlowEntry, reply: Segment) -> bool {
        let acknowledgement = if self.protocol == protocol::TCP && reply.flags & tcp_flag::ACK != 0 {
            Some(reply.acknowledgement())
        } else {
            None
        };
        let event = Event::from_pod(self.protocol, reply.flags, true);
        let is_kept = refresh(flow_state::<F>(entry), event, acknowledgement);
        if !is_kept {
            self.remove_refused();
        }
        is_kept
    }

    #[inline(always)]
    fn refresh_by_client(&self, state: *mut FlowState, segment: Segment) -> bool {
        // For SCTP, the comparison is one of verification tags. For a datagram, the state machine ignores `is_proven`.
        let is_proven = is_near_acknowledgement(segment.sequence(), field!(state, pod_acknowledgement).load());
        refresh(state, Event::from_client(self.protocol, segment.flags, is_proven), None);
        is_proven
    }

    #[inline(always)]
    fn entry_of(&self, phase: Phase, nat: &NatAddress<F>) -> u64 {
        half_open::entry(self.hash, phase, nat.addr_index, nat.port)
    }
}

/// Opens a mid-stream entry for a client's packet in the middle of an SCTP association. If the association already has
/// a mid-stream entry, writes the packet's numbers and verification tag to this entry. If the tag has not changed, a
/// number that the packet lacks keeps its stored value. Returns whether the entry is new. `index` is the index of the
/// entry's slot, `key` is the flow's [`mid_stream_key`], and `entry` is the word of the half-open cache.
///
/// The Pod discards a packet with a wrong verification tag. If the Pod's numbers answer the numbers of the packet, the
/// packet's tag is therefore proven, too.
///
/// The function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn open_mid_stream<F: Family>(index: u32, key: u64, entry: u64, numbers: Numbers, tag: u32) -> bool {
    let (Some(slot), Some(cached)) = (F::half_open(index), F::cached_reply(index)) else { return false };
    // The word of another flow, or a word with another NAT address or phase, counts as absent.
    let is_known = slot.load() == entry;
    let state = State::half_open(if is_known { Phase::REQUESTED } else { Phase::ABSENT });
    let (_, action) = step(state, Event::ClientSegment { flags: tcp_flag::ACK, is_proven: false });
    // The Pod's next packet may answer an earlier packet of the client, so a missing number does not replace a number.
    let has_same_tag = is_known && cached.at(1).load() as u32 == tag;
    let numbers = if has_same_tag { numbers.or_missing(Numbers(cached.load())) } else { numbers };
    cached.store(numbers.0);
    cached.at(1).store(numbers.checksum_with_tag(key, entry, tag));
    if action == Action::Open {
        slot.store(entry);
    }
    action == Action::Open
}

/// Returns whether the flows of this protocol begin with a handshake (TCP and SCTP).
#[inline(always)]
const fn has_handshake(protocol: u8) -> bool {
    protocol != protocol::UDP
}

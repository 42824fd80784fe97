// SPDX-License-Identifier: GPL-2.0-only
//! Connection tracking for reverse NAT. A lost entry is recreated by the client's next packet; requests never need one.
//!
//! The transitions are those of [`npl_common::conntrack`]; this module finds the entry that an event is about, decides
//! whether the packet's numbers prove it, and carries the action out. A flow tuple can have several entries: that of
//! its flow, in the half-open cache or the flow table, and those of handshakes, which take nothing from the flow until
//! the Pod accepts one.

use npl_common::{
    conntrack::{
        Action, Event, Numbers, Phase, Segment, State, handshake_key, is_handshake_reply, is_near_acknowledgement,
        mid_stream_key, reply_key, step,
    },
    flow::FlowState,
    half_open,
    mapping::{Endpoint, protocol},
    reason::Reason,
};

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

/// A flow's key, and its place in the half-open cache.
///
/// The key is a reference, because the kernel reads it from the stack: the verifier of a program without `CAP_PERFMON`
/// refuses to reuse a stack slot that held a pointer beside it.
pub struct Flow<'k, F: Family> {
    key: &'k F::FlowKey,
    pub protocol: u8,
    pub hash: u64,
    entry: Cell<u64>,
    slot: u32,
}

/// A client's packet, as far as connection tracking needs it.
pub struct Request<F: Family> {
    pub nat: NatAddress<F>,
    pub generation: u32,
    pub segment: Segment,
}

/// How a request changed the flow, for the counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    Unchanged,
    New,
    Established,
    /// The packet belongs to a connection of the Node itself.
    HostConnection,
}

/// Opens a handshake for a client's SYN, or finds the one in progress. `payload` is the number of bytes that the SYN
/// carries.
///
/// No other entry is read: a SYN flood costs little, and a forged SYN takes nothing from an established connection.
/// Each SYN has an entry of its own, so that a forged one takes nothing from another handshake of the tuple either.
#[inline(always)]
pub fn open_handshake<F: Family>(hash: u64, request: &Request<F>, payload: u32) -> Transition {
    let acknowledgement = request.segment.sequence().wrapping_add(1);
    let (flags, nat) = (request.segment.flags, &request.nat);
    if payload != 0 {
        // TCP Fast Open: the Pod acknowledges the payload with the SYN, or the SYN alone.
        let second = handshake_key(hash, acknowledgement.wrapping_add(payload));
        open::<F>(second, flags, nat.addr_index, nat.port);
    }
    let is_new = open::<F>(handshake_key(hash, acknowledgement), flags, nat.addr_index, nat.port);
    if is_new { Transition::New } else { Transition::Unchanged }
}

/// Opens a handshake; whether it is a new one.
#[inline(never)]
fn open<F: Family>(key: u64, flags: u8, addr_index: u8, node_port: u16) -> bool {
    let Some((slot, _)) = slots::of_handshake::<F>(key) else { return false };
    let entry = slot.load();
    let phase = half_open::phase(entry);
    let same = half_open::entry(key, phase, addr_index, node_port);
    let state = State::half_open(if entry == same { phase } else { Phase::ABSENT });
    let (state, action) = step(state, Event::ClientSegment { flags, is_proven: false });
    if action != Action::Open {
        return false;
    }
    if entry != same && half_open::matches(entry, key) {
        count_reason(Reason::TupleConflict as u32);
    }
    slot.store(half_open::entry(key, state.phase, addr_index, node_port));
    true
}

impl<'k, F: Family> Flow<'k, F> {
    /// The flow of a tuple; `key` is [`Family::flow_key`] of the same.
    #[inline(always)]
    pub fn new(seed: u64, tuple: &FlowTuple<F>, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        Self::with_hash(tuple.hash(seed, protocol), protocol, key)
    }

    /// The same, with the hash known.
    #[inline(always)]
    pub fn with_hash(hash: u64, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        let (entry, slot) = slots::of_flow::<F>(hash)?;
        Some(Self { key, protocol, hash, entry, slot })
    }

    /// The flow table's entry.
    #[inline(always)]
    pub fn table_entry(&self) -> Option<*mut F::FlowEntry> {
        F::flow_entry(self.key)
    }

    /// Whether the flow has an entry, but for that of a handshake in progress, which only its numbers find.
    #[inline(always)]
    pub fn has_entry(&self) -> bool {
        self.half_open().is_some()
            || self.table_entry().is_some()
            || slots::find_handshake::<F>(mid_stream_key(self.hash)).is_some()
    }

    /// Removes the entries of a flow whose handshake the Pod refused after the client had completed it.
    #[inline(always)]
    fn remove_refused(&self) {
        // A flow that is not there needs no removal.
        let _missing = F::remove_flow(self.key);
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) {
            self.entry.store(half_open::with_phase(entry, Phase::REFUSED));
        }
    }

    /// Removes all entries of the flow: a direct connection has taken its tuple.
    #[inline(always)]
    pub fn remove(&self) {
        let is_in_cache = half_open::matches(self.entry.load(), self.hash);
        if is_in_cache {
            self.entry.store(0);
        }
        if F::remove_flow(self.key).is_some() || is_in_cache {
            count_reason(Reason::TupleConflict as u32);
        }
    }

    /// Removes the entries of a UDP flow whose client sends to the Pod directly: replies follow its last datagram.
    ///
    /// An empty slot means that there is no entry, so that direct datagrams cost no look-up.
    #[inline(always)]
    pub fn remove_if_direct(&self) {
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) || (entry != 0 && self.table_entry().is_some()) {
            self.remove();
        }
    }

    /// The flow's own slot of the half-open cache, which another flow's entry may have.
    #[inline(always)]
    pub const fn own_slot(&self) -> Cell<u64> {
        self.entry
    }

    /// The flow's entry in its own slot of the half-open cache.
    #[inline(always)]
    fn half_open(&self) -> Option<u64> {
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) { Some(entry) } else { None }
    }

    /// The cached look-ups of the flow's replies: the flow is established as its entry says, and its sender is this
    /// endpoint.
    #[inline(always)]
    pub fn cached_reply(&self, epoch: Epoch) -> Option<(u64, Endpoint)> {
        let entry = self.half_open()?;
        let endpoint = lookup_cache::load_reply(F::cached_reply(self.slot)?, self.hash, entry, epoch)?;
        Some((entry, endpoint))
    }

    /// Caches the look-ups of a reply that the flow table has the flow of, if the half-open cache has the same NAT
    /// address.
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

    /// Tracks a client's packet that is no SYN: see [`open_handshake`].
    ///
    /// The hot path is one load: the half-open cache has this flow, by this NAT address, as established. A packet
    /// without an entry belongs to the Node's own connection if `is_host_connection` says so.
    #[inline(always)]
    pub fn track_request(&self, request: &Request<F>, is_host_connection: impl FnOnce() -> bool) -> Transition {
        let entry = self.entry.load();
        let phase = half_open::phase(entry);
        if entry == self.entry_of(phase, &request.nat) && phase.is(Phase::ESTABLISHED) {
            if request.segment.flags & tcp_flag::OPENS_OR_ENDS == 0 {
                return Transition::Unchanged;
            }
        } else {
            // Handshakes are looked up only where the flow's own slot has nothing.
            let is_own = half_open::matches(entry, self.hash);
            let opened =
                if is_own { Some((self.entry, self.hash)) } else { self.handshake_of_request(&request.segment) };
            if let Some((slot, key)) = opened {
                let opening = slot.load();
                let phase = half_open::phase(opening);
                let same = half_open::entry(key, phase, request.nat.addr_index, request.nat.port);
                if opening == same && phase.is_opening() {
                    return self.track_half_open(request, slot, phase);
                }
            }
        }
        self.track_by_table(request, entry, is_host_connection)
    }

    /// Tracks a client's packet on a half-open entry that its numbers prove.
    #[inline(always)]
    fn track_half_open(&self, request: &Request<F>, slot: Cell<u64>, phase: Phase) -> Transition {
        let event = Event::from_client(self.protocol, request.segment.flags, true);
        let (state, action) = step(State::half_open(phase), event);
        match action {
            Action::Store => {
                slot.store(half_open::with_phase(slot.load(), state.phase));
                Transition::Unchanged
            }
            Action::Establish => self.establish_and_clear(request),
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Remove => Transition::Unchanged,
        }
    }

    /// Tracks a client's packet that has no entry in the half-open cache: by the flow table, or as a new flow.
    #[inline(always)]
    fn track_by_table(
        &self,
        request: &Request<F>,
        cached: u64,
        is_host_connection: impl FnOnce() -> bool,
    ) -> Transition {
        if let Some(entry) = self.table_entry() {
            let state = flow_state::<F>(entry);
            let is_same =
                field!(state, node_port).load() == request.nat.port && F::nat_address(entry) == request.nat.addr;
            if is_same && field!(state, generation).load() == request.generation {
                self.refresh_by_client(state, request.segment);
                if cached == 0 {
                    // An empty slot is taken for speed; another flow's entry may be half-open and stays.
                    self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
                }
                return Transition::Unchanged;
            }
            if !is_same {
                count_reason(Reason::TupleConflict as u32);
                if self.protocol != protocol::UDP {
                    return Transition::Unchanged;
                }
            }
            // SAFETY: see `Family::flow_entry`; a reader of a half-written entry translates one packet by the old
            // address.
            unsafe { entry.write(new_entry::<F>(self.protocol, &request.nat, request.generation, request.segment)) };
            if half_open::matches(cached, self.hash) {
                // Otherwise the cached NAT address would hide the new one from the next request.
                self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
            }
            return Transition::Unchanged;
        }
        if is_host_connection() {
            return Transition::HostConnection;
        }
        if self.protocol == protocol::TCP {
            if half_open::matches(cached, self.hash) && !half_open::phase(cached).is(Phase::REFUSED) {
                // The flow's own slot has the flow by another NAT address, which stays.
                count_reason(Reason::TupleConflict as u32);
                return Transition::Unchanged;
            }
            return self.track_mid_stream(request);
        }
        // SCTP: a SHUTDOWN has FIN without ACK, and opens an entry as every other chunk does.
        let flags = if request.segment.flags & tcp_flag::OPENS_OR_ENDS == tcp_flag::FIN {
            request.segment.flags | tcp_flag::ACK
        } else {
            request.segment.flags
        };
        let (state, action) = step(State::ABSENT, Event::from_client(self.protocol, flags, false));
        if action == Action::Open {
            self.entry.store(self.entry_of(state.phase, &request.nat));
            return Transition::New;
        }
        Transition::Unchanged
    }

    /// Tracks a client's segment of a TCP connection without an entry: the entry that it opens takes a reply whose
    /// numbers are near its own.
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
            return self.establish_and_clear(request);
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
    fn establish_and_clear(&self, request: &Request<F>) -> Transition {
        if let Some(cached) = F::cached_reply(self.slot) {
            // The cached reply is of the tuple's previous connection.
            lookup_cache::invalidate_reply(cached);
        }
        let transition = self.establish(request);
        if transition == Transition::Established && has_handshake(self.protocol) {
            let (sequence, acknowledgement) = (request.segment.sequence(), request.segment.acknowledgement());
            slots::remove_handshake::<F>(reply_key(self.hash, acknowledgement));
            slots::remove_handshake::<F>(handshake_key(self.hash, sequence));
            slots::remove_handshake::<F>(mid_stream_key(self.hash));
        }
        transition
    }

    /// Moves the flow from the half-open cache to the flow table.
    #[inline(always)]
    fn establish(&self, request: &Request<F>) -> Transition {
        if F::insert_flow(self.key, &new_entry::<F>(self.protocol, &request.nat, request.generation, request.segment))
            .is_none()
        {
            count_reason(Reason::FlowTableFull as u32);
            return Transition::Unchanged;
        }
        self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
        Transition::Established
    }

    /// Tracks a Pod's packet on a half-open entry that its numbers prove.
    #[inline(always)]
    pub fn track_half_open_reply(
        &self,
        reply: Segment,
        slot: Cell<u64>,
        nat: &NatAddress<F>,
        endpoint: Endpoint,
    ) -> Transition {
        let entry = slot.load();
        // An established entry here is one that the flow table has evicted: the exchange starts over.
        let phase = half_open::phase(entry);
        let phase = if phase.is(Phase::ESTABLISHED) { Phase::REQUESTED } else { phase };
        let (state, action) = step(State::half_open(phase), Event::from_pod(self.protocol, reply.flags, true));
        match action {
            Action::Establish => {
                let nat = NatAddress { ..*nat };
                let (generation, segment) = (endpoint.generation, Segment::DATAGRAM);
                return self.establish(&Request { nat, generation, segment });
            }
            Action::Store => slot.store(half_open::with_phase(entry, state.phase)),
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Remove => {}
        }
        if reply.flags & tcp_flag::SYN != 0 && state.phase.is(Phase::REPLIED) {
            self.accept_handshake(reply, nat);
        }
        Transition::Unchanged
    }

    /// Notes that the Pod accepts a handshake: the client's segment that acknowledges the SYN-ACK establishes the flow,
    /// and the tuple's previous connection is over.
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

    /// Tracks a Pod's packet on a flow in the flow table; whether the flow still has its entry.
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
    fn refresh_by_client(&self, state: *mut FlowState, segment: Segment) {
        let is_proven = self.protocol != protocol::TCP
            || is_near_acknowledgement(segment.sequence(), field!(state, pod_acknowledgement).load());
        refresh(state, Event::from_client(self.protocol, segment.flags, is_proven), None);
    }

    /// The flow table's entry that a Pod's packet belongs to: not an earlier Pod's, whose generation differs, and not
    /// that of the tuple's previous connection, if the packet accepts a direct one.
    #[inline(always)]
    pub fn entry_of_reply(&self, reply: Segment, generation: u32) -> Option<*mut F::FlowEntry> {
        let entry = self.table_entry()?;
        let state = flow_state::<F>(entry);
        let is_of_pod = field!(state, generation).load() == generation;
        let is_of_flow = reply.flags & tcp_flag::SYN == 0 || state_of(state).may_repeat_syn_ack();
        if is_of_pod && is_of_flow { Some(entry) } else { None }
    }

    /// The handshake that a Pod's packet accepts or refuses: its numbers prove it.
    ///
    /// A handshake that the Pod's acknowledgement finds is the packet's in any phase: late packets of a refused one are
    /// translated too.
    #[inline(always)]
    pub fn opening_of_reply(&self, reply: Segment) -> Option<Cell<u64>> {
        if !is_handshake_reply(reply.flags) {
            return None;
        }
        if let Some(slot) = self.acknowledged_handshake(reply) {
            // Every SCTP packet of an association has the tag of its INIT: an ABORT after the handshake is for the flow
            // table.
            let is_of_association = self.protocol == protocol::SCTP
                && reply.flags & tcp_flag::SYN == 0
                && !half_open::phase(slot.load()).is(Phase::REQUESTED);
            return if is_of_association { None } else { Some(slot) };
        }
        // A half-open flow without a handshake has its own slot, as SCTP in the middle of an association.
        let slot = self.mid_stream_of_reply(reply).or_else(|| self.half_open().map(|_| self.entry))?;
        if half_open::phase(slot.load()).is_opening() { Some(slot) } else { None }
    }

    /// The half-open entry that a Pod's packet belongs to: its numbers prove it, or the flow was established by this
    /// entry.
    #[inline(always)]
    pub fn half_open_of_reply(&self, reply: Segment) -> Option<Cell<u64>> {
        if self.half_open().is_some() {
            return Some(self.entry);
        }
        self.acknowledged_handshake(reply).or_else(|| self.mid_stream_of_reply(reply))
    }

    /// The entry of the handshake whose SYN a Pod's packet acknowledges.
    #[inline(always)]
    fn acknowledged_handshake(&self, reply: Segment) -> Option<Cell<u64>> {
        if !has_handshake(self.protocol) {
            return None;
        }
        slots::find_handshake::<F>(handshake_key(self.hash, reply.acknowledgement())).map(|(slot, _)| slot)
    }

    /// The entry of a TCP connection in whose middle a Pod's segment is.
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

    /// The handshake that a client's packet completes or aborts, and the key of its entry.
    #[inline(always)]
    fn handshake_of_request(&self, segment: &Segment) -> Option<(Cell<u64>, u64)> {
        if !has_handshake(self.protocol) {
            return None;
        }
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

    #[inline(always)]
    fn entry_of(&self, phase: Phase, nat: &NatAddress<F>) -> u64 {
        half_open::entry(self.hash, phase, nat.addr_index, nat.port)
    }
}

/// Whether a client has a flow to a Pod through a mapping on which the Pod has replied, and which neither has aborted.
/// The numbers of a Pod's segment find the handshake that it accepts.
///
/// A function of its own: its caller has no stack left.
#[inline(never)]
pub fn has_pod_replied<F: Family>(seed: u64, tuple: &FlowTuple<F>, protocol: u8, numbers: Numbers) -> bool {
    let reply = Segment { numbers, flags: 0 };
    let key = F::flow_key(tuple, protocol);
    Flow::<F>::new(seed, tuple, protocol, &key).is_some_and(|flow| {
        flow.half_open().is_some_and(|entry| half_open::phase(entry).has_pod_replied())
            || flow.table_entry().is_some()
            || slots::find_handshake::<F>(mid_stream_key(flow.hash))
                .is_some_and(|(slot, _)| half_open::phase(slot.load()).has_pod_replied())
            || (slots::find_handshake::<F>(reply_key(flow.hash, reply.sequence().wrapping_add(1))).is_some()
                && !flow
                    .acknowledged_handshake(reply)
                    .is_some_and(|slot| half_open::phase(slot.load()).is(Phase::REFUSED)))
    })
}

/// Whether flows of a protocol begin with a handshake.
#[inline(always)]
const fn has_handshake(protocol: u8) -> bool {
    protocol != protocol::UDP
}

/// The numbers of the client's segment that opened an entry in the middle of a connection.
#[inline(always)]
fn stored_numbers<F: Family>(key: u64, entry: u64, index: u32) -> Option<Numbers> {
    let cached = F::cached_reply(index)?;
    let numbers = Numbers(cached.load());
    let requested = half_open::with_phase(entry, Phase::REQUESTED);
    if cached.at(1).load() == numbers.checksum(key, requested) { Some(numbers) } else { None }
}

// SPDX-License-Identifier: GPL-2.0-only
//! Connection tracking for reverse NAT. A lost entry is recreated by the client's next packet; requests never need one.
//!
//! The transitions are those of [`npl_common::conntrack`]; this module finds the entry that an event is about, and carries the action
//! out. A flow tuple can have two entries: that of its flow, in the half-open cache or the flow table, and that of a handshake, which
//! the client's SYN opens in slots of its own and which takes nothing from the flow until the Pod accepts it.

use npl_common::{
    config::Config,
    conntrack::{
        Action, Event, Phase, State, belongs_to_handshake, is_direct_handshake, is_handshake_reply, is_syn, step,
    },
    flow::{FlowState, REFRESH_INTERVAL_JIFFIES},
    half_open,
    mapping::{Endpoint, protocol},
    reason::Reason,
};

use super::{
    half_open_slots as slots,
    lookup_cache::{self, Epoch},
    maps::Family,
    tuple::{FlowTuple, NatAddress},
};
use crate::{
    base::{
        cell::{Cell, field},
        clock::{jiffies, nanoseconds},
        stats::count_reason,
    },
    net::headers::tcp_flag,
};

/// A flow's key, and its place in the half-open cache.
///
/// The key is a reference, because the kernel reads it from the stack: the verifier of a program without `CAP_PERFMON` refuses to reuse
/// a stack slot that held a pointer beside it.
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
    pub ifindex: u32,
    pub tcp_flags: u8,
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

/// Opens a handshake for a client's SYN, or finds the one in progress.
///
/// No other entry is read: a SYN flood costs little, and a forged SYN takes nothing from an established connection.
#[inline(always)]
pub fn open_handshake<F: Family>(hash: u64, protocol: u8, request: &Request<F>) -> Transition {
    let slots = (half_open::handshake_slot(hash), half_open::second_handshake_slot(hash));
    let Some((slot, _)) = slots::find::<F>(hash, slots) else { return Transition::Unchanged };
    let entry = slot.load();
    let phase = half_open::phase(entry);
    let same = half_open::entry(hash, phase, request.nat.addr_index, request.nat.port);
    let state = State::half_open(if entry == same { phase } else { Phase::ABSENT });
    let (state, action) = step(state, Event::from_client(protocol, request.tcp_flags));
    if action != Action::Open {
        return Transition::Unchanged;
    }
    if entry != same && half_open::matches(entry, hash) {
        count_reason(Reason::TupleConflict as u32);
    }
    slot.store(half_open::entry(hash, state.phase, request.nat.addr_index, request.nat.port));
    Transition::New
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
        let (entry, slot) = slots::find::<F>(hash, (half_open::slot(hash), half_open::second_slot(hash)))?;
        Some(Self { key, protocol, hash, entry, slot })
    }

    /// The flow table's entry.
    #[inline(always)]
    pub fn table_entry(&self) -> Option<*mut F::FlowEntry> {
        F::flow_entry(self.key)
    }

    /// Whether the flow has an entry of any kind.
    #[inline(always)]
    pub fn has_entry(&self) -> bool {
        self.half_open().is_some() || self.handshake().is_some() || self.table_entry().is_some()
    }

    /// Removes the entries of a flow whose handshake the Pod refused after the client had completed it.
    #[inline(always)]
    pub fn remove_refused(&self) {
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
        let was_opening = self.set_handshake(0);
        if F::remove_flow(self.key).is_some() || is_in_cache || was_opening {
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

    /// The flow's entry in the half-open cache, if it has the slot.
    #[inline(always)]
    pub fn half_open(&self) -> Option<u64> {
        let entry = self.entry.load();
        if half_open::matches(entry, self.hash) { Some(entry) } else { None }
    }

    /// The cached look-ups of the flow's replies: the flow is established as its entry says, and its sender is this endpoint.
    #[inline(always)]
    pub fn cached_reply(&self, epoch: Epoch) -> Option<(u64, Endpoint)> {
        let entry = self.half_open()?;
        let endpoint = lookup_cache::load_reply(F::cached_reply(self.slot)?, self.hash, entry, epoch)?;
        Some((entry, endpoint))
    }

    /// Caches the look-ups of a reply that the flow table has the flow of, if the half-open cache has the same NAT address.
    #[inline(always)]
    pub fn cache_reply(&self, epoch: Epoch, endpoint: &Endpoint, nat: &NatAddress<F>) {
        let entry = self.entry.load();
        let index = half_open::address_index(entry);
        if entry == half_open::entry(self.hash, Phase::ESTABLISHED, index, nat.port)
            && F::node_address(index).is_some_and(|addr| addr == nat.addr)
            && let Some(cached) = F::cached_reply(self.slot)
        {
            lookup_cache::store_reply(cached, self.hash, entry, epoch, endpoint);
        }
    }

    /// Tracks a client's packet that is no SYN: see [`open_handshake`].
    ///
    /// The hot path is one load: the half-open cache has this flow, by this NAT address, as established. A packet without an entry
    /// belongs to the Node's own connection if `is_host_connection` says so.
    #[inline(always)]
    pub fn track_request(&self, request: &Request<F>, is_host_connection: impl FnOnce() -> bool) -> Transition {
        let entry = self.entry.load();
        let phase = half_open::phase(entry);
        if entry == self.entry_of(phase, &request.nat) && phase.is(Phase::ESTABLISHED) {
            if request.tcp_flags & tcp_flag::OPENS_OR_ENDS == 0 {
                return Transition::Unchanged;
            }
        } else {
            // The handshake is looked up only where the flow's own slot has nothing.
            let opened = if half_open::matches(entry, self.hash) { Some(entry) } else { self.handshake() };
            if let Some(opened) = opened
                && opened == self.entry_of(half_open::phase(opened), &request.nat)
                && half_open::phase(opened).is_opening()
            {
                return self.track_half_open(request, opened);
            }
        }
        self.track_by_table(request, entry, is_host_connection)
    }

    /// Tracks a client's packet on a flow that it has opened.
    #[inline(always)]
    fn track_half_open(&self, request: &Request<F>, entry: u64) -> Transition {
        let state = State::half_open(half_open::phase(entry));
        let (state, action) = step(state, Event::from_client(self.protocol, request.tcp_flags));
        match action {
            Action::Store => {
                self.set_half_open(0, half_open::with_phase(entry, state.phase));
                Transition::Unchanged
            }
            Action::Establish => {
                if let Some(cached) = F::cached_reply(self.slot) {
                    // The cached reply is of the tuple's previous connection.
                    lookup_cache::invalidate_reply(cached);
                }
                let transition = self.establish(request);
                if transition == Transition::Established {
                    self.set_handshake(0);
                }
                transition
            }
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Remove => Transition::Unchanged,
        }
    }

    /// Tracks a client's packet that the half-open cache does not know: by the flow table, or as a new flow.
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
                refresh(state, Event::from_client(self.protocol, request.tcp_flags));
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
            // SAFETY: see `Family::flow_entry`; a reader that meets a half-written entry translates one packet by the old address.
            unsafe { entry.write(new_entry::<F>(request)) };
            if half_open::matches(cached, self.hash) {
                // Otherwise the cached NAT address would hide the new one from the next request.
                self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
            }
            return Transition::Unchanged;
        }
        if is_host_connection() {
            return Transition::HostConnection;
        }
        let (state, action) = step(State::ABSENT, Event::from_client(self.protocol, request.tcp_flags));
        if action == Action::Open {
            self.entry.store(self.entry_of(state.phase, &request.nat));
            return Transition::New;
        }
        Transition::Unchanged
    }

    /// Moves the flow from the half-open cache to the flow table.
    #[inline(always)]
    pub fn establish(&self, request: &Request<F>) -> Transition {
        if F::insert_flow(self.key, &new_entry::<F>(request)).is_none() {
            count_reason(Reason::FlowTableFull as u32);
            return Transition::Unchanged;
        }
        self.entry.store(self.entry_of(Phase::ESTABLISHED, &request.nat));
        Transition::Established
    }

    /// Tracks a Pod's packet on a flow in the half-open cache.
    #[inline(always)]
    pub fn track_half_open_reply(
        &self,
        tcp_flags: u8,
        entry: u64,
        nat: &NatAddress<F>,
        endpoint: &Endpoint,
    ) -> Transition {
        // An established entry here is one that the flow table has evicted: the exchange starts over.
        let phase = half_open::phase(entry);
        let phase = if phase.is(Phase::ESTABLISHED) { Phase::REQUESTED } else { phase };
        let (state, action) = step(State::half_open(phase), Event::from_pod(self.protocol, tcp_flags));
        match action {
            Action::Establish => {
                let nat = NatAddress { ..*nat };
                self.establish(&Request { nat, generation: endpoint.generation, ifindex: 0, tcp_flags: 0 })
            }
            Action::Store => {
                self.set_half_open(tcp_flags, half_open::with_phase(entry, state.phase));
                Transition::Unchanged
            }
            Action::Ignore | Action::Keep | Action::Open | Action::Refresh | Action::Remove => Transition::Unchanged,
        }
    }

    /// Tracks a Pod's packet on a flow in the flow table; whether the flow still has its entry.
    #[inline(always)]
    pub fn track_established_reply(&self, entry: *mut F::FlowEntry, tcp_flags: u8) -> bool {
        let is_kept = refresh(flow_state::<F>(entry), Event::from_pod(self.protocol, tcp_flags));
        if !is_kept {
            self.remove_refused();
        }
        is_kept
    }

    /// The flow table's entry that a Pod's packet belongs to: not an earlier Pod's, whose generation differs, and not that of the
    /// tuple's previous connection, if the packet belongs to a handshake.
    #[inline(always)]
    pub fn entry_of_reply(&self, tcp_flags: u8, generation: u32, is_direct: bool) -> Option<*mut F::FlowEntry> {
        if belongs_to_handshake(tcp_flags, || self.is_opening()) {
            return None;
        }
        let entry = self.table_entry()?;
        let state = flow_state::<F>(entry);
        let is_of_pod = field!(state, generation).load() == generation;
        if is_of_pod && (!is_direct || state_of(state).may_repeat_syn_ack()) { Some(entry) } else { None }
    }

    /// Whether a Pod's packet accepts or opens a direct connection.
    #[inline(always)]
    pub fn is_direct_handshake(&self, tcp_flags: u8) -> bool {
        is_direct_handshake(tcp_flags, || self.is_opening())
    }

    /// Whether the client is opening the flow, for the first time or again.
    #[inline(always)]
    fn is_opening(&self) -> bool {
        let is_opening = |entry| half_open::phase(entry).is_opening();
        self.handshake().is_some_and(is_opening) || self.half_open().is_some_and(is_opening)
    }

    /// The entry of the last handshake.
    #[inline(always)]
    fn handshake(&self) -> Option<u64> {
        let entry = if has_handshake(self.protocol) { slots::handshake_entry::<F>(self.hash) } else { 0 };
        if entry == 0 { None } else { Some(entry) }
    }

    /// The entry in the half-open cache that a Pod's packet belongs to.
    #[inline(always)]
    pub fn half_open_of_reply(&self, tcp_flags: u8) -> Option<u64> {
        let entry = self.half_open();
        if entry.is_some() && !is_handshake_reply(tcp_flags) { entry } else { self.handshake().or(entry) }
    }

    /// Replaces the entry that [`Self::half_open_of_reply`] gave. A SYN-ACK ends the tuple's previous connection: the client's next
    /// packet belongs to the new one.
    #[inline(always)]
    fn set_half_open(&self, tcp_flags: u8, entry: u64) {
        let is_handshake = is_handshake_reply(tcp_flags) || self.half_open().is_none();
        if !is_handshake || !self.set_handshake(entry) {
            self.entry.store(entry);
        } else if tcp_flags & tcp_flag::SYN != 0
            && let Some(previous) = self.half_open()
        {
            self.entry.store(0);
            if !half_open::has_same_nat_address(previous, entry) {
                count_reason(Reason::TupleConflict as u32);
            }
        }
    }

    /// Replaces the entry of the last handshake, if there is one; whether there was.
    #[inline(always)]
    fn set_handshake(&self, entry: u64) -> bool {
        has_handshake(self.protocol) && slots::store_handshake::<F>(self.hash, entry)
    }

    #[inline(always)]
    fn entry_of(&self, phase: Phase, nat: &NatAddress<F>) -> u64 {
        half_open::entry(self.hash, phase, nat.addr_index, nat.port)
    }
}

/// Whether a client has a flow to a Pod through a mapping, and has not aborted its handshake.
#[inline(always)]
pub fn has_flow<F: Family>(config: &Config, tuple: &FlowTuple<F>, protocol: u8) -> bool {
    let key = F::flow_key(tuple, protocol);
    Flow::<F>::new(config.seed, tuple, protocol, &key).is_some_and(|flow| {
        flow.half_open_of_reply(0).is_some_and(|entry| !half_open::phase(entry).is(Phase::REFUSED))
            || flow.table_entry().is_some()
    })
}

/// The NAT address of an entry in the flow table.
#[inline(always)]
pub fn established_nat<F: Family>(entry: *mut F::FlowEntry) -> NatAddress<F> {
    let port = field!(flow_state::<F>(entry), node_port).load();
    NatAddress { addr: F::nat_address(entry), addr_index: 0, port }
}

/// Whether flows of a protocol begin with a handshake.
#[inline(always)]
const fn has_handshake(protocol: u8) -> bool {
    protocol != protocol::UDP
}

/// The family-independent part of an entry, which is its first field.
#[inline(always)]
fn flow_state<F: Family>(entry: *mut F::FlowEntry) -> *mut FlowState {
    entry.cast()
}

#[inline(always)]
fn state_of(state: *mut FlowState) -> State {
    State::established(field!(state, client_tcp_flags).load(), field!(state, pod_tcp_flags).load())
}

/// Applies an event to an established entry, and refreshes its time; `false` if the event removes the entry.
#[inline(always)]
fn refresh(entry: *mut FlowState, event: Event) -> bool {
    let (client_flags, pod_flags) = (field!(entry, client_tcp_flags), field!(entry, pod_tcp_flags));
    let before = State::established(client_flags.load(), pod_flags.load());
    let (after, action) = step(before, event);
    if action == Action::Remove {
        return false;
    }
    if after.client_flags != before.client_flags {
        client_flags.store(after.client_flags);
    }
    if after.pod_flags != before.pod_flags {
        pod_flags.store(after.pod_flags);
    }
    let (now, refreshed) = (jiffies(), field!(entry, refreshed));
    if now.wrapping_sub(refreshed.load()) >= REFRESH_INTERVAL_JIFFIES {
        refreshed.store(now);
        field!(entry, last_seen_ns).store(nanoseconds());
    }
    true
}

#[inline(always)]
fn new_entry<F: Family>(request: &Request<F>) -> F::FlowEntry {
    let state = State::established(request.tcp_flags, 0);
    let state = FlowState {
        last_seen_ns: nanoseconds(),
        generation: request.generation,
        refreshed: jiffies(),
        ifindex: request.ifindex,
        node_port: request.nat.port,
        client_tcp_flags: state.client_flags,
        pod_tcp_flags: state.pod_flags,
    };
    F::new_flow_entry(state, request.nat.addr)
}

/// Whether a client's packet is a SYN, which opens a handshake.
#[inline(always)]
pub const fn opens_handshake(tcp_flags: u8) -> bool {
    is_syn(tcp_flags)
}

// SPDX-License-Identifier: GPL-2.0-only
//! What is remembered of flows, so that replies find back. Requests never depend on it: losing an entry loses nothing
//! that the client's next packet does not bring back.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns};
use npl_common::{
    config::Config,
    flow::{FlowState, TOUCH_INTERVAL_JIFFIES},
    mapping::{Endpoint, protocol},
    reason::Reason,
    syn::{self, state},
};

use crate::{
    family::{Ends, Family},
    hint::{self, Epoch},
    packet::tcp_flag,
    stats, word,
};

/// A flow's identity and its place in the half-open cache.
///
/// The key is apart, since it has to lie in memory for the kernel: where a pointer lay beside it, the verifier lets a
/// program without `CAP_PERFMON` put nothing else afterwards.
pub struct Flow<'k, F: Family> {
    key: &'k F::FlowKey,
    pub protocol: u8,
    pub hash: u64,
    slot: *mut u64,
    /// Where the slot is.
    index: u32,
}

/// What a client believes it talks to.
pub struct NodeEnd<F: Family> {
    pub addr: F::Addr,
    /// Position of `addr` among the local addresses.
    pub addr_index: u8,
    /// Host order.
    pub port: u16,
}

/// A packet of a client, as far as flow state is concerned.
pub struct Request<F: Family> {
    pub node: NodeEnd<F>,
    pub generation: u32,
    pub ifindex: u32,
    pub tcp_flags: u8,
}

/// What a request did to the flow state, for the counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Known,
    New,
    Established,
    /// Nothing: it is the host's.
    OfHost,
}

impl<'k, F: Family> Flow<'k, F> {
    /// The flow between a client and a Pod; `key` is [`crate::family::Tables::flow_key`] of the same.
    #[inline(always)]
    pub fn new(seed: u64, ends: &Ends<F>, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        Self::of_hash(hash(seed, ends, protocol), protocol, key)
    }

    /// The same, where its hash is known.
    #[inline(always)]
    pub fn of_hash(hash: u64, protocol: u8, key: &'k F::FlowKey) -> Option<Self> {
        let (slot, index) = choose_slot::<F>(hash, syn::slot(hash), syn::second_slot(hash))?;
        Some(Self { key, protocol, hash, slot, index })
    }

    /// The flow's entry in the flow table.
    #[inline(always)]
    pub fn entry(&self) -> Option<*mut F::Flow> {
        F::flow(self.key)
    }

    /// Whether anything is known of it.
    #[inline(always)]
    pub fn is_remembered(&self) -> bool {
        self.half_open().is_some() || self.attempt().is_some() || self.entry().is_some()
    }

    /// Takes a flow out of the table that the Pod refuses, having said nothing on it: whoever forges a SYN can forge what
    /// follows it too, and takes no place of others by it. The client hears of it by the cache, however often he asks.
    #[inline(always)]
    pub fn was_refused(&self) {
        // One that is gone already is as good as removed.
        let _missing = F::remove_flow(self.key);
    }

    /// Forgets it, since its client has come to the Pod directly by now.
    #[inline(always)]
    pub fn forget(&self) {
        let is_in_slot = self.half_open().is_some();
        if is_in_slot {
            self.set_slot(0);
        }
        let was_attempted = self.set_attempt(0);
        if F::remove_flow(self.key).is_some() || is_in_slot || was_attempted {
            stats::count(Reason::Collision);
        }
    }

    /// Takes note of a datagram of the client to the Pod itself: to the Pod the two are one flow, and its replies are for the
    /// way that the client has taken last.
    ///
    /// An empty slot says that there is none, so that nearly all that passes by is not looked up.
    #[inline(always)]
    pub fn note_direct(&self) {
        let word = self.slot_word();
        if syn::matches(word, self.hash) || (word != 0 && self.entry().is_some()) {
            self.forget();
        }
    }

    /// The flow's word in the half-open cache, if the slot is this flow's now.
    #[inline(always)]
    pub fn half_open(&self) -> Option<u64> {
        let word = self.slot_word();
        if syn::matches(word, self.hash) { Some(word) } else { None }
    }

    /// What the flow's last reply was found to be, if that was a moment ago and nothing has changed since: established as the
    /// flow's word in the half-open cache has it, and its sender an endpoint.
    #[inline(always)]
    pub fn hint(&self, epoch: Epoch) -> Option<(u64, Endpoint)> {
        let word = self.half_open()?;
        Some((word, hint::read_reply(F::reply_hint(self.index)?, self.hash, word, epoch)?))
    }

    /// Leaves one: the sender is an endpoint, and the flow table has this flow with the client's end of it. Not where the
    /// slot, which is to tell that, says something else.
    #[inline(always)]
    pub fn leave_hint(&self, epoch: Epoch, endpoint: &Endpoint, node: &NodeEnd<F>) {
        let word = self.slot_word();
        let index = syn::address_index(word);
        if word == syn::word(self.hash, state::ESTABLISHED, index, node.port)
            && F::local_address(index).is_some_and(|addr| addr == node.addr)
            && let Some(hint) = F::reply_hint(self.index)
        {
            hint::write_reply(hint, self.hash, word, epoch, endpoint);
        }
    }

    /// Notes a packet of the client, which does not ask for a connection: that is [`crate::attempt::open`]'s.
    ///
    /// The hot path is one load: the slot says that this very flow, by this node address and port, is established. What may
    /// belong to nothing that clients have begun is the host's, if that `is_of_host`.
    #[inline(always)]
    pub fn note_request(&self, request: &Request<F>, is_of_host: impl FnOnce() -> bool) -> Progress {
        let word = self.slot_word();
        let mine = syn::word(self.hash, state(word), request.node.addr_index, request.node.port);
        if word == mine && state(word) == state::ESTABLISHED {
            if request.tcp_flags & tcp_flag::OPENS_OR_ENDS == 0 {
                return Progress::Known;
            }
        } else {
            // Of an attempt nothing is known but where the slot says nothing of the flow.
            let opened = if syn::matches(word, self.hash) { Some(word) } else { self.attempt() };
            if let Some(opened) = opened
                && opened == syn::word(self.hash, state(opened), request.node.addr_index, request.node.port)
                && syn::opens(opened)
            {
                return self.note_opened(request, opened);
            }
        }
        self.note_by_table(request, word, is_of_host)
    }

    /// Notes a packet on what the client has opened: once the Pod has replied, it is established.
    #[inline(always)]
    fn note_opened(&self, request: &Request<F>, word: u64) -> Progress {
        // Nobody breaks off what was not answered, but whoever forges that.
        if state(word) != state::REPLIED {
            return Progress::Known;
        }
        if request.tcp_flags & tcp_flag::RST != 0 {
            self.set_asked(0, syn::with_state(word, state::CLOSED));
            return Progress::Known;
        }
        if let Some(hint) = F::reply_hint(self.index) {
            // Of the last connection of these ends; of this one the entry has heard nothing yet.
            hint::discard_reply(hint);
        }
        let progress = self.establish(request);
        if progress == Progress::Established {
            self.set_attempt(0);
        }
        progress
    }

    /// The slot does not settle it: asks the flow table, and opens the flow where that does not know it either.
    #[inline(always)]
    fn note_by_table(&self, request: &Request<F>, word: u64, is_of_host: impl FnOnce() -> bool) -> Progress {
        if let Some(entry) = self.entry() {
            // SAFETY: an element of a preallocated map is memory of its type for as long as the program runs; another
            // processor's write at the same time is one of the races that `FlowState` allows.
            let entry = unsafe { &mut *entry };
            let same = F::state(entry).node_port == request.node.port && F::node_address(entry) == request.node.addr;
            if same && F::state(entry).generation == request.generation {
                note_client(F::state(entry), request.tcp_flags);
                if word == 0 {
                    // An empty slot is taken for speed; a full one is left, since its flow may be half-open.
                    self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
                }
                return Progress::Known;
            }
            if !same {
                // One client end, two node ends: to the Pod they are one flow, and only one can have the replies.
                stats::count(Reason::Collision);
                if self.protocol != protocol::UDP {
                    return Progress::Known;
                }
            }
            *entry = fresh_entry::<F>(request);
            if syn::matches(word, self.hash) {
                // Left as it is, the slot would hide the next packet by the other node end from this look-up.
                self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
            }
            return Progress::Known;
        }
        if is_of_host() {
            return Progress::OfHost;
        }
        self.set_slot(syn::word(self.hash, state::REQUESTED, request.node.addr_index, request.node.port));
        Progress::New
    }

    /// Moves the flow from the half-open cache to the flow table.
    #[inline(always)]
    pub fn establish(&self, request: &Request<F>) -> Progress {
        let entry = fresh_entry::<F>(request);
        if F::insert_flow(self.key, &entry).is_none() {
            stats::count(Reason::FlowTableFull);
            return Progress::Known;
        }
        self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
        Progress::Established
    }

    /// Replaces the flow's word.
    #[inline(always)]
    pub fn set_slot(&self, word: u64) {
        word::store(self.slot, word);
    }

    #[inline(always)]
    fn slot_word(&self) -> u64 {
        word::load(self.slot)
    }
}

/// Whether a client has this flow by a mapping, and has not broken it off before it was established.
#[inline(never)]
pub fn is_known<F: Family>(config: &Config, ends: &Ends<F>, protocol: u8) -> bool {
    let key = F::flow_key(ends, protocol);
    Flow::<F>::new(config.seed, ends, protocol, &key)
        .is_some_and(|flow| flow.asked(0).is_some_and(|word| state(word) != state::CLOSED) || flow.entry().is_some())
}

/// What a flow is found by, where that is not its key.
#[inline(always)]
pub fn hash<F: Family>(seed: u64, ends: &Ends<F>, protocol: u8) -> u64 {
    let rest = u64::from(ends.client_port) << 32 | u64::from(ends.pod_port) << 8 | u64::from(protocol);
    F::hash(seed, ends.client, ends.pod, rest)
}

/// The slot that a flow has of two, or else the one that it may take: the second only where the first would cost another flow
/// its reply.
#[inline(always)]
pub fn choose_slot<F: Family>(hash: u64, first: u32, second: u32) -> Option<(*mut u64, u32)> {
    let slot = F::slot(first)?;
    let word = word::load(slot);
    if syn::matches(word, hash) {
        return Some((slot, first));
    }
    let other = F::slot(second)?;
    let is_other = syn::waits(word) || syn::matches(word::load(other), hash);
    if is_other { Some((other, second)) } else { Some((slot, first)) }
}

/// Notes a packet of the client on an established flow.
#[inline(always)]
fn note_client(state: &mut FlowState, tcp_flags: u8) {
    if state.client_tcp_flags | tcp_flags != state.client_tcp_flags {
        state.client_tcp_flags |= tcp_flags;
    }
    touch(state);
}

/// Whether the Pod has said more on an established flow than that it accepts the connection. After that it does not repeat so.
#[inline(always)]
pub fn has_spoken(state: &FlowState) -> bool {
    state.pod_tcp_flags & tcp_flag::ACK != 0
}

/// Whether the Pod may accept the connection of an established flow once more, as it does when the answer was lost on its way:
/// not if either side has gone on since.
#[inline(always)]
pub fn may_be_accepted_again(state: &FlowState) -> bool {
    !has_spoken(state) && state.client_tcp_flags & tcp_flag::RST == 0
}

/// Notes a packet of the Pod on an established flow. Of what accepts the connection the acknowledgement does not count: see
/// [`has_spoken`].
#[inline(always)]
pub fn note_pod(state: &mut FlowState, tcp_flags: u8) {
    let tcp_flags = if tcp_flags & tcp_flag::SYN != 0 { tcp_flags & !tcp_flag::ACK } else { tcp_flags };
    if state.pod_tcp_flags | tcp_flags != state.pod_tcp_flags {
        state.pod_tcp_flags |= tcp_flags;
    }
    touch(state);
}

/// Writes the time down, but not on every packet: see [`TOUCH_INTERVAL_JIFFIES`].
#[inline(always)]
fn touch(state: &mut FlowState) {
    let now = jiffies();
    if now.wrapping_sub(state.touched) >= TOUCH_INTERVAL_JIFFIES {
        state.touched = now;
        state.last_seen_ns = nanoseconds();
    }
}

#[inline(always)]
fn fresh_entry<F: Family>(request: &Request<F>) -> F::Flow {
    let state = FlowState {
        last_seen_ns: nanoseconds(),
        generation: request.generation,
        touched: jiffies(),
        ifindex: request.ifindex,
        node_port: request.node.port,
        client_tcp_flags: request.tcp_flags,
        pod_tcp_flags: 0,
    };
    F::new_flow(state, request.node.addr)
}

/// The low half of `jiffies`: a load that the verifier inlines, unlike a clock.
#[inline(always)]
pub fn jiffies() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_jiffies64() }) as u32
}

#[inline(always)]
fn nanoseconds() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

// SPDX-License-Identifier: GPL-2.0-only
//! What is remembered of flows, so that replies find back. Requests never depend on it: losing an entry loses nothing
//! that the client's next packet does not bring back.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns};
use npl_common::{
    flow::{FlowKeyV4, FlowV4, TOUCH_INTERVAL_JIFFIES},
    mapping::protocol,
    reason::Reason,
    syn::{self, state},
};

use crate::{
    maps::{FLOW_V4, SYN_V4},
    packet::tcp_flag,
    stats,
};

/// A flow's identity and its place in the half-open cache.
pub struct Flow {
    pub key: FlowKeyV4,
    hash: u64,
    slot: *mut u64,
}

/// What a client believes it talks to.
#[derive(Clone, Copy)]
pub struct NodeEnd {
    /// Network order in memory.
    pub addr: [u8; 4],
    /// Position of `addr` among the local addresses.
    pub addr_index: u8,
    /// Host order.
    pub port: u16,
}

/// A packet of a client, as far as flow state is concerned.
#[derive(Clone, Copy)]
pub struct Request {
    pub node: NodeEnd,
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
}

impl Flow {
    /// The flow between a client and a Pod: addresses as loaded from a packet, ports in host order.
    #[inline(always)]
    pub fn new(seed: u64, (client, client_port, pod, pod_port): (u32, u16, u32, u16), protocol: u8) -> Option<Self> {
        let addresses = u64::from(client) << 32 | u64::from(pod);
        let rest = u64::from(client_port) << 32 | u64::from(pod_port) << 8 | u64::from(protocol);
        let hash = syn::hash(seed, addresses, rest);
        let slot = SYN_V4.get_ptr_mut(syn::slot(hash))?;
        let key = FlowKeyV4 {
            client_addr: client.to_ne_bytes(),
            pod_addr: pod.to_ne_bytes(),
            client_port,
            pod_port,
            protocol: u32::from(protocol),
        };
        Some(Self { key, hash, slot })
    }

    /// The flow's entry in the flow table.
    #[inline(always)]
    pub fn entry(&self) -> Option<*mut FlowV4> {
        FLOW_V4.get_ptr_mut(&self.key)
    }

    /// The flow's word in the half-open cache, if the slot is this flow's now.
    #[inline(always)]
    pub fn half_open(&self) -> Option<u64> {
        let word = self.slot_word();
        if syn::matches(word, self.hash) { Some(word) } else { None }
    }

    /// Notes a packet of the client.
    ///
    /// The hot path is one load: the slot says that this very flow, by this node address and port, is established.
    #[inline(always)]
    pub fn note_request(&self, request: &Request) -> Progress {
        let word = self.slot_word();
        let mine = syn::word(self.hash, state(word), request.node.addr_index, request.node.port);
        let opens_or_ends = request.tcp_flags & (tcp_flag::SYN | tcp_flag::FIN | tcp_flag::RST) != 0;
        if word == mine {
            match state(word) {
                state::ESTABLISHED if !opens_or_ends => return Progress::Known,
                state::REPLIED if request.tcp_flags & (tcp_flag::SYN | tcp_flag::RST) == 0 => {
                    return self.establish(request);
                }
                state::REQUESTED | state::REPLIED => return Progress::Known,
                _ => {}
            }
        }
        self.note_by_table(request, word)
    }

    /// The slot does not settle it: asks the flow table, and opens the flow where that does not know it either.
    #[inline(always)]
    fn note_by_table(&self, request: &Request, word: u64) -> Progress {
        if let Some(entry) = self.entry() {
            // SAFETY: an element of a preallocated map is memory of its type for as long as the program runs; another
            // processor's write at the same time is one of the races that `FlowV4` allows.
            let entry = unsafe { &mut *entry };
            let same = entry.node_port == request.node.port && entry.node_addr == request.node.addr;
            if same && entry.generation == request.generation {
                note_client(entry, request.tcp_flags);
                if word == 0 {
                    // An empty slot is taken for speed; a full one is left, since its flow may be half-open.
                    self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
                }
                return Progress::Known;
            }
            // One client end, two node ends: to the Pod they are one flow, and only one can have the replies.
            if self.key.protocol == u32::from(protocol::TCP) && request.tcp_flags & tcp_flag::SYN == 0 && !same {
                stats::count(Reason::Collision);
                return Progress::Known;
            }
            if !same {
                stats::count(Reason::Collision);
            }
            *entry = fresh_entry(request);
            if syn::matches(word, self.hash) {
                // Left as it is, the slot would hide the next packet by the other node end from this look-up.
                self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
            }
            return Progress::Known;
        }
        self.set_slot(syn::word(self.hash, state::REQUESTED, request.node.addr_index, request.node.port));
        Progress::New
    }

    /// Moves the flow from the half-open cache to the flow table.
    #[inline(always)]
    pub fn establish(&self, request: &Request) -> Progress {
        let entry = fresh_entry(request);
        if FLOW_V4.insert(&self.key, &entry, 0).is_err() {
            stats::count(Reason::FlowTableFull);
            return Progress::Known;
        }
        self.set_slot(syn::word(self.hash, state::ESTABLISHED, request.node.addr_index, request.node.port));
        Progress::Established
    }

    /// Replaces the flow's word.
    #[inline(always)]
    pub fn set_slot(&self, word: u64) {
        // SAFETY: a pointer into a map element of this type, aligned; one store, so that no reader sees half of it.
        unsafe { self.slot.write_volatile(word) };
    }

    #[inline(always)]
    fn slot_word(&self) -> u64 {
        // SAFETY: a pointer into a map element of this type, aligned.
        unsafe { self.slot.read_volatile() }
    }
}

/// Notes a packet of the client on an established flow.
#[inline(always)]
fn note_client(entry: &mut FlowV4, tcp_flags: u8) {
    if tcp_flags & tcp_flag::SYN != 0 {
        // The client opens the same tuple again: what the last connection left does not count.
        entry.client_tcp_flags = tcp_flags;
        entry.pod_tcp_flags = 0;
    } else if entry.client_tcp_flags | tcp_flags != entry.client_tcp_flags {
        entry.client_tcp_flags |= tcp_flags;
    }
    touch(entry);
}

/// Notes a packet of the Pod on an established flow.
#[inline(always)]
pub fn note_pod(entry: &mut FlowV4, tcp_flags: u8) {
    if entry.pod_tcp_flags | tcp_flags != entry.pod_tcp_flags {
        entry.pod_tcp_flags |= tcp_flags;
    }
    touch(entry);
}

/// Writes the time down, but not on every packet: see [`TOUCH_INTERVAL_JIFFIES`].
#[inline(always)]
fn touch(entry: &mut FlowV4) {
    let now = jiffies();
    if now.wrapping_sub(entry.touched) >= TOUCH_INTERVAL_JIFFIES {
        entry.touched = now;
        entry.last_seen_ns = nanoseconds();
    }
}

#[inline(always)]
fn fresh_entry(request: &Request) -> FlowV4 {
    FlowV4 {
        last_seen_ns: nanoseconds(),
        node_addr: request.node.addr,
        node_port: request.node.port,
        client_tcp_flags: request.tcp_flags,
        pod_tcp_flags: 0,
        generation: request.generation,
        touched: jiffies(),
        ifindex: request.ifindex,
        pad: 0,
    }
}

/// The low half of `jiffies`: a load that the verifier inlines, unlike a clock.
#[inline(always)]
fn jiffies() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_jiffies64() }) as u32
}

#[inline(always)]
fn nanoseconds() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

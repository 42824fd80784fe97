// SPDX-License-Identifier: GPL-2.0-only
//! Connections that clients ask for, from the first packet to the one by which they are established: each has a word in
//! [`npl_common::syn`]'s slots for attempts. What begins otherwise has one among the flows'.
//!
//! Whoever asks is not believed before the Pod and then he himself have answered, and takes nothing away from the
//! connection that these ends may have.

use npl_common::{
    mapping::protocol,
    reason::Reason,
    syn::{self, state},
};

use crate::{
    family::Family,
    flow::{Flow, Progress, Request, choose_slot},
    packet::tcp_flag,
    stats, word,
};

/// Whether a packet asks for a connection.
#[inline(always)]
pub const fn asks(tcp_flags: u8) -> bool {
    tcp_flags & (tcp_flag::SYN | tcp_flag::ACK) == tcp_flag::SYN
}

/// Whether a packet of the Pod's, which accepts or refuses, is about the last attempt and not about what was before it.
#[inline(always)]
pub const fn settles(tcp_flags: u8) -> bool {
    tcp_flags & (tcp_flag::SYN | tcp_flag::RST) != 0
}

/// Whether flows of a protocol begin by one that does.
#[inline(always)]
const fn is_connected(protocol: u8) -> bool {
    protocol != protocol::UDP
}

/// Notes that a client asks, for the first time or again. Nothing else is looked at, so that a flood costs little and a forged
/// packet takes nothing away: what is known of an earlier connection counts until the Pod accepts this one.
#[inline(always)]
pub fn open<F: Family>(hash: u64, request: &Request<F>) -> Progress {
    let Some((slot, _)) = choose_slot::<F>(hash, syn::attempt_slot(hash), syn::second_attempt_slot(hash)) else {
        return Progress::Known;
    };
    let word = word::load(slot);
    let mine = syn::word(hash, state(word), request.node.addr_index, request.node.port);
    if word == mine && syn::opens(word) {
        return Progress::Known;
    }
    if word != mine && syn::matches(word, hash) {
        stats::count(Reason::Collision);
    }
    word::store(slot, syn::word(hash, state::REQUESTED, request.node.addr_index, request.node.port));
    Progress::New
}

impl<F: Family> Flow<'_, F> {
    /// Whether the cache says that the client opens the flow, for the first time or again.
    #[inline(always)]
    pub fn is_opening(&self) -> bool {
        self.attempt().is_some_and(syn::opens) || self.half_open().is_some_and(syn::opens)
    }

    /// The word of the last attempt at it.
    #[inline(always)]
    pub fn attempt(&self) -> Option<u64> {
        let word = if is_connected(self.protocol) { word::<F>(self.hash) } else { 0 };
        if word == 0 { None } else { Some(word) }
    }

    /// The flow's word in the cache that a packet of the Pod's is about.
    #[inline(always)]
    pub fn asked(&self, tcp_flags: u8) -> Option<u64> {
        let word = self.half_open();
        if word.is_some() && !settles(tcp_flags) { word } else { self.attempt().or(word) }
    }

    /// Replaces the word that [`Self::asked`] gave by the same in another state. Once the Pod accepts an attempt, the client's
    /// next packet is about that, and what the slot had of the last connection of these ends is over.
    #[inline(always)]
    pub fn set_asked(&self, tcp_flags: u8, word: u64) {
        let is_about_attempt = settles(tcp_flags) || self.half_open().is_none();
        if !is_about_attempt || !self.set_attempt(word) {
            self.set_slot(word);
        } else if tcp_flags & tcp_flag::SYN != 0
            && let Some(before) = self.half_open()
        {
            self.set_slot(0);
            if !syn::is_same_end(before, word) {
                stats::count(Reason::Collision);
            }
        }
    }

    /// Replaces the word of the last attempt, if there was one.
    #[inline(always)]
    pub fn set_attempt(&self, word: u64) -> bool {
        is_connected(self.protocol) && set::<F>(self.hash, word)
    }

    /// Whether the Pod accepts a connection, or asks for one, that nobody has opened through the mapping, as the cache knows of
    /// the last that was opened.
    #[inline(always)]
    pub fn is_opened_otherwise(&self, tcp_flags: u8) -> bool {
        tcp_flags & tcp_flag::SYN != 0 && !self.is_opening()
    }
}

/// The word of the last attempt at a flow; zero if nothing is known of one.
#[inline(never)]
fn word<F: Family>(hash: u64) -> u64 {
    slot::<F>(hash).map_or(0, word::load)
}

/// Replaces it, and says whether there was one.
#[inline(never)]
fn set<F: Family>(hash: u64, word: u64) -> bool {
    match slot::<F>(hash) {
        Some(slot) => {
            word::store(slot, word);
            true
        }
        None => false,
    }
}

/// Where it is.
#[inline(always)]
fn slot<F: Family>(hash: u64) -> Option<*mut u64> {
    for index in [syn::attempt_slot(hash), syn::second_attempt_slot(hash)] {
        let slot = F::slot(index)?;
        if syn::matches(word::load(slot), hash) {
            return Some(slot);
        }
    }
    None
}

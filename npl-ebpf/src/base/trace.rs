// SPDX-License-Identifier: GPL-2.0-only
//! A [`Note`] is the record of one packet and its verdict, which `path::trace` logs. Only the trace build, which has
//! the feature `trace`, contains this module.
//!
//! The record is in a map, because most programs have too little free stack space for a [`Note`].

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};

use super::{cell::field, verdict::Verdict};

/// The addresses and ports of a packet before its rewrite, and the verdict on the packet.
#[repr(C, align(8))]
pub struct Note {
    /// The packet's source address. An IPv4 address is in the first four bytes.
    pub source: [u8; 16],
    pub destination: [u8; 16],
    pub source_port: u16,
    pub destination_port: u16,
    /// The transport protocol; 0 if no transport header was found.
    pub protocol: u8,
    pub is_ipv6: bool,
    /// The verdict's [`super::verdict::kind`].
    pub kind: u8,
    /// The reason's number, if the verdict has a reason.
    pub reason: u8,
}

/// One [`Note`] for each processor. A program writes its [`Note`] and reads it again within one run.
#[btf_map(name = "npl_log_note")]
static NOTE: PerCpuArray<Note, 1> = PerCpuArray::new();

/// Returns this processor's [`Note`].
#[inline(always)]
pub fn note() -> Option<*mut Note> {
    NOTE.get_ptr_mut(0)
}

/// Stores the verdict in this processor's [`Note`].
#[inline(always)]
pub fn note_verdict(verdict: Verdict) {
    if let Some(note) = note() {
        field!(note, kind).store(verdict.kind() as u8);
        field!(note, reason).store(verdict.detail() as u8);
    }
}

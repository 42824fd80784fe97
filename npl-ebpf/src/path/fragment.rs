// SPDX-License-Identifier: GPL-2.0-only
//! Translates later fragments of requests and replies, according to the record of the datagram's first fragment. A
//! later fragment contains neither ports nor a transport checksum, so only its IP header is rewritten.

use aya_ebpf::programs::TcContext;
use npl_common::{fragment::Record, lookup_cache::no_next_hop, mapping::Frontend, reason::Reason};

use crate::{
    act::{
        redirect::{self, NextHop},
        rewrite::{self, DESTINATION, SOURCE},
    },
    base::{
        maps::CONFIG,
        mode::{REDIRECT, needs_next_hop},
        stats,
        verdict::Verdict,
    },
    net::{family::HeaderChain, headers::Ports},
    state::{fragment, fragment_buffer, maps::Family, tuple::Backend},
};

/// Translates, passes or drops a later fragment of a request.
#[inline(always)]
pub fn request<F: Family, const MODE: u8, const L2: usize>(ctx: &TcContext, mut chain: HeaderChain<F>) -> Verdict {
    let Some(config) = CONFIG.get(0) else { return Verdict::UNRELATED };
    if F::node_address_index(config, chain.headers.destination).is_none() {
        return Verdict::UNRELATED;
    }
    let hash = fragment::hash(config, &chain, DESTINATION);
    let Some(record) = fragment::record::<F>(hash) else {
        fragment_buffer::save(ctx, hash, true);
        return Verdict::pass(Reason::EarlyFragment);
    };
    let is_by_stack = needs_next_hop::<MODE>() && fragment::is_by_stack::<F>(hash);
    let Some((frontend, backend)) = backend::<F>(&record) else { return Verdict::UNRELATED };
    if backend.refuses(frontend, chain.headers.source) {
        return Verdict::drop(Reason::SourceRefused);
    }
    stats::update_mapping(backend.stats_index, |stats| {
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.len());
    });
    let lookup = || if is_by_stack { no_next_hop::UNREACHABLE } else { F::next_hop(backend.addr) };
    let next_hop = redirect::to_pod::<F, MODE, L2>(ctx, &chain.headers, backend.addr, lookup);
    chain.headers.ttl_fields = next_hop.ttl_fields;
    redirect::forward(ctx, rewrite::apply_address::<F, DESTINATION>(ctx, &chain, backend.addr), next_hop)
}

/// Translates, passes or drops a later fragment of a reply. If the datagram has no record, either the datagram is not a
/// translated reply, or this fragment arrived before the first fragment. In both cases, the fragment passes unchanged,
/// and the program saves a copy.
#[inline(always)]
pub fn reply<F: Family, const MODE: u8, const L2: usize>(ctx: &TcContext, mut chain: HeaderChain<F>) -> Verdict {
    if MODE == REDIRECT && !redirect::is_from_pod(ctx, &chain.headers) {
        return Verdict::UNRELATED;
    }
    let Some(config) = CONFIG.get(0) else { return Verdict::UNRELATED };
    let hash = fragment::hash(config, &chain, SOURCE);
    let Some(record) = fragment::record::<F>(hash) else {
        fragment_buffer::save(ctx, hash, MODE == REDIRECT);
        return if MODE == REDIRECT { Verdict::UNRELATED } else { Verdict::pass(Reason::EarlyFragment) };
    };
    if record == Record::UNTRANSLATED {
        return Verdict::UNRELATED;
    }
    let Some(addr) = F::node_address(record.address_index) else { return Verdict::UNRELATED };
    let to_client = || redirect::to_client::<F, L2>(ctx, &chain.headers, addr, Ports::NONE, None);
    let next_hop = if MODE == REDIRECT { to_client() } else { NextHop::stack(&chain.headers) };
    if MODE == REDIRECT && next_hop.is_stack() {
        return Verdict::UNRELATED;
    }
    // If the mapping was removed, the program translates the reply without counting it: the flow continues while
    // another mapping of the same Pod port exists.
    if let Some((_, backend)) = backend::<F>(&record) {
        stats::update_mapping(backend.stats_index, |stats| {
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
        });
    }
    chain.headers.ttl_fields = next_hop.ttl_fields;
    redirect::forward(ctx, rewrite::apply_address::<F, SOURCE>(ctx, &chain, addr), next_hop)
}

#[inline(always)]
fn backend<F: Family>(record: &Record) -> Option<(Frontend, Backend<F>)> {
    if record.node_port == 0 {
        return None;
    }
    let frontend = Frontend { node_port: record.node_port, protocol: record.protocol, pad: 0 };
    Some((frontend, F::backend(F::mapping(frontend)?)))
}

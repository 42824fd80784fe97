// SPDX-License-Identifier: GPL-2.0-only
//! Fragmented datagrams: the first fragment is translated as any packet, and leaves a record for those that follow, which
//! have addresses only. No checksum but the header's covers those; the transport's is in the first fragment.

use aya_ebpf::{helpers::generated::bpf_ktime_get_ns, programs::TcContext};
use npl_common::{
    config::Config,
    fragment::{self, Record},
    mapping::Frontend,
    reason::Reason,
};

use crate::{
    egress::Replies,
    family::{Backend, Family, Walk},
    flow::NodeEnd,
    hint::asks_for_way,
    hold,
    hook::{DIRECT, Hook},
    ingress::Requests,
    maps::CONFIG,
    packet::Ports,
    redirect::{self, Way},
    rewrite::{self, DESTINATION, SOURCE},
    stats,
    verdict::Verdict,
    word,
};

/// What the fragments of a datagram have in common at a hook, mixed.
#[inline(always)]
pub fn hash<F: Family, H: Hook>(config: &Config, walk: &Walk<F>) -> u64 {
    let rest = u64::from(walk.fragment.id) << 32 | u64::from(walk.fragment.protocol) << 8 | u64::from(H::END);
    F::hash(config.seed, walk.location.source, walk.location.destination, rest)
}

/// Notes that the first fragment of a datagram was translated.
#[inline(always)]
pub fn note_translated<F: Family>(hash: u64, node: &NodeEnd<F>, protocol: u8) {
    let Some(config) = CONFIG.get(0) else { return };
    // An address that the Node has lost is not known any more to those that follow either.
    if let Some(address_index) = F::local_index(config, node.addr) {
        note::<F>(hash, Record { node_port: node.port, address_index, protocol });
    }
}

/// Notes that the first fragment of a datagram was not ours: a record of an earlier one with the same number ends, and of
/// those that follow it is known that they did not come too early. What others receive never does, and leaves no other record;
/// nor does what would take the place of a record that others are led by.
#[inline(always)]
pub fn note_not_ours<F: Family, H: Hook>(hash: u64, destination: F::Addr) {
    let (Some(config), Some(slot)) = (CONFIG.get(0), F::fragment_slot(fragment::slot(hash))) else { return };
    let word = word::load(slot);
    let may_be_early = || H::END == SOURCE || F::local_index(config, destination).is_some();
    if fragment::is_of(word, hash) || !fragment::leads(word, now()) && may_be_early() {
        note::<F>(hash, Record::NOT_OURS);
    }
}

/// Judges and rewrites a later fragment of a request.
#[inline(always)]
pub fn request<F: Family, const WAY: u8, const L2: usize>(ctx: &TcContext, mut walk: Walk<F>) -> Verdict {
    let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS };
    if F::local_index(config, walk.location.destination).is_none() {
        return Verdict::NOT_OURS;
    }
    let hash = hash::<F, Requests<WAY>>(config, &walk);
    let Some(record) = record::<F>(hash) else {
        hold::keep::<Requests<WAY>>(ctx, hash);
        return Verdict::pass(Reason::Fragment);
    };
    let is_by_stack = asks_for_way::<WAY>() && is_by_stack::<F>(hash);
    let Some((frontend, backend)) = backend::<F>(&record) else { return Verdict::NOT_OURS };
    if backend.refuses(frontend, walk.location.source) {
        return Verdict::drop(Reason::SourceRefused);
    }
    stats::of_mapping(backend.stats_index, |stats| {
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.len());
    });
    let pod_way = || if is_by_stack { None } else { F::pod_way(backend.addr) };
    let way = redirect::to_pod::<F, WAY, L2>(ctx, &walk.location, backend.addr, pod_way);
    walk.location.rest = way.rest;
    redirect::send(ctx, rewrite::apply_address::<F, DESTINATION>(ctx, &walk, backend.addr), way)
}

/// Judges and rewrites a later fragment of a reply. One without a record is others', or comes before its first one.
#[inline(always)]
pub fn reply<F: Family, const WAY: u8, const L2: usize>(ctx: &TcContext, mut walk: Walk<F>) -> Verdict {
    if WAY == DIRECT && !redirect::is_from_pod(ctx, &walk.location) {
        return Verdict::NOT_OURS;
    }
    let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS };
    let hash = hash::<F, Replies<WAY>>(config, &walk);
    let Some(record) = record::<F>(hash) else {
        hold::keep::<Replies<WAY>>(ctx, hash);
        return if WAY == DIRECT { Verdict::NOT_OURS } else { Verdict::pass(Reason::Fragment) };
    };
    if record == Record::NOT_OURS {
        return Verdict::NOT_OURS;
    }
    let Some(addr) = F::local_address(record.address_index) else { return Verdict::NOT_OURS };
    let to_client = || redirect::to_client::<F, L2>(ctx, &walk.location, addr, Ports::NONE);
    let way = if WAY == DIRECT { to_client() } else { Way::stack(&walk.location) };
    if WAY == DIRECT && way.is_stack() {
        return Verdict::NOT_OURS;
    }
    // The flow may outlive its mapping by the time that another mapping of the same Pod port is there.
    if let Some((_, backend)) = backend::<F>(&record) {
        stats::of_mapping(backend.stats_index, |stats| {
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
        });
    }
    walk.location.rest = way.rest;
    redirect::send(ctx, rewrite::apply_address::<F, SOURCE>(ctx, &walk, addr), way)
}

#[inline(always)]
fn backend<F: Family>(record: &Record) -> Option<(Frontend, Backend<F>)> {
    if record.node_port == 0 {
        return None;
    }
    let frontend = Frontend { node_port: record.node_port, protocol: record.protocol, pad: 0 };
    Some((frontend, F::backend(frontend)?))
}

#[inline(always)]
fn record<F: Family>(hash: u64) -> Option<Record> {
    let slot = F::fragment_slot(fragment::slot(hash))?;
    Record::from_word(word::load(slot), hash, now())
}

/// Notes that the first fragment, which was translated, goes on by the host's stack: see [`fragment::by_stack`].
#[inline(always)]
pub fn note_by_stack<F: Family>(hash: u64) {
    if let Some(slot) = F::fragment_slot(fragment::slot(hash)) {
        word::store(slot, fragment::by_stack(word::load(slot)));
    }
}

#[inline(always)]
fn is_by_stack<F: Family>(hash: u64) -> bool {
    F::fragment_slot(fragment::slot(hash)).is_some_and(|slot| fragment::is_by_stack(word::load(slot)))
}

#[inline(always)]
fn note<F: Family>(hash: u64, record: Record) {
    if let Some(slot) = F::fragment_slot(fragment::slot(hash)) {
        word::store(slot, record.to_word(hash, now()));
    }
}

/// The time of records.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: a helper without arguments.
    fragment::time(unsafe { bpf_ktime_get_ns() })
}

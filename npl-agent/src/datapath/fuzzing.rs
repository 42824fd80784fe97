// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `pinned_maps`: elements of pinned maps, which an earlier agent, another program or a fault may have
//! written, and records of packet tracing.

use npl_common::{
    config::Config,
    flow::FlowState,
    half_open,
    mapping::{self, FRONTEND_BITS},
    next_hop::PodNextHop,
    packet_trace::{SNAP_LENGTH, TraceRecord},
    stats::MappingStats,
    unmapped,
};

use super::{
    family::{Sender, allowed_source, flow_record, frontend, source_key},
    layout::{Layout, V4, V6, frontend_key},
    next_hops, sys,
    tables::plus,
};
use crate::{
    core::{
        flows::{
            self,
            half_open::{HalfOpenExpiry, after_removal},
        },
        model::{Family, Protocol, observed::Observed},
        packet_trace::Step,
        tests::fuzz::adopt,
    },
    fuzzing::{Input, assert_is_one_line},
};

/// The maximum number of elements of one input.
const MAX_ELEMENTS: usize = 64;

/// Checks the conversion of map elements. The first byte of the input selects the maps; the remaining bytes are
/// elements.
pub fn pinned_maps(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 8 {
        0 => check_family::<V4>(input),
        1 => check_family::<V6>(input),
        2 => check_half_open(input),
        3 => check_words(input),
        4 => check_trace(input),
        5 => check_counters(input),
        6 => check_config(input),
        _ => adopt(observed(input)),
    }
}

/// Reads a value from the input. The bytes after the end of the input are zero.
fn value<T: aya::Pod>(input: &mut Input<'_>) -> T {
    let mut bytes = input.next(size_of::<T>()).to_vec();
    bytes.resize(size_of::<T>(), 0);
    sys::value_of(&bytes).unwrap_or_else(|| unreachable!("the bytes have the size of the value"))
}

fn check_family<L: Layout>(mut input: Input<'_>) {
    check_mapping::<L>(&mut input);
    check_source::<L>(&mut input);
    let endpoint: L::Endpoint = value(&mut input);
    let sender = L::sender(&endpoint);
    assert_eq!(L::endpoint(&sender).map(|endpoint| L::sender(&endpoint)), Some(sender));
    let local: L::Local = value(&mut input);
    let addr = L::address(&local);
    assert_eq!((Family::of(addr), L::local(addr).map(|local| L::address(&local))), (L::FAMILY, Some(addr)));
    let rnat: L::SocketRnatKey = value(&mut input);
    assert!(L::socket_rnat_pod(&rnat).is_none_or(|(ip, port)| Family::of(ip) == L::FAMILY && port != 0));
    check_flow::<L>(&mut input);
    let hop: PodNextHop = value(&mut input);
    assert!(next_hops::next_hop(hop).is_none_or(|known| next_hops::value(known) == hop), "{hop:?}");
}

fn check_mapping<L: Layout>(input: &mut Input<'_>) {
    let (key, raw): (mapping::Frontend, L::Backend) = (value(input), value(input));
    let entry = L::entry(&raw);
    assert_eq!(Family::of(entry.backend.pod_ip), L::FAMILY);
    assert_eq!(L::raw(&entry).map(|raw| L::entry(&raw)), Some(entry));
    if let Some(frontend) = frontend::<L>(key) {
        assert_eq!(frontend_key(frontend), mapping::Frontend { pad: 0, ..key });
        assert_eq!(frontend.family, L::FAMILY);
    } else {
        assert_eq!(Protocol::from_number(key.protocol), None);
    }
}

fn check_source<L: Layout>(input: &mut Input<'_>) {
    let (prefix_length, source): (u32, L::Source) = (value(input), value(input));
    let Some((frontend, range)) = allowed_source::<L>(prefix_length, &source) else { return };
    assert_eq!((range.family(), frontend.family), (L::FAMILY, L::FAMILY));
    assert_eq!(FRONTEND_BITS + u32::from(range.length()), prefix_length);
    let written = source_key::<L>(frontend, range).ok();
    let again = written.and_then(|key| allowed_source::<L>(key.prefix_len(), &key.data()));
    assert_eq!(again, Some((frontend, range)));
}

fn check_flow<L: Layout>(input: &mut Input<'_>) {
    let (key, flow): (L::FlowKey, L::Flow) = (value(input), value(input));
    let Sender { pod_ip, pod_port, protocol } = L::pod_endpoint(&key);
    if let Some(record) = flow_record::<L>(&key, &flow) {
        assert_eq!((record.pod.ip(), record.pod.port(), record.protocol.number()), (pod_ip, pod_port, protocol));
        let families = [record.client.ip(), record.nat.ip(), record.pod.ip()].map(Family::of);
        assert_eq!(families, [L::FAMILY; 3]);
        assert_eq!(record.frontend().protocol, record.protocol);
        assert!(["established", "closing", "closed", "reset"].contains(&record.state()));
        let again = L::flow_key(record.protocol, record.client, record.pod);
        assert_eq!(again.map(|key| L::pod_endpoint(&key)), Some(L::pod_endpoint(&key)));
    }
    let _slot = half_open::slot(L::flow_hash(&key, value(input)));
    check_expiry(protocol, *L::state(&flow), value(input), value(input));
}

/// An entry that has timed out stays timed out until a packet refreshes the entry, and a crowded table does not make
/// entries live longer.
fn check_expiry(protocol: u8, state: FlowState, now: u64, later: u64) {
    let is_expired = |now, is_crowded| flows::is_expired(protocol, &state, now, is_crowded);
    for is_crowded in [false, true] {
        let then = now.saturating_add(later);
        assert!(!is_expired(now, is_crowded) || is_expired(then, is_crowded), "{protocol} {state:?} {now} {then}");
    }
    assert!(!is_expired(now, false) || is_expired(now, true), "{protocol} {state:?} {now}");
    assert!(!is_expired(state.last_seen_ns, true), "an entry expires in the moment of its packet: {state:?}");
}

/// Checks that the sweep of the half-open cache removes only entries that it has seen in an earlier sweep.
fn check_half_open(mut input: Input<'_>) {
    let mut expiry = HalfOpenExpiry::default();
    let mut slots = Vec::new();
    while !input.is_empty() && slots.len() < MAX_ELEMENTS {
        slots.push(value::<u64>(&mut input));
    }
    let entries: Vec<(u32, u64)> = (0..).zip(slots.iter().copied()).collect();
    assert_eq!(expiry.observe(entries.iter().copied()), [], "an entry expires in the first sweep");
    assert_eq!(expiry.used(), slots.iter().filter(|word| **word != 0).count());
    for word in &slots {
        for hash in slots.iter().chain([word]) {
            let Some(after) = after_removal(*word, *hash) else { continue };
            assert!(half_open::matches(after, *hash) && half_open::has_same_nat_address(after, *word));
            assert_eq!(after_removal(after, *hash), None, "{word:#x}");
        }
    }
    for _sweep in 0..32 {
        let expired = expiry.observe(entries.iter().copied());
        assert!(expired.iter().all(|entry| entry.1 != 0 && entries.contains(entry)), "{expired:?}");
    }
}

/// Checks the times in the map of unmapped traffic.
fn check_words(mut input: Input<'_>) {
    while !input.is_empty() {
        let (word, now) = (value::<u64>(&mut input), value::<u64>(&mut input));
        let silence = unmapped::silence(word, now);
        assert!(silence.is_none_or(|silence| silence <= unmapped::LIFETIME), "{silence:?}");
        assert_eq!(unmapped::least_age(word, now).is_some(), word != 0);
    }
}

fn check_trace(mut input: Input<'_>) {
    let record: TraceRecord = value(&mut input);
    let Some(step) = Step::of(&record) else { return };
    assert!(step.before.len() <= SNAP_LENGTH as usize && step.after.len() <= SNAP_LENGTH as usize);
    assert_is_one_line(&step.outcome());
    if let Some((before, after)) = step.packets() {
        for packet in std::iter::once(&before).chain(&after) {
            assert_is_one_line(&packet.to_string());
            assert!(packet.quoted.as_ref().is_none_or(|quoted| quoted.quoted.is_none()), "{packet}");
        }
    }
}

/// Sums of counters must not stop the agent, whatever the counters are.
fn check_counters(mut input: Input<'_>) {
    let mut sum = MappingStats::ZERO;
    let mut count = 0;
    while !input.is_empty() && count < MAX_ELEMENTS {
        let counters: MappingStats = value(&mut input);
        sum = plus(&sum, &counters);
        count += 1;
    }
}

fn check_config(mut input: Input<'_>) {
    let config: Config = value(&mut input);
    let index = input.byte();
    for changed in [config.with_final_sources(index.is_multiple_of(2)), config.with_primary_v6_index(index)] {
        assert_eq!((changed.seed, changed.epoch, changed.abi), (config.seed, config.epoch, config.abi));
    }
    assert_eq!(config.with_primary_v6_index(index).primary_v6_index(), index);
}

/// The mappings and allowed sources in the maps, as the agent reads the maps at its start.
fn observed(mut input: Input<'_>) -> Observed {
    let mut observed = Observed::default();
    let mut count = 0;
    while !input.is_empty() && count < MAX_ELEMENTS {
        match input.byte() % 4 {
            0 => add_mapping::<V4>(&mut observed, &mut input),
            1 => add_mapping::<V6>(&mut observed, &mut input),
            2 => add_source::<V4>(&mut observed, &mut input),
            _ => add_source::<V6>(&mut observed, &mut input),
        }
        count += 1;
    }
    observed
}

fn add_mapping<L: Layout>(observed: &mut Observed, input: &mut Input<'_>) {
    let (key, raw) = (value(input), value(input));
    observed.mappings.extend(frontend::<L>(key).map(|frontend| (frontend, L::entry(&raw).backend)));
}

fn add_source<L: Layout>(observed: &mut Observed, input: &mut Input<'_>) {
    let (length, source) = (value(input), value(input));
    if let Some((frontend, range)) = allowed_source::<L>(length, &source) {
        observed.sources.entry(frontend).or_default().insert(range);
    }
}

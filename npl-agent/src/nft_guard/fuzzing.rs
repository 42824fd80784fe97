// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `nftables`: the kernel's answers about nftables and kernel conntrack, and the rules of legacy
//! iptables.

use std::{collections::BTreeMap, ops::ControlFlow};

use rtnetlink::packet_core::{DefaultNla, Emitable as _};

use super::{
    forward, legacy, names,
    rules::{self, ForwardRule, read_marking},
    table::PodEndpoint,
    translated,
    uapi::attribute,
    wire,
};
use crate::{
    core::{doctor::forward_chains::Rule, model::Protocol, networks::chain_prefixes},
    fuzzing::Input,
};

/// Checks the parsers. The first byte of the input selects the parser: of a datagram with answers, of an object's
/// attributes, of the key of a set's element, or of the rules of legacy iptables.
pub fn nftables(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => check_datagram(input.rest()),
        1 => check_object(input.rest()),
        2 => check_key(input.rest()),
        _ => check_legacy(input.rest()),
    }
}

/// Checks that every object of a datagram is read, and that the reader stops at the end of the datagram.
fn check_datagram(datagram: &[u8]) {
    let mut objects = 0;
    let ended = wire::read_datagram(datagram, &|_| false, &mut |object| {
        objects += 1;
        check_object(object);
        ControlFlow::Continue(())
    });
    // The shortest message has 16 bytes.
    assert!(objects <= datagram.len() / 16 + 1, "{objects} objects in {} bytes: {ended:?}", datagram.len());
}

/// Reads the attributes of an object in all ways in which the agent reads objects.
fn check_object(object: &[u8]) {
    let total: usize = wire::attributes(object).map(|(_, value)| value.len()).sum();
    assert!(total <= object.len(), "the values are longer than the object");
    let _names = (names::text(object, attribute::TABLE), names::text(object, attribute::CHAIN_NAME));
    if let Some(rule) = ForwardRule::read(object) {
        assert_eq!(ForwardRule::read(&rule_of(&rule.expressions())), Some(rule));
    }
    if let Some(marking) = read_marking(object) {
        assert_eq!(read_marking(&rule_of(&rules::marks(&marking))), Some(marking));
    }
    check_forward_chain(object);
    check_conntrack(object);
}

/// Encodes a rule as the kernel sends it.
fn rule_of(expressions: &[DefaultNla]) -> Vec<u8> {
    let rule = [wire::nest(attribute::RULE_EXPRESSIONS, expressions)];
    let mut bytes = vec![0; rule.as_slice().buffer_len()];
    rule.as_slice().emit(&mut bytes);
    bytes
}

/// Checks the rules that the doctor evaluates: each rule has a verdict, and a rule with a condition that was not
/// understood keeps this condition, so that the doctor is not certain about the rule.
fn check_forward_chain(object: &[u8]) {
    for family in ["inet", "ip", "ip6"] {
        if let Some(chain) = forward::base_chain(family, object) {
            assert_eq!(chain.table.family, family);
        }
    }
    let elements = forward::read_elements(object);
    let draft = forward::Draft::read(object);
    let sets: BTreeMap<_, _> = draft.sets().into_iter().map(|set| (set, elements.clone())).collect();
    let lookups = sets.len();
    let _unread: Vec<Rule> = forward::Draft::read(object).finish(&BTreeMap::new());
    let rules = draft.finish(&sets);
    let most = lookups.max(1) * object.len().div_ceil(4) * elements.len().max(1) + 1;
    assert!(rules.len() <= most, "{} rules of {} bytes", rules.len(), object.len());
}

fn check_conntrack(entry: &[u8]) {
    let original = translated::original(entry);
    let _traffic = translated::traffic(entry);
    if let Some(connection) = translated::parse(entry) {
        assert_eq!(original, Some((connection.protocol, connection.client, connection.nat)));
        assert_eq!(connection.client.is_ipv4(), connection.nat.is_ipv4(), "{connection:?}");
        assert!(!translated::has_ended(entry));
    }
}

fn check_key(key: &[u8]) {
    let Some(endpoint) = PodEndpoint::read(key) else { return };
    assert!(Protocol::ALL.contains(&endpoint.protocol));
    let written = endpoint.key();
    assert_eq!(written.len(), key.len());
    assert_eq!(PodEndpoint::read(&written), Some(endpoint));
}

fn check_legacy(rules: &[u8]) {
    for prefix in chain_prefixes() {
        let text = String::from_utf8_lossy(rules);
        assert!(!legacy::names(rules, prefix) || text.contains(prefix), "{prefix}");
    }
}

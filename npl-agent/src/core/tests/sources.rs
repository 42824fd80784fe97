// SPDX-License-Identifier: Apache-2.0
//! Tests the parser with valid and invalid lists of allowed sources.

use std::net::IpAddr;

use proptest::{prelude::*, sample::select};

use super::{AllowList, MAX_RANGES, SourceRange, Sources, Unreadable};
use crate::core::model::Family;

/// Parses a valid list, and returns the ranges in canonical form.
fn ranges(text: &str) -> String {
    shown(&AllowList::read(text).sources)
}

fn shown(sources: &Sources) -> String {
    sources.ranges().map(|range| range.to_string()).collect::<Vec<_>>().join(" ")
}

fn sources(text: &str) -> Sources {
    AllowList::read(text).sources
}

#[test]
fn ranges_and_addresses_are_read_and_have_one_form() {
    for (text, expected) in [
        ("192.0.2.0/24", "192.0.2.0/24"),
        ("192.0.2.77/24", "192.0.2.0/24"),
        ("192.0.2.7", "192.0.2.7/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("203.0.113.9/0", "0.0.0.0/0"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("2001:db8:0:ffff::1/33", "2001:db8::/33"),
        ("2001:DB8::/32", "2001:db8::/32"),
        ("::/0", "::/0"),
        ("::ffff:192.0.2.1", "192.0.2.1/32"),
        ("::ffff:192.0.2.1/120", "192.0.2.0/24"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        (" 198.51.100.0/24 ,\t192.0.2.1\n, 2001:db8::/32,", "192.0.2.1/32 198.51.100.0/24 2001:db8::/32"),
        ("192.0.2.1,192.0.2.1/32", "192.0.2.1/32"),
    ] {
        let list = AllowList::read(text);
        assert_eq!(shown(&list.sources), expected, "{text}");
        assert_eq!((list.unreadable, list.beyond), (None, 0), "{text}");
    }
}

#[test]
fn an_unreadable_entry_allows_no_source_and_is_reported() {
    for text in [
        "everybody",
        "*",
        "192.0.2.0/33",
        "192.0.2.0/-1",
        "192.0.2.0/+8",
        "192.0.2.0/08",
        "192.0.2.0/",
        "192.0.2.0/24/8",
        "192.0.2",
        "192.0.2.256",
        "192.0.2.01",
        "192.0.2.0/255.255.255.0",
        "/8",
        "2001:db8::/129",
        "2001:db8::%eth0",
        "::ffff:192.0.2.1/129",
        "[2001:db8::1]",
        "192.0.2.1:80",
        "192.0.2.0 /24",
        "192.0.2.1;192.0.2.2",
        "\"192.0.2.1\"",
    ] {
        let list = AllowList::read(text);
        assert_eq!(list.sources, Sources::Only([].into()), "{text}");
        assert_eq!(list.unreadable, Some(Unreadable { position: 1, entry: text.to_owned(), others: 0 }));
        let list = AllowList::read(&format!("198.51.100.0/24, {text}, 203.0.113.1, {text}"));
        assert_eq!(shown(&list.sources), "198.51.100.0/24 203.0.113.1/32", "the other entries still apply");
        assert_eq!(list.unreadable, Some(Unreadable { position: 2, entry: text.to_owned(), others: 1 }));
    }
}

#[test]
fn an_empty_list_allows_no_source_and_a_missing_list_allows_all() {
    for text in ["", " ", ",", " , ,"] {
        let list = AllowList::read(text);
        assert_eq!((list.sources, list.unreadable), (Sources::Only([].into()), None), "{text:?}");
    }
    assert_eq!(AllowList::ABSENT.sources, Sources::Anyone);
}

#[test]
fn a_range_within_another_range_counts_once() {
    assert_eq!(ranges("10.1.2.3,10.1.0.0/16,10.0.0.0/8,11.0.0.0/8,10.255.0.0/16"), "10.0.0.0/8 11.0.0.0/8");
    assert_eq!(ranges("10.1.2.3,0.0.0.0/0,2001:db8::1"), "0.0.0.0/0 2001:db8::1/128");
    assert_eq!(ranges("10.0.0.0/9,10.128.0.0/9"), "10.0.0.0/9 10.128.0.0/9", "adjacent ranges are not merged");
}

#[test]
fn ranges_beyond_the_limit_allow_no_source() {
    let entries: Vec<String> = (0..MAX_RANGES + 3).map(|n| format!("10.{}.{}.0/24", n / 256, n % 256)).collect();
    let list = AllowList::read(&entries.join(","));
    assert_eq!((list.sources.ranges().count(), list.beyond), (MAX_RANGES, 3));
    let list = AllowList::read(&entries[..MAX_RANGES].join(","));
    assert_eq!((list.sources.ranges().count(), list.beyond), (MAX_RANGES, 0));
    let list = AllowList::read(&[&entries[..MAX_RANGES], &["10.0.0.0/24".into(), "web".into()]].concat().join(","));
    let unreadable = list.unreadable.map(|it| (it.position, it.entry));
    assert_eq!((list.beyond, unreadable), (0, Some((MAX_RANGES + 2, "web".into()))), "a repeated range is allowed");
    let same = vec!["192.0.2.1"; 10_000].join(",");
    assert_eq!((ranges(&same).as_str(), AllowList::read(&same).beyond), ("192.0.2.1/32", 0), "each range counts once");
}

#[test]
fn several_lists_allow_the_union_of_their_sources() {
    let (one, other) = (sources("10.0.0.0/8"), sources("10.1.0.0/16,192.0.2.1"));
    assert_eq!(shown(&one.or(&other)), "10.0.0.0/8 192.0.2.1/32");
    assert_eq!(one.or(&Sources::Anyone), Sources::Anyone);
    assert_eq!(Sources::Anyone.or(&one), Sources::Anyone);
    assert_eq!(sources("").or(&sources("")), Sources::Only([].into()));
}

#[test]
fn ranges_of_the_other_family_allow_no_source() {
    let list = sources("10.0.0.0/8,2001:db8::/32");
    assert_eq!(shown(&list.of_family(Family::V4)), "10.0.0.0/8");
    assert_eq!(shown(&list.of_family(Family::V6)), "2001:db8::/32");
    assert_eq!(sources("10.0.0.0/8").of_family(Family::V6), Sources::Only([].into()));
    assert_eq!(Sources::Anyone.of_family(Family::V6), Sources::Anyone);
}

/// Generates random text of addresses, commas, slashes and other characters.
fn scribble() -> impl Strategy<Value = String> {
    let word = select(vec![
        "10.0.0.1",
        "2001:db8::1",
        "::ffff:1.2.3.4",
        "/",
        "0",
        "32",
        "128",
        "999",
        ",",
        " ",
        "\0",
        "é",
        "%",
    ]);
    prop_oneof![any::<String>(), prop::collection::vec(word, 0..40).prop_map(|words| words.concat())]
}

fn is_in(sources: &Sources, ip: IpAddr) -> bool {
    let mut ranges = sources.ranges();
    !sources.is_restricted() || ranges.any(|range| SourceRange::new(ip, range.length()) == Some(range))
}

proptest! {
    #[test]
    fn any_allow_list_is_read_without_a_panic(text in scribble()) {
        let list = AllowList::read(&text);
        prop_assert!(list.sources.is_restricted());
        let again: String = shown(&list.sources).replace(' ', ",");
        prop_assert_eq!(AllowList::read(&again), AllowList { unreadable: None, beyond: 0, ..list });
    }

    #[test]
    fn a_range_contains_exactly_the_addresses_with_its_prefix(ip: [u8; 4], other: [u8; 4], length in 0..=32_u8) {
        let range = SourceRange::new(ip.into(), length).unwrap();
        let (one, other) = (u32::from_be_bytes(ip), u32::from_be_bytes(other));
        let is_alike = (0..length).all(|bit| (one ^ other) >> (31 - bit) & 1 == 0);
        prop_assert_eq!(is_in(&[range].into_iter().collect(), other.to_be_bytes().into()), is_alike);
        prop_assert!(is_in(&[range].into_iter().collect(), ip.into()));
    }

    #[test]
    fn duplicate_entries_of_a_list_make_no_difference(
        ranges in prop::collection::vec((any::<[u8; 2]>(), 0..=16_u8), 0..8),
        client: [u8; 2],
    ) {
        let ip = |[a, b]: [u8; 2]| IpAddr::from([a & 7, b & 7, 0, 0]);
        let all: Vec<_> = ranges.iter().map(|(bits, length)| SourceRange::new(ip(*bits), *length).unwrap()).collect();
        let client = ip(client);
        let expected = all.iter().any(|range| SourceRange::new(client, range.length()) == Some(*range));
        let kept: Sources = all.into_iter().collect();
        prop_assert_eq!(is_in(&kept, client), expected);
        for (one, other) in kept.ranges().flat_map(|one| kept.ranges().map(move |other| (one, other))) {
            prop_assert!(one == other || !one.covers(other), "{} is part of {}", other, one);
        }
    }
}

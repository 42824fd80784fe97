// SPDX-License-Identifier: Apache-2.0
//! Tests the exact text of the annotations that the agent writes. Tests that annotations of every known format, and
//! malformed annotations, are read correctly.

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::select};

use super::{Entry, SeenEntry, Style, encode, is_right, seen_entries};
use crate::core::model::{
    Family, NodePort, PodPort, Protocol,
    settings::{AnnotationFormat, ProtocolPairing},
};

fn entry(pod_port: u16, node_ip: &str, node_port: u16, protocol: Protocol) -> Entry {
    Entry { node_ip: node_ip.parse().unwrap(), node_port: NodePort(node_port), protocol, pod_port: PodPort(pod_port) }
}

fn seen(pod_port: u16, node_port: u16, protocol: Protocol, family: Family) -> SeenEntry {
    SeenEntry { family, node_port: NodePort(node_port), protocol, pod_port: PodPort(pod_port) }
}

#[test]
fn each_format_equals_the_text_of_its_antrea_version() {
    let one = [entry(8080, "10.10.10.10", 61002, Protocol::Tcp)];
    assert_eq!(
        encode(&one, AnnotationFormat::V1_7),
        r#"[{"podPort":8080,"nodeIP":"10.10.10.10","nodePort":61002,"protocol":"tcp","protocols":["tcp"]}]"#
    );
    assert_eq!(
        encode(&one, AnnotationFormat::V2_0),
        r#"[{"podPort":8080,"nodeIP":"10.10.10.10","nodePort":61002,"protocol":"tcp"}]"#
    );
    assert_eq!(
        encode(&one, AnnotationFormat::V2_6),
        r#"[{"podPort":8080,"nodeIP":"10.10.10.10","nodePort":61002,"protocol":"tcp","ipFamily":"IPv4"}]"#
    );
}

#[test]
fn merged_protocols_are_one_entry_that_every_consumer_reads_as_one_member() {
    let both = [
        entry(53, "192.0.2.1", 61001, Protocol::Udp),
        entry(53, "192.0.2.1", 61001, Protocol::Tcp),
        entry(80, "192.0.2.1", 61000, Protocol::Tcp),
    ];
    let merged = |format| Style { format, pairing: ProtocolPairing::Merged };
    let text = encode(&both, merged(AnnotationFormat::V1_7));
    assert_eq!(
        text,
        r#"[{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]},{"podPort":53,"nodeIP":"192.0.2.1","nodePort":61001,"protocols":["tcp","udp"]}]"#
    );
    assert!(is_right(&text, &both, merged(AnnotationFormat::V1_7)));
    assert!(!is_right(&text, &both, AnnotationFormat::V1_7));
    assert_eq!(seen_entries(&text).len(), 3);
    assert_eq!(
        encode(&both[..2], merged(AnnotationFormat::V2_0)),
        r#"[{"podPort":53,"nodeIP":"192.0.2.1","nodePort":61001,"protocols":["tcp","udp"]}]"#
    );
}

#[test]
fn ipv6_entries_come_first_and_every_entry_names_its_family() {
    let both = [
        entry(53, "192.0.2.1", 61001, Protocol::Udp),
        entry(53, "192.0.2.1", 61001, Protocol::Tcp),
        entry(80, "192.0.2.1", 61000, Protocol::Tcp),
        entry(80, "2001:db8::1", 61003, Protocol::Tcp),
    ];
    let expected = [
        r#"[{"podPort":80,"nodeIP":"2001:db8::1","nodePort":61003,"protocol":"tcp","ipFamily":"IPv6"},"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","ipFamily":"IPv4"},"#,
        r#"{"podPort":53,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"tcp","ipFamily":"IPv4"},"#,
        r#"{"podPort":53,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"udp","ipFamily":"IPv4"}]"#,
    ];
    assert_eq!(encode(&both, AnnotationFormat::V2_0), expected.concat());
    let swapped = expected
        .concat()
        .replace("[{\"podPort\":80,\"nodeIP\":\"2001:db8::1\"", "[{\"podPort\":80,\"nodeIP\":\"2001:DB8::1\"");
    assert!(!is_right(&swapped, &both, AnnotationFormat::V2_0), "every address has one canonical spelling");
    let ipv4_first = format!("[{},{}]", &expected[2].trim_end_matches(','), &expected[0].trim_matches(['[', ',']));
    let two = [both[1], both[3]];
    assert!(!is_right(&ipv4_first, &two, AnnotationFormat::V2_0), "IPv6 entries must come first");
}

#[test]
fn every_known_format_is_read() {
    let of = |text: &str| seen_entries(text).into_iter().collect::<Vec<_>>();
    let tcp = |pod_port, node_port| vec![seen(pod_port, node_port, Protocol::Tcp, Family::V4)];
    assert_eq!(of(r#"[{"podPort":8080,"nodeIP":"10.102.47.229","nodePort":40002}]"#), tcp(8080, 40002));
    assert_eq!(
        of(r#"[{"podPort":80,"nodeIP":"192.168.110.91","nodePort":61031,"protocols":["tcp"]}]"#),
        tcp(80, 61031)
    );
    assert_eq!(
        of(r#"[{"podPort":80,"nodeIP":"10.1.10.92","nodePort":61003,"protocol":"tcp","protocols":["tcp"]}]"#),
        tcp(80, 61003)
    );
    assert_eq!(
        of(r#"[{"podPort":53,"nodeIP":"192.0.2.1","nodePort":61000,"protocols":["tcp","udp"]}]"#),
        [seen(53, 61000, Protocol::Tcp, Family::V4), seen(53, 61000, Protocol::Udp, Family::V4)]
    );
    assert_eq!(
        of(r#"[{"podPort":8080,"nodeIP":"10.10.10.10","nodePort":61002,"protocol":"tcp","ipFamily":"IPv4"},
               {"podPort":8080,"nodeIP":"fd12:3456:789a:1::1","nodePort":61003,"protocol":"tcp","ipFamily":"IPv6"}]"#),
        [seen(8080, 61002, Protocol::Tcp, Family::V4), seen(8080, 61003, Protocol::Tcp, Family::V6)]
    );
    assert_eq!(
        of(r#"[{"podPort":80,"nodeIP":"2001:db8::1","nodePort":61000}]"#),
        [seen(80, 61000, Protocol::Tcp, Family::V6)]
    );
}

#[test]
fn a_malformed_entry_is_omitted_and_the_others_are_read() {
    let good = r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000}"#;
    for bad in [
        r#"{"podPort":"80","nodeIP":"192.0.2.1","nodePort":61001}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61001.0}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":70000}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":-1}"#,
        r#"{"podPort":0,"nodeIP":"192.0.2.1","nodePort":61001}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":0}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61001,"nodePort":61002}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"icmp"}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61001,"ipFamily":"IPv5"}"#,
        r#"{"podPort":80,"nodeIP":"somewhere","nodePort":61001}"#,
        r#"{"podPort":80,"nodeIP":"192.0.2.1"}"#,
        "[]",
        "null",
        "7",
    ] {
        let read = seen_entries(&format!("[{bad},{good}]"));
        assert_eq!(read, BTreeSet::from([seen(80, 61000, Protocol::Tcp, Family::V4)]), "{bad}");
    }
}

#[test]
fn a_value_that_is_no_list_has_no_entries() {
    let nested = "[".repeat(100_000);
    let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let huge = format!("[{}]", vec![r#"{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000}"#; 10_000].join(","));
    for text in ["", "null", "{}", "\"[]\"", "[", "[{}] trailing", "\u{0}", &nested, &deep, &huge] {
        assert!(seen_entries(text).is_empty());
        assert!(!is_right(text, &[entry(80, "192.0.2.1", 61000, Protocol::Tcp)], AnnotationFormat::V1_7));
    }
}

#[test]
fn an_entry_with_an_additional_field_is_not_right() {
    let one = [entry(80, "192.0.2.1", 61000, Protocol::Tcp)];
    let right = encode(&one, AnnotationFormat::V2_0);
    // A reader in Go ignores the case of field names, and uses the last of several fields with the same name: here, the
    // wrong `NODEPORT`.
    let shadowed = right.replace("}]", r#","NODEPORT":1}]"#);
    assert!(!is_right(&shadowed, &one, AnnotationFormat::V2_0));
    assert!(!is_right(&right, &one, AnnotationFormat::V1_7));
    let twice = right.replace("}]", &format!("}},{}", &right.trim_start_matches('[')));
    assert!(!is_right(&twice, &one, AnnotationFormat::V2_0));
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let protocol = select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp]);
    (1..=u16::MAX, any::<bool>(), 1..=u16::MAX, protocol).prop_map(|(pod_port, is_v6, node_port, protocol)| {
        entry(pod_port, if is_v6 { "2001:db8::1" } else { "192.0.2.1" }, node_port, protocol)
    })
}

fn any_format() -> impl Strategy<Value = AnnotationFormat> {
    select(vec![AnnotationFormat::V1_7, AnnotationFormat::V2_0, AnnotationFormat::V2_6])
}

proptest! {
    #[test]
    fn a_written_value_is_read_back_and_right(entries in prop::collection::vec(any_entry(), 0..20), format in any_format()) {
        let text = encode(&entries, format);
        let said: BTreeSet<_> =
            entries.iter().map(|it| seen(it.pod_port.0, it.node_port.0, it.protocol, Family::of(it.node_ip))).collect();
        prop_assert_eq!(seen_entries(&text), said);
        prop_assert!(is_right(&text, &entries, format));
        prop_assert!(!text.contains([' ', '\n']));
    }

    #[test]
    fn the_same_set_gives_the_same_bytes(
        (entries, shuffled) in prop::collection::vec(any_entry(), 0..20)
            .prop_flat_map(|entries| (Just(entries.clone()), Just(entries).prop_shuffle())),
        format in any_format(),
    ) {
        prop_assert_eq!(encode(&entries, format), encode(&shuffled, format));
        prop_assert!(is_right(&encode(&entries, format), &shuffled, format));
    }

    #[test]
    fn another_set_is_not_right(entries in prop::collection::vec(any_entry(), 1..5), format in any_format()) {
        prop_assert!(!is_right(&encode(&entries[1..], format), &entries, format));
        prop_assert!(!is_right(&encode(&entries, format), &entries[1..], format));
    }

    #[test]
    fn any_text_is_read_without_a_panic(text in r#"[\[\]{}",:0-9a-zA-Z\\ ]{0,200}"#, bytes: String) {
        for text in [text, bytes] {
            let _names = seen_entries(&text);
            prop_assert!(!is_right(&text, &[entry(1, "192.0.2.1", 1, Protocol::Tcp)], AnnotationFormat::V1_7));
        }
    }
}

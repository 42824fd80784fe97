// SPDX-License-Identifier: Apache-2.0
//! Tests the models with annotations for which the results of the real consumers are known.

use std::net::SocketAddr;

use super::{Ako, agree, cis};
use crate::cluster::Entry;

/// Returns the pool members that current AKO, older AKO releases and CIS read for target port 8080 of an IPv4 Service.
fn read(annotation: &str) -> [Vec<String>; 3] {
    let ako = |ako: Ako| ako.members(annotation, 8080, |ip| ip.is_ipv4()).iter().map(SocketAddr::to_string).collect();
    let cis = cis::members(annotation, 8080).iter().filter_map(cis::Member::address).map(|it| it.to_string()).collect();
    [ako(Ako::Current), ako(Ako::LastAddress), cis]
}

fn same(members: &[&str]) -> [Vec<String>; 3] {
    [0; 3].map(|_| members.iter().map(ToString::to_string).collect())
}

#[test]
fn every_format_generation_is_one_member() {
    for annotation in [
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000}]"#,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocols":["tcp"]}]"#,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]"#,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"}]"#,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","ipFamily":"IPv4"}]"#,
    ] {
        assert_eq!(read(annotation), same(&["192.0.2.1:61000"]), "{annotation}");
        agree(annotation, &Entry::parse(annotation).unwrap_or_default()).unwrap();
    }
}

#[test]
fn both_protocols_of_a_port_are_members_of_each_pool() {
    let apart = r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"},
                    {"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"udp"}]"#;
    assert_eq!(read(apart), same(&["192.0.2.1:61000", "192.0.2.1:61001"]));
    let twice = apart.replace("61001", "61000");
    let [ako, _, cis] = read(&twice);
    assert_eq!((ako.len(), cis.len()), (2, 1));
}

/// Consumers use an SCTP entry for the pools of all protocols. For this reason, NPL publishes SCTP mappings only when
/// SCTP is enabled.
#[test]
fn an_sctp_entry_is_a_member_of_every_pool() {
    let both = r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"},
                   {"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"sctp"}]"#;
    assert_eq!(read(both), same(&["192.0.2.1:61000", "192.0.2.1:61001"]));
}

#[test]
fn values_of_the_wrong_type_read_as_zero_and_other_documents_as_empty() {
    for nothing in [
        r#"{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000}"#,
        r#"[{"podPort":"8080","nodeIP":"192.0.2.1","nodePort":61000}]"#,
        r#"[{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000}]"#,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000}"#,
        "[]",
        "null",
        "7",
        "\"[]\"",
        "",
    ] {
        assert_eq!(read(nothing), same(&[]), "{nothing}");
    }
    let fraction = r#"[7,[],{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000.0}]"#;
    assert_eq!(read(fraction), same(&["192.0.2.1:0"]));
}

#[test]
fn a_field_name_in_another_case_overrides() {
    let shadowed = r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"NODEPORT":1}]"#;
    assert_eq!(read(shadowed), same(&["192.0.2.1:1"]));
    let error = agree(shadowed, &[entry("192.0.2.1", 61000)]).unwrap_err();
    assert!(error.to_string().contains("not [192.0.2.1:61000]"), "{error}");
}

#[test]
fn older_releases_of_ako_need_the_ipv4_entry_last() {
    let (v4, v6) = (
        r#"{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"}"#,
        r#"{"podPort":8080,"nodeIP":"2001:db8::1","nodePort":61001,"protocol":"tcp"}"#,
    );
    let entries = [entry("192.0.2.1", 61000), entry("2001:db8::1", 61001)];
    let [current, older, cis] = read(&format!("[{v4},{v6}]"));
    assert_eq!(current, ["192.0.2.1:61000"]);
    assert_eq!(older, ["[2001:db8::1]:61000"]);
    assert_eq!(cis.len(), 2);
    agree(&format!("[{v4},{v6}]"), &entries).unwrap_err();
    agree(&format!("[{v6},{v4}]"), &entries).unwrap();
}

fn entry(node_ip: &str, node_port: u16) -> Entry {
    Entry { pod_port: 8080, node_ip: node_ip.parse().unwrap(), node_port, protocol: crate::echo::Protocol::Tcp }
}

// SPDX-License-Identifier: Apache-2.0
//! Checks that the code in `npl-agent/src/core/` and `npl-feed/src/core/` has no side effects: it must not use clocks,
//! sockets, files, logs, or crates that access these.

use super::Finding;
use super::rust_code::{paths, without_comments};
use super::tree::Tree;

const CORES: [&str; 2] = ["npl-agent/src/core/", "npl-feed/src/core/"];

/// The paths of crates and modules with side effects, and of `HashMap`, whose iteration order is random.
const FORBIDDEN: [&str; 25] = [
    "axum",
    "aya",
    "aya_obj",
    "futures",
    "hickory_server",
    "k8s_openapi",
    "kube",
    "libc",
    "nix",
    "rand",
    "rtnetlink",
    "tokio",
    "tonic",
    "tracing",
    "std::env",
    "std::fs",
    "std::io",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::os",
    "std::process",
    "std::thread",
    "std::time",
    "std::collections::HashMap",
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let files = CORES.iter().flat_map(|core| tree.below(core, ".rs"));
    files.flat_map(|(path, text)| check_file(path, text)).collect()
}

fn check_file(path: &str, text: &str) -> Vec<Finding> {
    let named = paths(&without_comments(text));
    FORBIDDEN
        .iter()
        .filter(|forbidden| named.iter().any(|name| is_within(name, forbidden)))
        .map(|forbidden| Finding::error(path, format!("the core must have no side effects, but uses `{forbidden}`")))
        .collect()
}

/// Whether a path is the forbidden path, or an item below the forbidden path.
fn is_within(path: &str, forbidden: &str) -> bool {
    path.strip_prefix(forbidden).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::check_file;

    fn found(code: &str) -> Vec<String> {
        check_file("x", code).into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn forbidden_paths_are_found_in_every_form() {
        for code in [
            "use tokio::sync::mpsc;",
            "use std::{collections::BTreeMap, time::{Duration, Instant}};",
            "pub(crate) use std::fs;",
            "fn f() { std::fs::read(\"x\"); }",
            "use std::net::{IpAddr, TcpStream};",
            "use kube;",
            "use std::fs as files;",
        ] {
            assert_eq!(found(code).len(), 1, "{code}");
        }
    }

    #[test]
    fn other_paths_are_allowed() {
        for code in [
            "use std::net::{IpAddr, Ipv4Addr};",
            "use crate::core::model::Pod; // unlike kube::Pod",
            "/// Not `tokio::time`.\nuse std::collections::{BTreeMap, BTreeSet};",
            "fn aya_like(kube: u8) {}",
            "use npl_common::mapping::{EndpointV4, NodeAddressV4};",
        ] {
            assert!(found(code).is_empty(), "{code}: {:?}", found(code));
        }
    }
}

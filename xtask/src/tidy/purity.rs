// SPDX-License-Identifier: Apache-2.0
//! `npl-agent/src/core/` decides and does nothing else: it may not even name what acts.

use super::Finding;
use super::tree::Tree;

const CORE: &str = "npl-agent/src/core/";

/// Crates and modules of clocks, sockets, files, processes, threads, randomness, logs and outside systems.
const FORBIDDEN: [&str; 23] = [
    "axum",
    "aya",
    "aya_obj",
    "futures",
    "k8s_openapi",
    "kube",
    "libc",
    "nix",
    "rand",
    "rtnetlink",
    "tokio",
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
    tree.below(CORE, ".rs").flat_map(|(path, text)| check_file(path, text)).collect()
}

fn check_file(path: &str, text: &str) -> Vec<Finding> {
    let code: String = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .fold(String::new(), |code, line| code + line + "\n");
    let mut named = imports(&code);
    named.extend(qualified_paths(&code));
    FORBIDDEN
        .iter()
        .filter(|forbidden| named.iter().any(|name| is_within(name, forbidden)))
        .map(|forbidden| Finding::error(path, format!("the core is pure and may not use `{forbidden}`")))
        .collect()
}

/// Whether a path is the forbidden one or below it.
fn is_within(path: &str, forbidden: &str) -> bool {
    path.strip_prefix(forbidden).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The paths of all `use` declarations, with groups written out.
fn imports(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for statement in code.split("use ").skip(1).filter_map(|rest| rest.split(';').next()) {
        let compact: String = statement.split(" as ").next().unwrap_or_default().split_whitespace().collect();
        expand(&compact, "", &mut paths);
    }
    paths
}

/// Writes out `a::{b, c::{d, e}}`.
fn expand(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let Some((head, group)) = tree.split_once('{') else {
        paths.push(format!("{prefix}{tree}"));
        return;
    };
    let inner = group.strip_suffix('}').unwrap_or(group);
    for part in split_top_level(inner) {
        expand(part, &format!("{prefix}{head}"), paths);
    }
}

/// Splits at the commas that are in no inner group.
fn split_top_level(list: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let parts = list.split(|c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.filter(|part| !part.is_empty()).collect()
}

/// Paths that are written out where they are used: `std::fs::read(…)`.
fn qualified_paths(code: &str) -> impl Iterator<Item = String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    code.split(move |c: char| !is_part(c))
        .filter(|word| word.contains("::"))
        .map(|word| word.trim_matches(':').to_owned())
}

#[cfg(test)]
mod tests {
    use super::check_file;

    fn found(code: &str) -> Vec<String> {
        check_file("x", code).into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn what_acts_is_found_however_it_is_named() {
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
    fn what_only_computes_is_allowed() {
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

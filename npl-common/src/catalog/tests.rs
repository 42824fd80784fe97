// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Checks that the lists of maps and programs are complete.

use std::collections::BTreeSet;

use super::{MAPS, MapKind, PROGRAM_LIST};
use crate::names::{
    MAP_ALLOW_V4, MAP_ALLOW_V6, PINNED_MAPS, PROGRAMS, SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS, SlowPath, XDP_PROGRAMS,
};

#[test]
fn every_pinned_map_is_listed_once() {
    let listed: Vec<&str> = MAPS.iter().flat_map(|map| map.names).copied().collect();
    let unique: BTreeSet<&str> = listed.iter().copied().collect();
    assert_eq!(unique.len(), listed.len());
    assert_eq!(unique, PINNED_MAPS.iter().copied().collect());
}

/// Some kernels log a report of their sanitizer when an LPM trie changes (cilium/cilium#36262), so only Nodes with allow
/// lists may write LPM tries.
#[test]
fn only_the_maps_of_allow_lists_are_lpm_tries() {
    let tries = MAPS.iter().filter(|map| map.kind == MapKind::LpmTrie);
    let names: Vec<&str> = tries.flat_map(|map| map.names).copied().collect();
    assert_eq!(names, [MAP_ALLOW_V4, MAP_ALLOW_V6]);
}

#[test]
fn a_key_or_value_has_one_type_or_one_for_each_map() {
    for map in MAPS {
        for content in [map.key, map.value] {
            assert!([0, 1, map.names.len()].contains(&content.layouts().len()), "{:?}", map.names);
        }
    }
}

#[test]
fn every_program_is_listed_once() {
    let listed: Vec<&str> = PROGRAM_LIST.iter().map(|program| program.name).collect();
    let sockets = SOCKET_PROGRAMS.iter().map(|program| program.name);
    let all = [PROGRAMS, XDP_PROGRAMS, SLOW_PATH_PROGRAMS].into_iter().flatten().copied().chain(sockets);
    assert_eq!(listed, all.collect::<Vec<_>>());
    for program in PROGRAM_LIST {
        let hook = SOCKET_PROGRAMS.iter().find(|socket| socket.name == program.name).map(|socket| socket.hook);
        assert!(hook.is_none_or(|hook| program.hook.contains(&format!("`{hook}`"))), "{}", program.name);
    }
}

#[test]
fn slow_path_programs_name_the_programs_that_call_them() {
    for caller in PROGRAMS {
        for (_, name) in SlowPath::programs_of(caller) {
            let listed = PROGRAM_LIST.iter().find(|program| program.name == name).unwrap();
            assert!(listed.used_with.contains(&format!("`{caller}`")), "{caller}");
        }
    }
}

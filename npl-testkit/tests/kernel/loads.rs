// SPDX-License-Identifier: Apache-2.0
//! Tests that the verifier accepts the programs. The verifier's decision depends only on the kernel and on the loader's
//! capabilities.

use crate::lab::{Lab, needs_perfmon, with_lab, with_loader_lab};

/// This test and the next one load all programs, including the tail-called programs. On some emulated kernels, only
/// these two tests are run.
#[test]
fn every_program_loads_with_the_agents_capabilities() {
    with_lab(|lab| {
        assert_eq!(lab.datapath.hooks.are_unmitigated(), needs_perfmon());
        assert_all_load(lab);
    });
}

#[test]
fn every_program_loads_with_the_loaders_capabilities() {
    with_loader_lab(|lab| {
        assert!(lab.datapath.hooks.are_unmitigated());
        assert_all_load(lab);
    });
}

#[track_caller]
fn assert_all_load(lab: &mut Lab) {
    let refused: Vec<_> = lab.datapath.hooks.load_all().into_iter().filter_map(Result::err).collect();
    assert!(refused.is_empty(), "{refused:?}");
}

// SPDX-License-Identifier: Apache-2.0
//! Tests that the verifier accepts the programs. The verifier's decision depends only on the kernel and on the loader's
//! capabilities.

use std::path::Path;

use crate::bpffs_pool::BPFFS;
use crate::lab::{Lab, needs_perfmon, with_lab, with_loader_lab};
use crate::links::programs::pinned_infos;

/// The maximum number of instructions that the verifier may visit in one program. The verifier itself rejects a program
/// after a million visited instructions. The test's limits are much lower, because kernels differ: Linux 5.10 rejected
/// a program of which Linux 6.18 visited only 258 000 instructions with `CAP_PERFMON`. Without this capability, the
/// verifier also visits speculative paths.
const MAX_VISITED: u32 = 250_000;
const MAX_VISITED_SPECULATIVELY: u32 = 500_000;

/// This test and the next test load all programs, including the tail-called programs. On some emulated kernels, only
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
    let limit = if lab.datapath.hooks.are_unmitigated() { MAX_VISITED } else { MAX_VISITED_SPECULATIVELY };
    for ((_, name), info) in pinned_infos(Path::new(BPFFS)) {
        // Kernels before Linux 5.16 do not report the number.
        let visited = info.verified_instruction_count();
        assert!(visited.is_none_or(|visited| visited <= limit), "{name}: {visited:?} visited instructions");
    }
}

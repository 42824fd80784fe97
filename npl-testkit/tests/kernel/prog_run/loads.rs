// SPDX-License-Identifier: Apache-2.0
//! What the verifier says to the programs: it depends on the kernel and on the agent's rights, and on nothing else here.

use npl_common::names::PROGRAMS;

use crate::lab::{with_lab, with_lab_of_loader};

/// With what each of them jumps to. On kernels that have no test but this, it is all that is known.
#[test]
fn every_program_loads_with_the_rights_of_the_agent() {
    with_lab(|lab| {
        for name in PROGRAMS {
            lab.program(name);
        }
        lab.datapath.hooks.load_xdp_program().unwrap();
    });
}

#[test]
fn every_program_loads_with_the_rights_of_the_loader() {
    with_lab_of_loader(|lab| {
        assert!(lab.datapath.hooks.are_unmitigated());
        let refused: Vec<_> = lab.datapath.hooks.load_all().into_iter().filter_map(Result::err).collect();
        assert!(refused.is_empty(), "{refused:?}");
    });
}

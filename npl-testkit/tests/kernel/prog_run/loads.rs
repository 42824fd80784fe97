// SPDX-License-Identifier: Apache-2.0
//! What the verifier says to the programs: it depends on the kernel and on the agent's rights, and on nothing else here.

use npl_common::names::PROGRAMS;

use crate::lab::{Lab, with_lab, with_lab_of_loader};

/// All of them, with what each jumps to.
fn load_all(lab: &mut Lab) {
    for name in PROGRAMS {
        lab.program(name);
    }
    lab.datapath.hooks.xdp_program().unwrap();
}

/// On kernels that have no test but this, it is all that is known.
#[test]
fn every_program_loads_with_the_rights_of_the_agent() {
    with_lab(load_all);
}

#[test]
fn every_program_loads_with_the_rights_of_the_loader() {
    with_lab_of_loader(|lab| {
        load_all(lab);
        assert!(lab.datapath.hooks.are_unfenced());
        let refused: Vec<_> = lab.datapath.hooks.load_all().into_iter().filter_map(Result::err).collect();
        assert!(refused.is_empty(), "{refused:?}");
    });
}

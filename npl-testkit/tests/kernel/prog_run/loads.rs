// SPDX-License-Identifier: Apache-2.0
//! What the verifier says to the programs: it depends on the kernel and on the agent's rights, and on nothing else here.

use npl_common::names::PROGRAMS;

use crate::lab::with_lab;

/// With what each of them jumps to. On kernels that have no test but this, it is all that is known.
#[test]
fn every_program_loads_with_the_rights_of_the_agent() {
    with_lab(|lab| {
        for name in PROGRAMS {
            lab.program(name);
        }
        lab.datapath.hooks.xdp_program().unwrap();
    });
}

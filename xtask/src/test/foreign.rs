// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test --arch`: the packet tests for another processor architecture than this machine's, on emulated
//! machines with Debian's kernels for the architecture.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::guests::{GUEST_DEADLINE, IGNORED, LOADING_TESTS, guest_for_packets, run_guest, shares};
use super::{Options, packages, ready};
use crate::arch::Arch;
use crate::emulation::Guest;
use crate::setup::{FOREIGN_KERNELS, Kernel};
use crate::tally::{Counts, Tally};
use crate::test_binary::{self, TestBinary};
use crate::{build, build_ebpf};

/// The tests that run unless the user gives `--kernels` or `--filter`: the programs load, and translate single packets.
/// These tests depend on the architecture most, because the kernel compiles the programs to the architecture's machine
/// code.
const DEFAULT_TESTS: [&str; 4] = ["--test-threads=1", IGNORED, LOADING_TESTS, "prog_run::"];

/// Builds the kernel programs, the packet tests and the agent, and runs the tests and the agent's command `load`.
pub(super) fn run(options: &Options, arch: Arch, tally: &mut Tally) {
    let programs = tally.prepare("build of the kernel programs", build_ebpf::build);
    let binaries = ready(&programs).and_then(|_built| {
        tally.prepare("build of the packet tests for the architecture", || {
            // All packages are selected, so that dependencies have the same features as in the build of the agent.
            let target = [&packages()[..], &["--test", "kernel"]].concat();
            test_binary::compile(&mut build::cargo_test_for(arch, &target)?)
        })
    });
    let agent = ready(&programs).and_then(|_built| {
        tally.prepare("build of the agent for the architecture", || build::build_agent_for(arch, &[]))
    });
    let kernels = options.kernels_or(FOREIGN_KERNELS);
    match binaries {
        Ok(binaries) => run_packet_tests(options, arch, &binaries, &kernels, tally),
        Err(missing) => tally.not_run(&format!("packet tests for {arch}, emulated"), missing),
    }
    if options.filter().is_some() {
        return;
    }
    for kernel in kernels {
        let name = format!("the agent loads its programs under kernel {}, emulated", arch.mark(&kernel.to_string()));
        match &agent {
            Ok(agent) => tally.check(&name, || load(arch, kernel, agent)),
            Err(missing) => tally.not_run(&name, *missing),
        }
    }
}

fn run_packet_tests(options: &Options, arch: Arch, binaries: &[TestBinary], kernels: &[Kernel], tally: &mut Tally) {
    let mut guests = Vec::new();
    for binary in binaries {
        for kernel in kernels {
            for (scope, arguments) in selection(options.filter(), options.kernels.is_some()) {
                guests.push(guest_for_packets(arch, *kernel, binary, scope, &arguments));
            }
        }
    }
    let step = |(name, guest)| (name, move |counts: &mut Counts| run_guest(&guest, counts));
    tally.side_by_side(guests.into_iter().map(step).collect());
}

/// Runs the agent's command `load`, as the init container of the agent's Pod does.
fn load(arch: Arch, kernel: Kernel, agent: &Path) -> Result<()> {
    let mut command = Command::new(agent);
    command.args(["load", "--mount-bpffs"]);
    let mut guest = Guest::for_packets(arch, kernel, command);
    guest.name.push_str("-load");
    let (mut has_loaded, mut is_refused) = (false, false);
    let is_success = guest.run(GUEST_DEADLINE, |line| {
        println!("    {:>6} | {line}", guest.name);
        has_loaded |= line.starts_with("loaded ");
        // `load` reports a refused program, and exits with 0.
        is_refused |= line.starts_with("npl-agent: ");
    })?;
    ensure!(is_success && has_loaded && !is_refused, "the agent has not loaded all programs: its output is above");
    Ok(())
}

/// Returns, for each guest of a kernel, the part of the step's name that names the guest's tests, and the arguments of
/// the test binary.
fn selection(filter: Option<&str>, has_kernels: bool) -> Vec<(&'static str, Vec<&str>)> {
    if filter.is_some() || has_kernels {
        return shares(filter, false);
    }
    vec![(", single packets,", DEFAULT_TESTS.to_vec())]
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_TESTS, IGNORED, selection};

    #[test]
    fn single_packets_are_the_default_and_kernels_run_all_tests() {
        assert_eq!(selection(None, false), [(", single packets,", DEFAULT_TESTS.to_vec())]);
        assert_eq!(selection(Some("sctp"), false), [("", vec!["--test-threads=1", IGNORED, "sctp"])]);
        let scopes: Vec<_> = selection(None, true).iter().map(|(scope, _)| *scope).collect();
        assert_eq!(scopes, [", first share,", ", second share,"]);
    }
}

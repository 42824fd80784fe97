// SPDX-License-Identifier: Apache-2.0
//! Hostile packets: mutated packets of all kinds, and random bytes, through all TC and XDP programs.
//!
//! After each run, an oracle that shares no code with the programs checks the verdict, every byte of the packet and
//! every counter. A packet that is not NPL's must pass unchanged; a translated packet must differ only in the fields
//! that a translation changes, and its checksums must be as right or as wrong as before.
//!
//! `NPL_MUTATED_PACKETS` sets the number of packets, and `NPL_MUTATED_SEED` the seed. If a packet fails, the test prints
//! the shortest frame that fails as well.

mod check;
mod corpus;
mod headers;
mod mutate;
mod oracle;
mod runner;
mod scene;
mod tally;

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};
use npl_agent::core::model::Family;
use npl_testkit::extent;
use npl_testkit::process::on_own_thread;

use self::runner::Runner;
use crate::prog_run::scene::with_family;
use crate::sys::stay_on_this_processor;
use crate::world::is_emulated;

/// The default seed. The seed is fixed, so that every run tests the same packets.
const SEED: u64 = 0x4e50_4c4d;
/// The number of packets from which on the test also requires that every kind of result has occurred.
const MANY: u64 = 100_000;

/// The number of packets of both families.
fn packets() -> u64 {
    extent::number("NPL_MUTATED_PACKETS").unwrap().unwrap_or(if is_emulated() { 20_000 } else { 500_000 })
}

#[test]
fn mutated_ipv4_packets_are_translated_or_passed_unchanged() {
    run(Family::V4);
}

#[test]
fn mutated_ipv6_packets_are_translated_or_passed_unchanged() {
    run(Family::V6);
}

fn run(family: Family) {
    let (wanted, seed) = (packets() / 2, extent::number("NPL_MUTATED_SEED").unwrap().unwrap_or(SEED));
    let kernel_log = KernelLog::open();
    on_own_thread(|| {
        stay_on_this_processor();
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        scene::set_up_network();
        with_family(family, |lab| {
            let started = Instant::now();
            let mut runner = Runner::new(lab, seed ^ u64::from(family == Family::V6));
            for _packet in 0..wanted {
                if let Err(failure) = runner.run_next() {
                    panic!("with NPL_MUTATED_SEED={seed}: {failure}");
                }
            }
            let seconds = started.elapsed().as_secs_f64();
            // The harness hides the captured output of a test that passes.
            let report = format!("mutated packets, {family:?}, seed {seed}, {seconds:.1} s: {}\n", runner.tally);
            std::io::stderr().write_all(report.as_bytes()).unwrap();
            if wanted >= MANY {
                runner.tally.is_complete(family);
            }
        });
    });
    kernel_log.has_no_warning();
}

/// The messages of the kernel from one moment on.
struct KernelLog(File);

impl KernelLog {
    fn open() -> Self {
        let mut log = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").unwrap();
        log.seek(SeekFrom::End(0)).unwrap();
        Self(log)
    }

    /// Asserts that the kernel has logged no warning of its own code since the log was opened.
    fn has_no_warning(mut self) {
        let mut record = [0; 8192];
        // Each read returns one record, and fails after the last one.
        while let Ok(length) = self.0.read(&mut record) {
            let text = String::from_utf8_lossy(&record[..length]).into_owned();
            let signs = ["WARNING: ", "BUG: ", "Oops", "caps=("];
            assert!(!signs.iter().any(|sign| text.contains(sign)), "the kernel logged: {text}");
        }
    }
}

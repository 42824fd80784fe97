// SPDX-License-Identifier: Apache-2.0
//! Test runs with a checksum that the device computed (`CHECKSUM_COMPLETE`), and processor affinity.

use std::io;
use std::os::fd::BorrowedFd;

use nix::sched::sched_getcpu;
use nix::unistd::Pid;
use npl_testkit::process;
use npl_testkit::test_run::{self, Options};

/// The flag `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`: the packet has a checksum from the device, and the kernel verifies
/// after the run that the checksum still matches the packet.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// Runs a TC program on a packet with a complete checksum and returns the action. The error is `EBADMSG` if the
/// checksum is wrong after the run.
pub(crate) fn run_with_complete_checksum(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<i32> {
    test_run::run(program, frame, &Options { flags: CHECKSUM_COMPLETE, repeat: 1, ..Options::default() })
}

/// Pins this thread, and the threads that it starts, to its current processor, so that per-CPU map values are the
/// same in every run.
pub(crate) fn stay_on_this_processor() {
    stay_on(sched_getcpu().unwrap());
}

/// Pins this thread, and the threads that it starts, to one processor.
pub(crate) fn stay_on(processor: usize) {
    process::keep_on(Pid::from_raw(0), processor).unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! A test run with the checksum that a device made; one processor.

use std::io;
use std::os::fd::BorrowedFd;

use nix::sched::sched_getcpu;
use nix::unistd::Pid;
use npl_testkit::process;
use npl_testkit::test_run::{self, Options};

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`: the packet comes with the sum that a device made, and the kernel checks after the
/// run that the sum is still that of the packet.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// Runs a TC program over a packet with a complete checksum; the action. `EBADMSG` if the checksum is wrong afterwards.
pub(crate) fn run_with_complete_checksum(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<i32> {
    test_run::run(program, frame, &Options { flags: CHECKSUM_COMPLETE, repeat: 1, ..Options::default() })
}

/// Keeps this thread, and those that it starts, on the processor that it is on: what a program keeps per processor is
/// then there for the next run.
pub(crate) fn stay_on_this_processor() {
    stay_on(sched_getcpu().unwrap());
}

/// The same on the processor of this number.
pub(crate) fn stay_on(processor: usize) {
    process::keep_on(Pid::from_raw(0), processor).unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! What no library in use does: the bpf(2) call of a test run with the checksum that a device made; one processor.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::sched::sched_getcpu;
use nix::unistd::Pid;
use npl_testkit::process;

const BPF_PROG_TEST_RUN: libc::c_int = 10;

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`: the packet comes with the sum that a device made, and the kernel checks after the
/// run that the sum is still that of the packet.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// What [`BPF_PROG_TEST_RUN`] reads and writes.
#[repr(C)]
#[derive(Default)]
struct ProgTestRun {
    program: u32,
    action: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_size_in: u32,
    context_size_out: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Runs a TC program over a packet with a complete checksum; the action. `EBADMSG` if the checksum is wrong afterwards.
pub(crate) fn run_with_complete_checksum(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<i32> {
    let mut run = ProgTestRun {
        program: program.as_raw_fd().cast_unsigned(),
        data_size_in: u32::try_from(frame.len()).map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        repeat: 1,
        flags: CHECKSUM_COMPLETE,
        ..ProgTestRun::default()
    };
    let (to, size) = (std::ptr::from_mut(&mut run), size_of::<ProgTestRun>());
    // SAFETY: the argument is what the command reads, its pointers outlive the call, and its size is its own.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, to, size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(run.action.cast_signed()) }
}

/// Keeps this thread, and those that it starts, on the processor that it is on: what a program keeps per processor is
/// then there for the next run.
pub(crate) fn stay_on_this_processor() {
    process::keep_on(Pid::from_raw(0), sched_getcpu().unwrap()).unwrap();
}

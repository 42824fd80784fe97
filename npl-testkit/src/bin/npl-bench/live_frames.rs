// SPDX-License-Identifier: Apache-2.0
//! `BPF_PROG_TEST_RUN` with live frames: runs an XDP program in a loop and carries out its verdicts.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use anyhow::{Context as _, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// `BPF_PROG_TEST_RUN`, of the commands of bpf(2).
const BPF_PROG_TEST_RUN: libc::c_int = 10;
/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;
/// Frames at once: as many as a driver takes from its ring in one poll.
const BATCH: u32 = 64;
/// Ahead of everything that shares the processor: a build beside the bench must not be measured.
const PRIORITY: libc::c_int = -20;

/// The part of `union bpf_attr` that the command reads.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Runs `program` over `repeat` copies of `frame`, in the network namespace of the calling thread.
///
/// aya has the command, but not this flag of it.
#[expect(unsafe_code, reason = "no library in use wraps this form of the system call")]
pub(crate) fn run(program: BorrowedFd<'_>, frame: &[u8], repeat: u32) -> Result<()> {
    let attributes = TestRun {
        prog_fd: u32::try_from(program.as_raw_fd()).context("a file descriptor is not negative")?,
        data_size_in: u32::try_from(frame.len()).context("a frame is shorter than a page")?,
        data_in: frame.as_ptr() as u64,
        repeat,
        flags: LIVE_FRAMES,
        batch_size: BATCH,
        ..TestRun::default()
    };
    // SAFETY: the attributes and the frame that they point to outlive the call, and the kernel only reads them.
    let status =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw const attributes, size_of::<TestRun>()) };
    if status == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error()).context("run the packet generator over live frames, which Linux has since 5.18")
}

/// Ties the calling thread, and with it all work that its packets cause, to the last processor that it may use.
pub(crate) fn occupy_one_processor() -> Result<()> {
    let this_thread = Pid::from_raw(0);
    let allowed = sched_getaffinity(this_thread).context("ask for the thread's processors")?;
    // Device interrupts are usually handled by the first ones.
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(last.context("no processor is allowed")?).context("name a processor")?;
    sched_setaffinity(this_thread, &one).context("tie the thread to a processor")?;
    set_priority().context("raise the thread's priority")
}

#[expect(unsafe_code, reason = "no library in use wraps setpriority")]
fn set_priority() -> io::Result<()> {
    // SAFETY: three numbers.
    let status = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, PRIORITY) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

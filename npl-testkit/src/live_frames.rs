// SPDX-License-Identifier: Apache-2.0
//! `BPF_PROG_TEST_RUN` with live frames: runs an XDP program in a loop and carries out its verdicts.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result};
use aya::util::KernelVersion;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::process;

/// `BPF_PROG_TEST_RUN`, of the commands of bpf(2).
const BPF_PROG_TEST_RUN: libc::c_int = 10;
/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;
/// The first kernel that runs programs over live frames.
pub const SINCE: KernelVersion = KernelVersion::new(5, 18, 0);
/// Frames at once: as many as a driver takes from its ring in one poll.
const BATCH: u32 = 64;
/// The lowest real-time priority: ahead of every build that goes on beside the bench, behind the kernel's own threads.
const PRIORITY: libc::c_int = 1;

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

/// `struct xdp_md`: what the program is told of a frame.
#[repr(C)]
#[derive(Default)]
struct Context {
    data: u32,
    data_end: u32,
    data_meta: u32,
    ingress_ifindex: u32,
    rx_queue_index: u32,
    egress_ifindex: u32,
}

/// Runs `program` over `repeat` copies of `frame`, received by a device of the calling thread's network namespace.
///
/// aya has the command, but not this flag of it.
#[expect(unsafe_code, reason = "no library in use wraps this form of the system call")]
pub fn run(program: BorrowedFd<'_>, frame: &[u8], ingress_ifindex: u32, repeat: u32) -> Result<()> {
    let length = u32::try_from(frame.len()).context("a frame is shorter than a page")?;
    let context = Context { data_end: length, ingress_ifindex, ..Context::default() };
    let context_size = u32::try_from(size_of::<Context>()).context("a context is small")?;
    let attributes = TestRun {
        prog_fd: u32::try_from(program.as_raw_fd()).context("a file descriptor is not negative")?,
        data_size_in: length,
        data_in: frame.as_ptr() as u64,
        repeat,
        ctx_size_in: context_size,
        ctx_in: (&raw const context) as u64,
        flags: LIVE_FRAMES,
        batch_size: BATCH,
        ..TestRun::default()
    };
    // SAFETY: the attributes, and the frame and the context that they point to, outlive the call, and the kernel only reads them.
    let status =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw const attributes, size_of::<TestRun>()) };
    if status == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error()).context("run the packet generator over live frames, which Linux has since 5.18")
}

/// Ties the calling thread, and with it all work that its packets cause, to the last processor that it may use.
pub fn occupy_one_processor() -> Result<()> {
    stay_on_last_processor()?;
    set_priority().context("give the thread a real-time priority")
}

/// Ties the calling thread, and those that it starts from now on, to the last processor that it may use.
pub fn stay_on_last_processor() -> Result<()> {
    let this_thread = Pid::from_raw(0);
    let allowed = sched_getaffinity(this_thread).context("ask for the thread's processors")?;
    // Device interrupts are usually handled by the first ones.
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    process::keep_on(this_thread, last.context("no processor is allowed")?)
}

#[expect(unsafe_code, reason = "no library in use wraps sched_setscheduler")]
fn set_priority() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: PRIORITY };
    // SAFETY: the parameters outlive the call, and the kernel only reads them.
    let status = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Measures the time in which the calling thread has the processor.
///
/// The time in which it was ready and something else ran is left out: the kernel gives other programs a twentieth of
/// each second, and only long samples would pay for that. What the thread's packets cause in softirqs counts, which the
/// thread's own processor time leaves out on some kernels.
#[derive(Debug)]
pub struct Stopwatch {
    start: Instant,
    waited: Duration,
}

impl Stopwatch {
    /// Starts it.
    pub fn start() -> Result<Self> {
        Ok(Self { waited: waited()?, start: Instant::now() })
    }

    /// The time since its start.
    pub fn elapsed(&self) -> Result<Duration> {
        let elapsed = self.start.elapsed();
        Ok(elapsed.saturating_sub(waited()?.saturating_sub(self.waited)))
    }
}

/// How long the calling thread was ready and did not run: the second field of its `schedstat`.
fn waited() -> Result<Duration> {
    let path = "/proc/thread-self/schedstat";
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let field = text.split_whitespace().nth(1).and_then(|field| field.parse().ok());
    field.map(Duration::from_nanos).with_context(|| format!("read the waiting time in {path}"))
}

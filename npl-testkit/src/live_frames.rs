// SPDX-License-Identifier: Apache-2.0
//! `BPF_PROG_TEST_RUN` with live frames: runs an XDP program in a loop and carries out its verdicts.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result};
use aya::util::KernelVersion;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::process;
use crate::test_run::{self, Options, XdpContext};

/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;
/// The first kernel that runs programs over live frames.
pub const SINCE: KernelVersion = KernelVersion::new(5, 18, 0);
/// Frames at once: as many as a driver takes from its ring in one poll.
const BATCH: u32 = 64;
/// The lowest real-time priority: ahead of every build that goes on beside the bench, behind the kernel's own threads.
const PRIORITY: libc::c_int = 1;

/// Runs `program` over `repeat` copies of `frame`, received by a device of the calling thread's network namespace.
pub fn run(program: BorrowedFd<'_>, frame: &[u8], ingress_ifindex: u32, repeat: u32) -> Result<()> {
    let data_end = u32::try_from(frame.len()).context("a frame is shorter than a page")?;
    let context = XdpContext { data_end, ingress_ifindex, ..XdpContext::default() };
    let options = Options { flags: LIVE_FRAMES, repeat, batch_size: BATCH, context: Some(&context) };
    let ran = test_run::run(program, frame, &options);
    ran.map(drop).context("run the packet generator over live frames, which Linux has since 5.18")
}

/// Ties the calling thread, and with it all work that its packets cause, to the last processor that it may use.
pub fn occupy_one_processor() -> Result<()> {
    stay_on_last_processor()?;
    go_ahead()
}

/// Has the calling thread, and those that it starts from now on, run ahead of everything that is nothing of the kernel's.
pub fn go_ahead() -> Result<()> {
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

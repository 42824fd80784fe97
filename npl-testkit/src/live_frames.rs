// SPDX-License-Identifier: Apache-2.0
//! `BPF_PROG_TEST_RUN` with live frames: runs an XDP program in a loop and applies its verdicts to real frames.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result};
use aya::util::KernelVersion;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::process;
use crate::test_run::{self, Options, XdpContext};

/// The flag `BPF_F_TEST_XDP_LIVE_FRAMES` of the kernel.
const LIVE_FRAMES: u32 = 1 << 1;
/// The first kernel that supports live frames.
pub const SINCE: KernelVersion = KernelVersion::new(5, 18, 0);
/// The number of frames per batch: as many as a driver processes in one NAPI poll.
const BATCH: u32 = 64;
/// The lowest real-time priority. Threads with this priority preempt builds that run at the same time, but not the
/// kernel's own real-time threads.
const PRIORITY: libc::c_int = 1;

/// Runs `program` on `repeat` copies of `frame`, as if a device of the calling thread's network namespace received the
/// copies.
pub fn run(program: BorrowedFd<'_>, frame: &[u8], ingress_ifindex: u32, repeat: u32) -> Result<()> {
    let data_end = u32::try_from(frame.len()).context("the frame is too long")?;
    let context = XdpContext { data_end, ingress_ifindex, ..XdpContext::default() };
    let options = Options { flags: LIVE_FRAMES, repeat, batch_size: BATCH, context: Some(&context) };
    let ran = test_run::run(program, frame, &options);
    ran.map(drop).context("run an XDP program with live frames, which requires Linux 5.18")
}

/// Pins the calling thread to the last allowed processor and gives the thread real-time priority. All softirq work on
/// the packets of the thread then runs on this processor, too.
pub fn occupy_one_processor() -> Result<()> {
    stay_on_last_processor()?;
    go_ahead()
}

/// Gives the calling thread, and threads that it starts later, the lowest real-time priority. These threads preempt all
/// threads without real-time priority.
pub fn go_ahead() -> Result<()> {
    set_priority().context("set a real-time priority")
}

/// Pins the calling thread, and threads that it starts later, to the last allowed processor.
pub fn stay_on_last_processor() -> Result<()> {
    let this_thread = Pid::from_raw(0);
    let allowed = sched_getaffinity(this_thread).context("read the thread's CPU affinity")?;
    // The last processor is chosen, because the first processors usually handle device interrupts.
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    process::keep_on(this_thread, last.context("the thread's CPU affinity is empty")?)
}

#[expect(unsafe_code, reason = "no library in use wraps sched_setscheduler")]
fn set_priority() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: PRIORITY };
    // SAFETY: the parameters outlive the call, and the kernel only reads them.
    let status = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Measures the elapsed time without the time for which the calling thread waited for a processor.
///
/// A thread waits for a processor while the thread is runnable and another process runs. The kernel reserves 5 % of
/// each second for processes without real-time priority; if included, this time would distort long samples, but not
/// short ones. The stopwatch includes the softirq work for the thread's packets, which some kernels exclude from the
/// thread's CPU time.
#[derive(Debug)]
pub struct Stopwatch {
    start: Instant,
    waited: Duration,
}

impl Stopwatch {
    /// Starts the stopwatch.
    pub fn start() -> Result<Self> {
        Ok(Self { waited: waited()?, start: Instant::now() })
    }

    /// The time since the start, without the time for which the thread waited for a processor.
    pub fn elapsed(&self) -> Result<Duration> {
        let elapsed = self.start.elapsed();
        Ok(elapsed.saturating_sub(waited()?.saturating_sub(self.waited)))
    }
}

/// Returns the time for which the calling thread was runnable without running: the second field of `schedstat`.
fn waited() -> Result<Duration> {
    let path = "/proc/thread-self/schedstat";
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let field = text.split_whitespace().nth(1).and_then(|field| field.parse().ok());
    field.map(Duration::from_nanos).with_context(|| format!("parse the run-queue waiting time in {path}"))
}

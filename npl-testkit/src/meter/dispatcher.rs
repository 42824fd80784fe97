// SPDX-License-Identifier: Apache-2.0
//! Keeps the generator program in the kernel's XDP dispatcher, and checks how much time the calls of
//! `BPF_PROG_TEST_RUN` take in addition to sending packets.
//!
//! The dispatcher is a generated function that calls XDP programs directly instead of through a pointer.
//! `BPF_PROG_TEST_RUN` adds its program to the dispatcher at the start of each call, and removes the program at the
//! end. The kernel waits for an RCU grace period in both steps: about 28 ms per call, in which no packet is sent. If
//! the program is also attached to a device, it is in the dispatcher already, and the kernel skips both steps.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::time::Duration;

use anyhow::{Context as _, Result};
use aya::programs::Xdp;
use aya::programs::xdp::{XdpLink, XdpMode};
use nix::sched::{CloneFlags, setns, unshare};

use crate::process;

/// The interface index of the loopback device in every network namespace.
const LOOPBACK: u32 = 1;

/// The largest part of a sample's time, in thousandths, that calls may take in addition to sending packets.
const TOLERATED_PER_MILLE: u32 = 10;

/// The loopback device of a separate network namespace. The device never receives a packet.
#[derive(Debug)]
pub(super) struct IdleDevice {
    namespace: File,
}

impl IdleDevice {
    pub(super) fn new() -> Result<Self> {
        let namespace = process::on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("create a network namespace")?;
            File::open("/proc/thread-self/ns/net").context("open the network namespace")
        });
        Ok(Self { namespace: namespace? })
    }

    /// Attaches `program` until the link is dropped.
    pub(super) fn attach(&self, program: &mut Xdp) -> Result<XdpLink> {
        let id = process::on_own_thread(|| {
            setns(&self.namespace, CloneFlags::CLONE_NEWNET).context("enter the namespace of the idle device")?;
            program.attach_to_if_index(LOOPBACK, XdpMode::Skb).context("attach the generator to an idle device")
        });
        program.take_link(id?).context("take the generator's link")
    }
}

/// The error of a sample in which the generator's calls took too much time in addition to sending packets.
#[derive(Clone, Copy, Debug)]
pub struct Overhead {
    cost: Duration,
    calls: u32,
    sample: Duration,
}

impl fmt::Display for Overhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cost, calls, sample } = *self;
        let overhead = cost * calls;
        write!(
            f,
            "the generator's own overhead is {overhead:.1?} of a sample of {sample:.1?} ({calls} calls of {cost:.1?}), \
             more than 1 %: the rate would be too low"
        )
    }
}

impl Error for Overhead {}

/// Checks that the overhead of the measurement is at most one hundredth of a sample's time. The overhead is the number
/// of calls, multiplied by the time that one call takes without sending packets.
///
/// # Errors
///
/// If the overhead is larger: the measured packet rate would be too low.
pub(super) fn check(cost: Duration, calls: u32, sample: Duration) -> Result<(), Overhead> {
    if cost * calls * 1000 <= sample * TOLERATED_PER_MILLE { Ok(()) } else { Err(Overhead { cost, calls, sample }) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::check;

    #[test]
    fn overhead_above_one_percent_of_the_sample_is_an_error() {
        let sample = Duration::from_millis(700);
        check(Duration::from_micros(14), 20, sample).unwrap();
        check(Duration::from_micros(350), 20, sample).unwrap();
        let error = check(Duration::from_micros(351), 20, sample).unwrap_err().to_string();
        assert!(error.contains("7.0ms of a sample of 700.0ms (20 calls of 351.0µs)"), "{error}");
        check(Duration::from_millis(28), 20, sample).unwrap_err();
    }
}

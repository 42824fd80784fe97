// SPDX-License-Identifier: Apache-2.0
//! `BPF_PROG_TEST_RUN` with flags that the libraries in use do not support.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::bpf;

/// The number of the command `BPF_PROG_TEST_RUN` of bpf(2).
const BPF_PROG_TEST_RUN: libc::c_int = 10;

/// The options of a test run of a program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'c> {
    /// `BPF_F_TEST_*` flags.
    pub flags: u32,
    /// The number of consecutive runs; zero means one.
    pub repeat: u32,
    /// The number of frames per batch, for runs with live frames.
    pub batch_size: u32,
    /// The context of an XDP program.
    pub context: Option<&'c XdpContext>,
}

/// `struct xdp_md`, the context of an XDP program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct XdpContext {
    /// The offset of the frame's first byte.
    pub data: u32,
    /// The offset after the frame's last byte.
    pub data_end: u32,
    /// The offset of the driver's metadata.
    pub data_meta: u32,
    /// The receiving device.
    pub ingress_ifindex: u32,
    /// The receive queue of that device.
    pub rx_queue_index: u32,
    /// The sending device.
    pub egress_ifindex: u32,
}

/// The part of `union bpf_attr` that the command uses.
#[repr(C)]
#[derive(Default)]
struct Attributes {
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

/// Runs a program on a frame and returns the verdict of the last run.
///
/// # Errors
///
/// Returns the error of the system call.
pub fn run(program: BorrowedFd<'_>, frame: &[u8], options: &Options<'_>) -> io::Result<i32> {
    let Options { flags, repeat, batch_size, context } = *options;
    let context_size = u32::try_from(context.map_or(0, size_of_val)).map_err(io::Error::other)?;
    let mut attributes = Attributes {
        program: program.as_raw_fd().cast_unsigned(),
        data_size_in: u32::try_from(frame.len()).map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        repeat,
        context_size_in: context_size,
        context_in: context.map_or(0, |context| std::ptr::from_ref(context) as u64),
        flags,
        batch_size,
        ..Attributes::default()
    };
    // All signals are blocked, because a signal that arrives during the runs would end the runs early.
    let held_before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let ran = bpf::call(BPF_PROG_TEST_RUN, &mut attributes);
    held_before.thread_set_mask()?;
    ran.map(|_| attributes.action.cast_signed())
}

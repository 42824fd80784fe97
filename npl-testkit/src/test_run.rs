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
    // The thread blocks all signals, because a signal during the runs would end the runs early.
    let held_before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let ran = bpf::call(BPF_PROG_TEST_RUN, &mut attributes);
    held_before.thread_set_mask()?;
    ran.map(|_| attributes.action.cast_signed())
}

/// `struct __sk_buff`, the context of a TC program. The kernel accepts values other than zero only
/// in some fields, and returns the values after the run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SkbContext {
    length: u32,
    packet_type: u32,
    /// The packet's mark.
    pub mark: u32,
    queue: u32,
    protocol: u32,
    vlan: [u32; 3],
    /// The packet's priority.
    pub priority: u32,
    /// The device on which the packet arrived.
    pub ingress_ifindex: u32,
    /// The device at whose hook the program runs; 0 for the loopback device.
    pub ifindex: u32,
    tc_index: u32,
    /// `skb->cb`, which programs of several hooks share.
    pub cb: [u32; 5],
    hash: u32,
    class: u32,
    data: [u32; 2],
    napi: u32,
    socket: [u32; 13],
    data_meta: u32,
    flow_keys: [u32; 2],
    time: [u32; 2],
    wire_length: u32,
    /// The number of segments of a GSO packet.
    pub gso_segs: u32,
    sk: [u32; 2],
    /// The payload bytes of each segment of a GSO packet; 0 for other packets.
    pub gso_size: u32,
    /// Later fields, which older kernels do not have. The kernel requires room for all its fields.
    later: [u32; 3],
}

const _: () = assert!(std::mem::offset_of!(SkbContext, cb) == 48, "the fields must have the kernel's offsets");
const _: () = assert!(std::mem::offset_of!(SkbContext, gso_segs) == 164, "the fields must have the kernel's offsets");
const _: () = assert!(std::mem::offset_of!(SkbContext, gso_size) == 176, "the fields must have the kernel's offsets");

/// The result of a run of a program on one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// The verdict.
    pub action: i32,
    /// The length of the frame after the run. `output` contains the frame if it is long enough.
    pub length: usize,
}

/// Runs a program once on a frame, and writes the frame after the run to `output`. With `skb`, the run starts with the
/// context `skb`, and sets `skb` to the context after the run; XDP programs run without. `flags` are `BPF_F_TEST_*`
/// flags.
///
/// # Errors
///
/// Returns the error of the system call.
pub fn run_frame(
    program: BorrowedFd<'_>,
    frame: &[u8],
    skb: Option<&mut SkbContext>,
    flags: u32,
    output: &mut [u8],
) -> io::Result<Ran> {
    let context_size = if skb.is_some() { size_of::<SkbContext>() } else { 0 };
    let context_size = u32::try_from(context_size).map_err(io::Error::other)?;
    let context = skb.map_or(0, |skb| std::ptr::from_mut(skb) as u64);
    let mut attributes = Attributes {
        program: program.as_raw_fd().cast_unsigned(),
        data_size_in: u32::try_from(frame.len()).map_err(io::Error::other)?,
        data_size_out: u32::try_from(output.len()).map_err(io::Error::other)?,
        data_in: frame.as_ptr() as u64,
        data_out: output.as_mut_ptr() as u64,
        repeat: 1,
        context_size_in: context_size,
        context_size_out: context_size,
        context_in: context,
        context_out: context,
        flags,
        ..Attributes::default()
    };
    bpf::call(BPF_PROG_TEST_RUN, &mut attributes)?;
    let length = usize::try_from(attributes.data_size_out).map_err(io::Error::other)?;
    Ok(Ran { action: attributes.action.cast_signed(), length })
}

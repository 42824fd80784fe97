// SPDX-License-Identifier: Apache-2.0
//! bpf(2) commands for which the libraries have no function.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::ffi::CString;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;

/// The leading fields of `union bpf_attr` for [`BPF_PROG_LOAD`].
#[repr(C)]
struct Program {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
}

/// Calls bpf(2). `attributes` must be the structure for the command, and its pointers must refer to memory of the sizes
/// that the structure states.
pub(crate) fn call<T>(command: libc::c_int, attributes: &mut T) -> io::Result<i32> {
    let to = std::ptr::from_mut(attributes);
    // SAFETY: callers pass the command's attribute struct with its own size; the memory that its pointers refer to has
    // the stated sizes and outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, to, size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { i32::try_from(result).map_err(io::Error::other) }
}

/// Encodes an instruction for a little-endian machine.
pub(crate) fn instruction(code: u8, destination: u8, source: u8, offset: i16, constant: i32) -> u64 {
    let [low, high] = offset.to_le_bytes();
    let [a, b, c, d] = constant.to_le_bytes();
    u64::from_le_bytes([code, source << 4 | destination, low, high, a, b, c, d])
}

/// The leading fields of `union bpf_attr` for [`BPF_OBJ_GET`].
#[repr(C)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Opens a pinned map, program or link.
pub(crate) fn open_pin(pin: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let fd = call(BPF_OBJ_GET, &mut Object { path: path.as_ptr() as u64, fd: 0, flags: 0 })?;
    // SAFETY: the kernel has just returned this descriptor, and this function is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Loads a TC classifier program.
pub(crate) fn load_classifier(instructions: &[u64]) -> io::Result<OwnedFd> {
    let mut program = Program {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        instruction_count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        instructions: instructions.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
    };
    let fd = call(BPF_PROG_LOAD, &mut program)?;
    // SAFETY: the kernel has just returned this descriptor, and this function is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

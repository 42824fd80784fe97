// SPDX-License-Identifier: Apache-2.0
//! System calls that no library in use makes.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{ffi::OsStrExt as _, net::UnixDatagram},
    },
    path::Path,
};

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_UPDATE: libc::c_int = 29;

/// What [`BPF_OBJ_GET`] reads.
#[repr(C)]
struct ObjGet {
    path: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// What [`BPF_LINK_UPDATE`] reads.
#[repr(C)]
struct LinkUpdate {
    link: u32,
    new_program: u32,
    flags: u32,
    old_program: u32,
}

/// Opens what is pinned.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let fd = bpf(BPF_OBJ_GET, &ObjGet { path: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 })?;
    // SAFETY: the kernel has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts another program in a link's place at once; aya does so for devices only.
pub(super) fn replace_program(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
    bpf(BPF_LINK_UPDATE, &LinkUpdate { link: number(link), new_program: number(program), flags: 0, old_program: 0 })
        .map(drop)
}

/// The kernel's name of this network namespace; nothing before Linux 5.14, which does not tell.
pub(super) fn netns_cookie() -> Option<u64> {
    let socket = UnixDatagram::unbound().ok()?;
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of_val(&cookie)).ok()?;
    let value = (&raw mut cookie).cast();
    // SAFETY: the socket is open, and the value and its length outlive the call.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, value, &raw mut length)
    };
    (result == 0).then_some(cookie)
}

fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    let from = std::ptr::from_ref(attributes);
    // SAFETY: the attributes are what the command reads, with their own size, and their pointers outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, from, size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { RawFd::try_from(result).map_err(io::Error::other) }
}

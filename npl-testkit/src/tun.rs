// SPDX-License-Identifier: Apache-2.0
//! Devices that claim to have a link layer of any kind, as hardware does that no test machine has.

#![expect(unsafe_code, reason = "no library in use makes such a device")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result, ensure};

use crate::netns::Netns;

/// InfiniBand, by the kernel's number (`ARPHRD_INFINIBAND`).
pub const INFINIBAND: libc::c_ulong = 32;

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETLINK: libc::Ioctl = 0x4004_54cd;
/// `IFF_TUN | IFF_NO_PI`.
const FLAGS: u16 = 0x1001;

/// What the first of the two reads: a name and flags (`struct ifreq`).
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    padding: [u8; 22],
}

/// A device; gone when dropped.
#[derive(Debug)]
pub struct Tun(#[expect(dead_code, reason = "the device is gone when it is closed")] File);

impl Tun {
    /// Makes it, down and without addresses.
    pub fn create(netns: &Netns, name: &str, link_layer: libc::c_ulong) -> Result<Self> {
        let mut request = Request { name: [0; 16], flags: FLAGS, padding: [0; 22] };
        ensure!(name.len() < request.name.len(), "{name} is too long for a device");
        for (to, from) in request.name.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        let make = || -> io::Result<File> {
            let file = File::options().read(true).write(true).open("/dev/net/tun")?;
            // SAFETY: the request is as large as the kernel reads and writes, and outlives the call.
            check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
            // SAFETY: the argument is a number.
            check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETLINK, link_layer) })?;
            Ok(file)
        };
        netns.run(make)?.map(Self).with_context(|| format!("make the device {name}"))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

// SPDX-License-Identifier: Apache-2.0
//! TUN devices with an arbitrary link-layer type, in place of hardware that test machines lack.

#![expect(unsafe_code, reason = "no library in use creates such a device")]

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result, ensure};

use crate::netns::Netns;

/// The link-layer type of InfiniBand (`ARPHRD_INFINIBAND`).
pub const INFINIBAND: libc::c_ulong = 32;
/// The link-layer type of devices without a link-layer header (`ARPHRD_NONE`).
pub const NO_HEADER: libc::c_ulong = 0xfffe;

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETLINK: libc::Ioctl = 0x4004_54cd;
/// The flags of a TUN device whose packets have no extra header: `IFF_TUN | IFF_NO_PI`.
const FLAGS: u16 = 0x1001;

/// The part of `struct ifreq` that `TUNSETIFF` reads: a name and flags.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    padding: [u8; 22],
}

/// A TUN device, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Tun(File);

impl Tun {
    /// Creates the device. The device is down and has no addresses.
    pub fn create(netns: &Netns, name: &str, link_layer: libc::c_ulong) -> Result<Self> {
        let mut request = Request { name: [0; 16], flags: FLAGS, padding: [0; 22] };
        ensure!(name.len() < request.name.len(), "{name} is too long for a device name");
        for (to, from) in request.name.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        let make = || -> io::Result<File> {
            let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
            // SAFETY: the request has the size that the kernel reads and writes, and outlives the call.
            check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
            // SAFETY: the argument is a number.
            check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETLINK, link_layer) })?;
            Ok(file)
        };
        netns.run(make)?.map(Self).with_context(|| format!("create the device {name}"))
    }

    /// Makes the kernel receive a packet from the device. `packet` starts with the IP header.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        (&self.0).write_all(packet)
    }

    /// Returns the next packet that the device has sent, beginning with the IP header; `None` if the device has sent no
    /// further packet.
    pub fn receive(&self) -> io::Result<Option<Vec<u8>>> {
        let mut packet = vec![0; usize::from(u16::MAX)];
        match (&self.0).read(&mut packet) {
            Ok(length) => {
                packet.truncate(length);
                Ok(Some(packet))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

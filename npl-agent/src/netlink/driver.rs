// SPDX-License-Identifier: Apache-2.0
//! Reads the name of a device's driver by an ethtool ioctl, because rtnetlink does not report driver names.

#![expect(unsafe_code, reason = "SIOCETHTOOL takes a pointer, and no library in use offers this request")]

use std::os::{fd::AsRawFd as _, unix::net::UnixDatagram};

/// The command `ETHTOOL_GDRVINFO` of `linux/ethtool.h`, which reads the name of a device's driver.
const GET_DRIVER_INFO: u32 = 3;
/// Length in bytes of each text field of [`DriverInfo`].
const TEXT: usize = 32;

/// `struct ethtool_drvinfo` of `linux/ethtool.h`. Only the driver name is used.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; TEXT],
    other_texts: [[u8; TEXT]; 4],
    reserved: [u8; 12],
    counts: [u32; 5],
}

/// Returns the name of a device's driver, such as `ixgbe`. `device` is the device's name in this network namespace.
/// Returns `None` if the device does not exist or its driver reports no name.
pub(super) fn driver(device: &str) -> Option<String> {
    let socket = UnixDatagram::unbound().ok()?;
    let mut info = DriverInfo {
        command: GET_DRIVER_INFO,
        driver: [0; TEXT],
        other_texts: [[0; TEXT]; 4],
        reserved: [0; 12],
        counts: [0; 5],
    };
    let mut name = [0; libc::IFNAMSIZ];
    // The last byte of the buffer stays zero and terminates the name.
    for (to, from) in name.iter_mut().take(libc::IFNAMSIZ - 1).zip(device.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let data = (&raw mut info).cast();
    let mut request = libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: data } };
    // SAFETY: the socket is open; the request contains a device name, and a pointer to memory of the size that the
    // command writes.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result != 0 {
        return None;
    }
    let name = info.driver.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::driver;

    #[test]
    fn loopback_and_absent_devices_have_no_driver_name() {
        for name in ["lo", "not-there", "a-name-that-is-longer-than-any"] {
            assert_eq!(driver(name), None, "{name}");
        }
    }
}

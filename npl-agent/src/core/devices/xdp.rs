// SPDX-License-Identifier: Apache-2.0
//! Decides on which uplinks an XDP program in the driver translates requests before TC. Every decision comes with its
//! reason.

use std::str::FromStr;

use super::{Device, DeviceKind, LinkLayer, Master, redirect::Forwarding};

/// The largest MTU, in bytes, with which drivers pass every frame to a program in one buffer: a page without headroom,
/// tailroom and link-layer header.
const LARGEST_WHOLE: u32 = 3498;

/// Drivers with which checksums stay correct if XDP translates packets. Frames from these drivers have complete
/// checksums. After an XDP program has run, these drivers do not report `CHECKSUM_COMPLETE`, the card's sum of the
/// untranslated bytes. `mlx5_core` does not report `CHECKSUM_COMPLETE` while an XDP program is attached. `gve` is not
/// in the list, because `gve` reports `CHECKSUM_COMPLETE`. `ice` is not in the list either: on E830 cards, `ice`
/// reports `CHECKSUM_COMPLETE` since Linux 6.15.
const SAFE_DRIVERS: [&str; 6] = ["mlx5_core", "i40e", "ixgbe", "bnxt_en", "ena", "virtio_net"];

/// The value of the flag `--attach`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attach {
    /// Only the TC programs translate.
    Tc,
    /// XDP translates requests on drivers that are known to keep checksums correct; the TC programs translate
    /// everywhere.
    Auto,
    /// XDP translates requests on every driver that accepts the XDP program; the TC programs translate everywhere.
    Xdp,
}

/// The error for a text that is not a value of `--attach`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a value of --attach: give tc, auto or xdp")]
pub struct AttachError(String);

impl FromStr for Attach {
    type Err = AttachError;

    fn from_str(text: &str) -> Result<Self, AttachError> {
        match text {
            "tc" => Ok(Self::Tc),
            "auto" => Ok(Self::Auto),
            "xdp" => Ok(Self::Xdp),
            other => Err(AttachError(other.to_owned())),
        }
    }
}

/// The reason why XDP translates the requests on a device, or why only TC does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpReason {
    /// The flag is `--attach tc`.
    NotRequested,
    /// The mode is `--forwarding redirect` or `offload`. XDP is unsuitable for these modes: the host's stack would
    /// forward every request that XDP has translated.
    BypassesStack,
    /// The device has no Ethernet headers, which the XDP program needs.
    NotEthernet,
    /// The device is virtual: on such a device, packets from this host's own stack may have incomplete checksums, and
    /// XDP cannot detect that a checksum is incomplete.
    IsVirtual,
    /// The device is a port of a master device, such as a bond or bridge. The master device receives the frames.
    IsEnslaved,
    /// VLAN, macvlan or ipvlan devices are on top of the device. The network card may then strip a VLAN tag from a
    /// frame, which XDP cannot detect.
    HasUpperDevices,
    /// The driver is not in [`SAFE_DRIVERS`].
    UnknownDriver,
    /// Frames of the device may consist of several buffers. The running kernel does not pass multi-buffer frames to XDP
    /// programs.
    LargeFrames,
    /// The driver is in [`SAFE_DRIVERS`].
    SafeDriver,
    /// The flag is `--attach xdp`.
    Forced,
    /// Other software has attached an XDP program to the device.
    Occupied,
    /// The device's driver rejects the XDP program.
    DriverRefuses,
    /// The kernel rejects the XDP program, or does not support XDP.
    KernelRefuses,
}

impl XdpReason {
    const ALL: [Self; 13] = [
        Self::NotRequested,
        Self::BypassesStack,
        Self::NotEthernet,
        Self::IsVirtual,
        Self::IsEnslaved,
        Self::HasUpperDevices,
        Self::UnknownDriver,
        Self::LargeFrames,
        Self::SafeDriver,
        Self::Forced,
        Self::Occupied,
        Self::DriverRefuses,
        Self::KernelRefuses,
    ];

    /// The text by which the agent stores the reason in the name of a directory on the BPF file system. Commands read
    /// the reason from this name.
    pub const fn key(self) -> &'static str {
        match self {
            Self::NotRequested => "not_requested",
            Self::BypassesStack => "bypasses_stack",
            Self::NotEthernet => "not_ethernet",
            Self::IsVirtual => "is_virtual",
            Self::IsEnslaved => "is_enslaved",
            Self::HasUpperDevices => "has_upper_devices",
            Self::UnknownDriver => "unknown_driver",
            Self::LargeFrames => "large_frames",
            Self::SafeDriver => "safe_driver",
            Self::Forced => "forced",
            Self::Occupied => "occupied",
            Self::DriverRefuses => "driver_refuses",
            Self::KernelRefuses => "kernel_refuses",
        }
    }

    /// The text of the reason in tables and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotRequested => "--attach tc",
            Self::BypassesStack => "--forwarding redirect and offload need TC",
            Self::NotEthernet => "no Ethernet headers",
            Self::IsVirtual => "virtual: checksums may be incomplete",
            Self::IsEnslaved => "enslaved to another device",
            Self::HasUpperDevices => "VLAN or similar devices are on top of the device",
            Self::UnknownDriver => "its driver is not known to be safe",
            Self::LargeFrames => "frames too large for XDP on this kernel",
            Self::SafeDriver => "its driver is known to be safe",
            Self::Forced => "--attach xdp",
            Self::Occupied => "another XDP program is attached",
            Self::DriverRefuses => "its driver rejects the XDP program",
            Self::KernelRefuses => "the kernel rejects the XDP program",
        }
    }

    /// Returns the reason whose [`Self::key`] is `key`.
    pub fn of_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.key() == key)
    }

    /// Whether, after this reason, the agent tries again to attach the XDP program to an unchanged device. If the
    /// reason is not temporary, the agent does not try again, because a driver may rebuild its queues at each attempt.
    pub const fn is_temporary(self) -> bool {
        matches!(self, Self::Occupied)
    }
}

/// Decides whether XDP translates the requests on a device, and returns the reason. `has_frags` is whether XDP programs
/// can process multi-buffer frames.
pub fn plan(device: &Device, attach: Attach, forwarding: Forwarding, has_frags: bool) -> Result<XdpReason, XdpReason> {
    if attach == Attach::Tc {
        return Err(XdpReason::NotRequested);
    }
    if forwarding != Forwarding::Stack {
        return Err(XdpReason::BypassesStack);
    }
    if device.link_layer != LinkLayer::Ethernet {
        return Err(XdpReason::NotEthernet);
    }
    if device.link.mtu > LARGEST_WHOLE && !has_frags {
        return Err(XdpReason::LargeFrames);
    }
    if attach == Attach::Xdp { Ok(XdpReason::Forced) } else { plan_by_rules(device) }
}

fn plan_by_rules(device: &Device) -> Result<XdpReason, XdpReason> {
    if device.kind != DeviceKind::Physical {
        return Err(XdpReason::IsVirtual);
    }
    if device.master == Some(Master::ReceivesFrames) {
        return Err(XdpReason::IsEnslaved);
    }
    if device.link.has_upper_devices {
        return Err(XdpReason::HasUpperDevices);
    }
    let is_safe = device.link.driver.as_deref().is_some_and(|driver| SAFE_DRIVERS.contains(&driver));
    if is_safe { Ok(XdpReason::SafeDriver) } else { Err(XdpReason::UnknownDriver) }
}

#[cfg(test)]
mod tests {
    use super::{Attach, LARGEST_WHOLE, XdpReason};
    use crate::core::devices::{Device, DeviceKind, LinkFacts, LinkLayer, Master, redirect::Forwarding};

    fn plan(device: &Device, attach: Attach, has_frags: bool) -> Result<XdpReason, XdpReason> {
        super::plan(device, attach, Forwarding::Stack, has_frags)
    }

    fn device(kind: DeviceKind, driver: Option<&str>) -> Device {
        let link = LinkFacts { driver: driver.map(str::to_owned), mtu: 1500, ..LinkFacts::default() };
        Device { has_default_route: true, link, ..Device::new(2, "eth0", kind) }
    }

    fn nic() -> Device {
        device(DeviceKind::Physical, Some("i40e"))
    }

    #[test]
    fn attach_tc_requests_no_xdp_program() {
        for device in [nic(), device(DeviceKind::Veth, None)] {
            assert_eq!(plan(&device, Attach::Tc, true), Err(XdpReason::NotRequested));
        }
    }

    #[test]
    fn auto_uses_xdp_on_drivers_that_are_known_to_be_safe() {
        for driver in ["mlx5_core", "i40e", "ixgbe", "bnxt_en", "ena", "virtio_net"] {
            let nic = device(DeviceKind::Physical, Some(driver));
            assert_eq!(plan(&nic, Attach::Auto, true), Ok(XdpReason::SafeDriver), "{driver}");
        }
        for driver in [Some("e1000e"), Some("i40"), None] {
            let nic = device(DeviceKind::Physical, driver);
            assert_eq!(plan(&nic, Attach::Auto, true), Err(XdpReason::UnknownDriver), "{driver:?}");
        }
    }

    #[test]
    fn auto_uses_tc_if_the_driver_reports_the_checksum_of_the_untranslated_packet() {
        for driver in ["gve", "ice"] {
            let nic = device(DeviceKind::Physical, Some(driver));
            assert_eq!(plan(&nic, Attach::Auto, true), Err(XdpReason::UnknownDriver), "{driver}");
        }
    }

    #[test]
    fn auto_uses_tc_if_xdp_lacks_information_about_frames() {
        let with = |change: fn(&mut Device)| {
            let mut device = nic();
            change(&mut device);
            plan(&device, Attach::Auto, true)
        };
        let virtual_kinds = [DeviceKind::Veth, DeviceKind::Bridge, DeviceKind::Tunnel, DeviceKind::Other];
        for kind in virtual_kinds {
            assert_eq!(plan(&device(kind, Some("i40e")), Attach::Auto, true), Err(XdpReason::IsVirtual), "{kind:?}");
        }
        assert_eq!(with(|device| device.master = Some(Master::ReceivesFrames)), Err(XdpReason::IsEnslaved));
        assert_eq!(with(|device| device.link.has_upper_devices = true), Err(XdpReason::HasUpperDevices));
        assert_eq!(with(|device| device.link_layer = LinkLayer::None), Err(XdpReason::NotEthernet));
    }

    /// If XDP translated requests in these modes, the host's stack would forward the requests of a flow, but the
    /// replies would bypass the stack. So XDP must not be used.
    #[test]
    fn xdp_is_not_used_where_packets_bypass_the_stack() {
        for forwarding in [Forwarding::Redirect, Forwarding::Offload] {
            for attach in [Attach::Auto, Attach::Xdp] {
                assert_eq!(super::plan(&nic(), attach, forwarding, true), Err(XdpReason::BypassesStack));
            }
            assert_eq!(super::plan(&nic(), Attach::Tc, forwarding, true), Err(XdpReason::NotRequested));
        }
    }

    #[test]
    fn large_frames_need_xdp_frags() {
        for attach in [Attach::Auto, Attach::Xdp] {
            let with_mtu = |mtu, has_frags| {
                let nic = nic();
                let link = LinkFacts { mtu, ..nic.link.clone() };
                plan(&Device { link, ..nic }, attach, has_frags).is_ok()
            };
            assert_eq!([with_mtu(LARGEST_WHOLE, false), with_mtu(9000, true)], [true, true]);
            assert!(!with_mtu(LARGEST_WHOLE + 1, false));
        }
    }

    #[test]
    fn xdp_is_forced_on_every_ethernet_device() {
        for kind in [DeviceKind::Veth, DeviceKind::Physical, DeviceKind::Other] {
            assert_eq!(plan(&device(kind, None), Attach::Xdp, true), Ok(XdpReason::Forced), "{kind:?}");
        }
        let tunnel = Device { link_layer: LinkLayer::None, ..device(DeviceKind::Tunnel, None) };
        assert_eq!(plan(&tunnel, Attach::Xdp, true), Err(XdpReason::NotEthernet));
    }

    #[test]
    fn each_reason_has_a_key_that_is_a_valid_file_name() {
        for reason in XdpReason::ALL {
            assert_eq!(XdpReason::of_key(reason.key()), Some(reason));
            assert!(reason.key().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{reason:?}");
        }
        assert_eq!(XdpReason::of_key("of_another_version"), None);
    }

    #[test]
    fn attach_has_three_values() {
        assert_eq!(
            ["tc", "auto", "xdp"].map(|text| text.parse().ok()),
            [Attach::Tc, Attach::Auto, Attach::Xdp].map(Some)
        );
        assert!("generic".parse::<Attach>().is_err());
    }
}

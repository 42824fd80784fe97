// SPDX-License-Identifier: Apache-2.0
//! Checks whether the Node meets the requirements of the datapath, before the agent changes any kernel state. The error
//! for each unmet requirement names a remedy.

use std::path::Path;

use aya::util::KernelVersion;
use caps::{CapSet, Capability};
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use npl_common::names::PIN_ROOT;

use super::{error::DatapathError, pins::pin_error};
use crate::core::{
    devices::planner::ConntrackSettings,
    doctor::{Kernel, Rights},
    kernel_floor::KernelFloor,
};

/// The first kernel with TCX, that is, with BPF links on TC hooks.
const TCX_SINCE: (u8, u8) = (6, 6);
/// The first kernel with which NPL translates fraglists of IPv6 UDP datagrams. GRO joins received datagrams into a
/// fraglist, NPL translates the first datagram, and the kernel copies the translation to the others. Earlier kernels
/// send the others untranslated.
const TRANSLATES_FRAGLISTS_SINCE: (u8, u8) = (6, 15);
/// The first patch release of Linux 6.12 with which NPL translates fraglists of IPv6 UDP datagrams.
const TRANSLATES_FRAGLISTS_SINCE_6_12: u16 = 28;
/// The first kernel with XDP programs for multi-buffer frames.
const XDP_FRAGS_SINCE: (u8, u8) = (5, 18);

/// The files with the settings of kernel conntrack in the network namespace of this process. The files do not exist if
/// the module `nf_conntrack` is not loaded.
const TCP_BE_LIBERAL: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";
const TCP_TIMEOUT_UNACKNOWLEDGED: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_unacknowledged";
const TCP_TIMEOUT_ESTABLISHED: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";

/// Checks the kernel version, the capabilities and the BPF file system, in this order.
///
/// # Errors
///
/// The error for the first requirement that the Node does not meet.
pub fn check(bpffs: &Path) -> Result<(), DatapathError> {
    kernel()?;
    capabilities()?;
    check_bpffs(bpffs)
}

/// Whether this kernel version supports TCX.
pub fn has_tcx() -> bool {
    is_at_least(TCX_SINCE)
}

/// Whether this kernel version supports XDP for multi-buffer frames. A device with a large MTU needs this support.
pub fn has_xdp_frags() -> bool {
    is_at_least(XDP_FRAGS_SINCE)
}

/// The settings of kernel conntrack that may interrupt connections in offload mode. If the module `nf_conntrack` is not
/// loaded, both fields are false, because kernel conntrack then interrupts no connection.
pub fn conntrack_settings() -> ConntrackSettings {
    let read = |path| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let timeout = |path| read(path)?.parse::<u32>().ok();
    let timeouts = timeout(TCP_TIMEOUT_UNACKNOWLEDGED).zip(timeout(TCP_TIMEOUT_ESTABLISHED));
    ConntrackSettings {
        is_strict: read(TCP_BE_LIBERAL).is_some_and(|value| value == "0"),
        forgets_idle: timeouts.is_some_and(|(unacknowledged, established)| unacknowledged < established),
    }
}

/// Whether the running kernel has at least this version. If the kernel's version cannot be read, returns true: if the
/// kernel is too old, the agent fails later, when it loads the programs.
fn is_at_least((major, minor): (u8, u8)) -> bool {
    KernelVersion::current().map_or(true, |found| found >= KernelVersion::new(major, minor, 0))
}

/// Whether NPL translates fraglists of IPv6 UDP datagrams with an unmodified kernel of this version. The function
/// returns false for an older kernel, although a distribution may have backported the fix to that kernel.
fn translates_fraglists(version: KernelVersion) -> bool {
    let (major, minor) = TRANSLATES_FRAGLISTS_SINCE;
    let is_of_6_12 = version < KernelVersion::new(6, 13, 0);
    version >= KernelVersion::new(major, minor, 0)
        || is_of_6_12 && version >= KernelVersion::new(6, 12, TRANSLATES_FRAGLISTS_SINCE_6_12)
}

/// Version and features of the running kernel.
pub fn kernel_facts() -> Kernel {
    let release = nix::sys::utsname::uname().map_or_else(
        |_unreadable| "of unknown version".to_owned(),
        |name| name.release().to_string_lossy().into_owned(),
    );
    let needed = KernelFloor::of(std::env::consts::ARCH);
    Kernel {
        release,
        needed,
        is_new_enough: is_at_least(needed.version),
        has_tcx: has_tcx(),
        translates_fraglists: KernelVersion::current().is_ok_and(translates_fraglists),
    }
}

fn kernel() -> Result<(), DatapathError> {
    let Kernel { release: found, needed, is_new_enough, .. } = kernel_facts();
    if is_new_enough { Ok(()) } else { Err(DatapathError::KernelTooOld { found, needed }) }
}

/// The capabilities in the effective set of this process; `None` if the set cannot be read.
pub fn rights() -> Option<Rights> {
    let held = caps::read(None, CapSet::Effective).ok()?;
    // Wherever the kernel checks for CAP_BPF or CAP_PERFMON, it also accepts CAP_SYS_ADMIN.
    let has = |capability| held.contains(&capability) || held.contains(&Capability::CAP_SYS_ADMIN);
    Some(Rights {
        bpf: has(Capability::CAP_BPF),
        net_admin: held.contains(&Capability::CAP_NET_ADMIN),
        perfmon: has(Capability::CAP_PERFMON),
    })
}

fn capabilities() -> Result<(), DatapathError> {
    let Rights { bpf, net_admin, perfmon: _ } = rights().unwrap_or_default();
    if !bpf {
        return Err(DatapathError::MissingCapability("CAP_BPF"));
    }
    if !net_admin {
        return Err(DatapathError::MissingCapability("CAP_NET_ADMIN"));
    }
    Ok(())
}

/// Checks that a BPF file system is mounted at the path, or at NPL's own directory below the path. In the agent's
/// container, only NPL's own directory of the Node's BPF file system is mounted.
///
/// # Errors
///
/// If neither directory is on a BPF file system.
pub fn check_bpffs(bpffs: &Path) -> Result<(), DatapathError> {
    let is_bpffs = |path: &Path| statfs(path).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC);
    if is_bpffs(bpffs) || is_bpffs(&bpffs.join(PIN_ROOT)) {
        return Ok(());
    }
    Err(DatapathError::NoBpffs(bpffs.to_owned()))
}

/// Mounts a BPF file system at the path if none is mounted there.
///
/// # Errors
///
/// If the path does not exist, or the kernel denies the mount.
pub fn mount_bpffs(path: &Path) -> Result<(), DatapathError> {
    if check_bpffs(path).is_ok() {
        return Ok(());
    }
    mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), None::<&str>)
        .map_err(|errno| pin_error("mount a BPF file system at", path, errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_translate_fraglists_are_told_by_their_version() {
        for version in [(6, 12, 28), (6, 12, 117), (6, 15, 0), (7, 2, 13)] {
            assert!(translates_fraglists(KernelVersion::new(version.0, version.1, version.2)), "{version:?}");
        }
        for version in [(5, 10, 240), (6, 1, 1), (6, 12, 27), (6, 13, 0), (6, 14, 0)] {
            assert!(!translates_fraglists(KernelVersion::new(version.0, version.1, version.2)), "{version:?}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Errors between the agent and the kernel, one sentence each.

use std::{io, path::PathBuf};

use aya::{
    EbpfError,
    maps::MapError,
    programs::{ProgramError, links::LinkError, tc::TcError},
};

use crate::core::{devices::HAS_INGRESS_QUEUE, model::Frontend};

/// A failed operation on the datapath.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The build has no kernel object.
    #[error("this npl-agent was built without its kernel programs: build it with `cargo xtask build`")]
    NoObject,
    /// The kernel is too old.
    #[error("kernel {found} is too old: npl-agent needs {needed} or newer")]
    KernelTooOld {
        /// The running kernel's release.
        found: String,
        /// The oldest supported release.
        needed: &'static str,
    },
    /// A capability is missing.
    #[error(
        "missing capability {0}: run npl-agent as uid 0 with CAP_BPF and CAP_NET_ADMIN (deploy/npl.yaml grants both)"
    )]
    MissingCapability(&'static str),
    /// The verifier needs `CAP_PERFMON`.
    #[error(
        "this kernel rejects the programs of an agent without CAP_PERFMON, as Linux before 6.6 does: add PERFMON \
         to its capabilities in deploy/npl.yaml, or run a newer kernel"
    )]
    NeedsPerfmon,
    /// No BPF file system is mounted at the path.
    #[error(
        "{path} is not a BPF file system: mount one there (`mount -t bpf bpf {path}`) or name another with --bpffs",
        path = .0.display()
    )]
    NoBpffs(PathBuf),
    /// Some maps are pinned and others not.
    #[error(
        "{path} is missing, but other maps exist: an agent is starting, a cleanup is running, or this npl-agent is \
         of another version than the running agent; try again",
        path = .0.display()
    )]
    Incomplete(PathBuf),
    /// Another program has removed or replaced a pin.
    #[error(
        "{path} no longer belongs to this agent: another program has removed or replaced the pin; restart the \
         agent to restore it",
        path = .0.display()
    )]
    PinLost(PathBuf),
    /// A file operation on the BPF file system failed.
    #[error("{operation} {path}", path = .path.display())]
    Pin {
        /// The verb.
        operation: &'static str,
        /// The pin.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The object did not load.
    #[error("load the kernel programs")]
    Load(#[source] EbpfError),
    /// The object could not be parsed.
    #[error("read the embedded kernel object")]
    Parse(#[source] aya_obj::ParseError),
    /// One program did not load.
    #[error("load program {name}")]
    LoadProgram {
        /// Its name.
        name: &'static str,
        /// The verifier's or the kernel's answer.
        #[source]
        source: Box<ProgramError>,
    },
    /// The object lacks a program or map that the agent knows.
    #[error("the kernel object has no {0}: build agent and object together with `cargo xtask build`")]
    Missing(&'static str),
    /// A pinned map could not be opened.
    #[error("open map {name}")]
    OpenMap {
        /// Its name.
        name: &'static str,
        /// The kernel's answer.
        #[source]
        source: MapError,
    },
    /// A map could not be read or written.
    #[error("{operation} map {name}")]
    Map {
        /// The verb.
        operation: &'static str,
        /// The map.
        name: &'static str,
        /// The kernel's answer.
        #[source]
        source: MapError,
    },
    /// The mapping's addresses are of another family than its frontend.
    #[error("mapping {0} has an address of another family")]
    WrongFamily(Frontend),
    /// A program could not be attached.
    #[error("attach {program} to {interface}")]
    Attach {
        /// The program.
        program: &'static str,
        /// The device's name.
        interface: String,
        /// The kernel's answer.
        #[source]
        source: Box<ProgramError>,
    },
    /// An ingress qdisc takes the place of clsact, and has no egress hook.
    #[error(
        "{interface} {HAS_INGRESS_QUEUE} (`tc qdisc del dev {interface} ingress`, `tc qdisc add dev {interface} clsact`)"
    )]
    IngressQueue {
        /// The device's name.
        interface: String,
    },
    /// No cgroup v2 hierarchy.
    #[error(
        "no cgroup v2 hierarchy is mounted here: mount one (`mount -t cgroup2 cgroup2 DIR`) and name it with --cgroup"
    )]
    NoCgroup2,
    /// The path is not in a cgroup v2 hierarchy.
    #[error(
        "{path} is not in a cgroup v2 hierarchy: name the folder where one is mounted with --cgroup, or none",
        path = .0.display()
    )]
    NotCgroup2(PathBuf),
    /// The cgroup could not be opened.
    #[error("open cgroup {path}", path = .path.display())]
    OpenCgroup {
        /// Its directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A program could not be attached to a cgroup.
    #[error("attach {program} to cgroup {cgroup}", cgroup = .cgroup.display())]
    AttachCgroup {
        /// The program.
        program: &'static str,
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Box<ProgramError>,
    },
    /// A link could not be opened or taken.
    #[error("{operation} the link of {program} on {interface}")]
    Link {
        /// The verb.
        operation: &'static str,
        /// The program.
        program: &'static str,
        /// The device's name.
        interface: String,
        /// The kernel's answer.
        #[source]
        source: LinkError,
    },
}

impl DatapathError {
    /// Replaces a refusal of the verifier that `CAP_PERFMON` would likely prevent.
    pub(crate) fn or_missing_perfmon(self) -> Self {
        let has_perfmon = caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_PERFMON);
        if self.is_verifier_refusal() && matches!(has_perfmon, Ok(false)) { Self::NeedsPerfmon } else { self }
    }

    /// Whether the verifier rejected the program, rather than the kernel lacking a feature or a permission.
    pub(crate) fn is_verifier_refusal(&self) -> bool {
        let Self::LoadProgram { source, .. } = self else { return false };
        let ProgramError::LoadError { io_error, .. } = &**source else { return false };
        io_error.raw_os_error() == Some(libc::EACCES)
    }

    /// The effect on traffic, for the log.
    pub(crate) fn effect(&self) -> &'static str {
        if self.is_of_device() {
            "a device does not carry the programs: clients that reach the Node by it are not served, all others are"
        } else if self.is_full() {
            "a map is full: packets of the Pods or uplinks that do not fit take the host's stack"
        } else {
            "the datapath does not yet match the Node's devices; the agent tries again"
        }
    }

    const fn is_of_device(&self) -> bool {
        matches!(
            self,
            Self::Attach { .. }
                | Self::IngressQueue { .. }
                | Self::Link { .. }
                | Self::Load(_)
                | Self::LoadProgram { .. }
                | Self::NeedsPerfmon
        )
    }

    /// Whether the device was removed while programs were attached to it.
    pub(crate) fn is_of_gone_device(&self) -> bool {
        let Self::Attach { source, .. } = self else { return false };
        let code = if let ProgramError::SyscallError(error) = &**source {
            error.io_error.raw_os_error()
        } else if let ProgramError::TcError(TcError::IoError(error)) = &**source {
            error.raw_os_error()
        } else if let ProgramError::TcError(TcError::NetlinkError(error)) = &**source {
            error.raw_os_error()
        } else {
            None
        };
        matches!(code, Some(libc::ENODEV | libc::ENXIO))
    }

    /// Whether a map is full.
    pub(crate) fn is_full(&self) -> bool {
        let Self::Map { source: MapError::SyscallError(error), .. } = self else { return false };
        // Hash maps return the first, tries the second.
        matches!(error.io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC))
    }

    /// Converts the error of a map operation.
    pub(crate) const fn map(operation: &'static str, name: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { operation, name, source }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::{maps::MapError, programs::ProgramError, sys::SyscallError};

    use super::DatapathError;

    fn answer(code: i32) -> SyscallError {
        SyscallError { call: "bpf", io_error: io::Error::from_raw_os_error(code) }
    }

    #[test]
    fn a_refusal_is_distinguished_from_a_full_map_and_a_removed_device() {
        let attach = |code| {
            let source = Box::new(ProgramError::SyscallError(answer(code)));
            DatapathError::Attach { program: "npl_rd_pods", interface: "veth1".to_owned(), source }
        };
        assert!(attach(libc::ENODEV).is_of_gone_device() && !attach(libc::EPERM).is_of_gone_device());
        let map = |code| DatapathError::map("write", "npl_nexthop_v4")(MapError::SyscallError(answer(code)));
        for (error, effect) in [
            (attach(libc::EPERM), "a device does not carry the programs"),
            (map(libc::E2BIG), "a map is full"),
            (map(libc::ENOMEM), "the datapath does not yet match"),
        ] {
            assert!(error.effect().starts_with(effect), "{error}");
        }
    }
}

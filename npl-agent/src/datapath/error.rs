// SPDX-License-Identifier: Apache-2.0
//! The errors of operations on the datapath. If the operator can remedy an error, the text of the error names the
//! remedy.

use std::{error::Error, io, path::PathBuf};

use aya::{
    EbpfError,
    maps::MapError,
    programs::{ProgramError, links::LinkError, tc::TcError},
};

use crate::core::{devices::HAS_INGRESS_QUEUE, kernel_floor::KernelFloor, model::Frontend};

/// A failed operation on the datapath.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The agent was built without the object file of the kernel programs.
    #[error("this npl-agent was built without its kernel programs: build npl-agent with `cargo xtask build`")]
    NoObject,
    /// The kernel is older than the oldest supported release.
    #[error("kernel {found} is too old: npl-agent needs {needed}")]
    KernelTooOld {
        /// The release of the running kernel.
        found: String,
        /// The oldest supported release.
        needed: KernelFloor,
    },
    /// The process lacks a capability without which no agent can run.
    #[error(
        "missing capability {0}: run npl-agent as uid 0 with CAP_BPF and CAP_NET_ADMIN (deploy/npl.yaml grants both)"
    )]
    MissingCapability(&'static str),
    /// The process lacks `CAP_PERFMON`, and the verifier rejects even the programs that read packets by a helper
    /// function.
    #[error(
        "the kernel's verifier rejects the programs without CAP_PERFMON: keep the init container of \
         deploy/npl.yaml, add PERFMON to the agent's capabilities, or run Linux 6.6 or newer"
    )]
    NeedsPerfmon,
    /// The kernel denied an operation to this process, on which SELinux enforces its policy.
    #[error(
        "the kernel denied an operation on BPF to this process, on which SELinux enforces the type {kind}: run the \
         container with `seLinuxOptions: {{type: spc_t}}`, as deploy/npl.yaml does; if the container has that type \
         already, update the Node's SELinux policy (container-selinux); `ausearch --message avc --comm npl-agent` \
         lists the denials"
    )]
    DeniedBySelinux {
        /// The SELinux type of this process.
        kind: String,
        /// The error of the operation that the kernel denied.
        #[source]
        source: Box<Self>,
    },
    /// The programs of the trace build are too large for the verifier of a process without `CAP_PERFMON`.
    #[cfg(feature = "trace")]
    #[error(
        "a trace build can load its programs only with CAP_PERFMON: run `npl-agent load` of the same build in an init \
         container with this capability, as in deploy/npl.yaml"
    )]
    TraceNeedsPerfmon,
    /// The number of possible CPUs cannot be read.
    #[error("read the number of possible CPUs from {path}")]
    PossibleCpus {
        /// The file from which the number is read.
        path: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The maps do not fit into the container's memory.
    #[error(
        "the maps for {flows} flows of each IP family need {needed} MiB on this machine, but the container's memory limit is \
         {limit} MiB: raise resources.limits.memory to at least {sufficient}Mi, or lower --max-flows"
    )]
    TooLargeForContainer {
        /// The maximum number of flows of each IP family.
        flows: u32,
        /// The memory that the maps need, in MiB.
        needed: u64,
        /// The memory limit of the container, in MiB.
        limit: u64,
        /// A memory limit with which both the maps and the agent fit into the container, in MiB.
        sufficient: u64,
    },
    /// The path of `--bpffs` is not on a BPF file system.
    #[error(
        "{path} is not a BPF file system: mount one there (`mount -t bpf bpf {path}`), or give --bpffs the path of \
         another",
        path = .0.display()
    )]
    NoBpffs(PathBuf),
    /// Some of the maps are pinned, but at least one map is missing.
    #[error(
        "{path} is missing, but other maps are pinned: an agent is starting, a cleanup is running, or this npl-agent \
         has a different version than the agent of this Node; run the command again, with the agent's version",
        path = .0.display()
    )]
    Incomplete(PathBuf),
    /// Another `npl-agent trace` is already tracing packets on this Node.
    #[error("another `npl-agent trace` runs on this Node: end that command, or wait until it ends")]
    AlreadyTracing,
    /// The programs are of a trace build: they log each verdict, and write no records for `npl-agent trace`.
    #[error(
        "the programs on this Node are of a trace build, which writes each verdict to the agent's log: read that log, or \
         install another build"
    )]
    TraceBuildLogs,
    /// The pin of a map that the running agent uses was removed or replaced.
    #[error(
        "{path} was removed or replaced while this agent was running: the agent exits, and its restart recreates the \
         pins; find the software that changes this directory",
        path = .0.display()
    )]
    PinLost(PathBuf),
    /// An operation on a file or directory of the BPF file system failed.
    #[error("{operation} {path}", path = .path.display())]
    Pin {
        /// The operation, as a verb such as `remove`.
        operation: &'static str,
        /// The path of the file or directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The maps of the object file could not be created or opened.
    #[error("load the kernel programs")]
    Load(#[source] EbpfError),
    /// The object file of the kernel programs could not be parsed.
    #[error("parse the embedded kernel object")]
    Parse(#[source] aya_obj::ParseError),
    /// The kernel rejected a program when the agent loaded it.
    #[error("load program {name}")]
    LoadProgram {
        /// The program's name.
        name: &'static str,
        /// The kernel's error with the verifier's log.
        #[source]
        source: Box<ProgramError>,
    },
    /// The object file lacks a program or map that the agent needs.
    #[error("the kernel object has no {0}: build agent and object together with `cargo xtask build`")]
    Missing(&'static str),
    /// A pinned map could not be opened.
    #[error("open map {name}")]
    OpenMap {
        /// The map's name.
        name: &'static str,
        /// The kernel's error.
        #[source]
        source: MapError,
    },
    /// A map could not be read or written.
    #[error("{operation} map {name}")]
    Map {
        /// The operation as a verb: `read` or `write`.
        operation: &'static str,
        /// The map's name.
        name: &'static str,
        /// The kernel's error.
        #[source]
        source: MapError,
    },
    /// The Pod address or a source range of the mapping is not of the mapping's IP family.
    #[error("mapping {0} has an address of the other IP family")]
    WrongFamily(Frontend),
    /// A program could not be attached.
    #[error("attach {program} to {interface}")]
    Attach {
        /// The program's name.
        program: &'static str,
        /// The device's name.
        interface: String,
        /// The kernel's error.
        #[source]
        source: Box<ProgramError>,
    },
    /// An `ingress` qdisc, which has no egress hook, occupies the handle that the clsact qdisc needs.
    #[error(
        "{interface} {HAS_INGRESS_QUEUE} (`tc qdisc del dev {interface} ingress`, `tc qdisc add dev {interface} \
         clsact`)"
    )]
    IngressQueue {
        /// The device's name.
        interface: String,
    },
    /// No cgroup v2 hierarchy is mounted in the mount namespace of the agent.
    #[error(
        "no cgroup v2 hierarchy is mounted for this process: mount one (`mount -t cgroup2 cgroup2 DIR`) and give \
         --cgroup DIR, or give --cgroup none"
    )]
    NoCgroup2,
    /// The flag is `--local-clients host`, but the kernel has no network namespace cookies.
    #[error(
        "--local-clients host requires Linux 5.14 or newer: an older kernel does not report the cookie of a network namespace; \
         give --local-clients all, and give --cgroup the directory of the cgroup of the Node's own services, for \
         example /sys/fs/cgroup/system.slice"
    )]
    NoNetnsCookie,
    /// The directory of `--cgroup` is not in a cgroup v2 hierarchy.
    #[error(
        "{path} is not in a cgroup v2 hierarchy: give --cgroup a directory of such a hierarchy, or give \
         --cgroup none",
        path = .0.display()
    )]
    NotCgroup2(PathBuf),
    /// The cgroup could not be opened.
    #[error("open cgroup {path}", path = .path.display())]
    OpenCgroup {
        /// The directory of the cgroup.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A program could not be attached to a cgroup.
    #[error("attach {program} to cgroup {cgroup}", cgroup = .cgroup.display())]
    AttachCgroup {
        /// The program's name.
        program: &'static str,
        /// The directory of the cgroup.
        cgroup: PathBuf,
        /// The kernel's error.
        #[source]
        source: Box<ProgramError>,
    },
    /// An operation on a BPF link failed.
    #[error("{operation} the link of {program} on {interface}")]
    Link {
        /// The operation on the link as a verb, such as `open`.
        operation: &'static str,
        /// The program's name.
        program: &'static str,
        /// The device's name.
        interface: String,
        /// The kernel's error.
        #[source]
        source: LinkError,
    },
}

impl DatapathError {
    /// Converts a rejection by the verifier to [`Self::NeedsPerfmon`] if the agent lacks `CAP_PERFMON`.
    pub(crate) fn or_missing_perfmon(self) -> Self {
        let has_perfmon = caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_PERFMON);
        if self.is_verifier_refusal() && matches!(has_perfmon, Ok(false)) { Self::NeedsPerfmon } else { self }
    }

    /// Converts EPERM and EACCES to [`Self::DeniedBySelinux`] if SELinux confines this process to a type. The caller
    /// must have checked that the process has the required capabilities, because a missing capability causes the same
    /// errors.
    pub(crate) fn or_denied_by_selinux(self, enforced_type: impl FnOnce() -> Option<String>) -> Self {
        match self.is_denial().then(enforced_type).flatten() {
            Some(kind) => Self::DeniedBySelinux { kind, source: Box::new(self) },
            None => self,
        }
    }

    /// Whether the kernel denied the operation with EPERM or EACCES, as a security module does. Rejections by the
    /// verifier are excluded, because the verifier also returns EACCES.
    fn is_denial(&self) -> bool {
        if self.is_verifier_refusal() {
            return false;
        }
        let mut cause: Option<&(dyn Error + 'static)> = Some(self);
        while let Some(error) = cause {
            let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
            if matches!(code, Some(libc::EPERM | libc::EACCES)) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// Whether the verifier rejected a program as unsafe. A program may also fail to load because the kernel lacks a
    /// feature, or because the process lacks a permission.
    pub(crate) fn is_verifier_refusal(&self) -> bool {
        let Self::LoadProgram { source, .. } = self else { return false };
        let ProgramError::LoadError { io_error, .. } = &**source else { return false };
        io_error.raw_os_error() == Some(libc::EACCES)
    }

    /// The log message for an error that occurred while a device plan was applied. The message states the error's
    /// effect on traffic.
    pub(crate) fn effect(&self) -> &'static str {
        if self.is_of_device() {
            "programs cannot be attached to a device: clients that reach the Node through this device are not served, \
             but all other clients are; the agent tries again"
        } else if self.is_full() {
            "the map that `err` names is full: some packets are not redirected, or NPL's filter is not moved ahead of other \
             filters; docs/reference/maps.md states the effect for each map"
        } else {
            "the datapath does not match the Node's devices yet; the agent tries again"
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

    /// Whether attaching failed because the device no longer exists.
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

    /// Whether a map has no room for another element.
    pub(crate) fn is_full(&self) -> bool {
        let Self::Map { source: MapError::SyscallError(error), .. } = self else { return false };
        // For a full hash map, the kernel returns E2BIG; for a full LPM trie, it returns ENOSPC.
        matches!(error.io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC))
    }

    /// Returns a function that converts the error of the operation `read` or `write` on the map `name`.
    pub(crate) const fn map(operation: &'static str, name: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { operation, name, source }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, path::Path};

    use aya::{EbpfError, maps::MapError, programs::ProgramError, sys::SyscallError};

    use super::DatapathError;
    use crate::datapath::pins::pin_error;

    fn syscall_error(code: i32) -> SyscallError {
        SyscallError { call: "bpf", io_error: io::Error::from_raw_os_error(code) }
    }

    #[test]
    fn a_denied_operation_names_selinux_where_it_enforces_a_type() {
        let enforced = || Some("container_t".to_owned());
        let denied = |code| {
            let io_error = io::Error::from_raw_os_error(code);
            DatapathError::Load(EbpfError::MapError(MapError::CreateError { name: "npl_flow_v4".to_owned(), io_error }))
        };
        let pin = |code| pin_error("create", Path::new("/bpf/npl/v2"), io::Error::from_raw_os_error(code));
        for error in [denied(libc::EPERM), denied(libc::EACCES), pin(libc::EACCES)] {
            let text = error.or_denied_by_selinux(enforced).to_string();
            assert!(text.contains("SELinux enforces the type container_t") && text.contains("spc_t"), "{text}");
        }
        for error in [denied(libc::ENOMEM), DatapathError::MissingCapability("CAP_BPF"), pin(libc::EROFS)] {
            assert!(!error.or_denied_by_selinux(enforced).to_string().contains("SELinux"));
        }
        assert!(!denied(libc::EPERM).or_denied_by_selinux(|| None).to_string().contains("SELinux"));
    }

    #[test]
    fn a_refused_attachment_a_full_map_and_a_removed_device_are_distinguished() {
        let attach = |code| {
            let source = Box::new(ProgramError::SyscallError(syscall_error(code)));
            DatapathError::Attach { program: "npl_rd_pods", interface: "veth1".to_owned(), source }
        };
        assert!(attach(libc::ENODEV).is_of_gone_device() && !attach(libc::EPERM).is_of_gone_device());
        let map = |code| DatapathError::map("write", "npl_pod_dev_v4")(MapError::SyscallError(syscall_error(code)));
        for (error, effect) in [
            (attach(libc::EPERM), "programs cannot be attached to a device"),
            (map(libc::E2BIG), "the map that `err` names is full"),
            (map(libc::ENOMEM), "the datapath does not match the Node's devices"),
        ] {
            assert!(error.effect().starts_with(effect), "{error}");
        }
    }
}

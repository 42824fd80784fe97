// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask setup`: installs what is missing, each need separately, so that every command asks for its own.

mod apt;
mod bpf_linker;
mod kernels;
mod kubernetes;

use std::time::Instant;

use anyhow::{Result, bail};

pub(crate) use apt::{is_available as can_install, is_root};
pub(crate) use bpf_linker::{LLVM as BPF_LINKER_LLVM, obtain as bpf_linker};

use crate::{ebpf, process};
use apt::Program;
pub(crate) use kernels::{BRIEF_KERNELS, DEFAULT_KERNELS, Image as KernelImage, Kernel, KernelName, parse_kernels};
pub(crate) use kubernetes::{Background as KubernetesBuild, Extent, Kubernetes};

/// Something that a command cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Rust compiler with the source of its core library, for the kernel programs.
    EbpfCompiler,
    /// What builds and looks at test networks.
    TestNetwork,
    /// What runs containers on the Nodes of a real cluster.
    Containers,
    /// What boots another kernel on this one.
    Emulation,
}

impl Need {
    fn why(self) -> &'static str {
        match self {
            Self::EbpfCompiler => "compiling the kernel programs",
            Self::TestNetwork => "building test networks and looking into them",
            Self::Containers => "running containers on the Nodes of a real cluster",
            Self::Emulation => "booting other kernels by emulation",
        }
    }

    fn missing_packages(self) -> Vec<&'static str> {
        match self {
            Self::EbpfCompiler => vec!["rustc-web", "rust-web-src", "rust-web-clippy"],
            Self::TestNetwork => apt::missing(&TEST_NETWORK),
            Self::Containers => apt::missing(&CONTAINERS),
            Self::Emulation => apt::missing(&EMULATION),
        }
    }
}

const TEST_NETWORK: [Program; 8] = [
    Program { name: "ip", package: "iproute2" },
    Program { name: "tc", package: "iproute2" },
    Program { name: "iptables", package: "iptables" },
    Program { name: "nft", package: "nftables" },
    Program { name: "conntrack", package: "conntrack" },
    Program { name: "ethtool", package: "ethtool" },
    Program { name: "bpftool", package: "bpftool" },
    Program { name: "openssl", package: "openssl" },
];

/// Plug-ins are not on the search path; one stands for all.
const CONTAINERS: [Program; 4] = [
    Program { name: "containerd", package: "containerd" },
    Program { name: "ctr", package: "containerd" },
    Program { name: "runc", package: "runc" },
    Program { name: "/usr/lib/cni/bridge", package: "containernetworking-plugins" },
];

const EMULATION: [Program; 4] = [
    Program { name: "qemu-system-x86_64", package: "qemu-system-x86" },
    Program { name: "busybox", package: "busybox-static" },
    Program { name: "cpio", package: "cpio" },
    Program { name: "xz", package: "xz-utils" },
];

/// Arguments of `cargo xtask setup`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Kernels to have ready for `test`: 5.10, 6.1, 6.12, latest, or none.
    #[arg(long, value_delimiter = ',', default_values = [DEFAULT_KERNELS, BRIEF_KERNELS])]
    kernels: Vec<KernelName>,
}

/// Installs everything that any command needs.
pub(crate) fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    // The longest step first, beside everything else.
    let kubernetes = KubernetesBuild::start(Extent::Flannel);
    ensure(&[Need::TestNetwork, Need::Containers, Need::Emulation])?;
    require_kubectl()?;
    let _compiler = ebpf::choose()?;
    for kernel in options.kernels.iter().filter_map(|name| name.0) {
        let image = kernel.obtain()?;
        process::detail(&format!("kernel {kernel}: {}", image.package()?));
    }
    let Kubernetes { control_plane, nodes, flannel } = kubernetes.finish()?;
    for folder in [control_plane].iter().chain(&nodes).chain(&flannel) {
        process::detail(&format!("Kubernetes: {}", folder.display()));
    }
    process::say(&format!("everything is there ({})", process::elapsed(started.elapsed())));
    Ok(())
}

/// Installs what is missing of each need; prints nothing when nothing is.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    needs.iter().try_for_each(|need| apt::install(&need.missing_packages(), need.why()))
}

/// `kubectl` is the one program that no Debian package has.
pub(crate) fn require_kubectl() -> Result<()> {
    if process::find("kubectl").is_none() {
        bail!(
            "the demo and the agent's tests use kubectl, which is not here: install it from kubernetes.io/docs/tasks/tools"
        );
    }
    Ok(())
}

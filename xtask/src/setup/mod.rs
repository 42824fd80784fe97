// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask setup`: installs the packages and builds the tools for builds and for a run of all tests. Every other
//! command installs only the packages that it needs itself.

mod apt;
mod archive;
mod balancers;
mod bpf_linker;
mod cargo_deny;
mod cargo_fuzz;
mod cargo_tool;
mod clang;
mod foreign;
mod kernels;
mod kubernetes;
mod open_vswitch;
mod parts;
mod prometheus;

use std::time::Instant;

use anyhow::{Result, bail};

pub(crate) use apt::{is_available as can_install, is_root};
pub(crate) use balancers::obtain as balancers;
pub(crate) use bpf_linker::{LLVM as BPF_LINKER_LLVM, obtain as bpf_linker};
pub(crate) use cargo_deny::obtain as cargo_deny;
pub(crate) use cargo_fuzz::obtain as cargo_fuzz;
pub(crate) use foreign::{guest_programs, standard_library};
pub(crate) use open_vswitch::obtain as open_vswitch;

use crate::arch::Arch;
use crate::{cross, ebpf, process};
use apt::Program;
pub(crate) use kernels::{
    BRIEF_KERNELS, DEFAULT_KERNELS, FOREIGN_KERNELS, Image as KernelImage, Kernel, KernelName, parse_kernels,
};
pub(crate) use kubernetes::{Background as KubernetesBuild, Component, Extent, Kubernetes, grpc, helm};

/// A group of programs that a command of xtask needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Rust compiler with the source of its core library, for the kernel programs.
    EbpfCompiler,
    /// Tools with which tests build and inspect networks.
    TestNetwork,
    /// The container runtime and CNI plug-ins for the Nodes of a real cluster.
    Containers,
    /// The C compiler and the C library for another architecture than this machine's.
    CrossCompiler(Arch),
    /// The emulator of an architecture, and the tools that prepare a kernel and a RAM disk for the emulator.
    Emulation(Arch),
    /// The package manager pip, which downloads packages with programs of load balancers, and further clients of the
    /// feed: curl, `dig` and `kdig`.
    Balancers,
    /// The C++ compiler, which compiles libFuzzer.
    Fuzzing,
}

impl Need {
    fn why(self) -> &'static str {
        match self {
            Self::EbpfCompiler => "compiling the kernel programs",
            Self::TestNetwork => "building and inspecting test networks",
            Self::Containers => "running containers on the Nodes of a real cluster",
            Self::CrossCompiler(_) => "compiling for another architecture",
            Self::Emulation(_) => "booting other kernels in an emulator",
            Self::Balancers => "obtaining real load balancers and DNS clients",
            Self::Fuzzing => "compiling the fuzz targets",
        }
    }

    fn missing_packages(self) -> Vec<&'static str> {
        match self {
            Self::EbpfCompiler => vec!["rustc-web", "rust-web-src", "rust-web-clippy"],
            Self::TestNetwork => apt::missing(&TEST_NETWORK),
            Self::Containers => apt::missing(&CONTAINERS),
            Self::CrossCompiler(arch) => missing_cross_compiler(arch),
            Self::Emulation(arch) => apt::missing(&[&EMULATION[..], &[emulator(arch)]].concat()),
            Self::Balancers => apt::missing(&BALANCERS),
            Self::Fuzzing => apt::missing(&[Program { name: "c++", package: "g++" }]),
        }
    }
}

const TEST_NETWORK: [Program; 10] = [
    Program { name: "ip", package: "iproute2" },
    Program { name: "tc", package: "iproute2" },
    Program { name: "iptables", package: "iptables" },
    Program { name: "nft", package: "nftables" },
    Program { name: "conntrack", package: "conntrack" },
    Program { name: "ethtool", package: "ethtool" },
    Program { name: "bpftool", package: "bpftool" },
    Program { name: "openssl", package: "openssl" },
    Program { name: "strace", package: "strace" },
    Program { name: "jq", package: "jq" },
];

/// Programs that the Nodes of a real cluster run, with their packages. The CNI plug-in `bridge` stands for all CNI
/// plug-ins of its package; its entry is a full path, because CNI plug-ins are not in the search path. Calico,
/// kube-router and Cilium run `ipset`.
const CONTAINERS: [Program; 5] = [
    Program { name: "ipset", package: "ipset" },
    Program { name: "containerd", package: "containerd" },
    Program { name: "ctr", package: "containerd" },
    Program { name: "runc", package: "runc" },
    Program { name: "/usr/lib/cni/bridge", package: "containernetworking-plugins" },
];

const EMULATION: [Program; 3] = [
    Program { name: "busybox", package: "busybox-static" },
    Program { name: "cpio", package: "cpio" },
    Program { name: "xz", package: "xz-utils" },
];

/// The emulator of an architecture.
const fn emulator(arch: Arch) -> Program {
    match arch {
        Arch::Amd64 => Program { name: "qemu-system-x86_64", package: "qemu-system-x86" },
        Arch::Arm64 => Program { name: "qemu-system-aarch64", package: "qemu-system-arm" },
    }
}

/// Returns the packages of the C compiler and the C library for an architecture, if the compiler is not installed.
fn missing_cross_compiler(arch: Arch) -> Vec<&'static str> {
    if process::find(&format!("{}-gcc", arch.gnu_prefix())).is_some() {
        return Vec::new();
    }
    match arch {
        Arch::Amd64 => vec!["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
        Arch::Arm64 => vec!["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
    }
}

const BALANCERS: [Program; 5] = [
    Program { name: "curl", package: "curl" },
    Program { name: "dig", package: "bind9-dnsutils" },
    Program { name: "kdig", package: "knot-dnsutils" },
    Program { name: "pip3", package: "python3-pip" },
    Program { name: "unzip", package: "unzip" },
];

/// The components of Kubernetes that a run of all tests needs.
pub(crate) const ALL_TESTS: [Component; 8] = [
    Component::Nodes,
    Component::Flannel,
    Component::Calico,
    Component::Cilium,
    Component::Clang,
    Component::Helm,
    Component::Krew,
    Component::Prometheus,
];

/// Arguments of `cargo xtask setup`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Kernels to download for `test`: 5.10, 6.1, 6.12, latest, or none.
    #[arg(long, value_delimiter = ',', default_values = [DEFAULT_KERNELS, BRIEF_KERNELS])]
    kernels: Vec<KernelName>,
    /// Also install the compilers and download the kernels and programs for builds and tests of this architecture.
    #[arg(long)]
    arch: Option<Arch>,
}

/// Installs and builds everything that builds and a run of all tests need. Parts that few commands need, such as
/// kube-router, are built at their first use.
pub(crate) fn run(options: &Options) -> Result<()> {
    let started = Instant::now();
    // The build of Kubernetes takes longest, so it runs in parallel with the steps below.
    let kubernetes = KubernetesBuild::start(ALL_TESTS.into());
    ensure(&[Need::TestNetwork, Need::Containers, Need::Emulation(Arch::native()), Need::Fuzzing])?;
    require_kubectl()?;
    let _compiler = ebpf::choose()?;
    process::detail(&format!("check of dependencies: {}", cargo_deny()?.display()));
    process::detail(&format!("builder of fuzz targets: {}", cargo_fuzz()?.display()));
    process::detail(&format!("load balancers: {}", balancers()?.display()));
    process::detail(&format!("Open vSwitch, in place of OVS-based CNIs: {}", open_vswitch()?.display()));
    for kernel in options.kernels.iter().filter_map(|name| name.0) {
        let image = kernel.obtain(Arch::native())?;
        process::detail(&format!("kernel {kernel}: {}", image.package()?));
    }
    if let Some(arch) = options.arch.filter(|arch| !arch.is_native()) {
        prepare_foreign(arch)?;
    }
    let Kubernetes { control_plane, components } = kubernetes.finish()?;
    for folder in [control_plane].iter().chain(components.values()) {
        process::detail(&format!("programs of tests: {}", folder.display()));
    }
    process::say(&format!("all requirements are installed ({})", process::elapsed(started.elapsed())));
    Ok(())
}

/// Installs and downloads everything that `build`, `image` and `test` need for another architecture.
fn prepare_foreign(arch: Arch) -> Result<()> {
    cross::prepare(arch)?;
    process::detail(&format!("programs of {arch} machines: {}", guest_programs(arch)?.display()));
    for kernel in parse_kernels(FOREIGN_KERNELS).iter().filter_map(|name| name.0) {
        process::detail(&format!("kernel {kernel} for {arch}: {}", kernel.obtain(arch)?.package()?));
    }
    Ok(())
}

/// Installs the missing packages of these needs. Prints nothing if no package is missing.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    needs.iter().try_for_each(|need| apt::install(&need.missing_packages(), need.why()))
}

/// Fails if `kubectl` is not installed. xtask does not install `kubectl`, because the `kubectl` in Debian's package
/// `kubernetes-client` is much older (1.20 in Debian 12) than the API server of the tests.
pub(crate) fn require_kubectl() -> Result<()> {
    if process::find("kubectl").is_none() {
        bail!(
            "the demo and the tests of the agent need kubectl: install it as kubernetes.io/docs/tasks/tools describes"
        );
    }
    Ok(())
}

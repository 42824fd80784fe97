// SPDX-License-Identifier: Apache-2.0
//! Downloads Debian's kernels for emulated machines. The signed packages are unpacked into the cache, and not
//! installed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};

use super::archive::{Archive, Suite};
use super::{Need, ensure};
use crate::arch::Arch;
use crate::{cache, process};

/// A kernel of Debian that an emulated machine can boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel {
    name: &'static str,
    suite: Suite,
    build: Build,
}

/// Debian's build of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    /// The build for virtual machines.
    Cloud,
    /// The build with memory pages of 16 KiB, which exists for arm64 only.
    Pages16K,
}

const KERNELS: [Kernel; 5] = [
    Kernel { name: "5.10", suite: Suite::security("bullseye-security"), build: Build::Cloud },
    Kernel { name: "6.1", suite: Suite::security("bookworm-security"), build: Build::Cloud },
    Kernel { name: "6.12", suite: Suite::main("trixie"), build: Build::Cloud },
    Kernel { name: "latest", suite: Suite::main("sid"), build: Build::Cloud },
    Kernel { name: "latest-16k", suite: Suite::main("sid"), build: Build::Pages16K },
];

/// The directories with the kernel modules that packet tests may load: protocols, netfilter, traffic control and
/// devices.
fn modules(arch: Arch) -> [String; 7] {
    let of_processor = format!("arch/{}/crypto", arch.in_linux());
    ["net", "lib", "crypto", &of_processor, "drivers/net", "drivers/virtio", "fs/overlayfs"].map(str::to_owned)
}

/// The modules of `drivers/net`: virtual devices, and the network card of the emulator.
const DEVICES: [&str; 11] =
    ["veth", "vxlan", "geneve", "dummy", "tun", "virtio_net", "wireguard", "bonding", "macvlan", "net_failover", "vrf"];

/// A value of `--kernels` on the command line: a kernel, or the word `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelName(pub(crate) Option<Kernel>);

/// The kernels under which packet tests run in an emulator, unless the user gives `--kernels`: all packet tests except
/// those that `LEFT_OUT` in `xtask/src/test/guests.rs` lists. The default is only the oldest supported kernel, because
/// the emulator is ten to thirty times slower than the host. Under that kernel, programs are attached as filters; under
/// the host's kernel, all packet tests run outside the emulator.
pub(crate) const DEFAULT_KERNELS: &str = "5.10";
/// The kernels under which tests only load the kernel programs. The verifiers of these kernels check speculative
/// execution in different ways.
pub(crate) const BRIEF_KERNELS: &str = "6.1,6.12,latest";
/// The kernels under which the packet tests of another architecture run: the oldest kernel that NPL supports on arm64,
/// and the newest kernel.
pub(crate) const FOREIGN_KERNELS: &str = "6.1,latest";

impl FromStr for KernelName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || KERNELS.map(|kernel| kernel.name).join(", ");
        match KERNELS.into_iter().find(|kernel| kernel.name == name) {
            None if name != "none" => Err(format!("there is no kernel {name:?}: choose from {}, none", known())),
            kernel => Ok(Self(kernel)),
        }
    }
}

/// Parses a default value such as [`BRIEF_KERNELS`].
pub(crate) fn parse_kernels(names: &str) -> Vec<KernelName> {
    names.split(',').filter_map(|name| name.parse().ok()).collect()
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

/// A kernel with its modules, unpacked in the cache.
#[derive(Debug)]
pub(crate) struct Image {
    folder: PathBuf,
}

impl Image {
    /// The path of the kernel file that a boot loader starts.
    pub(crate) fn vmlinuz(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// The path of the directory `lib` with the kernel modules, in the layout that modprobe expects.
    pub(crate) fn library(&self) -> PathBuf {
        self.folder.join("lib")
    }

    /// The name of the Debian package that contains the kernel.
    pub(crate) fn package(&self) -> Result<String> {
        fs::read_to_string(self.folder.join("package")).context("read the name of the kernel's package")
    }
}

impl Kernel {
    /// The position of this kernel in [`KERNELS`], which is sorted from the oldest to the newest kernel.
    pub(crate) fn age_rank(self) -> Option<usize> {
        KERNELS.iter().position(|kernel| *kernel == self)
    }

    /// Returns the unpacked kernel, and downloads the kernel if it is missing in the cache.
    pub(crate) fn obtain(self, arch: Arch) -> Result<Image> {
        ensure(&[Need::Emulation(arch)])?;
        let meta_package = self.meta_package(arch)?;
        let contents = [modules(arch).join(" "), DEVICES.join(" ")].join(" ");
        let made_from = [self.suite(arch).name.as_bytes(), meta_package.as_bytes(), contents.as_bytes()];
        let folder = cache::obtain(&arch.mark(&format!("kernel-{}", self.name)), &made_from, |folder| {
            process::say(&format!("kernel {self} for {arch}: downloading Debian's package for emulated tests"));
            self.download(arch, &meta_package, folder)
        })?;
        Ok(Image { folder })
    }

    /// The suite with this kernel. Debian's archive has no security updates of 5.10 for arm64.
    fn suite(self, arch: Arch) -> Suite {
        if self.name == "5.10" && arch == Arch::Arm64 { Suite::main("bullseye") } else { self.suite }
    }

    /// Returns the name of the metapackage that, in each suite, depends on the suite's newest kernel of this build.
    fn meta_package(self, arch: Arch) -> Result<String> {
        match (self.build, arch) {
            (Build::Cloud, arch) => Ok(format!("linux-image-cloud-{arch}")),
            (Build::Pages16K, Arch::Arm64) => Ok("linux-image-arm64-16k".to_owned()),
            (Build::Pages16K, arch) => bail!("Debian has no kernel {self} for {arch}: give --arch arm64"),
        }
    }

    fn download(self, arch: Arch, meta_package: &str, folder: &Path) -> Result<()> {
        let work = folder.join("work");
        let suite = self.suite(arch);
        let archive = Archive::of_suites(&[suite], arch, &work)?;
        let image = archive
            .dependency(meta_package, "linux-image-")?
            .with_context(|| format!("the suite {} has no kernel package", suite.name))?;
        let mut packages = vec![image.clone()];
        // In some suites, the kernel and its modules are in separate packages, on which the image package depends.
        for part in ["linux-binary-", "linux-modules-"] {
            packages.extend(archive.dependency(&image, part)?);
        }
        let unpacked = work.join("unpacked");
        archive.unpack(&packages, &unpacked)?;
        copy_bootable_parts(&unpacked, folder, arch)?;
        fs::write(folder.join("package"), image).context("write the name of the kernel's package")?;
        fs::remove_dir_all(&work).context("remove the downloaded packages")
    }
}

/// Copies the kernel and the modules that tests may load to `folder`, and indexes the modules.
fn copy_bootable_parts(unpacked: &Path, folder: &Path, arch: Arch) -> Result<()> {
    let roots = ["lib/modules", "usr/lib/modules"].map(|root| unpacked.join(root));
    let modules =
        roots.iter().find_map(|root| root.read_dir().ok()?.next()?.ok()).context("the package has no modules")?;
    let version = modules.file_name();
    let version = version.to_str().context("the kernel's version is not text")?;
    let candidates = [unpacked.join("boot").join(format!("vmlinuz-{version}")), modules.path().join("vmlinuz")];
    let kernel = candidates.iter().find(|file| file.is_file()).context("the package has no kernel")?;
    fs::copy(kernel, folder.join("vmlinuz")).context("copy the kernel")?;

    let kept = folder.join("lib/modules").join(version);
    for part in self::modules(arch) {
        copy_modules(&modules.path().join("kernel").join(&part), &kept.join("kernel").join(&part), &part)?;
    }
    // modprobe needs the index that depmod writes. Normally, the installation of the package runs depmod.
    process::ask(Command::new("busybox").args(["depmod", "-b"]).arg(folder).arg(version)).map(drop)
}

fn copy_modules(from: &Path, to: &Path, part: &str) -> Result<()> {
    let Ok(entries) = from.read_dir() else { return Ok(()) };
    for entry in entries {
        let (source, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let stem = name.to_string_lossy().split('.').next().unwrap_or_default().to_owned();
        let is_wanted = part != "drivers/net" || DEVICES.contains(&stem.as_str());
        if source.is_dir() && (part != "drivers/net" || is_wanted) {
            copy_modules(&source, &to.join(&name), "")?;
        } else if source.is_file() && is_wanted {
            fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
            fs::copy(&source, to.join(&name)).with_context(|| format!("copy {}", source.display()))?;
            if name.to_string_lossy().ends_with(".xz") {
                process::ask(Command::new("xz").arg("--decompress").arg(to.join(&name)))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Arch, Build, KERNELS, KernelName};

    #[test]
    fn a_kernel_is_chosen_by_name() {
        for kernel in KERNELS {
            assert_eq!(kernel.to_string().parse(), Ok(KernelName(Some(kernel))));
        }
        assert_eq!("none".parse(), Ok(KernelName(None)));
        assert!("4.19".parse::<KernelName>().is_err_and(|error| error.contains("5.10, 6.1, 6.12, latest")));
    }

    #[test]
    fn a_kernel_has_a_package_for_each_architecture_but_16_kib_pages_only_for_arm64() {
        for kernel in KERNELS {
            let package = |arch| kernel.meta_package(arch).ok();
            let (amd64, arm64) = match kernel.build {
                Build::Cloud => (Some("linux-image-cloud-amd64"), "linux-image-cloud-arm64"),
                Build::Pages16K => (None, "linux-image-arm64-16k"),
            };
            assert_eq!(package(Arch::Amd64).as_deref(), amd64, "{kernel}");
            assert_eq!(package(Arch::Arm64).as_deref(), Some(arm64), "{kernel}");
        }
    }
}

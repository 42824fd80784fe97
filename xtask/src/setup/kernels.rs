// SPDX-License-Identifier: Apache-2.0
//! Downloads Debian's kernels for emulated machines. The signed packages are unpacked into the cache, and not
//! installed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};

use super::{Need, apt, ensure};
use crate::{cache, process};

/// A kernel of Debian that an emulated machine can boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel {
    name: &'static str,
    suite: &'static str,
    /// The label of the Debian archive that contains the suite.
    archive: &'static str,
}

const KERNELS: [Kernel; 4] = [
    Kernel { name: "5.10", suite: "bullseye-security", archive: "Debian-Security" },
    Kernel { name: "6.1", suite: "bookworm-security", archive: "Debian-Security" },
    Kernel { name: "6.12", suite: "trixie", archive: "Debian" },
    Kernel { name: "latest", suite: "sid", archive: "Debian" },
];

/// The name of the metapackage that, in each suite, depends on the suite's newest kernel for virtual machines.
const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// The directories with the kernel modules that packet tests may load: protocols, netfilter, traffic control and
/// devices.
const MODULES: [&str; 7] = ["net", "lib", "crypto", "arch/x86/crypto", "drivers/net", "drivers/virtio", "fs/overlayfs"];

/// The modules of `drivers/net`: virtual devices, and the network card of the emulator.
const DEVICES: [&str; 11] =
    ["veth", "vxlan", "geneve", "dummy", "tun", "virtio_net", "wireguard", "bonding", "macvlan", "net_failover", "vrf"];

/// A value of `--kernels` on the command line: a kernel, or the word `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelName(pub(crate) Option<Kernel>);

/// The kernels under which all packet tests run in an emulator, unless the user gives `--kernels`. The default is only
/// the oldest supported kernel, because the emulator is ten to thirty times slower than the host. Under that kernel,
/// programs are attached as filters; under the host's kernel, all packet tests run outside the emulator.
pub(crate) const DEFAULT_KERNELS: &str = "5.10";
/// The kernels under which tests only load the kernel programs. The verifiers of these kernels check speculative
/// execution in different ways.
pub(crate) const BRIEF_KERNELS: &str = "6.1,6.12,latest";

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
    pub(crate) fn obtain(self) -> Result<Image> {
        ensure(&[Need::Emulation])?;
        let contents = [MODULES.join(" "), DEVICES.join(" ")].join(" ");
        let made_from = [self.suite.as_bytes(), META_PACKAGE.as_bytes(), contents.as_bytes()];
        let folder = cache::obtain(&format!("kernel-{}", self.name), &made_from, |folder| {
            process::say(&format!("kernel {self}: downloading Debian's package for emulated tests"));
            self.download(folder)
        })?;
        Ok(Image { folder })
    }

    fn download(self, folder: &Path) -> Result<()> {
        let work = folder.join("work");
        let archive = Archive::new(self, &work)?;
        process::run_quietly(&mut archive.tool("apt-get", &["update"]))?;
        let image = archive
            .dependency(META_PACKAGE, "linux-image-")?
            .with_context(|| format!("the suite {} has no kernel package", self.suite))?;
        let mut packages = vec![image.clone()];
        // In some suites, the kernel and its modules are in separate packages, on which the image package depends.
        for part in ["linux-binary-", "linux-modules-"] {
            packages.extend(archive.dependency(&image, part)?);
        }
        for package in &packages {
            process::run_quietly(archive.tool("apt-get", &["download", package]).current_dir(&work))?;
        }
        let unpacked = work.join("unpacked");
        for package in files_with_ending(&work, "deb")? {
            apt::extract(&package, &unpacked)?;
        }
        copy_bootable_parts(&unpacked, folder)?;
        fs::write(folder.join("package"), image).context("write the name of the kernel's package")?;
        fs::remove_dir_all(&work).context("remove the downloaded packages")
    }
}

/// Package sources with only one suite of Debian's archive. The package sources of this machine do not change.
struct Archive {
    configuration: PathBuf,
}

impl Archive {
    fn new(kernel: Kernel, work: &Path) -> Result<Self> {
        let shown = work.display();
        let create =
            |folder: &str| fs::create_dir_all(work.join(folder)).with_context(|| format!("create {shown}/{folder}"));
        create("lists/partial")?;
        create("cache/archives/partial")?;
        let source = format!(
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} {} main\n",
            mirror(kernel.archive)?,
            kernel.suite
        );
        fs::write(work.join("sources.list"), source).with_context(|| format!("write {shown}/sources.list"))?;
        let configuration = format!(
            "Dir::Etc::sourcelist \"{shown}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
             Dir::State::lists \"{shown}/lists\";\nDir::Cache \"{shown}/cache\";\n\
             APT::Architecture \"amd64\";\nAPT::Sandbox::User \"\";\n"
        );
        let file = work.join("apt.conf");
        fs::write(&file, configuration).with_context(|| format!("write {}", file.display()))?;
        Ok(Self { configuration: file })
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.configuration).arg("--quiet").args(arguments);
        command
    }

    /// Returns the name of the package on which `package` depends, and whose name is `prefix` followed by a version.
    fn dependency(&self, package: &str, prefix: &str) -> Result<Option<String>> {
        let answer = process::ask(&mut self.tool("apt-cache", &["depends", package]))?;
        let names = answer.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let versioned = |name: &&str| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(char::is_numeric));
        Ok(names.into_iter().find(versioned).map(str::to_owned))
    }
}

/// Returns the address of the Debian archive with this label, from this machine's package sources.
fn mirror(label: &str) -> Result<String> {
    let mut query = Command::new("apt-get");
    query.args(["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]);
    let targets = process::ask(&mut query).context("list the package archives of this machine")?;
    match targets.lines().find_map(|line| line.strip_prefix(label)?.strip_prefix(' ')) {
        Some(address) => Ok(address.to_owned()),
        None => bail!(
            "the kernels for emulated tests come from the {label} archive, which this machine does not use: add it, or \
             test with `--kernels none`"
        ),
    }
}

/// Copies the kernel and the modules that tests may load to `folder`, and indexes the modules.
fn copy_bootable_parts(unpacked: &Path, folder: &Path) -> Result<()> {
    let roots = ["lib/modules", "usr/lib/modules"].map(|root| unpacked.join(root));
    let modules =
        roots.iter().find_map(|root| root.read_dir().ok()?.next()?.ok()).context("the package has no modules")?;
    let version = modules.file_name();
    let version = version.to_str().context("the kernel's version is not text")?;
    let candidates = [unpacked.join("boot").join(format!("vmlinuz-{version}")), modules.path().join("vmlinuz")];
    let kernel = candidates.iter().find(|file| file.is_file()).context("the package has no kernel")?;
    fs::copy(kernel, folder.join("vmlinuz")).context("copy the kernel")?;

    let kept = folder.join("lib/modules").join(version);
    for part in MODULES {
        copy_modules(&modules.path().join("kernel").join(part), &kept.join("kernel").join(part), part)?;
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

fn files_with_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let entries = folder.read_dir().with_context(|| format!("list {}", folder.display()))?;
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension() == Some(ending.as_ref())).collect())
}

#[cfg(test)]
mod tests {
    use super::{KERNELS, KernelName};

    #[test]
    fn a_kernel_is_chosen_by_name() {
        for kernel in KERNELS {
            assert_eq!(kernel.to_string().parse(), Ok(KernelName(Some(kernel))));
        }
        assert_eq!("none".parse(), Ok(KernelName(None)));
        assert!("4.19".parse::<KernelName>().is_err_and(|error| error.contains("5.10, 6.1, 6.12, latest")));
    }
}

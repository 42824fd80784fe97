// SPDX-License-Identifier: Apache-2.0
//! Chooses and prints the compiler and the linker of the kernel programs.
//!
//! The compiler needs the source of its core library, which is compiled for the BPF target. The linker must be able to
//! read the bitcode of the compiler's LLVM.

use std::env::consts::ARCH;
use std::ffi::OsString;
use std::fs;
use std::os::unix;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::setup::{self, Need};
use crate::{paths, process};

/// A Rust compiler, and a BPF linker that reads the compiler's bitcode.
#[derive(Debug)]
pub(crate) struct Toolchain {
    compiler: Compiler,
    linker: Linker,
}

#[derive(Debug)]
struct Compiler {
    rustc: PathBuf,
    sysroot: PathBuf,
    release: String,
    llvm: u32,
}

#[derive(Debug)]
enum Linker {
    /// The linker that the developer has installed.
    OnPath(PathBuf),
    /// The linker that xtask has built into the cache, which loads the compiler's libLLVM.
    Cached(PathBuf),
}

/// The compiler of the Linux distribution.
pub(crate) const SYSTEM_RUSTC: &str = "/usr/bin/rustc";

/// Chooses the developer's nightly toolchain if it is complete; otherwise chooses Debian's compiler, and installs it if
/// it is missing.
pub(crate) fn choose() -> Result<Toolchain> {
    if let Some(toolchain) = first_complete()? {
        return Ok(toolchain);
    }
    if setup::can_install() {
        setup::ensure(&[Need::EbpfCompiler])?;
        if let Some(toolchain) = first_complete()? {
            return Ok(toolchain);
        }
    }
    bail!(
        "the kernel programs need a Rust compiler with the source of its core library, and a bpf-linker that reads \
         the compiler's bitcode: run `rustup toolchain install nightly --component rust-src` and `cargo install \
         bpf-linker`, or as root on Debian `cargo xtask setup`"
    )
}

fn first_complete() -> Result<Option<Toolchain>> {
    for compiler in [nightly(), system()].into_iter().flatten().filter(Compiler::has_library_source) {
        if let Some(linker) = linker_for(&compiler)? {
            let toolchain = Toolchain { compiler, linker };
            toolchain.announce();
            return Ok(Some(toolchain));
        }
    }
    Ok(None)
}

/// Returns the compiler of rustup's nightly toolchain.
fn nightly() -> Option<Compiler> {
    let rustc = process::ask(Command::new("rustup").args(["which", "--toolchain", "nightly", "rustc"])).ok()?;
    Compiler::inspect(Path::new(rustc.trim()))
}

/// Returns the compiler of the Linux distribution. Debian's package with the newest compiler is called `rustc-web`.
fn system() -> Option<Compiler> {
    Compiler::inspect(Path::new(SYSTEM_RUSTC))
}

fn linker_for(compiler: &Compiler) -> Result<Option<Linker>> {
    if let Some(own) = process::find("bpf-linker")
        && newest_llvm_of(&own).is_some_and(|llvm| llvm >= compiler.llvm)
    {
        return Ok(Some(Linker::OnPath(own)));
    }
    if compiler.llvm == setup::BPF_LINKER_LLVM && !compiler.library_folders().is_empty() {
        return Ok(Some(Linker::Cached(setup::bpf_linker()?)));
    }
    Ok(None)
}

/// Returns the newest LLVM version whose bitcode this bpf-linker reads. bpf-linker does not print the LLVM version, so
/// this function derives it from the version of bpf-linker.
fn newest_llvm_of(linker: &Path) -> Option<u32> {
    let answer = process::ask(Command::new(linker).arg("--version")).ok()?;
    let minor: u32 = answer.trim().strip_prefix("bpf-linker 0.")?.split('.').next()?.parse().ok()?;
    Some(if minor >= 11 { 23 } else { 22 })
}

impl Compiler {
    fn inspect(rustc: &Path) -> Option<Self> {
        let version = process::ask(Command::new(rustc).arg("-vV")).ok()?;
        let field = |name: &str| version.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
        let sysroot = process::ask(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
        let llvm = field("LLVM version:")?.split('.').next()?.parse().ok()?;
        Some(Self { rustc: rustc.to_owned(), sysroot: sysroot.trim().into(), release: field("release:")?, llvm })
    }

    fn is_system(&self) -> bool {
        self.rustc == Path::new(SYSTEM_RUSTC)
    }

    fn has_library_source(&self) -> bool {
        self.sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs").is_file()
    }

    /// Returns the folders that contain this compiler's libLLVM.
    fn library_folders(&self) -> Vec<PathBuf> {
        let library = self.sysroot.join("lib");
        let folders = [library.join(format!("{ARCH}-linux-gnu")), library];
        folders.into_iter().filter(|folder| self.has_llvm_in(folder)).collect()
    }

    fn has_llvm_in(&self, folder: &Path) -> bool {
        llvm_in(folder, self.llvm).is_some()
    }
}

/// Returns the path of the libLLVM with this major version in a folder.
fn llvm_in(folder: &Path, major: u32) -> Option<PathBuf> {
    let wanted = format!("libLLVM.so.{major}");
    let is_wanted =
        |name: &str| name.strip_prefix(&wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-']));
    let entries = folder.read_dir().into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<PathBuf> =
        entries.filter(|entry| is_wanted(&entry.file_name().to_string_lossy())).map(|entry| entry.path()).collect();
    found.sort();
    found.into_iter().next()
}

/// Returns a folder that contains only a link to this compiler's libLLVM. Without such a folder, bpf-linker would load
/// the first libLLVM of any version in its search path, for example the libLLVM of an installed clang.
fn folder_of_llvm(libraries: &[PathBuf], major: u32, target_dir: &Path) -> Result<PathBuf> {
    let found = libraries.iter().find_map(|folder| llvm_in(folder, major));
    let library = found.with_context(|| format!("find libLLVM.so.{major} of the compiler"))?;
    let folder = target_dir.join("llvm");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let link = folder.join(library.file_name().context("name libLLVM")?);
    unix::fs::symlink(&library, &link).with_context(|| format!("create {}", link.display()))?;
    Ok(folder)
}

impl Toolchain {
    fn announce(&self) {
        let linker = match &self.linker {
            Linker::OnPath(path) | Linker::Cached(path) => path.display(),
        };
        let Compiler { rustc, release, llvm, .. } = &self.compiler;
        process::say(&format!("kernel programs: rustc {release} (LLVM {llvm}) at {} with {linker}", rustc.display()));
    }

    /// Returns a cargo command for the BPF target, with its output below `target_dir`.
    pub(crate) fn cargo(&self, subcommand: &str, target_dir: &Path) -> Result<Command> {
        self.configure(Command::new(self.own_cargo()), subcommand, target_dir)
    }

    /// Returns the command `cargo clippy` for this compiler. The clippy in the search path cannot be used, because it
    /// may belong to a different compiler.
    pub(crate) fn clippy(&self, target_dir: &Path) -> Result<Command> {
        let clippy = self.compiler.sysroot.join("bin").join("cargo-clippy");
        if !clippy.is_file() && self.compiler.is_system() && setup::can_install() {
            setup::ensure(&[Need::EbpfCompiler])?;
        }
        if !clippy.is_file() {
            bail!(
                "the compiler of the kernel programs has no clippy at {}: run `rustup component add clippy`, or \
                 install the distribution's package with clippy",
                clippy.display()
            );
        }
        let mut command = Command::new(clippy);
        command.env("CARGO", self.own_cargo());
        self.configure(command, "clippy", target_dir)
    }

    fn own_cargo(&self) -> OsString {
        let own = self.compiler.sysroot.join("bin").join("cargo");
        if own.is_file() { own.into_os_string() } else { paths::cargo() }
    }

    fn configure(&self, mut command: Command, subcommand: &str, target_dir: &Path) -> Result<Command> {
        command.arg(subcommand).args(["--profile", "ebpf", "--package", "npl-ebpf"]);
        command.args(["--target", "bpfel-unknown-none", "-Zbuild-std=core", "--target-dir"]).arg(target_dir);
        command
            .env("RUSTC", &self.compiler.rustc)
            .env("RUSTFLAGS", self.flags()?)
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        if !self.compiler.release.contains("nightly") {
            // RUSTC_BOOTSTRAP permits all unstable features of cargo and rustc. xtask uses only one of these features,
            // the build of the core library.
            command.env("RUSTC_BOOTSTRAP", "1");
        }
        command.current_dir(paths::root());
        let libraries = self.compiler.library_folders();
        if !libraries.is_empty() {
            command.env("LD_LIBRARY_PATH", folder_of_llvm(&libraries, self.compiler.llvm, target_dir)?);
        }
        Ok(command)
    }

    /// Returns the compiler flags. The flags replace paths by short names, so that the same source is compiled to the
    /// same bytes in every checkout.
    fn flags(&self) -> Result<String> {
        let (Linker::OnPath(linker) | Linker::Cached(linker)) = &self.linker;
        let mut flags = vec![
            format!("-Clinker={}", linker.display()),
            "-Clink-arg=--btf".to_owned(),
            "-Cdebuginfo=2".to_owned(),
            format!("--cfg=bpf_target_arch=\"{ARCH}\""),
        ];
        let source = self.compiler.sysroot.join("lib/rustlib/src/rust");
        let source = source.canonicalize().with_context(|| format!("find {}", source.display()))?;
        let renamed = [(Some(paths::root()), "/npl"), (paths::cargo_home(), "/cargo"), (Some(source), "/rust")];
        for (from, to) in renamed {
            flags.extend(from.map(|from| format!("--remap-path-prefix={}={to}", from.display())));
        }
        if flags.iter().any(|flag| flag.contains(char::is_whitespace)) {
            bail!(
                "the path of the checkout, the cache or the compiler contains a space, which RUSTFLAGS cannot hold: \
                 move that directory to a path without spaces"
            );
        }
        Ok(flags.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{folder_of_llvm, llvm_in};

    /// If a clang with a newer LLVM than the compiler's is installed, the folder of the compiler's libLLVM also
    /// contains clang's libLLVM, which bpf-linker must not load.
    #[test]
    fn bpf_linker_finds_only_the_libllvm_of_the_compiler() {
        let folder = std::env::temp_dir().join(format!("npl-xtask-llvm-{}", std::process::id()));
        let libraries = folder.join("lib");
        fs::create_dir_all(&libraries).unwrap();
        for name in ["libLLVM.so.19.1", "libLLVM.so.22.1", "libLLVM.so.220", "libc.so.6"] {
            fs::write(libraries.join(name), name).unwrap();
        }
        assert_eq!(llvm_in(&libraries, 22), Some(libraries.join("libLLVM.so.22.1")));
        assert_eq!(llvm_in(&libraries, 21), None);
        for _build in 0..2 {
            let chosen = folder_of_llvm(std::slice::from_ref(&libraries), 22, &folder).unwrap();
            let names: Vec<_> = chosen.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["libLLVM.so.22.1"]);
            assert_eq!(fs::read_to_string(chosen.join("libLLVM.so.22.1")).unwrap(), "libLLVM.so.22.1");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}

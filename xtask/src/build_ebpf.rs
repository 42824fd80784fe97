// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask build-ebpf`: compiles, links, strips and lists the kernel programs, and checks the limits on their
//! instructions and stack.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::{budget, bytecode, ebpf, kernel_object, paths, process};

/// Arguments of `cargo xtask build-ebpf`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    features: Features,
}

/// Features of the kernel programs and of the agent that loads them.
#[derive(Debug, clap::Args)]
pub(crate) struct Features {
    /// Features of the build. With `trace`, the kernel programs log the verdict on each packet that they translate,
    /// drop or count under a reason, and the agent prints the logs. Use such a build only to investigate a problem on
    /// one Node.
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    features: Vec<Feature>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Feature {
    Trace,
}

impl Features {
    /// Whether the build is a trace build.
    pub(crate) fn has_trace(&self) -> bool {
        self.features.contains(&Feature::Trace)
    }
}

/// Builds every kernel object of npl-ebpf. With the feature `trace`, builds only the object of trace builds.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.features.has_trace() { build_trace() } else { build() }.map(drop)
}

/// Builds every kernel object of npl-ebpf and returns the path of the object that the agent embeds.
pub(crate) fn build() -> Result<PathBuf> {
    let toolchain = ebpf::choose()?;
    let target_dir = target_dir();
    process::say("kernel programs: compiling the programs and Rust's core library for the BPF target");
    process::run(toolchain.cargo("build", &target_dir)?.arg("--bins"))?;
    let built = target_dir.join("bpfel-unknown-none").join("ebpf");
    for name in object_names()? {
        install(&built.join(&name), &paths::bpf_object().with_file_name(format!("{name}.bpf.o")))?;
    }
    Ok(paths::bpf_object())
}

/// Builds the kernel object of trace builds and returns its path. The limits of npl-ebpf/budget.toml do not apply to
/// this object.
pub(crate) fn build_trace() -> Result<PathBuf> {
    let toolchain = ebpf::choose()?;
    let target_dir = target_dir();
    process::say("kernel programs: compiling the trace build, which logs verdicts");
    process::run(toolchain.cargo("build", &target_dir)?.args(["--bin", "npl", "--features", "trace"]))?;
    let object = paths::trace_object();
    install(&target_dir.join("bpfel-unknown-none").join("ebpf").join("npl"), &object)?;
    Ok(object)
}

/// Lints the kernel programs for the BPF target, because they compile for no other target.
pub(crate) fn lint() -> Result<()> {
    let toolchain = ebpf::choose()?;
    for features in [[].as_slice(), &["--features", "trace"]] {
        let mut clippy = toolchain.clippy(&target_dir())?;
        process::run(clippy.arg("--bins").args(features).args(["--", "-D", "warnings"]))?;
    }
    Ok(())
}

/// Names that only the object of a trace build contains: parts of the names of aya-log's maps and functions, and the
/// name of the map with the packet and the verdict to log.
const LOG_NAMES: [&str; 3] = ["AYA_LOG", "aya_log", "npl_log_note"];

fn target_dir() -> PathBuf {
    paths::target_dir().join("ebpf")
}

/// Returns the names of the binaries in npl-ebpf's Cargo.toml. Each binary is one kernel object.
fn object_names() -> Result<Vec<String>> {
    let manifest = paths::root().join("npl-ebpf").join("Cargo.toml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    let names: Vec<_> = binaries(&text).collect();
    if names.is_empty() {
        bail!("{} names no binary", manifest.display());
    }
    Ok(names)
}

fn binaries(manifest: &str) -> impl Iterator<Item = String> {
    manifest.split("[[bin]]").skip(1).filter_map(|section| {
        let own = section.split("\n[").next()?;
        let value = own.lines().find_map(|line| line.trim().strip_prefix("name")?.trim().strip_prefix('='))?;
        Some(value.trim().trim_matches('"').to_owned())
    })
}

/// Strips one kernel object, lists its programs, and moves the stripped object to its place in target/. If the file
/// there already has the same content, the file keeps its modification time, so that cargo does not rebuild the agent.
fn install(linked: &Path, object: &Path) -> Result<()> {
    let stripped = linked.with_extension("stripped");
    fs::copy(linked, &stripped).with_context(|| format!("copy {}", linked.display()))?;
    strip(&stripped)?;
    let bytes = fs::read(&stripped).with_context(|| format!("read {}", stripped.display()))?;
    let uses = list(object, &bytes)?;
    check_logs(&bytes, object == paths::trace_object())?;
    if object == paths::bpf_object() {
        budget::check(&uses)?;
    }
    if fs::read(object).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    let folder = object.parent().context("find the folder of an object")?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    fs::rename(&stripped, object).with_context(|| format!("install {}", object.display()))
}

/// Checks that the kernel object of a trace build contains at least one of [`LOG_NAMES`], and that a kernel object of a
/// normal build contains none of them.
fn check_logs(object: &[u8], is_trace: bool) -> Result<()> {
    let found = LOG_NAMES.iter().filter(|name| object.windows(name.len()).any(|part| part == name.as_bytes()));
    match found.copied().collect::<Vec<_>>().as_slice() {
        [] if is_trace => {
            bail!("the kernel programs of the trace build log nothing: check the feature `trace` of npl-ebpf")
        }
        [] => Ok(()),
        _ if is_trace => Ok(()),
        names => bail!("the kernel programs contain parts of the trace build: {}", names.join(", ")),
    }
}

/// Removes the DWARF sections, which are unused at run time. The BTF sections are kept, because the kernel and bpftool
/// use them.
fn strip(object: &Path) -> Result<()> {
    match process::find("llvm-strip") {
        Some(tool) => process::ask(Command::new(tool).arg("--strip-debug").arg(object)).map(drop),
        None => Ok(()),
    }
}

/// Prints the size of a kernel object, and the number of instructions and the stack size of each program in it.
fn list(object: &Path, bytes: &[u8]) -> Result<Vec<bytecode::Use>> {
    let uses = kernel_object::functions(bytes).and_then(|functions| bytecode::uses(&functions));
    let uses = uses.with_context(|| format!("read the programs of {}", object.display()))?;
    process::say(&format!(
        "{}: {} bytes. The instruction counts and stack sizes of its programs include the functions that they call:",
        paths::shown(object),
        bytes.len()
    ));
    for bytecode::Use { name, section, instructions, stack } in &uses {
        process::detail(&format!("{name:<20} {instructions:>5} instructions {stack:>4} bytes of stack  {section}"));
    }
    Ok(uses)
}

#[cfg(test)]
mod tests {
    use super::{binaries, check_logs};

    #[test]
    fn only_the_trace_build_has_maps_and_symbols_of_logs() {
        for (object, in_trace, in_others) in [
            (b"\x7fELF\0maps\0AYA_LOGS\0npl_flow_v4".as_slice(), true, false),
            (b"\x7fELF\0_ZN3npl4path5trace12aya_log_ebpf", true, false),
            (b"\x7fELF\0npl_flow_v4\0npl_traffic", false, true),
        ] {
            assert_eq!((check_logs(object, true).is_ok(), check_logs(object, false).is_ok()), (in_trace, in_others));
        }
    }

    #[test]
    fn binaries_are_read_from_the_manifest() {
        let manifest = "[package]\nname = \"p\"\n[[bin]]\nname = \"a\"\npath = \"x\"\n\n[[bin]]\nname = \"b\"\n[dependencies]\nname = 1\n";
        assert_eq!(binaries(manifest).collect::<Vec<_>>(), ["a", "b"]);
    }
}

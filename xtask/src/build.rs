// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask build`: builds the agent as one static binary, and also the feed. For tests, xtask calls cargo in the
//! same way.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::arch::Arch;
use crate::build_ebpf::{self, Features};
use crate::{cross, paths, process};

/// The file name of the agent's trace build, and of the archive of its image.
pub(crate) const TRACE_AGENT: &str = "npl-agent-trace";

/// The file name of the agent.
pub(crate) const AGENT: &str = "npl-agent";

/// The file name of the feed.
pub(crate) const FEED: &str = "npl-feed";

/// The compiler flags of static binaries.
const STATIC: &str = "-C target-feature=+crt-static";

/// Cargo settings of [`cargo_test`], which shorten the compilation of the three crates with the most tests. npl-agent
/// and npl-feed are compiled without optimization. npl-testkit is compiled with `opt-level=1`, because it creates and
/// compares streams of bytes. The tests start the agent and the feed of the release build, which are optimized.
const LITTLE_OPTIMIZATION: [&str; 6] = [
    "--config",
    "profile.release.package.npl-agent.opt-level=0",
    "--config",
    "profile.release.package.npl-feed.opt-level=0",
    "--config",
    "profile.release.package.npl-testkit.opt-level=1",
];

/// Arguments that select the packages of the programs in images: the agent, the feed, the echo server and the pause
/// program. Every build of one of these programs selects all packages, so that dependencies have the same features and
/// are compiled once.
pub(crate) const PACKAGES: [&str; 6] = ["--package", "npl-agent", "--package", "npl-echo", "--package", "npl-feed"];

/// Arguments of `cargo xtask build`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    features: Features,
    /// The processor architecture of the agent. For another architecture than this machine's, the name of the binary
    /// ends with the architecture.
    #[arg(long, default_value_t = Arch::native())]
    arch: Arch,
}

/// Builds the agent with the features of the command line.
pub(crate) fn run(options: &Options) -> Result<()> {
    build_with(&options.features, options.arch).map(drop)
}

/// Builds the kernel programs, and the agent that embeds them. Returns the path of the agent.
pub(crate) fn build_with(features: &Features, arch: Arch) -> Result<PathBuf> {
    if !features.has_trace() {
        build_ebpf::build()?;
        return build_agent_for(arch, &[]);
    }
    let object = build_ebpf::build_trace()?;
    process::say("agent: compiling the trace build, which prints the logs of the kernel programs");
    let mut compile = cargo_for(arch, "build")?;
    compile.args(["--package", "npl-agent", "--bin", "npl-agent", "--features", "trace"]);
    process::run(compile.env("NPL_BPF_OBJECT", object))?;
    install(arch, AGENT, TRACE_AGENT)
}

/// Builds the agent with the kernel object that `build-ebpf` wrote. The same run of cargo builds the targets that the
/// arguments in `further` select. Returns the path of the agent.
pub(crate) fn build_agent(further: &[&str]) -> Result<PathBuf> {
    build_agent_for(Arch::native(), further)
}

/// Builds the agent and the feed for an architecture, as [`build_agent`] does.
pub(crate) fn build_agent_for(arch: Arch, further: &[&str]) -> Result<PathBuf> {
    process::say("agent and feed: compiling each as one static binary, the agent with the kernel programs embedded");
    // The feed is built in the same run of cargo as the agent, so that dependencies have the same features as in the
    // tests, and are compiled only once.
    process::run(cargo_for(arch, "build")?.args(PACKAGES).args(["--bin", AGENT, "--bin", FEED]).args(further))?;
    install(arch, FEED, FEED)?;
    install(arch, AGENT, AGENT)
}

/// Copies a built program to `target/release/`, with `name` as the file name. If the architecture is not this
/// machine's, appends the architecture to the file name. The build of the tests, which has little optimization, does
/// not overwrite this copy.
fn install(arch: Arch, program: &str, name: &str) -> Result<PathBuf> {
    let release = paths::target_dir().join("release");
    let (built, installed) = (built_folder_of(arch).join(program), release.join(arch.mark(name)));
    fs::create_dir_all(&release).with_context(|| format!("create {}", release.display()))?;
    // The file is replaced by a rename, because the replaced file may be the program of a running agent.
    let new = installed.with_extension("new");
    fs::copy(&built, &new).with_context(|| format!("copy {}", built.display()))?;
    fs::rename(&new, &installed).with_context(|| format!("install {}", installed.display()))?;
    let size = fs::metadata(&installed).map_or(0, |data| data.len());
    process::say(&format!("{}: {} kB", paths::shown(&installed), size / 1000));
    Ok(installed)
}

/// The directory in which [`cargo`] puts the built binaries.
pub(crate) fn built_folder() -> PathBuf {
    built_folder_of(Arch::native())
}

/// The directory in which [`cargo_for`] puts the built binaries.
pub(crate) fn built_folder_of(arch: Arch) -> PathBuf {
    paths::target_dir().join(arch.target()).join("release")
}

/// Returns a cargo command without the environment variables that describe xtask's own package. cargo runs a build
/// script again if such a variable has changed. If xtask passed its variables on, a developer's own run of cargo, in
/// which they are unset, would run build scripts again and compile the scripts' crates again.
pub(crate) fn plain_cargo() -> Command {
    plain(paths::cargo())
}

/// Returns the command of a program that runs cargo, without the environment variables that [`plain_cargo`] leaves out.
pub(crate) fn plain(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    let is_of_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _value) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_package)) {
        command.env_remove(name);
    }
    command
}

/// Returns a cargo command for the agent and all tests. Profile, target and flags are always the same, so that
/// dependencies are compiled once.
///
/// Binaries are static, so that they run in an empty container and in the initramfs of an emulated machine. The target
/// is this machine's, but is given explicitly: otherwise, cargo would apply the flags to build scripts and procedural
/// macros, too.
pub(crate) fn cargo(subcommand: &str) -> Command {
    for_target(Arch::native(), subcommand)
}

/// Returns the command of [`cargo`] for an architecture. If the architecture is not this machine's, installs the
/// compilers for it.
pub(crate) fn cargo_for(arch: Arch, subcommand: &str) -> Result<Command> {
    let mut command = for_target(arch, subcommand);
    if !arch.is_native() {
        cross::configure(&mut command, arch, STATIC)?;
    }
    Ok(command)
}

fn for_target(arch: Arch, subcommand: &str) -> Command {
    let mut command = plain_cargo();
    command.arg(subcommand).args(["--release", "--target", &arch.target()]);
    command.env("RUSTFLAGS", STATIC).env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("NPL_BPF_OBJECT", paths::bpf_object()).current_dir(paths::root());
    command
}

/// Returns a `cargo test` command for the packages that the arguments in `packages` select. Dependencies are compiled
/// with the same settings as by [`cargo`].
pub(crate) fn cargo_test(packages: &[&str]) -> Command {
    with_little_optimization(cargo("test"), packages)
}

/// Returns the command of [`cargo_test`] for an architecture.
pub(crate) fn cargo_test_for(arch: Arch, packages: &[&str]) -> Result<Command> {
    Ok(with_little_optimization(cargo_for(arch, "test")?, packages))
}

fn with_little_optimization(mut command: Command, packages: &[&str]) -> Command {
    command.args(LITTLE_OPTIMIZATION).args(packages);
    command
}

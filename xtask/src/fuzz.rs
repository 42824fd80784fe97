// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask fuzz`: builds the fuzz targets of the folder `fuzz/`, and runs each target on its stored inputs and on a
//! fixed number of further inputs. `cargo xtask test` does the same.
//!
//! The targets are built without a sanitizer: nearly all of NPL's code is safe Rust, so a fault is a panic. The pinned
//! compiler builds the targets; a sanitizer would need a nightly compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use crate::arch::Arch;
use crate::setup::{self, Need};
use crate::tally::{Counts, Tally};
use crate::test::parse_duration;
use crate::{build, paths, process};

/// Arguments of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only this target; without it, all targets run.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(TARGETS.map(|target| target.name)))]
    target: Option<String>,
    /// Run the target only on this file, for example an input for which the target has failed.
    #[arg(requires = "target", conflicts_with = "time")]
    input: Option<PathBuf>,
    /// Run each target for DURATION, and not for a fixed number of inputs: a whole number with the unit h, m or s. New
    /// inputs are kept in target/fuzz/new, and a later run continues with these inputs.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    time: Option<Duration>,
}

/// A fuzz target.
#[derive(Debug, Clone, Copy)]
struct Target {
    name: &'static str,
    /// The number of inputs of a run of all tests. A fixed number, so that the result does not depend on the speed of
    /// the machine. All targets together take about a minute on two processors.
    inputs: u32,
}

const TARGETS: [Target; 6] = [
    Target { name: "annotation", inputs: 200_000 },
    Target { name: "cluster", inputs: 2_000 },
    Target { name: "command_line", inputs: 20_000 },
    Target { name: "netlink", inputs: 200_000 },
    Target { name: "nftables", inputs: 100_000 },
    Target { name: "pinned_maps", inputs: 100_000 },
];

/// The random seed of a run of all tests.
const SEED: &str = "1";
/// The maximum length of an input in bytes.
const LONGEST: &str = "8192";
/// The time limit for one input in seconds. Every target needs a few milliseconds for an input.
const INPUT_SECONDS: &str = "300";
/// The time limit of a target, in addition to the duration that the user chose.
const DEADLINE: Duration = Duration::from_hours(1);

/// How long a target runs.
#[derive(Debug, Clone, Copy)]
enum Extent {
    /// The number of inputs of a run of all tests.
    Brief,
    /// The duration that the user chose.
    For(Duration),
}

/// Runs the command.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let (Some(name), Some(input)) = (&options.target, &options.input) {
        build_targets()?;
        return process::become_program(Command::new(program(name)).arg(input));
    }
    let mut tally = Tally::start(options.target.as_deref());
    run_targets(&mut tally, options.time.map_or(Extent::Brief, Extent::For));
    tally.close(None)
}

/// Runs all targets briefly, as steps of a run of all tests.
pub(crate) fn run_briefly(tally: &mut Tally) {
    run_targets(tally, Extent::Brief);
}

fn run_targets(tally: &mut Tally, extent: Extent) {
    let steps = TARGETS.map(|target| (format!("fuzz target {}", target.name), target));
    if !steps.iter().any(|(step, _)| tally.is_chosen(step)) {
        return;
    }
    match tally.prepare("build of the fuzz targets", build_targets) {
        Ok(()) => {
            let steps =
                steps.into_iter().map(|(step, target)| (step, move |counts: &mut Counts| fuzz(target, extent, counts)));
            tally.side_by_side(steps.collect());
        }
        Err(missing) => steps.iter().for_each(|(step, _)| tally.not_run(step, missing)),
    }
}

/// The folder with the sources and the stored inputs of the targets.
fn folder() -> PathBuf {
    paths::root().join("fuzz")
}

/// The folder with the built targets, and with the inputs that they find.
fn target_dir() -> PathBuf {
    paths::target_dir().join("fuzz")
}

fn program(name: &str) -> PathBuf {
    target_dir().join(triple()).join("release").join(name)
}

/// The target triple for which cargo-fuzz compiles by default.
fn triple() -> String {
    Arch::native().target()
}

/// Compiles all targets with coverage counters.
fn build_targets() -> Result<()> {
    setup::ensure(&[Need::Fuzzing])?;
    let cargo_fuzz = setup::cargo_fuzz()?;
    // The targets run no kernel programs. An empty object file that does not change saves the compilation of the agent
    // after each build of the kernel programs.
    let object = target_dir().join("no-programs.o");
    if !object.exists() {
        fs::create_dir_all(target_dir()).and_then(|()| fs::write(&object, [])).context("write an empty object file")?;
    }
    let mut command = build::plain(cargo_fuzz);
    command.args(["build", "--sanitizer", "none", "--target", &triple(), "--fuzz-dir"]).arg(folder());
    command.arg("--target-dir").arg(target_dir());
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env("NPL_BPF_OBJECT", object);
    process::run(command.current_dir(paths::root()))
}

/// Runs a target, and counts the target as one test.
fn fuzz(Target { name, inputs }: Target, extent: Extent, counts: &mut Counts) -> Result<bool> {
    let (stored, new) = (folder().join("corpus").join(name), target_dir().join("new").join(name));
    let faults = folder().join("artifacts").join(name);
    let mut command = Command::new(program(name));
    let deadline = match extent {
        Extent::Brief => {
            // Inputs of an earlier run would change the result of this run.
            if new.exists() {
                fs::remove_dir_all(&new).with_context(|| format!("remove {}", new.display()))?;
            }
            command.arg(format!("-runs={inputs}")).arg(format!("-seed={SEED}"));
            DEADLINE
        }
        Extent::For(time) => {
            command.arg(format!("-max_total_time={}", time.as_secs()));
            DEADLINE + time
        }
    };
    for folder in [&new, &faults] {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    command.arg(format!("-max_len={LONGEST}")).arg(format!("-timeout={INPUT_SECONDS}"));
    command.arg(format!("-artifact_prefix={}/", faults.display())).arg(new).arg(stored);
    process::show(&command);
    let mut output = Vec::new();
    let status = process::stream(command, deadline, |line| {
        output.extend(line.map(str::to_owned));
        Ok(())
    })?;
    if status.success() {
        println!("    {name}: {}", summary(&output)?);
        counts.passed = 1;
        return Ok(true);
    }
    process::print_end(&output.join("\n"));
    bail!("{}", complaint(name, &output))
}

/// Returns the last line that libFuzzer prints about its progress: the numbers of inputs and of covered places.
fn summary(output: &[String]) -> Result<&str> {
    let done = output.iter().rev().find(|line| line.starts_with('#') && line.contains("DONE"));
    let done = done.context("libFuzzer ended without the line `DONE`")?;
    ensure!(done.contains("cov: "), "the target has no coverage counters: {done}");
    Ok(done.trim_end())
}

/// Returns the text about a failed target, with the path of the input and the command that repeats the failure.
fn complaint(name: &str, output: &[String]) -> String {
    let written = output.iter().find_map(|line| line.split_once("Test unit written to ").map(|(_, path)| path.trim()));
    match written.map(|path| paths::shown(Path::new(path))) {
        Some(input) => {
            format!("the target failed for the input {input}: repeat with `cargo xtask fuzz {name} {input}`")
        }
        None => "the target failed without an input; its output is above".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::{TARGETS, complaint, folder, summary};

    /// Returns the names of the entries of a folder below `fuzz/`, without the ending `.rs`.
    fn names(below: &str) -> BTreeSet<String> {
        let entries = folder().join(below).read_dir().unwrap().map(|entry| entry.unwrap().path());
        let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
        entries.map(|path| stem(&path)).collect()
    }

    #[test]
    fn every_target_of_the_folder_runs_and_has_stored_inputs() {
        let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
        assert_eq!(names("fuzz_targets"), targets);
        assert_eq!(names("corpus"), targets);
        let manifest = fs::read_to_string(folder().join("Cargo.toml")).unwrap();
        for name in targets {
            assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        }
    }

    #[test]
    fn the_stored_inputs_are_small() {
        for target in TARGETS {
            let files = folder().join("corpus").join(target.name).read_dir().unwrap();
            let sizes: Vec<u64> = files.map(|entry| entry.unwrap().metadata().unwrap().len()).collect();
            let total: u64 = sizes.iter().sum();
            assert!(sizes.len() <= 100 && total <= 64 * 1024, "{}: {} files, {total} bytes", target.name, sizes.len());
        }
    }

    #[test]
    fn a_failure_names_the_input_and_the_command_that_repeats_the_failure() {
        let output = ["thread panicked", "artifact_prefix='fuzz/artifacts/'; Test unit written to fuzz/artifacts/x"];
        let text = complaint("annotation", &output.map(str::to_owned));
        assert!(text.ends_with("repeat with `cargo xtask fuzz annotation fuzz/artifacts/x`"), "{text}");
        assert!(complaint("annotation", &[]).contains("without an input"));
    }

    #[test]
    fn a_target_without_coverage_counters_is_an_error() {
        let lines = |last: &str| ["#2\tINITED cov: 4".to_owned(), last.to_owned()];
        assert_eq!(summary(&lines("#9\tDONE   cov: 5 ft: 7 ")).unwrap(), "#9\tDONE   cov: 5 ft: 7");
        assert!(summary(&lines("#9\tDONE   exec/s: 0")).is_err());
        assert!(summary(&lines("stopped")).is_err());
    }
}

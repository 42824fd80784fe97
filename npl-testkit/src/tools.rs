// SPDX-License-Identifier: Apache-2.0
//! The external programs that this crate runs, in one place: an image for a test machine packs exactly these.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A file of this repository, where tests and the demo run from a checkout.
pub fn repository_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/")).join(path)
}

/// Programs that network tests need.
pub const NETWORK_TOOLS: &[&str] = &["ip", "tc", "ethtool", "nft", "iptables"];

/// Programs that tests against a real API server need on top.
pub const CLUSTER_TOOLS: &[&str] = &["kubectl"];

/// Runs `command` to its end and returns what it printed.
///
/// # Errors
/// When it cannot be started or does not exit with 0: with the command line and its last words.
pub fn output(command: &mut Command) -> Result<String> {
    command.stdin(Stdio::null());
    let shown = show(command);
    let output =
        command.output().with_context(|| format!("run `{shown}`: is it installed? try `cargo xtask setup`"))?;
    check(&shown, &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// As [`output`], with `input` on the command's standard input.
pub fn output_with_input(command: &mut Command, input: &str) -> Result<String> {
    let shown = show(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run `{shown}`: is it installed? try `cargo xtask setup`"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).with_context(|| format!("write to `{shown}`"))?;
    }
    let output = child.wait_with_output().with_context(|| format!("wait for `{shown}`"))?;
    check(&format!("{shown}` with `{}", input.trim_end()), &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Copies a program, with its permissions, to where it is then run.
///
/// The kernel runs no file that a process has open for writing, and what one thread has open, the children that
/// others start at that moment have too. So another process writes it.
///
/// # Errors
/// When it cannot be read there or written here.
pub fn copy_program(from: &Path, to: &Path) -> Result<()> {
    output(Command::new("cp").arg(from).arg(to)).map(drop)
}

/// The command line as a person would type it.
pub fn show(command: &Command) -> String {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

fn check(shown: &str, output: &std::process::Output) -> Result<()> {
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Runs external programs, and names those that tests require.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Returns the path of a file in the repository checkout that this program was built from.
pub fn repository_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/")).join(path)
}

/// The programs that tests with a real API server require in addition to the programs of the network tests.
pub const CLUSTER_TOOLS: &[&str] = &["kubectl"];

/// Runs `command` and returns its standard output.
///
/// # Errors
/// Returns an error if the command cannot be started or fails; the error contains the command line and the error
/// output.
pub fn output(command: &mut Command) -> Result<String> {
    command.stdin(Stdio::null());
    let shown = show(command);
    let output =
        command.output().with_context(|| format!("run `{shown}`: is it installed? try `cargo xtask setup`"))?;
    check(&shown, &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command` as [`output`] does, with `input` as the command's standard input.
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

/// Copies a program with its permissions to the path from which it is run.
///
/// Another process makes the copy. If this process wrote the file, a child that another thread forks meanwhile would
/// inherit the descriptor. The kernel does not execute a file that any process has open for writing (`ETXTBSY`).
///
/// # Errors
/// Returns an error if the source cannot be read or the destination cannot be written.
pub fn copy_program(from: &Path, to: &Path) -> Result<()> {
    output(Command::new("cp").arg(from).arg(to)).map(drop)
}

/// Writes a program, such as a shell script. This process writes another file, which [`copy_program`] copies.
///
/// # Errors
/// Returns an error if the file or its copy cannot be written.
pub fn write_program(path: &Path, text: &str) -> Result<()> {
    let source = path.with_extension("source");
    fs::write(&source, text).with_context(|| format!("write {}", source.display()))?;
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", source.display()))?;
    copy_program(&source, path)?;
    fs::remove_file(&source).with_context(|| format!("remove {}", source.display()))
}

/// Returns the command line as typed in a shell.
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

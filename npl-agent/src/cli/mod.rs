// SPDX-License-Identifier: Apache-2.0
//! The commands of `npl-agent` except `run`, and the commands of the kubectl plug-in. The commands load the kernel
//! programs, show and check the state of the Node or cluster, remove NPL's kernel state, or retire every Node.

pub mod bundle;
pub mod cleanup;
pub mod doctor;
pub mod echo;
mod facts;
pub mod flows;
pub mod generate;
mod host_ports;
pub mod kubectl;
pub mod load;
pub mod mappings;
pub mod retire;
pub mod status;
mod style;
pub mod top;
pub mod trace;
pub mod why;

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

/// Prints an error and its causes on one line of standard error, after the name of the command.
pub fn report_error(error: &anyhow::Error) {
    // The error is ignored: a failed write to standard error cannot be reported anywhere else.
    drop(writeln!(io::stderr(), "{}: {error:#}", kubectl::command_name(env::args_os().next().as_deref())));
}

/// Prints a remark about the output to standard error, so that the output itself stays readable for programs.
fn note(text: &str) {
    // The error is ignored: a failed write to standard error cannot be reported anywhere else.
    drop(writeln!(io::stderr(), "{}: {text}", kubectl::command_name(env::args_os().next().as_deref())));
}

/// Creates a file that only its owner can read, because the file may contain addresses or payload of clients. An
/// existing file is not overwritten: the command may run as root, and could then destroy any file of the Node.
fn new_private_file(path: &Path) -> io::Result<File> {
    const ONLY_OWNER: u32 = 0o600;
    OpenOptions::new().write(true).create_new(true).mode(ONLY_OWNER).open(path)
}

/// Prints to standard output. A closed pipe is not an error, because `head` and pagers close the pipe early.
fn print(text: &str) -> anyhow::Result<()> {
    write_out(text).map(drop)
}

/// Writes to standard output. Returns `false` if the reader of standard output has closed the pipe.
fn write_out(text: &str) -> anyhow::Result<bool> {
    let mut out = anstream::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value).context("serialize the result as JSON")?;
    text.push('\n');
    print(&text)
}

/// Formats a duration in its two largest units, as `kubectl` shows ages: `45s`, `3m20s`, `5h2m`, `12d4h`.
fn duration(millis: u64) -> String {
    let seconds = millis / 1_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    if days > 0 {
        format!("{days}d{}h", hours % 24)
    } else if hours > 0 {
        format!("{hours}h{}m", minutes % 60)
    } else if minutes > 0 {
        format!("{minutes}m{}s", seconds % 60)
    } else {
        format!("{seconds}s")
    }
}

/// Returns the number of events per second, for `count` events in the time `elapsed`.
#[expect(clippy::cast_precision_loss, reason = "a rate is shown with few digits")]
fn rate(count: u64, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// Formats columns without borders, as `kubectl` does.
fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

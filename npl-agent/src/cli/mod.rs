// SPDX-License-Identifier: Apache-2.0
//! The commands besides `run`, and the output of their results.

pub mod cleanup;
pub mod doctor;
mod facts;
pub mod load;
pub mod mappings;
pub mod status;

use std::io::{self, Write as _};

use anyhow::Context as _;
use comfy_table::{Table, presets::NOTHING};
use serde::Serialize;

/// Prints an error with its causes to standard error, on one line.
pub fn complain(error: &anyhow::Error) {
    // If this fails too, there is no other output.
    drop(writeln!(io::stderr(), "npl-agent: {error:#}"));
}

/// Prints to standard output; a closed pipe is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("write to standard output"),
        _ => Ok(()),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value).context("write as JSON")?;
    text.push('\n');
    print(&text)
}

/// A table without lines, as `kubectl` prints it.
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

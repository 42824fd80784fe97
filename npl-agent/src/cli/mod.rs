// SPDX-License-Identifier: Apache-2.0
//! The commands that load programs, look at the kernel, check the Node or clean up, and how their results are shown.

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

/// Says on standard error what went wrong, with its causes, on one line.
pub fn complain(error: &anyhow::Error) {
    // Nobody is left to tell if even this fails.
    drop(writeln!(io::stderr(), "npl-agent: {error:#}"));
}

/// Prints to standard output; a reader that has gone away is no error.
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

/// Columns without lines, as `kubectl` shows them.
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

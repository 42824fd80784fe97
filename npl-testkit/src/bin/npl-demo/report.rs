// SPDX-License-Identifier: Apache-2.0
//! Prints the demo's steps as text while it runs, or its results as JSON at the end.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use serde_json::{Map, Value};

/// One check of the demo.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim {
    text: String,
    is_so: bool,
    detail: String,
}

/// The output of the demo.
#[derive(Debug)]
pub(crate) struct Report {
    as_text: bool,
    start: Instant,
    steps: u32,
    is_published: bool,
    claims: Vec<Claim>,
    data: Map<String, Value>,
}

impl Report {
    /// Creates a report that prints text while the demo runs if `as_text` is set, and otherwise JSON at the end.
    pub(crate) fn new(as_text: bool) -> Self {
        Self { as_text, start: Instant::now(), steps: 0, is_published: false, claims: Vec::new(), data: Map::new() }
    }

    /// Prints the heading of a step.
    pub(crate) fn step(&mut self, title: &str) -> Result<()> {
        self.steps += 1;
        self.line(&format!("\n{}. {title}", self.steps))
    }

    /// Prints one line.
    pub(crate) fn say(&self, line: &str) -> Result<()> {
        self.line(format!("   {line}").trim_end())
    }

    /// Prints a table.
    pub(crate) fn table(&self, header: &[&str], rows: Vec<Vec<String>>) -> Result<()> {
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header(header.iter().copied());
        table.add_rows(rows);
        for column in table.column_iter_mut() {
            column.set_padding((0, 3));
        }
        table.lines().try_for_each(|line| self.say(line.trim_end()))
    }

    /// Prints the output of a command.
    pub(crate) fn quote(&self, text: &str) -> Result<()> {
        text.lines().try_for_each(|line| self.say(line.trim_end()))
    }

    /// Records and prints the result of a check.
    pub(crate) fn claim(&mut self, text: &str, is_so: bool, detail: impl Into<String>) -> Result<()> {
        let detail = detail.into();
        let mark = if is_so { "ok    " } else { "FAILED" };
        let shown = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
        self.line(&format!("   {mark} {text}{shown}"))?;
        self.claims.push(Claim { text: text.to_owned(), is_so, detail });
        Ok(())
    }

    /// Records data for the JSON output.
    pub(crate) fn record(&mut self, key: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value).with_context(|| format!("format {key} as JSON"))?;
        self.data.insert(key.to_owned(), value);
        Ok(())
    }

    /// Ends the demo. Returns whether all checks passed.
    pub(crate) fn close(mut self) -> Result<bool> {
        let (wrong, all) = (self.wrong(), self.claims.len());
        let seconds = self.start.elapsed().as_secs_f32();
        self.line(&if wrong == 0 {
            format!("\nAll {all} checks passed in {seconds:.1} s.")
        } else {
            format!("\n{wrong} of {all} checks FAILED in {seconds:.1} s.")
        })?;
        self.publish()?;
        Ok(wrong == 0)
    }

    /// Prints the JSON output once; data recorded later is not included.
    pub(crate) fn publish(&mut self) -> Result<()> {
        if self.as_text || self.is_published {
            return Ok(());
        }
        self.is_published = true;
        let claims = std::mem::take(&mut self.claims);
        self.record("claims", &claims)?;
        self.claims = claims;
        self.record("ok", &(self.wrong() == 0))?;
        self.record("seconds", &self.start.elapsed().as_secs_f32())?;
        print(&serde_json::to_string_pretty(&self.data).context("format the report as JSON")?)
    }

    fn wrong(&self) -> usize {
        self.claims.iter().filter(|claim| !claim.is_so).count()
    }

    fn line(&self, line: &str) -> Result<()> {
        if self.as_text { print(line) } else { Ok(()) }
    }
}

/// Formats a time in milliseconds.
pub(crate) fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}

fn print(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        // A closed pipe is no error, because the reader, such as `head`, may exit early.
        Err(err) if err.kind() != io::ErrorKind::BrokenPipe => Err(err).context("write to standard output"),
        _written => Ok(()),
    }
}

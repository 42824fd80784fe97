// SPDX-License-Identifier: Apache-2.0
//! What is said while the story goes on, and the same as data at its end.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use serde_json::{Map, Value};

/// One claim of the story.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim {
    text: String,
    is_so: bool,
    detail: String,
}

/// The story as it is told.
#[derive(Debug)]
pub(crate) struct Report {
    aloud: bool,
    start: Instant,
    chapters: u32,
    is_published: bool,
    claims: Vec<Claim>,
    data: Map<String, Value>,
}

impl Report {
    /// A story that is told in words when `aloud`, and as JSON at the end otherwise.
    pub(crate) fn new(aloud: bool) -> Self {
        Self { aloud, start: Instant::now(), chapters: 0, is_published: false, claims: Vec::new(), data: Map::new() }
    }

    /// Begins a chapter.
    pub(crate) fn chapter(&mut self, title: &str) -> Result<()> {
        self.chapters += 1;
        self.line(&format!("\n{}. {title}", self.chapters))
    }

    /// Says one line.
    pub(crate) fn say(&self, line: &str) -> Result<()> {
        self.line(format!("   {line}").trim_end())
    }

    /// Shows a table.
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

    /// Shows what a command printed.
    pub(crate) fn quote(&self, text: &str) -> Result<()> {
        text.lines().try_for_each(|line| self.say(line.trim_end()))
    }

    /// Notes whether a claim is so.
    pub(crate) fn claim(&mut self, text: &str, is_so: bool, detail: impl Into<String>) -> Result<()> {
        let detail = detail.into();
        let mark = if is_so { "ok    " } else { "NOT SO" };
        let shown = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
        self.line(&format!("   {mark} {text}{shown}"))?;
        self.claims.push(Claim { text: text.to_owned(), is_so, detail });
        Ok(())
    }

    /// Keeps data for the JSON form.
    pub(crate) fn record(&mut self, key: &str, value: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(value).with_context(|| format!("write {key} as JSON"))?;
        self.data.insert(key.to_owned(), value);
        Ok(())
    }

    /// Ends the story; says whether all of its claims are so.
    pub(crate) fn close(mut self) -> Result<bool> {
        let (wrong, all) = (self.wrong(), self.claims.len());
        let seconds = self.start.elapsed().as_secs_f32();
        self.line(&if wrong == 0 {
            format!("\nAll {all} claims are so. ({seconds:.1} s)")
        } else {
            format!("\n{wrong} of {all} claims are NOT SO. ({seconds:.1} s)")
        })?;
        self.publish()?;
        Ok(wrong == 0)
    }

    /// Prints the data, if it is what is asked for, once: what comes after it is not in it.
    pub(crate) fn publish(&mut self) -> Result<()> {
        if self.aloud || self.is_published {
            return Ok(());
        }
        self.is_published = true;
        let claims = std::mem::take(&mut self.claims);
        self.record("claims", &claims)?;
        self.claims = claims;
        self.record("ok", &(self.wrong() == 0))?;
        self.record("seconds", &self.start.elapsed().as_secs_f32())?;
        print(&serde_json::to_string_pretty(&self.data).context("write the report as JSON")?)
    }

    fn wrong(&self) -> usize {
        self.claims.iter().filter(|claim| !claim.is_so).count()
    }

    fn line(&self, line: &str) -> Result<()> {
        if self.aloud { print(line) } else { Ok(()) }
    }
}

/// A time in milliseconds, as the story shows it.
pub(crate) fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}

fn print(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        // Whoever has read enough has closed the pipe.
        Err(err) if err.kind() != io::ErrorKind::BrokenPipe => Err(err).context("write to standard output"),
        _written => Ok(()),
    }
}

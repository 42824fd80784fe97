// SPDX-License-Identifier: Apache-2.0
//! `npl-agent doctor`: finds what keeps node ports of this Node from working, with advice.

use std::process::ExitCode;

use serde::Serialize;

use super::{print, print_json, table};
use crate::{
    cli::facts,
    config::args::{OutputFormat, ViewArgs},
    core::doctor::{Finding, State, examine},
};

/// A finding in the output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    /// The key of the check, which is stable across versions.
    key: &'static str,
    /// `ok`, `warning`, `failed` or `unknown`.
    state: &'static str,
    found: String,
    /// The effect on traffic and the remedy; `None` if the state is ok.
    advice: Option<String>,
}

impl From<&Finding> for Shown {
    fn from(finding: &Finding) -> Self {
        let Finding { key, state, found, advice } = finding.clone();
        Self { key, state: state.as_str(), found, advice }
    }
}

/// Prints the findings; the exit code is 1 if any check failed.
///
/// # Errors
///
/// If the output cannot be written.
pub async fn show(args: &ViewArgs) -> anyhow::Result<ExitCode> {
    let findings = examine(&facts::gather(args).await);
    let shown: Vec<Shown> = findings.iter().map(Shown::from).collect();
    match args.output {
        OutputFormat::Json => print_json(&shown)?,
        OutputFormat::Table => print(&as_text(&shown))?,
    }
    let has_failed = findings.iter().any(|finding| finding.state == State::Failed);
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A table of findings, followed by the advice.
fn as_text(shown: &[Shown]) -> String {
    let rows = shown.iter().map(|row| vec![row.key.to_owned(), row.state.to_owned(), row.found.clone()]);
    let findings = table(&["CHECK", "STATE", "FOUND"], rows);
    let advice = shown.iter().filter_map(|row| Some(format!("{}: {}\n", row.key, row.advice.as_ref()?)));
    let advice: String = advice.collect();
    if advice.is_empty() { findings } else { [findings, advice].join("\n") }
}

// SPDX-License-Identifier: Apache-2.0
//! `npl-agent doctor`: checks the Node for problems that keep node ports from working, and prints a remedy for each
//! problem.

use std::process::ExitCode;

use serde::Serialize;

use super::{print, print_json, table};
use crate::{
    cli::facts,
    config::args::{NodeViewArgs, OutputFormat},
    core::doctor::{Finding, State, examine},
};

/// One row of the output: the result of one check.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FindingRow {
    /// The name of the check. The name of a check does not change between versions, because scripts use the name.
    key: &'static str,
    /// The result of the check: `ok`, `warning`, `failed` or `unknown`.
    state: &'static str,
    found: String,
    /// The effect of the problem on traffic, and the remedy; absent if the check is `ok`.
    advice: Option<String>,
    /// The section of the documentation about the check, as a path in the repository; absent if the check is `ok`.
    page: Option<String>,
}

impl From<&Finding> for FindingRow {
    fn from(finding: &Finding) -> Self {
        let page = finding.page();
        let Finding { key, state, found, advice } = finding.clone();
        Self { key, state: state.as_str(), found, advice, page }
    }
}

/// Prints the findings of all checks. The exit code is 1 if the state of a check is `failed`.
///
/// # Errors
///
/// If standard output cannot be written.
pub async fn show(args: &NodeViewArgs) -> anyhow::Result<ExitCode> {
    let rows = findings(args).await;
    match args.view.output {
        OutputFormat::Json => print_json(&rows)?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_text(&rows))?,
    }
    let has_failed = rows.iter().any(|row| row.state == State::Failed.as_str());
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the findings of all checks.
pub(super) async fn findings(args: &NodeViewArgs) -> Vec<FindingRow> {
    examine(&facts::gather(args).await).iter().map(FindingRow::from).collect()
}

/// Formats a table of all checks, followed by the advice and the page for each check whose state is not `ok`.
fn as_text(rows: &[FindingRow]) -> String {
    let cells = rows.iter().map(|row| vec![row.key.to_owned(), row.state.to_owned(), row.found.clone()]);
    let findings = table(&["CHECK", "STATE", "FOUND"], cells);
    let advice = rows
        .iter()
        .filter_map(|row| Some(format!("{}: {}\n    see {}\n", row.key, row.advice.as_ref()?, row.page.as_ref()?)));
    let advice: String = advice.collect();
    if advice.is_empty() { findings } else { [findings, advice].join("\n") }
}

#[cfg(test)]
mod tests {
    use super::{Finding, FindingRow, State, as_text};

    #[test]
    fn a_finding_that_is_not_ok_shows_its_advice_and_its_page() {
        let found = "found".to_owned();
        let findings = [
            Finding { key: "kernel", state: State::Ok, found: found.clone(), advice: None },
            Finding { key: "btf", state: State::Warning, found, advice: Some("do this".to_owned()) },
        ];
        let rows = findings.each_ref().map(FindingRow::from);
        let text = as_text(&rows);
        assert!(text.ends_with("\n\nbtf: do this\n    see docs/reference/doctor.md#btf\n"), "{text}");
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["page"], serde_json::Value::Null);
        assert_eq!(json[1]["page"], "docs/reference/doctor.md#btf");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The result of `kubectl npl test`. For each failed path, the result includes the findings of `npl-agent doctor` on
//! the Node that serves the mapping.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::site::Site;
use crate::{
    cli::{
        kubectl::{
            Kubectl,
            nodes::{exec, for_each},
        },
        print, print_json, table,
    },
    config::args::OutputFormat,
    core::{
        pages::url,
        path_test::{Outcome, Row, verdict},
        verdict::HealthVerdict,
    },
};

/// The result of `kubectl npl test`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    verdict: HealthVerdict,
    rows: Vec<Row>,
    /// The output of `npl-agent doctor` for each Node that serves the mapping of a failed path.
    doctor: Vec<Diagnosis>,
}

/// The findings of `npl-agent doctor` on one Node, except findings with the state `ok`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Diagnosis {
    node: String,
    findings: Vec<Finding>,
    /// The reason why `npl-agent doctor` gave no result; absent if it gave a result.
    error: Option<String>,
}

/// A finding as `npl-agent doctor` prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Finding {
    key: String,
    state: String,
    found: String,
    advice: Option<String>,
    /// The section of the documents about the check, as a path in the repository.
    page: Option<String>,
}

impl Finding {
    /// Formats the advice and the URL of the section. The path in the repository is not sufficient, because the reader
    /// may have no copy of the documents.
    fn advice_with_page(&self) -> Option<String> {
        let page = self.page.as_ref().map(|page| format!("    see {}\n", url(page)));
        Some(format!("{}: {}\n{}", self.key, self.advice.as_ref()?, page.unwrap_or_default()))
    }
}

impl Report {
    /// Creates the result of the test. Runs `npl-agent doctor` on each Node with a failed path.
    pub(super) fn new(kubectl: Kubectl<'_>, sites: &[Site], rows: Vec<Row>) -> Self {
        let failed: BTreeSet<&str> =
            rows.iter().filter(|row| row.result == Outcome::Failed).map(|row| row.node.as_str()).collect();
        let nodes: Vec<String> = failed.into_iter().map(str::to_owned).collect();
        let doctor = for_each(&nodes, |node| {
            let (findings, error) = match examine(kubectl, sites, node) {
                Ok(findings) => (findings, None),
                Err(error) => (Vec::new(), Some(format!("{error:#}"))),
            };
            Diagnosis { node: node.to_owned(), findings, error }
        });
        Self { verdict: verdict(&rows), rows, doctor }
    }

    pub(super) const fn verdict(&self) -> HealthVerdict {
        self.verdict
    }

    pub(super) fn print(&self, format: OutputFormat) -> anyhow::Result<()> {
        match format {
            OutputFormat::Json => print_json(self),
            OutputFormat::Table | OutputFormat::Wide => print(&self.as_text()),
        }
    }

    fn as_text(&self) -> String {
        let dash = || "-".to_owned();
        let cells = self.rows.iter().map(|row| {
            // A path whose name has an arrow already names the Node, so the Node is not added.
            let path = if row.path.contains('→') { row.path.clone() } else { format!("{} ({})", row.path, row.node) };
            let protocol = row.protocol.map_or_else(dash, |it| it.to_string());
            let family = row.family.map_or_else(dash, |it| it.to_string());
            vec![path, protocol, family, row.result.to_string(), row.detail.clone()]
        });
        let mut text = table(&["PATH", "PROTOCOL", "FAMILY", "RESULT", "DETAIL"], cells);
        let count = |result| self.rows.iter().filter(|row| row.result == result).count();
        let counts = [Outcome::Passed, Outcome::Failed, Outcome::NotTried, Outcome::Unknown];
        let counts: Vec<String> = counts.into_iter().map(|it| format!("{} {it}", count(it))).collect();
        text = [text, counts.join(", ")].join("\n") + "\n";
        for diagnosis in &self.doctor {
            text += &diagnosis.as_text();
        }
        text
    }
}

impl Diagnosis {
    fn as_text(&self) -> String {
        let node = &self.node;
        if let Some(error) = &self.error {
            return format!("\nnpl-agent doctor on {node} does not answer: {error}\n");
        }
        if self.findings.is_empty() {
            return format!(
                "\nnpl-agent doctor on {node} finds nothing wrong: continue with `kubectl npl on {node} status`\n"
            );
        }
        let cells = self.findings.iter().map(|it| vec![it.key.clone(), it.state.clone(), it.found.clone()]);
        let advice = self.findings.iter().filter_map(Finding::advice_with_page);
        format!("\nnpl-agent doctor on {node}:\n{}", table(&["CHECK", "STATE", "FOUND"], cells))
            + &advice.collect::<String>()
    }
}

fn examine(kubectl: Kubectl<'_>, sites: &[Site], node: &str) -> anyhow::Result<Vec<Finding>> {
    let Some(site) = sites.iter().find(|site| site.node == node) else { return Ok(Vec::new()) };
    let (_code, text) = exec(kubectl, &site.agent, &["doctor", "--output", "json"])?;
    let mut findings: Vec<Finding> = serde_json::from_str(&text)?;
    findings.retain(|finding| finding.state != "ok");
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        model::{Family, Protocol},
        pages::of_check,
    };

    fn report() -> Report {
        let failed = Row {
            protocol: Some(Protocol::Tcp),
            family: Some(Family::V4),
            ..Row::about("outside → node-1", "node-1", Outcome::Failed, "192.0.2.1:61000: connect: no answer")
        };
        let rows = vec![Row::about("publication", "node-1", Outcome::Passed, "4 node ports"), failed];
        let finding = serde_json::json!({
            "key": "forward_chains",
            "state": "warning",
            "found": "a chain drops",
            "advice": "admit the Pods",
            "page": of_check("forward_chains"),
        });
        let finding = serde_json::from_value(finding).unwrap();
        let doctor = vec![Diagnosis { node: "node-1".to_owned(), findings: vec![finding], error: None }];
        Report { verdict: verdict(&rows), rows, doctor }
    }

    #[test]
    fn the_table_has_a_row_for_each_path_and_the_doctors_advice_and_page() {
        let text = report().as_text();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("publication (node-1)") && lines[1].ends_with("4 node ports"), "{text}");
        assert!(lines[2].starts_with("outside → node-1") && lines[2].contains("tcp        IPv4     FAILED"), "{text}");
        assert_eq!(lines[4], "1 passed, 1 FAILED, 0 not tried, 0 unknown");
        let page = url("docs/reference/doctor.md#forward_chains");
        assert!(text.ends_with(&format!("forward_chains: admit the Pods\n    see {page}\n")), "{text}");
    }

    #[test]
    fn json_has_the_verdict_and_the_results_in_lower_case() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["verdict"], "at-risk");
        assert_eq!(json["rows"][1]["result"], "failed");
        assert_eq!(json["rows"][0]["protocol"], serde_json::Value::Null);
        assert_eq!(json["doctor"][0]["findings"][0]["key"], "forward_chains");
        assert_eq!(json["doctor"][0]["findings"][0]["page"], "docs/reference/doctor.md#forward_chains");
    }
}

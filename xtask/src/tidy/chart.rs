// SPDX-License-Identifier: Apache-2.0
//! Checks that the chart has the version of the workspace, and that each value of the chart has a schema and a comment.
//! This module does not check the rendered manifests, because rendering needs Helm: `cargo xtask chart --check`
//! compares the manifests with the chart.

use serde_json::Value;

use super::Finding;
use super::tree::Tree;
use crate::chart::values;

const CHART: &str = "deploy/chart/npl/Chart.yaml";
const VALUES: &str = "deploy/chart/npl/values.yaml";
const SCHEMA: &str = "deploy/chart/npl/values.schema.json";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let (Some(chart), Some(yaml), Some(schema)) = (tree.text(CHART), tree.text(VALUES), tree.text(SCHEMA)) else {
        // A source tree without a chart, as in the unit tests, is accepted.
        return Vec::new();
    };
    let mut findings = Vec::new();
    let version = env!("CARGO_PKG_VERSION");
    for line in [format!("version: {version}"), format!("appVersion: {version}")] {
        if !chart.lines().any(|found| found == line) {
            findings.push(Finding::error(CHART, format!("the chart lacks `{line}`, the version of the workspace")));
        }
    }
    let entries = values::entries(yaml);
    findings.extend(
        values::undocumented(&entries)
            .map(|it| Finding::error(VALUES, format!("the value `{}` has no comment", it.path))),
    );
    match serde_json::from_str::<Value>(schema) {
        Ok(schema) => findings.extend(
            values::without_schema(&entries, &schema)
                .map(|it| Finding::error(SCHEMA, format!("the schema does not describe `{}`", it.path))),
        ),
        Err(error) => findings.push(Finding::error(SCHEMA, format!("the schema is not valid JSON: {error}"))),
    }
    if tree.text(values::PAGE) != Some(values::page(yaml).as_str()) {
        findings.push(Finding::error(values::PAGE, format!("the page differs from {VALUES}: run `cargo xtask docs`")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{CHART, SCHEMA, Tree, VALUES, check, values};

    const YAML: &str = "# A value.\na: 1\n";

    fn places(chart: &str, schema: &str, page: &str) -> Vec<String> {
        let tree = Tree::of(&[(CHART, chart), (VALUES, YAML), (SCHEMA, schema), (values::PAGE, page)]);
        check(&tree).into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn another_version_a_missing_schema_and_an_old_page_are_found() {
        let chart = concat!("version: ", env!("CARGO_PKG_VERSION"), "\nappVersion: ", env!("CARGO_PKG_VERSION"));
        let (schema, page) = (r#"{"properties": {"a": {"type": "integer"}}}"#, values::page(YAML));
        assert!(places(chart, schema, &page).is_empty());
        assert_eq!(places("version: 0.0.1", schema, &page), [CHART, CHART]);
        assert_eq!(places(chart, r#"{"properties": {}}"#, &page), [SCHEMA]);
        assert_eq!(places(chart, schema, "old"), [values::PAGE]);
    }
}

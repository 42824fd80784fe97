// SPDX-License-Identifier: Apache-2.0
//! The compatibility page has a line for everything that it speaks of, and each test that it names exists.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::Finding;
use super::tree::Tree;

const PAGE: &str = "docs/antrea-compatibility.md";

/// How lines are numbered: what comes before the number, and which numbers there are.
const LINES: [(&str, RangeInclusive<u32>); 3] = [("", 1..=71), ("B", 1..=16), ("C-", 1..=21)];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.text(PAGE) else { return vec![Finding::error(PAGE, "the page is not there")] };
    let tests: BTreeSet<&str> = tree.below("", ".rs").flat_map(|(_, text)| test_names(text)).collect();
    let mut findings = Vec::new();
    for (prefix, numbers) in LINES {
        for line in numbers.map(|number| format!("{prefix}{number}")) {
            match page.lines().filter(|row| row.starts_with(&format!("| {line} |"))).count() {
                1 => {}
                count => findings.push(Finding::error(PAGE, format!("{line} has {count} lines"))),
            }
        }
    }
    let missing = page.lines().flat_map(named_tests).filter(|name| !tests.contains(name));
    findings.extend(missing.map(|name| Finding::error(PAGE, format!("no test is named `{name}`"))));
    findings
}

/// The names in the last column of a table's row.
fn named_tests(row: &str) -> impl Iterator<Item = &str> {
    let column = row.strip_suffix(" |").and_then(|row| row.rsplit_once(" | ")).map_or("", |(_, column)| column);
    column.split('`').skip(1).step_by(2)
}

/// Of functions; those that are told on a real cluster are public to their list.
fn test_names(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let line = line.trim();
        let line = line.strip_prefix("pub(crate) ").unwrap_or(line);
        line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")?.split('(').next()
    })
}

#[cfg(test)]
mod tests {
    use super::{LINES, PAGE, Tree, check};

    fn page(test: &str) -> String {
        let lines = LINES.into_iter().flat_map(|(prefix, numbers)| numbers.map(move |number| (prefix, number)));
        let rows: Vec<String> =
            lines.map(|(prefix, number)| format!("| {prefix}{number} | `text` | `{test}` |\n")).collect();
        rows.concat()
    }

    fn rules(page: &str) -> Vec<String> {
        let test = "    #[test]\n    async fn is_there() {\n";
        check(&Tree::of(&[(PAGE, page), ("npl-agent/src/a.rs", test)])).into_iter().map(|found| found.rule).collect()
    }

    #[test]
    fn a_whole_page_with_tests_that_exist_is_right() {
        assert_eq!(rules(&page("is_there")), Vec::<String>::new());
    }

    #[test]
    fn a_test_that_does_not_exist_and_a_missing_line_are_found() {
        assert_eq!(rules(&page("is_there").replacen("is_there", "is_gone", 1)), ["no test is named `is_gone`"]);
        assert_eq!(rules(&page("is_there").replace("| B7 |", "| B6 |")), ["B6 has 2 lines", "B7 has 0 lines"]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Checks the documents that list the tests of requirements: every requirement must have a row, and every test that a
//! row names must exist.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::Finding;
use super::tree::Tree;

/// A document with a table of requirements, and the names that the table's rows must have.
struct Page {
    path: &'static str,
    lines: &'static [Lines],
}

/// The names of a table's rows: the prefix, the minimum number of digits after the prefix, and the range of the
/// numbers.
struct Lines {
    prefix: &'static str,
    digits: usize,
    numbers: RangeInclusive<u32>,
}

const PAGES: [Page; 4] = [
    Page {
        path: "docs/antrea-compatibility.md",
        lines: &[
            Lines { prefix: "", digits: 1, numbers: 1..=71 },
            Lines { prefix: "B", digits: 1, numbers: 1..=16 },
            Lines { prefix: "C-", digits: 1, numbers: 1..=21 },
        ],
    },
    Page { path: "docs/features.md", lines: &[Lines { prefix: "", digits: 1, numbers: 1..=60 }] },
    Page { path: "docs/traps.md", lines: &[Lines { prefix: "P-", digits: 2, numbers: 1..=80 }] },
    Page {
        path: "docs/field-reports.md",
        lines: &[
            Lines { prefix: "D-", digits: 1, numbers: 1..=14 },
            Lines { prefix: "A-", digits: 1, numbers: 1..=17 },
        ],
    },
];

impl Lines {
    fn names(&self) -> impl Iterator<Item = String> {
        let Self { prefix, digits, numbers } = self;
        numbers.clone().map(move |number| format!("{prefix}{number:0digits$}"))
    }
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let tests: BTreeSet<&str> = tree.below("", ".rs").flat_map(|(_, text)| test_names(text)).collect();
    PAGES.iter().flat_map(|page| check_page(tree, page, &tests)).collect()
}

fn check_page(tree: &Tree, Page { path, lines }: &Page, tests: &BTreeSet<&str>) -> Vec<Finding> {
    let Some(page) = tree.text(path) else { return vec![Finding::error(*path, "the document is missing")] };
    let mut findings = Vec::new();
    for line in lines.iter().flat_map(Lines::names) {
        match page.lines().filter(|row| row_names(row).any(|name| name == line)).count() {
            1 => {}
            count => findings.push(Finding::error(*path, format!("{line} must have one row, but has {count}"))),
        }
    }
    let missing = page.lines().flat_map(named_tests).filter(|name| !tests.contains(name));
    findings.extend(missing.map(|name| Finding::error(*path, format!("no test is named `{name}`"))));
    findings
}

/// Returns the names of requirements in the first column of a table row.
fn row_names(row: &str) -> impl Iterator<Item = &str> {
    let column = row.strip_prefix("| ").and_then(|row| row.split_once(" |")).map_or("", |(column, _)| column);
    column.split(", ")
}

/// Returns the names of tests in the last column of a table row.
fn named_tests(row: &str) -> impl Iterator<Item = &str> {
    let column = row.strip_suffix(" |").and_then(|row| row.rsplit_once(" | ")).map_or("", |(_, column)| column);
    column.split('`').skip(1).step_by(2)
}

/// Returns the names of all functions in a source file that may be tests. Tests of the real cluster are `pub(crate)`
/// functions.
fn test_names(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let line = line.trim();
        let line = line.strip_prefix("pub(crate) ").unwrap_or(line);
        line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")?.split('(').next()
    })
}

#[cfg(test)]
mod tests {
    use super::{Lines, PAGES, Page, Tree, check};

    fn content(page: &Page, test: &str) -> String {
        let lines = page.lines.iter().flat_map(Lines::names);
        let rows: Vec<String> = lines.map(|line| format!("| {line} | `text` | `{test}` |\n")).collect();
        rows.concat()
    }

    /// Returns the findings in the documents after `change` has modified each document.
    fn rules(change: impl Fn(String) -> String) -> Vec<String> {
        let pages = PAGES.iter().map(|page| (page.path, change(content(page, "is_there")))).collect::<Vec<_>>();
        let mut files: Vec<_> = pages.iter().map(|(path, text)| (*path, text.as_str())).collect();
        files.push(("npl-agent/src/a.rs", "    #[test]\n    async fn is_there() {\n"));
        check(&Tree::of(&files)).into_iter().map(|found| found.rule).collect()
    }

    #[test]
    fn complete_documents_with_existing_tests_are_accepted() {
        assert_eq!(rules(|page| page), Vec::<String>::new());
    }

    #[test]
    fn a_missing_test_and_a_missing_row_are_found() {
        let missing = "no test is named `is_gone`";
        assert_eq!(rules(|page| page.replacen("is_there", "is_gone", 1)), [missing; 4]);
        assert_eq!(
            rules(|page| page.replace("| B7 |", "| B6 |")),
            ["B6 must have one row, but has 2", "B7 must have one row, but has 0"]
        );
        assert_eq!(
            rules(|page| if page.contains("| B7 |") { page } else { page.replace("| 60 |", "| 61 |") }),
            ["60 must have one row, but has 0"]
        );
        assert_eq!(rules(|page| page.replace("| P-07 |", "| P-7 |")), ["P-07 must have one row, but has 0"]);
        assert_eq!(rules(|page| page.replace("| A-2 |", "| F-3, A-2 |")), Vec::<String>::new());
        assert_eq!(rules(|page| page.replace("| A-2 |", "| A-22 |")), ["A-2 must have one row, but has 0"]);
    }
}

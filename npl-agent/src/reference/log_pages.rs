// SPDX-License-Identifier: Apache-2.0
//! Tests that the first field of each `warn!` and `error!` of the agent and the feed is `see`, the URL of a section of
//! the documents for operators. A comment `// No page: …` on the line before exempts a call.

use std::{fs, path::Path};

/// The beginning of a comment that states why a warning names no section.
const EXEMPT: &str = "// No page: ";

/// Returns the lines at which a text calls `warn!` or `error!` without the field `see` as the first field, and without
/// a comment with the reason on the line before.
fn calls_without_page(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for name in ["warn!(", "error!("] {
        for (at, _) in text.match_indices(name) {
            let (before, after) = (text.get(..at).unwrap_or_default(), text.get(at + name.len()..).unwrap_or_default());
            let (earlier, begin) = before.rsplit_once('\n').unwrap_or(("", before));
            let is_other_macro = begin.ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let is_comment = begin.trim_start().starts_with("//");
            let is_exempt = earlier.lines().next_back().is_some_and(|line| line.trim_start().starts_with(EXEMPT));
            if !is_other_macro && !is_comment && !is_exempt && !after.trim_start().starts_with("see = ") {
                found.push(before.lines().count());
            }
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn calls_without_a_page_are_found() {
    let text = "fn f() {
    warn!(see = pages::url(pages::EVENTS), err, \"a\");
    tracing::warn!(\"b\");
    // No page: this is a test.
    error!(\"c\");
    // warn!(\"d\")
    my_warn!(\"e\");
    error!(
        see = pages::url(pages::EVENTS),
        \"f\"
    );
    error!(
        err,
        \"g\"
    );
}
";
    assert_eq!(calls_without_page(text), [3, 12]);
}

/// Log lines of a level below `warn` name no section, because an operator need not act on them.
#[test]
fn every_warning_and_error_of_the_log_names_its_page() {
    let sources = ["src", "../npl-feed/src"].map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let (mut folders, mut missing, mut calls) = (sources.to_vec(), Vec::new(), 0);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("reference/log_pages.rs") {
                let text = fs::read_to_string(&path).unwrap();
                calls += text.matches("see = pages::url(").count();
                missing.extend(calls_without_page(&text).into_iter().map(|line| format!("{}:{line}", path.display())));
            }
        }
    }
    assert!(calls > 40, "only {calls} calls were found");
    assert!(
        missing.is_empty(),
        "begin the fields of these warnings with `see = pages::url(…)`, or state why operators need not act in a \
         comment `{EXEMPT}…` on the line before: {missing:#?}"
    );
}

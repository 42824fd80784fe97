// SPDX-License-Identifier: Apache-2.0
//! Checks every reason under which the kernel programs count packets: the name of a test must contain the reason, and
//! the reference must describe the reason.

use std::collections::BTreeSet;

use super::Finding;
use super::rust_code::identifiers;
use super::tree::Tree;

const REASONS: &str = "npl-common/src/reason.rs";
const TESTS: &str = "npl-testkit/tests/";

/// The document that must name every reason: the generated reference, which has the causes and remedies.
const DOCUMENT: &str = "docs/reference/reasons.md";

/// The reasons that need no test, because no test can provoke them; each with an explanation.
const UNPROVOKED: [(&str, &str); 1] =
    [("rewrite_failed", "the headers were read before, so that a write fails only if the kernel lacks memory")];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(declaration) = tree.text(REASONS) else {
        return vec![Finding::error(REASONS, "the file is missing: correct `REASONS` in xtask/src/tidy/reasons.rs")];
    };
    let names = names(declaration);
    if names.is_empty() {
        return vec![Finding::error(REASONS, "the file contains no reason in the form `Variant = 0, \"name\";`")];
    }
    let tests: Vec<&str> = tree.below(TESTS, ".rs").flat_map(|(_, text)| test_names(text)).collect();
    let is_excused = |name: &str| UNPROVOKED.iter().any(|(excused, _why)| *excused == name);
    let untested = names.iter().filter(|name| !is_excused(name) && !tests.iter().any(|test| test.contains(*name)));
    let untested =
        untested.map(|name| Finding::error(REASONS, format!("no test in {TESTS} has the reason `{name}` in its name")));
    untested.chain(undocumented(tree, DOCUMENT, &names)).collect()
}

/// Reports the reasons that a document does not name. Reports nothing if the document does not exist.
fn undocumented(tree: &Tree, document: &str, names: &[&str]) -> Vec<Finding> {
    let Some(text) = tree.text(document) else { return Vec::new() };
    let documented: BTreeSet<&str> = identifiers(text).collect();
    let missing = names.iter().filter(|name| !documented.contains(*name));
    let rules = missing.map(|name| format!("the reason `{name}` of {REASONS} is missing: run `cargo xtask docs`"));
    rules.map(|rule| Finding::error(document, rule)).collect()
}

/// Reads the names of reasons from lines such as `NoMapping = 0, "no_mapping";`.
fn names(declaration: &str) -> Vec<&str> {
    declaration.lines().filter_map(reason_name).collect()
}

fn reason_name(line: &str) -> Option<&str> {
    let (_variant, rest) = line.trim().split_once(" = ")?;
    let (number, name) = rest.split_once(", ")?;
    number.parse::<u32>().ok()?;
    name.strip_prefix('"')?.strip_suffix("\";")
}

fn test_names(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim().strip_prefix("fn ")?.split('(').next())
}

#[cfg(test)]
mod tests {
    use super::{DOCUMENT, REASONS, Tree, check};

    const DECLARATION: &str =
        "reasons! {\n    /// Text.\n    NoMapping = 0, \"no_mapping\";\n    Truncated = 2, \"truncated\";\n}";

    #[test]
    fn a_reason_without_a_test_is_found() {
        let tests = "#[test]\nfn no_mapping_is_left_to_the_host() {\n}";
        let findings = check(&Tree::of(&[(REASONS, DECLARATION), ("npl-testkit/tests/kernel/a.rs", tests)]));
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].rule.contains("`truncated`"));
    }

    #[test]
    fn a_reason_that_the_document_does_not_name_is_found() {
        let tests = ("npl-testkit/tests/kernel/a.rs", "fn no_mapping_and_truncated() {");
        let found = |text| check(&Tree::of(&[(REASONS, DECLARATION), tests, (DOCUMENT, text)]));
        assert!(found("| `no_mapping` | a |\n| `truncated` | b |").is_empty());
        let findings = found("| `no_mapping` | a |\n| `truncated_2` | b |");
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].rule.contains("`truncated`") && findings[0].place == DOCUMENT);
    }

    #[test]
    fn a_declaration_that_cannot_be_read_is_found() {
        assert_eq!(check(&Tree::of(&[(REASONS, "enum Reason {}")])).len(), 1);
        assert_eq!(check(&Tree::of(&[])).len(), 1);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask tidy`: checks the repository's own rules. A test of this crate checks the same rules, so that `cargo
//! test` finds a violation before continuous integration does.

mod chart;
mod documents;
mod fuzz_lock;
mod homonyms;
mod layers;
mod names;
mod picture;
mod proofs;
mod prose;
mod purity;
mod reasons;
mod rust_code;
mod source;
mod tree;

use anyhow::{Result, bail};

use crate::{paths, process};
use tree::Tree;

/// Arguments of `cargo xtask tidy`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// A line or file that violates one of the repository's rules.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    place: String,
    rule: String,
    severity: Severity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// The file exceeds a recommended limit. This finding does not make the check fail.
    Note,
    Error,
}

impl Finding {
    fn error(place: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { place: place.into(), rule: rule.into(), severity: Severity::Error }
    }

    fn note(place: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { severity: Severity::Note, ..Self::error(place, rule) }
    }
}

/// Checks every rule and prints the findings.
pub(crate) fn run(_options: &Options) -> Result<()> {
    process::say("tidy: the repository's own rules");
    let findings = findings(&Tree::read(&paths::root())?);
    for Finding { place, rule, severity } in &findings {
        let word = if *severity == Severity::Error { "error" } else { "note" };
        process::detail(&format!("{word}: {place}: {rule}"));
    }
    match findings.iter().filter(|finding| finding.severity == Severity::Error).count() {
        0 => Ok(()),
        count => bail!("violations of the repository's rules: {count} (the lines marked `error` above)"),
    }
}

fn findings(tree: &Tree) -> Vec<Finding> {
    let rules = [
        source::check,
        purity::check,
        layers::check,
        names::check,
        homonyms::check,
        reasons::check,
        documents::check,
        proofs::check,
        prose::check,
        chart::check,
        picture::check,
        fuzz_lock::check,
    ];
    rules.iter().flat_map(|check| check(tree)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Finding, Severity, Tree, findings, paths};

    /// Returns, as text, the findings of one check in a tree with these files.
    pub(super) fn found(check: fn(&Tree) -> Vec<Finding>, files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).into_iter().map(|it| format!("{}: {}", it.place, it.rule)).collect()
    }

    #[test]
    fn the_repository_keeps_its_rules() {
        let mut findings = findings(&Tree::read(&paths::root()).unwrap());
        findings.retain(|finding| finding.severity == Severity::Error);
        assert!(findings.is_empty(), "{findings:#?}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Checks that the fuzz targets are built with the same versions of dependencies as the agent. The folder `fuzz/` is a
//! workspace of its own, with its own `Cargo.lock`.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::tree::Tree;

const LOCK: &str = "Cargo.lock";
const FUZZ_LOCK: &str = "fuzz/Cargo.lock";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let (Some(main), Some(fuzz)) = (tree.text(LOCK), tree.text(FUZZ_LOCK)) else { return Vec::new() };
    let (main, fuzz) = (versions(main), versions(fuzz));
    let differ = |(name, found): (&String, &BTreeSet<String>)| {
        let expected = main.get(name).filter(|expected| !found.is_subset(expected))?;
        Some(format!("{name} {} instead of {}", list(found), list(expected)))
    };
    let different: Vec<String> = fuzz.iter().filter_map(differ).collect();
    let rule = |different: &str| {
        format!(
            "versions differ from {LOCK}: {different}; copy {LOCK} to {FUZZ_LOCK} and run \
             `cargo metadata --manifest-path fuzz/Cargo.toml`"
        )
    };
    if different.is_empty() { Vec::new() } else { vec![Finding::error(FUZZ_LOCK, rule(&different.join(", ")))] }
}

/// Returns the versions of each package in a lock file.
fn versions(lock: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let quoted = |line: &str, key: &str| Some(line.strip_prefix(key)?.trim_matches('"').to_owned());
    let mut lines = lock.lines().peekable();
    while let Some(line) = lines.next() {
        let version = lines.peek().and_then(|next| quoted(next, "version = "));
        if let (Some(name), Some(version)) = (quoted(line, "name = "), version) {
            versions.entry(name).or_default().insert(version);
        }
    }
    versions
}

fn list(versions: &BTreeSet<String>) -> String {
    versions.iter().map(String::as_str).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::tests::found;

    fn lock(packages: &[(&str, &str)]) -> String {
        let text =
            |(name, version): &(&str, &str)| format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        packages.iter().map(text).collect()
    }

    #[test]
    fn a_dependency_of_the_fuzz_targets_has_the_version_of_the_agent() {
        let main = lock(&[("kube", "5.0.0"), ("syn", "2.0.1"), ("syn", "3.0.0"), ("aya", "0.14.0")]);
        let same = lock(&[("kube", "5.0.0"), ("syn", "3.0.0"), ("libfuzzer-sys", "0.4.13")]);
        assert!(found(check, &[("Cargo.lock", &main), ("fuzz/Cargo.lock", &same)]).is_empty());
        let other = lock(&[("kube", "5.0.1"), ("syn", "3.0.0")]);
        let findings = found(check, &[("Cargo.lock", &main), ("fuzz/Cargo.lock", &other)]);
        assert!(findings[0].contains("kube 5.0.1 instead of 5.0.0;"), "{findings:?}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Links in documents have a target, and documents repeat values of the code correctly.

use super::Finding;
use super::tree::Tree;

/// A value in code or configuration, and the documents that repeat it.
struct Fact {
    name: &'static str,
    file: &'static str,
    /// The text before the value; a quotation mark ends the value.
    before: &'static str,
    documents: &'static [&'static str],
}

const FACTS: [Fact; 3] = [
    Fact { name: "Rust version", file: "rust-toolchain.toml", before: "channel = \"", documents: &["CONTRIBUTING.md"] },
    Fact {
        name: "oldest kernel",
        file: "npl-agent/src/datapath/preflight.rs",
        before: "KERNEL_FLOOR_TEXT: &str = \"",
        documents: &["README.md", "ARCHITECTURE.md"],
    },
    Fact {
        name: "port range",
        file: "npl-agent/src/config/args.rs",
        before: "value_name = \"START-END\", default_value = \"",
        documents: &["README.md"],
    },
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<_> = FACTS.iter().flat_map(|fact| check_fact(tree, fact)).collect();
    for (path, text) in tree.below("", ".md") {
        findings.extend(
            links(text)
                .filter(|link| !has_target(tree, path, link))
                .map(|link| Finding::error(path, format!("the link `{link}` has no target"))),
        );
    }
    findings
}

fn check_fact(tree: &Tree, fact: &Fact) -> Vec<Finding> {
    let found =
        tree.text(fact.file).and_then(|text| text.split_once(fact.before)).and_then(|(_, rest)| rest.split('"').next());
    let Some(value) = found else {
        return vec![Finding::error(
            fact.file,
            format!("this rule finds no {} in the file: correct the rule", fact.name),
        )];
    };
    let silent = fact.documents.iter().filter(|path| !tree.text(path).is_some_and(|text| text.contains(value)));
    silent.map(|path| Finding::error(*path, format!("the document must contain the {} `{value}`", fact.name))).collect()
}

/// The targets of `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn has_target(tree: &Tree, document: &str, link: &str) -> bool {
    if link.contains("://") || link.starts_with("mailto:") {
        return true;
    }
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() { Some(document.to_owned()) } else { resolve(document, file) };
    let Some(target) = target else { return false };
    if heading.is_empty() {
        return tree.has(&target);
    }
    tree.text(&target).is_some_and(|text| headings(text).any(|known| known == heading))
}

/// The path of a link from the root, or none if the target is outside of the repository.
fn resolve(document: &str, link: &str) -> Option<String> {
    let mut folders: Vec<&str> = document.split('/').collect();
    folders.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(folders.pop()?),
            name => folders.push(name),
        }
    }
    Some(folders.join("/"))
}

/// Headings in the form of links to them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with('#')).map(|line| {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        words
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::{Fact, Tree, check_fact, has_target};

    #[test]
    fn targets_of_links_are_files_folders_and_headings() {
        let tree = Tree::of(&[("README.md", "# Two Words: here"), ("docs/a.md", ""), ("docs/design/b.md", "")]);
        for link in ["../README.md", "a.md", "./design", "../README.md#two-words-here", "https://example.org/x"] {
            assert!(has_target(&tree, "docs/a.md", link), "{link}");
        }
        for link in ["README.md", "../../x", "design/c.md", "../README.md#two", "#none"] {
            assert!(!has_target(&tree, "docs/a.md", link), "{link}");
        }
    }

    #[test]
    fn a_document_with_another_number_is_found() {
        let fact = Fact { name: "floor", file: "a.rs", before: "FLOOR = \"", documents: &["README.md"] };
        let findings = |code, text| check_fact(&Tree::of(&[("a.rs", code), ("README.md", text)]), &fact).len();
        assert_eq!(findings("const FLOOR = \"5.10\";", "Linux 5.10"), 0);
        assert_eq!(findings("const FLOOR = \"5.15\";", "Linux 5.10"), 1);
        assert_eq!(findings("", "Linux 5.10"), 1);
    }
}

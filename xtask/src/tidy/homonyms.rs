// SPDX-License-Identifier: Apache-2.0
//! Checks that each name of a public type is declared once per crate, so that a search for the name finds one type.
//!
//! Two `pub` or `pub(crate)` types of one crate must not have the same name, apart from the exceptions below. Private
//! and `pub(super)` types may share a name.

use std::collections::BTreeMap;

use super::rust_code::{identifiers, without_comments, without_tests};
use super::tree::Tree;
use super::{Finding, layers};

/// The source folders of the crates that are shipped, to which the rule applies.
const CRATES: [&str; 4] = ["npl-common/src/", "npl-ebpf/src/", "npl-agent/src/", "npl-feed/src/"];

/// The exceptions from the rule: a crate, and the name of a type that the crate may declare twice. In `net/`, the
/// modules of both address families have a type of this name.
const ALLOWED: [(&str, &str); 2] = [("npl-ebpf/src/", "Tail"), ("npl-ebpf/src/", "TtlFields")];

const KINDS: [&str; 5] = ["struct", "enum", "union", "trait", "type"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    CRATES.iter().flat_map(|source| check_crate(tree, source)).collect()
}

fn check_crate(tree: &Tree, source: &'static str) -> Vec<Finding> {
    let mut first: BTreeMap<String, String> = BTreeMap::new();
    let mut findings = Vec::new();
    for (path, _module, text) in layers::code_files(tree, source) {
        let code = without_comments(text);
        let lines = without_tests(&code).lines().scan(false, |is_in_macro, line| Some(module_level(line, is_in_macro)));
        for (index, name) in lines.enumerate().filter_map(|(index, line)| Some((index, declared(line)?))) {
            if ALLOWED.contains(&(source, name)) {
                continue;
            }
            let place = format!("{path}:{}", index + 1);
            match first.get(name) {
                Some(other) => {
                    let rule = format!("the public type `{name}` exists already in {other}: choose another name");
                    findings.push(Finding::error(place, rule));
                }
                None => drop(first.insert(name.to_owned(), place)),
            }
        }
    }
    findings
}

/// Removes the indentation of a line within the macro `map_type!`, because this macro declares its type at the level of
/// the module.
fn module_level<'a>(line: &'a str, is_in_macro: &mut bool) -> &'a str {
    *is_in_macro = line == "map_type! {" || (*is_in_macro && line != "}");
    if *is_in_macro { line.strip_prefix("    ").unwrap_or(line) } else { line }
}

/// Returns the name of the public type that a line declares at the level of the module.
fn declared(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ").or_else(|| line.strip_prefix("pub(crate) "))?;
    let mut words = identifiers(rest).skip_while(|word| *word == "unsafe");
    words.next().filter(|word| KINDS.contains(word)).and(words.next())
}

#[cfg(test)]
mod tests {
    use super::check;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        super::super::tests::found(check, files)
    }

    #[test]
    fn a_second_public_type_of_the_same_name_is_found() {
        let files = [
            ("npl-agent/src/core/doctor/mod.rs", "/// Facts.\npub struct Facts {\n    pub kernel: u8,\n}"),
            ("npl-agent/src/core/verdict/mod.rs", "pub(crate) type Facts<'a> = &'a u8;"),
            ("npl-feed/src/core/mod.rs", "pub enum Facts {}"),
        ];
        let expected = "npl-agent/src/core/verdict/mod.rs:1: the public type `Facts` exists already in \
                        npl-agent/src/core/doctor/mod.rs:2: choose another name";
        assert_eq!(found(&files), [expected]);
    }

    #[test]
    fn types_of_maps_are_found_too() {
        let files = [
            ("npl-common/src/flow.rs", "map_type! {\n    pub struct Key: 8 {\n        pub addr: u32,\n    }\n}"),
            (
                "npl-common/src/mapping.rs",
                "fn f() {\n    pub struct Other;\n}\nmap_type! {\n    pub struct Key: 4 {\n    }\n}",
            ),
            ("npl-common/src/stats.rs", "mod a {\n    pub struct Other;\n}"),
        ];
        let expected = "npl-common/src/mapping.rs:5: the public type `Key` exists already in \
                        npl-common/src/flow.rs:2: choose another name";
        assert_eq!(found(&files), [expected]);
    }

    #[test]
    fn private_types_tests_and_other_programs_may_repeat_a_name() {
        let files = [
            ("npl-agent/src/a.rs", "pub struct Row;\n#[cfg(test)]\nmod tests {\npub struct Row;\n}"),
            ("npl-agent/src/b.rs", "struct Row;\npub(super) enum Row {}\n    pub type Row = u8;\npub fn row() {}"),
            ("npl-agent/src/c.rs", "#[cfg(test)]\nmod c_tests;\n// pub struct Row;"),
            ("npl-agent/src/c/c_tests.rs", "pub struct Row;"),
            ("npl-agent/src/bin/other.rs", "pub struct Row;"),
            ("npl-ebpf/src/net/v4.rs", "pub struct Tail;"),
            ("npl-ebpf/src/net/v6.rs", "pub struct Tail;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }
}

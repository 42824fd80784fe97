// SPDX-License-Identifier: Apache-2.0
//! Checks that each source file has a license line, an acceptable length and a descriptive name, and contains no log
//! call for packets and no path that exists only on certain machines.

use super::Finding;
use super::rust_code::without_tests;
use super::tree::{Tree, has_ending};

/// The recommended maximum number of lines of a file. [`LINES_LIMIT`] is the limit.
const LINES_AIM: usize = 400;
const LINES_LIMIT: usize = 600;

/// Module names that do not describe the content of the module.
const EMPTY_NAMES: [&str; 6] = ["common", "helper", "helpers", "misc", "types", "utils"];

/// Paths that exist only on certain machines. This source code contains each path in two parts, so that the rule does
/// not report the rule's own file.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/t", "mp/")];

/// Macros and functions that would write a log line for each packet.
const LOGGING: [&str; 7] = ["aya_log", "bpf_printk", "trace_printk", "debug!(", "info!(", "warn!(", "println!("];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files() {
        if has_ending(path, "rs") {
            findings.extend(license(path, text));
            findings.extend(length(path, text));
            findings.extend(name(path));
        }
        if path.starts_with("npl-ebpf/src/") && !(path.ends_with("/trace.rs") || path.ends_with("/trace/log.rs")) {
            findings.extend(lines_with(path, text, &LOGGING, "the packet path writes no log: count a reason"));
        }
        findings.extend(lines_with(path, text, &MACHINE_PATHS, "the line contains a path of one machine"));
    }
    findings
}

fn license(path: &str, text: &str) -> Option<Finding> {
    let expected = match path.split('/').next() {
        Some("npl-ebpf") => "GPL-2.0-only",
        Some("npl-common") => "Apache-2.0 OR GPL-2.0-only",
        _ => "Apache-2.0",
    };
    let line = format!("// SPDX-License-Identifier: {expected}");
    (text.lines().next() != Some(&line)).then(|| Finding::error(path, format!("the first line is not `{line}`")))
}

/// Checks the number of lines of a file. Lines of the test module are not counted.
fn length(path: &str, text: &str) -> Option<Finding> {
    let is_test = path.split('/').any(|part| part == "tests" || part == "tests.rs");
    let code = if is_test { "" } else { without_tests(text) };
    let lines = code.lines().count();
    if lines > LINES_LIMIT {
        let rule = format!("the file has {lines} lines, and the limit is {LINES_LIMIT}: split the file");
        return Some(Finding::error(path, rule));
    }
    (lines > LINES_AIM).then(|| Finding::note(path, format!("the file has {lines} lines, and the aim is {LINES_AIM}")))
}

fn name(path: &str) -> Option<Finding> {
    let words = path.trim_end_matches(".rs").split('/');
    let bad = words.into_iter().find(|word| EMPTY_NAMES.contains(word))?;
    Some(Finding::error(path, format!("`{bad}` does not describe the content: choose a descriptive name")))
}

fn lines_with(path: &str, text: &str, forbidden: &[&str], rule: &str) -> Vec<Finding> {
    let numbered = text.lines().enumerate().filter(|(_, line)| forbidden.iter().any(|word| line.contains(word)));
    numbered.map(|(index, _)| Finding::error(format!("{path}:{}", index + 1), rule)).collect()
}

#[cfg(test)]
mod tests {
    use super::{LINES_AIM, LINES_LIMIT, MACHINE_PATHS, Tree, check};
    use crate::tidy::Severity;

    fn places(files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn each_crate_has_its_license_on_the_first_line() {
        let (apache, gpl) = ("// SPDX-License-Identifier: Apache-2.0\n", "// SPDX-License-Identifier: GPL-2.0-only\n");
        assert!(places(&[("npl-agent/src/a.rs", apache), ("npl-ebpf/src/b.rs", gpl)]).is_empty());
        assert_eq!(places(&[("npl-agent/src/a.rs", gpl)]), ["npl-agent/src/a.rs"]);
        assert_eq!(places(&[("npl-ebpf/src/b.rs", apache)]), ["npl-ebpf/src/b.rs"]);
        assert_eq!(places(&[("xtask/src/c.rs", "")]), ["xtask/src/c.rs"]);
    }

    #[test]
    fn long_files_get_a_note_and_very_long_files_an_error() {
        let of = |lines: usize| format!("// SPDX-License-Identifier: Apache-2.0\n{}", "\n".repeat(lines - 1));
        let severity = |lines| check(&Tree::of(&[("xtask/a.rs", &of(lines))])).first().map(|found| found.severity);
        assert_eq!(severity(LINES_AIM), None);
        assert_eq!(severity(LINES_AIM + 1), Some(Severity::Note));
        assert_eq!(severity(LINES_LIMIT + 1), Some(Severity::Error));
        let tested = format!("{}#[cfg(test)]\nmod tests {{\n{}}}", of(LINES_AIM), "\n".repeat(LINES_LIMIT));
        assert!(check(&Tree::of(&[("xtask/a.rs", &tested), ("xtask/tests.rs", &of(LINES_LIMIT + 1))])).is_empty());
    }

    #[test]
    fn names_that_describe_nothing_are_refused() {
        let license = "// SPDX-License-Identifier: Apache-2.0";
        assert_eq!(places(&[("npl-agent/src/utils.rs", license)]), ["npl-agent/src/utils.rs"]);
        assert_eq!(places(&[("npl-agent/src/types/a.rs", license)]), ["npl-agent/src/types/a.rs"]);
    }

    #[test]
    fn logs_of_the_packet_path_and_paths_of_a_machine_are_refused() {
        let gpl = "// SPDX-License-Identifier: GPL-2.0-only";
        assert_eq!(places(&[("npl-ebpf/src/a.rs", &format!("{gpl}\ninfo!(ctx)"))]), ["npl-ebpf/src/a.rs:2"]);
        assert_eq!(places(&[("README.md", &format!("see\n{}x", MACHINE_PATHS[0]))]), ["README.md:2"]);
    }
}

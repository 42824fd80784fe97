// SPDX-License-Identifier: Apache-2.0
//! Checks that commit subjects follow CONTRIBUTING.md: `area: imperative summary`, at most 72 characters.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{paths, process};

/// The last commit before this rule was introduced. The subjects of this commit and its ancestors may violate the rule.
const BEGINNING: &str = "58ae001b7ccfb3d0604e3a0a94ef78cd59e4e560";

/// The last commit before this rule was extended to merges.
const BEGINNING_OF_MERGES: &str = "0f0893ea5d2da1cec2e799367df47bfc65369c13";

/// The option of `git log` that limits how many of the latest commits, and how many of the latest merges, are checked.
const CHECKED: &str = "-50";

/// The maximum length of a commit subject in characters.
const LONGEST: usize = 72;

const AREAS: [&str; 11] =
    ["common", "ebpf", "core", "agent", "feed", "testkit", "tests", "xtask", "deploy", "docs", "ci"];

/// Checks the subjects of the latest commits and of the latest merges. Does nothing if git or the repository's history
/// is missing.
pub(crate) fn check() -> Result<()> {
    let subjects = [("--no-merges", BEGINNING), ("--merges", BEGINNING_OF_MERGES)].map(|(kind, beginning)| {
        process::ask(git().args(["log", kind, "--format=%s", CHECKED, &format!("{beginning}..HEAD")]))
    });
    let [Ok(commits), Ok(merges)] = subjects else {
        process::detail("git or the commits are missing here, as in a shallow clone: nothing is checked");
        return Ok(());
    };
    let problems: Vec<String> = commits.lines().chain(merges.lines()).filter_map(problem).collect();
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(())
}

fn git() -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(paths::root());
    command
}

fn problem(subject: &str) -> Option<String> {
    let length = subject.chars().count();
    let area = subject.split_once(": ").map(|(area, _)| area);
    let rule = if length > LONGEST {
        format!("has {length} characters, and {LONGEST} are allowed")
    } else if subject.split(|c: char| !c.is_alphanumeric()).any(|word| word.eq_ignore_ascii_case("wip")) {
        "describes unfinished work: squash it".to_owned()
    } else if area.is_none_or(|areas| areas.split(", ").any(|area| !AREAS.contains(&area))) {
        format!("does not begin with one or more areas and a colon; areas are {}", AREAS.join(", "))
    } else {
        return None;
    };
    Some(format!("the commit subject `{subject}` {rule}"))
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, problem};

    #[test]
    fn subjects_with_an_area_are_accepted() {
        for subject in ["xtask: check commit subjects", "docs: changelog: ABI 2", "ebpf: wipe the buffer"] {
            assert_eq!(problem(subject), None);
        }
        assert_eq!(problem(&format!("ci: {}", "x".repeat(LONGEST - 4))), None);
    }

    #[test]
    fn other_subjects_are_refused_with_the_reason() {
        for (subject, expected) in [
            ("wip", "describes unfinished work"),
            ("agent: WIP: ports", "describes unfinished work"),
            ("merge bench", "does not begin with one or more areas"),
            ("merge: s38-names", "areas are common, ebpf"),
            ("Merge branch 's38-names'", "does not begin with one or more areas"),
            ("datapath: rewrite", "areas are common, ebpf"),
            (&format!("ci: {}", "ü".repeat(LONGEST)), "has 76 characters, and 72 are allowed"),
        ] {
            let problem = problem(subject).unwrap();
            assert!(problem.contains(expected), "{problem}");
        }
    }
}

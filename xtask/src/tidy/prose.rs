// SPDX-License-Identifier: Apache-2.0
//! Reports phrases in comments and documents that leave open who or what is meant.
//!
//! The rule does not apply to CHANGELOG.md and docs/design, because these documents describe the past.

use super::Finding;
use super::rust_code::comment_start;
use super::tree::{Tree, is_history};

/// The phrases that are reported, each with advice on how to rewrite the sentence.
const PHRASES: [(&str, &str); 20] = [
    ("whoever", "name the client, the process or the operator"),
    ("is told", "say who reports what to whom"),
    ("passes by", "`bypasses` where something is skipped"),
    ("passed by", "`bypassed` where something is skipped"),
    ("what is not ours", "name the packets, such as `packets that match no mapping`"),
    ("what is ours", "name the packets, such as `packets that match a mapping`"),
    ("goes on untouched", "`is passed to the host unchanged`"),
    ("nobody's", "name what owns it, or say that it is unused"),
    ("the last one of the same", "name it, such as `the previous connection with the same five-tuple`"),
    ("if that is it", "repeat the noun, such as `if it is the primary address`"),
    ("now and then", "name the interval or the event"),
    ("numbers prove", "`the packet's numbers fit the entry`"),
    ("its numbers find", "`looked up by the packet's acknowledgement number`"),
    ("cancel out", "`add up to zero`"),
    ("cancels out", "`add up to zero`"),
    ("yields the slot", "`the slot counts as free`"),
    ("takes nothing from", "`does not affect`"),
    ("drawn towards", "`biased towards`"),
    ("finds back", "name the state by which a reply is translated"),
    ("a function of its own", "`not inlined`, and why"),
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let documents = tree.below("", ".md").filter(|(path, _)| !is_history(path));
    let documents = documents.flat_map(|(path, text)| check_lines(path, &text.lines().map(Some).collect::<Vec<_>>()));
    let comments = tree
        .below("", ".rs")
        .flat_map(|(path, text)| check_lines(path, &text.lines().map(comment).collect::<Vec<_>>()));
    documents.chain(comments).collect()
}

/// Returns the text of the comment in a line of Rust code.
fn comment(line: &str) -> Option<&str> {
    Some(line.get(comment_start(line)?..)?.trim_start_matches(['/', '!']))
}

/// Finds unclear phrases, also across a line break. A line without text ends a paragraph: no phrase extends beyond it.
fn check_lines(path: &str, lines: &[Option<&str>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut paragraph: Vec<(usize, String)> = Vec::new();
    for (index, text) in lines.iter().chain([&None]).enumerate() {
        let words = text.unwrap_or_default().split_whitespace().map(str::to_lowercase);
        let before = paragraph.len();
        paragraph.extend(words.map(|word| (index + 1, word)));
        if paragraph.len() == before {
            findings.extend(check_paragraph(path, &paragraph));
            paragraph.clear();
        }
    }
    findings
}

fn check_paragraph(path: &str, paragraph: &[(usize, String)]) -> Vec<Finding> {
    let is_mark = |c: char| !c.is_alphanumeric() && c != '\'';
    let mut findings = Vec::new();
    for (phrase, advice) in PHRASES {
        let wanted: Vec<&str> = phrase.split(' ').collect();
        for place in paragraph.windows(wanted.len()) {
            // Punctuation before and after the phrase is ignored. Punctuation inside the words of the phrase is not
            // ignored, because it ends a sentence.
            let last = wanted.len() - 1;
            let is_phrase = place.iter().zip(&wanted).enumerate().all(|(index, ((_, word), wanted))| {
                let word = if index == 0 { word.trim_start_matches(is_mark) } else { word };
                let word = if index == last { word.trim_end_matches(is_mark) } else { word };
                word == *wanted
            });
            if let Some((line, _)) = place.first().filter(|_| is_phrase) {
                findings.push(Finding::error(format!("{path}:{line}"), format!("`{phrase}` is unclear: {advice}")));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{Tree, check};

    fn places(path: &str, text: &str) -> Vec<String> {
        check(&Tree::of(&[(path, text)])).into_iter().map(|found| found.place).collect()
    }

    #[test]
    fn phrases_are_found_in_comments_and_documents() {
        assert_eq!(
            places("README.md", "# Title\n\nWhat is not ours goes on untouched."),
            ["README.md:3", "README.md:3"]
        );
        assert_eq!(places("a/b.rs", "fn f() {} // nobody's\n"), ["a/b.rs:1"]);
    }

    #[test]
    fn a_phrase_may_run_over_the_end_of_a_line() {
        assert_eq!(places("a/b.rs", "/// The agent is\n/// told so.\nfn f() {}"), ["a/b.rs:1"]);
        assert_eq!(places("a/b.rs", "/// That is\n///\n/// told so.\n// is\nf();\n// told"), Vec::<String>::new());
    }

    #[test]
    fn code_other_words_and_documents_of_the_past_are_not_reported() {
        assert!(places("a/b.rs", "let whoever = \"is told\"; // As it is: told later. Passed bytes.").is_empty());
        assert!(places("CHANGELOG.md", "whoever").is_empty());
        assert!(places("docs/design/0001-flow-state.md", "whoever").is_empty());
    }
}

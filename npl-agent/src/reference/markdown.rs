// SPDX-License-Identifier: Apache-2.0
//! Renders the Markdown elements of the generated pages.

use std::fmt::Write as _;

/// Renders a table, whose last line ends with a line feed.
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len()));
    for row in rows {
        let cells: Vec<_> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        let _infallible = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Renders a heading, with an empty line before and after it.
pub(super) fn heading(level: usize, title: &str) -> String {
    format!("\n{} {title}\n\n", "#".repeat(level))
}

/// Renders the text as a code span.
pub(super) fn code(text: &str) -> String {
    format!("`{text}`")
}

/// Renders several names as code spans, separated by commas.
pub(super) fn codes(names: &[&str]) -> String {
    names.iter().map(|name| code(name)).collect::<Vec<_>>().join(", ")
}

/// Returns the anchor of a heading, as the target of links.
pub(super) fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
    format!("#{}", kept.replace(' ', "-"))
}

/// Renders a doc comment as Markdown sentences: links to Rust items become code spans, and a full stop ends the text.
pub(super) fn prose(doc: &str) -> String {
    let mut text = String::new();
    let mut rest = doc;
    while let Some((before, link)) = rest.split_once("[`") {
        let (item, after) = link.split_once("`]").unwrap_or((link, ""));
        let item = item.strip_prefix("crate::").unwrap_or(item);
        let _infallible = write!(text, "{before}`{item}`");
        rest = after;
    }
    text.push_str(rest);
    if !text.ends_with(['.', ':', '!', '?']) {
        text.push('.');
    }
    text
}

/// Formats a number with a space between thousands, as in the handwritten documents.
pub(super) fn number(value: usize) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && digits.len() > 4 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{anchor, number, prose, table};

    #[test]
    fn links_to_items_become_code_and_a_full_stop_ends_the_text() {
        assert_eq!(prose("See [`crate::hash`] and [`Config`]"), "See `hash` and `Config`.");
        assert_eq!(prose("Done."), "Done.");
    }

    #[test]
    fn anchors_are_those_of_github() {
        assert_eq!(anchor("npl_addr2idx_v4, npl_addr2idx_v6"), "#npl_addr2idx_v4-npl_addr2idx_v6");
        assert_eq!(anchor("run --port-range"), "#run---port-range");
    }

    #[test]
    fn cells_keep_their_bars_and_numbers_have_groups() {
        assert!(table(&["a"], [vec!["x|y".to_owned()]]).ends_with("| x\\|y |\n"));
        assert_eq!([4096, 65_536].map(number), ["4096", "65 536"]);
    }
}

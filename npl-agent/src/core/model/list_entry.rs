// SPDX-License-Identifier: Apache-2.0
//! Entries of the comma-separated lists in annotations.

use std::str::FromStr;

/// The maximum number of characters of a faulty entry that a message shows; the rest of the entry is cut off.
const SHOWN_CHARS: usize = 48;

/// Returns the entries of a list that are not empty, without surrounding blanks, each with its position, counted from
/// 1. Empty entries count as positions.
pub(super) fn entries(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.split(',').map(str::trim)).filter(|(_, entry)| !entry.is_empty())
}

/// Returns the part of a faulty entry that a message shows.
pub(super) fn excerpt(entry: &str) -> String {
    entry.chars().take(SHOWN_CHARS).collect()
}

/// Parses a number: digits without a leading zero or sign. A number in any other spelling is likely a mistake.
pub(super) fn number<T: FromStr>(text: &str) -> Option<T> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_number { text.parse().ok() } else { None }
}

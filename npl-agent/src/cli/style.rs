// SPDX-License-Identifier: Apache-2.0
//! Colors of the output. [`super::print`] removes the colors if the output is not a terminal, or if `NO_COLOR` is set.

use anstyle::{AnsiColor, Style};

/// The color of a healthy state.
pub(super) const GOOD: Style = AnsiColor::Green.on_default().bold();
/// The color of a state in which traffic is at risk or a check failed.
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();
/// The color of an unknown state, or of a state that may need attention.
pub(super) const DOUBTFUL: Style = AnsiColor::Yellow.on_default().bold();

/// Returns the text with the escape sequences that color it.
pub(super) fn painted(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

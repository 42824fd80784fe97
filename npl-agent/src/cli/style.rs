// SPDX-License-Identifier: Apache-2.0
//! Colors, which appear on a terminal only: [`super::print`] removes them elsewhere, and where `NO_COLOR` is set.

use anstyle::{AnsiColor, Style};

/// A healthy state.
pub(super) const GOOD: Style = AnsiColor::Green.on_default().bold();
/// A fault.
pub(super) const BAD: Style = AnsiColor::Red.on_default().bold();
/// A state that is not known, or worth a look.
pub(super) const DOUBTFUL: Style = AnsiColor::Yellow.on_default().bold();

/// A text in a color.
pub(super) fn painted(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

// SPDX-License-Identifier: Apache-2.0
//! Computes what a terminal shows.

use std::num::NonZero;

/// Returns the text on the screen of a terminal with this number of rows and columns, after a program has written
/// `output` to it. A program that draws on the terminal writes only the characters that differ from the screen, so a
/// text on the screen need not be in the output.
pub fn screen(output: &[u8], rows: NonZero<u16>, columns: NonZero<u16>) -> String {
    let mut terminal = vt100::Parser::new(rows, columns, 0);
    terminal.process(output);
    terminal.screen().contents()
}

#[cfg(test)]
mod tests {
    use super::{NonZero, screen};

    #[test]
    fn the_screen_has_a_name_of_which_only_some_characters_were_written() {
        let output = b"\x1b[2J\x1b[1;1Hweb-6f947fc886-45ksl\x1b[1;16Hvqb7d";
        let [rows, columns] = [40, 120].map(|size| NonZero::new(size).unwrap());
        assert_eq!(screen(output, rows, columns).trim_end(), "web-6f947fc886-vqb7d");
    }
}

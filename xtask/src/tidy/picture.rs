// SPDX-License-Identifier: Apache-2.0
//! Checks that the picture of the bench's result shows the numbers in docs/performance.md.

use super::Finding;
use super::tree::Tree;
use crate::picture::{PAGE, PICTURE, draw};

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    // A source tree without the document, as in the unit tests, is accepted.
    let Some(page) = tree.text(PAGE) else { return Vec::new() };
    match draw(page) {
        Ok(picture) if tree.text(PICTURE) == Some(&picture) => Vec::new(),
        Ok(_other) => vec![Finding::error(PICTURE, format!("the picture differs from {PAGE}: run `cargo xtask docs`"))],
        Err(error) => vec![Finding::error(PAGE, error.to_string())],
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE, PICTURE, check, draw};
    use crate::tidy::tests::found;

    #[test]
    fn an_old_picture_and_a_page_without_ratios_are_found() {
        let page =
            "| ratio | median | min | max |\n|---|---|---|---|\n| established_ours_vs_routing | 0.9 | 0.8 | 1 |\n";
        let picture = draw(page).unwrap();
        assert!(found(check, &[(PAGE, page), (PICTURE, &picture)]).is_empty());
        assert!(found(check, &[(PAGE, page), (PICTURE, "old")])[0].starts_with(PICTURE));
        assert!(found(check, &[(PAGE, "no table")])[0].starts_with(PAGE));
    }
}

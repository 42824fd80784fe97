// SPDX-License-Identifier: Apache-2.0
//! Renders `doctor.md` from [`crate::core::doctor::catalog`].

use std::fmt::Write as _;

use super::markdown::{anchor, code, heading, table};
use crate::core::doctor::catalog::{Advice, CHECKS, Check};

pub(super) fn body() -> String {
    let mut text =
        "`npl-agent doctor` prints the result of each check and, for each result other than `ok`, the section of this \
         page. Scripts can use the names of the checks, which do not change between versions.\n\n"
            .to_owned();
    text += &table(
        &["result", "meaning"],
        [
            ["`ok`", "The check found no problem."],
            [
                "`warning`",
                "Some traffic or an optional feature does not work, changes may not be applied, or a protection is \
                 missing.",
            ],
            [
                "`failed`",
                "Node ports of some or all Pods do not work for some or all clients, or changes of Pods and Services \
                 are not applied. The exit code is 1.",
            ],
            ["`unknown`", "The check could not read the facts that it needs."],
        ]
        .map(|row| row.map(str::to_owned).to_vec()),
    );
    text.push('\n');
    text += &table(
        &["check", "question"],
        CHECKS
            .iter()
            .map(|Check { key, question, .. }| vec![format!("[`{key}`]({})", anchor(key)), (*question).to_owned()]),
    );
    for Check { key, question, states, advice: Advice { effect, action } } in CHECKS {
        text += &heading(2, key);
        let _infallible = writeln!(text, "{question}\n");
        let rows = states.iter().map(|(state, meaning)| vec![code(state.as_str()), (*meaning).to_owned()]);
        text += &table(&["result", "when"], rows);
        let _infallible = writeln!(text, "\nEffect: {effect}\n\nAction: {action}");
    }
    text
}

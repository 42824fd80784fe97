// SPDX-License-Identifier: Apache-2.0

use std::{collections::BTreeSet, env, fs, path::Path};

use super::{FURTHER, Page, alerts::ALERTS, chart_files, dashboard, markdown::anchor, networks, pages};
use crate::{
    core::{
        doctor::catalog::CHECKS,
        pages::{of_check, of_event},
        publish::event_reason::EventReason,
    },
    metrics::catalog,
};

/// If this environment variable is set, the tests of this file update the generated files instead of comparing them.
/// The library expect-test uses the same variable.
const UPDATE: &str = "UPDATE_EXPECT";

#[test]
fn committed_pages_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
    let pages = pages();
    if env::var_os(UPDATE).is_some() {
        fs::create_dir_all(&folder).unwrap();
        for Page { file, text } in &pages {
            fs::write(folder.join(file), text).unwrap();
        }
    }
    for Page { file, text } in &pages {
        let committed = fs::read_to_string(folder.join(file)).unwrap_or_default();
        let difference = text.lines().zip(committed.lines()).find(|(new, old)| new != old);
        assert!(committed == *text, "docs/reference/{file} is not current: run `cargo xtask docs`. {difference:#?}");
    }
    let known: BTreeSet<_> =
        pages.iter().map(|page| page.file).chain(FURTHER.map(|(file, ..)| file)).map(str::to_owned).collect();
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), known, "docs/reference/ contains generated pages only");
}

/// The test compares only the table of `docs/compatibility.md`, because the rest of the page is written by hand.
#[test]
fn the_table_of_networks_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/compatibility.md");
    let committed = fs::read_to_string(&file).unwrap();
    let [begin, end] = networks::MARKS;
    let (before, rest) = committed.split_once(begin).expect("the beginning of the table");
    let (_, after) = rest.split_once(end).expect("the end of the table");
    let current = format!("{before}{begin}\n\n{}\n{end}{after}", networks::body());
    if env::var_os(UPDATE).is_some() {
        fs::write(&file, &current).unwrap();
    } else {
        assert!(
            committed == current,
            "the table of networks in docs/compatibility.md is not current: run `cargo xtask docs`"
        );
    }
}

#[test]
fn committed_files_of_the_chart_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (file, text) in chart_files() {
        if env::var_os(UPDATE).is_some() {
            fs::write(root.join(file), &text).unwrap();
        }
        let committed = fs::read_to_string(root.join(file)).unwrap_or_default();
        assert!(committed == text, "{file} is not current: run `cargo xtask docs` and `cargo xtask chart`");
    }
}

#[test]
fn every_event_reason_and_every_check_of_the_doctor_has_a_section() {
    let sections: BTreeSet<String> = pages()
        .iter()
        .flat_map(|page| {
            let headings = page.text.lines().filter_map(|line| line.strip_prefix("## "));
            headings.map(|heading| format!("docs/reference/{}{}", page.file, anchor(heading))).collect::<Vec<_>>()
        })
        .collect();
    let reasons = EventReason::ALL.iter().map(|reason| of_event(reason.name()));
    for named in reasons.chain(CHECKS.iter().map(|check| of_check(check.key))) {
        assert!(sections.contains(&named), "{named} is not among {sections:?}");
    }
}

/// Returns the metric names in an expression: the words that begin with `npl_` or `process_`.
fn metrics_of(expression: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    expression.split(move |c| !is_part(c)).filter(|word| word.starts_with("npl_") || word.starts_with("process_"))
}

/// A test of npl-feed compares the names of the feed's metrics, which begin with `npl_feed_`.
#[test]
fn alerts_and_dashboard_name_metrics_that_exist() {
    let known: BTreeSet<String> = catalog().into_iter().map(|metric| metric.name).collect();
    let expressions: Vec<&str> = ALERTS.iter().map(|alert| alert.expression).chain(dashboard::expressions()).collect();
    let mut count = 0;
    let names = expressions.iter().flat_map(|expression| metrics_of(expression));
    for name in names.filter(|name| !name.starts_with("npl_feed_")) {
        count += 1;
        assert!(known.contains(name.trim_end_matches("_bucket")), "no metric has the name {name}");
    }
    assert!(count > expressions.len() / 2, "{count}");
}

// SPDX-License-Identifier: Apache-2.0
//! Draws the ratios of `cargo xtask bench` as a picture: packet rates of NPL, divided by the rates of its alternatives.
//!
//! xtask draws the picture without a diagram library, because xtask is compiled on every fresh machine before all other
//! crates, and because the bytes of the picture must not depend on the version of a library.

mod svg;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::paths;

/// The document with the result from which [`PICTURE`] is drawn.
pub(crate) const PAGE: &str = "docs/performance.md";
/// The picture of the result in [`PAGE`].
pub(crate) const PICTURE: &str = "docs/performance.svg";

/// A ratio of two packet rates.
#[derive(Debug, Clone, PartialEq)]
struct Bar {
    label: String,
    /// The median as the table shows it.
    text: String,
    median: f64,
    min: f64,
    max: f64,
}

/// The ratios of one kind of traffic.
#[derive(Debug, Clone, PartialEq)]
struct Group {
    title: &'static str,
    bars: Vec<Bar>,
}

/// A workload of the bench.
struct Workload {
    name: &'static str,
    /// The title of the group that shows the workload.
    group: &'static str,
    /// The text with which the labels of this workload begin, if the group has several workloads.
    label: &'static str,
}

const FLOODS: &str = "Floods, each packet from another client address or port";

const WORKLOADS: [Workload; 7] = [
    Workload { name: "established", group: "Requests of an established flow", label: "" },
    Workload { name: "replies", group: "Replies of an established flow", label: "" },
    Workload { name: "new_flows", group: "New flows, NPL with 500 mappings", label: "" },
    Workload { name: "syn_flood", group: FLOODS, label: "SYN: " },
    Workload { name: "ack_flood", group: FLOODS, label: "ACK: " },
    Workload { name: "udp_flood", group: FLOODS, label: "UDP: " },
    Workload { name: "fragment_flood", group: FLOODS, label: "fragments: " },
];

/// NPL's forwarding modes in the picture: the name of the mode in a ratio's name, and its label. Ratios of other modes
/// are not drawn.
const OURS: [(&str, &str); 3] = [("ours", "NPL"), ("ours_redirect", "NPL, redirect"), ("ours_offload", "NPL, offload")];
const ALTERNATIVES: [(&str, &str); 4] = [
    ("routing", "plain routing"),
    ("iptables_1", "iptables, one DNAT rule"),
    ("iptables_500", "iptables, 500 DNAT rules"),
    ("nftables", "nftables, DNAT map"),
];

/// Draws the picture of a result, which is the output of the bench as Markdown or a document that contains the output.
///
/// # Errors
///
/// Returns an error if the result has no ratio of the picture.
pub(crate) fn draw(markdown: &str) -> Result<String> {
    let groups = groups(markdown);
    ensure!(!groups.is_empty(), "the result has no ratio of NPL and an alternative");
    Ok(svg::draw(&groups))
}

/// Draws the picture of a result into a file.
pub(crate) fn write(file: &Path, markdown: &str) -> Result<()> {
    fs::write(file, draw(markdown)?).with_context(|| format!("write {}", file.display()))
}

/// Draws the picture of the result in the document of the repository.
pub(crate) fn write_of_page() -> Result<()> {
    let page = fs::read_to_string(paths::root().join(PAGE)).with_context(|| format!("read {PAGE}"))?;
    write(&paths::root().join(PICTURE), &page)
}

/// Returns the ratios of the first table of ratios, in the order of the table.
fn groups(markdown: &str) -> Vec<Group> {
    let cells = |line: &str| -> Vec<String> { line.split('|').skip(1).map(|cell| cell.trim().to_owned()).collect() };
    let lines = markdown.lines().map(cells);
    let table = lines.skip_while(|row| row.first().is_none_or(|cell| cell != "ratio"));
    let mut groups = Vec::<Group>::new();
    for row in table.take_while(|row| !row.is_empty()) {
        let Some((title, bar)) = bar(&row) else { continue };
        match groups.iter_mut().find(|group| group.title == title) {
            Some(group) => group.bars.push(bar),
            None => groups.push(Group { title, bars: vec![bar] }),
        }
    }
    groups
}

/// Returns the bar of a row and the title of its group; `None` if the picture does not show the ratio.
fn bar(row: &[String]) -> Option<(&'static str, Bar)> {
    let [name, text, min, max, ..] = row else { return None };
    let (workload, ways) =
        WORKLOADS.iter().find_map(|it| Some((it, name.strip_prefix(it.name)?.strip_prefix('_')?)))?;
    let (ours, alternative) = ways.split_once("_vs_")?;
    let label = |known: &[(&str, &'static str)], way: &str| Some(known.iter().find(|(name, _)| *name == way)?.1);
    let label = format!("{}{} ÷ {}", workload.label, label(&OURS, ours)?, label(&ALTERNATIVES, alternative)?);
    let (median, min, max): (f64, f64, f64) = (text.parse().ok()?, min.parse().ok()?, max.parse().ok()?);
    // A logarithmic scale cannot show a ratio of 0 or infinity.
    if !(min > 0.0 && max.is_finite()) {
        return None;
    }
    Some((workload.group, Bar { label, text: text.clone(), median, min, max }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: &str = "\
| question | figure |
|---|---|
| What? | `established_ours_vs_routing` |

| ratio                                  | median |   min |   max | aim    | result |
|----------------------------------------|--------|-------|-------|--------|--------|
| established_ours_vs_routing            |  0.875 | 0.865 | 0.911 | ≥ 0.95 | missed |
| new_flows_ours_redirect_vs_iptables_500 | 25.02 | 23.27 | 26.42 |        |        |
| established_ours_xdp_vs_routing_wire   |  0.824 | 0.813 | 0.832 |        |        |
| ack_flood_ours_vs_established_ours     |  0.599 | 0.565 | 0.629 |        |        |
| ack_flood_ours_vs_routing              |  0.541 | 0.526 | 0.567 |        |        |

| ratio | median | min | max |
|---|---|---|---|
| established_ours_vs_nftables | 9 | 9 | 9 |
";

    #[test]
    fn the_ratios_of_npl_and_an_alternative_are_read_from_the_first_table() {
        let bar = |label: &str, text: &str, min: f64, max: f64| Bar {
            label: label.to_owned(),
            text: text.to_owned(),
            median: text.parse().unwrap(),
            min,
            max,
        };
        let expected = [
            ("Requests of an established flow", bar("NPL ÷ plain routing", "0.875", 0.865, 0.911)),
            (
                "New flows, NPL with 500 mappings",
                bar("NPL, redirect ÷ iptables, 500 DNAT rules", "25.02", 23.27, 26.42),
            ),
            (FLOODS, bar("ACK: NPL ÷ plain routing", "0.541", 0.526, 0.567)),
        ];
        assert_eq!(groups(RESULT), expected.map(|(title, bar)| Group { title, bars: vec![bar] }));
    }

    #[test]
    fn a_result_without_ratios_is_refused() {
        let error = draw("| figure | unit | median |\n|---|---|---|\n| program/miss | ns | 8 |\n").unwrap_err();
        assert_eq!(error.to_string(), "the result has no ratio of NPL and an alternative");
    }

    #[test]
    fn the_result_of_the_document_has_every_group() {
        let page = fs::read_to_string(paths::root().join(PAGE)).unwrap();
        let titles: Vec<&str> = groups(&page).iter().map(|group| group.title).collect();
        assert_eq!(titles, [WORKLOADS[0].group, WORKLOADS[1].group, WORKLOADS[2].group, FLOODS]);
    }
}

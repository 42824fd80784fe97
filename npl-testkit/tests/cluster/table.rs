// SPDX-License-Identifier: Apache-2.0
//! Writes the table of `docs/compatibility.md`, which has one row per network. The test run on a network writes the
//! network's row.

use std::fs;

use npl_testkit::tools;

use crate::network::Network;

const DOCUMENT: &str = "docs/compatibility.md";

/// The beginning of the table's delimiter line, which is above the first row.
const ABOVE: &str = "|---";

/// The results of the tests on one cluster.
pub(crate) struct Row {
    pub(crate) network: Network,
    pub(crate) passed: u32,
    pub(crate) run: u32,
    /// The number of requests under load; each received a response from the intended Pod.
    pub(crate) answered: u64,
    /// The number of requests under load that the CNI lost; see [`World::lost`](crate::world::World::lost).
    pub(crate) lost: u64,
    /// The versions that the Nodes report.
    pub(crate) platform: String,
    /// The day of the run, as `2026-11-30`.
    pub(crate) date: String,
}

impl Row {
    /// Replaces the network's row in the document.
    pub(crate) fn enter(&self) {
        let path = tools::repository_file(DOCUMENT);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, self.entered(&text)).unwrap();
        println!("    wrote the row of {} to {DOCUMENT}", self.network);
    }

    fn entered(&self, document: &str) -> String {
        let begin = start_of(self.network);
        let Self { passed, run, answered, lost, platform, date, .. } = self;
        let row = format!("{begin} {passed} of {run} | {answered} | {lost} | {date} | {platform} |");
        let mut lines: Vec<&str> = document.lines().filter(|line| !line.starts_with(&begin)).collect();
        let first = lines.iter().position(|line| line.starts_with(ABOVE)).unwrap() + 1;
        let rows = lines.iter().skip(first).take_while(|line| line.starts_with('|')).count();
        lines.insert(first + rows, &row);
        // The rows are sorted by the order of `Network::all`.
        let order = |line: &&str| Network::all().iter().position(|it| line.starts_with(&start_of(*it)));
        lines[first..=first + rows].sort_by_key(order);
        lines.join("\n") + "\n"
    }
}

fn start_of(Network { cni, kube_proxy }: Network) -> String {
    format!("| {cni} | {kube_proxy} |")
}

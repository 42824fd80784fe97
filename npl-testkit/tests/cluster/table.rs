// SPDX-License-Identifier: Apache-2.0
//! The table of `docs/compatibility.md`: a row for each way to connect a cluster, written by the run that it tells of.

use std::fs;

use npl_testkit::tools;

use crate::network::Network;

const DOCUMENT: &str = "docs/compatibility.md";

/// What the last line ahead of the first row begins with.
const ABOVE: &str = "|---";

/// What became of the stories on one cluster.
pub(crate) struct Row {
    pub(crate) network: Network,
    pub(crate) passed: u32,
    pub(crate) told: u32,
    /// Requests that were sent while something happened, each answered by the Pod that it was meant for.
    pub(crate) answered: u64,
    /// What the Nodes say that they run.
    pub(crate) platform: String,
}

impl Row {
    /// Puts it in the place of the network's last one.
    pub(crate) fn enter(&self) {
        let path = tools::repository_file(DOCUMENT);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, self.entered(&text)).unwrap();
        println!("    {DOCUMENT} tells of {}", self.network);
    }

    fn entered(&self, document: &str) -> String {
        let begin = start_of(self.network);
        let Self { passed, told, answered, platform, .. } = self;
        let row = format!("{begin} {passed} of {told} | {answered} | {platform} |");
        let mut lines: Vec<&str> = document.lines().filter(|line| !line.starts_with(&begin)).collect();
        let first = lines.iter().position(|line| line.starts_with(ABOVE)).unwrap() + 1;
        let rows = lines.iter().skip(first).take_while(|line| line.starts_with('|')).count();
        lines.insert(first + rows, &row);
        // In the order of the networks' own list.
        let order = |line: &&str| Network::all().iter().position(|it| line.starts_with(&start_of(*it)));
        lines[first..=first + rows].sort_by_key(order);
        lines.join("\n") + "\n"
    }
}

fn start_of(Network { cni, kube_proxy }: Network) -> String {
    format!("| {cni} | {kube_proxy} |")
}

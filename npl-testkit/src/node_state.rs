// SPDX-License-Identifier: Apache-2.0
//! Compares the state of a Node's kernel at two moments.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::netns::Netns;
use crate::tools;

/// State as text: the name of each part, and its value. A failed test shows the parts that differ.
pub type State = BTreeMap<String, String>;

/// The commands that show the addresses, routes and rules of a network namespace.
const NETWORK: [&str; 6] = [
    "tc qdisc show",
    "ip -brief address show",
    "ip rule show",
    "ip -6 rule show",
    "ip -4 route show table all",
    "ip -6 route show table all",
];

/// Returns the output of the commands that show the state of a network namespace, and of these further commands.
pub fn of_network(netns: &Netns, further: &[String]) -> Result<State> {
    let lines = NETWORK.iter().copied().chain(further.iter().map(String::as_str));
    let output = |line: &str| {
        let mut words = line.split(' ');
        let mut command = netns.command(words.next().unwrap_or_default())?;
        tools::output(command.args(words))
    };
    lines.map(|line| Ok((line.to_owned(), output(line)?))).collect()
}

/// Adds the pins and directories of a BPF file system, with their types and permissions.
pub fn add_tree(folder: &Path, state: &mut State) -> Result<()> {
    let context = || format!("list {}", folder.display());
    for entry in fs::read_dir(folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let mode = fs::metadata(&path).with_context(context)?.permissions().mode();
        state.insert(path.display().to_string(), format!("{mode:o}"));
        if path.is_dir() {
            add_tree(&path, state)?;
        }
    }
    Ok(())
}

/// Returns the parts of the state that differ; an empty text if no part differs.
pub fn difference(before: &State, after: &State) -> String {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let differing = names.into_iter().filter(|name| before.get(*name) != after.get(*name));
    let shown = |state: &State, name: &String| state.get(name).map_or_else(|| "absent".to_owned(), Clone::clone);
    let part = |name: &String| format!("{name}\n  before: {}\n  after: {}", shown(before, name), shown(after, name));
    differing.map(part).collect::<Vec<_>>().join("\n")
}

/// Asserts that two states are the same. A failure shows the parts that differ.
#[track_caller]
pub fn assert_same(before: &State, after: &State, stage: &str) {
    let differing = difference(before, after);
    assert!(differing.is_empty(), "{stage}:\n{differing}");
}

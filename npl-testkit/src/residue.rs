// SPDX-License-Identifier: Apache-2.0
//! What a run may leave behind outside of its process, looked at before and after.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use aya::maps::loaded_maps;
use aya::programs::{loaded_links, loaded_programs};

use crate::{mounts, poll, run, tools};

/// The kernel frees programs and maps some time after their last user is gone.
const FREED_WITHIN: Duration = Duration::from_secs(10);

/// The beginning of the names of NPL's programs and maps, and of the namespaces of test runs.
const PREFIX: &str = "npl";

/// Executables of runs; `server` is etcd as Go builds it.
const EXECUTABLES: [&str; 4] = ["npl-agent", "kube-apiserver", "etcd", "server"];

/// Everything of ours that exists at one moment, one line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residue {
    things: BTreeSet<String>,
}

impl Residue {
    /// Looks around.
    pub fn look() -> Result<Self> {
        let mut things = BTreeSet::new();
        for netns in run::netns_names().into_iter().filter(|name| name.starts_with(PREFIX)) {
            things.insert(format!("network namespace {netns}"));
        }
        for mount in mounts::all()? {
            if mount.kind == "bpf" {
                pins(&mount.point.join(PREFIX), &mut things);
            }
            if mount.point.starts_with(run::ROOT) {
                things.insert(format!("mount at {}", mount.point.display()));
            }
        }
        bpf_objects(&mut things);
        for qdisc in tools::output(Command::new("tc").args(["qdisc", "show"]))?.lines() {
            if qdisc.starts_with("qdisc clsact") || qdisc.starts_with("qdisc ingress") {
                things.insert(qdisc.trim_end().to_owned());
            }
        }
        processes(&mut things);
        Ok(Self { things })
    }

    /// What is there now and was not there then.
    pub fn new_things(&self) -> Result<BTreeSet<String>> {
        Ok(Self::look()?.things.difference(&self.things).cloned().collect())
    }

    /// Waits a while for everything new to go.
    ///
    /// # Errors
    /// When something stays, with a list of it.
    pub fn assert_nothing_new(&self) -> Result<()> {
        let mut new = BTreeSet::new();
        let gone = poll::until("the end of what a run made", FREED_WITHIN, || {
            new = self.new_things().ok()?;
            new.is_empty().then_some(())
        });
        if gone.is_err() {
            bail!("left behind:\n  {}", Vec::from_iter(new).join("\n  "));
        }
        Ok(())
    }
}

fn bpf_objects(things: &mut BTreeSet<String>) {
    let mut programs = BTreeSet::new();
    // An object may go away between its listing and a look at it.
    for program in loaded_programs().flatten() {
        if let Some(name) = program.name_as_str().filter(|name| name.starts_with(PREFIX)) {
            programs.insert(program.id());
            things.insert(format!("BPF program {name} with id {}", program.id()));
        }
    }
    for map in loaded_maps().flatten() {
        if let Some(name) = map.name_as_str().filter(|name| name.starts_with(PREFIX)) {
            things.insert(format!("BPF map {name} with id {}", map.id()));
        }
    }
    for link in loaded_links().flatten() {
        if programs.contains(&link.program_id()) {
            things.insert(format!("BPF link with id {} of program {}", link.id(), link.program_id()));
        }
    }
}

fn pins(directory: &Path, things: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        things.insert(format!("pin {}", entry.path().display()));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pins(&entry.path(), things);
        }
    }
}

fn processes(things: &mut BTreeSet<String>) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if EXECUTABLES.contains(&name.trim()) {
            things.insert(format!("process {} with id {}", name.trim(), entry.file_name().display()));
        }
    }
}

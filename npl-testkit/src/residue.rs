// SPDX-License-Identifier: Apache-2.0
//! Lists objects that a run may leave behind outside its process, for comparison before and after the run.
//!
//! `cargo xtask test` obtains the list from the program `npl-residue`, because xtask depends on no other crate of the
//! workspace.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use aya::maps::{MapInfo, MapType, loaded_maps};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{ProgramInfo, loaded_links, loaded_programs};
use npl_common::names::{PROGRAMS, SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS, XDP_PROGRAMS};

use crate::run::{self, Run};
use crate::{cgroups, mounts, poll, tools};

/// The time limit for the kernel to free objects. The kernel frees programs and maps some time after the last reference
/// to them is dropped.
const FREED_WITHIN: Duration = Duration::from_mins(1);

/// The prefix of the names of NPL's programs and maps, and of the namespaces of test runs.
const PREFIX: &str = "npl";

/// The name prefixes of the programs and maps that test runs load: the prefix of NPL, and the prefix of Cilium on the
/// Nodes.
const BPF_PREFIXES: [&str; 2] = [PREFIX, "cil"];

/// The names of executables that runs start, truncated to 15 characters as the kernel does. `server` is etcd, whose
/// program has this name when Go builds it.
const EXECUTABLES: [&str; 16] = [
    "cilium-agent",
    "containerd",
    "containerd-shim",
    "etcd",
    "kube-apiserver",
    "kube-controller",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
    "npl-agent",
    "npl-cluster",
    "npl-demo",
    "npl-echo",
    "npl-pause",
    "qemu-system-x86",
    "server",
];

/// Objects that exist outside this process at one moment, one line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residue {
    things: BTreeSet<String>,
}

impl Residue {
    /// Lists all objects on this machine that a test run or an agent may have created.
    pub fn look() -> Result<Self> {
        let mut things: BTreeSet<String> = netns_lines("").chain(cgroup_lines(PREFIX)?).chain(device_lines()).collect();
        for mount in mounts::all()? {
            if mount.kind == "bpf" {
                pins(&mount.point.join(PREFIX), &mut |path| things.extend([pin_line(path)]));
            }
            if mount.point.to_string_lossy().contains(PREFIX) {
                things.insert(mount_line(&mount.point));
            }
        }
        bpf_objects(|_any| true, |_any| true, &mut things);
        for qdisc in tools::output(Command::new("tc").args(["qdisc", "show"]))?.lines() {
            if qdisc.starts_with("qdisc clsact") || qdisc.starts_with("qdisc ingress") {
                things.insert(qdisc.trim_end().to_owned());
            }
        }
        processes(|_any| true, &mut things);
        Ok(Self { things })
    }

    /// Parses a list that [`Self::lines`] produced, possibly in another process.
    pub fn from_lines(text: &str) -> Self {
        Self { things: text.lines().map(str::to_owned).collect() }
    }

    /// Lists the objects of one run, and those pinned in its BPF file system. Objects of concurrent runs are not
    /// listed.
    pub fn look_at(run: &Run, bpffs: &Path) -> Result<Self> {
        Self::look_at_run(run.id(), bpffs)
    }

    /// Lists the objects of a run that another process owns.
    pub fn look_at_run(id: &str, bpffs: &Path) -> Result<Self> {
        let prefix = run::name_prefix(id);
        let mut things: BTreeSet<String> = netns_lines(&prefix).chain(cgroup_lines(&prefix)?).collect();
        things.extend(mounts::below(&run::directory_of(id))?.iter().map(|point| mount_line(point)));
        let (mut maps, mut programs) = (BTreeSet::new(), BTreeSet::new());
        pins(&bpffs.join(PREFIX), &mut |path| {
            things.insert(pin_line(path));
            // Add the kernel IDs of pinned objects, by which the objects are found in the listings of loaded programs
            // and maps.
            if is_program(path) {
                programs.extend(ProgramInfo::from_pin(path).ok().map(|info| info.id()));
                return;
            }
            maps.extend(MapInfo::from_pin(path).ok().map(|info| info.id()));
            let link = PinnedLink::from_pin(path).ok().and_then(|link| FdLink::from(link).info().ok());
            programs.extend(link.map(|info| info.program_id()));
        });
        bpf_objects(|id| programs.contains(&id), |id| maps.contains(&id), &mut things);
        let pids = run::processes_of(id)?;
        processes(|pid| pids.contains(&pid), &mut things);
        Ok(Self { things })
    }

    /// Returns one line per object.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.things.iter().map(String::as_str)
    }

    /// The objects that exist now and are not in this list.
    pub fn new_things(&self) -> Result<BTreeSet<String>> {
        Ok(Self::look()?.beyond(self))
    }

    fn beyond(&self, before: &Self) -> BTreeSet<String> {
        self.things.difference(&before.things).cloned().collect()
    }

    /// Waits until all objects that are not in this list are gone.
    ///
    /// # Errors
    /// Returns an error that lists the remaining objects if any objects remain.
    pub fn assert_nothing_new(&self) -> Result<()> {
        wait_for_none(|| self.new_things())
    }

    /// Waits until all objects of this list are gone.
    ///
    /// # Errors
    /// Returns an error that lists the remaining objects if any objects remain.
    pub fn assert_gone(&self) -> Result<()> {
        wait_for_none(|| Ok(Self::look()?.things.intersection(&self.things).cloned().collect()))
    }
}

fn wait_for_none(look: impl Fn() -> Result<BTreeSet<String>>) -> Result<()> {
    let mut left = BTreeSet::new();
    let gone = poll::until("the removal of the run's objects", FREED_WITHIN, || {
        left = look().ok()?;
        left.is_empty().then_some(())
    });
    if gone.is_err() {
        bail!("these objects were left behind:\n  {}", Vec::from_iter(left).join("\n  "));
    }
    Ok(())
}

fn bpf_objects(is_ours: impl Fn(u32) -> bool, is_our_map: impl Fn(u32) -> bool, things: &mut BTreeSet<String>) {
    let mut programs = BTreeSet::new();
    // Objects that disappear before they are inspected are skipped.
    for program in loaded_programs().flatten().filter(|program| is_ours(program.id())) {
        if let Some(name) = program.name_as_str().filter(|name| is_of_a_run(name)) {
            programs.insert(program.id());
            things.insert(format!("BPF program {name} with id {}", program.id()));
        }
    }
    let counts = |map: &MapInfo| map.map_type().is_ok_and(may_be_left);
    for map in loaded_maps().flatten().filter(|map| is_our_map(map.id()) && counts(map)) {
        if let Some(name) = map.name_as_str().filter(|name| is_of_a_run(name)) {
            things.insert(format!("BPF map {name} with id {}", map.id()));
        }
    }
    for link in loaded_links().flatten().filter(|link| programs.contains(&link.program_id())) {
        things.insert(format!("BPF link with id {} of program {}", link.id(), link.program_id()));
    }
}

fn is_of_a_run(name: &str) -> bool {
    BPF_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether a map of this type can be residue of a run. Program arrays are excluded, because the kernel itself leaks a
/// program array if a listing of maps opens the array by ID while the kernel clears the array. A process, pin or
/// program that holds a program array is listed anyway.
fn may_be_left(kind: MapType) -> bool {
    kind != MapType::ProgramArray
}

fn pins(directory: &Path, on_pin: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        on_pin(&entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pins(&entry.path(), on_pin);
        }
    }
}

/// Whether the pin's file name is the name of a program.
fn is_program(pin: &Path) -> bool {
    let names = PROGRAMS.iter().chain(SLOW_PATH_PROGRAMS).chain(XDP_PROGRAMS).copied();
    let mut names = names.chain(SOCKET_PROGRAMS.iter().map(|program| program.name));
    names.any(|name| pin.ends_with(name))
}

fn processes(is_ours: impl Fn(u32) -> bool, things: &mut BTreeSet<String>) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if EXECUTABLES.contains(&name.trim()) && is_ours(pid) {
            things.insert(format!("process {} with id {pid}", name.trim()));
        }
    }
}

fn netns_lines(prefix: &str) -> impl Iterator<Item = String> {
    run::netns_names()
        .into_iter()
        .filter(move |name| name.starts_with(prefix))
        .map(|name| format!("network namespace {name}"))
}

fn cgroup_lines(prefix: &str) -> Result<impl Iterator<Item = String>> {
    Ok(cgroups::names(prefix)?.into_iter().map(|name| format!("cgroup {name}")))
}

/// Network devices of this network namespace.
fn device_lines() -> impl Iterator<Item = String> {
    let entries = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    entries.map(|entry| format!("network device {}", entry.file_name().display()))
}

fn mount_line(point: &Path) -> String {
    format!("mount at {}", point.display())
}

fn pin_line(path: &Path) -> String {
    format!("pin {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::{MapType, Residue, may_be_left};

    #[test]
    fn objects_that_existed_before_are_not_residue() {
        let of = |names: &[&str]| Residue::from_lines(&names.join("\n"));
        assert_eq!(of(&["a", "b"]).beyond(&of(&["b", "c"])).into_iter().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn program_arrays_that_the_kernel_leaks_are_not_residue() {
        assert!(!may_be_left(MapType::ProgramArray));
        assert!(may_be_left(MapType::Hash) && may_be_left(MapType::Array));
    }

    #[test]
    fn a_list_survives_formatting_and_parsing() {
        let list = Residue::from_lines("network device lo\nprocess etcd with id 7");
        assert_eq!(Residue::from_lines(&list.lines().collect::<Vec<_>>().join("\n")), list);
    }
}

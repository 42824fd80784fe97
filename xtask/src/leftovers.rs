// SPDX-License-Identifier: Apache-2.0
//! Nothing that a test makes outside its own process is there afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::process;

/// The kernel frees programs and maps a moment after their last user is gone.
const GRACE: Duration = Duration::from_secs(20);

/// Programs that a test starts and must end, as the kernel cuts their names.
const PROGRAMS: [&str; 14] = [
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
];

/// What is on the machine that a test might have made, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leftovers(BTreeSet<String>);

impl Leftovers {
    /// Looks at the machine.
    pub(crate) fn look() -> Result<Self> {
        let mut found = BTreeSet::new();
        found.extend(folder_names("/run/netns").map(|name| format!("network namespace {name}")));
        found.extend(folder_names("/sys/fs/bpf").filter(|name| name == "npl").map(|name| format!("pins in {name}")));
        found.extend(control_groups());
        found.extend(mounts()?);
        found.extend(kernel_objects("prog")?);
        found.extend(kernel_objects("map")?);
        found.extend(network()?);
        found.extend(processes());
        Ok(Self(found))
    }

    fn beyond<'a>(&'a self, before: &'a Self) -> Vec<&'a str> {
        self.0.difference(&before.0).map(String::as_str).collect()
    }

    /// Fails if there is more than before, once the kernel had time to free what is unused.
    pub(crate) fn check_against(before: &Self) -> Result<()> {
        let started = Instant::now();
        loop {
            let after = Self::look()?;
            let left = after.beyond(before);
            if left.is_empty() {
                return Ok(());
            }
            if started.elapsed() > GRACE {
                bail!("the tests left behind: {}", left.join("; "));
            }
            thread::park_timeout(Duration::from_millis(200));
        }
    }
}

fn folder_names(folder: &str) -> impl Iterator<Item = String> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

/// Below the root of each hierarchy: the only one, or one of several.
fn control_groups() -> impl Iterator<Item = String> {
    let root = "/sys/fs/cgroup";
    let hierarchies = folder_names(root).map(move |name| format!("{root}/{name}"));
    let groups =
        hierarchies.chain([root.to_owned()]).flat_map(|hierarchy| folder_names(&hierarchy).collect::<Vec<_>>());
    groups.filter(|name| name.starts_with("npl-")).map(|name| format!("control group {name}"))
}

fn mounts() -> Result<Vec<String>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read which file systems are mounted")?;
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    Ok(places.filter(|place| place.contains("npl")).map(|place| format!("mount {place}")).collect())
}

/// Programs and maps of ours, by the kernel's number for each.
fn kernel_objects(kind: &str) -> Result<Vec<String>> {
    Ok(ours(kind, &process::ask(Command::new("bpftool").args([kind, "list"]))?))
}

/// Of a list, those that are ours. The kernel itself leaks an array of programs that somebody opens by its number while it
/// is cleared, as every such list does; who would hold one is a program, a process or a pin.
fn ours(kind: &str, list: &str) -> Vec<String> {
    // `17: sched_cls  name npl_ingress  tag …`
    let ours = list.lines().filter(|line| line.contains("name npl") && !line.contains(": prog_array "));
    ours.map(|line| format!("{kind} {}", line.split("  tag").next().unwrap_or(line))).collect()
}

/// Network devices of the machine's own namespace, and the traffic control queues on them.
fn network() -> Result<Vec<String>> {
    let devices = folder_names("/sys/class/net").map(|name| format!("device {name}"));
    let queues = process::ask(Command::new("tc").args(["qdisc", "show"]))?;
    let queues = queues.lines().filter(|line| line.contains("clsact") || line.contains("ingress"));
    Ok(devices.chain(queues.map(str::to_owned)).collect())
}

fn processes() -> impl Iterator<Item = String> {
    let ids = folder_names("/proc").filter(|name| name.chars().all(|c| c.is_ascii_digit()));
    ids.filter_map(|id| {
        let name = fs::read_to_string(format!("/proc/{id}/comm")).ok()?;
        PROGRAMS.contains(&name.trim()).then(|| format!("process {id} {}", name.trim()))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Leftovers, ours};

    #[test]
    fn what_the_kernel_itself_leaks_is_not_left_behind() {
        let list = "7: hash  name npl_mapping_v4  flags 0x0\n\tkey 4B  value 16B\n8: prog_array  name npl_slow  flags 0x0\n\
            9: sched_cls  name npl_ingress  tag 01  gpl\n10: hash  name another  flags 0x0\n";
        assert_eq!(
            ours("map", list),
            ["map 7: hash  name npl_mapping_v4  flags 0x0", "map 9: sched_cls  name npl_ingress"]
        );
    }

    #[test]
    fn what_was_there_before_is_not_left_behind() {
        let of = |names: &[&str]| Leftovers(names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>());
        assert_eq!(of(&["a", "b"]).beyond(&of(&["b", "c"])), ["a"]);
    }
}

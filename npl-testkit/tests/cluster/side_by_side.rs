// SPDX-License-Identifier: Apache-2.0
//! Tests a second cluster on the same machine. The test starts the second cluster with `npl-cluster`, as users do, and
//! kills the process that owns the second cluster.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::cgroups::{Hierarchy, Version};
use npl_testkit::cluster::timeout_option;
use npl_testkit::residue::Residue;
use npl_testkit::{run, tools};

use crate::clients;
use crate::traffic;
use crate::world::World;

fn npl_cluster(words: &[&str]) -> String {
    tools::output(Command::new(env!("CARGO_BIN_EXE_npl-cluster")).args(words)).unwrap()
}

/// Runs `npl-cluster` on a simulated machine with cgroup v1 only, if this machine has v1 and v2.
fn npl_cluster_on_version_1(words: &[&str]) -> String {
    let hierarchies = Hierarchy::all().unwrap();
    let has_version_1 = hierarchies.iter().any(|it| it.version != Version::V2);
    let Some(second) = hierarchies.into_iter().find(|it| it.version == Version::V2 && has_version_1) else {
        return npl_cluster(words);
    };
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "unchanged", "sh", "-c", r#"umount "$0" && exec "$@""#]);
    command.arg(second.point).arg(env!("CARGO_BIN_EXE_npl-cluster")).args(words);
    tools::output(&mut command).unwrap()
}

pub(crate) fn a_killed_cluster_leaves_nothing_behind_and_another_is_not_affected(world: &mut World) {
    let shown = npl_cluster_on_version_1(&["up", "--nodes", "1", "--kube-proxy", "none"]);
    println!("    {}", shown.lines().next().unwrap_or_default());
    let id = shown.split_whitespace().nth(1).unwrap();
    // The Node must be usable, although a Node of the first cluster has the same name and addresses.
    let kubectl = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        npl_cluster(&[&["--cluster", id, "kubectl"][..], &words].concat())
    };
    assert_eq!(kubectl("get nodes --output name"), "node/node-1\n");
    assert_eq!(npl_cluster(&["--cluster", id, "exec", "node-1", "hostname"]), "node-1\n");
    let settings = npl_cluster(&["--cluster", id, "exec", "node-1", "cat", "/proc/sys/kernel/panic_on_oops"]);
    assert_eq!(settings.trim(), "1", "the kubelet's sysctl value must be visible on the Node");
    let shop = world.wait_for_shop(4);
    let outside = clients::outside(world);
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }

    let mounts = npl_cluster(&["--cluster", id, "exec", "node-1", "cat", "/proc/self/mounts"]);
    // Other runs of the test kit may mount cgroups in their own directories.
    let groups: Vec<&str> = mounts.lines().filter(|line| line.contains(" /sys/fs/cgroup")).collect();
    let has = |kind: &str| groups.iter().any(|line| line.contains(kind));
    let has_both = has(" cgroup ") && has(" cgroup2 ");
    assert!(!has_both, "the Node must see one cgroup version only: {groups:?}");
    kubectl(&format!("wait --for create serviceaccount/default {}", timeout_option()));
    kubectl("run web --image localhost/npl-echo:0.1.0 --image-pull-policy Never -- --name web --port 8080");
    kubectl(&format!("wait --for condition=Ready pod/web {}", timeout_option()));

    let made = Residue::look_at_run(id, Path::new("/sys/fs/bpf")).unwrap();
    assert!(made.lines().count() > 10, "a running cluster must have processes and namespaces: {made:?}");
    let owner = run::owner(id).unwrap();
    signal::kill(Pid::from_raw(i32::try_from(owner).unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(npl_cluster(&["--cluster", id, "down"]), format!("cluster {id} has been removed\n"));
    made.assert_gone().unwrap();
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }
}

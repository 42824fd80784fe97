// SPDX-License-Identifier: Apache-2.0
//! A second cluster, by the command that people use, which ends in the worst way.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::residue::Residue;
use npl_testkit::{run, tools};

use crate::clients;
use crate::traffic;
use crate::world::World;

fn npl_cluster(words: &[&str]) -> String {
    tools::output(Command::new(env!("CARGO_BIN_EXE_npl-cluster")).args(words)).unwrap()
}

pub(crate) fn a_killed_cluster_leaves_nothing_and_another_goes_on(world: &mut World) {
    let shown = npl_cluster(&["up", "--nodes", "1", "--kube-proxy", "none"]);
    println!("    {}", shown.lines().next().unwrap_or_default());
    let id = shown.split_whitespace().nth(1).unwrap();
    // Same names and addresses as the first cluster's, and another cluster.
    let nodes = npl_cluster(&["--cluster", id, "kubectl", "get", "nodes", "--output", "name"]);
    assert_eq!(nodes, "node/node-1\n");
    assert_eq!(npl_cluster(&["--cluster", id, "exec", "node-1", "hostname"]), "node-1\n");
    let settings = npl_cluster(&["--cluster", id, "exec", "node-1", "cat", "/proc/sys/kernel/panic_on_oops"]);
    assert_eq!(settings.trim(), "1", "a kubelet's setting is the Node's own");
    let shop = world.wait_for_shop(4);
    let outside = clients::outside(world);
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }

    let made = Residue::look_at_run(id, Path::new("/sys/fs/bpf")).unwrap();
    assert!(made.lines().count() > 10, "a cluster that was up had processes and namespaces: {made:?}");
    let owner = run::owner(id).unwrap();
    signal::kill(Pid::from_raw(i32::try_from(owner).unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(npl_cluster(&["--cluster", id, "down"]), format!("cluster {id} is removed\n"));
    made.assert_gone().unwrap();
    for pod in shop.values() {
        assert_eq!(traffic::assert_served(world, &outside, pod), traffic::PORTS);
    }
}

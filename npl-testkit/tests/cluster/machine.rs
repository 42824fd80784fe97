// SPDX-License-Identifier: Apache-2.0
//! Checks that a cluster does not change files, directories and settings of the host.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use npl_testkit::tools;

use crate::world::World;

/// Files that a kubelet, a container runtime, kube-proxy, kube-router or Cilium would modify.
const FILES: [&str; 11] = [
    "/etc/iproute2/rt_tables",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/panic_on_oom",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/panic_on_oops",
    "/proc/sys/kernel/keys/root_maxkeys",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/unprivileged_bpf_disabled",
    "/proc/sys/kernel/timer_migration",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/netfilter/nf_conntrack_max",
];

/// Directories that a kubelet, containerd, a CNI plug-in, Cilium or NPL would create if they ran on the host itself.
const FOLDERS: [&str; 11] = [
    "/etc/cni",
    "/opt/containerd",
    "/run/cilium",
    "/run/containerd",
    "/sys/fs/bpf/cilium",
    "/sys/fs/bpf/npl",
    "/sys/fs/bpf/tc",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
];

/// The observable state of the host outside all Nodes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    settings: BTreeMap<&'static str, Option<String>>,
    folders: Vec<&'static str>,
    network: [String; 4],
}

impl Machine {
    pub(crate) fn look() -> Self {
        let ip = |words: &[&str]| tools::output(Command::new("ip").args(words)).unwrap();
        let rules = tools::output(Command::new("nft").args(["list", "tables"])).unwrap();
        Self {
            settings: FILES.into_iter().map(|file| (file, fs::read_to_string(file).ok())).collect(),
            folders: FOLDERS.into_iter().filter(|folder| Path::new(folder).exists()).collect(),
            network: [ip(&["-oneline", "link"]), ip(&["route"]), ip(&["-6", "route"]), rules],
        }
    }
}

pub(crate) fn the_host_is_not_modified(world: &mut World) {
    assert_eq!(Machine::look(), world.machine);
    for node in world.cluster.nodes() {
        // Inside the Node, the sysctls must have the values that a kubelet requires, because the Node has its own files
        // for them.
        let own = r#"[ "$(cat /proc/sys/kernel/panic)" = 10 ] && [ "$(hostname)" = "$0" ]"#;
        let mut command = Command::new("sh");
        command.args(["-c", own, &node.name()]);
        assert!(
            node.space().run(command).unwrap().success(),
            "{}: kernel.panic is not 10, or the hostname is not the Node's name; the Node may see the host's sysctls",
            node.name()
        );
    }
}

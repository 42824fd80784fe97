// SPDX-License-Identifier: Apache-2.0
//! Checks the kernel, the capabilities of this process, the running agent and the pinned datapath.

use super::{DatapathFacts, Device, Facts, Finding, Kernel};
use crate::core::devices::DeviceKind;

/// The advice of a check that needs the state of the running agent, if the agent's socket does not answer.
pub(super) const NAME_RUNTIME_DIR: &str = "name the directory of the agent's socket with --runtime-dir";
/// The advice of a check that lacks the permission to read its facts.
pub(super) const ASK_AS_ROOT: &str = "this check lacks privileges: run it again as root, or in the agent's container";

pub(super) fn version(kernel: &Kernel) -> Finding {
    let (key, found) = ("kernel", format!("Linux {}", kernel.release));
    if kernel.is_new_enough {
        return Finding::ok(key, found);
    }
    let needed = kernel.needed;
    let advice = format!("the programs do not load and no node port is served: run {needed}");
    Finding::failed(key, found, advice)
}

pub(super) fn btf(has_btf: bool) -> Finding {
    let key = "btf";
    if has_btf {
        return Finding::ok(key, "BTF is available");
    }
    Finding::warning(
        key,
        "no /sys/kernel/btf/vmlinux",
        "the kernel may reject the programs, which are not tested without BTF: run a kernel with \
         CONFIG_DEBUG_INFO_BTF",
    )
}

pub(super) fn bpffs(facts: &Facts) -> Finding {
    let (key, path) = ("bpffs", &facts.bpffs);
    if facts.is_bpffs_mounted {
        return Finding::ok(key, format!("mounted at {path}"));
    }
    let advice = format!(
        "the agent cannot start and no node port is served: mount a BPF file system (`mount -t bpf bpf {path}`), or \
         name the directory of a mounted BPF file system with --bpffs"
    );
    Finding::failed(key, format!("no BPF file system is mounted at {path}"), advice)
}

/// Checks the capabilities of this process. In the agent's container, this process has the agent's capabilities.
pub(super) fn rights(facts: &Facts) -> [Finding; 3] {
    let keys = ["cap_bpf", "cap_net_admin", "cap_perfmon"];
    let Some(rights) = facts.rights else {
        return keys.map(|key| Finding::unknown(key, "the capabilities of this process cannot be read", ASK_AS_ROOT));
    };
    let needed = |key, name, is_held| {
        if is_held {
            return Finding::ok(key, "held");
        }
        let advice = format!(
            "an agent without this capability cannot load or attach programs, so no node port is served: run the \
             agent as uid 0 with {name} (deploy/npl.yaml grants it)"
        );
        Finding::failed(key, "this process does not have the capability", advice)
    };
    let [bpf, net_admin, speed_up] = keys;
    [
        needed(bpf, "CAP_BPF", rights.bpf),
        needed(net_admin, "CAP_NET_ADMIN", rights.net_admin),
        perfmon(speed_up, rights.perfmon, facts),
    ]
}

/// Checks for `CAP_PERFMON`. The kernel adds no speculation barriers to programs that are loaded with this capability,
/// so these programs are faster.
fn perfmon(key: &'static str, is_held: bool, facts: &Facts) -> Finding {
    let is_installed = facts.datapath.as_ref().is_ok_and(|datapath| datapath.is_installed);
    let are_mitigated = facts.datapath.as_ref().is_ok_and(|datapath| datapath.has_mitigated_programs);
    match (is_installed, are_mitigated, facts.kernel.has_tcx) {
        (true, false, _) => Finding::ok(
            key,
            "the programs were loaded with the capability, so the kernel added no speculation barriers",
        ),
        (true, true, has_tcx) => {
            let cost = if has_tcx { "" } else { ", programs read packets by a helper, and there is no XDP program" };
            let advice = format!(
                "the programs contain the kernel's speculation barriers, so each translated packet takes 0.2 to 0.3 µs \
                 more CPU time{cost}: run `npl-agent load` with CAP_PERFMON before the agent starts, as the init container \
                 of deploy/npl.yaml does"
            );
            Finding::warning(key, "the programs were loaded without the capability", advice)
        }
        (false, ..) if is_held => Finding::ok(key, "held"),
        (false, ..) => {
            Finding::ok(key, "this process does not have the capability; without it, the programs are slower")
        }
    }
}

pub(super) fn agent(facts: &Facts) -> Finding {
    let key = "agent";
    if facts.is_agent_running {
        return Finding::ok(key, "running");
    }
    let meaning = if facts.is_installed() {
        "the programs keep translating packets, but changes of Pods and Services are not applied"
    } else {
        "no Pod of this Node gets a node port"
    };
    Finding::warning(
        key,
        "not running",
        format!("{meaning}: start the agent; the log of the previous agent states why it ended"),
    )
}

/// Checks that an admission policy restricts what the agent can write. Without the policy, every write of the agent
/// succeeds, so only the agent's dry run of a forbidden write shows that the policy is missing.
pub(super) fn admission_policy(facts: &Facts) -> Finding {
    let key = "admission_policy";
    match &facts.is_confined {
        _ if !facts.is_agent_running => Finding::ok(key, "no agent runs: see the check agent"),
        Ok(Some(true)) => Finding::ok(key, "an admission policy restricts the agent's writes"),
        Ok(Some(false)) => Finding::warning(
            key,
            "no admission policy restricts the agent's writes",
            "anybody who has the agent's token can change the labels and the status of every Pod: apply the \
             ValidatingAdmissionPolicy npl-agent and its binding from deploy/npl.yaml; the agent checks for the \
             policy when it starts and every 15 minutes",
        ),
        Ok(None) => Finding::unknown(
            key,
            "the agent has not found out whether an admission policy restricts its writes",
            "the agent tries a dry-run write to a Pod of this Node when it starts and every 15 minutes: check again when \
             a Pod runs here, or restart the agent",
        ),
        Err(reason) => Finding::unknown(key, reason, NAME_RUNTIME_DIR),
    }
}

pub(super) fn datapath(facts: &Facts) -> Finding {
    let key = "datapath";
    let datapath = match &facts.datapath {
        _ if !facts.is_bpffs_mounted => {
            return Finding::unknown(
                key,
                "no BPF file system is mounted",
                "no node port is served: see the check bpffs",
            );
        }
        Ok(datapath) => datapath,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    if !datapath.is_installed {
        return not_installed(key, facts);
    }
    let attached = attached(datapath, facts.devices.as_deref());
    let mappings: usize = datapath.mappings.values().sum();
    if attached.is_empty() {
        return Finding::failed(
            key,
            format!("no device has programs for both directions; mappings: {mappings}"),
            "no client outside the Node reaches a node port: name the uplinks with --devices; the agent's log states \
             why it did not choose each device",
        );
    }
    if mappings == 0 && has_only_tunnels(datapath, facts.devices.as_deref().unwrap_or_default()) {
        return Finding::failed(
            key,
            format!("only tunnels have programs: {}; mappings: 0", attached.join(", ")),
            "the agent publishes no node ports, since clients outside the Node do not use tunnels between Nodes: name \
             the uplinks with --devices",
        );
    }
    Finding::ok(key, format!("programs on {}; mappings: {mappings}", attached.join(", ")))
}

fn not_installed(key: &'static str, facts: &Facts) -> Finding {
    let found = format!("nothing is pinned below {}", facts.bpffs);
    if facts.is_agent_running {
        let advice = "no node port is served, or the agent uses another BPF file system: run this command with the \
                      agent's --bpffs, unless the agent has retired the Node";
        return Finding::failed(key, found, advice);
    }
    Finding::warning(key, found, "no node port is served: start the agent")
}

/// Whether the programs are attached to devices, and all these devices are tunnels to other Nodes, that is, tunnels
/// without a default route. The kernel does not show the Node's published addresses, so the result ignores these
/// addresses.
fn has_only_tunnels(datapath: &DatapathFacts, devices: &[Device]) -> bool {
    let mut attached = devices.iter().filter(|device| datapath.attached_devices.contains(&device.ifindex)).peekable();
    attached.peek().is_some() && attached.all(|device| device.kind == DeviceKind::Tunnel && !device.has_default_route)
}

/// The names of the devices that exist and have NPL's programs attached.
fn attached(datapath: &DatapathFacts, devices: Result<&[Device], &String>) -> Vec<String> {
    let name = |ifindex: &u32| match devices {
        Ok(devices) => devices.iter().find(|device| device.ifindex == *ifindex).map(|device| device.name.clone()),
        Err(_) => Some(format!("device {ifindex}")),
    };
    datapath.attached_devices.iter().filter_map(name).collect()
}

pub(super) fn local_clients(facts: &Facts) -> Finding {
    const MEANING: &str = "clients on the Node and in its Pods cannot connect to node ports; all other clients can";
    let key = "local_clients";
    let hooks = facts.datapath.as_ref().map_or(&[][..], |datapath| &datapath.socket_hooks);
    if !hooks.is_empty() {
        return Finding::ok(key, format!("served by {}", hooks.join(", ")));
    }
    match &facts.cgroup {
        None => Finding::warning(
            key,
            "no cgroup v2 hierarchy is mounted",
            format!("{MEANING}: mount it (`mount -t cgroup2 cgroup2 DIR`) and name DIR with --cgroup"),
        ),
        Some(path) if facts.is_installed() => Finding::warning(
            key,
            format!("local clients are not served; cgroup v2 is at {path}"),
            format!("{MEANING}: name this directory with --cgroup, unless --cgroup none is deliberate"),
        ),
        Some(path) => Finding::ok(key, format!("cgroup v2 is at {path}")),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What may keep node ports of this Node from working: facts of the machine in, findings out.

mod devices;
mod guard;
mod kernel;
mod sysctls;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    devices::{
        Device, DeviceSelection, choose,
        reply_routing::{Marking, Routing},
    },
    model::{Family, settings::PortRange},
};

/// The machine as it is now. What could not be read has the reason in its place.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The running kernel.
    pub kernel: Kernel,
    /// Whether it tells its own types.
    pub has_btf: bool,
    /// Where the BPF file system is looked for.
    pub bpffs: String,
    /// Whether it is there.
    pub is_bpffs_mounted: bool,
    /// What this process may do.
    pub rights: Option<Rights>,
    /// Whether an agent runs in this network namespace.
    pub is_agent_running: bool,
    /// What is pinned.
    pub datapath: Result<Datapath, String>,
    /// Where the version 2 hierarchy of control groups is.
    pub cgroup: Option<String>,
    /// The Node's devices.
    pub devices: Result<Vec<Device>, String>,
    /// Settings of this network namespace.
    pub sysctls: Sysctls,
    /// What becomes of the sources of packets that leave.
    pub masquerading: Result<Masquerading, String>,
    /// By which tables packets leave.
    pub routing: Result<Routing, String>,
    /// Which connections are marked.
    pub markings: Result<BTreeSet<Marking>, String>,
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// As it names itself.
    pub release: String,
    /// The oldest that is new enough.
    pub needed: &'static str,
    /// Whether it is.
    pub is_new_enough: bool,
    /// Whether TC hooks take BPF links.
    pub has_tcx: bool,
}

/// Capabilities that are in effect, or others that stand for them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rights {
    /// `CAP_BPF`.
    pub bpf: bool,
    /// `CAP_NET_ADMIN`.
    pub net_admin: bool,
    /// `CAP_PERFMON`.
    pub perfmon: bool,
}

/// What is pinned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Datapath {
    /// Whether anything is.
    pub is_installed: bool,
    /// Whether programs are loaded that have the kernel's barriers against speculation.
    pub has_mitigated_programs: bool,
    /// Indexes of the devices that carry a program in both directions, whether or not they are there.
    pub attached_devices: BTreeSet<u32>,
    /// The addresses that count as the Node's.
    pub addresses: BTreeSet<IpAddr>,
    /// Hooks by which clients on the Node itself are served.
    pub socket_hooks: Vec<&'static str>,
    /// The agent's ports.
    pub port_range: Option<PortRange>,
    /// How many mappings there are of each family that has any.
    pub mappings: BTreeMap<Family, usize>,
    /// Addresses that they lead to.
    pub pods: BTreeSet<IpAddr>,
}

/// Settings of a network namespace.
#[derive(Debug, Clone)]
pub struct Sysctls {
    /// `net.ipv4.ip_forward`.
    pub ip_forward: Setting,
    /// `net.ipv6.conf.all.forwarding`.
    pub ipv6_forwarding: Setting,
    /// `net.ipv4.conf.all.rp_filter`.
    pub rp_filter: Setting,
    /// `net.ipv4.conf.<device>.rp_filter`, by the device's name.
    pub rp_filters: BTreeMap<String, Setting>,
    /// `net.netfilter.nf_conntrack_tcp_be_liberal`.
    pub tcp_be_liberal: Setting,
    /// `net.netfilter.nf_conntrack_tcp_timeout_unacknowledged`, in seconds.
    pub tcp_unacknowledged: Setting,
    /// `net.netfilter.nf_conntrack_tcp_timeout_established`, in seconds.
    pub tcp_established: Setting,
    /// `net.ipv4.ip_local_port_range`.
    pub local_ports: Setting,
    /// `net.ipv4.ip_local_reserved_ports`.
    pub reserved_ports: Setting,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setting {
    /// Its text, without white space around it.
    Is(String),
    /// The kernel has no such setting now.
    Missing,
    /// Why it cannot be read.
    Unreadable(String),
}

/// What becomes of the sources of packets that leave.
#[derive(Debug, Clone, Copy)]
pub struct Masquerading {
    /// Whether the kernel has nftables, which a guard is made of.
    pub has_nftables: bool,
    /// Whether somebody translates them.
    pub is_done: bool,
    /// How many ends of mappings are guarded from it; nothing where there is no guard.
    pub guarded: Option<usize>,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing to do.
    Ok,
    /// Some traffic, or what may be asked for, does not work.
    Warning,
    /// Node ports do not work.
    Failed,
    /// It could not be looked at.
    Unknown,
}

impl State {
    /// For tables and programs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Which check; the same in every version.
    pub key: &'static str,
    /// How it ended.
    pub state: State,
    /// What is there.
    pub found: String,
    /// What that means for traffic and what to do, unless it is all right.
    pub advice: Option<String>,
}

impl Finding {
    fn ok(key: &'static str, found: impl Into<String>) -> Self {
        Self { key, state: State::Ok, found: found.into(), advice: None }
    }

    fn not_ok(key: &'static str, state: State, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { key, state, found: found.into(), advice: Some(advice.into()) }
    }

    fn warning(key: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::not_ok(key, State::Warning, found, advice)
    }

    fn failed(key: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::not_ok(key, State::Failed, found, advice)
    }

    fn unknown(key: &'static str, reason: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::not_ok(key, State::Unknown, reason, advice)
    }
}

/// Every check, in the order in which a user can do something about it.
pub fn examine(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![kernel::version(&facts.kernel), kernel::btf(facts.has_btf), kernel::bpffs(facts)];
    findings.extend(kernel::rights(facts));
    findings.extend([
        kernel::agent(facts),
        kernel::datapath(facts),
        devices::devices(facts),
        devices::addresses(facts),
    ]);
    findings.push(kernel::local_clients(facts));
    findings.extend(Family::ALL.map(|family| sysctls::forwarding(facts, family)));
    findings.extend([
        sysctls::rp_filter(facts),
        sysctls::conntrack_liberal(&facts.sysctls),
        sysctls::conntrack_silence(&facts.sysctls),
        sysctls::port_range(facts),
    ]);
    findings.extend([guard::masquerading(facts), guard::reply_routes(facts)]);
    findings
}

impl Facts {
    fn is_installed(&self) -> bool {
        self.datapath.as_ref().is_ok_and(|datapath| datapath.is_installed)
    }

    /// Devices by which clients' packets come in and leave: those that an agent took, or would take.
    fn uplinks(&self) -> impl Iterator<Item = &Device> {
        let devices = self.devices.as_deref().unwrap_or_default().iter();
        devices.filter(|device| choose(device, &DeviceSelection::Auto, &[], self.is_attached(device)).is_ok())
    }

    fn is_attached(&self, device: &Device) -> bool {
        self.datapath.as_ref().is_ok_and(|it| it.attached_devices.contains(&device.ifindex))
    }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The doctor: checks for the known causes that prevent node ports of this Node from working. Each check converts facts
//! about the Node to a finding.

mod annotations;
mod api_server;
pub mod catalog;
mod devices;
pub mod forward_chains;
mod forwarding;
mod guard;
mod host_ports;
mod incoming_rules;
mod kernel;
mod receive_offload;
mod software;
mod sysctls;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use self::forward_chains::ForwardChains;
pub use self::host_ports::HostPort;
use super::{
    check::Inconsistency,
    devices::{
        Device, DeviceSelection, choose,
        filter_order::ProgramsAhead,
        redirect::Forwarding,
        reply_routing::{Marking, Routing},
    },
    kernel_floor::KernelFloor,
    model::{Family, PodPort, Protocol, settings::PortRange},
    networks::{Role, RuleNames},
    pages,
    view::WatchView,
};

/// The facts about the Node on which the doctor's checks depend. If a fact cannot be read, its value is the error.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The release and features of the running kernel.
    pub kernel: Kernel,
    /// Whether the kernel has BTF.
    pub has_btf: bool,
    /// The directory of the BPF file system.
    pub bpffs: String,
    /// Whether the BPF file system is mounted.
    pub is_bpffs_mounted: bool,
    /// The capabilities of this process; `None` if the process cannot read them.
    pub rights: Option<Rights>,
    /// Whether an agent runs that pins its maps in this BPF file system.
    pub is_agent_running: bool,
    /// Whether an admission policy restricts the writes of the running agent, according to the agent's last check;
    /// `None` if no check has had a result yet.
    pub is_confined: Result<Option<bool>, String>,
    /// The Pods of the Node, as `namespace/name`, that have no node port because they are on the network of an uplink,
    /// according to the running agent.
    pub pods_on_node_network: Result<BTreeSet<String>, String>,
    /// The running agent's watches of the API server.
    pub watches: Result<Vec<WatchView>, String>,
    /// The lasting differences between the annotations of the Node's Pods, the mappings in the kernel and the Node's
    /// addresses.
    pub differences: Result<BTreeSet<Inconsistency>, String>,
    /// The published TCP host ports of the Node's Pods.
    pub host_ports: Result<Vec<HostPort>, String>,
    /// The state of the pinned maps and programs.
    pub datapath: Result<DatapathFacts, String>,
    /// The directory on which the cgroup v2 hierarchy is mounted; `None` if no cgroup v2 hierarchy is mounted.
    pub cgroup: Option<String>,
    /// The network devices of the Node.
    pub devices: Result<Vec<Device>, String>,
    /// The ifindex of the device by which each mapped Pod is reached. Pods without a route are absent.
    pub pod_devices: BTreeMap<IpAddr, u32>,
    /// The names of all devices on which GRO joins datagrams to a fraglist (`rx-gro-list`).
    pub devices_with_fraglists: Result<BTreeSet<String>, String>,
    /// The sysctls of this network namespace.
    pub sysctls: Sysctls,
    /// Whether the Node masquerades replies, and whether the nftables guard exempts replies from masquerading.
    pub masquerading: Result<Masquerading, String>,
    /// The forward chains of nftables; empty if the kernel has no nftables.
    pub forward_chains: Result<ForwardChains, String>,
    /// The policy routing rules and default routes of the Node.
    pub routing: Result<Routing, String>,
    /// The connections that the nftables guard marks.
    pub markings: Result<BTreeSet<Marking>, String>,
    /// By device: the programs of other software that run ahead of NPL's programs.
    pub programs_ahead: Result<ProgramsAhead, String>,
    /// Whether other software has a program or filter at egress of a device with NPL's programs.
    pub has_others_at_egress: bool,
    /// The names of netfilter's tables and chains.
    pub rule_names: Result<RuleNames, String>,
}

/// The release and the features of the running kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The release of the running kernel, such as `6.12.0`.
    pub release: String,
    /// The oldest release that NPL supports on this machine's architecture.
    pub needed: KernelFloor,
    /// Whether NPL supports the running kernel.
    pub is_new_enough: bool,
    /// Whether the running kernel supports TCX.
    pub has_tcx: bool,
    /// Whether the kernel, when it splits a fraglist, applies the translation of the first datagram to all datagrams of
    /// the fraglist.
    pub translates_fraglists: bool,
}

/// The effective capabilities of a process, including capabilities that `CAP_SYS_ADMIN` implies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rights {
    /// Whether the process has `CAP_BPF`.
    pub bpf: bool,
    /// Whether the process has `CAP_NET_ADMIN`.
    pub net_admin: bool,
    /// Whether the process has `CAP_PERFMON`.
    pub perfmon: bool,
}

/// The state of the maps and programs that an agent has pinned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DatapathFacts {
    /// Whether any map or program is pinned.
    pub is_installed: bool,
    /// Whether the kernel has added speculation barriers to any of the loaded programs.
    pub has_mitigated_programs: bool,
    /// The ifindexes of the devices that have programs for both directions. A device may have been removed since the
    /// programs were attached.
    pub attached_devices: BTreeSet<u32>,
    /// The addresses of the Node on which NPL serves node ports.
    pub addresses: BTreeSet<IpAddr>,
    /// The names of the cgroup hooks to which programs for local clients are attached.
    pub socket_hooks: Vec<&'static str>,
    /// The port range that the agent has configured in the datapath.
    pub port_range: Option<PortRange>,
    /// The number of mappings of each IP family. Families without mappings are absent.
    pub mappings: BTreeMap<Family, usize>,
    /// The Pod addresses of all mappings, with the mapped protocols and ports of each Pod address.
    pub pod_ports: BTreeMap<IpAddr, BTreeSet<(Protocol, PodPort)>>,
    /// The forwarding mode in which the programs redirect packets; `None` if the host's stack forwards all packets.
    pub forwarding: Option<Forwarding>,
    /// The addresses of the Pods with a next hop, to which the programs may redirect packets.
    pub redirected: BTreeSet<IpAddr>,
    /// Whether the agent redirects no packets in spite of `--forwarding redirect`, because a policy engine filters
    /// packets.
    pub is_redirect_refused: bool,
}

impl DatapathFacts {
    /// The Pod addresses of all mappings.
    pub fn pods(&self) -> BTreeSet<IpAddr> {
        self.pod_ports.keys().copied().collect()
    }

    /// The mapped Pods whose requests and replies the host's stack routes. With `--forwarding offload`, these are all
    /// mapped Pods, because the stack routes the first packets of each flow.
    pub fn pods_of_the_stack(&self) -> BTreeSet<IpAddr> {
        let is_redirected =
            |pod: &IpAddr| self.forwarding == Some(Forwarding::Redirect) && self.redirected.contains(pod);
        self.pods().into_iter().filter(|pod| !is_redirected(pod)).collect()
    }
}

/// The sysctls of a network namespace.
#[derive(Debug, Clone)]
pub struct Sysctls {
    /// The value of `net.ipv4.ip_forward`.
    pub ip_forward: Setting,
    /// By device name: the value of `net.ipv4.conf.<device>.forwarding`.
    pub ipv4_forwarding: BTreeMap<String, Setting>,
    /// The value of `net.ipv6.conf.all.forwarding`.
    pub ipv6_forwarding: Setting,
    /// By device name: the value of `net.ipv6.conf.<device>.force_forwarding`; missing before Linux 6.17.
    pub ipv6_force_forwarding: BTreeMap<String, Setting>,
    /// The value of `net.ipv4.conf.all.rp_filter`.
    pub rp_filter: Setting,
    /// By device name: the value of `net.ipv4.conf.<device>.rp_filter`.
    pub rp_filters: BTreeMap<String, Setting>,
    /// The value of `net.netfilter.nf_conntrack_tcp_be_liberal`.
    pub tcp_be_liberal: Setting,
    /// The value of `net.netfilter.nf_conntrack_tcp_timeout_unacknowledged`, in seconds.
    pub tcp_unacknowledged: Setting,
    /// The value of `net.netfilter.nf_conntrack_tcp_timeout_established`, in seconds.
    pub tcp_established: Setting,
    /// The value of `net.ipv4.ip_local_port_range`.
    pub local_ports: Setting,
    /// The value of `net.ipv4.ip_local_reserved_ports`.
    pub reserved_ports: Setting,
}

/// The value of a sysctl.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setting {
    /// The value of the sysctl, without surrounding white space.
    Is(String),
    /// The kernel does not have the sysctl, for example because a module is not loaded.
    Missing,
    /// The sysctl cannot be read; the text is the error.
    Unreadable(String),
}

/// Whether rules masquerade packets that leave the Node, and how many endpoints NPL exempts from masquerading.
#[derive(Debug, Clone, Copy)]
pub struct Masquerading {
    /// Whether the kernel has nftables, which the guard needs.
    pub has_nftables: bool,
    /// Whether an nftables or iptables rule masquerades packets that leave the Node.
    pub is_done: bool,
    /// The number of endpoints that the nftables guard exempts from masquerading; `None` if there is no guard.
    pub guarded: Option<usize>,
}

/// The severity of a check's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The check found no problem.
    Ok,
    /// Some traffic, or an optional feature, does not work.
    Warning,
    /// The node ports of some or all Pods do not work for some or all clients.
    Failed,
    /// The check could not read the facts that it needs.
    Unknown,
}

impl State {
    /// The name of the severity in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// The result of one of the doctor's checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The key of the check, which is stable across versions.
    pub key: &'static str,
    /// The severity of the finding.
    pub state: State,
    /// The check's observation, one sentence.
    pub found: String,
    /// The effect on traffic and the remedy; `None` if the state is ok.
    pub advice: Option<String>,
}

impl Finding {
    /// Returns the documentation section about the check; `None` if the state is ok.
    pub fn page(&self) -> Option<String> {
        (self.state != State::Ok).then(|| pages::of_check(self.key))
    }

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

impl Facts {
    /// Returns the running agent's answer. If there is none, returns the finding of the check `key`: `ok` if no agent
    /// runs, because the check `agent` reports this, and `unknown` if the agent's socket does not answer.
    fn answer_of_agent<'a, T>(&self, key: &'static str, answer: &'a Result<T, String>) -> Result<&'a T, Finding> {
        if !self.is_agent_running {
            return Err(Finding::ok(key, "no agent runs: see the check agent"));
        }
        answer.as_ref().map_err(|reason| Finding::unknown(key, reason, kernel::NAME_RUNTIME_DIR))
    }
}

/// Runs all checks. Returns the findings in the order in which an operator should solve the problems.
pub fn examine(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![kernel::version(&facts.kernel), kernel::btf(facts.has_btf), kernel::bpffs(facts)];
    findings.extend(kernel::rights(facts));
    findings.extend([
        kernel::agent(facts),
        api_server::api_server(facts),
        kernel::admission_policy(facts),
        kernel::datapath(facts),
        devices::devices(facts),
        devices::addresses(facts),
        annotations::annotations(facts),
        devices::node_network(facts),
        host_ports::host_ports(facts),
        devices::program_order(facts),
        receive_offload::fraglists(facts),
    ]);
    findings.extend([
        software::recognized(facts, Role::Cni),
        software::policy_engine(facts),
        software::recognized(facts, Role::ServiceProxy),
    ]);
    findings.push(kernel::local_clients(facts));
    findings.extend(Family::ALL.map(|family| forwarding::forwarding(facts, family)));
    findings.push(forward_chains::forward_chains(facts));
    findings.extend([
        sysctls::rp_filter(facts),
        sysctls::conntrack_liberal(&facts.sysctls),
        sysctls::conntrack_timeouts(&facts.sysctls),
        sysctls::port_range(facts),
        sysctls::service_ports(&facts.sysctls),
    ]);
    findings.extend([guard::masquerading(facts), guard::reply_routes(facts), incoming_rules::incoming_rules(facts)]);
    findings
}

impl Facts {
    fn is_installed(&self) -> bool {
        self.datapath.as_ref().is_ok_and(|datapath| datapath.is_installed)
    }

    /// The uplinks: the devices with NPL's programs, and the devices to which an agent without the flag `--devices`
    /// would attach its programs.
    fn uplinks(&self) -> impl Iterator<Item = &Device> {
        let devices = self.devices.as_deref().unwrap_or_default().iter();
        devices.filter(|device| choose(device, &DeviceSelection::Auto, &[], self.is_attached(device)).is_ok())
    }

    /// The devices through which the Node reaches the mapped Pods.
    fn devices_of_pods(&self) -> impl Iterator<Item = &Device> {
        let devices = self.devices.as_deref().unwrap_or_default().iter();
        devices.filter(|device| self.pod_devices.values().any(|ifindex| *ifindex == device.ifindex))
    }

    fn is_attached(&self, device: &Device) -> bool {
        self.datapath.as_ref().is_ok_and(|it| it.attached_devices.contains(&device.ifindex))
    }
}

/// Joins the first three texts, and adds the number of the remaining texts after `before_rest`.
fn abridged(texts: &[impl AsRef<str>], separator: &str, before_rest: &str) -> String {
    abridged_to(3, texts, separator, before_rest)
}

/// Joins the first `shown` texts, and adds the number of the remaining texts after `before_rest`.
fn abridged_to(shown: usize, texts: &[impl AsRef<str>], separator: &str, before_rest: &str) -> String {
    let joined = texts.iter().take(shown).map(AsRef::as_ref).collect::<Vec<_>>().join(separator);
    if texts.len() > shown { format!("{joined}{before_rest}{} more", texts.len() - shown) } else { joined }
}

#[cfg(test)]
mod reported;
#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The command line: clap checks each value as it parses it, with the functions of [`super::value`].

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PathBufValueParser, TypedValueParser as _},
};

use super::value;
use crate::{
    core::{
        devices::{DeviceSelection, redirect::Forwarding, xdp::Attach},
        model::{
            Protocol,
            settings::{AnnotationFormat, NodeIpSource, PortRange, ProtocolPairing},
        },
    },
    datapath::CgroupSelection,
    nft_guard::GuardMode,
    process::telemetry::LogFormat,
};

/// NodePortLocal for every Kubernetes CNI: maps a port of the Node to each Pod port that an enabled Service selects.
#[derive(Debug, Clone, Parser)]
#[command(name = "npl-agent", version, propagate_version = true)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Run the agent on this Node. The kernel programs keep translating after the agent stops.
    Run(Box<RunArgs>),
    /// Show attached programs and packet counters. Reads the kernel, so it works with and without a running agent.
    Status(ViewArgs),
    /// Show the mappings of this Node. Reads the kernel, so it works with and without a running agent.
    Mappings(ViewArgs),
    /// Check this Node's kernel, capabilities and settings, and print each finding with its remedy. Changes nothing,
    /// and works with and without a running agent. Exits with 1 if a finding keeps node ports from working.
    Doctor(ViewArgs),
    /// Load the kernel programs ahead of an agent that runs with fewer capabilities. With `CAP_PERFMON`, the kernel
    /// omits its Spectre mitigations from them, which makes them faster; without `CAP_PERFMON`, load does nothing.
    Load(LoadArgs),
    /// Remove everything that npl-agent has left in this Node's kernel. Translation stops and connections break.
    Cleanup(CleanupArgs),
}

/// Flags of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Serve the Node with this name, as `kubectl get nodes` shows it.
    #[arg(long, env = "NPL_NODE_NAME", value_name = "NAME", value_parser = value::node_name)]
    pub node_name: String,

    /// Connect to the API server with this kubeconfig file. Unset: with the service account of the agent's Pod.
    #[arg(long, env = "NPL_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Allocate node ports from this range, both ends included. No other program of the Node may use these ports: keep
    /// the range apart from `net.ipv4.ip_local_port_range` and from the cluster's range for Services of type
    /// `NodePort`.
    #[arg(long, env = "NPL_PORT_RANGE", value_name = "START-END", default_value = "61000-62000")]
    pub port_range: PortRange,

    /// Map Pod ports of these protocols: tcp, udp and sctp, separated by commas. Add sctp only for load balancers that
    /// support it: AKO and F5 CIS ignore the protocol of an entry and send TCP to SCTP node ports.
    #[arg(long, env = "NPL_PROTOCOLS", value_name = "LIST", default_value = "tcp,udp", value_parser = value::protocols)]
    pub protocols: BTreeSet<Protocol>,

    /// Translate packets on these network devices, separated by commas, for example eth0,eth1. "auto" selects each
    /// device with a published address of the Node, a default route or another global address, and each tunnel, and
    /// follows changes.
    #[arg(long, env = "NPL_DEVICES", value_name = "auto|LIST", default_value = "auto", value_parser = value::devices)]
    pub devices: DeviceSelection,

    /// Forward translated packets through the kernel stack, or faster by device-to-device redirect. "offload" redirects
    /// a connection after the stack has forwarded packets of both directions, and sends one packet of each direction
    /// through the stack again every 256 jiffies (0.25 to 2.6 s); it needs
    /// `net.netfilter.nf_conntrack_tcp_be_liberal=1`. FORWARD rules, NetworkPolicy and `ip xfrm` policies do not apply
    /// to redirected packets; docs/datapath.md has the details.
    #[arg(long, env = "NPL_FORWARDING", value_name = "stack|redirect|offload", default_value = "stack")]
    pub forwarding: Forwarding,

    /// Redirect packets with --forwarding redirect also beside a policy engine that filters in netfilter, such as Calico or
    /// kube-router: NetworkPolicy does not apply to redirected packets. Without this flag, packets take the kernel stack
    /// there.
    #[arg(long, env = "NPL_IGNORE_NETWORK_POLICY")]
    pub ignore_network_policy: bool,

    /// Translate requests at TC, or for less CPU time per packet in the driver by XDP: "auto" uses XDP where the driver
    /// is known to be safe, "xdp" on each driver that accepts a program. "xdp" breaks packets with unfinished
    /// checksums, which virtual devices such as veth carry. XDP takes effect only with --forwarding stack.
    #[arg(long, env = "NPL_ATTACH", value_name = "tc|auto|xdp", default_value = "tc")]
    pub attach: Attach,

    /// Publish the Node's `InternalIP` or `ExternalIP`, with the other of the two as the fallback; or publish these
    /// addresses, at most one of each IP family, or the Node's first address in one of these ranges. A published address
    /// stays as long as the Node lists it, in any order.
    #[arg(
        long, env = "NPL_NODE_IP", value_name = "internal|external|IP[,IP]|CIDR[,CIDR]", default_value = "internal",
        value_parser = value::node_ip
    )]
    pub node_ip: NodeIpSource,

    /// Use the annotations of this domain: DOMAIN/enabled and DOMAIN/allowed-source-ranges on Services, DOMAIN on Pods.
    #[arg(
        long, env = "NPL_ANNOTATION_DOMAIN", value_name = "DOMAIN", default_value = "nodeportlocal.antrea.io",
        value_parser = value::domain
    )]
    pub annotation_domain: String,

    /// Write entries with the fields of this Antrea version, for load balancers that read its annotation: v1.7, v2.0 or
    /// v2.6.
    #[arg(long, env = "NPL_ANNOTATION_FORMAT", value_name = "VERSION", default_value = "v1.7")]
    pub annotation_format: AnnotationFormat,

    /// Publish the protocols of one Pod port with a node port each, as Antrea does; or with "merged" as one entry with one
    /// node port for all of them, for load balancers that ignore the protocol of an entry, such as AKO and F5 CIS.
    #[arg(long, env = "NPL_PROTOCOL_PAIRING", value_name = "separate|merged", default_value = "separate")]
    pub protocol_pairing: ProtocolPairing,

    /// Keep translating a mapping for this long after the annotation stops naming it, so that load balancers can drain
    /// its connections: numbers with the units ms, s, m and h, for example 1m30s, at most a day.
    #[arg(long, env = "NPL_DRAIN", value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
    pub drain: Duration,

    /// Keep a node port unused for this long after its mapping is removed, so that late packets do not reach another
    /// Pod: numbers with the units ms, s, m and h, at most a day. Ports that still receive datagrams are reused last.
    #[arg(long, env = "NPL_QUARANTINE", value_name = "DURATION", default_value = "60s", value_parser = value::duration)]
    pub quarantine: Duration,

    /// Interval at which the agent compares the kernel's state with the desired state and repairs it, besides reacting
    /// to changes: numbers with the units ms, s, m and h, at least 1s.
    #[arg(long, env = "NPL_RESYNC", value_name = "DURATION", default_value = "30s", value_parser = value::interval)]
    pub resync: Duration,

    /// Pin programs and maps below this mount point of the BPF file system, where they outlive the agent.
    #[arg(
        long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS,
        value_parser = PathBufValueParser::new().try_map(value::directory)
    )]
    pub bpffs: PathBuf,

    /// Let the Node's own processes, Pods included, connect to mappings if they belong to this cgroup v2 or one below
    /// it. "auto" finds the root of the hierarchy; in a container, give the mount point of the Node's hierarchy. "none"
    /// turns this off.
    #[arg(
        long, env = "NPL_CGROUP", value_name = "auto|none|DIRECTORY", default_value = "auto",
        value_parser = value::cgroup
    )]
    pub cgroup: CgroupSelection,

    /// Maintain an nftables table that exempts replies of mapped Pod ports from masquerading, and sets the mark that
    /// reply routing needs. "auto" maintains it where the Node has source NAT rules or such a mark.
    #[arg(long, env = "NPL_NFT_GUARD", value_name = "auto|on|off", default_value = "auto", value_parser = value::guard)]
    pub nft_guard: GuardMode,

    /// Retire this Node before uninstalling: remove the annotations, keep translating for --drain, then remove all
    /// kernel state and report ready.
    #[arg(long, env = "NPL_RETIRE")]
    pub retire: bool,

    /// Serve /metrics, /livez, /readyz and /startupz by HTTP on this address and port.
    #[arg(
        long, env = "NPL_LISTEN", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9911",
        value_parser = value::listen
    )]
    pub listen: SocketAddr,

    /// Write log lines to standard error in this format. The variable `NPL_LOG` selects lines by level and module, for
    /// example `npl_agent=debug,warn`.
    #[arg(long, env = "NPL_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Flags of `load`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Pin the programs below this mount point of the BPF file system, where the agent finds them.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,

    /// First mount a BPF file system there, if none is. This takes `CAP_SYS_ADMIN`, and in a container a mount whose
    /// propagation is bidirectional.
    #[arg(long, env = "NPL_MOUNT_BPFFS")]
    pub mount_bpffs: bool,
}

/// Flags of `cleanup`.
#[derive(Debug, Clone, Args)]
pub struct CleanupArgs {
    /// Where to clean up, and how to print the removed state.
    #[command(flatten)]
    pub view: ViewArgs,

    /// Stay until SIGTERM after the cleanup, for the Pods of a DaemonSet, whose containers must not end.
    #[arg(long, env = "NPL_STAY")]
    pub stay: bool,
}

/// Flags of the subcommands that read the kernel's state.
#[derive(Debug, Clone, Args)]
pub struct ViewArgs {
    /// Find the agent's programs and maps below this mount point of the BPF file system.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,

    /// Print the result in this format.
    #[arg(long, env = "NPL_OUTPUT", value_enum, default_value_t)]
    pub output: OutputFormat,
}

const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// The format of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Tables and text for people.
    #[default]
    Table,
    /// JSON for programs.
    Json,
}

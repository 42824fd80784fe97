// SPDX-License-Identifier: Apache-2.0
//! The command line: text and numbers as they were typed. [`crate::config`] makes sense of them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::process::telemetry::LogFormat;

/// NodePortLocal for every Kubernetes CNI: a port of the Node for each port of a Pod that an enabled Service selects.
#[derive(Debug, Clone, Parser)]
#[command(name = "npl-agent", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Serve this Node until told to stop; the datapath goes on translating afterwards.
    Run(Box<RunArgs>),
    /// Show what is attached and what has been counted, read from the kernel, with or without a running agent.
    Status(ViewArgs),
    /// Show the mappings, read from the kernel, with or without a running agent.
    Mappings(ViewArgs),
    /// Check kernel, rights and settings of this Node, and say what is wrong and what to do, with or without a running agent.
    /// Changes nothing. Ends with 1 if something keeps node ports from working.
    Doctor(ViewArgs),
    /// Load the programs and leave them to the agent, which runs with fewer rights. With `CAP_PERFMON`, the kernel takes them as
    /// they are; without it, nothing is done.
    Load(LoadArgs),
    /// Remove everything that any agent of this Node has left in the kernel. Translation stops.
    Cleanup(ViewArgs),
}

/// Flags of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Name of the Node that the agent runs on, as the API server knows it.
    #[arg(long, env = "NPL_NODE_NAME", value_name = "NAME")]
    pub node_name: String,

    /// Kubeconfig file to reach the API server with; without it, the Pod's own service account is used.
    #[arg(long, env = "NPL_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Ports of the Node to allocate from, both ends included; no other program of the Node may use them.
    #[arg(long, env = "NPL_PORT_RANGE", value_name = "START-END", default_value = "61000-62000")]
    pub port_range: String,

    /// Protocols to serve, of tcp, udp and sctp. AKO and F5 CIS read annotations without regard to the protocol, and would
    /// send TCP to the node port of an SCTP entry: name sctp only where whoever reads annotations knows it.
    #[arg(long, env = "NPL_PROTOCOLS", value_name = "LIST", default_value = "tcp,udp")]
    pub protocols: String,

    /// Network devices that clients' packets arrive on: "auto" follows the Node's routes, or a list such as eth0,eth1.
    #[arg(long, env = "NPL_DEVICES", value_name = "auto|LIST", default_value = "auto")]
    pub devices: String,

    /// How what was translated goes on: "stack" by the host's routes and firewall, "redirect" from device to device, past
    /// both, where that can be right; "offload" the same for flows that both let through, of which they go on to see a packet
    /// now and then. Connection tracking has to be liberal for that: see docs/datapath.md.
    #[arg(long, env = "NPL_FORWARDING", value_name = "stack|redirect|offload", default_value = "stack")]
    pub forwarding: String,

    /// Where requests are translated: by TC; "auto" has the drivers of network cards do it ahead of that, by XDP, where they
    /// are known to be safe and packets take the host's stack; "xdp" all that can. Packets whose checksums are not finished are
    /// broken by "xdp".
    #[arg(long, env = "NPL_ATTACH", value_name = "tc|auto|xdp", default_value = "tc")]
    pub attach: String,

    /// Address of the Node to publish: its internal or external one, or one address of each family.
    #[arg(long, env = "NPL_NODE_IP", value_name = "internal|external|IP[,IP]", default_value = "internal")]
    pub node_ip: String,

    /// Domain of the annotations: DOMAIN/enabled and DOMAIN/allowed-source-ranges on a Service, DOMAIN on a Pod.
    #[arg(long, env = "NPL_ANNOTATION_DOMAIN", value_name = "DOMAIN", default_value = "nodeportlocal.antrea.io")]
    pub annotation_domain: String,

    /// Fields of a published entry, named for the version of Antrea that writes the same: v1.7, v2.0 or v2.6.
    #[arg(long, env = "NPL_ANNOTATION_FORMAT", value_name = "VERSION", default_value = "v1.7")]
    pub annotation_format: String,

    /// How long a mapping goes on translating after the annotation has stopped naming it.
    #[arg(long, env = "NPL_DRAIN", value_name = "DURATION", default_value = "30s")]
    pub drain: String,

    /// How long a node port stays out of use after its mapping is gone. One that somebody still sends datagrams to is the
    /// last to be used after that.
    #[arg(long, env = "NPL_QUARANTINE", value_name = "DURATION", default_value = "60s")]
    pub quarantine: String,

    /// How often everything in the kernel is compared with what should be there, beside each change that is noticed.
    #[arg(long, env = "NPL_RESYNC", value_name = "DURATION", default_value = "30s")]
    pub resync: String,

    /// Where the bpf filesystem is mounted.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,

    /// Whose sockets may use mappings on the Node itself: the processes of this cgroup v2 and all below, Pods included.
    /// "auto" finds the root of the hierarchy; a container has to name where it sees the Node's.
    #[arg(long, env = "NPL_CGROUP", value_name = "auto|none|DIRECTORY", default_value = "auto")]
    pub cgroup: String,

    /// Whether an nftables table of its own keeps the Node from masquerading replies whose connection it has forgotten, and
    /// sets the mark by which rules lead replies back to where requests came in; "auto" where somebody translates the sources
    /// of what leaves, or has such rules.
    #[arg(long, env = "NPL_NFT_GUARD", value_name = "auto|on|off", default_value = "auto")]
    pub nft_guard: String,

    /// Give everything up: withdraw what is published, serve until `--drain` is over, take all of it out of the kernel, and
    /// be ready then. What comes before uninstalling.
    #[arg(long, env = "NPL_RETIRE")]
    pub retire: bool,

    /// Address and port to serve /metrics, /livez, /readyz and /startupz on.
    #[arg(long, env = "NPL_LISTEN", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9911")]
    pub listen: String,

    /// How log lines look; the variable `NPL_LOG` says which there are.
    #[arg(long, env = "NPL_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Flags of `load`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Where the bpf filesystem is mounted.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,
}

/// Flags of the commands that look at the kernel.
#[derive(Debug, Clone, Args)]
pub struct ViewArgs {
    /// Where the bpf filesystem is mounted.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,

    /// How the result looks.
    #[arg(long, env = "NPL_OUTPUT", value_enum, default_value_t)]
    pub output: OutputFormat,
}

const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// How a result looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

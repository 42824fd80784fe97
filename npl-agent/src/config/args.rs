// SPDX-License-Identifier: Apache-2.0
//! The command line. clap checks each value with the functions of [`super::value`].

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PathBufValueParser, TypedValueParser as _},
};

use clap_complete::Shell;

use super::{echo_args::EchoCommand, load_args::LoadArgs, trace_args::TraceArgs, value};
use crate::{
    core::{
        devices::{DeviceSelection, redirect::Forwarding, xdp::Attach},
        model::{
            Protocol,
            namespaces::Namespaces,
            settings::{AnnotationFormat, NodeIpSource, PortRange, ProtocolPairing},
            sources::SourceRange,
        },
        sizes::MaxFlows,
        view::PortState,
        why::Question,
    },
    datapath::{CgroupSelection, ClientScope},
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

const STATUS_EXAMPLES: &str = "Examples:
  npl-agent status                     one screen; the exit code states whether the Node is healthy
  npl-agent status --wait=2m           wait until the Node is healthy, at most two minutes
  npl-agent status --interval 10s      with rates over ten seconds
  npl-agent status --output json | jq .findings";

const WHY_EXAMPLES: &str = "Examples:
  npl-agent why pod/shop/web-0         every port of the Pod that a Service requests
  npl-agent why pod/shop/web-0:8080    one port
  npl-agent why service/shop/web       every Pod of the Service on this Node";

const FLOWS_EXAMPLES: &str = "Examples:
  npl-agent flows -n shop --pod web-0              the flows of one Pod
  npl-agent flows --client 198.51.100.0/24         the flows of these clients
  npl-agent flows --output json | jq -r .client    one JSON object per line";

const TRACE_EXAMPLES: &str = "Examples:
  npl-agent trace --client 198.51.100.7 --node-port 61000    one client's packets to one node port
  npl-agent trace -n shop --pod web-0 --count 20             the first 20 records of a Pod's packets
  npl-agent trace --client 198.51.100.0/24 --pcap - | wireshark -k -i -";

const TOP_EXAMPLES: &str = "Examples:
  npl-agent top
  kubectl --namespace npl-system exec -it daemonset/npl-agent -- /npl-agent top";

const BUNDLE_EXAMPLES: &str = "Examples:
  npl-agent bundle > npl-bundle.tar.gz             an archive of this Node
  npl-agent bundle --flows --file npl.tar.gz       with all flows and their clients
  npl-agent bundle --output json | jq '.[\"status.json\"].findings'";

const CLEANUP_EXAMPLES: &str = "Examples:
  npl-agent cleanup --dry-run                      what a cleanup of this Node would remove
  npl-agent cleanup --dry-run --output json | jq -r '.removals[].kind'";

const MAPPINGS_EXAMPLES: &str = "Examples:
  npl-agent mappings                              all mappings of this Node
  npl-agent mappings -n shop --service web        mappings that the Service shop/web requests
  npl-agent mappings --state draining,quarantined node ports that are draining or in quarantine
  npl-agent mappings --watch                      every two seconds, with packets per second";

/// The subcommands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Run the agent on this Node. The kernel programs keep translating after the agent stops.
    Run(Box<RunArgs>),
    /// Show whether this Node serves its node ports, and if not, why. Shows the state of the agent, the API server,
    /// devices, ports and maps, and packets that were not translated. Exits with 0 if the Node is healthy, 1 if traffic
    /// is at risk, 2 if the state of the Node cannot be read.
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show the mappings of this Node with their traffic, Pods, Services and states. Pods, Services and states come
    /// from the running agent; if no agent runs, only the mappings in the kernel's maps and their traffic are shown.
    #[command(after_help = MAPPINGS_EXAMPLES)]
    Mappings(MappingsArgs),
    /// Explain why a Pod or a Service is served or not: print the conditions in order, from the state of the agent to
    /// the packets of the node port. Marks the first condition that does not hold, and names the section of the
    /// documentation about this condition. Exits with 0 if every condition holds, 1 if a condition does not hold, 2
    /// without a running agent.
    #[command(after_help = WHY_EXAMPLES)]
    Why(WhyArgs),
    /// Show the established flows through node ports with client, node address, Pod address and Pod name, the most
    /// recent first. Flows whose handshake is not complete are not listed. Packets and bytes are those that kernel
    /// conntrack has counted, if `net.netfilter.nf_conntrack_acct` is 1 on the Node.
    #[command(after_help = FLOWS_EXAMPLES)]
    Flows(FlowsArgs),
    /// Follow packets of a client, Pod or node port through the kernel programs: each packet before and after a
    /// program, with the program's verdict and reason. Connections of local clients are translated at the socket, so
    /// their packets already have the Pod's address, and are shown with the verdict `unrelated` or not at all.
    #[command(after_help = TRACE_EXAMPLES)]
    Trace(TraceArgs),
    /// Show the busiest mappings of this Node on a terminal, with packets and new flows per second, packets that were
    /// not translated, and problems. Updates the screen at an interval. A terminal of 80 columns and 24 lines is
    /// sufficient.
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Check this Node's kernel, capabilities and settings, and print each finding with its remedy. Changes no state,
    /// and works with and without a running agent. Exits with 1 if a finding keeps node ports from working.
    Doctor(NodeViewArgs),
    /// Write a support archive of this Node: versions, status, mappings, findings of the doctor, state of the agent.
    /// Works without a running agent. The archive contains no Secret, no environment, no log, and no annotation or
    /// label of an object.
    #[command(after_help = BUNDLE_EXAMPLES)]
    Bundle(BundleArgs),
    /// Load the kernel programs for an agent that starts later and has fewer capabilities. With `CAP_PERFMON`, the
    /// kernel adds no Spectre mitigations to the programs, so the programs are faster; without `CAP_PERFMON`, the
    /// command does nothing.
    Load(LoadArgs),
    /// Remove all maps, programs, filters and nftables rules of npl-agent from this Node's kernel. Translation stops
    /// and connections break. `--dry-run` lists what would be removed, and changes nothing.
    #[command(after_help = CLEANUP_EXAMPLES)]
    Cleanup(CleanupArgs),
    /// Retire every Node of the cluster before uninstalling: set `NPL_RETIRE` on the agents' DaemonSets, and wait until
    /// each Node has withdrawn its annotations and removed its kernel state. The chart's hook runs this command.
    Retire(RetireArgs),
    /// Run the echo server or an echo client in a Pod of `kubectl npl test`.
    #[command(hide = true, subcommand)]
    Echo(EchoCommand),
    /// The hidden commands that generate files.
    #[command(flatten)]
    Generate(GenerateCommand),
}

/// The hidden commands that generate files from the definition of the command line.
#[derive(Debug, Clone, Subcommand)]
pub enum GenerateCommand {
    /// Print the completion for a shell.
    #[command(hide = true)]
    Completion {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write the man pages of all commands into a folder.
    #[command(hide = true)]
    Man {
        /// The folder. The command creates the folder if it does not exist.
        #[arg(value_name = "DIRECTORY")]
        directory: PathBuf,
    },
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
    /// support SCTP: AKO and F5 CIS ignore the protocol of an entry and send TCP to SCTP node ports.
    #[arg(long, env = "NPL_PROTOCOLS", value_name = "LIST", default_value = "tcp,udp", value_parser = value::protocols)]
    pub protocols: BTreeSet<Protocol>,

    /// Translate packets on these network devices, separated by commas, for example eth0,eth1. "auto" selects each
    /// tunnel, and each device through which clients may reach the Node, for example a device with a published address
    /// of the Node, a default route or another global address. Devices that only lead to Pods are not selected. The
    /// selection changes with the Node's devices.
    #[arg(long, env = "NPL_DEVICES", value_name = "auto|LIST", default_value = "auto", value_parser = value::devices)]
    pub devices: DeviceSelection,

    /// Forward translated packets through the kernel stack, or faster by device-to-device redirect. "offload" redirects
    /// a connection after the stack has forwarded packets of both directions, and sends one packet of each direction
    /// through the stack again every 256 jiffies (0.25 to 2.6 s). "offload" needs
    /// `net.netfilter.nf_conntrack_tcp_be_liberal=1`. FORWARD rules, NetworkPolicy and `ip xfrm` policies do not apply
    /// to redirected packets; docs/datapath.md has the details.
    #[arg(long, env = "NPL_FORWARDING", value_name = "stack|redirect|offload", default_value = "stack")]
    pub forwarding: Forwarding,

    /// Redirect packets with --forwarding redirect even if the Node has a policy engine that filters in netfilter, such
    /// as Calico or kube-router. NetworkPolicy does not apply to redirected packets. Without this flag, the kernel
    /// stack forwards all packets on such a Node.
    #[arg(long, env = "NPL_IGNORE_NETWORK_POLICY")]
    pub ignore_network_policy: bool,

    /// Translate requests at TC, or in the driver by XDP for less CPU time per packet. "auto" uses XDP with drivers
    /// that are known to be safe, "xdp" with each driver that accepts a program. "xdp" corrupts packets with incomplete
    /// checksums, which arrive on virtual devices such as veth. XDP takes effect only with --forwarding stack.
    #[arg(long, env = "NPL_ATTACH", value_name = "tc|auto|xdp", default_value = "tc")]
    pub attach: Attach,

    /// Publish the Node's `InternalIP` or `ExternalIP`. If the Node has no address of the chosen type, publish the
    /// address of the other type. Alternatively, publish the given addresses, at most one of each IP family, or the
    /// Node's first address in one of the given ranges. A published address does not change while the Node still lists
    /// it. npl-feed serves a published address only if the Node lists it.
    #[arg(
        long, env = "NPL_NODE_IP", value_name = "internal|external|IP[,IP]|CIDR[,CIDR]", default_value = "internal",
        value_parser = value::node_ip
    )]
    pub node_ip: NodeIpSource,

    /// Use keys of this domain: the annotations DOMAIN/enabled and DOMAIN/allowed-source-ranges of Services, the
    /// annotations DOMAIN and DOMAIN/requested-node-ports of Pods, and the readiness gate DOMAIN/published.
    #[arg(
        long, env = "NPL_ANNOTATION_DOMAIN", value_name = "DOMAIN", default_value = "nodeportlocal.antrea.io",
        value_parser = value::domain
    )]
    pub annotation_domain: String,

    /// Read only Services of these namespaces (at most 16, separated by commas), so that the API server sends less
    /// data. Node ports of Pods in other namespaces are withdrawn, as if no Service were enabled there. The agent does
    /// not know the `nodePort`s of Services in other namespaces: keep --port-range apart from these ports. The agent
    /// still reads all Pods of its Node. Unset or empty: all namespaces.
    #[arg(long, env = "NPL_NAMESPACES", value_name = "LIST")]
    pub namespaces: Option<Namespaces>,

    /// Read only Services with these labels, in the syntax of `kubectl get --selector`, so that the API server sends
    /// less data in large clusters. Node ports of other Services are withdrawn, as if these Services were not enabled.
    /// The agent does not know the `nodePort`s of other Services: keep --port-range apart from these ports. Unset: all.
    #[arg(long, env = "NPL_SERVICE_SELECTOR", value_name = "SELECTOR", value_parser = value::label_selector)]
    pub service_selector: Option<String>,

    /// Write entries with the fields of this Antrea version, for load balancers that read Antrea's annotation: v1.7,
    /// v2.0 or v2.6.
    #[arg(long, env = "NPL_ANNOTATION_FORMAT", value_name = "VERSION", default_value = "v1.7")]
    pub annotation_format: AnnotationFormat,

    /// Allocate a node port for each protocol of a Pod port, as Antrea does ("separate"), or one node port and one
    /// annotation entry for all protocols of a Pod port ("merged"). Use "merged" for load balancers that ignore the
    /// protocol of an entry, such as AKO and F5 CIS.
    #[arg(long, env = "NPL_PROTOCOL_PAIRING", value_name = "separate|merged", default_value = "separate")]
    pub protocol_pairing: ProtocolPairing,

    /// Let a Pod choose its node ports with the annotation DOMAIN/requested-node-ports, for example
    /// `8080=61005,53/udp=61006`. A Pod gets a requested node port of --port-range only if the node port is free. Anyone
    /// who may create Pods can then take any free node port. Without this flag, requests have no effect.
    #[arg(long, env = "NPL_REQUESTED_NODE_PORTS")]
    pub requested_node_ports: bool,

    /// Keep translating a mapping for this long after its annotation entry was removed, so that load balancers can
    /// drain its connections. Give numbers with the units ms, s, m and h, for example 1m30s, at most a day.
    #[arg(long, env = "NPL_DRAIN", value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
    pub drain: Duration,

    /// Keep a node port unused for this long after its mapping is removed, also across restarts of the agent, so that
    /// late packets do not reach another Pod. Give numbers with the units ms, s, m and h, at most a day. Ports that
    /// still receive packets after this time are reused last.
    #[arg(long, env = "NPL_QUARANTINE", value_name = "DURATION", default_value = "60s", value_parser = value::duration)]
    pub quarantine: Duration,

    /// Compare the kernel's state with the desired state at this interval, in addition to reacting to changes, and
    /// repair differences. Give numbers with the units ms, s, m and h, at least 1s.
    #[arg(long, env = "NPL_RESYNC", value_name = "DURATION", default_value = "30s", value_parser = value::interval)]
    pub resync: Duration,

    /// Pin programs and maps below this mount point of the BPF file system, where they outlive the agent.
    #[arg(
        long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS,
        value_parser = PathBufValueParser::new().try_map(value::directory)
    )]
    pub bpffs: PathBuf,

    /// Make room for this many TCP flows of each IP family (4096 to 8388608), half as many UDP flows and a sixteenth as
    /// many SCTP associations. "auto" means about one TCP flow for each 32 KiB of the machine's memory, at least 32768
    /// and at most 262144, or fewer with many CPUs. docs/reference/sizes.md lists the memory of the maps.
    #[arg(long, env = "NPL_MAX_FLOWS", value_name = "auto|NUMBER", default_value = "auto")]
    pub max_flows: MaxFlows,

    /// Let the processes of this cgroup v2 and of the cgroups below it connect to mappings, including processes of
    /// Pods. "auto" finds the root of the cgroup hierarchy; in a container, give the mount point of the Node's
    /// hierarchy. With "none", no process on this Node can connect to mappings.
    #[arg(
        long, env = "NPL_CGROUP", value_name = "auto|none|DIRECTORY", default_value = "auto",
        value_parser = value::cgroup
    )]
    pub cgroup: CgroupSelection,

    /// Let all processes in --cgroup connect to mappings, or only those in the host's network namespace: the Node's own
    /// processes and Pods on the host network. Give "host" if egress policies or a service mesh must see the
    /// connections of Pods to the node address. "host" requires Linux 5.14 or newer.
    #[arg(
        long, env = "NPL_LOCAL_CLIENTS", value_name = "all|host", default_value = "all", value_parser = value::client_scope
    )]
    pub local_clients: ClientScope,

    /// Maintain an nftables table that exempts replies of mapped Pod ports from masquerading, sets the connection mark
    /// that the CNI's policy routing needs for replies, and drops forwarded IPv6 packets that forge a node port as their
    /// source. "auto" maintains the table if the Node has source NAT rules, such policy routing, or IPv6 mappings.
    #[arg(long, env = "NPL_NFT_GUARD", value_name = "auto|on|off", default_value = "auto", value_parser = value::guard)]
    pub nft_guard: GuardMode,

    /// Retire this Node before uninstalling: remove the annotations, keep translating for --drain, then remove all
    /// kernel state and report ready.
    #[arg(long, env = "NPL_RETIRE")]
    pub retire: bool,

    /// Listen in this folder on the Unix socket `agent.sock`. The other commands, run as root, read the agent's state
    /// from this socket. The agent creates the folder with mode 0700. If the agent cannot create the folder, the agent
    /// works without the socket, and the commands show no names.
    #[arg(
        long, env = "NPL_RUNTIME_DIR", value_name = "DIRECTORY", default_value = DEFAULT_RUNTIME_DIR,
        value_parser = PathBufValueParser::new().try_map(value::directory)
    )]
    pub runtime_dir: PathBuf,

    /// Serve /metrics, /livez, /readyz and /startupz by HTTP on this address and port.
    #[arg(
        long, env = "NPL_LISTEN", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9911",
        value_parser = value::listen
    )]
    pub listen: SocketAddr,

    /// Also serve /metrics, and nothing else, on this address and port, for a Prometheus server outside of the Node.
    /// Clients are not authenticated: restrict the port by a host firewall. An address of either family may be in
    /// brackets, such as [192.0.2.10]:9912. Unset: serve /metrics only on the address of --listen.
    #[arg(
        long, env = "NPL_METRICS_LISTEN", value_name = "ADDRESS:PORT", value_parser = value::metrics_listen
    )]
    pub metrics_listen: Option<SocketAddr>,

    /// Serve metrics with the traffic of at most this many Service ports, from 0 to 4096; 0 serves none. A Service port
    /// is a Service with one of its Pod ports and a protocol. The first Service ports that have a mapping on this Node
    /// keep their series until the agent ends; the series with `service_name="_other"` have the traffic of all others.
    #[arg(
        long, env = "NPL_SERVICE_METRICS", value_name = "MAX", default_value_t = 0,
        value_parser = clap::value_parser!(u16).range(0..=4096)
    )]
    pub service_metrics: u16,

    /// Write log lines to standard error in this format. The variable `NPL_LOG` selects lines by level and module, for
    /// example `npl_agent=debug,warn`.
    #[arg(long, env = "NPL_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Flags of `cleanup`.
#[derive(Debug, Clone, Args)]
pub struct CleanupArgs {
    /// The BPF file system to clean up, and the format of the output.
    #[command(flatten)]
    pub view: ViewArgs,

    /// List every object that the cleanup would remove, and change nothing. Works while an agent runs. Exits with 0
    /// whether or not there is anything to remove, and with 1 if a part of the kernel state cannot be read.
    #[arg(long, env = "NPL_DRY_RUN")]
    pub dry_run: bool,

    /// Wait for SIGTERM after the cleanup. A DaemonSet needs this flag, because Kubernetes restarts its containers
    /// whenever they exit.
    #[arg(long, env = "NPL_STAY")]
    pub stay: bool,
}

/// Flags of `retire`.
#[derive(Debug, Clone, Args)]
pub struct RetireArgs {
    /// Connect to the API server with this kubeconfig file. Unset: with the service account of this Pod.
    #[arg(long, env = "NPL_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Find the agents' DaemonSets in this namespace. Unset: in the namespace of the kubeconfig's context, or of this
    /// Pod.
    #[arg(long, env = "NPL_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// Retire the Nodes of the DaemonSets with these names, separated by commas. The chart creates
    /// the DaemonSet `npl-agent`, and a DaemonSet `npl-agent-NAME` for each group in `nodeGroups`.
    #[arg(
        long = "daemon-set",
        env = "NPL_DAEMON_SET",
        value_name = "NAME[,NAME]",
        default_value = "npl-agent",
        value_delimiter = ','
    )]
    pub daemon_sets: Vec<String>,

    /// Fail if not every Node is retired after this time. Give numbers with the units ms, s, m and h, at most a day.
    #[arg(long, env = "NPL_TIMEOUT", value_name = "DURATION", default_value = "5m", value_parser = value::duration)]
    pub timeout: Duration,
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

/// Flags of the subcommands that also read the running agent's state.
#[derive(Debug, Clone, Args)]
pub struct NodeViewArgs {
    /// The BPF file system to read, and the output format.
    #[command(flatten)]
    pub view: ViewArgs,

    /// Read the names of Pods and Services, and the states of mappings, from the running agent's socket in this folder.
    #[arg(long, env = "NPL_RUNTIME_DIR", value_name = "DIRECTORY", default_value = DEFAULT_RUNTIME_DIR)]
    pub runtime_dir: PathBuf,
}

/// Flags of `status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// The sources of the Node's state, and the output format.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Measure the packet rates over this time; 0s shows no rates.
    #[arg(long, env = "NPL_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = value::duration)]
    pub interval: Duration,

    /// Wait until the Node is healthy, at most five minutes. `--wait=2m` sets another maximum. The exit code describes
    /// the state at the end of the wait.
    #[arg(
        long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "5m",
        value_parser = value::duration
    )]
    pub wait: Option<Duration>,
}

/// Flags of `why`.
#[derive(Debug, Clone, Args)]
pub struct WhyArgs {
    /// The Pod, a port of the Pod, or the Service.
    #[arg(value_name = "pod/NAMESPACE/NAME[:PORT]|service/NAMESPACE/NAME")]
    pub object: Question,

    /// The sources of the Node's state, and the output format.
    #[command(flatten)]
    pub node: NodeViewArgs,
}

/// Flags of `flows`.
#[derive(Debug, Clone, Args)]
pub struct FlowsArgs {
    /// The sources of the Node's state, and the output format; JSON is one object per line.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Show only the flows to Pods of this namespace.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Show only the flows to Pods whose name begins with this text.
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,

    /// Show only the flows of clients with this address or in this range.
    #[arg(long, value_name = "IP|CIDR")]
    pub client: Option<SourceRange>,

    /// Show only the flows of this node port.
    #[arg(long, value_name = "PORT")]
    pub node_port: Option<u16>,

    /// Show only the flows of this protocol: tcp, udp or sctp.
    #[arg(long, value_name = "PROTOCOL")]
    pub protocol: Option<Protocol>,
}

/// Flags of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// The sources of the Node's state.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Draw the screen again at this interval. Give numbers with the units ms, s, m and h, at least 1s.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = value::interval)]
    pub interval: Duration,
}

/// Flags of `bundle`.
#[derive(Debug, Clone, Args)]
pub struct BundleArgs {
    /// The sources of the Node's state, and the output format; with `--output json`, the command prints the documents
    /// as one object instead of an archive.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Write the archive to this file, which must not exist yet. `-` or unset: to standard output.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Include all flows. Flows contain the addresses of clients.
    #[arg(long)]
    pub flows: bool,
}

/// Flags of `mappings`.
#[derive(Debug, Clone, Args)]
pub struct MappingsArgs {
    /// The sources of the Node's state, and the output format.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Show only the mappings of Pods in this namespace.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Show only the mappings of Pods whose name begins with this text.
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,

    /// Show only the mappings that this Service requests.
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,

    /// Show only the mappings of this node port.
    #[arg(long, value_name = "PORT")]
    pub node_port: Option<u16>,

    /// Show only the node ports in these states, separated by commas: reserved, live, published, draining, quarantined
    /// or host-port.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub state: Vec<PortState>,

    /// Also show node ports without a mapping: node ports in quarantine, and published host ports.
    #[arg(long, short)]
    pub all: bool,

    /// Print the table again every two seconds, with packets per second, until interrupted. `--watch=10s` sets another
    /// interval, at least 1s, with the units ms, s, m and h.
    #[arg(
        long, value_name = "DURATION", num_args = 0..=1, require_equals = true,
        default_missing_value = "2s", value_parser = value::interval
    )]
    pub watch: Option<Duration>,
}

/// The usual folder of the local socket.
const DEFAULT_RUNTIME_DIR: &str = "/run/npl";
pub(super) const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// The format of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Tables and text for people; `npl-agent bundle` writes an archive instead.
    #[default]
    Table,
    /// The same as `table`, with all columns of the tables.
    Wide,
    /// JSON for programs.
    Json,
}

// SPDX-License-Identifier: Apache-2.0
//! The network of one case: client, Node and Pod, what translates on the Node, and what measures.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aya::programs::ProgramInfo;
use aya::sys::{Stats, enable_stats};
use caps::{CapSet, Capability};
use npl_agent::core::devices::DeviceSelection;
use npl_agent::core::model::{self, Backend, Family, Frontend, NodePort, PodPort};
use npl_agent::core::redirect::Forwarding;
use npl_agent::core::settings::PortRange;
use npl_agent::core::xdp::Attach;
use npl_agent::datapath::Datapath;
use npl_agent::guard::GuardMode;
use npl_agent::uplinks::Uplinks;
use npl_common::names::PROG_INGRESS;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::meter::{self, Clients, Entry, Flows, Meter};
use npl_testkit::mounts::BpfFs;
use npl_testkit::run::Run;
use npl_testkit::topology::{Client, Offload, Options, Pod, Topology};
use npl_testkit::{poll, traffic};

use crate::Effort;
use crate::cases::{Case, Mode, Workload};
use crate::rivals;

/// The first port of each side; mapping n leads from the nth to the nth.
pub(crate) const FIRST_NODE_PORT: u16 = 50_000;
/// Room for ten thousand mappings, and no pod port is among them.
const NODE_PORTS: u16 = 10_000;
pub(crate) const FIRST_POD_PORT: u16 = 20_000;

/// The first client of new flows: from the range that RFC 2544 sets aside for benchmarks, with room for 131 072.
const FIRST_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), 10_000);
/// Ports of each such client: up to 60 000.
const PORTS_PER_CLIENT: u32 = 50_000;

/// The random clients of a flood follow this one: public addresses.
const FIRST_RANDOM_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(16, 0, 0, 0)), 0);

/// Packets that fill caches before anything is measured.
const WARM_UP: u64 = 20_000;

/// How long a request may take that opens the flow.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The mappings of a Node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mappings {
    pub(crate) protocol: Protocol,
    pub(crate) pod_ip: Ipv4Addr,
    pub(crate) count: u16,
}

impl Mappings {
    /// Node port and pod port of each.
    pub(crate) fn ports(self) -> impl Iterator<Item = (u16, u16)> {
        (0..self.count).map(|n| (FIRST_NODE_PORT + n, FIRST_POD_PORT + n))
    }

    const fn pod_ports(self) -> RangeInclusive<u16> {
        FIRST_POD_PORT..=FIRST_POD_PORT + self.count - 1
    }
}

/// Everything that one case needs; gone when dropped, in this order.
#[derive(Debug)]
pub(crate) struct Testbed {
    case: Case,
    meter: Meter,
    ours: Option<(Datapath, BpfFs)>,
    topology: Topology,
}

impl Testbed {
    /// Builds it and sends the first packets through it.
    pub(crate) fn new(run: &Run, number: usize, case: Case, object: &Path) -> Result<Self> {
        let Case { workload, mode } = case;
        let name = number.to_string();
        let mut topology = Topology::new(run, &name, Options::default())?;
        let pod = topology.add_pod(run, "pod")?;
        let client = topology.client();
        pod.fix_neighbour()?;
        match mode.entry() {
            Entry::Uplink => {}
            Entry::Wire => join_drivers(client)?,
            Entry::Pod => pod.device.set_offloads(&[Offload::Gro], true)?,
        }

        let mappings = Mappings { protocol: workload.protocol(), pod_ip: pod.ip(), count: mode.mappings() };
        let ours = translate(run, &name, mode, &topology, mappings)?;
        let (first, spread) = mode.flows_to();
        let server: SocketAddr = if mode.is_translated() {
            (topology.node_addresses().v4, FIRST_NODE_PORT + first).into()
        } else {
            (pod.ip(), FIRST_POD_PORT + first).into()
        };
        let source = match workload {
            Workload::Established => establish(&topology, &pod, server)?,
            Workload::NewFlows => FIRST_CLIENT,
            Workload::SynFlood => FIRST_RANDOM_CLIENT,
        };
        if let (Workload::Established, true, Some((datapath, _))) = (workload, mode.is_translated(), &ours) {
            ensure!(datapath.tables.flow_count()? == 1, "the Pod's answers did not make the flow an established one");
        }
        let flows = Flows {
            frame: meter::frame(workload.protocol(), client, source, server, FIRST_POD_PORT + first)?,
            clients: match workload {
                Workload::Established => Clients::One,
                Workload::NewFlows => Clients::InTurn { ports: PORTS_PER_CLIENT },
                Workload::SynFlood => Clients::Random,
            },
            entry: mode.entry(),
            mappings: spread,
        };
        let mut meter = Meter::new(object, client, &flows, &pod, mappings.pod_ports())?;
        if mode == Mode::Shortcut {
            meter.attach_shortcut()?;
        }
        meter.measure(WARM_UP, Duration::MAX).context("warm up")?;
        Ok(Self { case, meter, ours, topology })
    }

    /// Measures once: millions of packets per second.
    pub(crate) fn sample(&mut self, effort: Effort) -> Result<f64> {
        match self.case.workload {
            Workload::Established => self.meter.measure(effort.established, effort.longest),
            Workload::NewFlows | Workload::SynFlood => {
                let rate = self.meter.measure(effort.new_flows, effort.longest)?;
                if self.case.mode.has_conntrack() {
                    self.topology.node().forget_connections()?;
                }
                Ok(rate)
            }
        }
    }

    /// What the program that meets each packet first costs, in nanoseconds, by the kernel's own account of one sample.
    ///
    /// The kernel reads its clock twice around every program; what that adds is what a program costs that only returns,
    /// and meets the same packets.
    pub(crate) fn program_cost(&mut self, effort: Effort) -> Result<f64> {
        self.meter.attach_idle()?;
        let before = self.accounts()?;
        let accounting = enable_stats(Stats::RunTime).context("have the kernel account for programs")?;
        self.sample(effort)?;
        drop(accounting);
        let after = self.accounts()?;
        let [ours, idle] = [0, 1].map(|program| after[program].since(before[program]));
        ensure!(ours.runs > 0 && idle.runs > 0, "the kernel has accounted for no program");
        Ok(ours.mean() - idle.mean())
    }

    /// Of NPL's program and of the one that only returns.
    fn accounts(&mut self) -> Result<[Account; 2]> {
        let (datapath, _) = self.ours.as_mut().context("NPL is not on this Node")?;
        let ours = datapath.hooks.program(PROG_INGRESS)?.info()?;
        Ok([Account::of(&ours), Account::of(&self.meter.idle()?.info()?)])
    }
}

/// How often a program has run, and for how many nanoseconds, while the kernel accounted for it.
#[derive(Clone, Copy, Debug)]
struct Account {
    runs: u64,
    time: Duration,
}

impl Account {
    const fn of(program: &ProgramInfo) -> Self {
        Self { runs: program.run_count(), time: program.run_time() }
    }

    fn since(self, before: Self) -> Self {
        Self { runs: self.runs - before.runs, time: self.time.saturating_sub(before.time) }
    }

    #[expect(clippy::cast_precision_loss, reason = "some millions")]
    fn mean(self) -> f64 {
        self.time.as_secs_f64() * 1e9 / self.runs as f64
    }
}

/// Makes the Node do what the mode says.
fn translate(
    run: &Run,
    name: &str,
    mode: Mode,
    topology: &Topology,
    mappings: Mappings,
) -> Result<Option<(Datapath, BpfFs)>> {
    let node = topology.node();
    match mode {
        Mode::Routing | Mode::RoutingWire | Mode::Shortcut | Mode::ShortcutXdp => Ok(None),
        Mode::RoutingConntrack => rivals::add_conntrack(node).map(|()| None),
        Mode::Iptables(_) | Mode::IptablesNewest(_) => rivals::add_iptables(node, mappings).map(|()| None),
        Mode::Nftables => rivals::add_nftables(node, mappings).map(|()| None),
        Mode::Ours | Mode::OursOf(_) | Mode::RoutingBesideOurs | Mode::OursWire => {
            load_ours(run, name, topology, mappings, Ours::STACK).map(Some)
        }
        Mode::OursFenced => {
            load_ours(run, name, topology, mappings, Ours { are_fenced: true, ..Ours::STACK }).map(Some)
        }
        Mode::OursRedirect => load_ours(run, name, topology, mappings, Ours::by(Forwarding::Redirect)).map(Some),
        Mode::OursOffload => load_ours(run, name, topology, mappings, Ours::by(Forwarding::Offload)).map(Some),
        Mode::OursOffloadConntrack => {
            rivals::add_conntrack(node)?;
            load_ours(run, name, topology, mappings, Ours::by(Forwarding::Offload)).map(Some)
        }
        Mode::OursXdp => {
            load_ours(run, name, topology, mappings, Ours { attach: Attach::Xdp, ..Ours::STACK }).map(Some)
        }
        Mode::OursConntrack => {
            rivals::add_conntrack(node)?;
            load_ours(run, name, topology, mappings, Ours::STACK).map(Some)
        }
    }
}

/// How a Node has NPL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ours {
    forwarding: Forwarding,
    attach: Attach,
    /// Whether the agent has loaded the programs itself, without `CAP_PERFMON`.
    are_fenced: bool,
}

impl Ours {
    const STACK: Self = Self::by(Forwarding::Stack);

    /// At TC, with programs that were loaded ahead of the agent.
    pub(crate) const fn by(forwarding: Forwarding) -> Self {
        Self { forwarding, attach: Attach::Tc, are_fenced: false }
    }
}

/// The agent's own datapath on the Node's uplink, with maps of its own.
pub(crate) fn load_ours(
    run: &Run,
    name: &str,
    topology: &Topology,
    mappings: Mappings,
    Ours { forwarding, attach, are_fenced }: Ours,
) -> Result<(Datapath, BpfFs)> {
    if forwarding == Forwarding::Offload {
        // The kernel has the setting if anybody has asked for connection tracking.
        let _there_or_not = topology.node().sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1");
    }
    let bpffs = run.bpffs(&format!("bpf-{name}"))?;
    let mut datapath = open_datapath(bpffs.path(), are_fenced)?;
    let protocol = match mappings.protocol {
        Protocol::Tcp => model::Protocol::Tcp,
        Protocol::Udp => model::Protocol::Udp,
        Protocol::Sctp => model::Protocol::Sctp,
    };
    for (node_port, pod_port) in mappings.ports() {
        let frontend = Frontend { family: Family::V4, node_port: NodePort(node_port), protocol };
        let backend = Backend {
            pod_ip: mappings.pod_ip.into(),
            pod_port: PodPort(pod_port),
            generation: 1,
            is_restricted: false,
        };
        datapath.upsert_mapping(frontend, backend)?;
    }
    let range: PortRange = format!("{FIRST_NODE_PORT}-{}", FIRST_NODE_PORT + NODE_PORTS).parse()?;
    // Any seed will do; a fixed one lets flows meet in the same slots in every run.
    datapath.configure(range, || 0x4e50_4c00_4e50_4c01)?;
    let uplink = topology.client().uplink.name().to_owned();
    let mut uplinks = Uplinks::new(DeviceSelection::Named(vec![uplink.clone()]), forwarding, attach, GuardMode::Off);
    let node_ips = [topology.node_addresses().v4.into()];
    let coverage = topology.node().block_on(uplinks.follow(&mut datapath, &node_ips))??;
    ensure!(coverage.carrying == 1, "the uplink refuses the programs");
    let has_xdp = topology.node().ip(&format!("link show dev {uplink}"))?.contains("prog/xdp");
    ensure!(has_xdp == (attach == Attach::Xdp), "the uplink's driver refuses the program");
    Ok((datapath, bpffs))
}

/// The agent's own datapath; if `are_fenced`, the programs that every Node needs are loaded with the agent's rights alone.
pub(crate) fn open_datapath(bpffs: &Path, are_fenced: bool) -> Result<Datapath> {
    if !are_fenced {
        return Ok(Datapath::open(bpffs)?);
    }
    // aya asks once in a process what the kernel has: with all rights.
    aya::features();
    let held = caps::read(None, CapSet::Effective)?;
    // Either lets the verifier take programs as they are.
    let kept = &held - &[Capability::CAP_PERFMON, Capability::CAP_SYS_ADMIN].into();
    caps::set(None, CapSet::Effective, &kept)?;
    let opened = Datapath::open(bpffs);
    caps::set(None, CapSet::Effective, &held)?;
    let datapath = opened?;
    ensure!(!datapath.hooks.are_unfenced(), "this process has more rights than it seems");
    Ok(datapath)
}

/// Has the uplink's driver take in what the client's device is told to send without a socket, with an XDP program or
/// without; and the client finish its checksums, which such a program expects.
fn join_drivers(client: &Client) -> Result<()> {
    client.uplink.set_offloads(&[Offload::Gro], true)?;
    client.device.set_offloads(&[Offload::TxChecksum], false)
}

/// Opens a flow as a real client does: two requests, both answered. The first answer completes an exchange, and the
/// second request is what makes the flow an established one, for connection tracking as for NPL.
fn establish(topology: &Topology, pod: &Pod, server: SocketAddr) -> Result<SocketAddr> {
    let _echo = EchoServer::start_in(&pod.netns, &pod.name, &[FIRST_POD_PORT])?;
    let socket = traffic::udp_socket(&topology.client().netns, server, true)?;
    socket.set_read_timeout(Some(ANSWER_LIMIT)).context("set a read timeout")?;
    for request in ["first", "second"] {
        socket.send(request.as_bytes()).with_context(|| format!("send to {server}"))?;
        poll::uninterrupted(|| socket.recv(&mut [0; 1024]))
            .with_context(|| format!("wait for the answer of {server}"))?;
    }
    socket.local_addr().context("ask for the socket's own address")
}

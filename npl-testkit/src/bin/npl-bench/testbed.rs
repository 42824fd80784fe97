// SPDX-License-Identifier: Apache-2.0
//! A test network of the bench: client, Node and Pod, the Node's translation, and the packet generator and counter.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::programs::ProgramInfo;
use aya::sys::{Stats, enable_stats};
use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::devices::xdp::Attach;
use npl_common::names::PROG_INGRESS;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::meter::{self, Arrival, Clients, Entry, Flows, Lost, Meter, Overhead};
use npl_testkit::run::Run;
use npl_testkit::topology::{Client, Offload, Options, Pod, Topology};
use npl_testkit::{poll, process, traffic};

use crate::Effort;
use crate::baselines;
use crate::cases::{Case, Mode, Workload};
use crate::ours::{Manner, Ours};

/// The first node port and the first Pod port. Mapping n translates the nth node port to the nth Pod port.
pub(crate) const FIRST_NODE_PORT: u16 = 50_000;
pub(crate) const FIRST_POD_PORT: u16 = 20_000;

/// The first client address of new flows, from the benchmark range of RFC 2544, which has 131 072 addresses.
const FIRST_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), 10_000);
/// The number of ports per client address: ports 10 000 to 59 999.
const PORTS_PER_CLIENT: u32 = 50_000;

/// The random clients of a flood have addresses above this address.
const FIRST_RANDOM_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(16, 0, 0, 0)), 0);

/// The maximum number of attempts for a sample that loses packets. Packets may be lost because the host of a virtual
/// machine pauses the processor that drains a queue.
const TRIES: u32 = 3;

/// The number of packets that warm up caches before a measurement.
const WARM_UP: u64 = 20_000;

/// The time limit of requests that open a flow.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The mappings of a Node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mappings {
    pub(crate) protocol: Protocol,
    pub(crate) pod_ip: Ipv4Addr,
    pub(crate) count: u16,
    /// The distance of the first mapping's node port from [`FIRST_NODE_PORT`].
    pub(crate) offset: u16,
}

impl Mappings {
    /// The node port and Pod port of each mapping.
    pub(crate) fn ports(self) -> impl Iterator<Item = (u16, u16)> {
        (0..self.count).map(move |n| (FIRST_NODE_PORT + self.offset + n, FIRST_POD_PORT + n))
    }
}

/// A network with the rules, programs and Pods that its cases need. Fields are dropped in declaration order.
pub(crate) struct Testbed {
    meter: Meter,
    ours: Option<Ours>,
    topology: Topology,
    mappings: Mappings,
    /// The traffic of each case.
    flows: Vec<(Case, Flows)>,
}

impl Testbed {
    /// Builds the network that these cases share.
    pub(crate) fn new(run: &Run, number: usize, cases: &[Case], object: &Path) -> Result<Self> {
        let Case { workload, mode } = cases.first().context("the network has no case")?.network();
        let name = number.to_string();
        let mut topology = Topology::new(run, &name, Options::default())?;
        let pod = topology.add_pod(run, "pod")?;
        let client = topology.client();
        pod.fix_neighbour()?;
        let entry = Case { workload, mode }.entry();
        match entry {
            Entry::Uplink => {}
            Entry::PodUplink => client.fix_neighbour()?,
            Entry::Wire => join_drivers(client)?,
            Entry::Pod => pod.device.set_offloads(&[Offload::Gro], true)?,
        }
        let mappings =
            Mappings { protocol: workload.segment().protocol(), pod_ip: pod.ip(), count: mode.mappings(), offset: 0 };
        let ours = translate(run, &name, mode, &topology, mappings)?;
        if mode.has_conntrack() {
            // A flow must not expire between two samples, so the timeout is one day in seconds.
            topology.node().sysctl("net/netfilter/nf_conntrack_udp_timeout_stream", "86400")?;
        }
        let flows_of = |case: &Case| Ok((*case, flows(*case, &topology, &pod, 0)?));
        let flows: Vec<_> = cases.iter().map(flows_of).collect::<Result<_>>()?;
        if let (true, Some(Ours { datapath, .. })) = (workload.is_one_flow(), &ours) {
            let translated = cases.iter().filter(|case| case.mode.is_translated()).count();
            ensure!(datapath.tables.flow_count()? == translated, "the Pod's responses did not establish the flows");
        }
        let (_, first) = flows.first().context("the network has no flows")?;
        let mut meter = Meter::new(object, client, &pod, first)?;
        if mode == Mode::Shortcut {
            meter.attach_shortcut()?;
        }
        Ok(Self { meter, ours, topology, mappings, flows })
    }

    /// Whether the case is measured in this network.
    pub(crate) fn has(&self, case: Case) -> bool {
        self.flows.iter().any(|(other, _)| *other == case)
    }

    /// Measures one sample and returns its packet rate, in million packets per second. If the sample lost packets, or
    /// if the generator was too slow, the sample is discarded and repeated.
    pub(crate) fn sample(&mut self, case: Case, effort: Effort) -> Result<f64> {
        let mut left = TRIES;
        loop {
            left -= 1;
            match self.prepare(case).and_then(|()| self.measure(case, effort)) {
                Err(error) if left > 0 && (error.is::<Lost>() || error.is::<Overhead>()) => {
                    eprintln!("bench: {case}: {error:#}; repeating the sample");
                }
                result => return result,
            }
        }
    }

    fn measure(&mut self, case: Case, effort: Effort) -> Result<f64> {
        let packets = if case.workload.is_one_flow() { effort.established } else { effort.new_flows };
        let rate = self.meter.measure(packets, effort.longest)?;
        self.forget_flows(case)?;
        Ok(rate)
    }

    /// Empties the kernel conntrack table, because the table has room for the flows of one sample only. Does nothing
    /// without kernel conntrack, or if the case has a single established flow, whose entry is still needed.
    fn forget_flows(&self, case: Case) -> Result<()> {
        if !case.workload.is_one_flow() && case.mode.has_conntrack() {
            self.topology.node().forget_connections()?;
        }
        Ok(())
    }

    /// Sets up the network for the case and warms up caches.
    fn prepare(&mut self, case: Case) -> Result<()> {
        self.turn_to(case).with_context(|| format!("prepare {case}"))?;
        self.meter.warm_up(WARM_UP).context("warm up")?;
        self.forget_flows(case)
    }

    fn turn_to(&mut self, case: Case) -> Result<()> {
        if let Some(ours) = &mut self.ours {
            ours.set_attached(&self.topology, case.mode.has_ours())?;
            if let Mode::OursOf(count) = case.mode {
                ours.set_mappings(Mappings { count, ..self.mappings })?;
            }
        }
        self.meter.set_idle(case.mode == Mode::RoutingBesideIdle)?;
        let (_, flows) =
            self.flows.iter().find(|(other, _)| *other == case).context("the case belongs to another network")?;
        self.meter.turn_to(flows)
    }

    /// Adds mappings of the flood's protocol, and returns a generator that sends the flood through these mappings to
    /// this network's Pod.
    pub(crate) fn flood(&mut self, workload: Workload, object: &Path) -> Result<Meter> {
        let ours = self.ours.as_mut().context("NPL is not on this Node")?;
        ours.add_mappings(Mappings { protocol: workload.segment().protocol(), ..self.mappings })?;
        let pod = self.topology.pods().first().context("the network has no Pod")?;
        let flows = flows(Case { workload, mode: Mode::Ours }, &self.topology, pod, 0)?;
        Meter::new(object, self.topology.client(), pod, &flows)
    }

    /// Adds a second Pod with as many mappings as the first one. Returns a generator that sends the packets of a case to
    /// the second Pod.
    pub(crate) fn second_lane(&mut self, run: &Run, case: Case, object: &Path) -> Result<Meter> {
        let pod = self.topology.add_pod(run, "second")?;
        pod.fix_neighbour()?;
        let offset = self.mappings.count;
        if let Some(ours) = &mut self.ours {
            ours.add_mappings(Mappings { pod_ip: pod.ip(), offset, ..self.mappings })?;
            // The agent looks for the devices of the Pods when it attaches the programs.
            ours.set_attached(&self.topology, false)?;
            ours.set_attached(&self.topology, true)?;
        }
        let flows = flows(case, &self.topology, &pod, offset)?;
        Meter::new(object, self.topology.client(), &pod, &flows)
    }

    /// Measures one sample as [`Self::sample`] does, while another processor sends the packets of `flood`.
    pub(crate) fn sample_beside(&mut self, case: Case, effort: Effort, flood: &mut Meter) -> Result<f64> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let flooding = scope.spawn(|| flood.flood(&is_over));
            let sample = self.sample(case, effort);
            is_over.store(true, Ordering::Relaxed);
            ensure!(process::joined(flooding)? > 0, "the flood has sent no packet");
            sample
        })
    }

    /// Returns the mean run time of NPL's TC ingress program per packet in nanoseconds, from the kernel's accounting of
    /// one sample.
    ///
    /// The kernel reads its clock before and after every program. To exclude this cost, the run time of an empty
    /// program for the same packets is subtracted.
    pub(crate) fn program_cost(&mut self, case: Case, effort: Effort) -> Result<f64> {
        self.prepare(case)?;
        self.meter.set_idle(true)?;
        let before = self.accounts()?;
        let accounting = enable_stats(Stats::RunTime).context("enable the kernel's program statistics")?;
        self.measure(case, effort)?;
        drop(accounting);
        let after = self.accounts()?;
        let [ours, idle] = [0, 1].map(|program| after[program].since(before[program]));
        ensure!(ours.runs > 0 && idle.runs > 0, "the kernel's program statistics are empty");
        Ok(ours.mean() - idle.mean())
    }

    /// The statistics of NPL's program and of the empty program.
    fn accounts(&mut self) -> Result<[Account; 2]> {
        let Ours { datapath, .. } = self.ours.as_mut().context("NPL is not on this Node")?;
        let ours = datapath.hooks.load_program(PROG_INGRESS)?.info()?;
        Ok([Account::of(&ours), Account::of(&self.meter.idle()?.info()?)])
    }
}

/// Returns the traffic of a case to a Pod; `offset` is that of the Pod's [`Mappings`]. If the workload has only one flow,
/// opens this flow.
fn flows(case: Case, topology: &Topology, pod: &Pod, offset: u16) -> Result<Flows> {
    let Case { workload, mode } = case;
    let (first, mappings) = mode.flows_to();
    let pod_port = FIRST_POD_PORT + first;
    let server: SocketAddr = if mode.is_translated() {
        (topology.node_addresses().v4, FIRST_NODE_PORT + offset + first).into()
    } else {
        (pod.ip(), pod_port).into()
    };
    let (source, clients) = match workload {
        Workload::Replies => return replies(case, topology, pod, server),
        Workload::Established => (establish(topology, pod, server)?, Clients::One),
        Workload::NewFlows => (FIRST_CLIENT, Clients::InTurn { ports: PORTS_PER_CLIENT }),
        Workload::SynFlood
        | Workload::AckFlood
        | Workload::RstFlood
        | Workload::NullFlood
        | Workload::SynAckFlood
        | Workload::UdpFlood
        | Workload::FragmentFlood
        | Workload::SctpInitFlood
        | Workload::SctpDataFlood => (FIRST_RANDOM_CLIENT, Clients::Random),
    };
    let client = topology.client();
    let frame = meter::frame(workload.segment(), [&client.device, &client.uplink], [source, server], pod_port)?;
    let ports = [FIRST_POD_PORT, FIRST_POD_PORT + mode.mappings() - 1];
    // During a flood, only the packets of the established flow are counted.
    let counted = match (workload, source) {
        (Workload::Established, SocketAddr::V4(source)) => Some(source),
        _ => None,
    };
    let arrival = Arrival { address: pod.ip(), ports, source: counted };
    Ok(Flows { frame, clients, entry: case.entry(), mappings, arrival })
}

/// Returns replies of an established flow. The Pod sends the replies. At the client, only replies with `server` as
/// source address are counted.
fn replies(case: Case, topology: &Topology, pod: &Pod, server: SocketAddr) -> Result<Flows> {
    let client = establish(topology, pod, server)?;
    let pod_end = SocketAddr::from((pod.ip(), FIRST_POD_PORT));
    let devices = [&pod.device, &pod.host_device];
    let frame = meter::frame(case.workload.segment(), devices, [pod_end, client], client.port())?;
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (server, client) else {
        bail!("the bench sends IPv4 packets only")
    };
    let arrival = Arrival { address: *to.ip(), ports: [to.port(); 2], source: Some(from) };
    Ok(Flows { frame, clients: Clients::One, entry: case.entry(), mappings: 1, arrival })
}

/// The number of runs of a program and their total time.
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

/// Sets up the Node for a mode and the other modes that share its network.
fn translate(run: &Run, name: &str, mode: Mode, topology: &Topology, mappings: Mappings) -> Result<Option<Ours>> {
    let node = topology.node();
    let load = |manner| Ours::load(run, name, topology, mappings, manner).map(Some);
    match mode {
        Mode::Shortcut | Mode::ShortcutXdp => Ok(None),
        Mode::Iptables(_) | Mode::IptablesNewest(_) => baselines::add_iptables(node, mappings).map(|()| None),
        Mode::Nftables => baselines::add_nftables(node, mappings).map(|()| None),
        Mode::Routing
        | Mode::RoutingBesideOurs
        | Mode::RoutingBesideIdle
        | Mode::RoutingWire
        | Mode::Ours
        | Mode::OursOf(_)
        | Mode::OursWire => load(Manner::STACK),
        Mode::OursMitigated => load(Manner { are_mitigated: true, ..Manner::STACK }),
        Mode::OursRedirect => load(Manner::by(Forwarding::Redirect)),
        Mode::OursOffload => load(Manner::by(Forwarding::Offload)),
        Mode::OursOffloadConntrack => {
            baselines::add_conntrack(node)?;
            load(Manner::by(Forwarding::Offload))
        }
        Mode::OursXdp => load(Manner { attach: Attach::Xdp, ..Manner::STACK }),
        Mode::RoutingConntrack | Mode::OursConntrack => {
            baselines::add_conntrack(node)?;
            load(Manner::STACK)
        }
    }
}

/// Enables GRO on the uplink, so that the uplink's driver accepts the frames of the packet generator even without an
/// XDP program. Also makes the client complete the checksums of its real requests, because XDP programs expect complete
/// checksums.
fn join_drivers(client: &Client) -> Result<()> {
    client.uplink.set_offloads(&[Offload::Gro], true)?;
    client.device.set_offloads(&[Offload::TxChecksum], false)
}

/// Opens a flow like a real client, with two requests and responses: the second request makes the flow established for
/// kernel conntrack and for NPL.
fn establish(topology: &Topology, pod: &Pod, server: SocketAddr) -> Result<SocketAddr> {
    let _echo = EchoServer::start_in(&pod.netns, &pod.name, &[FIRST_POD_PORT])?;
    let socket = traffic::udp_socket(&topology.client().netns, server, true)?;
    socket.set_read_timeout(Some(ANSWER_LIMIT)).context("set a read timeout")?;
    for request in ["first", "second"] {
        socket.send(request.as_bytes()).with_context(|| format!("send to {server}"))?;
        poll::uninterrupted(|| socket.recv(&mut [0; 1024]))
            .with_context(|| format!("wait for the response of {server}"))?;
    }
    socket.local_addr().context("read the socket's local address")
}

// SPDX-License-Identifier: Apache-2.0
//! A network of the bench: client, Node and Pod, what translates on the Node, and what measures.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aya::programs::ProgramInfo;
use aya::sys::{Stats, enable_stats};
use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::devices::xdp::Attach;
use npl_common::names::PROG_INGRESS;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::meter::{self, Clients, Entry, Flows, Lost, Meter};
use npl_testkit::run::Run;
use npl_testkit::topology::{Client, Offload, Options, Pod, Topology};
use npl_testkit::{poll, traffic};

use crate::Effort;
use crate::cases::{Case, Mode, Workload};
use crate::ours::{Manner, Ours};
use crate::rivals;

/// The first port of each side; mapping n leads from the nth to the nth.
pub(crate) const FIRST_NODE_PORT: u16 = 50_000;
pub(crate) const FIRST_POD_PORT: u16 = 20_000;

/// The first client of new flows: from the range that RFC 2544 sets aside for benchmarks, with room for 131 072.
const FIRST_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), 10_000);
/// Ports of each such client: up to 60 000.
const PORTS_PER_CLIENT: u32 = 50_000;

/// The random clients of a flood follow this one: public addresses.
const FIRST_RANDOM_CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(16, 0, 0, 0)), 0);

/// How often a sample is taken if packets get lost: where the machine has no time for one of its processors, that may be the
/// one that empties a queue.
const TRIES: u32 = 3;

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

/// A network, and all that the cases need that are measured on it; gone when dropped, in this order.
pub(crate) struct Testbed {
    meter: Meter,
    ours: Option<Ours>,
    topology: Topology,
    mappings: Mappings,
    /// What each case sends.
    flows: Vec<(Case, Flows)>,
}

impl Testbed {
    /// Builds it for cases that share a network.
    pub(crate) fn new(run: &Run, number: usize, cases: &[Case], object: &Path) -> Result<Self> {
        let Case { workload, mode } = cases.first().context("a network is for some case")?.network();
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
        let flows_of = |case: &Case| Ok((*case, flows(*case, &topology, &pod)?));
        let flows: Vec<_> = cases.iter().map(flows_of).collect::<Result<_>>()?;
        if let (Workload::Established, Some(Ours { datapath, .. })) = (workload, &ours) {
            let translated = cases.iter().filter(|case| case.mode.is_translated()).count();
            ensure!(
                datapath.tables.flow_count()? == translated,
                "the Pod's answers did not make flows established ones"
            );
        }
        let (_, first) = flows.first().context("every case has flows")?;
        let mut meter = Meter::new(object, client, first, &pod, mappings.pod_ports())?;
        if mode == Mode::Shortcut {
            meter.attach_shortcut()?;
        }
        Ok(Self { meter, ours, topology, mappings, flows })
    }

    /// Whether the case is measured here.
    pub(crate) fn has(&self, case: Case) -> bool {
        self.flows.iter().any(|(other, _)| *other == case)
    }

    /// Measures once: millions of packets per second. A sample that lost packets is none, and is taken again.
    pub(crate) fn sample(&mut self, case: Case, effort: Effort) -> Result<f64> {
        let mut left = TRIES;
        loop {
            left -= 1;
            match self.prepare(case).and_then(|()| self.measure(case, effort)) {
                Err(error) if left > 0 && error.is::<Lost>() => eprintln!("bench: {case}: {error:#}; once more"),
                result => return result,
            }
        }
    }

    fn measure(&mut self, case: Case, effort: Effort) -> Result<f64> {
        let packets = match case.workload {
            Workload::Established => effort.established,
            Workload::NewFlows | Workload::SynFlood => effort.new_flows,
        };
        self.send(case, packets, effort.longest)
    }

    fn send(&mut self, case: Case, packets: u64, longest: Duration) -> Result<f64> {
        let rate = self.meter.measure(packets, longest)?;
        if case.workload != Workload::Established && case.mode.has_conntrack() {
            // There is room for those of one sample, and they are as many each time.
            self.topology.node().forget_connections()?;
        }
        Ok(rate)
    }

    /// Makes the network that of the case, and fills caches.
    fn prepare(&mut self, case: Case) -> Result<()> {
        self.turn_to(case).with_context(|| format!("prepare {case}"))?;
        self.send(case, WARM_UP, Duration::MAX).context("warm up").map(drop)
    }

    fn turn_to(&mut self, case: Case) -> Result<()> {
        if let Some(ours) = &mut self.ours {
            ours.set_attached(&self.topology, case.mode.has_ours())?;
            if let Mode::OursOf(count) = case.mode {
                ours.set_mappings(Mappings { count, ..self.mappings })?;
            }
        }
        self.meter.set_idle(case.mode == Mode::RoutingBesideIdle)?;
        let (_, flows) = self.flows.iter().find(|(other, _)| *other == case).context("measured elsewhere")?;
        self.meter.turn_to(flows)
    }

    /// What the program that meets each packet first costs, in nanoseconds, by the kernel's own account of one sample.
    ///
    /// The kernel reads its clock twice around every program; what that adds is what a program costs that only returns,
    /// and meets the same packets.
    pub(crate) fn program_cost(&mut self, case: Case, effort: Effort) -> Result<f64> {
        self.prepare(case)?;
        self.meter.set_idle(true)?;
        let before = self.accounts()?;
        let accounting = enable_stats(Stats::RunTime).context("have the kernel account for programs")?;
        self.measure(case, effort)?;
        drop(accounting);
        let after = self.accounts()?;
        let [ours, idle] = [0, 1].map(|program| after[program].since(before[program]));
        ensure!(ours.runs > 0 && idle.runs > 0, "the kernel has accounted for no program");
        Ok(ours.mean() - idle.mean())
    }

    /// Of NPL's program and of the one that only returns.
    fn accounts(&mut self) -> Result<[Account; 2]> {
        let Ours { datapath, .. } = self.ours.as_mut().context("NPL is not on this Node")?;
        let ours = datapath.hooks.load_program(PROG_INGRESS)?.info()?;
        Ok([Account::of(&ours), Account::of(&self.meter.idle()?.info()?)])
    }
}

/// What a case sends; opens the flow if it is an established one.
fn flows(case: Case, topology: &Topology, pod: &Pod) -> Result<Flows> {
    let Case { workload, mode } = case;
    let (first, spread) = mode.flows_to();
    let server: SocketAddr = if mode.is_translated() {
        (topology.node_addresses().v4, FIRST_NODE_PORT + first).into()
    } else {
        (pod.ip(), FIRST_POD_PORT + first).into()
    };
    let (source, clients) = match workload {
        Workload::Established => (establish(topology, pod, server)?, Clients::One),
        Workload::NewFlows => (FIRST_CLIENT, Clients::InTurn { ports: PORTS_PER_CLIENT }),
        Workload::SynFlood => (FIRST_RANDOM_CLIENT, Clients::Random),
    };
    let frame = meter::frame(workload.protocol(), topology.client(), source, server, FIRST_POD_PORT + first)?;
    Ok(Flows { frame, clients, entry: mode.entry(), mappings: spread })
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

/// Makes the Node do what the mode says, or another one that is measured on the same network.
fn translate(run: &Run, name: &str, mode: Mode, topology: &Topology, mappings: Mappings) -> Result<Option<Ours>> {
    let node = topology.node();
    let load = |manner| Ours::load(run, name, topology, mappings, manner).map(Some);
    match mode {
        Mode::Shortcut | Mode::ShortcutXdp => Ok(None),
        Mode::Iptables(_) | Mode::IptablesNewest(_) => rivals::add_iptables(node, mappings).map(|()| None),
        Mode::Nftables => rivals::add_nftables(node, mappings).map(|()| None),
        Mode::Routing
        | Mode::RoutingBesideOurs
        | Mode::RoutingBesideIdle
        | Mode::RoutingWire
        | Mode::Ours
        | Mode::OursOf(_)
        | Mode::OursWire => load(Manner::STACK),
        Mode::OursFenced => load(Manner { are_fenced: true, ..Manner::STACK }),
        Mode::OursRedirect => load(Manner::by(Forwarding::Redirect)),
        Mode::OursOffload => load(Manner::by(Forwarding::Offload)),
        Mode::OursOffloadConntrack => {
            rivals::add_conntrack(node)?;
            load(Manner::by(Forwarding::Offload))
        }
        Mode::OursXdp => load(Manner { attach: Attach::Xdp, ..Manner::STACK }),
        Mode::RoutingConntrack | Mode::OursConntrack => {
            rivals::add_conntrack(node)?;
            load(Manner::STACK)
        }
    }
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

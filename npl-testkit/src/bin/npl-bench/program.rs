// SPDX-License-Identifier: Apache-2.0
//! Measures the kernel programs in isolation: the time in nanoseconds that each program adds to a packet.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use aya::EbpfLoader;
use aya::programs::{SchedClassifier, TestRun, TestRunOptions, TestRunResult, Xdp};
use npl_agent::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};
use npl_agent::datapath::Datapath;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::traffic::{PROG_IDLE, PROG_IDLE_XDP};
use npl_testkit::mounts::BpfFs;
use npl_testkit::packet::Packet;
use npl_testkit::run::Run;
use npl_testkit::{interrupt, live_frames, process};

use crate::Effort;
use crate::cases::{Case, Mode, Workload};
use crate::figures::{Aim, Figure, Samples, Stage, figure, say};
use crate::ours::open_datapath;
use crate::testbed::Testbed;

/// The time for translating a request of an established flow.
const FORWARD_HIT: Figure = figure("program/forward-hit", "ns", Stage::Program, &[Aim::Median(100.0)]);
/// The time for translating a reply of an established flow.
const REPLY_HIT: Figure = figure("program/reply-hit", "ns", Stage::Program, &[Aim::Median(100.0)]);
/// The time for translating a request by a program that was loaded without `CAP_PERFMON`, with the verifier's
/// speculation barriers.
const FORWARD_HIT_MITIGATED: Figure =
    figure("program/forward-hit-mitigated", "ns", Stage::Program, &[]).beside("loaded with CAP_PERFMON");
const REPLY_HIT_MITIGATED: Figure =
    figure("program/reply-hit-mitigated", "ns", Stage::Program, &[]).beside("loaded with CAP_PERFMON");
/// The time for translating a request in the driver, by the XDP program.
const XDP_FORWARD_HIT: Figure = figure("program/xdp-forward-hit", "ns", Stage::Program, &[]);
/// The time for passing a datagram whose destination is a Pod address and not a node address.
const DIRECT: Figure = figure("program/direct", "ns", Stage::Program, &[]);
/// The time for passing the same packet on a Node without UDP mappings.
const DIRECT_WITHOUT_UDP: Figure = figure("program/direct-without-udp", "ns", Stage::Program, &[]);
/// The time for passing an outgoing packet of a Pod that belongs to no translated flow.
const REPLY_MISS: Figure = figure("program/reply-miss", "ns", Stage::Program, &[]);
/// The time for passing an outgoing packet from the Node's primary address, such as a tunnel's packet.
const NODE_MISS: Figure = figure("program/node-miss", "ns", Stage::Program, &[Aim::Median(10.0)]);
/// The time for passing a packet whose destination port is outside the range.
const MISS: Figure = figure("program/miss", "ns", Stage::Program, &[Aim::Median(10.0)]);
/// The time for translating a SYN from a new client, measured at the uplink of a Node.
const SYN_FLOOD: Figure =
    figure("program/syn-flood", "ns", Stage::Program, &[Aim::Ratio(1.5)]).beside("an established flow");

/// The time for passing an ICMP error about an unknown flow. The program does not change the error.
const ERROR_FLOOD: Figure = figure("program/error-flood", "ns", Stage::Program, &[]);

/// The times for packets of the other floods. These figures are measured like [`SYN_FLOOD`], but have no goal.
const ACK_FLOOD: Figure = beside_established("program/ack-flood");
const RST_FLOOD: Figure = beside_established("program/rst-flood");
const NULL_FLOOD: Figure = beside_established("program/null-flood");
const SYN_ACK_FLOOD: Figure = beside_established("program/syn-ack-flood");
const UDP_FLOOD: Figure = beside_established("program/udp-flood");
const FRAGMENT_FLOOD: Figure = beside_established("program/fragment-flood");
const SCTP_INIT_FLOOD: Figure = beside_established("program/sctp-init-flood");
const SCTP_DATA_FLOOD: Figure = beside_established("program/sctp-data-flood");

const fn beside_established(name: &'static str) -> Figure {
    figure(name, "ns", Stage::Program, &[]).beside("an established flow")
}

/// The figure of each flood in [`Workload::FLOODS`].
const FLOODS: [&Figure; Workload::FLOODS.len()] = [
    &SYN_FLOOD,
    &ACK_FLOOD,
    &RST_FLOOD,
    &NULL_FLOOD,
    &SYN_ACK_FLOOD,
    &UDP_FLOOD,
    &FRAGMENT_FLOOD,
    &SCTP_INIT_FLOOD,
    &SCTP_DATA_FLOOD,
];

/// All figures, in display order.
pub(crate) const FIGURES: [&Figure; 20] = [
    &FORWARD_HIT,
    &XDP_FORWARD_HIT,
    &REPLY_HIT,
    &MISS,
    &DIRECT,
    &DIRECT_WITHOUT_UDP,
    &REPLY_MISS,
    &NODE_MISS,
    &FORWARD_HIT_MITIGATED,
    &REPLY_HIT_MITIGATED,
    &SYN_FLOOD,
    &ACK_FLOOD,
    &RST_FLOOD,
    &NULL_FLOOD,
    &SYN_ACK_FLOOD,
    &UDP_FLOOD,
    &FRAGMENT_FLOOD,
    &SCTP_INIT_FLOOD,
    &SCTP_DATA_FLOOD,
    &ERROR_FLOOD,
];

/// The number of runs of a program in one measurement. A round consists of several measurements, of which the fastest
/// counts.
const REPEAT: u32 = 200_000;
const GOES: usize = 5;

/// Two node ports, each of which is mapped to the other. A translated packet therefore matches the other mapping, so
/// that a program can be run repeatedly on one packet.
const NODE_PORTS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 10)), 61_000),
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 77)), 61_001),
];
/// A node address without a mapping.
const OTHER_NODE_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 11));
const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 5)), 43_210);
/// An address and port without a mapping.
const POD: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 244, 0, 9)), OUT_OF_RANGE);
const RANGE: &str = "61000-61100";
const OUT_OF_RANGE: u16 = 8080;

/// The payload of a frame that has 64 bytes on the wire.
const PAYLOAD: [u8; 18] = [0; 18];

/// Measures the elements of `figures` that belong to this stage.
pub(crate) fn measure(figures: &[&Figure], object: &Path, effort: Effort, samples: &mut Samples) -> Result<()> {
    if !figures.iter().any(|figure| figure.stage == Stage::Program) {
        return Ok(());
    }
    let run = Run::start()?;
    say("running the programs in isolation");
    let (mut alone, mut mitigated) = (Alone::new(&run, object, false)?, Alone::new(&run, object, true)?);
    let mut flooded = Flooded::new(&run, object)?;
    for _round in 0..effort.rounds {
        ensure!(!interrupt::is_requested(), "interrupted");
        for (figure, cost) in alone.costs(&ALONE)? {
            samples.add(figure, &[cost], &[]);
        }
        let (with, without) = (mitigated.costs(&MITIGATED)?, alone.costs(&MITIGATED)?);
        for ((figure, cost), (_, beside)) in with.into_iter().zip(without) {
            samples.add(figure, &[cost], &[beside]);
        }
        flooded.measure(effort, samples)?;
    }
    Ok(())
}

/// The hook of a program.
#[derive(Clone, Copy, Debug)]
enum Hook {
    /// The TC program with this name.
    Tc(&'static str),
    /// The XDP program.
    Xdp,
}

/// A synthetic packet.
#[derive(Clone, Copy, Debug)]
enum Sent {
    Request,
    Reply,
    /// A packet to a port outside the range.
    Miss,
    /// A packet from a Pod that belongs to no translated flow.
    ReplyMiss,
    /// A packet from the Node's primary address and a port outside the range.
    NodeMiss,
    /// A packet to a Pod address.
    Direct,
    /// The same packet; the programs find the flag that there is no UDP mapping.
    DirectWithoutUdp,
    /// An ICMP error about a reply of an unknown flow.
    Error,
}

/// A figure, with the program and the packet for which the figure is measured.
type Cost = (&'static Figure, Hook, Sent);

const ALONE: [Cost; 9] = [
    (&FORWARD_HIT, Hook::Tc(PROG_INGRESS), Sent::Request),
    (&XDP_FORWARD_HIT, Hook::Xdp, Sent::Request),
    (&REPLY_HIT, Hook::Tc(PROG_EGRESS), Sent::Reply),
    (&MISS, Hook::Tc(PROG_INGRESS), Sent::Miss),
    (&DIRECT, Hook::Tc(PROG_INGRESS), Sent::Direct),
    (&DIRECT_WITHOUT_UDP, Hook::Tc(PROG_INGRESS), Sent::DirectWithoutUdp),
    (&REPLY_MISS, Hook::Tc(PROG_EGRESS), Sent::ReplyMiss),
    (&NODE_MISS, Hook::Tc(PROG_EGRESS), Sent::NodeMiss),
    (&ERROR_FLOOD, Hook::Tc(PROG_INGRESS), Sent::Error),
];
const MITIGATED: [Cost; 2] = [
    (&FORWARD_HIT_MITIGATED, Hook::Tc(PROG_INGRESS), Sent::Request),
    (&REPLY_HIT_MITIGATED, Hook::Tc(PROG_EGRESS), Sent::Reply),
];

impl Sent {
    fn packet(self) -> Packet {
        let foreign: SocketAddr = (NODE_PORTS[0].ip(), OUT_OF_RANGE).into();
        let (from, to) = match self {
            Self::Request => (CLIENT, NODE_PORTS[0]),
            Self::Reply => (NODE_PORTS[1], CLIENT),
            Self::Miss => (CLIENT, foreign),
            Self::ReplyMiss => (POD, CLIENT),
            Self::NodeMiss => (foreign, CLIENT),
            Self::Direct | Self::DirectWithoutUdp => (CLIENT, POD),
            Self::Error => {
                // Port unreachable. Every ICMP error quotes at least eight bytes after the IP header (RFC 792).
                let unknown = packet(NODE_PORTS[0], (CLIENT.ip(), CLIENT.port() + 1).into());
                return Packet::icmp_error(CLIENT.ip(), 3, 3, &unknown, 8).to_this_machine();
            }
        };
        packet(from, to)
    }

    /// The Node's addresses while the packet is measured; the first one is the primary address. The egress program
    /// translates no packet from the primary address, and in this bench the Pods' addresses are node addresses.
    fn node_addresses(self) -> [IpAddr; 3] {
        let [first, second] = NODE_PORTS.map(|address| address.ip());
        if matches!(self, Self::Reply) {
            [OTHER_NODE_ADDRESS, first, second]
        } else {
            [first, second, OTHER_NODE_ADDRESS]
        }
    }

    /// The number of requests and replies that one run translates.
    const fn translated(self) -> [u64; 2] {
        match self {
            Self::Request => [1, 0],
            Self::Reply => [0, 1],
            Self::Miss | Self::ReplyMiss | Self::NodeMiss | Self::Direct | Self::DirectWithoutUdp | Self::Error => {
                [0, 0]
            }
        }
    }
}

/// The loaded programs, which the bench runs on synthetic packets.
struct Alone {
    datapath: Datapath,
    idle: aya::Ebpf,
    /// The BPF file system in which programs are pinned when they are first loaded.
    _bpffs: BpfFs,
}

impl Alone {
    fn new(run: &Run, object: &Path, are_mitigated: bool) -> Result<Self> {
        let bpffs = run.bpffs(if are_mitigated { "bpf-mitigated" } else { "bpf-program" })?;
        let mut datapath = open_datapath(bpffs.path(), are_mitigated)?;
        datapath.tables.set_local_addresses(&Sent::Reply.node_addresses())?;
        for (from, to) in [(NODE_PORTS[0], NODE_PORTS[1]), (NODE_PORTS[1], NODE_PORTS[0])] {
            let (node_port, pod_port) = (NodePort(from.port()), PodPort(to.port()));
            let frontend = Frontend { family: Family::V4, node_port, protocol: Protocol::Udp };
            let backend = Backend { pod_ip: to.ip(), pod_port, generation: 1, is_restricted: false };
            datapath.upsert_mapping(frontend, backend)?;
        }
        datapath.configure(RANGE.parse()?, || 0x4e50_4c00_4e50_4c01)?;
        let mut idle = EbpfLoader::new().load_file(object).context("load the idle program")?;
        let program: &mut SchedClassifier =
            idle.program_mut(PROG_IDLE).context("the object has no idle program")?.try_into()?;
        program.load().context("load the idle program")?;
        let program: &mut Xdp =
            idle.program_mut(PROG_IDLE_XDP).context("the object has no idle program")?.try_into()?;
        program.load().context("load the idle program")?;
        let mut alone = Self { datapath, idle, _bpffs: bpffs };
        alone.establish()?;
        Ok(alone)
    }

    /// Establishes the flows: a request for each mapping, the reply, and another request.
    fn establish(&mut self) -> Result<()> {
        for (asked, pod) in [(NODE_PORTS[0], NODE_PORTS[1]), (NODE_PORTS[1], NODE_PORTS[0])] {
            let (request, reply) = (packet(CLIENT, asked), packet(pod, CLIENT));
            for (name, packet) in [(PROG_INGRESS, &request), (PROG_EGRESS, &reply), (PROG_INGRESS, &request)] {
                run(self.datapath.hooks.load_program(name)?, packet, 1)?;
            }
        }
        ensure!(self.datapath.tables.flow_count()? == 2, "the conntrack table does not have two established entries");
        Ok(())
    }

    /// Returns, for each program and packet, how much longer NPL's program runs than an empty program, in nanoseconds.
    fn costs(&mut self, costs: &[Cost]) -> Result<Vec<(&'static Figure, f64)>> {
        process::on_own_thread(|| {
            live_frames::occupy_one_processor()?;
            costs.iter().map(|(figure, hook, sent)| Ok((*figure, self.cost(figure, *hook, *sent)?))).collect()
        })
    }

    fn cost(&mut self, figure: &Figure, hook: Hook, sent: Sent) -> Result<f64> {
        self.datapath.tables.set_local_addresses(&sent.node_addresses())?;
        self.datapath.tables.set_no_udp_mappings(matches!(sent, Sent::DirectWithoutUdp))?;
        let (packet, before) = (sent.packet(), self.translated()?);
        let mut least = [f64::INFINITY; 2];
        for _go in 0..GOES {
            let times = self.run_both(hook, &packet)?;
            least = [0, 1].map(|index: usize| least[index].min(times[index]));
        }
        let now = self.translated()?;
        let translated = [0, 1].map(|index: usize| now[index] - before[index]);
        let expected = sent.translated().map(|each| each * u64::from(REPEAT) * GOES as u64);
        ensure!(
            translated == expected,
            "{}: {translated:?} requests and replies were translated, not {expected:?}",
            figure.name
        );
        Ok(least[0] - least[1])
    }

    /// Returns the mean run times of NPL's program and of the empty program.
    fn run_both(&mut self, hook: Hook, packet: &Packet) -> Result<[f64; 2]> {
        match hook {
            Hook::Tc(name) => {
                let idle: &SchedClassifier = self.idle.program(PROG_IDLE).context("no idle program")?.try_into()?;
                Ok([run(self.datapath.hooks.load_program(name)?, packet, REPEAT)?, run(idle, packet, REPEAT)?])
            }
            Hook::Xdp => {
                let idle: &Xdp = self.idle.program(PROG_IDLE_XDP).context("no idle program")?.try_into()?;
                Ok([run(self.datapath.hooks.load_xdp_program()?, packet, REPEAT)?, run(idle, packet, REPEAT)?])
            }
        }
    }

    /// The number of translated requests and replies so far.
    fn translated(&self) -> Result<[u64; 2]> {
        let totals = self.datapath.tables.totals(Family::V4)?;
        Ok([totals.request_packets, totals.reply_packets])
    }
}

/// Runs a program repeatedly on one packet, each time on the result of the previous run. Returns the mean time in
/// nanoseconds.
fn run<P>(program: &P, packet: &Packet, repeat: u32) -> Result<f64>
where
    P: for<'a> TestRun<Opts<'a> = TestRunOptions<'a>, Result = TestRunResult>,
{
    let frame = packet.build();
    let mut options = TestRunOptions::new();
    options.data_in = Some(&frame);
    options.repeat = repeat;
    let result = program.test_run(options).context("run a program in isolation")?;
    Ok(result.duration.as_secs_f64() * 1e9)
}

fn packet(from: SocketAddr, to: SocketAddr) -> Packet {
    Packet::udp(from, to, &PAYLOAD).to_this_machine()
}

/// Test networks in which NPL's program at the uplink processes floods, one network for each protocol, and a network in
/// which the program processes an established flow.
struct Flooded {
    floods: Vec<Testbed>,
    established: Testbed,
}

impl Flooded {
    const ESTABLISHED: Case = Case { workload: Workload::Established, mode: Mode::Ours };

    fn new(run: &Run, object: &Path) -> Result<Self> {
        let mut networks: Vec<Vec<Case>> = Vec::new();
        for workload in Workload::FLOODS {
            let protocol = |case: &Case| case.workload.segment().protocol();
            let case = Case { workload, mode: Mode::Ours };
            match networks.iter_mut().find(|cases| cases.first().map(protocol) == Some(protocol(&case))) {
                Some(cases) => cases.push(case),
                None => networks.push(vec![case]),
            }
        }
        let established = Testbed::new(run, networks.len(), &[Self::ESTABLISHED], object)?;
        let floods = networks.iter().enumerate().map(|(number, cases)| Testbed::new(run, number, cases, object));
        Ok(Self { floods: floods.collect::<Result<_>>()?, established })
    }

    fn measure(&mut self, effort: Effort, samples: &mut Samples) -> Result<()> {
        for (workload, figure) in Workload::FLOODS.into_iter().zip(FLOODS) {
            let case = Case { workload, mode: Mode::Ours };
            let network =
                self.floods.iter_mut().find(|testbed| testbed.has(case)).context("the flood has no network")?;
            let flood = network.program_cost(case, effort)?;
            let established = self.established.program_cost(Self::ESTABLISHED, effort)?;
            samples.add(figure, &[flood], &[established]);
        }
        Ok(())
    }
}

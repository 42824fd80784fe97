// SPDX-License-Identifier: Apache-2.0
//! The kernel programs by themselves: what each adds to a packet, in nanoseconds.

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

/// A request of an established flow, translated.
const FORWARD_HIT: Figure = figure("program/forward-hit", "ns", Stage::Program, &[Aim::Median(100.0)]);
/// A reply of one.
const REPLY_HIT: Figure = figure("program/reply-hit", "ns", Stage::Program, &[Aim::Median(100.0)]);
/// The two, where the agent has loaded the programs itself: the kernel has put barriers against speculation into them.
const FORWARD_HIT_FENCED: Figure =
    figure("program/forward-hit-fenced", "ns", Stage::Program, &[]).beside("loaded ahead of the agent");
const REPLY_HIT_FENCED: Figure =
    figure("program/reply-hit-fenced", "ns", Stage::Program, &[]).beside("loaded ahead of the agent");
/// The same ahead of the stack, by the program for drivers.
const XDP_FORWARD_HIT: Figure = figure("program/xdp-forward-hit", "ns", Stage::Program, &[]);
/// A datagram to a Pod itself, which is not the Node's main address.
const DIRECT: Figure = figure("program/direct", "ns", Stage::Program, &[]);
/// A packet that leaves and is nobody's reply.
const REPLY_MISS: Figure = figure("program/reply-miss", "ns", Stage::Program, &[]);
/// A packet to a port out of the range.
const MISS: Figure = figure("program/miss", "ns", Stage::Program, &[Aim::Median(10.0)]);
/// A SYN of a client that was never there, on the way through the Node.
const SYN_FLOOD: Figure =
    figure("program/syn-flood", "ns", Stage::Program, &[Aim::Ratio(1.5)]).beside("an established flow");

/// All of them, in the order in which they are shown.
pub(crate) const FIGURES: [&Figure; 9] = [
    &FORWARD_HIT,
    &XDP_FORWARD_HIT,
    &REPLY_HIT,
    &MISS,
    &DIRECT,
    &REPLY_MISS,
    &FORWARD_HIT_FENCED,
    &REPLY_HIT_FENCED,
    &SYN_FLOOD,
];

/// Runs of a program in one go, and how many of these there are in a round: the quickest counts.
const REPEAT: u32 = 200_000;
const GOES: usize = 5;

/// Two ends, both of them the Node's, of two mappings, each of which leads to the other end: a packet that was
/// translated is one that has to be translated.
const ENDS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 10)), 61_000),
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 77)), 61_001),
];
const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 5)), 43_210);
/// Of no mapping.
const POD: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 244, 0, 9)), OUT_OF_RANGE);
const RANGE: &str = "61000-61100";
const OUT_OF_RANGE: u16 = 8080;

/// Bytes of payload, for a frame of 64 bytes on the wire.
const PAYLOAD: [u8; 18] = [0; 18];

/// Measures those of `figures` that are ours.
pub(crate) fn measure(figures: &[&Figure], object: &Path, effort: Effort, samples: &mut Samples) -> Result<()> {
    if !figures.iter().any(|figure| figure.stage == Stage::Program) {
        return Ok(());
    }
    let run = Run::start()?;
    say("running the programs by themselves");
    let (mut alone, mut fenced) = (Alone::new(&run, object, false)?, Alone::new(&run, object, true)?);
    let mut flooded = Flooded::new(&run, object)?;
    for _round in 0..effort.rounds {
        ensure!(!interrupt::is_requested(), "interrupted");
        for (figure, cost) in alone.costs(&ALONE)? {
            samples.add(figure, &[cost], &[]);
        }
        let (with, without) = (fenced.costs(&FENCED)?, alone.costs(&FENCED)?);
        for ((figure, cost), (_, beside)) in with.into_iter().zip(without) {
            samples.add(figure, &[cost], &[beside]);
        }
        flooded.measure(effort, samples)?;
    }
    Ok(())
}

/// Where a program of ours runs.
#[derive(Clone, Copy, Debug)]
enum Hook {
    /// At TC, the program of this name.
    Tc(&'static str),
    /// In a driver.
    Xdp,
}

/// A packet that nobody sent.
#[derive(Clone, Copy, Debug)]
enum Sent {
    Request,
    Reply,
    /// To a port out of the range.
    Miss,
    /// Of the Node's, and nobody's reply.
    ReplyMiss,
    /// To a Pod itself.
    Direct,
}

/// What a program does with a packet, and the figure for what that takes.
type Cost = (&'static Figure, Hook, Sent);

const ALONE: [Cost; 6] = [
    (&FORWARD_HIT, Hook::Tc(PROG_INGRESS), Sent::Request),
    (&XDP_FORWARD_HIT, Hook::Xdp, Sent::Request),
    (&REPLY_HIT, Hook::Tc(PROG_EGRESS), Sent::Reply),
    (&MISS, Hook::Tc(PROG_INGRESS), Sent::Miss),
    (&DIRECT, Hook::Tc(PROG_INGRESS), Sent::Direct),
    (&REPLY_MISS, Hook::Tc(PROG_EGRESS), Sent::ReplyMiss),
];
const FENCED: [Cost; 2] = [
    (&FORWARD_HIT_FENCED, Hook::Tc(PROG_INGRESS), Sent::Request),
    (&REPLY_HIT_FENCED, Hook::Tc(PROG_EGRESS), Sent::Reply),
];

impl Sent {
    fn packet(self) -> Packet {
        let foreign: SocketAddr = (ENDS[0].ip(), OUT_OF_RANGE).into();
        let (from, to) = match self {
            Self::Request => (CLIENT, ENDS[0]),
            Self::Reply => (ENDS[1], CLIENT),
            Self::Miss => (CLIENT, foreign),
            Self::ReplyMiss => (foreign, CLIENT),
            Self::Direct => (CLIENT, POD),
        };
        packet(from, to)
    }

    /// How many requests and replies a run of it translates.
    const fn translated(self) -> [u64; 2] {
        match self {
            Self::Request => [1, 0],
            Self::Reply => [0, 1],
            Self::Miss | Self::ReplyMiss | Self::Direct => [0, 0],
        }
    }
}

/// Programs that are run over packets that nobody sent.
struct Alone {
    datapath: Datapath,
    idle: aya::Ebpf,
    /// Where a program is pinned when it is first asked for.
    _bpffs: BpfFs,
}

impl Alone {
    fn new(run: &Run, object: &Path, are_fenced: bool) -> Result<Self> {
        let bpffs = run.bpffs(if are_fenced { "bpf-fenced" } else { "bpf-program" })?;
        let mut datapath = open_datapath(bpffs.path(), are_fenced)?;
        datapath.tables.set_local_addresses(&ENDS.map(|end| end.ip()))?;
        for (from, to) in [(ENDS[0], ENDS[1]), (ENDS[1], ENDS[0])] {
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

    /// A request by each mapping, its reply, and another request.
    fn establish(&mut self) -> Result<()> {
        for (asked, pod) in [(ENDS[0], ENDS[1]), (ENDS[1], ENDS[0])] {
            let (request, reply) = (packet(CLIENT, asked), packet(pod, CLIENT));
            for (name, packet) in [(PROG_INGRESS, &request), (PROG_EGRESS, &reply), (PROG_INGRESS, &request)] {
                run(self.datapath.hooks.load_program(name)?, packet, 1)?;
            }
        }
        ensure!(self.datapath.tables.flow_count()? == 2, "the two flows are not established");
        Ok(())
    }

    /// What programs take for packets, in nanoseconds.
    fn costs(&mut self, costs: &[Cost]) -> Result<Vec<(&'static Figure, f64)>> {
        process::on_own_thread(|| {
            live_frames::occupy_one_processor()?;
            costs.iter().map(|(figure, hook, sent)| Ok((*figure, self.cost(figure, *hook, *sent)?))).collect()
        })
    }

    fn cost(&mut self, figure: &Figure, hook: Hook, sent: Sent) -> Result<f64> {
        let (packet, before) = (sent.packet(), self.translated()?);
        let mut least = [f64::INFINITY; 2];
        for _go in 0..GOES {
            let times = self.run_both(hook, &packet)?;
            least = [0, 1].map(|index: usize| least[index].min(times[index]));
        }
        let now = self.translated()?;
        let translated = [0, 1].map(|index: usize| now[index] - before[index]);
        let expected = sent.translated().map(|each| each * u64::from(REPEAT) * GOES as u64);
        ensure!(translated == expected, "{}: {translated:?} packets were translated", figure.name);
        Ok(least[0] - least[1])
    }

    /// The mean times of a run of ours and of a run of the program that only returns.
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

    /// Requests and replies up to now.
    fn translated(&self) -> Result<[u64; 2]> {
        let totals = self.datapath.tables.totals(Family::V4)?;
        Ok([totals.request_packets, totals.reply_packets])
    }
}

/// Runs a program over one packet, as the last run has left it; the mean time of a run in nanoseconds.
fn run<P>(program: &P, packet: &Packet, repeat: u32) -> Result<f64>
where
    P: for<'a> TestRun<Opts<'a> = TestRunOptions<'a>, Result = TestRunResult>,
{
    let frame = packet.build();
    let mut options = TestRunOptions::new();
    options.data_in = Some(&frame);
    options.repeat = repeat;
    let result = program.test_run(options).context("run a program by itself")?;
    Ok(result.duration.as_secs_f64() * 1e9)
}

fn packet(from: SocketAddr, to: SocketAddr) -> Packet {
    Packet::udp(from, to, &PAYLOAD).to_this_machine()
}

/// Programs on a Node's uplink, under a flood and beside it.
struct Flooded {
    flood: Testbed,
    established: Testbed,
}

impl Flooded {
    const FLOOD: Case = Case { workload: Workload::SynFlood, mode: Mode::Ours };
    const ESTABLISHED: Case = Case { workload: Workload::Established, mode: Mode::Ours };

    fn new(run: &Run, object: &Path) -> Result<Self> {
        let testbed = |number, case| Testbed::new(run, number, &[case], object);
        Ok(Self { flood: testbed(0, Self::FLOOD)?, established: testbed(1, Self::ESTABLISHED)? })
    }

    fn measure(&mut self, effort: Effort, samples: &mut Samples) -> Result<()> {
        let flood = self.flood.program_cost(Self::FLOOD, effort)?;
        let established = self.established.program_cost(Self::ESTABLISHED, effort)?;
        samples.add(&SYN_FLOOD, &[flood], &[established]);
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `npl-bench` compares NPL with its alternatives. The packet rate from a Node's uplink to a Pod is compared with the
//! rates of plain routing, iptables and nftables. TCP through a mapping is compared with TCP to the Pod's own address.
//! The time in which the agent annotates Pods is compared with the time of the same patches by a plain client. Requests
//! in a real cluster are compared with requests to Services of kube-proxy. The time until a real load balancer that
//! reads the feed sends requests to a new Pod is compared with the time until a plain watch delivers the annotation.
//!
//! Each case (a workload and a forwarding mode) has a client, a Node and a Pod in network namespaces. Cases that differ
//! only in the presence of NPL or of an empty program, or in the number of NPL's mappings, share a network. Packets are
//! generated in the kernel. Requests enter the Node at the uplink, and are counted when they arrive at the expected Pod
//! port. Replies enter the Node at the Pod's device, and are counted when they arrive at the client. Every round
//! measures every case, so that slow phases of the machine affect all cases.

#![expect(clippy::print_stdout, reason = "the result goes to standard output")]
#![expect(clippy::print_stderr, reason = "progress goes to standard error")]

mod baselines;
mod cases;
mod cluster;
mod control_plane;
mod feed;
mod figures;
mod floods;
mod lanes;
mod ours;
mod program;
mod ratios;
mod report;
mod sockets;
mod tcp;
mod testbed;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use npl_testkit::run::Run;
use npl_testkit::{interrupt, process};

use self::cases::Case;
use self::figures::{Figure, Row, Samples, Stage};
use self::ratios::{RATIOS, Ratio};
use self::report::{Format, Report};
use self::testbed::Testbed;

/// Compares NPL with plain routing, iptables and nftables, and NPL's agent with a plain client of the API server.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench")]
struct Arguments {
    /// Measure few and short rounds: the datapath in a minute, other figures in a few minutes.
    #[arg(long)]
    quick: bool,
    /// Measure only the ratios and figures whose names contain NAME, for example `control-plane`, `cluster` or `feed`
    /// [default: all ratios, and the figures of the datapath].
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// The output format.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// The object with the packet generator and counter; `cargo xtask bench` builds it and sets this option.
    #[arg(long, value_name = "FILE", env = "NPL_TRAFFIC_OBJECT", hide = true)]
    traffic_object: PathBuf,
}

/// The amount of work per sample and the number of rounds.
#[derive(Clone, Copy, Debug)]
struct Effort {
    rounds: usize,
    /// The number of packets per sample of an established flow.
    established: u64,
    /// The number of flows per sample of new flows, each with one packet.
    new_flows: u64,
    /// The longest duration of a sample of packets. A sample that would take longer ends with fewer packets.
    longest: Duration,
    /// The number of turns per round for requests. A turn measures the mapping and the Pod's own address.
    turns: usize,
    /// The number of requests that a turn sends over each of two connections: one through the mapping, and one to the
    /// Pod's own address. Warm-up requests are not counted.
    questions: usize,
    /// The number of turns per round for streams. A turn measures the mapping and the Pod's own address.
    streams: usize,
    /// The duration of one turn of streams.
    stream: Duration,
    /// The number of Pods per sample of annotation latencies.
    latencies: usize,
    /// The number of Pods that are measured for each load balancer that queries the feed at an interval.
    polled: usize,
    /// The number of Service changes per sample.
    changes: usize,
    /// The duration of one sample of an idle agent.
    steady: Duration,
    /// The number of requests per sample over one connection.
    requests: usize,
    /// The number of connections per sample, each with one request.
    connections: usize,
    /// The number of measurements in which many Pods are started at the same time.
    crowds: usize,
}

/// The number of threads that build test networks.
const BUILDERS: usize = 4;

/// The number of rounds that use the same networks. Later rounds use new networks, because the memory layout of a
/// network affects the measured rates by up to 5 %.
const ROUNDS_IN_A_PLACE: usize = 3;

const QUICK: Effort = Effort {
    rounds: 3,
    established: 200_000,
    new_flows: 250_000,
    longest: Duration::from_millis(400),
    turns: 6,
    questions: 500,
    streams: 12,
    stream: Duration::from_millis(15),
    latencies: 50,
    polled: 10,
    changes: 20,
    steady: Duration::from_secs(6),
    requests: 5_000,
    connections: 300,
    crowds: 1,
};
/// The effort without `--quick`. `steady` is longer than the interval between two verifications of the kernel state, so
/// each sample of an idle agent contains a verification.
const FULL: Effort = Effort {
    rounds: 11,
    established: 1_000_000,
    new_flows: 250_000,
    longest: Duration::MAX,
    turns: 12,
    questions: 2_000,
    streams: 48,
    stream: Duration::from_millis(30),
    latencies: 100,
    polled: 50,
    changes: 50,
    steady: Duration::from_secs(31),
    requests: 20_000,
    connections: 400,
    crowds: 5,
};

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_error) if interrupt::is_requested() => ExitCode::from(interrupt::EXIT_CODE),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    interrupt::watch()?;
    let ratios: Vec<Ratio> = RATIOS.into_iter().filter(|ratio| ratio.name().contains(&arguments.only)).collect();
    let datapath = || program::FIGURES.into_iter().chain(floods::FIGURES).chain(lanes::FIGURES).chain(sockets::FIGURES);
    let all = || datapath().chain(control_plane::FIGURES).chain(cluster::figures()).chain(feed::FIGURES);
    let is_meant = |figure: &&Figure| match arguments.only.as_str() {
        "" => {
            figure.stage == Stage::Sockets
                || matches!(figure.stage, Stage::Program | Stage::Flood | Stage::Lanes) && !arguments.quick
        }
        only => figure.name.contains(only),
    };
    let figures: Vec<&Figure> = all().filter(is_meant).collect();
    if ratios.is_empty() && figures.is_empty() {
        let figures = all().map(|figure| figure.name.to_owned());
        let known: Vec<String> = RATIOS.iter().map(Ratio::name).chain(figures).collect();
        bail!("no ratio or figure name contains {:?}; available names: {}", arguments.only, known.join(", "));
    }
    let effort = if arguments.quick { QUICK } else { FULL };
    let samples = measure(arguments, &ratios::needed_for(&ratios), effort)?;
    let mut seen = Samples::default();
    program::measure(&figures, &arguments.traffic_object, effort, &mut seen)?;
    floods::measure(&figures, &arguments.traffic_object, effort, &mut seen)?;
    lanes::measure(&figures, &arguments.traffic_object, effort, &mut seen)?;
    sockets::measure(&figures, effort, &mut seen)?;
    control_plane::measure(&figures, effort, &mut seen)?;
    cluster::measure(&figures, effort, &mut seen)?;
    feed::measure(&figures, effort, &mut seen)?;
    let rows: Vec<Row> = figures.iter().filter_map(|figure| seen.row(figure)).collect();
    print!("{}", Report::new(effort.rounds, &samples, &ratios, rows)?.show(arguments.output)?);
    Ok(())
}

/// Builds the networks for these cases, numbered from `first`. Several networks are built in parallel, because a build
/// mostly waits for the kernel.
fn build(run: &Run, networks: &[Vec<Case>], first: usize, object: &Path) -> Result<Vec<Testbed>> {
    eprintln!("bench: building {} test networks", networks.len());
    let one = |(number, cases): &(usize, &Vec<Case>)| {
        ensure!(!interrupt::is_requested(), "interrupted");
        Testbed::new(run, *number, cases, object).with_context(|| format!("prepare {}", cases[0]))
    };
    let numbered: Vec<(usize, &Vec<Case>)> = (first..).zip(networks).collect();
    thread::scope(|scope| {
        let mut builders = Vec::new();
        for share in numbered.chunks(numbered.len().div_ceil(BUILDERS).max(1)) {
            builders.push(scope.spawn(move || share.iter().map(one).collect::<Result<Vec<_>>>()));
        }
        let built: Result<Vec<_>> = builders.into_iter().map(process::joined).collect();
        Ok(built?.into_iter().flatten().collect())
    })
}

/// Returns the rates of each case in million packets per second, per round.
fn measure(arguments: &Arguments, networks: &[Vec<Case>], effort: Effort) -> Result<Vec<(Case, Vec<f64>)>> {
    if networks.is_empty() {
        return Ok(Vec::new());
    }
    let run = Run::start()?;
    let mut samples: Vec<(Case, Vec<f64>)> = networks.iter().flatten().map(|case| (*case, Vec::new())).collect();
    let (mut testbeds, mut former) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        if round % ROUNDS_IN_A_PLACE == 0 {
            // Keep old networks until the end: the kernel would otherwise tear them down during the measurement.
            former.append(&mut testbeds);
            testbeds = build(&run, networks, former.len(), &arguments.traffic_object)?;
        }
        eprintln!("bench: round {} of {}", round + 1, effort.rounds);
        // Alternate the order, so that a drift of the machine's speed does not favor the first case.
        let mut order: Vec<_> = samples.iter_mut().collect();
        if round % 2 != 0 {
            order.reverse();
        }
        for (case, rates) in order {
            let testbed = testbeds.iter_mut().find(|testbed| testbed.has(*case)).context("the case has no network")?;
            rates.push(testbed.sample(*case, effort).with_context(|| format!("measure {case}"))?);
        }
    }
    Ok(samples)
}

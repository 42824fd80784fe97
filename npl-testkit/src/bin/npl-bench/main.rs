// SPDX-License-Identifier: Apache-2.0
//! `npl-bench`: how many packets a Node brings to a Pod, by NPL and by what there was before it, side by side, and what
//! TCP through a mapping is beside the Pod's own address; how soon the agent publishes, and what it costs, beside the API
//! server's own speed; and what a request costs on a real cluster, beside kube-proxy's ports.
//!
//! Each case (a workload and a way of forwarding) has a client, a Node and a Pod in network namespaces, of its own or with
//! cases that differ from it in nothing but NPL's being there, or in the number of its mappings.
//! Packets are made in the kernel, enter the Node by its uplink's driver, and count if they arrive at the right port of
//! the Pod. Every round measures every case, so that what slows the machine down slows them all.

#![expect(clippy::print_stdout, reason = "a command line tool shows its result on standard output")]
#![expect(clippy::print_stderr, reason = "and its progress on standard error")]

mod cases;
mod cluster;
mod control_plane;
mod ends;
mod figures;
mod ours;
mod program;
mod report;
mod rivals;
mod sockets;
mod testbed;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use npl_testkit::run::Run;
use npl_testkit::{interrupt, process};

use self::cases::{Case, RATIOS, Ratio};
use self::figures::{Figure, Row, Samples, Stage};
use self::report::{Format, Report};
use self::testbed::Testbed;

/// Measures NPL against plain routing, iptables and nftables, and against the API server's own speed, side by side.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench")]
struct Arguments {
    /// Few and short rounds: a first impression of the datapath in a minute, of the others in some.
    #[arg(long)]
    quick: bool,
    /// Only ratios and figures whose names contain this, and what they need: `control-plane` or `cluster` for all of
    /// those figures. Without it, the datapath's.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// How the result is shown.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// The object with generator and counter; `cargo xtask bench` builds it and names it.
    #[arg(long, value_name = "FILE", env = "NPL_TRAFFIC_OBJECT", hide = true)]
    traffic_object: PathBuf,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
struct Effort {
    rounds: usize,
    /// Packets of one sample of an established flow.
    established: u64,
    /// Flows, of one packet each, of one sample of new flows.
    new_flows: u64,
    /// After so long, a sample of packets ends with those that it has.
    longest: Duration,
    /// How often a mapping and a Pod's own address have their turns at questions in a round.
    turns: usize,
    /// Questions over one connection through a Node, of one turn.
    questions: usize,
    /// The same, at streams.
    streams: usize,
    /// How long one turn at streams is.
    stream: Duration,
    /// Pods of one sample of latencies.
    latencies: usize,
    /// Changes of a Service of one sample.
    changes: usize,
    /// How long one sample of an agent with nothing to do is.
    steady: Duration,
    /// Requests over one connection, of one sample.
    requests: usize,
    /// Connections with one request each, of one sample.
    connections: usize,
    /// Times that many Pods are started at once.
    crowds: usize,
}

/// Threads that build test networks.
const BUILDERS: usize = 4;

/// So many rounds are measured in the same networks. Where the memory of one lies makes it faster or slower by a twentieth.
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
    changes: 20,
    steady: Duration::from_secs(6),
    requests: 5_000,
    connections: 300,
    crowds: 1,
};
/// A steady agent is watched for longer than it takes until it looks at the kernel again.
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
    let datapath = || program::FIGURES.into_iter().chain(sockets::FIGURES);
    let all = || datapath().chain(control_plane::FIGURES).chain(cluster::figures());
    let is_meant = |figure: &&Figure| match arguments.only.as_str() {
        "" => figure.stage == Stage::Sockets || figure.stage == Stage::Program && !arguments.quick,
        only => figure.name.contains(only),
    };
    let figures: Vec<&Figure> = all().filter(is_meant).collect();
    if ratios.is_empty() && figures.is_empty() {
        let figures = all().map(|figure| figure.name.to_owned());
        let known: Vec<String> = RATIOS.iter().map(Ratio::name).chain(figures).collect();
        bail!("no ratio's or figure's name contains {:?}; there are: {}", arguments.only, known.join(", "));
    }
    let effort = if arguments.quick { QUICK } else { FULL };
    let samples = measure(arguments, &cases::needed_for(&ratios), effort)?;
    let mut seen = Samples::default();
    program::measure(&figures, &arguments.traffic_object, effort, &mut seen)?;
    sockets::measure(&figures, effort, &mut seen)?;
    control_plane::measure(&figures, effort, &mut seen)?;
    cluster::measure(&figures, effort, &mut seen)?;
    let rows: Vec<Row> = figures.iter().filter_map(|figure| seen.row(figure)).collect();
    print!("{}", Report::new(effort.rounds, &samples, &ratios, rows)?.show(arguments.output)?);
    Ok(())
}

/// Builds a network for the cases of each of `networks`, numbered from `first`, several at a time: most of it is waiting
/// for the kernel.
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

/// Millions of packets per second of each case, round by round.
fn measure(arguments: &Arguments, networks: &[Vec<Case>], effort: Effort) -> Result<Vec<(Case, Vec<f64>)>> {
    if networks.is_empty() {
        return Ok(Vec::new());
    }
    let run = Run::start()?;
    let mut samples: Vec<(Case, Vec<f64>)> = networks.iter().flatten().map(|case| (*case, Vec::new())).collect();
    let (mut testbeds, mut former) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        if round % ROUNDS_IN_A_PLACE == 0 {
            // The kernel would take the former ones down while these are measured.
            former.append(&mut testbeds);
            testbeds = build(&run, networks, former.len(), &arguments.traffic_object)?;
        }
        eprintln!("bench: round {} of {}", round + 1, effort.rounds);
        // There and back: a drift of the machine's speed does not favour who comes first.
        let mut order: Vec<_> = samples.iter_mut().collect();
        if round % 2 != 0 {
            order.reverse();
        }
        for (case, rates) in order {
            let testbed = testbeds.iter_mut().find(|testbed| testbed.has(*case)).context("every case has a network")?;
            rates.push(testbed.sample(*case, effort).with_context(|| format!("measure {case}"))?);
        }
    }
    Ok(samples)
}

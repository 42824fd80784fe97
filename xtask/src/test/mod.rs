// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test`: prepares a fresh machine, and runs every check and test, the fastest ones first.

mod foreign;
mod guests;
mod soak;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::arch::Arch;
use crate::check::{self, Check};
use crate::demo::{self, Parts, Preparation};
use crate::leftovers::Leftovers;
use crate::setup::{ALL_TESTS, BRIEF_KERNELS, Component, DEFAULT_KERNELS, Extent, Kernel, KernelName, parse_kernels};
use crate::tally::{Counts, NotReady, Tally};
use crate::test_binary::{self, Kind, TestBinary};
use crate::{build, build_ebpf, chart, fuzz, process, setup};

pub(crate) use soak::parse as parse_duration;

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only the tests with this text in their names: on this machine's kernel, or with `--kernels` only under the
    /// given kernels.
    #[arg(long, value_name = "TEXT", conflicts_with = "emulated_cluster")]
    filter: Option<String>,
    /// Run only the steps with this text in their names, as the summary lists them.
    #[arg(long, value_name = "TEXT")]
    step: Option<String>,
    /// Kernels that the packet tests run under, by emulation: 5.10, 6.1, 6.12, latest, or none [default: 5.10 with a
    /// part of the tests; with `--filter`: none]. `none` does not change `--load-kernels`.
    #[arg(long, value_delimiter = ',')]
    kernels: Option<Vec<KernelName>>,
    /// Kernels under which tests only load the kernel programs, by emulation: 5.10, 6.1, 6.12, latest, or none.
    #[arg(long, value_delimiter = ',', default_value = BRIEF_KERNELS, conflicts_with = "filter")]
    load_kernels: Vec<KernelName>,
    /// Also start a real cluster on an emulated machine with the newest of the emulated kernels and only cgroup v2;
    /// takes about 7 minutes more.
    #[arg(long)]
    emulated_cluster: bool,
    /// Run only the steps that need a real cluster.
    #[arg(long, conflicts_with = "step")]
    real_cluster: bool,
    /// Run all tests of the real cluster with this network, such as `flannel-vxlan/nftables`, or with `every` network;
    /// the result is written to docs/compatibility.md.
    #[arg(long, value_name = "CNI/KUBE-PROXY", requires = "real_cluster")]
    network: Vec<String>,
    /// Run only the tests that upgrade from an agent of another ABI version and roll back to that version; FILE is the
    /// binary of the other agent.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["filter", "step", "real_cluster", "kernels", "emulated_cluster"])]
    former_agent: Option<PathBuf>,
    /// Run only the soak test, for DURATION in place of one minute: a whole number with the unit h, m or s.
    #[arg(long, value_name = "DURATION", value_parser = soak::parse, conflicts_with_all = ["filter", "step", "real_cluster", "kernels", "emulated_cluster", "former_agent", "arch"])]
    soak: Option<Duration>,
    /// Run only the tests for another processor architecture, by emulation: the agent loads its programs, and packet
    /// tests run. By default, only tests with single packets run, under kernels 6.1 and latest; with `--kernels`, all
    /// packet tests run under the given kernels.
    #[arg(long, value_name = "ARCHITECTURE", conflicts_with_all = ["real_cluster", "emulated_cluster", "former_agent", "load_kernels"])]
    arch: Option<Arch>,
}

impl Options {
    /// The text that the names of the tests to run contain; `None` if all tests run.
    fn filter(&self) -> Option<&str> {
        let only = self.soak.map(|_| soak::TESTS).or_else(|| self.former_agent.as_ref().map(|_| UPGRADE_TESTS));
        only.or(self.filter.as_deref())
    }

    /// The kernels under which packet tests run by emulation, the newest kernel last.
    fn emulated_kernels(&self) -> Vec<Kernel> {
        self.kernels_or(if self.filter().is_some() { "none" } else { DEFAULT_KERNELS })
    }

    /// The kernels under which tests only load the kernel programs by emulation: the kernels of `--load-kernels`,
    /// except those under which packet tests run. With a filter, there are no such kernels.
    fn loading_kernels(&self) -> Vec<Kernel> {
        if self.filter().is_some() {
            return Vec::new();
        }
        let packets = self.emulated_kernels();
        self.load_kernels.iter().filter_map(|name| name.0).filter(|kernel| !packets.contains(kernel)).collect()
    }

    /// The newest kernel under which tests run by emulation; `None` if no tests run by emulation.
    fn newest_kernel(&self) -> Option<Kernel> {
        let kernels = self.emulated_kernels().into_iter().chain(self.loading_kernels());
        kernels.max_by_key(|kernel| kernel.age_rank())
    }

    /// The kernels of `--kernels`, or the default kernels, the newest kernel last.
    fn kernels_or(&self, default: &str) -> Vec<Kernel> {
        let names = self.kernels.clone().unwrap_or_else(|| parse_kernels(default));
        let mut kernels: Vec<Kernel> = names.iter().filter_map(|name| name.0).collect();
        kernels.sort_by_key(|kernel| kernel.age_rank());
        kernels
    }

    /// The components of Kubernetes that the chosen tests need.
    fn extent(&self) -> Extent {
        if self.former_agent.is_some() || self.soak.is_some() {
            return Extent::new();
        }
        // If no network is chosen, the tests run on several networks, whose components are in `ALL_TESTS`.
        if self.network.is_empty() {
            return ALL_TESTS.into();
        }
        // Helm is added, because the tests of the chart run on every network.
        let mut extent = Component::of_networks(&self.network);
        extent.insert(Component::Helm);
        extent
    }

    /// Whether tests run under this machine's kernel.
    fn is_on_host(&self) -> bool {
        self.filter().is_none() || self.emulated_kernels().is_empty()
    }
}

/// The prefix of the names of the tests that need an agent of another ABI version.
const UPGRADE_TESTS: &str = "upgrade::";

/// The text that is part of the names of all steps that need a real cluster.
const REAL_CLUSTER: &str = "real cluster";

const DEMO: &str = "the demo";

/// The name of the step that compares the manifests with the chart.
const MANIFESTS: &str = "manifests of deploy/ are rendered from the chart";

/// The time after which a test binary that prints no line counts as hung. Each test prints a line at its end, and no
/// test takes longer than a few minutes on two cores.
const SILENCE: Duration = Duration::from_mins(20);

/// The time limit of a test binary that prints lines. The longest-running test binary tests the real cluster with
/// `every` network: 26 networks, each of which takes up to 20 minutes on two cores.
const DEADLINE: Duration = Duration::from_hours(12);

/// Runs every step, and prints the summary, whose last line counts the tests that passed and failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let step = if options.real_cluster { Some(REAL_CLUSTER) } else { options.step.as_deref() };
    let mut tally = Tally::start(step);
    match options.arch {
        Some(arch) if !arch.is_native() => foreign::run(options, arch, &mut tally),
        _ => run_all(options, &mut tally),
    }
    tally.close(options.filter().or(options.step.as_deref()))
}

fn run_all(options: &Options, tally: &mut Tally) {
    let preparation = tally.prepare("requirements", || Preparation::begin(options.extent()));
    if options.filter().is_none() {
        for Check { name, run } in check::STATIC {
            tally.check(name, run);
        }
        tally.checks_side_by_side(check::COMPILING.map(|Check { name, run }| (name, run)));
        fuzz::run_briefly(tally);
    }
    if options.is_on_host() {
        run_own_tests(options, tally);
    }
    let agent_built = preparation.and_then(|it| tally.prepare("build of the agent", || it.build_agent(&[])));
    let binaries = ready(&agent_built)
        .and_then(|_built| tally.prepare("build of the tests", || test_binary::compile(&mut tests())));
    let images = ready(&agent_built).and_then(|it| tally.prepare("images", || it.pack_images()));
    let parts = agent_built.and_then(|it| tally.prepare("build of Kubernetes", || it.finish()));
    let before = ready(&binaries).and_then(|_built| tally.prepare("list of the machine's objects", Leftovers::look));
    match binaries {
        Ok(binaries) => Suite { options, binaries, images, parts, before }.run(tally),
        Err(missing) => {
            tally.not_run("tests of all packages except xtask, and those under emulated kernels", missing);
            for step in [MANIFESTS, DEMO] {
                tally.not_run(step, missing);
            }
        }
    }
}

fn ready<T>(product: &Result<T, NotReady>) -> Result<&T, NotReady> {
    product.as_ref().map_err(|missing| *missing)
}

/// Runs the unit tests of xtask, which are compiled separately from the tests of the other crates.
fn run_own_tests(options: &Options, tally: &mut Tally) {
    let name = "unit tests of xtask";
    let mut command = check::own_tests();
    if let Some(filter) = options.filter().filter(|_filter| tally.is_chosen(name)) {
        let mut list = check::own_tests();
        match test_binary::listed(list.args(["--", "--list", filter])) {
            Ok(tests) if tests.is_empty() => return,
            Ok(_tests) => drop(command.args(["--", filter])),
            Err(error) => return tally.check(name, || Err(error)),
        }
    }
    tally.tests(name, |counts| run_tests(command, SILENCE, counts));
}

/// Cargo arguments that select npl-testkit, with the feature `npl-testkit/bench`.
const TESTKIT: [&str; 4] = ["--package", "npl-testkit", "--features", "npl-testkit/bench"];

/// Returns the cargo arguments that select the packages with tests, except xtask.
pub(crate) fn packages() -> Vec<&'static str> {
    [&check::UNPRIVILEGED[..], &TESTKIT].concat()
}

fn tests() -> Command {
    build::cargo_test(&packages())
}

/// The compiled tests, and the parts that tests need: for each part, the part itself or the error of its preparation.
struct Suite<'a> {
    options: &'a Options,
    binaries: Vec<TestBinary>,
    images: Result<(), NotReady>,
    parts: Result<Parts, NotReady>,
    before: Result<Leftovers, NotReady>,
}

impl Suite<'_> {
    fn run(&self, tally: &mut Tally) {
        self.run_kinds(|kind| kind <= Kind::Kernel, tally);
        self.run_emulated(tally);
        self.run_kinds(|kind| kind > Kind::Kernel, tally);
        if self.options.filter().is_some() {
            return;
        }
        match &self.parts {
            Ok(parts) => {
                tally.check(MANIFESTS, chart::check);
                tally.check(DEMO, || process::run(&mut demo::command(parts, &[])));
            }
            Err(missing) => {
                for step in [MANIFESTS, DEMO] {
                    tally.not_run(step, *missing);
                }
            }
        }
        let name = format!("no object is left behind, not even by the {REAL_CLUSTER}");
        match &self.before {
            Ok(before) => tally.check(&name, || before.check()),
            Err(missing) => tally.not_run(&name, *missing),
        }
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &TestBinary> {
        self.binaries.iter().filter(move |binary| binary.kind == kind)
    }

    fn run_kinds(&self, is_wanted: impl Fn(Kind) -> bool, tally: &mut Tally) {
        if self.options.is_on_host() {
            self.binaries.iter().filter(|binary| is_wanted(binary.kind)).for_each(|it| self.run_binary(it, tally));
        }
    }

    fn run_binary(&self, binary: &TestBinary, tally: &mut Tally) {
        let name = match binary.kind {
            Kind::Unit => format!("unit tests of {}", binary.name),
            Kind::TestKit | Kind::Kernel | Kind::Chart | Kind::Agent => format!("tests: {}", binary.name),
            Kind::RealCluster => format!("tests: {}, on a {REAL_CLUSTER}", binary.name),
        };
        if !tally.is_chosen(&name) {
            return;
        }
        match self.has_tests(binary) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return tally.check(&name, || Err(error)),
        }
        if let Err(missing) = self.requirements(binary.kind) {
            return tally.not_run(&name, missing);
        }
        let mut command = binary.command();
        command.args(self.arguments(binary));
        if let Some(former) = &self.options.former_agent {
            command.args(["--ignored", "--test-threads=1"]).env("NPL_FORMER_AGENT", former);
        }
        let silence = SILENCE + self.options.soak.unwrap_or_default();
        if let Some(duration) = self.options.soak {
            soak::pass_to(&mut command, duration);
        }
        match &self.parts {
            Ok(parts) => parts.pass_to(&mut command),
            Err(_not_needed) => demo::pass_objects_to(&mut command),
        }
        // A crate may have no unit tests, but an integration test binary without tests is an error.
        let may_be_empty = binary.kind == Kind::Unit;
        tally.tests(&name, |counts| {
            if binary.name == test_binary::TRACE {
                build_ebpf::build_trace()?;
            }
            if binary.name == test_binary::BALANCERS || binary.kind == Kind::RealCluster {
                command.env("NPL_BALANCERS_DIR", setup::balancers()?);
            }
            if binary.kind == Kind::Kernel {
                command.env("NPL_OPEN_VSWITCH_DIR", setup::open_vswitch()?);
            }
            if binary.name == test_binary::BALANCERS {
                command.env("NPL_GRPC_DIR", setup::grpc()?);
            }
            Ok(run_tests(command, silence, counts)? && (may_be_empty || counts.passed > 0))
        });
    }

    /// The arguments by which the test binary runs only the tests that the command line selects.
    fn arguments(&self, binary: &TestBinary) -> Vec<&str> {
        let networks = self.options.network.iter().filter(|_network| binary.kind == Kind::RealCluster);
        networks.flat_map(|network| ["--network", network]).chain(self.options.filter()).collect()
    }

    /// Whether the test binary has tests that the command line selects.
    fn has_tests(&self, binary: &TestBinary) -> Result<bool> {
        if self.options.former_agent.is_some() {
            return Ok(binary.kind == Kind::Agent);
        }
        // The tests of the real cluster depend on the network.
        self.options.filter().map_or(Ok(true), |_filter| binary.has_test(&self.arguments(binary)))
    }

    /// Checks that all parts that tests of this kind need besides their test binary have been built.
    fn requirements(&self, kind: Kind) -> Result<(), NotReady> {
        match kind {
            Kind::Unit | Kind::Kernel => Ok(()),
            Kind::TestKit | Kind::Agent => ready(&self.parts).map(drop),
            // The tests of the chart install the kubectl plug-in that is packed together with the images.
            Kind::Chart | Kind::RealCluster => self.images.and(ready(&self.parts).map(drop)),
        }
    }
}

/// Runs a test binary, which is killed if it prints no line for the duration of `silence`.
fn run_tests(command: Command, silence: Duration, counts: &mut Counts) -> Result<bool> {
    process::show(&command);
    let (mut last, mut printed) = (String::new(), Instant::now());
    let status = process::stream(command, DEADLINE, |line| {
        if let Some(line) = line {
            counts.read(line);
            println!("    {line}");
            (last, printed) = (line.to_owned(), Instant::now());
        }
        ensure!(printed.elapsed() < silence, "no line for {} after `{last}`", process::elapsed(silence));
        Ok(())
    })?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use clap::Parser;

    use super::{Counts, Options, run_tests};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    pub(in crate::test) fn parse(line: &str) -> Result<Options, clap::Error> {
        Line::try_parse_from(format!("test {line}").split_whitespace()).map(|line| line.options)
    }

    #[test]
    fn a_filter_runs_on_the_host_or_under_the_given_kernels() {
        for (line, is_on_host, kernels) in [
            ("", true, "5.10"),
            ("--kernels none", true, ""),
            ("--filter sctp", true, ""),
            ("--filter sctp --kernels 6.1,5.10", false, "5.10,6.1"),
            ("--filter sctp --kernels none", true, ""),
            ("--real-cluster --network every --filter drained", true, ""),
        ] {
            let options = parse(line).unwrap();
            let emulated: Vec<String> = options.emulated_kernels().iter().map(ToString::to_string).collect();
            assert_eq!((options.is_on_host(), emulated.join(",").as_str()), (is_on_host, kernels), "{line}");
        }
    }

    #[test]
    fn a_test_binary_is_killed_if_it_prints_no_line_for_too_long() {
        let run = |script: &str, silence| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            run_tests(shell, silence, &mut Counts::default())
        };
        assert!(run("echo one", Duration::from_mins(1)).unwrap());
        let error = run("echo one; exec sleep 60", Duration::from_secs(1)).unwrap_err();
        assert!(format!("{error:#}").contains("no line for 1.0 s after `one`"), "{error:#}");
    }

    #[test]
    fn options_that_exclude_each_other_are_refused() {
        for line in ["--filter a --load-kernels 6.1", "--filter a --emulated-cluster", "--real-cluster --step a"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}

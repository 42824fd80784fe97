// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test`: prepares a fresh machine, and runs every check and test, cheap ones first.

use std::iter;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::check::{self, Check};
use crate::demo::{self, Parts, Preparation};
use crate::emulation::{Guest, Threads};
use crate::leftovers::Leftovers;
use crate::setup::{ALL_TESTS, BRIEF_KERNELS, Component, DEFAULT_KERNELS, Extent, Kernel, KernelName, parse_kernels};
use crate::tally::{Counts, NotReady, Tally};
use crate::test_binary::{self, Kind, TestBinary};
use crate::{build, build_ebpf, chart, paths, process, setup};

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only the tests with this text in their names: on this machine's kernel, or with `--kernels` under those
    /// only.
    #[arg(long, value_name = "TEXT", conflicts_with = "emulated_cluster")]
    filter: Option<String>,
    /// Run only the steps with this text in their names, as the summary lists them.
    #[arg(long, value_name = "TEXT")]
    step: Option<String>,
    /// Kernels that the packet tests run under, by emulation: 5.10, 6.1, 6.12, latest, or none [default: 5.10; with
    /// `--filter`: none].
    #[arg(long, value_delimiter = ',')]
    kernels: Option<Vec<KernelName>>,
    /// Kernels that only load the kernel programs, by emulation.
    #[arg(long, value_delimiter = ',', default_value = BRIEF_KERNELS, conflicts_with = "filter")]
    load_kernels: Vec<KernelName>,
    /// Also start a real cluster on an emulated machine with the newest of those kernels and control groups of version
    /// 2 only: some 7 minutes more.
    #[arg(long)]
    emulated_cluster: bool,
    /// Run only the steps that need a real cluster.
    #[arg(long, conflicts_with = "step")]
    real_cluster: bool,
    /// Run all tests of the real cluster with this network, such as `flannel-vxlan/nftables`, or with `every` network;
    /// the result is written to docs/compatibility.md.
    #[arg(long, value_name = "CNI/KUBE-PROXY", requires = "real_cluster")]
    network: Vec<String>,
    /// Run only the tests that upgrade from an agent of another ABI version and roll back to it; FILE is its binary.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["filter", "step", "real_cluster", "kernels", "emulated_cluster"])]
    former_agent: Option<PathBuf>,
}

impl Options {
    /// The text in the names of the tests to run.
    fn filter(&self) -> Option<&str> {
        if self.former_agent.is_some() { Some(UPGRADE_TESTS) } else { self.filter.as_deref() }
    }

    /// The kernels to emulate for packet tests, the newest one last.
    fn emulated_kernels(&self) -> Vec<Kernel> {
        let default = if self.filter().is_some() { "none" } else { DEFAULT_KERNELS };
        let names = self.kernels.clone().unwrap_or_else(|| parse_kernels(default));
        names.iter().filter_map(|name| name.0).collect()
    }

    /// The components that the tests need.
    fn extent(&self) -> Extent {
        if self.former_agent.is_some() {
            return Extent::new();
        }
        // Without a choice, the tests use a bridge and flannel.
        if self.network.is_empty() {
            return ALL_TESTS.into();
        }
        // The tests of the chart run on every network.
        let mut extent = Component::of_networks(&self.network);
        extent.insert(Component::Helm);
        extent
    }

    /// Whether tests run on this machine's kernel.
    fn is_on_host(&self) -> bool {
        self.filter().is_none() || self.emulated_kernels().is_empty()
    }
}

/// The prefix of the names of the tests that need an agent of another ABI version.
const UPGRADE_TESTS: &str = "upgrade::";

/// Part of the names of all steps that need a real cluster.
const REAL_CLUSTER: &str = "real cluster";

const DEMO: &str = "the demo";

/// The step that compares the manifests with the chart.
const MANIFESTS: &str = "manifests of deploy/ are rendered from the chart";

/// The time limit of one test binary: far more than any binary takes on two cores.
const BINARY_DEADLINE: Duration = Duration::from_mins(20);

/// The time limit of the real cluster's tests with several networks, one after the other.
const NETWORKS_DEADLINE: Duration = Duration::from_hours(2);

/// The time limit of a guest. Emulation is ten to thirty times slower; guests that run at the same time take about 35
/// minutes, and 45 minutes on a slow machine.
const GUEST_DEADLINE: Duration = Duration::from_hours(1);

/// The prefix of the names of the tests that load every kernel program, as the agent does and as `npl-agent load` does.
const LOADING_TESTS: &str = "every_program_loads";

/// Tests of the agent's own files, which do not depend on the kernel's version. Among the emulated kernels only the
/// oldest runs them, because each test loads all programs and takes up to a minute there.
const SKIPPED_ON_NEWER_KERNELS: [&str; 6] =
    ["--skip", "links::pins", "--skip", "links::map_limits", "--skip", "links::cleanup"];

/// Arguments for the agent's tests on an emulated machine: the tests of a bond, which not every kernel supports, and
/// the tests that set the machine's clock.
const OWN_MACHINE_TESTS: [&str; 4] = ["--test-threads=1", "--include-ignored", "bond::", "clock::"];

/// The tests of a real cluster on an emulated machine.
const EMULATED_CLUSTER_TESTS: [&str; 3] =
    ["the_agent_is_ready", "every_client_is_answered", "a_node_reaches_its_own_pods"];

/// The factor for all deadlines on an emulated machine.
const EMULATED_PATIENCE: &str = "15";

/// Directories in which Debian and the upstream release install CNI plug-ins.
const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Programs of Nodes, in addition to the tools of every guest.
const NODE_PROGRAMS: [&str; 13] = [
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "ip6tables",
    "ip6tables-restore",
    "ip6tables-save",
    "iptables-restore",
    "iptables-save",
    "kubectl",
    "mount",
    "nsenter",
    "runc",
    "umount",
];

/// Runs every step; the last line counts the tests that passed and failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let step = if options.real_cluster { Some(REAL_CLUSTER) } else { options.step.as_deref() };
    let mut tally = Tally::start(step);
    run_all(options, &mut tally);
    tally.close(options.filter().or(options.step.as_deref()))
}

fn run_all(options: &Options, tally: &mut Tally) {
    let preparation = tally.prepare("requirements", || Preparation::begin(options.extent()));
    if options.filter().is_none() {
        for Check { name, run } in check::STATIC {
            tally.check(name, run);
        }
    }
    if options.is_on_host() {
        run_own_tests(options, tally);
    }
    let agent_built = preparation.and_then(|it| tally.prepare("build of the agent", || it.build_agent(&[])));
    let binaries = ready(&agent_built)
        .and_then(|_built| tally.prepare("build of the tests", || test_binary::compile(&mut tests())));
    let images = ready(&agent_built).and_then(|it| tally.prepare("images", || it.pack_images()));
    let parts = agent_built.and_then(|it| tally.prepare("build of Kubernetes", || it.finish()));
    let before = ready(&binaries).and_then(|_built| tally.prepare("a look at the machine", Leftovers::look));
    match binaries {
        Ok(binaries) => Suite { options, binaries, images, parts, before }.run(tally),
        Err(missing) => {
            tally.not_run("tests of npl-common, npl-agent and npl-testkit, and those under emulated kernels", missing);
            for step in [MANIFESTS, DEMO] {
                tally.not_run(step, missing);
            }
        }
    }
}

fn ready<T>(product: &Result<T, NotReady>) -> Result<&T, NotReady> {
    product.as_ref().map_err(|missing| *missing)
}

/// Runs the unit tests of xtask, which are compiled separately.
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
    tally.tests(name, |counts| run_tests(command, BINARY_DEADLINE, counts));
}

fn tests() -> Command {
    let mut command = build::cargo("test");
    command.args(check::UNPRIVILEGED).args(["--package", "npl-testkit", "--features", "npl-testkit/bench"]);
    command
}

/// The compiled tests, and the products that they need or the preparations that failed.
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
        let name = format!("nothing is left behind, also of the {REAL_CLUSTER}");
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
        let networks = self.options.network.iter().filter(|_network| binary.kind == Kind::RealCluster);
        let mut arguments: Vec<&str> = networks.flat_map(|network| ["--network", network]).collect();
        let deadline = if arguments.is_empty() { BINARY_DEADLINE } else { NETWORKS_DEADLINE };
        arguments.extend(self.options.filter());
        let mut command = binary.command();
        command.args(arguments);
        if let Some(former) = &self.options.former_agent {
            command.args(["--ignored", "--test-threads=1"]).env("NPL_FORMER_AGENT", former);
        }
        match &self.parts {
            Ok(parts) => parts.pass_to(&mut command),
            Err(_not_needed) => demo::pass_objects_to(&mut command),
        }
        // A module may have no unit tests, but an integration test binary without tests is a mistake.
        let may_be_empty = binary.kind == Kind::Unit;
        tally.tests(&name, |counts| {
            if binary.name == test_binary::TRACE {
                build_ebpf::build_trace()?;
            }
            if binary.name == test_binary::BALANCERS {
                command.env("NPL_BALANCERS_DIR", setup::balancers()?);
            }
            Ok(run_tests(command, deadline, counts)? && (may_be_empty || counts.passed > 0))
        });
    }

    /// Whether the binary has tests that were selected.
    fn has_tests(&self, binary: &TestBinary) -> Result<bool> {
        if self.options.former_agent.is_some() {
            return Ok(binary.kind == Kind::Agent);
        }
        self.options.filter().map_or(Ok(true), |filter| binary.has_test(filter))
    }

    /// Checks the products that tests of a kind need in addition to their binary.
    fn requirements(&self, kind: Kind) -> Result<(), NotReady> {
        match kind {
            Kind::Unit | Kind::Kernel => Ok(()),
            Kind::TestKit | Kind::Chart | Kind::Agent => ready(&self.parts).map(drop),
            Kind::RealCluster => self.images.and(ready(&self.parts).map(drop)),
        }
    }

    /// Runs guests in parallel, because each uses one processor; the slowest start first.
    fn run_emulated(&self, tally: &mut Tally) {
        let (options, kernels) = (self.options, self.options.emulated_kernels());
        if kernels.is_empty() {
            return;
        }
        let loading = || options.load_kernels.iter().filter_map(|it| it.0);
        let Some(newest) = kernels.iter().copied().chain(loading()).max_by_key(|kernel| kernel.age_rank()) else {
            return;
        };
        // One test at a time: two emulated processors are just fast enough for one network.
        let arguments: Vec<_> = iter::once("--test-threads=1").chain(options.filter()).collect();
        let mut guests = Vec::new();
        for binary in self.of_kind(Kind::Kernel) {
            match self.has_tests(binary) {
                Ok(false) => {}
                Ok(true) => guests.extend(kernels.iter().enumerate().map(|(number, kernel)| {
                    let skipped =
                        if number == 0 || options.filter().is_some() { &[][..] } else { &SKIPPED_ON_NEWER_KERNELS };
                    guest_for_packets(*kernel, binary, "", &[&arguments, skipped].concat())
                })),
                Err(error) => tally.check(&format!("tests: {}, emulated", binary.name), || Err(error)),
            }
        }
        if options.filter().is_none() {
            for binary in self.of_kind(Kind::Agent) {
                match &self.parts {
                    Ok(parts) => guests.push(guest_with_clock(newest, binary, parts)),
                    Err(missing) => tally.not_run(&clock_step(newest, binary), *missing),
                }
            }
            let only_loaded = || loading().filter(|it| !kernels.contains(it));
            for binary in self.of_kind(Kind::Kernel) {
                guests.extend(only_loaded().map(|it| guest_for_packets(it, binary, ", loading", &[LOADING_TESTS])));
            }
        }
        let step = |(name, guest): (String, Guest)| (name, move |counts: &mut Counts| run_guest(&guest, counts));
        tally.side_by_side(guests.into_iter().map(step).collect());
        for binary in self.of_kind(Kind::RealCluster).filter(|_binary| options.emulated_cluster) {
            let name = nodes_step(newest, binary);
            match self.images.and(ready(&self.parts)) {
                Ok(parts) => {
                    let guest = guest_with_nodes(newest, binary, parts);
                    tally.tests(&name, |counts| run_guest(&guest, counts));
                }
                Err(missing) => tally.not_run(&name, missing),
            }
        }
    }
}

fn run_tests(command: Command, deadline: Duration, counts: &mut Counts) -> Result<bool> {
    process::show(&command);
    let status = process::stream(command, deadline, |line| {
        if let Some(line) = line {
            counts.read(line);
            println!("    {line}");
        }
        Ok(())
    })?;
    Ok(status.success())
}

/// Runs a guest. Its tests are selected by name, so that a guest without tests is a mistake.
fn run_guest(guest: &Guest, counts: &mut Counts) -> Result<bool> {
    let is_success = guest.run(GUEST_DEADLINE, |line| {
        counts.read(line);
        println!("    {:>6} | {line}", guest.name);
    })?;
    Ok(is_success && counts.passed > 0)
}

/// The name of a step and its guest.
fn guest_for_packets(kernel: Kernel, binary: &TestBinary, scope: &str, arguments: &[&str]) -> (String, Guest) {
    let mut test = Command::new(&binary.executable);
    test.args(arguments);
    (format!("tests: {}{scope} under kernel {kernel}, emulated", binary.name), Guest::for_packets(kernel, test))
}

fn clock_step(kernel: Kernel, binary: &TestBinary) -> String {
    format!("tests: {} on a bond, and while its clock is set, under kernel {kernel}, emulated", binary.name)
}

/// A guest with an API server and an agent, whose clock no other process depends on.
fn guest_with_clock(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> (String, Guest) {
    let mut test = Command::new(&binary.executable);
    test.args(OWN_MACHINE_TESTS).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let copies = parts.of_agent().chain([paths::root().join("deploy")]).collect();
    let (threads, programs) = (Threads::One, &["kubectl"]);
    let guest = Guest { name: "clock".to_owned(), kernel, threads, memory_megabytes: 4096, test, programs, copies };
    (clock_step(kernel, binary), guest)
}

fn nodes_step(kernel: Kernel, binary: &TestBinary) -> String {
    format!("tests: {} on control groups 2 alone, under kernel {kernel}, emulated", binary.name)
}

/// A guest in which a real cluster starts. Each of its processors has an emulator thread: with one thread for both, the
/// cluster never became ready.
fn guest_with_nodes(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> Guest {
    let mut test = Command::new(&binary.executable);
    test.args(["--network", "bridge/iptables"]).args(EMULATED_CLUSTER_TESTS).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let of_repository = ["deploy", "npl-testkit/tests/cluster/manifests"].map(|path| paths::root().join(path));
    let folders = CNI_FOLDERS.map(PathBuf::from).into_iter().filter(|folder| folder.is_dir());
    let own = [build::built_folder().join("npl-cluster")];
    let copies = parts.of_nodes().chain(own).chain(of_repository).chain(folders).collect();
    let (threads, programs) = (Threads::Each, &NODE_PROGRAMS);
    Guest { name: "nodes".to_owned(), kernel, threads, memory_megabytes: 6144, test, programs, copies }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Options;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Line::try_parse_from(format!("test {line}").split_whitespace()).map(|line| line.options)
    }

    #[test]
    fn a_filter_runs_on_the_host_or_under_the_given_kernels() {
        for (line, is_on_host, kernels) in [
            ("", true, "5.10"),
            ("--kernels none", true, ""),
            ("--filter sctp", true, ""),
            ("--filter sctp --kernels 5.10,6.1", false, "5.10,6.1"),
            ("--filter sctp --kernels none", true, ""),
            ("--real-cluster --network every --filter drained", true, ""),
        ] {
            let options = parse(line).unwrap();
            let emulated: Vec<String> = options.emulated_kernels().iter().map(ToString::to_string).collect();
            assert_eq!((options.is_on_host(), emulated.join(",").as_str()), (is_on_host, kernels), "{line}");
        }
    }

    #[test]
    fn options_that_exclude_each_other_are_refused() {
        for line in ["--filter a --load-kernels 6.1", "--filter a --emulated-cluster", "--real-cluster --step a"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}

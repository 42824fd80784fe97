// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test`: everything that must pass, on a fresh machine, in the order of cost.

use std::iter;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::check::{self, Check};
use crate::demo::{self, Parts, Preparation};
use crate::emulation::{Guest, Threads};
use crate::leftovers::Leftovers;
use crate::setup::{BRIEF_KERNELS, DEFAULT_KERNELS, Extent, Kernel, KernelName};
use crate::tally::{Counts, Tally};
use crate::test_binary::{self, Kind, TestBinary};
use crate::{build, paths, process};

/// Arguments of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Kernels that the packet tests run under by emulation: 5.10, 6.1, 6.12, latest, or none.
    #[arg(long, value_delimiter = ',', default_value = DEFAULT_KERNELS)]
    kernels: Vec<KernelName>,
    /// Kernels that the programs are loaded under by emulation, and no more.
    #[arg(long, value_delimiter = ',', default_value = BRIEF_KERNELS, conflicts_with = "emulated")]
    load_kernels: Vec<KernelName>,
    /// Also start a real cluster on an emulated machine that has the newest of those kernels, and control groups of
    /// version 2 alone: some 7 minutes more.
    #[arg(long)]
    emulated_cluster: bool,
    /// Run only what needs a real cluster.
    #[arg(long, conflicts_with = "only")]
    real_cluster: bool,
    /// Run all tests of the real cluster on one that is connected so, such as `flannel-vxlan/nftables`, or on `every`
    /// kind; the outcome goes into docs/compatibility.md.
    #[arg(long, value_name = "CNI/KUBE-PROXY", requires = "real_cluster")]
    network: Vec<String>,
    /// Run only the steps with this text in their name, as the list at the end shows them.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Under emulated kernels, run only the tests with this text in their names.
    #[arg(long, value_name = "TEXT", requires = "only")]
    emulated: Option<String>,
}

/// In the names of the steps that need a real cluster.
const REAL_CLUSTER: &str = "real cluster";

/// Far beyond what any set of tests takes on two cores; a set that hangs ends there.
const BINARY_DEADLINE: Duration = Duration::from_mins(20);

/// The same for all ways to connect a cluster, one after the other.
const NETWORKS_DEADLINE: Duration = Duration::from_hours(2);

/// Emulation is ten to thirty times slower, but only the packet tests run there, and a few stories: guests side by side
/// take some 35 minutes, and 45 on a slow machine.
const GUEST_DEADLINE: Duration = Duration::from_hours(1);

/// What the names of the tests begin with that load every program: as the agent does, and as whoever loads them ahead of it.
const LOADING_TESTS: &str = "every_program_loads";

/// What is told of the agent on an emulated machine, one after the other: the story of a bond, which not every kernel has, and
/// the one that sets the clock of its machine.
const OWN_MACHINE_STORIES: [&str; 4] = ["--test-threads=1", "--include-ignored", "bond::", "clock::"];

/// What is told of a real cluster on a machine with another kernel and control groups of version 2 alone.
const EMULATED_STORIES: [&str; 3] = ["the_agent_is_ready", "every_client_is_answered", "a_node_reaches_its_own_pods"];

/// How much longer everything may take there.
const EMULATED_PATIENCE: &str = "15";

/// Where Debian and the upstream archive put what connects Pods.
const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// What Nodes run beside the tools of every guest.
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

/// Runs everything until something fails; the last line says how many passed and failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let only = if options.real_cluster { Some(REAL_CLUSTER) } else { options.only.as_deref() };
    let mut tally = Tally::start(only);
    let outcome = run_all(options, &mut tally);
    tally.close();
    outcome
}

fn run_all(options: &Options, tally: &mut Tally) -> Result<()> {
    let preparation = tally.prepare("requirements", || Preparation::begin(Extent::Flannel))?;
    for Check { name, run } in check::STATIC {
        tally.check(name, run)?;
    }
    tally.tests("unit tests of xtask", |counts| run_tests(check::own_tests(), BINARY_DEADLINE, counts))?;
    let agent_built = tally.prepare("build of the agent", || preparation.build_agent(&[]))?;
    let binaries = tally.prepare("build of the tests", || test_binary::compile(&mut tests()))?;
    tally.prepare("images", || agent_built.pack_images())?;
    let parts = tally.prepare("build of Kubernetes", || agent_built.finish())?;

    let before = Leftovers::look()?;
    for binary in binaries.iter().filter(|binary| binary.kind <= Kind::Kernel) {
        run_binary(binary, &parts, tally)?;
    }
    run_emulated(options, &binaries, &parts, tally)?;
    for binary in binaries.iter().filter(|binary| binary.kind == Kind::Agent) {
        run_binary(binary, &parts, tally)?;
    }
    let networks: Vec<&str> = options.network.iter().flat_map(|network| ["--network", network]).collect();
    for binary in binaries.iter().filter(|binary| binary.kind == Kind::RealCluster) {
        run_binary_with(binary, &networks, &parts, tally)?;
    }
    tally.check("the demo", || process::run(&mut demo::command(&parts, &[])))?;
    tally.check("nothing is left behind, also of the real cluster", || Leftovers::check_against(&before))
}

fn tests() -> Command {
    let mut command = build::cargo("test");
    command.args(check::UNPRIVILEGED).args(["--package", "npl-testkit", "--features", "npl-testkit/bench"]);
    command
}

fn run_binary(binary: &TestBinary, parts: &Parts, tally: &mut Tally) -> Result<()> {
    run_binary_with(binary, &[], parts, tally)
}

fn run_binary_with(binary: &TestBinary, arguments: &[&str], parts: &Parts, tally: &mut Tally) -> Result<()> {
    let mut command = binary.command();
    parts.pass_to(command.args(arguments));
    let deadline = if arguments.is_empty() { BINARY_DEADLINE } else { NETWORKS_DEADLINE };
    let name = match binary.kind {
        Kind::Unit => format!("unit tests of {}", binary.name),
        Kind::TestKit | Kind::Kernel | Kind::Agent => format!("tests: {}", binary.name),
        Kind::RealCluster => format!("tests: {}, on a {REAL_CLUSTER}", binary.name),
    };
    tally.tests(&name, |counts| Ok(run_tests(command, deadline, counts)? && proves_something(binary, *counts)))
}

/// A module may have no unit tests, but a set of tests that runs none is a mistake.
fn proves_something(binary: &TestBinary, counts: Counts) -> bool {
    binary.kind == Kind::Unit || counts.passed > 0
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

/// Side by side: a guest keeps one processor busy. What takes longest begins.
fn run_emulated(options: &Options, binaries: &[TestBinary], parts: &Parts, tally: &mut Tally) -> Result<()> {
    let kernels: Vec<Kernel> = options.kernels.iter().filter_map(|name| name.0).collect();
    let Some(newest) = kernels.last() else { return Ok(()) };
    let of_kind = |kind| binaries.iter().filter(move |binary| binary.kind == kind);
    // One at a time: two emulated processors are slow enough for one network.
    let arguments: Vec<_> = iter::once("--test-threads=1").chain(options.emulated.as_deref()).collect();
    let mut guests = Vec::new();
    for binary in of_kind(Kind::Kernel) {
        guests.extend(kernels.iter().map(|kernel| guest_for_packets(*kernel, binary, "", &arguments)));
    }
    if options.emulated.is_none() {
        guests.extend(of_kind(Kind::Agent).map(|binary| guest_with_clock(*newest, binary, parts)));
        let only_loaded = || options.load_kernels.iter().filter_map(|it| it.0).filter(|it| !kernels.contains(it));
        for binary in of_kind(Kind::Kernel) {
            guests.extend(only_loaded().map(|it| guest_for_packets(it, binary, ", loading", &[LOADING_TESTS])));
        }
    }
    let step = |(name, guest): (String, Guest)| (name, move |counts: &mut Counts| run_guest(&guest, counts));
    tally.side_by_side(guests.into_iter().map(step).collect())?;
    if options.emulated_cluster {
        for binary in of_kind(Kind::RealCluster) {
            let (name, guest) = guest_with_nodes(*newest, binary, parts);
            tally.tests(&name, |counts| run_guest(&guest, counts))?;
        }
    }
    Ok(())
}

/// What a guest is told to run has a name: one that meets no test is a mistake.
fn run_guest(guest: &Guest, counts: &mut Counts) -> Result<bool> {
    let is_success = guest.run(GUEST_DEADLINE, |line| {
        counts.read(line);
        println!("    {:>6} | {line}", guest.name);
    })?;
    Ok(is_success && counts.passed > 0)
}

/// What a step is called, and the guest that it is; so all of the following.
fn guest_for_packets(kernel: Kernel, binary: &TestBinary, what: &str, arguments: &[&str]) -> (String, Guest) {
    let mut test = Command::new(&binary.executable);
    test.args(arguments);
    (format!("tests: {}{what} under kernel {kernel}, emulated", binary.name), Guest::for_packets(kernel, test))
}

/// A guest with an API server and an agent, and a clock that is nobody else's.
fn guest_with_clock(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> (String, Guest) {
    let name = format!("tests: {} on a bond, and while its clock is set, under kernel {kernel}, emulated", binary.name);
    let mut test = Command::new(&binary.executable);
    test.args(OWN_MACHINE_STORIES).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let copies = parts.of_agent().chain([paths::root().join("deploy")]).collect();
    let (threads, programs) = (Threads::One, &["kubectl"]);
    (name, Guest { name: "clock".to_owned(), kernel, threads, memory_megabytes: 4096, test, programs, copies })
}

/// A guest in which a real cluster starts, which takes both processors at the same time: by turns, it never stood.
fn guest_with_nodes(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> (String, Guest) {
    let name = format!("tests: {} on control groups 2 alone, under kernel {kernel}, emulated", binary.name);
    let mut test = Command::new(&binary.executable);
    test.args(["--network", "bridge/iptables"]).args(EMULATED_STORIES).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let of_repository = ["deploy", "npl-testkit/tests/cluster/manifests"].map(|path| paths::root().join(path));
    let folders = CNI_FOLDERS.map(PathBuf::from).into_iter().filter(|folder| folder.is_dir());
    let own = [build::built_folder().join("npl-cluster")];
    let copies = parts.of_nodes().chain(own).chain(of_repository).chain(folders).collect();
    let (threads, programs) = (Threads::Each, &NODE_PROGRAMS);
    (name, Guest { name: "nodes".to_owned(), kernel, threads, memory_megabytes: 6144, test, programs, copies })
}

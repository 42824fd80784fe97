// SPDX-License-Identifier: Apache-2.0
//! The steps that run on emulated machines: packet tests under Debian's kernels, the agent's tests that need a machine
//! of their own, and a real cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Options, Suite, UPGRADE_TESTS, ready};
use crate::arch::Arch;
use crate::demo::Parts;
use crate::emulation::{Guest, Threads};
use crate::setup::Kernel;
use crate::tally::{Counts, Tally};
use crate::test_binary::{Kind, TestBinary, listed};
use crate::{build, paths};

/// The time limit of a guest (an emulated machine). Emulation is ten to thirty times slower than the host. By default,
/// the guests, which run at the same time, take about 13 minutes; all packet tests under one kernel take an hour.
pub(super) const GUEST_DEADLINE: Duration = Duration::from_mins(75);

/// The prefix of the names of three tests that load every kernel program. One test has the capabilities of the agent,
/// one has the capabilities of `npl-agent load`, and in one, the kernel blinds the constants of programs.
pub(super) const LOADING_TESTS: &str = "every_program_loads";

/// Parts of the names of tests that a brief run leaves out: tests that run a kernel program on single packets, and slow
/// tests. The results of tests on single packets are the same under all kernels that load the programs. Slow tests load
/// all programs several times, which takes up to a minute each time on an emulated machine, or set up many networks.
/// The left-out tests run only under this machine's kernel, and under the oldest of the kernels that the user names by
/// `--kernels`.
const LEFT_OUT: [&str; 45] = [
    "agent_reports_whether_loopback_is_supported",
    "allowed_client_is_served_and_another",
    "blinded_constants",
    "changed_forward_rules_apply",
    "connections_masqueraded_behind_a_node_port",
    "device_without_native_xdp_is_reported",
    "ends_the_chain_before_npls_bypasses_reply",
    "entries_of_a_closed_socket",
    "flows_to_pods_on_a_bridge_are_offloaded",
    "icmp_errors_about_connections_masqueraded",
    "keeps_offloaded_udp_flows_and_times",
    "kernel_nat_with_offload",
    "kernel_nat_with_redirect",
    "kernel_nat_with_xdp",
    "links::cleanup",
    "links::instances",
    "links::map_limits",
    "links::other_programs",
    "links::pins",
    "links::programs",
    "links::restart",
    "links::sizes",
    "links::versions",
    "lists::",
    "live_connection_stops_when_its_source",
    "local::lifecycle",
    "network_card_translates_as_the_agent_plans",
    "next_agent_does_not_reattach_xdp",
    "no_packet_is_lost_while_xdp_is_replaced",
    "policy_engine",
    "prog_run::",
    "slow_filter_while_npls_filter_is_moved",
    "strict_reverse_path_filter_drops_requests",
    "third_party_xdp_program_is_kept",
    "traffic::big_tcp",
    "traffic::cni_rules",
    "traffic::devices",
    "traffic::direct_connections",
    "traffic::flood",
    "traffic::foreign_tc",
    "traffic::forged",
    "traffic::tunnels",
    "traffic::uplinks",
    "traps_are_handled_as_by_kernel_nat",
    "xdp_is_detached_where_the_egress_program",
];

/// Two guests share the packet tests under a kernel; each guest uses one processor of the host. The first guest runs
/// the tests with one of these texts in their names. The second guest runs the rest of the tests, so that both guests
/// take about the same time.
const FIRST_SHARE: [&str; 6] = ["differential::", LOADING_TESTS, "links::", "lists::", "local::", "prog_run::"];

/// Arguments that skip the tests with TUN and TAP devices, because guests have no device node for them. The results of
/// these tests do not depend on the kernel's version. The programs of Open vSwitch, whose ports are TAP devices, are not
/// on guests either.
const NEED_A_TUN_DEVICE: [&str; 4] = ["--skip", "open_vswitch::", "--skip", "point_to_point::"];

/// The argument that selects tests that change settings of the machine too. The only other packet test that is ignored,
/// `process_that_is_killed_at_a_step_of_its_start`, does nothing unless another test runs it.
pub(super) const IGNORED: &str = "--include-ignored";

/// The suffix of the name of a step whose guest only loads the kernel programs.
const LOADING: &str = ", loading";

/// Arguments that select the agent's tests for an emulated machine: the tests with a bond, which not every host's
/// kernel supports, and the tests that set the machine's clock.
const OWN_MACHINE_TESTS: [&str; 4] = ["--test-threads=1", "--include-ignored", "bond::", "clock::"];

/// The names of the real cluster's tests that run on an emulated machine.
const EMULATED_CLUSTER_TESTS: [&str; 3] =
    ["the_agent_is_ready", "every_client_is_answered", "a_node_reaches_its_own_pods"];

/// The name of the step that checks [`selections`].
const SELECTIONS: &str = "parts of test names that select tests";

/// The factor by which the deadlines of packet tests are longer on an emulated machine. The factor is small, because
/// some tests wait for a packet that must not arrive.
const PACKETS_PATIENCE: &str = "3";

/// The factor by which the deadlines of the agent's and the cluster's tests are longer on an emulated machine.
const EMULATED_PATIENCE: &str = "15";

/// The directories in which Debian's package and the upstream release install CNI plug-ins.
const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// The programs that the guest with a real cluster needs for its Nodes, besides the tools of every guest.
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

impl Suite<'_> {
    /// Runs the steps on emulated machines. The guests with one emulator thread run in parallel, the guests that take
    /// longest first. The guest with a real cluster, which has two emulator threads, runs after these guests.
    pub(super) fn run_emulated(&self, tally: &mut Tally) {
        let options = self.options;
        if options.filter().is_none() {
            tally.check(SELECTIONS, || self.check_selections());
        }
        let Some(newest) = options.newest_kernel() else { return };
        let mut guests = Vec::new();
        for binary in self.of_kind(Kind::Agent).filter(|_binary| are_clock_tests_chosen(options)) {
            match &self.parts {
                Ok(parts) => guests.push(guest_with_clock(newest, binary, parts)),
                Err(missing) => tally.not_run(&clock_step(newest, binary), *missing),
            }
        }
        for binary in self.of_kind(Kind::Kernel) {
            match self.has_tests(binary) {
                Ok(false) => {}
                Ok(true) => {
                    let scopes = packet_scopes(options).into_iter();
                    guests.extend(scopes.map(|(kernel, scope, arguments)| {
                        guest_for_packets(Arch::native(), kernel, binary, scope, &arguments)
                    }));
                }
                Err(error) => tally.check(&format!("tests: {}, emulated", binary.name), || Err(error)),
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

/// Whether a guest runs the agent's tests that need a machine of their own. This guest starts API servers, which takes
/// up to 15 minutes, so the guest runs only without a filter, and only if the user names kernels or a step.
fn are_clock_tests_chosen(options: &Options) -> bool {
    let are_kernels_named = options.kernels.is_some() && !options.emulated_kernels().is_empty();
    options.filter().is_none() && (are_kernels_named || options.step.is_some())
}

/// Returns, for each guest that runs the binary of the packet tests: the kernel, the part of the step's name that names
/// the guest's tests, and the arguments of the binary. A kernel of `--load-kernels` under which no packet tests run has
/// a guest that only loads the kernel programs.
fn packet_scopes(options: &Options) -> Vec<(Kernel, &'static str, Vec<&str>)> {
    let packets = options.emulated_kernels().into_iter().enumerate().flat_map(|(number, kernel)| {
        let is_brief = options.kernels.is_none() || number > 0;
        let shares = shares(options.filter(), is_brief).into_iter();
        shares.map(move |(scope, arguments)| (kernel, scope, arguments))
    });
    // The tests run one at a time: a test that follows another one reuses its loaded programs. Only the newest kernel
    // runs the ignored test with blinded constants, because an emulated processor needs minutes for this test.
    let kernels = options.loading_kernels();
    let newest = kernels.iter().copied().max_by_key(|kernel| kernel.age_rank());
    let arguments = |kernel| {
        let ignored = (Some(kernel) == newest).then_some(IGNORED);
        ["--test-threads=1"].into_iter().chain(ignored).chain([LOADING_TESTS]).collect::<Vec<_>>()
    };
    let loading = kernels.into_iter().map(|kernel| (kernel, LOADING, arguments(kernel)));
    packets.chain(loading).collect()
}

impl Suite<'_> {
    /// Checks that each part of a name by which steps select tests is in the name of a test. Without this check, a test
    /// that is renamed could run on no guest, or on a guest that cannot run it.
    fn check_selections(&self) -> Result<()> {
        let mut tests = BTreeMap::<Kind, BTreeSet<String>>::new();
        for binary in self.binaries.iter().filter(|binary| !selections(binary.kind).is_empty()) {
            tests.entry(binary.kind).or_default().extend(listed(binary.command().arg("--list"))?);
        }
        let missing: Vec<&str> = tests.iter().flat_map(|(kind, tests)| unmatched(&selections(*kind), tests)).collect();
        ensure!(
            missing.is_empty(),
            "no test has these parts in its name: {}; correct the selections in xtask/src/test/",
            missing.join(", ")
        );
        Ok(())
    }
}

/// Returns the parts of test names by which steps select or skip tests of a kind.
fn selections(kind: Kind) -> Vec<&'static str> {
    let parts: &[&[&'static str]] = match kind {
        Kind::Kernel => &[&[LOADING_TESTS], &FIRST_SHARE, &LEFT_OUT, &NEED_A_TUN_DEVICE],
        Kind::Agent => &[&OWN_MACHINE_TESTS, &[UPGRADE_TESTS]],
        Kind::RealCluster => &[&EMULATED_CLUSTER_TESTS],
        Kind::Unit | Kind::TestKit | Kind::Chart => &[],
    };
    parts.concat().into_iter().filter(|part| !part.starts_with("--")).collect()
}

/// Returns those parts of names that are not in the name of any test.
fn unmatched<'a>(parts: &[&'a str], tests: &BTreeSet<String>) -> Vec<&'a str> {
    let is_unmatched = |part: &&&str| !tests.iter().any(|test| test.contains(**part));
    parts.iter().filter(is_unmatched).copied().collect()
}

/// Runs a guest. If no test ran, the step fails: the names that select the guest's tests must be wrong.
pub(super) fn run_guest(guest: &Guest, counts: &mut Counts) -> Result<bool> {
    let is_success = guest.run(GUEST_DEADLINE, |line| {
        counts.read(line);
        println!("    {:>6} | {line}", guest.name);
    })?;
    Ok(is_success && counts.passed > 0)
}

/// Returns the name of a step for packet tests, and the guest that the step runs.
pub(super) fn guest_for_packets(
    arch: Arch,
    kernel: Kernel,
    binary: &TestBinary,
    scope: &str,
    arguments: &[&str],
) -> (String, Guest) {
    let mut test = Command::new(&binary.executable);
    test.args(arguments).env("NPL_PATIENCE", PACKETS_PATIENCE);
    let mut guest = Guest::for_packets(arch, kernel, test);
    guest.name.extend(scope.split([' ', ',']).filter(|word| !word.is_empty()).flat_map(|word| ["-", word]));
    (format!("tests: {}{scope} under kernel {}, emulated", binary.name, arch.mark(&kernel.to_string())), guest)
}

/// Returns, for each guest that runs packet tests under a kernel, the part of the step's name that names the guest's
/// share of the tests, and the arguments of the test binary. If `filter` is given, one guest runs the tests with this
/// text in their names. Otherwise, two guests share all tests, or if `is_brief`, all tests except those that
/// [`LEFT_OUT`] selects.
pub(super) fn shares(filter: Option<&str>, is_brief: bool) -> Vec<(&'static str, Vec<&str>)> {
    // The tests run one at a time, because the emulated processors are too slow for several test networks.
    let one_by_one = || ["--test-threads=1", IGNORED].into_iter();
    if let Some(filter) = filter {
        return vec![("", one_by_one().chain([filter]).collect())];
    }
    let skipped = || if is_brief { &LEFT_OUT[..] } else { &[] }.iter().flat_map(|part| ["--skip", part]);
    let first = one_by_one().chain(FIRST_SHARE).chain(skipped()).collect();
    let of_first = FIRST_SHARE.into_iter().flat_map(|part| ["--skip", part]);
    let second = one_by_one().chain(of_first).chain(NEED_A_TUN_DEVICE).chain(skipped()).collect();
    vec![(", first share,", first), (", second share,", second)]
}

fn clock_step(kernel: Kernel, binary: &TestBinary) -> String {
    format!("tests: {} on a bond, and while its clock is set, under kernel {kernel}, emulated", binary.name)
}

/// Returns a guest with an API server and an agent, and the name of its step. Tests may set the clock of this guest,
/// because only the tests' own processes depend on this clock.
fn guest_with_clock(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> (String, Guest) {
    let mut test = Command::new(&binary.executable);
    test.args(OWN_MACHINE_TESTS).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let copies = parts.of_agent().chain([paths::root().join("deploy")]).collect();
    let (threads, programs) = (Threads::One, &["kubectl"]);
    let guest = Guest {
        name: "clock".to_owned(),
        arch: Arch::native(),
        kernel,
        threads,
        memory_megabytes: 4096,
        test,
        programs,
        copies,
    };
    (clock_step(kernel, binary), guest)
}

fn nodes_step(kernel: Kernel, binary: &TestBinary) -> String {
    format!("tests: {} on cgroup v2 alone, under kernel {kernel}, emulated", binary.name)
}

/// Returns a guest in which a real cluster starts. The guest has one emulator thread per processor ([`Threads::Each`]):
/// with one thread for both processors, the cluster does not become ready.
fn guest_with_nodes(kernel: Kernel, binary: &TestBinary, parts: &Parts) -> Guest {
    let mut test = Command::new(&binary.executable);
    test.args(["--network", "bridge/iptables"]).args(EMULATED_CLUSTER_TESTS).env("NPL_PATIENCE", EMULATED_PATIENCE);
    parts.pass_to(&mut test);
    let of_repository = ["deploy", "npl-testkit/tests/cluster/manifests"].map(|path| paths::root().join(path));
    let folders = CNI_FOLDERS.map(PathBuf::from).into_iter().filter(|folder| folder.is_dir());
    let own = [build::built_folder().join("npl-cluster")];
    let copies = parts.of_nodes().chain(own).chain(of_repository).chain(folders).collect();
    let (threads, programs) = (Threads::Each, &NODE_PROGRAMS);
    Guest {
        name: "nodes".to_owned(),
        arch: Arch::native(),
        kernel,
        threads,
        memory_megabytes: 6144,
        test,
        programs,
        copies,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::parse;
    use super::{IGNORED, Kind, are_clock_tests_chosen, packet_scopes, selections, shares, unmatched};

    #[test]
    fn a_part_of_a_name_that_selects_no_test_is_found() {
        let parts = selections(Kind::Kernel);
        let tests = parts.iter().map(|part| format!("{part}::one")).collect();
        assert_eq!(unmatched(&parts, &tests), [""; 0]);
        let renamed = parts.iter().map(|part| part.replace("links::pins", "links::files")).collect();
        assert_eq!(unmatched(&parts, &renamed), ["links::pins"]);
    }

    /// Whether the test harness runs the test `test` if it has these arguments.
    fn is_run(test: &str, arguments: &[&str]) -> bool {
        let (mut skipped, mut filters) = (Vec::new(), Vec::new());
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match *argument {
                "--skip" => skipped.extend(arguments.next()),
                "--test-threads=1" | IGNORED => {}
                filter => filters.push(filter),
            }
        }
        !skipped.iter().any(|it: &&&str| test.contains(**it))
            && (filters.is_empty() || filters.iter().any(|it| test.contains(it)))
    }

    /// Returns the number of guests that run the test `test`.
    fn runs(test: &str, is_brief: bool) -> usize {
        shares(None, is_brief).iter().filter(|(_, arguments)| is_run(test, arguments)).count()
    }

    #[test]
    fn every_test_is_in_one_share() {
        for test in ["links::pins::one", "links::programs::two", "prog_run::sctp::three", "traffic::flood", "oracle"] {
            assert_eq!(runs(test, false), 1, "{test}");
        }
    }

    #[test]
    fn a_brief_run_leaves_out_the_slow_tests() {
        let tests = [
            "links::pins::one",
            "prog_run::two",
            "links::filter_order::three",
            "traffic::flow_offload::four",
            "loads::every_program_loads",
        ];
        assert_eq!(tests.map(|test| runs(test, true)), [0, 0, 1, 1, 1]);
        assert_eq!(tests.map(|test| runs(test, false)), [1; 5]);
    }

    #[test]
    fn the_programs_are_loaded_also_if_no_packet_tests_run() {
        for (line, kernels, clock) in [
            ("--kernels none --load-kernels 5.10", "5.10 loading", false),
            ("--kernels none", "6.1 loading, 6.12 loading, latest loading", false),
            ("--kernels none --load-kernels none", "", false),
            ("--kernels none --step clock", "6.1 loading, 6.12 loading, latest loading", true),
            ("--kernels 6.1 --load-kernels 5.10,6.1", "6.1, 6.1, 5.10 loading", true),
            ("--filter sctp", "", false),
            ("--filter sctp --kernels 6.1", "6.1", false),
        ] {
            let options = parse(line).unwrap();
            let scopes = packet_scopes(&options);
            let is_loading =
                |arguments: &[&str]| arguments.len() <= 3 && arguments.last() == Some(&"every_program_loads");
            let name = |loads| if loads { " loading" } else { "" };
            let guests = scopes.iter().map(|(kernel, _, arguments)| format!("{kernel}{}", name(is_loading(arguments))));
            assert_eq!(guests.collect::<Vec<_>>().join(", "), kernels, "{line}");
            assert_eq!(options.newest_kernel().is_some(), !kernels.is_empty(), "{line}");
            assert_eq!(are_clock_tests_chosen(&options), clock, "{line}");
        }
    }

    #[test]
    fn a_filter_has_one_guest() {
        let [(_, arguments)] = shares(Some("sctp"), true).try_into().unwrap();
        assert!(is_run("prog_run::sctp::one", &arguments));
        assert!(!is_run("links::pins::one", &arguments));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A test harness that runs all tests in sequence on one cluster, with the output format of the standard harness.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser as _;
use npl_testkit::real_cluster::Cni;
use npl_testkit::{interrupt, tools};

use crate::network::Network;
use crate::table::Row;
use crate::world::World;

/// One test.
#[derive(Clone, Copy)]
pub(crate) struct ClusterTest {
    name: &'static str,
    run: fn(&mut World),
    is_excluded_on: fn(Cni) -> bool,
}

impl ClusterTest {
    pub(crate) const fn new(name: &'static str, run: fn(&mut World)) -> Self {
        Self { name, run, is_excluded_on: |_any| false }
    }

    /// Excludes the test on the networks for which `is_excluded_on` returns `true`.
    pub(crate) const fn except_on(self, is_excluded_on: fn(Cni) -> bool) -> Self {
        Self { is_excluded_on, ..self }
    }

    fn is_meant(&self, words: &[String]) -> bool {
        words.is_empty() || words.iter().any(|word| self.name.contains(word.as_str()))
    }
}

/// Tests that run in sequence on one cluster.
pub(crate) struct Suite {
    network: Network,
    tests: Vec<ClusterTest>,
}

impl Suite {
    pub(crate) fn new(network: Network, tests: &[&[ClusterTest]]) -> Self {
        let applies = |test: &ClusterTest| !(test.is_excluded_on)(network.cni);
        Self { network, tests: tests.concat().into_iter().filter(applies).collect() }
    }

    fn meant(&self, words: &[String]) -> impl Iterator<Item = &ClusterTest> {
        self.tests.iter().filter(|test| test.is_meant(words))
    }

    fn run(&self, words: &[String], tally: &mut Tally) -> Option<Row> {
        println!("\nnetwork {}", self.network);
        let before = *tally;
        let start = "a_cluster_of_two_nodes_starts_with_npl_installed";
        let mut world = tally.run(start, || World::start(self.network))?;
        for test in self.meant(words) {
            let result = tally.run(test.name, || (test.run)(&mut world));
            if result.is_none() {
                println!("{}", world.describe());
            }
        }
        let (answered, lost, platform) = (world.answered, world.lost, world.platform.clone());
        tally.run("the_cluster_leaves_nothing_behind", || world.end());
        let passed = tally.passed - before.passed;
        let run = passed + tally.failed - before.failed;
        let date = tools::output(Command::new("date").args(["--utc", "+%F"])).unwrap().trim().to_owned();
        Some(Row { network: self.network, passed, run, answered, lost, platform, date })
    }
}

/// The command-line arguments.
#[derive(clap::Parser)]
struct Arguments {
    /// Run only tests whose names contain one of these words.
    words: Vec<String>,
    /// Run the tests on a cluster with this network, such as `flannel-vxlan/nftables`; `every` means each network in
    /// turn. Without words, also write the results into `docs/compatibility.md`.
    #[arg(long, value_parser = read_network)]
    network: Vec<Networks>,
    /// Only list the names of the tests.
    #[arg(long)]
    list: bool,
}

#[derive(Clone)]
struct Networks(Vec<Network>);

fn read_network(text: &str) -> Result<Networks, String> {
    let all = Network::all();
    let meant: Vec<Network> = all.iter().filter(|it| text == "every" || it.to_string() == text).copied().collect();
    let names: Vec<String> = all.iter().map(Network::to_string).collect();
    if meant.is_empty() {
        Err(format!("unknown network; use `every` or one of {}", names.join(", ")))
    } else {
        Ok(Networks(meant))
    }
}

/// Runs the suites that are defined for the networks on the command line.
pub(crate) fn run(suites_for: impl FnOnce(&[Network]) -> Vec<Suite>) -> ExitCode {
    let Arguments { words, network, list } = Arguments::parse();
    let networks: Vec<Network> = network.into_iter().flat_map(|it| it.0).collect();
    let suites: Vec<Suite> =
        suites_for(&networks).into_iter().filter(|suite| suite.meant(&words).next().is_some()).collect();
    if list {
        for test in suites.iter().flat_map(|suite| suite.meant(&words)) {
            println!("{}: test", test.name);
        }
        return ExitCode::SUCCESS;
    }
    interrupt::watch().unwrap();
    // The start and the removal of each suite's cluster count as two further tests.
    println!("running {} tests", suites.iter().map(|suite| suite.meant(&words).count() + 2).sum::<usize>());
    let mut tally = Tally::default();
    for suite in suites {
        let row = suite.run(&words, &mut tally);
        // The table gets a row only after a run of all tests on a named network. The result of a partial or interrupted
        // run would be incomplete.
        let is_whole = !networks.is_empty() && words.is_empty() && !interrupt::is_requested();
        if let Some(row) = row.filter(|_row| is_whole) {
            row.enter();
        }
    }
    tally.close()
}

#[derive(Clone, Copy, Default)]
struct Tally {
    passed: u32,
    failed: u32,
}

impl Tally {
    fn run<T>(&mut self, name: &str, test: impl FnOnce() -> T) -> Option<T> {
        if interrupt::is_requested() && self.failed > 0 {
            return None;
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(test));
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {word} ({:.1} s)", start.elapsed().as_secs_f32());
        match result {
            Ok(value) => {
                self.passed += 1;
                Some(value)
            }
            Err(panic) => {
                self.failed += 1;
                println!("    {}", message(panic.as_ref()));
                None
            }
        }
    }

    fn close(self) -> ExitCode {
        let word = if self.failed == 0 { "ok" } else { "FAILED" };
        println!("\ntest result: {word}. {} passed; {} failed", self.passed, self.failed);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

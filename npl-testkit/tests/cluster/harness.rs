// SPDX-License-Identifier: Apache-2.0
//! Tells stories one after the other on one world, and speaks as the usual harness does.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser as _;
use npl_testkit::interrupt;

use crate::network::Network;
use crate::table::Row;
use crate::world::World;

/// One test.
#[derive(Clone, Copy)]
pub(crate) struct Story {
    name: &'static str,
    tell: fn(&mut World),
}

impl Story {
    pub(crate) const fn new(name: &'static str, tell: fn(&mut World)) -> Self {
        Self { name, tell }
    }

    fn is_meant(&self, words: &[String]) -> bool {
        words.is_empty() || words.iter().any(|word| self.name.contains(word.as_str()))
    }
}

/// Stories that are told one after the other on one cluster.
pub(crate) struct Act {
    network: Network,
    stories: Vec<Story>,
}

impl Act {
    pub(crate) fn new(network: Network, stories: &[&[Story]]) -> Self {
        Self { network, stories: stories.concat() }
    }

    fn meant(&self, words: &[String]) -> impl Iterator<Item = &Story> {
        self.stories.iter().filter(|story| story.is_meant(words))
    }

    fn play(&self, words: &[String], tally: &mut Tally) -> Option<Row> {
        println!("\nnetwork {}", self.network);
        let before = *tally;
        let opening = "a_cluster_of_two_nodes_comes_up_with_our_manifests_applied";
        let mut world = tally.tell(opening, || World::start(self.network))?;
        for story in self.meant(words) {
            let told = tally.tell(story.name, || (story.tell)(&mut world));
            if told.is_none() {
                println!("{}", world.describe());
            }
        }
        let (answered, platform) = (world.answered, world.platform.clone());
        tally.tell("nothing_of_the_cluster_is_left", || world.end());
        let passed = tally.passed - before.passed;
        let told = passed + tally.failed - before.failed;
        Some(Row { network: self.network, passed, told, answered, platform })
    }
}

/// What the command line asks for.
#[derive(clap::Parser)]
struct Arguments {
    /// Tell only the stories whose names contain one of these.
    words: Vec<String>,
    /// Tell all stories on a cluster that is connected so, such as `flannel-vxlan/nftables`, or `every`; the outcome
    /// becomes a row of `docs/compatibility.md`.
    #[arg(long, value_parser = read_network)]
    network: Vec<Networks>,
    /// Name the stories only.
    #[arg(long)]
    list: bool,
}

#[derive(Clone)]
struct Networks(Vec<Network>);

fn read_network(text: &str) -> Result<Networks, String> {
    let all = Network::all();
    let meant: Vec<Network> = all.iter().filter(|it| text == "every" || it.to_string() == text).copied().collect();
    let names: Vec<String> = all.iter().map(Network::to_string).collect();
    if meant.is_empty() { Err(format!("there is `every`, and {}", names.join(", "))) } else { Ok(Networks(meant)) }
}

/// Tells the stories of the acts that are made for the networks of the command line.
pub(crate) fn run(acts_for: impl FnOnce(&[Network]) -> Vec<Act>) -> ExitCode {
    let Arguments { words, network, list } = Arguments::parse();
    let networks: Vec<Network> = network.into_iter().flat_map(|it| it.0).collect();
    let acts: Vec<Act> = acts_for(&networks).into_iter().filter(|act| act.meant(&words).next().is_some()).collect();
    if list {
        for story in acts.iter().flat_map(|act| act.meant(&words)) {
            println!("{}: test", story.name);
        }
        return ExitCode::SUCCESS;
    }
    interrupt::watch().unwrap();
    // Each begins with its cluster and ends with that.
    println!("running {} tests", acts.iter().map(|act| act.meant(&words).count() + 2).sum::<usize>());
    let mut tally = Tally::default();
    for act in acts {
        let row = act.play(&words, &mut tally);
        if let Some(row) = row.filter(|_row| !networks.is_empty() && words.is_empty()) {
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
    fn tell<T>(&mut self, name: &str, story: impl FnOnce() -> T) -> Option<T> {
        if interrupt::is_requested() && self.failed > 0 {
            return None;
        }
        let start = Instant::now();
        let told = catch_unwind(AssertUnwindSafe(story));
        let word = if told.is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {word} ({:.1} s)", start.elapsed().as_secs_f32());
        match told {
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
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

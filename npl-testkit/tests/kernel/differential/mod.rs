// SPDX-License-Identifier: Apache-2.0
//! One corpus of packets through ours and through the kernel's own address translation: what clients and Pods see has to
//! be the same, byte by byte. Where it may differ is a table with reasons: [`exception::Exception`] and `docs/datapath.md`.
//!
//! `NPL_DIFFERENTIAL_PACKETS` says how many packets, `NPL_DIFFERENTIAL_SEED` which ones. A difference is shrunk to the
//! least that shows it.

mod corpus;
mod dress;
mod exception;
mod judge;
mod stray;
mod talk;
mod tap;
mod translate;
mod traps;
mod twin;

use std::cell::RefCell;
use std::io::Write as _;

use npl_agent::core::model::Family;
use proptest::strategy::Strategy as _;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use self::judge::Account;
use self::talk::Step;
use self::traps::{Scene, TRAPS};
use self::twin::{Twin, Way};
use crate::sys::stay_on_this_processor;
use crate::world::is_emulated;

/// The same with every run, so that the same programs pass or fail; another one is another corpus.
const SEED: u64 = 0x4e50_4c00;
/// Packets after which both worlds are made anew, since what they remember of flows has its limits.
const PACKETS_PER_TWIN: u64 = 100_000;
/// Clients have numbers from here on.
const FIRST_CASE: u16 = 0x1000;

/// How many are compared on each way.
fn packets() -> u64 {
    setting("NPL_DIFFERENTIAL_PACKETS").unwrap_or(if is_emulated() { 3000 } else { 75_000 })
}

fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is no number: {value}")))
}

/// What the test has done and is to be known also where it passes.
fn say(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

/// Both worlds, and what has been played in them.
struct Stage {
    twin: Twin,
    account: Account,
    cases: u16,
}

impl Stage {
    fn new(way: Way) -> Self {
        // One processor takes packets in the order in which they were sent.
        stay_on_this_processor();
        Self { twin: Twin::new(way), account: Account::default(), cases: FIRST_CASE }
    }

    /// Goes on in worlds that remember nothing.
    fn renew(&mut self) {
        (self.twin, self.cases) = (Twin::new(self.twin.way), FIRST_CASE);
    }

    /// Plays what clients do whom nobody has been before.
    fn play(&mut self, steps_of: impl FnOnce(u16) -> Vec<Step>) -> Result<(), String> {
        self.cases += 1;
        let mut steps = steps_of(self.cases).into_iter();
        steps.try_for_each(|step| judge::play(&mut self.twin, &step, &mut self.account))
    }
}

#[test]
fn traps_of_others_catch_nobody() {
    play_traps(Way::Stack);
}

#[test]
fn traps_of_others_catch_nobody_whom_the_driver_translates() {
    play_traps(Way::Driver);
}

#[test]
fn traps_of_others_catch_nobody_who_is_redirected() {
    play_traps(Way::Redirect);
}

#[test]
fn corpus_arrives_as_by_the_kernels_own_translation() {
    play_corpus(Way::Stack);
}

#[test]
fn corpus_that_the_driver_translates_arrives_as_by_the_kernels_own_translation() {
    play_corpus(Way::Driver);
}

#[test]
fn corpus_that_is_redirected_arrives_as_by_the_kernels_own_translation() {
    play_corpus(Way::Redirect);
}

#[test]
fn corpus_that_is_offloaded_arrives_as_by_the_kernels_own_translation() {
    play_corpus(Way::Offload);
}

#[track_caller]
fn play_traps(way: Way) {
    let mut stage = Stage::new(way);
    let mut caught = Vec::new();
    for ((trap, steps), family) in TRAPS.iter().flat_map(|it| Family::ALL.map(|family| (it, family))) {
        let played = stage.play(|number| steps(&Scene { family, client: corpus::client(family, number) }));
        if let Err(difference) = played {
            caught.push(format!("{trap}, {family:?}: {difference}"));
        }
    }
    assert!(caught.is_empty(), "{}", caught.join("\n"));
    say(&format!("differential test of traps, {way:?}: {}", stage.account));
}

#[track_caller]
fn play_corpus(way: Way) {
    let (wanted, seed) = (packets(), setting("NPL_DIFFERENTIAL_SEED").unwrap_or(SEED));
    say(&format!("differential test, {way:?}: seed {seed}, {wanted} packets"));
    let config = Config { failure_persistence: None, max_shrink_iters: 500, ..Config::default() };
    let bytes: Vec<u8> = (0..4_u64).flat_map(|word| (seed ^ word).to_le_bytes()).collect();
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let stage = RefCell::new(Stage::new(way));
    let mut renewal = PACKETS_PER_TWIN;
    while stage.borrow().account.compared < wanted {
        if stage.borrow().account.compared >= renewal {
            renewal += PACKETS_PER_TWIN;
            stage.borrow_mut().renew();
        }
        let case = corpus::cases().new_tree(&mut runner).unwrap();
        let played = runner
            .run_one(case, |case| stage.borrow_mut().play(|number| case.steps(number)).map_err(TestCaseError::fail));
        if let Err(difference) = played {
            panic!("with seed {seed}: {difference}");
        }
    }
    say(&format!("differential test, {way:?}: {}", stage.borrow().account));
}

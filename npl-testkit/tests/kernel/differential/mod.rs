// SPDX-License-Identifier: Apache-2.0
//! The differential test. The same packets are sent through NPL and through the kernel's NAT, and clients and Pods must
//! receive the same bytes. Allowed differences are listed with their reasons in [`exception::Exception`] and
//! `docs/datapath.md`.
//!
//! `NPL_DIFFERENTIAL_PACKETS` sets the number of packets and `NPL_DIFFERENTIAL_SEED` the seed. A failing case is
//! shrunk to a minimal one.

mod compare;
mod connection;
mod corpus;
mod exception;
mod node_pair;
mod packet_fields;
mod single_packet;
mod tap;
mod translate;
mod traps;

use std::cell::RefCell;
use std::io::Write as _;

use npl_agent::core::model::Family;
use npl_testkit::extent;
use proptest::strategy::Strategy as _;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use self::compare::Summary;
use self::connection::Step;
use self::node_pair::{Mode, NodePair};
use self::traps::{Scene, TRAPS};
use crate::sys::stay_on_this_processor;
use crate::world::is_emulated;

/// The default seed of the random packets. The seed is fixed, so that every run sends the same packets.
const SEED: u64 = 0x4e50_4c00;
/// Number of packets after which both Nodes are recreated, because their flow tables are limited.
const PACKETS_PER_NODE_PAIR: u64 = 100_000;
/// The value at which the counter of cases starts. The number of a case determines the client's addresses in this case.
const FIRST_CASE: u16 = 0x1000;

/// Number of packets that the test compares in each mode.
fn packets() -> u64 {
    extent::number("NPL_DIFFERENTIAL_PACKETS").unwrap().unwrap_or(if is_emulated() { 1500 } else { 75_000 })
}

/// Writes to standard error directly, because the test harness hides the captured output of a test that passes.
fn report(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

/// Both Nodes, and the results so far.
struct Runner {
    pair: NodePair,
    summary: Summary,
    cases: u16,
}

impl Runner {
    fn new(mode: Mode) -> Self {
        // All threads run on one processor, so that packets are handled in the order in which they were sent.
        stay_on_this_processor();
        Self { pair: NodePair::new(mode), summary: Summary::default(), cases: FIRST_CASE }
    }

    /// Continues with new Nodes, whose tables are empty.
    fn restart(&mut self) {
        (self.pair, self.cases) = (NodePair::new(self.pair.mode), FIRST_CASE);
    }

    /// Sends the steps of a case, from client addresses that no earlier case has used.
    fn play(&mut self, steps_of: impl FnOnce(u16) -> Vec<Step>) -> Result<(), String> {
        self.cases += 1;
        let mut steps = steps_of(self.cases).into_iter();
        steps.try_for_each(|step| compare::play(&mut self.pair, &step, &mut self.summary))
    }
}

#[test]
fn traps_are_handled_as_by_kernel_nat() {
    play_traps(Mode::Stack);
}

#[test]
fn traps_are_handled_as_by_kernel_nat_with_xdp() {
    play_traps(Mode::Xdp);
}

#[test]
fn traps_are_handled_as_by_kernel_nat_with_redirect() {
    play_traps(Mode::Redirect);
}

#[test]
fn corpus_is_translated_as_by_kernel_nat() {
    play_corpus(Mode::Stack);
}

#[test]
fn corpus_is_translated_as_by_kernel_nat_with_xdp() {
    play_corpus(Mode::Xdp);
}

#[test]
fn corpus_is_translated_as_by_kernel_nat_with_redirect() {
    play_corpus(Mode::Redirect);
}

#[test]
fn corpus_is_translated_as_by_kernel_nat_with_offload() {
    play_corpus(Mode::Offload);
}

#[track_caller]
fn play_traps(mode: Mode) {
    let mut runner = Runner::new(mode);
    let mut failed = Vec::new();
    for ((trap, steps), family) in TRAPS.iter().flat_map(|entry| Family::ALL.map(|family| (entry, family))) {
        let played = runner.play(|number| steps(&Scene { family, client: corpus::client(family, number) }));
        if let Err(difference) = played {
            failed.push(format!("{trap}, {family:?}: {difference}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    report(&format!("differential test of traps, {mode:?}: {}", runner.summary));
}

#[track_caller]
fn play_corpus(mode: Mode) {
    let (wanted, seed) = (packets(), extent::number("NPL_DIFFERENTIAL_SEED").unwrap().unwrap_or(SEED));
    report(&format!("differential test, {mode:?}: seed {seed}, {wanted} packets"));
    let config = Config { failure_persistence: None, max_shrink_iters: 500, ..Config::default() };
    let bytes: Vec<u8> = (0..4_u64).flat_map(|index| (seed ^ index).to_le_bytes()).collect();
    let mut test_runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let runner = RefCell::new(Runner::new(mode));
    let mut next_restart = PACKETS_PER_NODE_PAIR;
    while runner.borrow().summary.compared < wanted {
        if runner.borrow().summary.compared >= next_restart {
            next_restart += PACKETS_PER_NODE_PAIR;
            runner.borrow_mut().restart();
        }
        let case = corpus::cases().new_tree(&mut test_runner).unwrap();
        let played = test_runner
            .run_one(case, |case| runner.borrow_mut().play(|number| case.steps(number)).map_err(TestCaseError::fail));
        if let Err(difference) = played {
            panic!("with seed {seed}: {difference}");
        }
    }
    report(&format!("differential test, {mode:?}: {}", runner.borrow().summary));
}

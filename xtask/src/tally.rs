// SPDX-License-Identifier: Apache-2.0
//! What passed and what failed, over all kinds of steps; a test binary tells its own numbers.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};

use crate::process;

/// The sum of everything that was run.
#[derive(Debug)]
pub(crate) struct Tally {
    started: Instant,
    counts: Counts,
    steps: Vec<(String, Duration, Counts)>,
    only: Option<String>,
}

/// Tests that passed and failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
}

impl Counts {
    /// Adds what a line of a test binary says: `test result: ok. 3 passed; 0 failed; …`.
    pub(crate) fn read(&mut self, line: &str) {
        let Some((_, result)) = line.split_once("test result: ") else { return };
        let number = |name: &str| {
            let before = result.split_once(name)?.0.trim_end();
            before.rsplit(' ').next()?.parse::<u32>().ok()
        };
        self.passed += number("passed").unwrap_or(0);
        self.failed += number("failed").unwrap_or(0);
    }
}

/// How a step ended that counts its own tests.
#[derive(Debug)]
struct Outcome {
    took: Duration,
    counts: Counts,
    error: Option<Error>,
}

impl Outcome {
    fn of(step: impl FnOnce(&mut Counts) -> Result<bool>) -> Self {
        let started = Instant::now();
        let mut counts = Counts::default();
        let ended = step(&mut counts);
        // A test binary that dies has counted nothing.
        if !matches!(ended, Ok(true)) && counts.failed == 0 {
            counts.failed = 1;
        }
        Self { took: started.elapsed(), counts, error: ended.err() }
    }
}

impl Tally {
    /// Begins; with `only`, all steps are left out but those with that text in their name.
    pub(crate) fn start(only: Option<&str>) -> Self {
        Self { started: Instant::now(), counts: Counts::default(), steps: Vec::new(), only: only.map(str::to_owned) }
    }

    /// Makes something that later steps need, whichever were asked for; it counts only when it fails.
    pub(crate) fn prepare<T>(&mut self, name: &str, make: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n### {name}");
        let started = Instant::now();
        let made = make();
        let counts = Counts { passed: 0, failed: made.is_err().into() };
        self.add(name, started.elapsed(), counts);
        made
    }

    /// Runs a step that passes or fails as a whole.
    pub(crate) fn check(&mut self, name: &str, step: impl FnOnce() -> Result<()>) -> Result<()> {
        self.tests(name, |counts| {
            step()?;
            counts.passed = 1;
            Ok(true)
        })
    }

    /// Runs a step that counts its own tests and says whether it ended well. The first that fails ends the run.
    pub(crate) fn tests(&mut self, name: &str, step: impl FnOnce(&mut Counts) -> Result<bool>) -> Result<()> {
        if self.only.as_ref().is_some_and(|only| !name.contains(only)) {
            return Ok(());
        }
        println!("\n### {name}");
        let outcome = Outcome::of(step);
        self.enter(name, outcome)
    }

    /// Runs steps that count their own tests, as many at the same time as there are processors, in their order; they mark
    /// their own lines. Each comes to its end.
    pub(crate) fn side_by_side<S>(&mut self, steps: Vec<(String, S)>) -> Result<()>
    where
        S: FnOnce(&mut Counts) -> Result<bool> + Send,
    {
        let is_meant = |name: &str| self.only.as_ref().is_none_or(|only| name.contains(only));
        let meant: Vec<(String, S)> = steps.into_iter().filter(|(name, _)| is_meant(name)).collect();
        let lanes = thread::available_parallelism().map_or(1, NonZero::get).min(meant.len());
        let (waiting, ended) = (Mutex::new(meant.into_iter().enumerate()), Mutex::new(BTreeMap::new()));
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        let lane = || {
            while let Some((turn, (name, step))) = next() {
                println!("\n### {name}");
                let outcome = Outcome::of(step);
                ended.lock().unwrap_or_else(PoisonError::into_inner).insert(turn, (name, outcome));
            }
        };
        thread::scope(|scope| (0..lanes).for_each(|_| drop(scope.spawn(lane))));
        // All of them are entered, whichever fails.
        let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        let entered: Vec<Result<()>> = ended.into_values().map(|(name, it)| self.enter(&name, it)).collect();
        entered.into_iter().collect()
    }

    fn enter(&mut self, name: &str, outcome: Outcome) -> Result<()> {
        let Outcome { took, counts, error } = outcome;
        self.add(name, took, counts);
        if counts.failed == 0 {
            return Ok(());
        }
        if let Some(error) = error {
            println!("    {error:#}");
        }
        bail!("{name}: failed")
    }

    fn add(&mut self, name: &str, time: Duration, counts: Counts) {
        self.counts.passed += counts.passed;
        self.counts.failed += counts.failed;
        self.steps.push((name.to_owned(), time, counts));
        println!("    {} passed, {} failed in {}", counts.passed, counts.failed, process::elapsed(time));
    }

    /// Prints the steps, the total time and, as the last line, the sums.
    pub(crate) fn close(&self) {
        println!();
        for (name, time, Counts { passed, failed }) in &self.steps {
            println!("{:>10}  {passed:>4} passed  {failed:>2} failed  {name}", process::elapsed(*time));
        }
        println!("total time: {}", process::elapsed(self.started.elapsed()));
        println!("{} passed, {} failed", self.counts.passed, self.counts.failed);
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, Tally, bail};

    #[test]
    fn a_test_binary_tells_its_numbers() {
        let mut counts = Counts::default();
        counts.read("running 3 tests");
        counts.read("test result: ok. 17 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.10s");
        counts.read("test result: FAILED. 5 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(counts, Counts { passed: 22, failed: 1 });
    }

    #[test]
    fn a_preparation_counts_only_when_it_fails() {
        let mut tally = Tally::start(Some("else"));
        assert_eq!(tally.prepare("build", || Ok(7)).unwrap(), 7);
        assert!(tally.prepare("build", || -> anyhow::Result<()> { bail!("no") }).is_err());
        assert_eq!(tally.counts, Counts { passed: 0, failed: 1 });
    }

    #[test]
    fn a_step_that_was_not_asked_for_is_left_out() {
        let mut tally = Tally::start(Some("tidy"));
        assert!(tally.check("lints", || bail!("no")).is_ok());
        assert!(tally.check("tidy", || Ok(())).is_ok());
        assert_eq!(tally.counts, Counts { passed: 1, failed: 0 });
    }

    #[test]
    fn steps_side_by_side_all_come_to_their_end() {
        let mut tally = Tally::start(Some("kernel"));
        let step = |passed, failed| {
            move |counts: &mut Counts| {
                *counts = Counts { passed, failed };
                Ok(failed == 0)
            }
        };
        let steps = ["kernel 1", "kernel 2", "kernel 3", "another"].map(str::to_owned);
        let all = steps.into_iter().zip([step(2, 0), step(3, 1), step(4, 0), step(5, 0)]).collect();
        assert_eq!(tally.side_by_side(all).unwrap_err().to_string(), "kernel 2: failed");
        assert_eq!(tally.counts, Counts { passed: 9, failed: 1 });
    }

    #[test]
    fn a_step_that_ends_badly_has_failed() {
        let mut tally = Tally::start(None);
        assert!(tally.check("good", || Ok(())).is_ok());
        assert!(tally.check("bad", || bail!("no")).is_err());
        assert!(
            tally
                .tests("dies", |counts| {
                    counts.passed = 2;
                    Ok(false)
                })
                .is_err()
        );
        assert_eq!(tally.counts, Counts { passed: 3, failed: 2 });
    }
}

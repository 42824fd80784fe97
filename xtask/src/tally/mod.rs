// SPDX-License-Identifier: Apache-2.0
//! The steps of a test run and their results. A step runs only if its preparation succeeded. The summary lists the
//! failures.

mod counts;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};

pub(crate) use self::counts::Counts;
use crate::process;

/// All steps of a test run, with their results.
#[derive(Debug)]
pub(crate) struct Tally {
    started: Instant,
    /// Only steps with this text in their names run; `None` if all steps run.
    chosen: Option<String>,
    steps: Vec<Step>,
}

/// The error of a step that cannot run, because the preparation with this name failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotReady(&'static str);

/// A step of the test run that has ended, or that could not start because a preparation failed.
#[derive(Debug)]
struct Step {
    name: String,
    kind: Kind,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Preparation,
    Test,
}

#[derive(Debug)]
enum End {
    Ran { took: Duration, counts: Counts, error: Option<Error> },
    NotRun(NotReady),
}

impl End {
    /// Runs a step, and returns its result and the numbers of its tests.
    fn of(step: impl FnOnce(&mut Counts) -> Result<bool>) -> Self {
        let started = Instant::now();
        let mut counts = Counts::default();
        let ended = step(&mut counts);
        // A test binary that was killed has not printed how many tests failed, so the step counts as one failed test.
        if !matches!(ended, Ok(true)) && counts.failed == 0 {
            counts.failed = 1;
        }
        Self::Ran { took: started.elapsed(), counts, error: ended.err() }
    }

    /// The numbers of tests of this step that passed and failed.
    fn counts(&self) -> (u32, u32) {
        match self {
            Self::Ran { counts, .. } => (counts.passed, counts.failed),
            Self::NotRun(_) => (0, 0),
        }
    }
}

impl Tally {
    /// Begins a test run of the steps with `chosen` in their names, or of all steps if `chosen` is `None`.
    pub(crate) fn start(chosen: Option<&str>) -> Self {
        Self { started: Instant::now(), chosen: chosen.map(str::to_owned), steps: Vec::new() }
    }

    /// Runs a preparation, which builds products that later steps need. Preparations run regardless of the steps that
    /// the user has chosen, and are counted only if they fail.
    pub(crate) fn prepare<T>(&mut self, name: &'static str, make: impl FnOnce() -> Result<T>) -> Result<T, NotReady> {
        println!("\n### {name}");
        let started = Instant::now();
        let (made, error) = match make() {
            Ok(made) => (Ok(made), None),
            Err(error) => (Err(NotReady(name)), Some(error)),
        };
        let counts = Counts::new(0, made.is_err().into());
        self.enter(name.to_owned(), Kind::Preparation, End::Ran { took: started.elapsed(), counts, error });
        made
    }

    /// Whether the user's choice of steps includes a step with this name.
    pub(crate) fn is_chosen(&self, name: &str) -> bool {
        self.chosen.as_ref().is_none_or(|chosen| name.contains(chosen))
    }

    /// Runs a step that passes or fails as a whole, and counts it as one test.
    pub(crate) fn check(&mut self, name: &str, step: impl FnOnce() -> Result<()>) {
        self.tests(name, counted(step));
    }

    /// Runs a step. The function `step` counts its tests and returns whether all tests passed.
    pub(crate) fn tests(&mut self, name: &str, step: impl FnOnce(&mut Counts) -> Result<bool>) {
        if self.is_chosen(name) {
            println!("\n### {name}");
            self.enter(name.to_owned(), Kind::Test, End::of(step));
        }
    }

    /// Records that a step cannot run because a preparation failed.
    pub(crate) fn not_run(&mut self, name: &str, missing: NotReady) {
        if self.is_chosen(name) {
            self.steps.push(Step { name: name.to_owned(), kind: Kind::Test, end: End::NotRun(missing) });
        }
    }

    /// Runs several steps that count their tests. Starts the steps in their order, and runs as many in parallel as this
    /// machine has processors.
    pub(crate) fn side_by_side<S>(&mut self, steps: Vec<(String, S)>)
    where
        S: FnOnce(&mut Counts) -> Result<bool> + Send,
    {
        let chosen: Vec<(String, S)> = steps.into_iter().filter(|(name, _)| self.is_chosen(name)).collect();
        let lanes = thread::available_parallelism().map_or(1, NonZero::get).min(chosen.len());
        let (waiting, ended) = (Mutex::new(chosen.into_iter().enumerate()), Mutex::new(BTreeMap::new()));
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        let lane = || {
            while let Some((turn, (name, step))) = next() {
                println!("\n### {name}");
                let end = End::of(step);
                ended.lock().unwrap_or_else(PoisonError::into_inner).insert(turn, (name, end));
            }
        };
        thread::scope(|scope| (0..lanes).for_each(|_| drop(scope.spawn(lane))));
        let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (name, end) in ended.into_values() {
            self.enter(name, Kind::Test, end);
        }
    }

    /// Runs several checks in parallel as [`Self::side_by_side`] does, and counts each check as one test.
    pub(crate) fn checks_side_by_side(&mut self, checks: impl IntoIterator<Item = (&'static str, fn() -> Result<()>)>) {
        self.side_by_side(checks.into_iter().map(|(name, run)| (name.to_owned(), counted(run))).collect());
    }

    fn enter(&mut self, name: String, kind: Kind, end: End) {
        if let End::Ran { took, counts: Counts { passed, failed, .. }, error } = &end {
            if let Some(error) = error {
                println!("    {error:#}");
            }
            println!("    {passed} passed, {failed} failed in {}", process::elapsed(*took));
        }
        self.steps.push(Step { name, kind, end });
    }

    /// The numbers of tests that passed and failed, summed over all steps.
    fn counts(&self) -> (u32, u32) {
        let counts = self.steps.iter().map(|step| step.end.counts());
        counts.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    }

    /// The number of tests and checks that ran, without the preparations.
    fn ran(&self) -> u32 {
        let tests = self.steps.iter().filter(|step| step.kind == Kind::Test);
        tests.map(|step| step.end.counts()).map(|(passed, failed)| passed + failed).sum()
    }

    /// Prints the summary, whose last line counts the tests. Returns an error if a step failed. `selection` is the text
    /// by which the command line selected tests. With a selection, also returns an error if no test ran.
    pub(crate) fn close(self, selection: Option<&str>) -> Result<()> {
        println!();
        self.summary().iter().for_each(|line| println!("{line}"));
        println!("total time: {}", process::elapsed(self.started.elapsed()));
        let (passed, failed) = self.counts();
        println!("{passed} passed, {failed} failed");
        self.outcome(selection)
    }

    /// Returns one line for each step, followed by one line for each step that failed or could not run, and for each
    /// failed test.
    fn summary(&self) -> Vec<String> {
        let (mut lines, mut failures) = (Vec::new(), Vec::new());
        for Step { name, end, .. } in &self.steps {
            match end {
                End::Ran { took, counts: Counts { passed, failed, failures: tests }, error } => {
                    lines.push(format!(
                        "{:>10}  {passed:>4} passed  {failed:>2} failed  {name}",
                        process::elapsed(*took)
                    ));
                    if *failed > 0 {
                        let reason = error.as_ref().map_or(String::new(), |error| format!(": {error:#}"));
                        failures.push(format!("failed: {name}{reason}"));
                        failures.extend(tests.iter().map(|test| format!("    {test}")));
                    }
                }
                End::NotRun(NotReady(missing)) => {
                    lines.push(format!("{:>10}  {:>25}  {name}", "-", "not run"));
                    failures.push(format!("not run: {name}: it needs `{missing}`, which failed"));
                }
            }
        }
        lines.append(&mut failures);
        lines
    }

    fn outcome(&self, selection: Option<&str>) -> Result<()> {
        let failed = self.steps.iter().filter(|step| step.end.counts().1 > 0).map(|step| step.name.as_str());
        let failed: Vec<&str> = failed.collect();
        match (failed.as_slice(), selection) {
            ([], Some(text)) if self.ran() == 0 => bail!("nothing ran: no test or step has `{text}` in its name"),
            ([], _) => Ok(()),
            (names, _) => bail!("failed: {}", names.join(", ")),
        }
    }
}

/// Returns a step that counts `check`, which passes or fails as a whole, as one test.
fn counted(check: impl FnOnce() -> Result<()>) -> impl FnOnce(&mut Counts) -> Result<bool> {
    move |counts| {
        check()?;
        counts.passed = 1;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::{Counts, NotReady, Tally, bail};

    fn step(passed: u32, failed: u32) -> impl FnOnce(&mut Counts) -> anyhow::Result<bool> + Send {
        move |counts| {
            *counts = Counts::new(passed, failed);
            Ok(failed == 0)
        }
    }

    #[test]
    fn a_preparation_counts_only_when_it_fails() {
        let mut tally = Tally::start(Some("else"));
        assert_eq!(tally.prepare("build", || Ok(7)), Ok(7));
        assert_eq!(tally.prepare("build", || -> anyhow::Result<()> { bail!("no") }), Err(NotReady("build")));
        assert_eq!(tally.counts(), (0, 1));
        assert_eq!(tally.ran(), 0);
    }

    #[test]
    fn a_step_that_was_not_chosen_is_left_out() {
        let mut tally = Tally::start(Some("tidy"));
        tally.check("lints", || bail!("no"));
        tally.check("tidy", || Ok(()));
        tally.not_run("the demo", NotReady("build"));
        assert_eq!(tally.counts(), (1, 0));
        assert!(tally.outcome(Some("tidy")).is_ok());
        assert_eq!(tally.summary().len(), 1);
    }

    #[test]
    fn parallel_steps_all_run_despite_a_failure() {
        let mut tally = Tally::start(Some("kernel"));
        let steps = ["kernel 1", "kernel 2", "kernel 3", "another"].map(str::to_owned);
        let all = steps.into_iter().zip([step(2, 0), step(3, 1), step(4, 0), step(5, 0)]).collect();
        tally.side_by_side(all);
        assert_eq!(tally.outcome(None).unwrap_err().to_string(), "failed: kernel 2");
        assert_eq!(tally.counts(), (9, 1));
    }

    #[test]
    fn a_failed_step_stops_no_later_step_and_all_failures_are_listed() {
        let mut tally = Tally::start(None);
        tally.check("good", || Ok(()));
        tally.check("bad", || bail!("no"));
        tally.tests("dies", |counts| {
            counts.passed = 2;
            Ok(false)
        });
        tally.tests("later", step(4, 0));
        assert_eq!(tally.counts(), (7, 2));
        assert_eq!(tally.summary()[4..], ["failed: bad: no", "failed: dies"]);
        assert_eq!(tally.outcome(None).unwrap_err().to_string(), "failed: bad, dies");
    }

    #[test]
    fn steps_whose_preparation_failed_are_listed_as_not_run() {
        let mut tally = Tally::start(None);
        let built = tally.prepare("build", || -> anyhow::Result<()> { bail!("no compiler") });
        tally.not_run("the demo", built.unwrap_err());
        tally.check("tidy", || Ok(()));
        assert_eq!(
            tally.summary()[3..],
            ["failed: build: no compiler", "not run: the demo: it needs `build`, which failed"]
        );
        assert_eq!(tally.outcome(None).unwrap_err().to_string(), "failed: build");
    }

    #[test]
    fn a_selection_that_matches_nothing_is_an_error() {
        let mut tally = Tally::start(None);
        assert!(tally.prepare("build", || Ok(())).is_ok());
        assert!(tally.outcome(None).is_ok());
        let error = tally.outcome(Some("no_such")).unwrap_err().to_string();
        assert_eq!(error, "nothing ran: no test or step has `no_such` in its name");
        tally.tests("tests: kernel", step(1, 0));
        assert!(tally.outcome(Some("no_such")).is_ok());
    }
}

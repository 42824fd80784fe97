// SPDX-License-Identifier: Apache-2.0
//! Tells stories one after the other on one world, and speaks as the usual harness does.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use npl_testkit::interrupt;

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
#[derive(Clone, Copy)]
pub(crate) struct Act {
    pub(crate) opening: &'static str,
    pub(crate) start: fn() -> World,
    pub(crate) stories: &'static [Story],
}

impl Act {
    fn play(&self, words: &[String], tally: &mut Tally) {
        let Some(mut world) = tally.tell(self.opening, self.start) else { return };
        for story in self.stories.iter().filter(|story| story.is_meant(words)) {
            let told = tally.tell(story.name, || (story.tell)(&mut world));
            if told.is_none() {
                println!("{}", world.describe());
            }
        }
        tally.tell("nothing_of_the_cluster_is_left", || world.end());
    }
}

/// Tells the stories whose names contain one of the words on the command line, or all.
pub(crate) fn run(acts: &[Act]) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let meant = |act: &Act| act.stories.iter().filter(|story| story.is_meant(&words)).count();
    let acts: Vec<&Act> = acts.iter().filter(|act| meant(act) > 0).collect();
    if std::env::args().any(|word| word == "--list") {
        for story in acts.iter().flat_map(|act| act.stories).filter(|story| story.is_meant(&words)) {
            println!("{}: test", story.name);
        }
        return ExitCode::SUCCESS;
    }
    interrupt::watch().unwrap();
    // Each begins with its cluster and ends with that.
    println!("running {} tests", acts.iter().map(|act| meant(act) + 2).sum::<usize>());
    let mut tally = Tally::default();
    for act in acts {
        act.play(&words, &mut tally);
    }
    tally.close()
}

#[derive(Default)]
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

    fn close(&self) -> ExitCode {
        let word = if self.failed == 0 { "ok" } else { "FAILED" };
        println!("\ntest result: {word}. {} passed; {} failed", self.passed, self.failed);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

// SPDX-License-Identifier: Apache-2.0
//! Reads the results that a test binary prints.

use std::fmt::{self, Display, Formatter};

/// The numbers of tests that passed and failed, and the failed tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    /// The failed tests whose output has been read.
    pub(super) failures: Vec<Failure>,
}

/// A failed test, as the test binary reports the failure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Failure {
    test: String,
    /// Two texts: the place of the panic (for a test of the real cluster: the time until the panic), and the first line
    /// of the panic's message. Each text is added when its line of the output has been read.
    panic: Vec<String>,
}

impl Display for Failure {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.test)?;
        self.panic.iter().try_for_each(|line| write!(formatter, ": {line}"))
    }
}

impl Counts {
    pub(super) fn new(passed: u32, failed: u32) -> Self {
        Self { passed, failed, failures: Vec::new() }
    }

    /// Reads a line that a test binary has printed. Four kinds of lines have an effect: the result (`test result: ok. 3
    /// passed; 0 failed; …`), the title of a failed test's output (`---- NAME stdout ----`), the place of a panic, and
    /// the line after this place.
    pub(crate) fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(test) = line.strip_prefix("---- ").and_then(|it| it.strip_suffix(" stdout ----")) {
            return self.failures.push(Failure { test: test.to_owned(), panic: Vec::new() });
        }
        // The harness of the real cluster's tests prints `test NAME ... FAILED (3.1 s)`, and the panic's message in the
        // line after it.
        if let Some((test, time)) = line.strip_prefix("test ").and_then(|it| it.split_once(" ... FAILED (")) {
            let time = time.trim_end_matches(')').to_owned();
            return self.failures.push(Failure { test: test.to_owned(), panic: vec![time] });
        }
        match self.failures.last_mut().map(|it| &mut it.panic) {
            Some(panic) if panic.is_empty() => {
                let place = line.split_once(" panicked at ").map(|(_, place)| place.trim_end_matches(':'));
                panic.extend(place.map(str::to_owned));
            }
            Some(panic) if panic.len() == 1 => panic.push(line.to_owned()),
            _ => {}
        }
        let Some((_, result)) = line.split_once("test result: ") else { return };
        let number = |name: &str| {
            let before = result.split_once(name)?.0.trim_end();
            before.rsplit(' ').next()?.parse::<u32>().ok()
        };
        self.passed += number("passed").unwrap_or(0);
        self.failed += number("failed").unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::Counts;

    #[test]
    fn a_test_binary_reports_its_numbers() {
        let mut counts = Counts::default();
        counts.read("running 3 tests");
        counts.read("test result: ok. 17 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.10s");
        counts.read("test result: FAILED. 5 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(counts, Counts::new(22, 1));
    }

    #[test]
    fn a_failed_test_is_listed_with_the_place_and_the_first_line_of_its_panic() {
        let output = "test flows::fine ... ok\ntest flows::broken ... FAILED\n\nfailures:\n\n---- flows::broken stdout ----\n\n\
            thread 'flows::broken' (7) panicked at tests/flows.rs:24:9:\nno reply\nnote: more\n\
            ---- flows::silent stdout ----\n\nfailures:\n    flows::broken\n    flows::silent\n\n\
            test result: FAILED. 1 passed; 2 failed; 0 ignored\n";
        assert_eq!(failures(output), ["flows::broken: tests/flows.rs:24:9: no reply", "flows::silent"]);
    }

    #[test]
    fn a_failed_test_of_the_real_cluster_is_listed_with_its_message() {
        let output = "test drained ... ok (1.0 s)\ntest scaled ... FAILED (3.1 s)\n    2 of 80 requests were lost\n\n\
            test result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(failures(output), ["scaled: 3.1 s: 2 of 80 requests were lost"]);
    }

    fn failures(output: &str) -> Vec<String> {
        let mut counts = Counts::default();
        output.lines().for_each(|line| counts.read(line));
        counts.failures.iter().map(ToString::to_string).collect()
    }
}

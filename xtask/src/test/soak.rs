// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test --soak DURATION`: the agent's soak test for a longer time than in a run of all tests.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// The prefix of the name of the soak test.
pub(super) const TESTS: &str = "soak::";

/// The environment variable with the duration of the soak test in seconds.
const VARIABLE: &str = "NPL_SOAK";

/// The longest duration. A test binary is killed after 12 hours.
const LONGEST: Duration = Duration::from_hours(11);

/// Parses a duration: a whole number with the unit `h`, `m` or `s`.
pub(crate) fn parse(text: &str) -> Result<Duration> {
    let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let seconds = match text.strip_prefix(number) {
        Some("h") => 3600,
        Some("m") => 60,
        Some("s") => 1,
        _ => bail!("`{text}` has no unit: write for example 2h, 30m or 90s"),
    };
    let count: u32 = number.parse().with_context(|| format!("`{number}` is not a whole number"))?;
    let duration = Duration::from_secs(u64::from(count) * seconds);
    ensure!(!duration.is_zero() && duration <= LONGEST, "the duration must be from 1s to 11h");
    Ok(duration)
}

/// Passes the duration to a test binary.
pub(super) fn pass_to(command: &mut Command, duration: Duration) {
    command.env(VARIABLE, duration.as_secs().to_string());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::parse as parse_line;
    use super::parse;

    #[test]
    fn durations_are_whole_numbers_with_a_unit() {
        for (text, seconds) in [("2h", 7200), ("30m", 1800), ("90s", 90), ("11h", 39_600)] {
            assert_eq!(parse(text).unwrap(), Duration::from_secs(seconds), "{text}");
        }
        for text in ["", "2", "h", "1.5h", "2d", "-1s", "0s", "12h", "1h30m", "2 h"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_soak_runs_only_the_soak_test() {
        let options = parse_line("--soak 2h").unwrap();
        assert_eq!(options.filter(), Some("soak::"));
        assert!(options.is_on_host());
        assert!(parse_line("--soak 2h --filter sctp").is_err());
        assert!(parse_line("--soak forever").is_err());
    }
}

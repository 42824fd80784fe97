// SPDX-License-Identifier: Apache-2.0
//! Limits log lines of each kind to one per minute, and counts the suppressed lines.

use std::collections::BTreeMap;

use super::Moment;

/// The shortest time in milliseconds between two log lines of the same kind.
const INTERVAL: u64 = 60_000;

/// For each kind of log line: when a line was logged last, and how many lines were suppressed since.
#[derive(Debug, Clone)]
pub struct Throttles<K> {
    last: BTreeMap<K, (Moment, u64)>,
}

impl<K> Default for Throttles<K> {
    fn default() -> Self {
        Self { last: BTreeMap::new() }
    }
}

impl<K: Ord> Throttles<K> {
    /// Asks whether a line of this kind may be logged. Returns the number of lines of this kind that were suppressed
    /// since the last logged line; `None` if the last line was logged less than a minute ago.
    pub fn acquire(&mut self, kind: K, now: Moment) -> Option<u64> {
        match self.last.get_mut(&kind) {
            Some((at, left_out)) if now < at.plus(INTERVAL) => {
                *left_out += 1;
                None
            }
            former => {
                let left_out = former.map_or(0, |(_, left_out)| *left_out);
                self.last.insert(kind, (now, 0));
                Some(left_out)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{INTERVAL, Moment, Throttles};

    #[test]
    fn a_kind_is_logged_once_per_minute_with_the_number_of_lines_left_out() {
        let mut throttles = Throttles::default();
        assert_eq!(throttles.acquire("patch", Moment(0)), Some(0));
        assert_eq!(throttles.acquire("reserve", Moment(1)), Some(0), "each kind has its own limit");
        for at in [1, INTERVAL - 1] {
            assert_eq!(throttles.acquire("patch", Moment(at)), None);
        }
        assert_eq!(throttles.acquire("patch", Moment(INTERVAL)), Some(2));
        assert_eq!(throttles.acquire("patch", Moment(2 * INTERVAL)), Some(0));
    }
}

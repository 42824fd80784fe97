// SPDX-License-Identifier: Apache-2.0
//! How long to wait before the API server is asked again, and how often to speak of it.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use kube::runtime::utils::Backoff;
use tokio::time::Instant;

const FIRST: Duration = Duration::from_millis(500);
/// Kept low, since nothing is published while the agent waits; a hundred Nodes then ask about fifteen times a second.
const LONGEST: Duration = Duration::from_secs(10);
/// A success sooner than this after a wait does not start the delays over: a watch that begins well and breaks at
/// once, again and again, is not a working one.
const STABLE_AFTER: Duration = Duration::from_secs(30);
const QUIET: Duration = Duration::from_mins(1);

/// Delays that double, each with a random half, so that Nodes which lost the API server together return one by one.
#[derive(Debug)]
pub struct Jittered {
    ceiling: Duration,
    last_wait: Option<Instant>,
}

impl Jittered {
    /// Starts with the shortest delay.
    pub const fn new() -> Self {
        Self { ceiling: FIRST, last_wait: None }
    }

    /// The next delay, with this much of its random half.
    fn next_with(&mut self, fraction: Fraction) -> Duration {
        let half = self.ceiling / 2;
        self.ceiling = (self.ceiling * 2).min(LONGEST);
        self.last_wait = Some(Instant::now());
        half + fraction.of(half)
    }
}

impl Default for Jittered {
    fn default() -> Self {
        Self::new()
    }
}

impl Iterator for Jittered {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.next_with(Fraction::random()))
    }
}

impl Backoff for Jittered {
    fn reset(&mut self) {
        if self.last_wait.is_some_and(|at| at.elapsed() >= STABLE_AFTER) {
            *self = Self::new();
        }
    }
}

/// Between nothing and the whole.
pub(crate) fn random_part_of(whole: Duration) -> Duration {
    Fraction::random().of(whole)
}

/// So many of 1024 parts.
#[derive(Clone, Copy, Debug)]
struct Fraction(u32);

impl Fraction {
    const PARTS: u32 = 1024;

    /// From the seed that the standard library draws for each hash table.
    fn random() -> Self {
        Self::from_seed(RandomState::new().hash_one(()))
    }

    fn from_seed(seed: u64) -> Self {
        Self(u32::try_from(seed % u64::from(Self::PARTS)).unwrap_or_default())
    }

    fn of(self, whole: Duration) -> Duration {
        whole * self.0 / Self::PARTS
    }
}

/// Lets one line a minute through.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
}

impl Throttle {
    /// Whether to speak now.
    pub fn allows(&mut self) -> bool {
        let now = Instant::now();
        let allowed = self.last.is_none_or(|last| now.duration_since(last) >= QUIET);
        if allowed {
            self.last = Some(now);
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest_and_stay_in_their_upper_half() {
        let ceilings = [500, 1000, 2000, 4000, 8000, 10_000, 10_000];
        for (delay, ceiling) in Jittered::new().zip(ceilings.map(Duration::from_millis)) {
            assert!(delay >= ceiling / 2 && delay <= ceiling, "{delay:?} of {ceiling:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_success_right_after_a_wait_does_not_start_over() {
        let mut delays = Jittered::new();
        assert!(delays.by_ref().take(4).count() == 4);
        delays.reset();
        assert!(delays.next() >= Some(Duration::from_secs(4)));
        tokio::time::advance(STABLE_AFTER).await;
        delays.reset();
        assert!(delays.next() <= Some(FIRST));
    }

    /// Evenly distributed and the same in every run: the highest bits of Knuth's linear congruential generator.
    fn fractions() -> impl Iterator<Item = Fraction> {
        let next = |seed: u64| seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::iter::successors(Some(0), move |seed| Some(next(*seed))).map(|seed| Fraction::from_seed(seed >> 54))
    }

    /// A model: three watches each, which lose the API server in the same moment and ask again until it is back. What is
    /// modelled is the time between questions and nothing else; the bench restarts a hundred real agents.
    #[test]
    fn a_hundred_nodes_that_lose_the_api_server_together_do_not_return_together() {
        const WATCHES: usize = 300;
        let away = Duration::from_mins(1);
        let mut by_half_second = [0; 240];
        let mut first_of_return = Vec::new();
        let mut fractions = fractions();
        for _ in 0..WATCHES {
            let mut at = Duration::ZERO;
            let mut delays = Jittered::new();
            while at < away {
                at += delays.next_with(fractions.next().unwrap());
                by_half_second[usize::try_from(at.as_millis() / 500).unwrap()] += 1;
            }
            first_of_return.push(at);
        }
        let asked: usize = by_half_second.iter().sum();
        assert!(asked < WATCHES * 15, "{asked} questions within a minute");
        let busiest = by_half_second[20..].iter().max().unwrap();
        // In step, all of them would be one question.
        assert!(*busiest <= WATCHES / 6, "{busiest} of {WATCHES} within half a second");
        let latest = first_of_return.iter().max().unwrap();
        assert!(*latest <= away + LONGEST, "back {latest:?} after the API server went");
    }

    #[tokio::test(start_paused = true)]
    async fn one_line_a_minute() {
        let mut throttle = Throttle::default();
        assert!(throttle.allows());
        assert!(!throttle.allows());
        tokio::time::advance(QUIET).await;
        assert!(throttle.allows());
    }
}

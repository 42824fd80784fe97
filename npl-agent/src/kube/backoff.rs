// SPDX-License-Identifier: Apache-2.0
//! The back-off of requests to the API server, and the limit of log lines about it.

use std::time::Duration;

use backon::ExponentialBuilder;
use kube::runtime::{
    utils::{Backoff, ResetTimerBackoff},
    watcher::ExponentialBackoff,
};
use tokio::time::Instant;

/// The upper bound of the first delay.
const FIRST: Duration = Duration::from_millis(500);
/// Low, since the agent publishes nothing during a delay; a hundred Nodes then send about fifteen requests a second.
const LONGEST: Duration = Duration::from_secs(10);
/// Above the time of one delay and one request that times out, so that failures alone never shorten the delays.
const STABLE_AFTER: Duration = Duration::from_mins(1);
const QUIET: Duration = Duration::from_mins(1);

/// Delays that double and have a random half, so that Nodes that lost the API server together do not return together. They start
/// over with the first failure after [`STABLE_AFTER`].
pub(super) struct Jittered(ResetTimerBackoff<ExponentialBackoff>);

impl Jittered {
    pub(super) fn new() -> Self {
        Self::from(builder())
    }
}

impl From<ExponentialBuilder> for Jittered {
    fn from(builder: ExponentialBuilder) -> Self {
        Self(ResetTimerBackoff::new(builder.into(), STABLE_AFTER))
    }
}

/// Half of the bounds: backon adds a random part of at most the delay itself.
fn builder() -> ExponentialBuilder {
    ExponentialBuilder::new().with_min_delay(FIRST / 2).with_max_delay(LONGEST / 2).without_max_times().with_jitter()
}

impl Iterator for Jittered {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl Backoff for Jittered {
    /// Only time resets the delays. kube resets at each event, and a watcher's first event precedes its first request: the delays
    /// would never grow while the API server is down.
    fn reset(&mut self) {}
}

/// Allows one log line per minute.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
}

impl Throttle {
    /// Whether to log now; counts as a line if so.
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
        tokio::time::advance(STABLE_AFTER + Duration::from_millis(1)).await;
        delays.reset();
        assert!(delays.next() <= Some(FIRST));
    }

    /// A model of a hundred Nodes with three watches each, which lose the API server at the same moment and retry until it returns.
    /// Only the delays are modeled; the bench restarts a hundred real agents. The seeds make each run the same.
    #[test]
    fn a_hundred_nodes_that_lose_the_api_server_together_do_not_return_together() {
        const WATCHES: u64 = 300;
        let away = Duration::from_mins(1);
        let mut by_half_second = [0_u64; 240];
        let mut first_of_return = Vec::new();
        for seed in 0..WATCHES {
            let mut at = Duration::ZERO;
            let mut delays = Jittered::from(builder().with_jitter_seed(seed));
            while at < away {
                at += delays.next().unwrap();
                by_half_second[usize::try_from(at.as_millis() / 500).unwrap()] += 1;
            }
            first_of_return.push(at);
        }
        let asked: u64 = by_half_second.iter().sum();
        assert!(asked < WATCHES * 15, "{asked} requests within a minute");
        let busiest = by_half_second[20..].iter().max().unwrap();
        // Without the random half, all of the watches would retry within the same half second.
        assert!(*busiest <= WATCHES / 6, "{busiest} of {WATCHES} within half a second");
        let latest = first_of_return.iter().max().unwrap();
        assert!(*latest <= away + LONGEST, "the last watch retries {latest:?} after the API server went");
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

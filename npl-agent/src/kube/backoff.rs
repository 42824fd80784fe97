// SPDX-License-Identifier: Apache-2.0
//! The delays between retries of failed requests to the API server, and the rate limit of log lines about failed
//! requests.

use std::time::Duration;

use backon::ExponentialBuilder;
use kube::runtime::{utils::Backoff as _, watcher::ExponentialBackoff};
use tokio::time::Instant;

/// The first delay between retries is at most this long.
const FIRST: Duration = Duration::from_millis(500);
/// The longest delay between retries, unless the API server requires a longer delay by `Retry-After`. The limit is low,
/// because the agent receives no changes during a delay. With this limit, a hundred Nodes with three watches each send
/// only about forty requests per second.
const LONGEST: Duration = Duration::from_secs(10);
/// The shortest time between two log lines about failed requests.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Delays between retries, each twice as long as the previous one. A delay consists of a fixed half and a random time
/// of up to the same length. Without the random part, Nodes that lost the API server at the same time would also
/// reconnect at the same time.
///
/// Only [`Self::reset`] makes the delays short again. Time alone does not, because a request may wait for its answer
/// much longer than the longest delay.
pub(super) struct Jittered(ExponentialBackoff);

impl Jittered {
    pub(super) fn new() -> Self {
        Self::from(builder())
    }

    /// Makes the next delay as short as the first one.
    pub(super) fn reset(&mut self) {
        self.0.reset();
    }
}

impl From<ExponentialBuilder> for Jittered {
    fn from(builder: ExponentialBuilder) -> Self {
        Self(builder.into())
    }
}

/// Halves the limits, because the library backon adds to each delay a random time of up to the delay's length.
fn builder() -> ExponentialBuilder {
    ExponentialBuilder::new().with_min_delay(FIRST / 2).with_max_delay(LONGEST / 2).without_max_times().with_jitter()
}

impl Iterator for Jittered {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

/// Limits log lines to one per minute.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
}

impl Throttle {
    /// Returns true, at most once per minute, if the caller may log now.
    pub fn acquire(&mut self) -> bool {
        let now = Instant::now();
        let is_allowed = self.last.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL);
        if is_allowed {
            self.last = Some(now);
        }
        is_allowed
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
    async fn only_a_reset_makes_the_delays_short_again() {
        let mut delays = Jittered::new();
        assert!(delays.by_ref().take(4).count() == 4);
        assert!(delays.next() >= Some(Duration::from_secs(4)));
        tokio::time::advance(Duration::from_hours(1)).await;
        assert!(delays.next() >= Some(LONGEST / 2));
        delays.reset();
        assert!(delays.next() <= Some(FIRST));
    }

    /// Simulates the delays of a hundred Nodes with three watches each: all watches lose the API server at the same
    /// moment, and retry until the API server is back. Fixed seeds make the test repeatable. (`cargo xtask bench`
    /// restarts a hundred real agents.)
    #[test]
    fn a_hundred_nodes_that_lose_the_api_server_together_reconnect_spread_out() {
        const WATCHES: u64 = 300;
        let outage = Duration::from_mins(1);
        let mut by_half_second = [0_u64; 240];
        let mut first_after_outage = Vec::new();
        for seed in 0..WATCHES {
            let mut at = Duration::ZERO;
            let mut delays = Jittered::from(builder().with_jitter_seed(seed));
            while at < outage {
                at += delays.next().unwrap();
                by_half_second[usize::try_from(at.as_millis() / 500).unwrap()] += 1;
            }
            first_after_outage.push(at);
        }
        let requests: u64 = by_half_second.iter().sum();
        assert!(requests < WATCHES * 15, "{requests} requests within a minute");
        let busiest = by_half_second[20..].iter().max().unwrap();
        // Without the random part of the delays, all watches would retry within the same half second.
        assert!(*busiest <= WATCHES / 6, "{busiest} of {WATCHES} watches retry within half a second");
        let latest = first_after_outage.iter().max().unwrap();
        assert!(*latest <= outage + LONGEST, "the last watch retries {latest:?} after the start of the outage");
    }

    #[tokio::test(start_paused = true)]
    async fn a_throttle_allows_one_line_per_minute() {
        let mut throttle = Throttle::default();
        assert!(throttle.acquire());
        assert!(!throttle.acquire());
        tokio::time::advance(LOG_INTERVAL).await;
        assert!(throttle.acquire());
    }
}

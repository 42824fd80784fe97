// SPDX-License-Identifier: Apache-2.0
//! The rate limit of writes to the API server.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// A token bucket, which admits a burst of requests immediately, and then one request in each interval, in the order of
/// the calls.
///
/// The bucket stores only the time at which it will be full again. The time at which the next token is available is
/// computed from this time.
#[derive(Debug)]
pub(super) struct RateLimit {
    interval: Duration,
    /// The time in which the empty token bucket becomes full.
    depth: Duration,
    full_at: Mutex<Instant>,
}

impl RateLimit {
    /// Creates a full bucket of `burst` tokens that gains `per_second` tokens in each second.
    pub(super) fn new(burst: u32, per_second: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second;
        Self { interval, depth: interval * burst, full_at: Mutex::new(Instant::now()) }
    }

    /// Waits until a token is available, and consumes the token.
    pub(super) async fn admit(&self) {
        sleep_until(self.take_token()).await;
    }

    fn take_token(&self) -> Instant {
        let now = Instant::now();
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        *full_at = (*full_at).max(now) + self.interval;
        full_at.checked_sub(self.depth).unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::RateLimit;

    async fn seconds_for(limit: &RateLimit, requests: u32) -> f64 {
        let started = Instant::now();
        for _ in 0..requests {
            limit.admit().await;
        }
        started.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_admitted_at_once_and_later_requests_at_the_rate() {
        let limit = RateLimit::new(1000, 200);
        assert!(seconds_for(&limit, 1000).await < 0.01);
        let took = seconds_for(&limit, 400).await;
        assert!((1.9..2.1).contains(&took), "{took}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_fills_the_bucket_up_to_its_burst() {
        let limit = RateLimit::new(100, 100);
        assert!(seconds_for(&limit, 100).await < 0.01);
        tokio::time::advance(Duration::from_hours(1)).await;
        assert!(seconds_for(&limit, 100).await < 0.01);
        let took = seconds_for(&limit, 50).await;
        assert!((0.4..0.6).contains(&took), "{took}");
    }
}

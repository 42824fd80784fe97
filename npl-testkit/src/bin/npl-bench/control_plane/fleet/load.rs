// SPDX-License-Identifier: Apache-2.0
//! Measures the load of the API server while a function runs, from the API server's own metrics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use npl_testkit::api_client::ApiClient;
use npl_testkit::process::joined;

use super::super::requests::{Requests, sum_of};

/// The interval between two reads of the metrics: short enough to find the busiest second, and long enough not to load
/// the API server.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
const SECOND: Duration = Duration::from_secs(1);

/// The observed load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// The agents' requests in the busiest second, including watches.
    pub(super) busiest_second: f64,
    /// The largest number of concurrent requests of all clients, without watches. Each read of the API server's metric
    /// returns the maximum of the last second.
    pub(super) most_at_once: u64,
}

/// One read of the metrics.
#[derive(Clone, Copy, Debug)]
struct Look {
    after: Duration,
    requests: u64,
    at_once: u64,
}

/// Observes the API server while `work` runs.
pub(super) fn observe<T>(client: &ApiClient, work: impl FnOnce() -> Result<T>) -> Result<(T, Load)> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let observer = scope.spawn(|| look_until(client, &is_over));
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        let looks = joined(observer)?;
        let most_at_once = looks.iter().map(|look| look.at_once).max().unwrap_or_default();
        Ok((result?, Load { busiest_second: busiest_second(&looks), most_at_once }))
    })
}

fn look_until(client: &ApiClient, is_over: &AtomicBool) -> Result<Vec<Look>> {
    let began = Instant::now();
    let mut looks = Vec::new();
    loop {
        let is_last = is_over.load(Ordering::Relaxed);
        let metrics = client.text("/metrics")?;
        let requests = Requests::in_metrics(&metrics)?.all();
        let at_once = sum_of(&metrics, "apiserver_current_inflight_requests", "")?;
        looks.push(Look { after: began.elapsed(), requests, at_once });
        if is_last {
            return Ok(looks);
        }
        thread::sleep(BETWEEN_LOOKS);
    }
}

/// Returns the largest rate between two reads that are at least one second apart, in requests per second.
fn busiest_second(looks: &[Look]) -> f64 {
    let rate = |first: &Look| {
        let last = looks.iter().find(|look| look.after >= first.after + SECOND)?;
        let count = u32::try_from(last.requests - first.requests).ok()?;
        Some(f64::from(count) / last.after.saturating_sub(first.after).as_secs_f64())
    };
    looks.iter().filter_map(rate).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(milliseconds: u64, requests: u64) -> Look {
        Look { after: Duration::from_millis(milliseconds), requests, at_once: 0 }
    }

    #[test]
    fn the_busiest_second_is_found_wherever_it_begins() {
        let looks = [look(0, 0), look(500, 10), look(1000, 110), look(1500, 210), look(2500, 220)];
        assert!((busiest_second(&looks) - 200.0).abs() < f64::EPSILON);
    }

    #[test]
    fn reads_within_less_than_a_second_give_no_rate() {
        assert!(busiest_second(&[look(0, 0), look(900, 1000)]).abs() < f64::EPSILON);
    }
}

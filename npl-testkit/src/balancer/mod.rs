// SPDX-License-Identifier: Apache-2.0
//! An external load balancer like those that consumers of the annotation configure. The balancer watches Pods, sends
//! requests to the node ports of ready, non-terminating Pods, and never retries a request.
//!
//! Requests are sent at a constant rate, round-robin over all members, each from a new socket. A response is correct
//! only if the Pod whose annotation names the member has sent the response, and if this Pod has observed the balancer's
//! address.

mod members;
mod pool;
mod report;
mod request;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

pub use self::members::{Member, Port};
use self::pool::Pool;
pub use self::report::{Failure, Kind, Report};
use crate::api_client::ApiClient;
use crate::netns::Netns;
use crate::poll;

/// The maximum number of concurrent requests, large enough that slow requests hardly lower the rate.
const WORKERS: u32 = 32;

/// The configuration of a balancer.
#[derive(Clone, Debug)]
pub struct Options {
    /// The namespace of the Pods.
    pub namespace: String,
    /// The target ports, one pool each.
    pub ports: Vec<Port>,
    /// The number of requests per second. If the machine is too slow for this rate, the balancer sends fewer requests.
    pub rate: u32,
    /// The time from a change at the API server until the balancer uses the changed members.
    pub delay: Duration,
    /// The balancer's own addresses. A response is wrong if the Pod observed another client address.
    pub addresses: Vec<IpAddr>,
}

/// A running balancer. Dropping this value stops the balancer.
#[derive(Debug)]
pub struct Balancer {
    pool: Arc<Pool>,
    turn: Arc<AtomicU64>,
    netns: Netns,
    resent_before: u64,
    start: Instant,
    stops: Vec<mpsc::Sender<()>>,
    workers: Vec<JoinHandle<Report>>,
}

impl Balancer {
    /// Starts the watch, and sends requests from `netns` once there is a member.
    pub fn start(client: &ApiClient, netns: &Netns, options: &Options) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.delay));
        members::follow(client, &options.namespace, &options.ports, &pool)?;
        let resent_before = request::resent_segments(netns)?;
        let (turn, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let (stops, workers) = (Vec::new(), Vec::new());
        let mut balancer = Self { pool, turn, netns: netns.clone(), resent_before, start, stops, workers };
        for number in 0..WORKERS {
            let (stop, stopped) = mpsc::channel();
            let interval = Duration::from_secs(1) * WORKERS / options.rate.max(1);
            let worker = Worker {
                pool: Arc::clone(&balancer.pool),
                turn: Arc::clone(&balancer.turn),
                addresses: options.addresses.clone(),
                start: start + interval * number / WORKERS,
                interval,
                stopped,
            };
            balancer.stops.push(stop);
            // The worker inherits the network namespace of the thread that starts it, so the worker sends from `netns`.
            balancer.workers.push(netns.run(move || thread::spawn(move || worker.work()))?);
        }
        Ok(balancer)
    }

    /// The current members.
    pub fn members(&self) -> Arc<[Member]> {
        self.pool.members_at(Instant::now())
    }

    /// Waits until the balancer has sent a request to every current member.
    pub fn wait_for_a_round(&self, limit: Duration) -> Result<()> {
        let goal = self.turn.load(Ordering::Relaxed) + self.members().len() as u64 + u64::from(WORKERS);
        let is_reached = || (self.turn.load(Ordering::Relaxed) >= goal).then_some(());
        poll::until("a request to every member", limit, is_reached).map(drop)
    }

    /// Waits for the requests in progress, stops the balancer, and returns the results.
    pub fn stop(mut self) -> Result<Report> {
        self.stops.clear();
        let mut report = Report::default();
        for worker in self.workers.drain(..) {
            report.add(worker.join().map_err(|_panic| anyhow!("a worker of the balancer panicked"))?);
        }
        report.took = self.start.elapsed();
        let resent = request::resent_segments(&self.netns).context("read the number of retransmitted segments")?;
        report.resent = resent.saturating_sub(self.resent_before);
        Ok(report)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.pool.close();
        self.stops.clear();
        for worker in self.workers.drain(..) {
            // A worker that panicked has already printed its message, so the error is ignored.
            drop(worker.join());
        }
    }
}

/// One of the threads that send the requests. Each thread sends the same number of requests per second.
struct Worker {
    pool: Arc<Pool>,
    turn: Arc<AtomicU64>,
    addresses: Vec<IpAddr>,
    start: Instant,
    interval: Duration,
    stopped: mpsc::Receiver<()>,
}

impl Worker {
    fn work(&self) -> Report {
        let mut report = Report::default();
        let mut due = self.start;
        loop {
            match self.stopped.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return report,
            }
            // A late worker sends no additional requests to catch up, because the additional requests would take
            // processor time from a cluster that is already slow.
            due = (due + self.interval).max(Instant::now());
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            let asked = Instant::now();
            let members = self.pool.members_at(asked);
            let chosen = usize::try_from(turn).ok().and_then(|turn| members.get(turn.checked_rem(members.len())?));
            match chosen {
                Some(member) => {
                    let outcome = request::ask(member, &self.addresses, &format!("request {turn}"));
                    report.record(member, outcome, asked - self.start, asked.elapsed());
                }
                None => report.unserved += 1,
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Sends requests at a constant rate, to detect lost requests during changes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{LOAD_LIMIT, has_lost_segments, open_sctp, open_tcp, open_udp, request_limit, tcp_ask, udp_ask_within};
use crate::echo::{Answer, Protocol};
use crate::netns::Netns;
use crate::poll;

/// The maximum number of concurrent requests: more than one, so that one slow request hardly lowers the rate.
const WORKERS: u32 = 4;

/// One request of a load, with the expected response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub protocol: Protocol,
    /// The destination.
    pub server: SocketAddr,
    /// The Pod that must respond.
    pub pod: String,
    /// The client address that the Pod must observe.
    pub client: IpAddr,
}

/// A request that did not receive the expected response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The time of the request, since the start of the load.
    pub at: Duration,
    pub request: Request,
    pub error: String,
}

/// The results of the requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number of correct responses by Pod and protocol.
    pub answered: BTreeMap<(String, Protocol), u64>,
    /// All failed requests.
    pub failures: Vec<Failure>,
    /// The longest response time of a correct response.
    pub slowest: Duration,
}

impl Report {
    /// The number of correct responses.
    pub fn total(&self) -> u64 {
        self.answered.values().sum()
    }
}

/// A running load, which stops when this value is dropped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    stops: Vec<mpsc::Sender<()>>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    from: Netns,
    start: Instant,
    turn: AtomicUsize,
    requests: RwLock<Vec<Request>>,
    report: Mutex<Report>,
}

impl Load {
    /// Starts a load that sends at most `per_second` requests per second from `from`, round-robin over `requests`.
    pub fn start(from: &Netns, per_second: u32, requests: Vec<Request>) -> Self {
        let start = Instant::now();
        let (requests, report) = (RwLock::new(requests), Mutex::default());
        let shared = Arc::new(Shared { from: from.clone(), start, turn: AtomicUsize::new(0), requests, report });
        let interval = Duration::from_secs(1) * WORKERS / per_second.max(1);
        let mut load = Self { shared, stops: Vec::new(), workers: Vec::new() };
        for worker in 0..WORKERS {
            let (stop, stopped) = mpsc::channel();
            let shared = Arc::clone(&load.shared);
            load.stops.push(stop);
            load.workers.push(thread::spawn(move || work(&shared, worker, interval, &stopped)));
        }
        load
    }

    /// Replaces the list of requests. When this function returns, no request of the old list is in progress.
    pub fn replace(&self, requests: Vec<Request>) {
        *self.shared.requests.write().unwrap_or_else(PoisonError::into_inner) = requests;
    }

    /// The results so far.
    pub fn report(&self) -> Report {
        self.shared.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for `more` further responses, or for a failure.
    ///
    /// # Errors
    ///
    /// Returns an error if neither a failure nor enough responses arrive within `limit`.
    pub fn wait_for_answers(&self, more: u64, limit: Duration) -> Result<()> {
        let before = self.report().total();
        let enough = || {
            let report = self.report();
            (report.total() >= before + more || !report.failures.is_empty()).then_some(())
        };
        poll::until(&format!("{more} responses"), limit, enough).map(drop)
    }

    /// Waits for the requests in progress, stops the load, and returns the results.
    pub fn stop(mut self) -> Report {
        self.join();
        self.report()
    }

    fn join(&mut self) {
        self.stops.clear();
        for worker in self.workers.drain(..) {
            // A worker that panicked has already printed its message, so the error is ignored.
            drop(worker.join());
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.join();
    }
}

fn work(shared: &Shared, worker: u32, interval: Duration, stopped: &mpsc::Receiver<()>) {
    let mut due = interval * worker / WORKERS;
    loop {
        let wait = due.saturating_sub(shared.start.elapsed());
        match stopped.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
        // A late worker sends no additional requests to catch up, because such requests would delay the tested programs
        // further on a slow machine.
        due = (due + interval).max(shared.start.elapsed());
        // The lock is held during the request, because `replace` waits for this lock until no request of the old list
        // is in progress.
        let requests = shared.requests.read().unwrap_or_else(PoisonError::into_inner);
        let turn = shared.turn.fetch_add(1, Ordering::Relaxed);
        let Some(chosen) = turn.checked_rem(requests.len()).and_then(|at| requests.get(at)) else { continue };
        let at = shared.start.elapsed();
        let outcome = check(&shared.from, chosen, &format!("request {turn}"));
        let took = shared.start.elapsed().saturating_sub(at);
        let mut report = shared.report.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(()) => {
                *report.answered.entry((chosen.pod.clone(), chosen.protocol)).or_default() += 1;
                report.slowest = report.slowest.max(took);
            }
            Err(err) => report.failures.push(Failure { at, request: chosen.clone(), error: format!("{err:#}") }),
        }
    }
}

/// Sends one request. A late response alone is no failure, because the machine may be slow. A response after the time
/// limit of a single request is a failure if a packet was lost.
fn ask(wanted: &Request, question: &str) -> Result<Answer> {
    let (start, limit) = (Instant::now(), poll::extended(LOAD_LIMIT));
    let stream = match wanted.protocol {
        Protocol::Tcp => open_tcp(wanted.server, limit)?,
        Protocol::Sctp => open_sctp(wanted.server, limit)?,
        Protocol::Udp => {
            return udp_ask_within(&open_udp(wanted.server, true).context("open a UDP socket")?, question, limit);
        }
    };
    let answer = tcp_ask(&stream, question)?;
    let is_late = start.elapsed() >= request_limit();
    // The number of retransmitted SCTP chunks is unknown here, so every late response counts as lost.
    let is_lost = is_late && (wanted.protocol == Protocol::Sctp || has_lost_segments(&stream)?);
    ensure!(!is_lost, "a packet was lost, and the response arrived only after {:?}", start.elapsed());
    Ok(answer)
}

fn check(from: &Netns, wanted: &Request, question: &str) -> Result<()> {
    let answer = from.run(|| ask(wanted, question))?.with_context(|| {
        format!("send a request from {} to {} over {}", from.name(), wanted.server, wanted.protocol)
    })?;
    ensure!(answer.pod == wanted.pod, "{} responded instead of {}", answer.pod, wanted.pod);
    let seen = answer.client.ip();
    ensure!(seen == wanted.client, "{} observed the client address {seen} instead of {}", answer.pod, wanted.client);
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! Clients of one load balancer, which send requests at a constant rate and record the answers.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use npl_testkit::load_balancers;
use npl_testkit::netns::Netns;

/// The number of clients of a load balancer. With several clients, one slow request lowers the rate of requests only
/// slightly.
pub(crate) const CLIENTS: u32 = 4;

/// Requests per second of all clients of a load balancer.
const RATE: u32 = 80;

/// The results of the requests during one event, such as a rollout.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The number of answers by Pod.
    pub(crate) answers: BTreeMap<String, u64>,
    /// Requests without an answer of a Pod: time since the event's start, and reason.
    pub(crate) lost: Vec<(Duration, String)>,
    slowest: Duration,
}

impl Seen {
    pub(crate) fn requests(&self) -> u64 {
        self.answers.values().sum::<u64>() + self.lost.len() as u64
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (requests, lost, pods) = (self.requests(), self.lost.len(), self.answers.len());
        write!(f, "{requests} requests to {pods} Pods, {lost} lost, at most {} ms", self.slowest.as_millis())
    }
}

/// Running clients. When this value is dropped, the clients end after the request in progress.
pub(crate) struct Load {
    shared: Arc<Mutex<(Instant, Seen)>>,
    stops: Vec<mpsc::Sender<()>>,
    workers: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts clients in the namespace of the load balancer, which listens on this port of the loopback device. Pods
    /// must observe the address `client`.
    pub(crate) fn start(netns: &Netns, port: u16, client: Ipv4Addr) -> Self {
        let shared = Arc::new(Mutex::new((Instant::now(), Seen::default())));
        let mut load = Self { shared: Arc::clone(&shared), stops: Vec::new(), workers: Vec::new() };
        for number in 0..CLIENTS {
            let (stop, stopped) = mpsc::channel();
            let (shared, interval) = (Arc::clone(&shared), Duration::from_secs(1) * CLIENTS / RATE);
            let first = Instant::now() + interval * number / CLIENTS;
            load.stops.push(stop);
            // The client inherits the network namespace of the thread that starts it, and so sends from `netns`.
            let spawn = move || thread::spawn(move || work(&shared, port, client, first, interval, &stopped));
            load.workers.push(netns.run(spawn).unwrap());
        }
        load
    }

    /// The requests since the last call of [`Self::take`].
    pub(crate) fn seen(&self) -> Seen {
        self.shared.lock().unwrap().1.clone()
    }

    /// Returns the requests since the last call of this function, and clears the record.
    pub(crate) fn take(&self) -> Seen {
        let (_start, seen) = std::mem::replace(&mut *self.shared.lock().unwrap(), (Instant::now(), Seen::default()));
        seen
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stops.clear();
        for worker in self.workers.drain(..) {
            // A worker that panicked has already printed its message, so the error is ignored.
            drop(worker.join());
        }
    }
}

fn work(
    shared: &Mutex<(Instant, Seen)>,
    port: u16,
    client: Ipv4Addr,
    mut due: Instant,
    interval: Duration,
    stopped: &mpsc::Receiver<()>,
) {
    loop {
        match stopped.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
        let sent = Instant::now();
        let outcome = request(port, client);
        due = Instant::now().max(due + interval);
        let (start, seen) = &mut *shared.lock().unwrap();
        seen.slowest = seen.slowest.max(sent.elapsed());
        match outcome {
            Ok(pod) => *seen.answers.entry(pod).or_default() += 1,
            Err(error) => seen.lost.push((start.elapsed(), format!("{error:#}, after {:?}", sent.elapsed()))),
        }
    }
}

/// Sends one request on a new connection. Returns the name of the Pod that answered.
pub(crate) fn request(port: u16, client: Ipv4Addr) -> Result<String> {
    let answer = load_balancers::ask((Ipv4Addr::LOCALHOST, port).into())?;
    ensure!(answer.client.ip() == client, "{} observed the client {}", answer.pod, answer.client);
    Ok(answer.pod)
}

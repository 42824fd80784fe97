// SPDX-License-Identifier: Apache-2.0
//! Clients that connect one after the other during a flood.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use npl_testkit::netns::Netns;
use npl_testkit::traffic::{self, UdpAnswer, UdpOptions};

use crate::world::is_emulated;

/// The time within which a client that loses packets must be connected and answered. Unless the processor is emulated,
/// a client whose SYN is lost fails, because the client retransmits the SYN only after a second. A client that is late
/// without a lost packet does not fail, because only the machine was slow.
fn response_limit() -> Duration {
    // The exchange may take longer on an emulated processor.
    Duration::from_secs(if is_emulated() { 2 } else { 1 })
}

/// Time between clients, so that the client's ports suffice: the port of a closed connection is unusable for a minute.
const INTERVAL: Duration = Duration::from_millis(5);

/// Results of the new clients.
#[derive(Default)]
pub(super) struct NewClients {
    tcp: Outcomes,
    udp: Outcomes,
}

#[derive(Default)]
struct Outcomes {
    served: usize,
    failures: Vec<String>,
    slowest: Duration,
}

/// A response to a client.
struct Response {
    /// Whether the Pod has observed the client's address.
    is_own: bool,
    /// The time until the answer.
    took: Duration,
    /// Whether a packet of the client is known to be lost. The test checks for loss only after a late answer (TCP) or a
    /// repeated datagram (UDP).
    has_lost: bool,
}

impl NewClients {
    /// Sends a request over TCP and a request over UDP in turn until `is_over`. `count` is the number of clients of
    /// each protocol so far.
    pub(super) fn connect_repeatedly(
        from: &Netns,
        server: SocketAddr,
        client: IpAddr,
        is_over: &AtomicBool,
        count: &AtomicUsize,
    ) -> Self {
        let mut all = Self::default();
        while !is_over.load(Ordering::Relaxed) {
            all.tcp.add(|| {
                let start = Instant::now();
                let stream = traffic::tcp_connect(from, server)?;
                let is_own = traffic::tcp_ask(&stream, "hello")?.client.ip() == client;
                let took = start.elapsed();
                let is_late = took >= response_limit();
                Ok(Response { is_own, took, has_lost: is_late && traffic::has_lost_segments(&stream)? })
            });
            // A lost datagram is no failure, because the client sends it again after 200 ms.
            all.udp.add(|| {
                let UdpAnswer { answer, attempts: _, took, has_lost } =
                    traffic::udp_request(from, server, b"hello", UdpOptions::default())?;
                Ok(Response { is_own: answer.client.ip() == client, took, has_lost })
            });
            count.fetch_add(1, Ordering::Relaxed);
            // This sleep limits the rate of clients, and is no wait for a condition.
            thread::sleep(INTERVAL);
        }
        all
    }

    /// Asserts that each protocol was used by at least `enough` clients, and that at least `per_mille` of every
    /// thousand clients were served.
    #[track_caller]
    pub(super) fn assert_served(&self, enough: usize, per_mille: usize) {
        for Outcomes { served, failures, slowest: _ } in [&self.tcp, &self.udp] {
            let all = served + failures.len();
            assert!(all >= enough, "too few clients: {self}");
            assert!(served * 1000 >= all * per_mille, "{self}: {failures:?}");
        }
    }
}

impl Outcomes {
    fn add(&mut self, request: impl FnOnce() -> anyhow::Result<Response>) {
        match request() {
            Ok(Response { is_own: true, took, has_lost }) if took < response_limit() || !has_lost => {
                self.served += 1;
                self.slowest = self.slowest.max(took);
            }
            Ok(Response { took, .. }) => self.failures.push(format!("not answered as expected within {took:?}")),
            Err(error) => self.failures.push(format!("{error:#}")),
        }
    }
}

impl fmt::Display for NewClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "by TCP {}; by UDP {}", self.tcp, self.udp)
    }
}

impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { served, failures, slowest } = self;
        write!(f, "{served} clients served within {slowest:?}, {} clients not served", failures.len())
    }
}

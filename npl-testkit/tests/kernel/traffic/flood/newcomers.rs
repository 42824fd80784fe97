// SPDX-License-Identifier: Apache-2.0
//! Clients that come during a flood, one after the other.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use npl_testkit::netns::Netns;
use npl_testkit::traffic::{self, UdpOptions};

use crate::world::is_emulated;

/// In which time a client must be connected and answered. A SYN that is sent again after a second is too late.
fn in_time() -> Duration {
    // An emulated processor may need longer for the rest.
    Duration::from_secs(if is_emulated() { 2 } else { 1 })
}

/// Time from one client to the next: the ports that they leave behind rest for a minute.
const INTERVAL: Duration = Duration::from_millis(5);

/// What became of them.
#[derive(Default)]
pub(super) struct Newcomers {
    tcp: Outcomes,
    udp: Outcomes,
}

#[derive(Default)]
struct Outcomes {
    served: usize,
    failures: Vec<String>,
    slowest: Duration,
}

impl Newcomers {
    /// By TCP and by UDP in turn until it is over.
    pub(super) fn come(from: &Netns, server: SocketAddr, client: IpAddr, is_over: &AtomicBool) -> Self {
        let mut all = Self::default();
        while !is_over.load(Ordering::Relaxed) {
            all.tcp.add(|| Ok(traffic::tcp_request(from, server, "may I come in?")?.client.ip() == client));
            // A datagram may be lost; its client asks again after a fifth of a second.
            let ask = || traffic::udp_request(from, server, b"me too?", UdpOptions::default());
            all.udp.add(|| Ok(ask()?.answer.client.ip() == client));
            // This is the pace of a sender, not a wait for a condition.
            thread::sleep(INTERVAL);
        }
        all
    }

    /// By each protocol there were `enough`, and of a thousand of them so many were served.
    #[track_caller]
    pub(super) fn assert_served(&self, enough: usize, per_mille: usize) {
        for Outcomes { served, failures, slowest: _ } in [&self.tcp, &self.udp] {
            let all = served + failures.len();
            assert!(all >= enough, "too few to judge by: {self}");
            assert!(served * 1000 >= all * per_mille, "{self}: {failures:?}");
        }
    }
}

impl Outcomes {
    fn add(&mut self, request: impl FnOnce() -> anyhow::Result<bool>) {
        let start = Instant::now();
        let outcome = request();
        let took = start.elapsed();
        match outcome {
            Ok(true) if took < in_time() => {
                self.served += 1;
                self.slowest = self.slowest.max(took);
            }
            Ok(_late_or_wrong) => self.failures.push(format!("not answered as expected within {took:?}")),
            Err(error) => self.failures.push(format!("{error:#}")),
        }
    }
}

impl fmt::Display for Newcomers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "by TCP {}; by UDP {}", self.tcp, self.udp)
    }
}

impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { served, failures, slowest } = self;
        write!(f, "{served} served within {slowest:?}, {} not", failures.len())
    }
}

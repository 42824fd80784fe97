// SPDX-License-Identifier: Apache-2.0
//! The results of a balancer's requests.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::members::Member;
use crate::echo::Protocol;

/// The number of failures that are recorded in detail; further failures are only counted.
const KEPT: usize = 20;

/// The kind of a request's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The Pod, or its Node, rejected the connection.
    Refused,
    /// There was no valid response, for example because the request timed out or the connection was reset.
    Lost,
    /// Another Pod responded, or the Pod observed another client address.
    Wrong,
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The time from the balancer's start to the request.
    pub at: Duration,
    /// The member to which the request was sent.
    pub member: Member,
    /// The kind of failure.
    pub kind: Kind,
    /// The error message.
    pub error: String,
}

/// Counters of all requests, and the first failures in detail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number of correct responses by Pod.
    pub pods: BTreeMap<String, u64>,
    /// The number of correct responses by protocol and family; `true` is IPv6.
    pub answered: BTreeMap<(Protocol, bool), u64>,
    /// The number of failed requests by kind and family; `true` is IPv6.
    pub failed: BTreeMap<(Kind, bool), u64>,
    /// The first failures.
    pub failures: Vec<Failure>,
    /// The number of requests that were not sent, because there was no member.
    pub unserved: u64,
    /// The number of TCP segments that were retransmitted in the balancer's network namespace.
    pub resent: u64,
    /// The longest response time of a correct response.
    pub slowest: Duration,
    /// The time from the balancer's start to its end.
    pub took: Duration,
}

impl Report {
    /// The number of all requests, including the requests that were not sent.
    pub fn requests(&self) -> u64 {
        self.answered.values().chain(self.failed.values()).sum::<u64>() + self.unserved
    }

    /// The achieved rate in requests per second.
    pub fn rate(&self) -> u64 {
        let millis = u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX);
        (self.requests() * 1000).checked_div(millis).unwrap_or_default()
    }

    /// Returns the number of failures of one kind.
    pub fn count(&self, kind: Kind) -> u64 {
        self.count_in(kind, false) + self.count_in(kind, true)
    }

    /// Returns the number of failures of one kind in one family.
    pub fn count_in(&self, kind: Kind, is_v6: bool) -> u64 {
        self.failed.get(&(kind, is_v6)).copied().unwrap_or_default()
    }

    pub(super) fn record(&mut self, member: &Member, outcome: Option<(Kind, String)>, at: Duration, took: Duration) {
        let Some((kind, error)) = outcome else {
            *self.pods.entry(member.pod.clone()).or_default() += 1;
            *self.answered.entry((member.protocol, member.server.is_ipv6())).or_default() += 1;
            self.slowest = self.slowest.max(took);
            return;
        };
        *self.failed.entry((kind, member.server.is_ipv6())).or_default() += 1;
        if self.failures.len() < KEPT {
            self.failures.push(Failure { at, member: member.clone(), kind, error });
        }
    }

    /// Adds the results of another worker.
    pub(super) fn add(&mut self, other: Self) {
        let Self { pods, answered, failed, failures, unserved, resent, slowest, took } = other;
        merge(&mut self.pods, pods);
        merge(&mut self.answered, answered);
        merge(&mut self.failed, failed);
        self.failures.extend(failures);
        self.failures.sort_by_key(|failure| failure.at);
        self.failures.truncate(KEPT);
        self.unserved += unserved;
        self.resent += resent;
        self.slowest = self.slowest.max(slowest);
        self.took = self.took.max(took);
    }
}

fn merge<K: Ord>(into: &mut BTreeMap<K, u64>, from: BTreeMap<K, u64>) {
    for (key, count) in from {
        *into.entry(key).or_default() += count;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.took.as_secs_f32();
        write!(f, "{} requests in {seconds:.1} s ({}/s): answered", self.requests(), self.rate())?;
        for ((protocol, is_v6), count) in &self.answered {
            write!(f, " {count} {protocol}/{}", if *is_v6 { "IPv6" } else { "IPv4" })?;
        }
        write!(f, " by {} Pods; refused {}", self.pods.len(), self.count(Kind::Refused))?;
        write!(f, ", lost {}, wrong Pod or client address {}", self.count(Kind::Lost), self.count(Kind::Wrong))?;
        write!(f, ", without a member {}; retransmitted TCP segments {}", self.unserved, self.resent)?;
        write!(f, "; slowest response {} ms", self.slowest.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_counted_once() {
        let server = "[2001:db8:0:1::11]:61000".parse().unwrap();
        let member = Member { pod: "web-0".to_owned(), protocol: Protocol::Udp, server };
        let mut report = Report { unserved: 1, took: Duration::from_secs(2), ..Report::default() };
        report.record(&member, None, Duration::ZERO, Duration::from_millis(7));
        let mut other = Report::default();
        other.record(&member, Some((Kind::Lost, "no response".to_owned())), Duration::ZERO, Duration::ZERO);
        other.record(&member, Some((Kind::Wrong, "web-1 responded".to_owned())), Duration::ZERO, Duration::ZERO);
        report.add(other);
        assert_eq!((report.requests(), report.rate(), report.failures.len()), (4, 2, 2));
        assert_eq!((report.count_in(Kind::Lost, true), report.count_in(Kind::Lost, false)), (1, 0));
        assert_eq!(
            report.to_string(),
            "4 requests in 2.0 s (2/s): answered 1 udp/IPv6 by 1 Pods; refused 0, lost 1, wrong Pod or client address 1, \
             without a member 1; retransmitted TCP segments 0; slowest response 7 ms"
        );
    }
}

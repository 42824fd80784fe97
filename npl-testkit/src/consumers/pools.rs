// SPDX-License-Identifier: Apache-2.0
//! The pools of a consumer, updated with each change of an annotation: one pool for each port of a Service. A pool
//! contains the entries of all protocols for the target port, and keeps a removed member for the time `keeps_dead`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::{Ako, cis};
use crate::echo::Protocol;

/// Software that reads the annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumer {
    /// The AVI Kubernetes Operator.
    Ako(Ako),
    /// F5 Container Ingress Services.
    Cis,
}

impl Consumer {
    fn read(self, annotation: &str, target_port: u16) -> Vec<SocketAddr> {
        match self {
            Self::Ako(ako) => ako.members(annotation, target_port, |_| true),
            Self::Cis => cis::members(annotation, target_port).iter().filter_map(cis::Member::address).collect(),
        }
    }
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolPort {
    /// The name of the Service.
    pub service: String,
    /// The target port, a Pod port.
    pub target: u16,
    /// The protocol of the requests that the pool sends to its members.
    pub protocol: Protocol,
}

/// A member of a pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    pub pool: PoolPort,
    /// The Pod whose annotation named the member.
    pub pod: String,
    /// The address to which the pool sends.
    pub server: SocketAddr,
}

/// All pools of a consumer.
#[derive(Debug)]
pub struct Pools {
    consumer: Consumer,
    /// The time for which a member stays in its pool after the member's removal from the annotation.
    keeps_dead: Duration,
    ports: Vec<PoolPort>,
    /// By member: the time at which the member is dropped; `None` while an annotation names the member.
    members: BTreeMap<Member, Option<Duration>>,
}

impl Pools {
    /// Creates empty pools for these ports.
    pub fn new(consumer: Consumer, keeps_dead: Duration, ports: Vec<PoolPort>) -> Self {
        Self { consumer, keeps_dead, ports, members: BTreeMap::new() }
    }

    /// Updates the pools with a Pod's annotation at the time `now`; `None` if the annotation is absent or the Pod is
    /// deleted. `services` are the names of the Services that select the Pod.
    pub fn observe(&mut self, pod: &str, services: &[&str], annotation: Option<&str>, now: Duration) {
        let mut named = Vec::new();
        for pool in self.ports.iter().filter(|pool| services.contains(&pool.service.as_str())) {
            for server in self.consumer.read(annotation.unwrap_or("[]"), pool.target) {
                named.push(Member { pool: pool.clone(), pod: pod.to_owned(), server });
            }
        }
        for (member, until) in self.members.iter_mut().filter(|(member, _)| member.pod == pod) {
            if named.contains(member) {
                *until = None;
            } else {
                until.get_or_insert(now + self.keeps_dead);
            }
        }
        for member in named {
            self.members.entry(member).or_insert(None);
        }
    }

    /// Returns the members to which the pools send requests at the time `now`.
    pub fn members(&self, now: Duration) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |(_, until)| until.is_none_or(|until| now < until)).map(|(member, _)| member)
    }

    /// Returns the members at whose addresses the wrong Pod responds: another Pod than the one whose annotation named
    /// the member. Each member is returned with the name of the responding Pod, which `answers` finds by address and
    /// protocol.
    pub fn misdirected(
        &self,
        now: Duration,
        answers: impl Fn(SocketAddr, Protocol) -> Option<String>,
    ) -> Vec<(Member, String)> {
        let wrong_pod = |member: &Member| {
            let pod = answers(member.server, member.pool.protocol).filter(|pod| *pod != member.pod)?;
            Some((member.clone(), pod))
        };
        self.members(now).filter_map(wrong_pod).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSUMERS: [Consumer; 3] = [Consumer::Ako(Ako::Current), Consumer::Ako(Ako::LastAddress), Consumer::Cis];

    fn pool(service: &str, target: u16, protocol: Protocol) -> PoolPort {
        PoolPort { service: service.to_owned(), target, protocol }
    }

    fn element(pod_port: u16, node_port: u16, protocol: &str) -> String {
        format!(r#"{{"podPort":{pod_port},"nodeIP":"192.0.2.1","nodePort":{node_port},"protocol":"{protocol}"}}"#)
    }

    #[test]
    fn a_node_port_that_two_pods_share_by_protocol_misdirects_a_pool() {
        let ports =
            vec![pool("dns", 53, Protocol::Tcp), pool("dns", 53, Protocol::Udp), pool("web", 80, Protocol::Tcp)];
        for consumer in CONSUMERS {
            let mut pools = Pools::new(consumer, Duration::ZERO, ports.clone());
            let dns = format!("[{},{}]", element(53, 61_000, "tcp"), element(53, 61_001, "udp"));
            pools.observe("dns-0", &["dns"], Some(&dns), Duration::ZERO);
            pools.observe("web-0", &["web"], Some(&format!("[{}]", element(80, 61_001, "tcp"))), Duration::ZERO);
            let answers = |server: SocketAddr, protocol| match (server.port(), protocol) {
                (61_000, Protocol::Tcp) | (61_001, Protocol::Udp) => Some("dns-0".to_owned()),
                (61_001, Protocol::Tcp) => Some("web-0".to_owned()),
                _ => None,
            };
            let misdirected = pools.misdirected(Duration::ZERO, answers);
            let [(member, pod)] = misdirected.as_slice() else { panic!("{consumer:?}: {misdirected:?}") };
            assert_eq!((member.pod.as_str(), member.pool.protocol, pod.as_str()), ("dns-0", Protocol::Tcp, "web-0"));
        }
    }

    #[test]
    fn a_removed_member_reaches_the_next_pod_of_its_node_port_until_it_is_dropped() {
        let minutes = Duration::from_mins(2);
        for consumer in CONSUMERS {
            let mut pools = Pools::new(consumer, minutes, vec![pool("web", 80, Protocol::Tcp)]);
            let annotation = format!("[{}]", element(80, 61_000, "tcp"));
            pools.observe("web-0", &["web"], Some(&annotation), Duration::ZERO);
            pools.observe("web-0", &["web"], None, Duration::from_secs(1));
            let answers = |_, _| Some("web-1".to_owned());
            assert_eq!(pools.misdirected(minutes, answers).len(), 1, "{consumer:?}");
            assert_eq!(pools.misdirected(minutes + Duration::from_secs(1), answers), [], "{consumer:?}");
        }
    }

    #[test]
    fn a_member_that_is_annotated_again_stays_in_the_pool() {
        let mut pools = Pools::new(Consumer::Cis, Duration::from_secs(9), vec![pool("web", 80, Protocol::Tcp)]);
        let annotation = format!("[{}]", element(80, 61_000, "tcp"));
        for (value, second) in [(Some(annotation.as_str()), 0), (None, 1), (Some(annotation.as_str()), 2)] {
            pools.observe("web-0", &["web"], value, Duration::from_secs(second));
        }
        assert_eq!(pools.members(Duration::from_mins(1)).count(), 1);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Decides whether a Pod port can get the node port that it requests.

use npl_common::unmapped;

use super::{Owner, Phase, PortTable};
use crate::core::{
    model::{Family, Frontend, Moment, NodePort, PodKey, PodPort, PodUid, Protocol},
    publish::request_problem::Obstacle,
};

const MILLIS_PER_SECOND: u64 = 1_000;
/// The time in milliseconds after which an unmapped node port without packets counts as unused, rounded up.
const QUIET_MILLIS: u64 = ((unmapped::LIFETIME + 2) << 30).div_ceil(1_000_000);

/// A Pod port that requests a certain node port.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct Request<'a> {
    pub(in crate::core) uid: &'a PodUid,
    pub(in crate::core) pod_port: PodPort,
    pub(in crate::core) family: Family,
    /// The protocols for which the node port must be free.
    pub(in crate::core) protocols: &'a [Protocol],
    pub(in crate::core) node_port: NodePort,
}

impl PortTable {
    /// Returns why the Pod port cannot get the node port that it requests; `None` if the Pod port can get the node
    /// port.
    ///
    /// A request never shortens a quarantine, and never gets a node port with recent traffic: otherwise, a user could
    /// obtain the packets that load balancers still send to the former Pod of the node port.
    pub(in crate::core) fn obstacle(
        &self,
        request: Request<'_>,
        quarantine_millis: u64,
        now: Moment,
    ) -> Option<Obstacle> {
        let Request { uid, pod_port, family, protocols, node_port } = request;
        if !self.range.contains(node_port) {
            return Some(Obstacle::OutOfRange(self.range));
        }
        let mut was_mapped = false;
        for (_, claim) in self.of_number(node_port) {
            match &claim.owner {
                Some(owner) if owner.uid == *uid && owner.port.pod_port == pod_port => was_mapped |= claim.was_mapped,
                Some(owner) if owner.uid == *uid => return Some(Obstacle::OtherPort),
                owner => return Some(of_claim(claim.phase, owner.as_ref(), quarantine_millis, now)),
            }
        }
        let mut frontends = protocols.iter().map(|protocol| Frontend { family, node_port, protocol: *protocol });
        if frontends.clone().any(|frontend| self.taken.contains_key(&frontend)) {
            return Some(Obstacle::Process);
        }
        if frontends.any(|frontend| self.claims.contains_key(&frontend)) {
            return Some(Obstacle::Allocated);
        }
        // If another protocol or family of the Pod port has the number, the traffic is that of this Pod.
        if was_mapped {
            return None;
        }
        if let Some(until) = self.quarantined.get(&node_port) {
            return Some(quarantined(None, *until, quarantine_millis, now));
        }
        let until = self.recent_traffic.get(&node_port)?;
        Some(Obstacle::RecentTraffic { seconds: seconds_until(*until, now) })
    }
}

fn of_claim(phase: Phase, owner: Option<&Owner>, quarantine_millis: u64, now: Moment) -> Obstacle {
    let pod = owner.map(|owner| owner.pod.clone());
    match (phase, pod) {
        (Phase::Active | Phase::Draining { .. }, Some(pod)) => Obstacle::Pod(pod),
        (Phase::Quarantined { until: Some(until) }, pod) => quarantined(pod, until, quarantine_millis, now),
        (Phase::Active | Phase::Draining { .. } | Phase::Quarantined { until: None }, pod) => {
            quarantined(pod, now.plus(quarantine_millis), quarantine_millis, now)
        }
    }
}

/// A quarantine ends at `until`. The removal of the mapping, with which the quarantine began, also counts as traffic to
/// the node port, so a node port is not given on request before both times have passed.
fn quarantined(pod: Option<PodKey>, until: Moment, quarantine_millis: u64, now: Moment) -> Obstacle {
    let quiet = Moment(until.0.saturating_sub(quarantine_millis)).plus(QUIET_MILLIS);
    Obstacle::Quarantined { pod, seconds: seconds_until(until.max(quiet), now) }
}

/// The number of seconds until a time, rounded up, and at least 1.
fn seconds_until(until: Moment, now: Moment) -> u64 {
    until.0.saturating_sub(now.0).div_ceil(MILLIS_PER_SECOND).max(1)
}

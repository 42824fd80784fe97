// SPDX-License-Identifier: Apache-2.0
//! Adds up the traffic of Service ports from the counters of their mappings. A limited number of Service ports have
//! separate sums. The traffic of all other Service ports is one sum, so the sum over all series is the traffic of all
//! mappings.
//!
//! The counters of a mapping are removed with the mapping, but the counters of a Service must never decrease.
//! Therefore, each reading adds the growth of the mappings' counters to the Service's counters, which stay until the
//! agent exits.

use std::collections::{BTreeMap, BTreeSet};

use npl_common::stats::MappingStats;

use super::{
    model::{Frontend, PodPort, Protocol},
    ports::{Claim, Phase},
    state::PlannerState,
};

/// The port of a Service whose traffic is counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceTarget {
    /// The namespace of the Service.
    pub namespace: String,
    /// The name of the Service.
    pub service: String,
    /// The Pod port that receives the traffic of the Service port.
    pub pod_port: PodPort,
    /// The transport protocol.
    pub protocol: Protocol,
}

/// One read of the counters of all mappings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterSample {
    /// The counters of each mapping that has separate counters.
    pub mappings: BTreeMap<Frontend, MappingStats>,
    /// The traffic of all mappings, including removed mappings and mappings without separate counters.
    pub total: MappingStats,
}

/// The traffic of Services since the first [`CounterSample`], which is made at the start of the agent.
#[derive(Debug)]
pub struct ServiceTraffic {
    /// The maximum number of Service ports in `kept`.
    max: usize,
    owners: BTreeMap<Frontend, ServiceTarget>,
    kept: BTreeMap<ServiceTarget, MappingStats>,
    /// The counters of each mapping at the last reading.
    last: BTreeMap<Frontend, MappingStats>,
    /// The traffic of all mappings at the first reading.
    first_total: Option<MappingStats>,
    other: MappingStats,
}

impl ServiceTraffic {
    /// Counts the traffic of at most `max` Service ports separately.
    pub const fn new(max: usize) -> Self {
        Self {
            max,
            owners: BTreeMap::new(),
            kept: BTreeMap::new(),
            last: BTreeMap::new(),
            first_total: None,
            other: MappingStats::ZERO,
        }
    }

    /// Returns whether a mapping whose owner is known is absent from `owners`, or has another owner there. The caller
    /// must then call [`Self::observe`] before [`Self::set_owners`], because the traffic since the last reading belongs
    /// to the earlier owner.
    pub fn changes_owner(&self, owners: &BTreeMap<Frontend, Option<ServiceTarget>>) -> bool {
        self.owners.iter().any(|(frontend, earlier)| match owners.get(frontend) {
            None => true,
            Some(None) => false,
            Some(Some(owner)) => owner != earlier,
        })
    }

    /// Sets the Service port of each mapping. A mapping without an owner keeps its earlier owner: such a mapping
    /// drains, because no Service requests its Pod port any more. New Service ports get sums of their own, in the order
    /// of namespace, name and port, until `max` Service ports have such sums.
    pub fn set_owners(&mut self, owners: BTreeMap<Frontend, Option<ServiceTarget>>) {
        let mut earlier = std::mem::take(&mut self.owners);
        let with_owner = owners
            .into_iter()
            .filter_map(|(frontend, owner)| Some((frontend, owner.or_else(|| earlier.remove(&frontend))?)));
        self.owners = with_owner.collect();
        let new: BTreeSet<&ServiceTarget> =
            self.owners.values().filter(|owner| !self.kept.contains_key(*owner)).collect();
        let room = self.max.saturating_sub(self.kept.len());
        self.kept.extend(new.into_iter().take(room).map(|port| (port.clone(), MappingStats::ZERO)));
    }

    /// Adds the traffic since the last reading. The first reading is only the starting point, and adds no traffic.
    pub fn observe(&mut self, sample: CounterSample) {
        let CounterSample { mappings, total } = sample;
        let Some(first_total) = self.first_total else {
            (self.first_total, self.last) = (Some(total), mappings);
            return;
        };
        for (frontend, now) in &mappings {
            let since = self.last.get(frontend).map_or(*now, |last| since(now, last));
            if let Some(sum) = self.owners.get(frontend).and_then(|owner| self.kept.get_mut(owner)) {
                *sum = combined(sum, &since, u64::saturating_add);
            }
        }
        self.last = mappings;
        let kept = self.kept.values().fold(MappingStats::ZERO, |sum, one| combined(&sum, one, u64::saturating_add));
        let rest = combined(&combined(&total, &first_total, u64::saturating_sub), &kept, u64::saturating_sub);
        // Counts that arrive while the kernel's counters of a removed mapping are reset can get lost, so that `rest`
        // could decrease by some packets.
        self.other = combined(&self.other, &rest, u64::max);
    }

    /// The traffic of each Service port that is counted separately.
    pub fn kept(&self) -> impl Iterator<Item = (&ServiceTarget, MappingStats)> {
        self.kept.iter().map(|(port, stats)| (port, *stats))
    }

    /// The traffic of all other mappings.
    pub const fn other(&self) -> MappingStats {
        self.other
    }
}

/// Returns the growth from `last` to `now`. If a counter is smaller than before, the counters belong to a new mapping
/// with the same node port, and began at zero.
fn since(now: &MappingStats, last: &MappingStats) -> MappingStats {
    let has_restarted = counts(now).into_iter().zip(counts(last)).any(|(now, last)| now < last);
    if has_restarted { *now } else { combined(now, last, u64::saturating_sub) }
}

const fn counts(stats: &MappingStats) -> [u64; 6] {
    let MappingStats { request_packets, request_bytes, reply_packets, reply_bytes, new_flows, established_flows } =
        *stats;
    [request_packets, request_bytes, reply_packets, reply_bytes, new_flows, established_flows]
}

fn combined(a: &MappingStats, b: &MappingStats, with: fn(u64, u64) -> u64) -> MappingStats {
    MappingStats {
        request_packets: with(a.request_packets, b.request_packets),
        request_bytes: with(a.request_bytes, b.request_bytes),
        reply_packets: with(a.reply_packets, b.reply_packets),
        reply_bytes: with(a.reply_bytes, b.reply_bytes),
        new_flows: with(a.new_flows, b.new_flows),
        established_flows: with(a.established_flows, b.established_flows),
    }
}

impl PlannerState {
    /// Returns the Service port of each node port that has or may get a mapping. If several Services request the Pod
    /// port, returns the first Service by name; `None` if no Service requests the Pod port any more.
    pub fn service_ports(&self) -> BTreeMap<Frontend, Option<ServiceTarget>> {
        let has_mapping = |phase: &Phase| !matches!(phase, Phase::Quarantined { .. });
        let claims = self.ports.iter().filter(|(_, claim)| has_mapping(&claim.phase));
        let port = |(frontend, claim): (&Frontend, &Claim)| {
            let of_owner = claim.owner.as_ref().and_then(|owner| {
                Some(ServiceTarget {
                    namespace: owner.pod.namespace.to_string(),
                    service: self.services_requesting(&owner.pod, owner.port).into_iter().min()?,
                    pod_port: owner.port.pod_port,
                    protocol: frontend.protocol,
                })
            });
            (*frontend, of_owner)
        };
        claims.map(port).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::model::{Family, NodePort};

    fn frontend(node_port: u16) -> Frontend {
        Frontend { family: Family::V4, node_port: NodePort(node_port), protocol: Protocol::Tcp }
    }

    fn port(service: &str) -> ServiceTarget {
        let (namespace, service) = ("shop".to_owned(), service.to_owned());
        ServiceTarget { namespace, service, pod_port: PodPort(80), protocol: Protocol::Tcp }
    }

    fn stats(packets: u64) -> MappingStats {
        MappingStats { request_packets: packets, request_bytes: 100 * packets, ..MappingStats::ZERO }
    }

    fn owners(of: &[(u16, Option<&str>)]) -> BTreeMap<Frontend, Option<ServiceTarget>> {
        of.iter().map(|(number, service)| (frontend(*number), service.map(port))).collect()
    }

    /// Creates a sample of the counters of mappings. The total also contains `removed` packets of removed mappings.
    fn sample(mappings: &[(u16, u64)], removed: u64) -> CounterSample {
        let total = stats(mappings.iter().map(|(_, packets)| packets).sum::<u64>() + removed);
        CounterSample {
            mappings: mappings.iter().map(|(number, packets)| (frontend(*number), stats(*packets))).collect(),
            total,
        }
    }

    fn packets(traffic: &ServiceTraffic) -> (Vec<(&str, u64)>, u64) {
        let kept = traffic.kept().map(|(port, stats)| (port.service.as_str(), stats.request_packets)).collect();
        (kept, traffic.other().request_packets)
    }

    #[test]
    fn traffic_counts_for_the_service_since_the_start_of_the_agent() {
        let mut traffic = ServiceTraffic::new(2);
        traffic.observe(sample(&[(61000, 50)], 7));
        traffic.set_owners(owners(&[(61000, Some("web")), (61001, Some("web"))]));
        traffic.observe(sample(&[(61000, 60), (61001, 5)], 7));
        assert_eq!(packets(&traffic), (vec![("web", 15)], 0));
        assert_eq!(traffic.kept().next().unwrap().1.request_bytes, 1500);
    }

    #[test]
    fn more_services_than_the_limit_are_one_sum_and_no_kept_service_loses_its_place() {
        let mut traffic = ServiceTraffic::new(2);
        traffic.observe(sample(&[], 0));
        traffic.set_owners(owners(&[(1, Some("c")), (2, Some("b")), (3, Some("a"))]));
        traffic.observe(sample(&[(1, 1), (2, 2), (3, 3)], 0));
        assert_eq!(packets(&traffic), (vec![("a", 3), ("b", 2)], 1));
        // All mappings of `a` are gone; the Services `c` and `aa` still have no series of their own.
        traffic.set_owners(owners(&[(1, Some("c")), (2, Some("b")), (4, Some("aa"))]));
        traffic.observe(sample(&[(1, 1), (2, 3), (4, 5)], 3));
        assert_eq!(packets(&traffic), (vec![("a", 3), ("b", 3)], 6));
    }

    #[test]
    fn counters_of_a_service_do_not_decrease_when_its_mapping_is_removed_or_its_node_port_is_used_again() {
        let mut traffic = ServiceTraffic::new(1);
        traffic.observe(sample(&[], 0));
        traffic.set_owners(owners(&[(1, Some("web"))]));
        traffic.observe(sample(&[(1, 10)], 0));
        // Two packets arrive between the last reading and the removal.
        traffic.set_owners(owners(&[]));
        traffic.observe(sample(&[], 12));
        assert_eq!(packets(&traffic), (vec![("web", 10)], 2));
        traffic.set_owners(owners(&[(1, Some("web"))]));
        traffic.observe(sample(&[(1, 4)], 12));
        assert_eq!(packets(&traffic), (vec![("web", 14)], 2));
        // The kernel's counters of the mapping were replaced between two readings.
        traffic.observe(sample(&[(1, 3)], 16));
        assert_eq!(packets(&traffic), (vec![("web", 17)], 2));
    }

    #[test]
    fn a_draining_mapping_without_a_service_counts_for_its_earlier_service() {
        let mut traffic = ServiceTraffic::new(1);
        traffic.observe(sample(&[], 0));
        traffic.set_owners(owners(&[(1, Some("web"))]));
        let changes = |of: &[(u16, Option<&str>)]| traffic.changes_owner(&owners(of));
        assert!(changes(&[(1, Some("api"))]) && changes(&[]));
        assert!(!changes(&[(1, None)]) && !changes(&[(1, Some("web")), (2, Some("api"))]));
        traffic.set_owners(owners(&[(1, None)]));
        traffic.observe(sample(&[(1, 8)], 0));
        assert_eq!(packets(&traffic), (vec![("web", 8)], 0));
    }

    #[test]
    fn the_sum_over_all_series_is_the_total_and_no_series_decreases() {
        let mut seed = 7_u32;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) % below
        };
        let mut traffic = ServiceTraffic::new(3);
        let mut live: BTreeMap<u16, u64> = BTreeMap::new();
        let (mut removed, mut before) = (40, BTreeMap::new());
        traffic.observe(sample(&[], removed));
        for _ in 0..2000 {
            let number = u16::try_from(random(12)).unwrap();
            if random(4) == 0 {
                removed += live.remove(&number).unwrap_or_default();
            } else {
                *live.entry(number).or_default() += u64::from(random(9));
            }
            let services = ["a", "b", "c", "d", "e"];
            let of = |number: &u16| services.get(usize::from(*number) % services.len()).copied();
            traffic.set_owners(live.keys().map(|number| (frontend(*number), of(number).map(port))).collect());
            traffic.observe(sample(&live.iter().map(|(a, b)| (*a, *b)).collect::<Vec<_>>(), removed));
            let mut now: BTreeMap<String, u64> =
                traffic.kept().map(|(port, stats)| (port.service.clone(), stats.request_packets)).collect();
            now.insert("_other".to_owned(), traffic.other().request_packets);
            assert!(now.len() <= 4);
            assert_eq!(now.values().sum::<u64>(), live.values().sum::<u64>() + removed - 40);
            for (name, count) in &before {
                assert!(now[name] >= *count, "{name}: {count} {now:?}");
            }
            before = now;
        }
    }
}

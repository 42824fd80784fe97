// SPDX-License-Identifier: Apache-2.0
//! The counters of the kernel programs, as metrics. The values are read from the kernel at each scrape.

use std::{fmt, sync::Arc};

use npl_common::stats::MappingStats;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter},
    registry::Unit,
};

use crate::core::{model::Family, service_traffic::ServiceTarget};

/// Reads the counters of the kernel programs, summed over all CPUs.
pub trait DatapathCounters: Send + Sync {
    /// Reads all counters of the kernel programs. If the counters cannot be read, the result is empty.
    fn read(&self) -> Counts;
}

/// The values of the kernel programs' counters.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// The number of packets by drop or pass reason.
    pub reasons: Vec<(&'static str, u64)>,
    /// For each IP family, the traffic of all mappings, including removed mappings.
    pub totals: Vec<FamilyTotals>,
    /// The traffic of Service ports since the start of the agent: one entry for each Service port with series of its
    /// own, and an entry `None` with the remaining traffic of all mappings. The field is `None` without
    /// `--service-metrics`.
    pub services: Option<Vec<(Option<ServiceTarget>, MappingStats)>>,
}

/// Traffic of the mappings of one IP family.
#[derive(Debug, Clone, Copy)]
pub struct FamilyTotals {
    /// The IP family of the mappings.
    pub family: Family,
    /// The sums over all mappings of the family, including removed mappings.
    pub stats: MappingStats,
}

pub(super) struct DatapathCollector(pub(super) Arc<dyn DatapathCounters>);

impl fmt::Debug for DatapathCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DatapathCollector").finish()
    }
}

struct MappingCounter {
    name: &'static str,
    help: &'static str,
    unit: Unit,
    label: &'static str,
    of: fn(&MappingStats) -> [(&'static str, u64); 2],
}

fn mapping_counters() -> [MappingCounter; 3] {
    [
        MappingCounter {
            name: "datapath",
            help: "Packets that the programs translated, by direction. A GRO or GSO packet counts once, whatever its \
                   number of segments.",
            unit: Unit::Other("packets".to_owned()),
            label: "direction",
            of: |stats| [("request", stats.request_packets), ("reply", stats.reply_packets)],
        },
        MappingCounter {
            name: "datapath",
            help: "Bytes of the packets that the programs translated, including the link-layer header, by direction.",
            unit: Unit::Bytes,
            label: "direction",
            of: |stats| [("request", stats.request_bytes), ("reply", stats.reply_bytes)],
        },
        MappingCounter {
            name: "datapath",
            help: "Flows by state: new (the client's first packet was translated), established (the handshake or the first \
                   exchange of packets is complete).",
            unit: Unit::Other("flows".to_owned()),
            label: "state",
            of: |stats| [("new", stats.new_flows), ("established", stats.established_flows)],
        },
    ]
}

impl Collector for DatapathCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Counts { reasons, totals, services } = self.0.read();
        let unit = Unit::Other("packets".to_owned());
        let mut metric = encoder.encode_descriptor(
            "datapath_reason",
            "Packets that were dropped, passed untranslated, or translated in spite of a problem, by reason; \
             `npl-agent status` explains the reasons.",
            Some(&unit),
            MetricType::Counter,
        )?;
        for (reason, count) in reasons {
            ConstCounter::new(count).encode(metric.encode_family(&[("reason", reason)])?)?;
        }
        for MappingCounter { name, help, unit, label, of } in mapping_counters() {
            let mut metric = encoder.encode_descriptor(name, help, Some(&unit), MetricType::Counter)?;
            for FamilyTotals { family, stats } in &totals {
                for (value, count) in of(stats) {
                    let labels = [("family", family.as_str()), (label, value)];
                    ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
                }
            }
        }
        services.map_or(Ok(()), |services| encode_services(&mut encoder, &services))
    }
}

/// The value of the labels of namespace, Service, Pod port and protocol, for the traffic of all Service ports without
/// series of their own. The value cannot be the name of a Kubernetes object, because such names contain no underscore.
pub(super) const OTHER: &str = "_other";

fn encode_services(
    encoder: &mut DescriptorEncoder<'_>,
    services: &[(Option<ServiceTarget>, MappingStats)],
) -> Result<(), fmt::Error> {
    for MappingCounter { help, unit, label, of, .. } in mapping_counters() {
        let help = format!(
            "{} Counted for each Service port since the agent started. Served only with --service-metrics.",
            help.trim()
        );
        let mut metric = encoder.encode_descriptor("service", &help, Some(&unit), MetricType::Counter)?;
        for (owner, stats) in services {
            let port = owner.as_ref().map(|owner| owner.pod_port.to_string());
            let [namespace, service, port, protocol] = match owner {
                Some(owner) => {
                    let port = port.as_deref().unwrap_or_default();
                    [owner.namespace.as_str(), owner.service.as_str(), port, owner.protocol.as_str()]
                }
                None => [OTHER; 4],
            };
            for (value, count) in of(stats) {
                let labels = [
                    ("service_namespace", namespace),
                    ("service_name", service),
                    ("pod_port", port),
                    ("protocol", protocol),
                    (label, value),
                ];
                ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! The counters of the kernel programs, which are read for each scrape.

use std::{fmt, sync::Arc};

use npl_common::stats::MappingStats;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter},
    registry::Unit,
};

use crate::core::model::Family;

/// The counters of the datapath, summed over processors.
pub trait DatapathCounters: Send + Sync {
    /// All counters; empty if they cannot be read.
    fn read(&self) -> Counts;
}

/// The counters of the datapath.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Packets by reason.
    pub reasons: Vec<(&'static str, u64)>,
    /// The totals of each family, removed mappings included.
    pub totals: Vec<FamilyTotals>,
}

/// The totals of one family.
#[derive(Debug, Clone, Copy)]
pub struct FamilyTotals {
    /// The family.
    pub family: Family,
    /// The sums.
    pub stats: MappingStats,
}

pub(super) struct DatapathCollector(pub(super) Arc<dyn DatapathCounters>);

impl fmt::Debug for DatapathCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DatapathCollector").finish()
    }
}

struct Shown {
    name: &'static str,
    help: &'static str,
    unit: Unit,
    label: &'static str,
    of: fn(&MappingStats) -> [(&'static str, u64); 2],
}

fn shown() -> [Shown; 3] {
    [
        Shown {
            name: "datapath",
            help: "Translated packets, by direction. A packet that the kernel segments later (GSO, GRO) counts as \
                   one.",
            unit: Unit::Other("packets".to_owned()),
            label: "direction",
            of: |stats| [("request", stats.request_packets), ("reply", stats.reply_packets)],
        },
        Shown {
            name: "datapath",
            help: "Bytes of translated packets including the link-layer header, by direction.",
            unit: Unit::Bytes,
            label: "direction",
            of: |stats| [("request", stats.request_bytes), ("reply", stats.reply_bytes)],
        },
        Shown {
            name: "datapath",
            help: "Connections that began (new), and connections that the Pod answered (established).",
            unit: Unit::Other("flows".to_owned()),
            label: "state",
            of: |stats| [("new", stats.new_flows), ("established", stats.established_flows)],
        },
    ]
}

impl Collector for DatapathCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Counts { reasons, totals } = self.0.read();
        let unit = Unit::Other("packets".to_owned());
        let mut metric = encoder.encode_descriptor(
            "datapath_reason",
            "Packets that were dropped, passed untranslated, or handled by the slow path, by reason.",
            Some(&unit),
            MetricType::Counter,
        )?;
        for (reason, count) in reasons {
            ConstCounter::new(count).encode(metric.encode_family(&[("reason", reason)])?)?;
        }
        for Shown { name, help, unit, label, of } in shown() {
            let mut metric = encoder.encode_descriptor(name, help, Some(&unit), MetricType::Counter)?;
            for FamilyTotals { family, stats } in &totals {
                for (value, count) in of(stats) {
                    let labels = [("family", family.as_str()), (label, value)];
                    ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}

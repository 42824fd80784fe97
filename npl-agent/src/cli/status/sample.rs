// SPDX-License-Identifier: Apache-2.0
//! Reads the counters of the kernel programs twice, and computes the packets and new flows per second.

use std::{collections::BTreeMap, time::Duration};

use npl_common::{reason::Reason, stats::MappingStats};
use tokio::time::{Instant, sleep};

use super::view::Traffic;
use crate::{
    cli::rate,
    core::model::Family,
    datapath::{DatapathError, Tables},
};

/// The growth of the kernel programs' counters within an interval.
#[derive(Debug)]
pub(super) struct Sample {
    elapsed: Duration,
    /// The number of packets within the interval, by drop or pass reason.
    pub(super) reasons: Vec<(Reason, u64)>,
    stats: MappingStats,
}

impl Sample {
    /// Reads the counters, waits for the interval, and reads the counters again.
    ///
    /// # Errors
    ///
    /// If the counters cannot be read.
    pub(super) async fn take(tables: &Tables, interval: Duration) -> Result<Self, DatapathError> {
        let (began, before) = (Instant::now(), Reading::of(tables)?);
        sleep(interval).await;
        Ok(Reading::of(tables)?.since(&before, began.elapsed()))
    }

    pub(super) fn reasons_per_second(&self) -> BTreeMap<&'static str, f64> {
        self.reasons.iter().map(|(reason, count)| (reason.name(), rate(*count, self.elapsed))).collect()
    }

    pub(super) fn traffic(&self) -> Traffic {
        Traffic {
            request_packets: rate(self.stats.request_packets, self.elapsed),
            reply_packets: rate(self.stats.reply_packets, self.elapsed),
            new_flows: rate(self.stats.new_flows, self.elapsed),
        }
    }
}

/// The values of the packet counters at one point in time.
struct Reading {
    reasons: Vec<(Reason, u64)>,
    stats: [MappingStats; 2],
}

impl Reading {
    fn of(tables: &Tables) -> Result<Self, DatapathError> {
        Ok(Self { reasons: tables.reasons()?, stats: [tables.totals(Family::V4)?, tables.totals(Family::V6)?] })
    }

    fn since(&self, before: &Self, elapsed: Duration) -> Sample {
        let reasons = self.reasons.iter().zip(&before.reasons);
        let sum = |field: fn(&MappingStats) -> u64| {
            let grown = self.stats.iter().zip(&before.stats);
            grown.map(|(after, before)| field(after).saturating_sub(field(before))).sum()
        };
        Sample {
            elapsed,
            reasons: reasons.map(|((reason, after), (_, before))| (*reason, after.saturating_sub(*before))).collect(),
            stats: MappingStats {
                request_packets: sum(|it| it.request_packets),
                request_bytes: sum(|it| it.request_bytes),
                reply_packets: sum(|it| it.reply_packets),
                reply_bytes: sum(|it| it.reply_bytes),
                new_flows: sum(|it| it.new_flows),
                established_flows: sum(|it| it.established_flows),
            },
        }
    }
}

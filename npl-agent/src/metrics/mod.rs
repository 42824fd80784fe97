// SPDX-License-Identifier: Apache-2.0
//! The agent's metrics. Every label has a closed set of values; none names a Pod.

mod datapath;
mod labels;

use std::{
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use npl_common::names::ABI_VERSION;
use prometheus_client::{
    encoding::text,
    metrics::{
        counter::Counter,
        family::Family as Labelled,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Registry, Unit},
};

use self::{
    datapath::DatapathCollector,
    labels::{
        DeviceLabel, DeviceState, EventLabel, FamilyLabel, OpLabels, OpName, OutcomeLabel, PortLabels, PortState,
        ReasonLabel, WatchLabels,
    },
};
pub use self::{
    datapath::{Counts, DatapathCounters, FamilyTotals},
    labels::{EventOutcome, FailureKind, OpOutcome, PatchOutcome, WatchedResource},
};
use crate::core::{devices::Coverage, model::Family, op::Op};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    families: Families,
}

/// The number of node ports of a family in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortCounts {
    /// Allocated.
    pub used: u64,
    /// Free to be allocated.
    pub free: u64,
    /// Released recently.
    pub quarantined: u64,
}

#[derive(Default, Clone)]
struct Families {
    ops: Labelled<OpLabels, Counter>,
    pass_seconds: Seconds,
    last_successful_pass: Gauge<f64, AtomicU64>,
    patches: Labelled<OutcomeLabel, Counter>,
    patch_seconds: Seconds,
    events: Labelled<EventLabel, Counter>,
    watch_errors: Labelled<WatchLabels, Counter>,
    mappings: Labelled<FamilyLabel, Gauge>,
    ports: Labelled<PortLabels, Gauge>,
    devices: Labelled<DeviceLabel, Gauge>,
    problems: Labelled<ReasonLabel, Gauge>,
}

/// A histogram of durations from 0.1 ms to 26 s.
#[derive(Clone)]
struct Seconds(Histogram);

impl Default for Seconds {
    fn default() -> Self {
        Self(Histogram::new(exponential_buckets(0.0001, 4.0, 10)))
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics at zero; `datapath` is read for each scrape.
    pub fn new(datapath: Arc<dyn DatapathCounters>) -> Self {
        let families = Families::default();
        let mut registry = Registry::with_prefix("npl");
        families.register(&mut registry);
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("abi", ABI_VERSION.to_string())];
        registry.register("build", "Version of the agent and ABI version of its maps", Info::new(version));
        registry.register_collector(Box::new(DatapathCollector(datapath)));
        Self(Arc::new(Inner { registry, families }))
    }

    /// Counts an operation.
    pub fn count_op(&self, op: &Op, outcome: OpOutcome) {
        self.0.families.ops.get_or_create(&OpLabels { op: OpName::of(op), outcome }).inc();
    }

    /// Records a pass of the main loop; `succeeded_at` is set if no operation of it failed.
    pub fn observe_pass(&self, elapsed: Duration, succeeded_at: Option<SystemTime>) {
        self.0.families.pass_seconds.0.observe(elapsed.as_secs_f64());
        if let Some(since_epoch) = succeeded_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) {
            self.0.families.last_successful_pass.set(since_epoch.as_secs_f64());
        }
    }

    /// Records a patch and the time until its answer or timeout.
    pub fn count_patch(&self, outcome: PatchOutcome, elapsed: Duration) {
        self.0.families.patches.get_or_create(&OutcomeLabel { outcome }).inc();
        self.0.families.patch_seconds.0.observe(elapsed.as_secs_f64());
    }

    /// Counts a Kubernetes Event.
    pub fn count_event(&self, outcome: EventOutcome) {
        self.0.families.events.get_or_create(&EventLabel { outcome }).inc();
    }

    /// Counts an error of a watch.
    pub fn count_watch_failure(&self, subject: WatchedResource, kind: FailureKind) {
        self.0.families.watch_errors.get_or_create(&WatchLabels { subject, kind }).inc();
    }

    /// Sets the number of mappings of a family.
    pub fn set_mappings(&self, family: Family, count: u64) {
        self.0.families.mappings.get_or_create(&FamilyLabel { family }).set(gauge(count));
    }

    /// Sets the number of node ports of a family in each state.
    pub fn set_ports(&self, family: Family, counts: PortCounts) {
        let PortCounts { used, free, quarantined } = counts;
        for (state, count) in [(PortState::Used, used), (PortState::Free, free), (PortState::Quarantined, quarantined)]
        {
            let labels = PortLabels { family, state };
            self.0.families.ports.get_or_create(&labels).set(gauge(count));
        }
    }

    /// Sets the number of devices with and without programs.
    pub fn set_devices(&self, coverage: Coverage) {
        let Coverage { attached, failed } = coverage;
        for (state, count) in [(DeviceState::Attached, attached), (DeviceState::Failed, failed)] {
            self.0.families.devices.get_or_create(&DeviceLabel { state }).set(gauge(count as u64));
        }
    }

    /// Replaces the number of problems of each reason.
    pub fn set_problems(&self, counts: &[(&'static str, u64)]) {
        self.0.families.problems.clear();
        for (reason, count) in counts {
            self.0.families.problems.get_or_create(&ReasonLabel { reason }).set(gauge(*count));
        }
    }

    /// All metrics as text of [`CONTENT_TYPE`].
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.0.registry)?;
        Ok(text)
    }
}

impl Families {
    fn register(&self, registry: &mut Registry) {
        let Self {
            ops,
            pass_seconds,
            last_successful_pass,
            patches,
            patch_seconds,
            events,
            watch_errors,
            mappings,
            ports,
            devices,
            problems,
        } = self.clone();
        registry.register(
            "ops",
            "Operations of the agent on mappings, reservations, allowed sources and \
             annotations, by operation and outcome",
            ops,
        );
        registry.register_with_unit("pass", "Duration of one pass of the main loop", Unit::Seconds, pass_seconds.0);
        registry.register_with_unit(
            "last_successful_pass_timestamp",
            "Unix time at which the last pass without a failed operation ended",
            Unit::Seconds,
            last_successful_pass,
        );
        registry.register("annotation_patches", "Patches of Pods' status subresource, by outcome", patches);
        registry.register_with_unit(
            "annotation_patch",
            "Time from sending a patch to the API server's answer",
            Unit::Seconds,
            patch_seconds.0,
        );
        registry.register("events", "Kubernetes Events that report problems, by outcome of sending them", events);
        registry.register(
            "watch_errors",
            "Errors of the watches on the API server, by resource and kind of error",
            watch_errors,
        );
        registry.register("mappings", "Node ports that are mapped or held for a mapping", mappings);
        registry.register("node_ports", "Node ports of --port-range, by state", ports);
        registry.register(
            "devices",
            "Uplinks that carry the programs (attached), or that clients may use but that do not carry them (failed)",
            devices,
        );
        registry.register(
            "problems",
            "Problems that keep Pod ports from being served as requested, by reason",
            problems,
        );
    }
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;

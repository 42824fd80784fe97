// SPDX-License-Identifier: Apache-2.0
//! The Prometheus metrics of the agent. The values of labels come from fixed sets, except the names of the Node's
//! uplinks and the names of Services, whose number `--service-metrics` limits. No label contains the name of a Pod, so
//! that the number of time series does not grow with the cluster.

mod catalog;
mod datapath;
mod labels;
mod plain_text;
mod process;

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
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

pub use self::{
    catalog::{Label, MetricInfo, Values, catalog},
    datapath::{Counts, DatapathCounters, FamilyTotals},
    labels::{
        EventOutcome, FailureKind, OpName, OpOutcome, PatchOutcome, RemovalCause, RequestProgram, SweptTable,
        WatchedResource,
    },
};
use self::{
    datapath::DatapathCollector,
    labels::{
        DeviceInfoLabels, DeviceLabel, DeviceState, EventLabel, FamilyLabel, FlowTableLabels, OpLabels, OutcomeLabel,
        PortLabels, PortState, ProtocolLabel, ReasonLabel, RemovalLabels, RepairLabel, SubjectLabel, TableLabels,
        WatchLabels,
    },
    process::ProcessCollector,
};
use crate::core::{
    devices::Coverage,
    model::{Family, Protocol},
    op::Op,
    repairs::RepairedObject,
};

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The format `OpenMetrics`, version 1.0.0.
    OpenMetrics,
    /// The plain text format of Prometheus, version 0.0.4.
    Plain,
}

impl Format {
    /// Chooses the format for a client whose header `Accept` contains these values.
    pub fn accepted(accepted: &[&str]) -> Self {
        let is_open = accepted.iter().any(|types| types.contains("application/openmetrics-text"));
        if is_open { Self::OpenMetrics } else { Self::Plain }
    }

    /// Returns the media type of the format.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => plain_text::CONTENT_TYPE,
        }
    }
}

/// All metrics of the agent. Clones share the same metrics.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    /// The registry of metrics whose names do not begin with `npl_`.
    standard: Registry,
    families: Families,
    /// The labels of the series of `npl_device_info`.
    device_info: Mutex<BTreeSet<DeviceInfoLabels>>,
}

/// Numbers of node ports of one IP family and protocol, by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortCounts {
    /// Node ports that are allocated to a Pod port.
    pub used: u64,
    /// Node ports that are free for a new mapping.
    pub free: u64,
    /// Node ports that were released recently and are not reused until the quarantine ends.
    pub quarantined: u64,
}

#[derive(Default, Clone)]
struct Families {
    ops: Labelled<OpLabels, Counter>,
    pass_seconds: Seconds,
    last_successful_pass: Gauge<f64, AtomicU64>,
    patches: Labelled<OutcomeLabel, Counter>,
    patch_seconds: Seconds,
    publication_seconds: Seconds,
    flows: Labelled<FlowTableLabels, Gauge>,
    flow_limit: Labelled<ProtocolLabel, Gauge>,
    flow_removals: Labelled<RemovalLabels, Counter>,
    table_entries: Labelled<TableLabels, Gauge>,
    table_limits: Labelled<TableLabels, Gauge>,
    events: Labelled<EventLabel, Counter>,
    watch_errors: Labelled<WatchLabels, Counter>,
    watch_changes: Labelled<SubjectLabel, Gauge<f64, AtomicU64>>,
    pending_patches: Gauge,
    ready: Gauge,
    mappings: Labelled<FamilyLabel, Gauge>,
    ports: Labelled<PortLabels, Gauge>,
    devices: Labelled<DeviceLabel, Gauge>,
    device_info: Labelled<DeviceInfoLabels, Gauge>,
    problems: Labelled<ReasonLabel, Gauge>,
    redirect_refused: Gauge,
    programs_ahead: Gauge,
    repairs: Labelled<RepairLabel, Counter>,
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
    /// Creates all metrics with the value zero. The counters of `datapath` are read at each call of [`Self::encode`].
    pub fn new(datapath: Arc<dyn DatapathCounters>) -> Self {
        let families = Families::default();
        let mut registry = Registry::with_prefix("npl");
        families.register(&mut registry);
        // Each series exists from the start, so that alerts see the first increase.
        for object in RepairedObject::ALL {
            drop(families.repairs.get_or_create(&RepairLabel { object }));
        }
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("abi", ABI_VERSION.to_string())];
        registry.register("build", "Version of the agent and ABI version of its pinned maps", Info::new(version));
        registry.register_collector(Box::new(DatapathCollector(datapath)));
        let mut standard = Registry::default();
        standard.register_collector(Box::new(ProcessCollector));
        Self(Arc::new(Inner { registry, standard, families, device_info: Mutex::default() }))
    }

    /// Counts an op by its kind and its outcome.
    pub fn count_op(&self, op: &Op, outcome: OpOutcome) {
        self.0.families.ops.get_or_create(&OpLabels { op: OpName::of(op), outcome }).inc();
    }

    /// Records the duration of one pass of the main loop. `succeeded_at` is the time at which the pass ended, or `None`
    /// if an op failed.
    pub fn observe_pass(&self, elapsed: Duration, succeeded_at: Option<SystemTime>) {
        self.0.families.pass_seconds.0.observe(elapsed.as_secs_f64());
        if let Some(since_epoch) = succeeded_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) {
            self.0.families.last_successful_pass.set(since_epoch.as_secs_f64());
        }
    }

    /// Counts a patch of a Pod by its outcome, and records the time from sending the patch to its answer or deadline.
    pub fn count_patch(&self, outcome: PatchOutcome, elapsed: Duration) {
        self.0.families.patches.get_or_create(&OutcomeLabel { outcome }).inc();
        self.0.families.patch_seconds.0.observe(elapsed.as_secs_f64());
    }

    /// Records the time from a change that alters a Pod's annotation to the API server's confirmation of the
    /// annotation.
    pub fn observe_publication(&self, elapsed: Duration) {
        self.0.families.publication_seconds.0.observe(elapsed.as_secs_f64());
    }

    /// Sets the number of entries in NPL's flow table of an IP family and a protocol.
    pub fn set_flows(&self, family: Family, protocol: Protocol, count: usize) {
        let labels = FlowTableLabels { family, protocol };
        self.0.families.flows.get_or_create(&labels).set(gauge(count as u64));
    }

    /// Sets the capacity of NPL's flow table of a protocol, in flows. Both IP families have the same capacity.
    pub fn set_flow_limit(&self, protocol: Protocol, flows: usize) {
        self.0.families.flow_limit.get_or_create(&ProtocolLabel { protocol }).set(gauge(flows as u64));
    }

    /// Counts entries that were removed from NPL's flow tables of an IP family.
    pub fn count_removed_flows(&self, family: Family, cause: RemovalCause, count: u64) {
        self.0.families.flow_removals.get_or_create(&RemovalLabels { family, cause }).inc_by(count);
    }

    /// Returns the number of entries that were removed from NPL's flow tables of an IP family since the start of the
    /// agent.
    pub fn removed_flows(&self, family: Family, cause: RemovalCause) -> u64 {
        self.0.families.flow_removals.get_or_create(&RemovalLabels { family, cause }).get()
    }

    /// Sets the number of entries of a map, and the map's capacity.
    pub fn set_table_fill(&self, table: SweptTable, family: Family, used: usize, capacity: usize) {
        let labels = TableLabels { table, family };
        self.0.families.table_entries.get_or_create(&labels).set(gauge(used as u64));
        self.0.families.table_limits.get_or_create(&labels).set(gauge(capacity as u64));
    }

    /// Counts a Kubernetes Event by its outcome.
    pub fn count_event(&self, outcome: EventOutcome) {
        self.0.families.events.get_or_create(&EventLabel { outcome }).inc();
    }

    /// Counts an error of a watch by its kind.
    pub fn count_watch_failure(&self, subject: WatchedResource, kind: FailureKind) {
        self.0.families.watch_errors.get_or_create(&WatchLabels { subject, kind }).inc();
    }

    /// Records when the agent received a list or a change of a resource.
    pub fn observe_watch_change(&self, subject: WatchedResource, received_at: SystemTime) {
        if let Ok(since_epoch) = received_at.duration_since(UNIX_EPOCH) {
            self.0.families.watch_changes.get_or_create(&SubjectLabel { subject }).set(since_epoch.as_secs_f64());
        }
    }

    /// Sets the number of patches of Pods that are in the queue or wait for the API server's answer.
    pub fn set_pending_patches(&self, count: usize) {
        self.0.families.pending_patches.set(gauge(count as u64));
    }

    /// Sets the gauge that shows whether `/readyz` succeeds.
    pub fn set_ready(&self, is_ready: bool) {
        self.0.families.ready.set(i64::from(is_ready));
    }

    /// Sets the number of mappings of an IP family, including draining mappings.
    pub fn set_mappings(&self, family: Family, count: u64) {
        self.0.families.mappings.get_or_create(&FamilyLabel { family }).set(gauge(count));
    }

    /// Sets the numbers of node ports of an IP family and protocol, by state.
    pub fn set_ports(&self, family: Family, protocol: Protocol, counts: PortCounts) {
        let PortCounts { used, free, quarantined } = counts;
        for (state, count) in [(PortState::Used, used), (PortState::Free, free), (PortState::Quarantined, quarantined)]
        {
            let labels = PortLabels { family, protocol, state };
            self.0.families.ports.get_or_create(&labels).set(gauge(count));
        }
    }

    /// Sets the number of selected devices to which the programs are attached, and the number of those to which the
    /// programs could not be attached.
    pub fn set_devices(&self, coverage: Coverage) {
        let Coverage { attached, failed } = coverage;
        for (state, count) in [(DeviceState::Attached, attached), (DeviceState::Failed, failed)] {
            self.0.families.devices.get_or_create(&DeviceLabel { state }).set(gauge(count as u64));
        }
    }

    /// Sets the names of the uplinks on which the programs are attached, each with the kind of the program that
    /// translates requests. The series of all other devices are removed.
    pub fn set_request_programs(&self, uplinks: impl IntoIterator<Item = (String, RequestProgram)>) {
        let family = &self.0.families.device_info;
        let current: BTreeSet<_> =
            uplinks.into_iter().map(|(device, kind)| DeviceInfoLabels { device, kind }).collect();
        let mut shown = self.0.device_info.lock().unwrap_or_else(PoisonError::into_inner);
        // Only outdated series are removed. If all series were removed first, a scrape could miss current series.
        for gone in shown.difference(&current) {
            family.remove(gone);
        }
        for labels in &current {
            family.get_or_create(labels).set(1);
        }
        *shown = current;
    }

    /// Sets the gauge that shows whether `--forwarding redirect` is refused because of a policy engine.
    pub fn set_redirect_refused(&self, is_refused: bool) {
        self.0.families.redirect_refused.set(i64::from(is_refused));
    }

    /// Sets the number of other software's programs that remain ahead of NPL's programs on the same hook.
    pub fn set_programs_ahead(&self, count: usize) {
        self.0.families.programs_ahead.set(gauge(count as u64));
    }

    /// Counts an object that other software removed or changed, and that the agent restored.
    pub fn count_repair(&self, object: RepairedObject) {
        self.0.families.repairs.get_or_create(&RepairLabel { object }).inc();
    }

    /// Sets the number of problems by Event reason. The series of an Event reason that `counts` does not contain is
    /// removed.
    pub fn set_problems(&self, counts: &[(&'static str, u64)]) {
        self.0.families.problems.clear();
        for (reason, count) in counts {
            self.0.families.problems.get_or_create(&ReasonLabel { reason }).set(gauge(*count));
        }
    }

    /// Encodes all metrics as text.
    ///
    /// # Errors
    ///
    /// If a collector fails to encode its values.
    pub fn encode(&self, format: Format) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode_registry(&mut text, &self.0.registry)?;
        text::encode_registry(&mut text, &self.0.standard)?;
        text::encode_eof(&mut text)?;
        Ok(match format {
            Format::OpenMetrics => text,
            Format::Plain => plain_text::from_openmetrics(&text),
        })
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
            publication_seconds,
            flows,
            flow_limit,
            flow_removals,
            table_entries,
            table_limits,
            events,
            watch_errors,
            watch_changes,
            pending_patches,
            ready,
            mappings,
            ports,
            devices,
            device_info,
            problems,
            redirect_refused,
            programs_ahead,
            repairs,
        } = self.clone();
        registry.register(
            "ops",
            "Operations on node ports, mappings, allowed sources and annotations, by kind and outcome",
            ops,
        );
        registry.register_with_unit("pass", "Duration of one pass of the main loop", Unit::Seconds, pass_seconds.0);
        registry.register_with_unit(
            "last_successful_pass_timestamp",
            "Unix time at the end of the last pass of the main loop in which no operation failed",
            Unit::Seconds,
            last_successful_pass,
        );
        registry.register("annotation_patches", "Patches of Pod annotations and readiness gates, by outcome", patches);
        registry.register_with_unit(
            "annotation_patch",
            "Time from sending a patch of a Pod to the API server's answer",
            Unit::Seconds,
            patch_seconds.0,
        );
        registry.register_with_unit(
            "publication",
            "Time from the change of a Pod, a Service or the Node that alters a Pod's annotation to the API server's \
             confirmation of the annotation",
            Unit::Seconds,
            publication_seconds.0,
        );
        Self::register_tables(registry, (flows, flow_limit, flow_removals), (table_entries, table_limits));
        registry.register("events", "Kubernetes Events that report problems, by outcome of sending them", events);
        registry.register(
            "watch_errors",
            "Failed requests of the watches on the API server, by resource and kind",
            watch_errors,
        );
        registry.register_with_unit(
            "watch_last_change_timestamp",
            "Unix time at which the agent last received a list or a change, by resource",
            Unit::Seconds,
            watch_changes,
        );
        registry.register(
            "pending_patches",
            "Patches of Pods that wait in the queue or for the API server's answer",
            pending_patches,
        );
        registry.register("ready", "Whether /readyz succeeds: 1 or 0", ready);
        Self::register_state(registry, mappings, ports, (devices, device_info), problems);
        Self::register_neighbours(registry, redirect_refused, programs_ahead, repairs);
    }

    fn register_tables(
        registry: &mut Registry,
        (flows, flow_limit, flow_removals): (
            Labelled<FlowTableLabels, Gauge>,
            Labelled<ProtocolLabel, Gauge>,
            Labelled<RemovalLabels, Counter>,
        ),
        (table_entries, table_limits): (Labelled<TableLabels, Gauge>, Labelled<TableLabels, Gauge>),
    ) {
        registry.register(
            "flow_table_entries",
            "Entries of a flow table at the last sweep, by IP family and protocol; npl_flow_table_max_entries is the \
             limit of the protocol",
            flows,
        );
        registry.register(
            "flow_table_max_entries",
            "Entries that the flow table of a protocol has room for, in each IP family",
            flow_limit,
        );
        registry.register(
            "flow_table_removals",
            "Entries that were removed from the flow tables, by IP family and cause. The kernel reports no evictions, \
             so the agent computes their number at each sweep from the numbers of new, removed and remaining entries",
            flow_removals,
        );
        registry.register(
            "table_entries",
            "Entries of a table at the last sweep, by table and IP family; npl_table_max_entries is the limit",
            table_entries,
        );
        registry.register(
            "table_max_entries",
            "Entries that a table has room for, by table and IP family",
            table_limits,
        );
    }

    /// Registers the metrics that show effects of other software on the Node.
    fn register_neighbours(
        registry: &mut Registry,
        redirect_refused: Gauge,
        programs_ahead: Gauge,
        repairs: Labelled<RepairLabel, Counter>,
    ) {
        registry.register(
            "redirect_refused",
            "Whether --forwarding redirect is refused because redirected packets would bypass NetworkPolicy: 1 or 0",
            redirect_refused,
        );
        registry.register(
            "programs_ahead",
            "Programs of other software that stay ahead of NPL's programs on uplinks, because the agent cannot move \
             NPL's program or has reached the limit of moves. If such a program returns a final verdict, NPL's program \
             does not run. Before Linux 6.6, the metric is measured in every forwarding mode; from Linux 6.6 on, it is \
             0 without --forwarding redirect or offload",
            programs_ahead,
        );
        registry.register(
            "repairs",
            "Objects of NPL in the kernel that other software removed or changed, and that the agent restored, by kind of \
             object",
            repairs,
        );
    }

    fn register_state(
        registry: &mut Registry,
        mappings: Labelled<FamilyLabel, Gauge>,
        ports: Labelled<PortLabels, Gauge>,
        (devices, device_info): (Labelled<DeviceLabel, Gauge>, Labelled<DeviceInfoLabels, Gauge>),
        problems: Labelled<ReasonLabel, Gauge>,
    ) {
        registry.register("mappings", "Mappings of the agent, including draining mappings, by IP family", mappings);
        registry.register("node_ports", "Node ports of --port-range, by IP family, protocol and state", ports);
        registry.register(
            "devices",
            "Devices that --devices selects, by state: attached if the programs are attached to the device, else \
             failed",
            devices,
        );
        registry.register(
            "device_info",
            "1 for each uplink on which the programs are attached, with the kind of the program that translates requests",
            device_info,
        );
        registry.register(
            "problems",
            "Problems that keep Pod ports from being served as requested, by reason of the Event",
            problems,
        );
    }
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;

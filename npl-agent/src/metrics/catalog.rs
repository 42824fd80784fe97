// SPDX-License-Identifier: Apache-2.0
//! Every metric and label value with its meaning, for `docs/reference/metrics.md`.

use std::sync::Arc;

use npl_common::{reason::Reason, stats::MappingStats};

use super::{
    Counts, DatapathCounters, EventOutcome, FailureKind, Families, FamilyTotals, Format, Metrics, OpName, OpOutcome,
    PatchOutcome, RemovalCause, RequestProgram, SweptTable, WatchedResource,
    labels::{
        DeviceLabel, DeviceState, EventLabel, FamilyLabel, FlowTableLabels, OpLabels, OutcomeLabel, PortLabels,
        PortState, ProtocolLabel, ReasonLabel, SubjectLabel, WatchLabels,
    },
};
use crate::core::{
    model::{Family, Protocol},
    publish::event_reason::EventReason,
    repairs::RepairedObject,
};

/// A metric as it appears in a scrape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricInfo {
    /// The name of the metric's series; for a histogram, without the suffixes `_bucket`, `_sum` and `_count`.
    pub name: String,
    /// The metric's type, as it appears in a scrape.
    pub kind: String,
    /// The help text in the scrape.
    pub help: String,
    /// The labels of the metric's series.
    pub labels: Vec<Label>,
}

/// A label of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// The name of the label.
    pub name: &'static str,
    /// The values of the label.
    pub values: Values,
}

/// The values of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Each value and its meaning.
    Listed(&'static [(&'static str, &'static str)]),
    /// The names of [`npl_common::reason::Reason`].
    Reasons,
    /// The names of [`crate::core::publish::event_reason::EventReason`].
    EventReasons,
    /// One value for each build of the agent, and the meaning of this value.
    Build(&'static str),
    /// Names that are not a fixed set, for example names of devices, and the meaning of these names.
    Names(&'static str),
}

macro_rules! meanings {
    ($( $(#[$meta:meta])* $list:ident of $ty:ident { $( $variant:ident: $meaning:literal, )+ } )+) => {$(
        $(#[$meta])*
        const $list: &[(&str, &str)] = {
            // The compiler reports a new variant for which this match states no meaning.
            const fn is_listed(value: $ty) -> bool {
                match value { $( $ty::$variant => true, )+ }
            }
            &[ $( { assert!(is_listed($ty::$variant)); ($ty::$variant.as_str(), $meaning) }, )+ ]
        };
    )+};
}

meanings! {
    OPS of OpName {
        Reserve: "Bind a socket to the node port, so that no other process takes the port.",
        AllowSources: "Write the allowed sources of a mapping.",
        UpsertMapping: "Write a mapping.",
        Annotate: "Write or remove the annotation of a Pod.",
        OpenGate: "Set the condition of a Pod's readiness gate.",
        RemoveMapping: "Remove a mapping and its conntrack entries.",
        ForgetSources: "Remove allowed sources of a mapping.",
        Release: "Close the socket of the node port.",
    }
    OP_OUTCOMES of OpOutcome {
        Done: "The operation succeeded.",
        PortTaken: "Another process uses the node port; the agent tries another node port.",
        RecentTraffic: "Within about the last two minutes, the node port received a packet while it had no mapping, or a \
                        mapping of the port was removed; the agent tries another node port.",
        Retry: "The operation failed, and the agent retries the operation after a back-off; the agent's log has the \
                error.",
        Gone: "The Pod is deleted.",
    }
    PATCH_OUTCOMES of PatchOutcome {
        Patched: "The API server applied the patch.",
        Gone: "The Pod is deleted.",
        Denied: "The API server rejects the credentials (401) or denies the patch (403); apply `deploy/npl.yaml`.",
        Refused: "The API server rejects the annotation; the agent's log has the answer.",
        Unavailable: "The API server cannot answer at the moment; the agent retries with a back-off.",
        Unreachable: "The connection to the API server failed; the agent retries with a back-off.",
        TimedOut: "The API server did not answer in time; the agent retries with a back-off.",
        Malformed: "The agent cannot decode the answer; a proxy may have answered instead of the API server.",
    }
    EVENT_OUTCOMES of EventOutcome {
        Created: "A new Event was created.",
        Repeated: "The count of an existing Event was incremented.",
        Shared: "An agent has written the same Event about a Service in the last 15 minutes, so this agent did not write the Event.",
        Gone: "The namespace is deleted or terminating.",
        Denied: "The agent lacks the permission to write Events; apply `deploy/npl.yaml`.",
        Failed: "The request failed for another reason; the agent retries the request.",
    }
    WATCHED of WatchedResource {
        Pods: "The Pods of this Node.",
        Services: "All Services that `--namespaces` and `--service-selector` select.",
        Node: "This Node.",
    }
    FAILURES of FailureKind {
        Unauthorized: "401: the API server does not accept the token; check the ServiceAccount and the Node's clock.",
        Forbidden: "403: the agent lacks a permission; apply `deploy/npl.yaml`.",
        Expired: "410: the resource version of the watch has expired, and the watch starts again with a list. This is normal.",
        Restored: "The resource versions decreased, as after a restore of etcd from a backup. The agent lists all objects again.",
        Unavailable: "429 or 5xx: the API server cannot answer at the moment.",
        Rejected: "The API server answers with another HTTP error.",
        Unreachable: "The connection to the API server failed, or no answer arrived in time.",
        Malformed: "The agent cannot decode the answer.",
    }
    FAMILIES of Family {
        V4: "IPv4.",
        V6: "IPv6.",
    }
    PROTOCOLS of Protocol {
        Tcp: "TCP.",
        Udp: "UDP.",
        Sctp: "SCTP.",
    }
    PORT_STATES of PortState {
        Used: "The node port is allocated to a mapping.",
        Free: "The node port is available for a new mapping.",
        Quarantined: "The node port is not reused before the time of `--quarantine` is over.",
    }
    REMOVAL_CAUSES of RemovalCause {
        Expired: "The flow had ended, or had been idle for longer than its timeout.",
        MappingRemoved: "The mapping of the flow was removed.",
        Evicted: "The table was full, and the kernel evicted the least recently used entries. The next packet of a \
                  flow's client recreates the flow's entry.",
    }
    SWEPT_TABLES of SweptTable {
        HalfOpen: "Half-open cache: flows without a complete handshake, and copies of established flows. The fuller the cache, the \
                   more often a new flow overwrites an older one.",
        SocketReverseNat: "Socket reverse NAT: entries for the sockets of local clients.",
    }
    DEVICE_STATES of DeviceState {
        Attached: "The programs are attached to the device.",
        Failed: "The programs are not attached to the device, so clients behind this device are not served.",
    }
    REQUEST_PROGRAMS of RequestProgram {
        Xdp: "An XDP program translates requests; TC programs translate replies and the packets that XDP passes on.",
        Tcx: "TC programs with TCX links translate requests and replies.",
        Clsact: "Before Linux 6.6, TC programs as filters of a clsact qdisc translate requests and replies.",
    }
    REPAIRED_OBJECTS of RepairedObject {
        TcxLink: "A TCX link of a TC program (since Linux 6.6).",
        Filter: "A TC filter (before Linux 6.6).",
        Qdisc: "The clsact qdisc of the filters (before Linux 6.6). The filters of a removed qdisc count as well.",
        XdpLink: "The link of the XDP program.",
        CgroupLink: "A link of a program for local clients on the cgroup.",
        MapEntry: "An element of a map that only the agent writes, such as a mapping. Conntrack entries and counters do not \
                   count.",
        Pin: "The pin of a map or program below `/sys/fs/bpf/npl`.",
        NftTable: "The nftables table `inet npl`, or a chain, rule or element of the table.",
    }
}

const DIRECTIONS: &[(&str, &str)] =
    &[("request", "Packets from the client to the Pod."), ("reply", "Packets from the Pod to the client.")];
const FLOW_STATES: &[(&str, &str)] = &[
    ("new", "The first packet of the flow was translated."),
    ("established", "The handshake or the first exchange of packets was completed."),
];

/// The labels of each metric that has labels.
const LABELS: &[(&str, &[Label])] = &[
    ("npl_ops_total", &[listed("op", OPS), listed("outcome", OP_OUTCOMES)]),
    ("npl_annotation_patches_total", &[listed("outcome", PATCH_OUTCOMES)]),
    ("npl_events_total", &[listed("outcome", EVENT_OUTCOMES)]),
    ("npl_watch_errors_total", &[listed("subject", WATCHED), listed("kind", FAILURES)]),
    ("npl_flow_table_entries", &[listed("family", FAMILIES), listed("protocol", PROTOCOLS)]),
    ("npl_flow_table_max_entries", &[listed("protocol", PROTOCOLS)]),
    ("npl_flow_table_removals_total", &[listed("family", FAMILIES), listed("cause", REMOVAL_CAUSES)]),
    ("npl_table_entries", &[listed("table", SWEPT_TABLES), listed("family", FAMILIES)]),
    ("npl_table_max_entries", &[listed("table", SWEPT_TABLES), listed("family", FAMILIES)]),
    ("npl_mappings", &[listed("family", FAMILIES)]),
    ("npl_watch_last_change_timestamp_seconds", &[listed("subject", WATCHED)]),
    ("npl_node_ports", &[listed("family", FAMILIES), listed("protocol", PROTOCOLS), listed("state", PORT_STATES)]),
    ("npl_devices", &[listed("state", DEVICE_STATES)]),
    (
        "npl_device_info",
        &[Label { name: "device", values: Values::Names("Name of the uplink.") }, listed("kind", REQUEST_PROGRAMS)],
    ),
    ("npl_repairs_total", &[listed("object", REPAIRED_OBJECTS)]),
    ("npl_problems", &[Label { name: "reason", values: Values::EventReasons }]),
    (
        "npl_build_info",
        &[
            Label { name: "version", values: Values::Build("Version of the agent.") },
            Label { name: "abi", values: Values::Build("ABI version of the maps.") },
        ],
    ),
    ("npl_datapath_reason_packets_total", &[Label { name: "reason", values: Values::Reasons }]),
    ("npl_datapath_packets_total", &[listed("family", FAMILIES), listed("direction", DIRECTIONS)]),
    ("npl_datapath_bytes_total", &[listed("family", FAMILIES), listed("direction", DIRECTIONS)]),
    ("npl_datapath_flows_total", &[listed("family", FAMILIES), listed("state", FLOW_STATES)]),
    ("npl_service_packets_total", &of_service(listed("direction", DIRECTIONS))),
    ("npl_service_bytes_total", &of_service(listed("direction", DIRECTIONS))),
    ("npl_service_flows_total", &of_service(listed("state", FLOW_STATES))),
];

const fn of_service(last: Label) -> [Label; 5] {
    [
        Label {
            name: "service_namespace",
            values: Values::Names(
                "Namespace of the Service; `_other` for the sum of all Service ports beyond the limit of `--service-metrics`.",
            ),
        },
        Label { name: "service_name", values: Values::Names("Name of the Service; `_other` as above.") },
        Label {
            name: "pod_port",
            values: Values::Names("Number of the Pod port to which the Service sends traffic; `_other` as above."),
        },
        Label { name: "protocol", values: Values::Names("Protocol: `tcp`, `udp` or `sctp`; `_other` as above.") },
        last,
    ]
}

const fn listed(name: &'static str, values: &'static [(&'static str, &'static str)]) -> Label {
    Label { name, values: Values::Listed(values) }
}

/// Example values of the datapath's counters, so that a scrape contains each metric of the datapath.
struct Sample;

impl DatapathCounters for Sample {
    fn read(&self) -> Counts {
        Counts {
            reasons: vec![(Reason::NoMapping.name(), 0)],
            totals: vec![FamilyTotals { family: Family::V4, stats: MappingStats::ZERO }],
            services: Some(vec![(None, MappingStats::ZERO)]),
        }
    }
}

impl Metrics {
    /// Creates metrics with one series each, because a scrape omits metrics without series.
    fn sample() -> Self {
        let metrics = Self::new(Arc::new(Sample));
        let Families {
            ops,
            pass_seconds: _,
            last_successful_pass: _,
            patches,
            patch_seconds: _,
            publication_seconds: _,
            flows,
            flow_limit,
            flow_removals: _,
            table_entries: _,
            table_limits: _,
            events,
            watch_errors,
            watch_changes,
            pending_patches: _,
            ready: _,
            mappings,
            ports,
            devices,
            device_info: _,
            problems,
            redirect_refused: _,
            programs_ahead: _,
            repairs: _,
        } = &metrics.0.families;
        drop(ops.get_or_create(&OpLabels { op: OpName::Reserve, outcome: OpOutcome::Done }));
        drop(patches.get_or_create(&OutcomeLabel { outcome: PatchOutcome::Patched }));
        drop(flows.get_or_create(&FlowTableLabels { family: Family::V4, protocol: Protocol::Tcp }));
        drop(flow_limit.get_or_create(&ProtocolLabel { protocol: Protocol::Tcp }));
        drop(events.get_or_create(&EventLabel { outcome: EventOutcome::Created }));
        let (subject, kind) = (WatchedResource::Pods, FailureKind::Expired);
        drop(watch_errors.get_or_create(&WatchLabels { subject, kind }));
        drop(watch_changes.get_or_create(&SubjectLabel { subject }));
        drop(mappings.get_or_create(&FamilyLabel { family: Family::V4 }));
        drop(ports.get_or_create(&PortLabels { family: Family::V4, protocol: Protocol::Tcp, state: PortState::Free }));
        drop(devices.get_or_create(&DeviceLabel { state: DeviceState::Attached }));
        drop(problems.get_or_create(&ReasonLabel { reason: EventReason::PortRangeExhausted.name() }));
        metrics.count_removed_flows(Family::V4, RemovalCause::Expired, 0);
        metrics.set_table_fill(SweptTable::HalfOpen, Family::V4, 0, 0);
        metrics.set_request_programs([("eth0".to_owned(), RequestProgram::Tcx)]);
        metrics
    }
}

/// Returns every metric, in the order of a scrape.
pub fn catalog() -> Vec<MetricInfo> {
    let text = Metrics::sample().encode(Format::OpenMetrics).unwrap_or_default();
    let mut metrics: Vec<MetricInfo> = Vec::new();
    let mut help = String::new();
    for line in text.lines() {
        if let Some((_name, shown)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            shown.clone_into(&mut help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let name = format!("{name}{}", suffix(kind));
            let labels = LABELS.iter().find(|(known, _)| *known == name).map(|(_, labels)| labels.to_vec());
            let (kind, help) = (kind.to_owned(), std::mem::take(&mut help));
            metrics.push(MetricInfo { name, kind, help, labels: labels.unwrap_or_default() });
        }
    }
    metrics
}

/// The suffix of a series' name by the type of the metric, as the exposition format requires.
fn suffix(kind: &str) -> &'static str {
    match kind {
        "counter" => "_total",
        "info" => "_info",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::{Format, LABELS, Metrics, Values, catalog};

    /// The labels of each series and their values.
    fn series(text: &str) -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
        let mut found: BTreeMap<_, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
        for (name, rest) in text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('{')) {
            let labels = rest.split('}').next().unwrap_or_default();
            for (label, value) in labels.split(',').filter_map(|label| label.split_once('=')) {
                let values = found.entry(name.to_owned()).or_default().entry(label.to_owned()).or_default();
                values.insert(value.trim_matches('"').to_owned());
            }
        }
        found
    }

    #[test]
    fn series_of_a_scrape_have_the_listed_names_and_labels() {
        let text = Metrics::sample().encode(Format::OpenMetrics).unwrap();
        let mut found = series(&text);
        found.retain(|name, _| !name.ends_with("_bucket"));
        assert_eq!(
            found.keys().map(String::as_str).collect::<BTreeSet<_>>(),
            LABELS.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>()
        );
        for (name, listed) in LABELS {
            let labels: BTreeSet<_> = found[*name].keys().map(String::as_str).collect();
            assert_eq!(labels, listed.iter().map(|label| label.name).collect(), "{name}");
            for label in *listed {
                let Values::Listed(values) = label.values else { continue };
                let is_listed = |value: &String| values.iter().any(|(known, _)| known == value);
                assert!(found[*name][label.name].iter().all(is_listed), "{name} {}", label.name);
            }
        }
        for metric in catalog() {
            let series =
                [format!("\n{}{{", metric.name), format!("\n{} ", metric.name), format!("\n{}_count ", metric.name)];
            assert!(series.iter().any(|start| text.contains(start)), "{} is missing from\n{text}", metric.name);
        }
    }
}

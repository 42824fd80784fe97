// SPDX-License-Identifier: Apache-2.0
//! Keeps the feed's own metrics, and the state of the feed's watches for `/readyz`.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
};

use npl_agent::{
    core::pages,
    kube::watch_health::WatchObserver,
    metrics::{FailureKind, WatchedResource},
};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::core::entries::LeftOut;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SubjectLabels {
    subject: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    subject: &'static str,
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AnswerLabels {
    answer: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct XdsLabels {
    r#type: &'static str,
    event: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    interface: &'static str,
    reason: &'static str,
}

/// An interface that clients reach by HTTP/1.1 and HTTP/2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    /// Members, probes and metrics.
    Http,
    /// xDS.
    Xds,
}

impl Interface {
    /// Returns the name of the interface in metrics and log lines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Xds => "xds",
        }
    }
}

/// The reason why the feed has refused a client, or has ended the client's connection or stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientRefusal {
    /// `--allow` does not contain the client's address.
    Allow,
    /// The interface has its maximum number of connections.
    Connections,
    /// The maximum number of long polls are waiting, so a further long poll was answered immediately.
    Requests,
    /// Too many xDS streams are open.
    Streams,
    /// The xDS streams subscribe to too many names.
    Names,
    /// Unread answers and incomplete requests take too much memory.
    Memory,
}

impl ClientRefusal {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Connections => "connections",
            Self::Requests => "requests",
            Self::Streams => "streams",
            Self::Names => "names",
            Self::Memory => "memory",
        }
    }
}

/// The counters and gauges of the feed, and the state of its watches.
pub struct Status {
    registry: Registry,
    /// The watched resources whose last list or watch request failed, each with the kind of failure.
    failing: Mutex<BTreeMap<WatchedResource, FailureKind>>,
    watch_errors: Family<ErrorLabels, Counter>,
    watch_failing: Family<SubjectLabels, Gauge>,
    left_out: Family<ReasonLabels, Gauge>,
    snapshots: Counter,
    groups: Gauge,
    members: Gauge,
    dns: Family<AnswerLabels, Counter>,
    http: Family<AnswerLabels, Counter>,
    xds: Family<XdsLabels, Counter>,
    xds_streams: Gauge,
    xds_names: Gauge,
    refused: Family<RefusalLabels, Counter>,
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Status").finish_non_exhaustive()
    }
}

const SUBJECTS: [WatchedResource; 3] = [WatchedResource::Pods, WatchedResource::Services, WatchedResource::Node];

impl Default for Status {
    fn default() -> Self {
        let mut status = Self {
            registry: Registry::with_prefix("npl_feed"),
            failing: Mutex::default(),
            watch_errors: Family::default(),
            watch_failing: Family::default(),
            left_out: Family::default(),
            snapshots: Counter::default(),
            groups: Gauge::default(),
            members: Gauge::default(),
            dns: Family::default(),
            http: Family::default(),
            xds: Family::default(),
            xds_streams: Gauge::default(),
            xds_names: Gauge::default(),
            refused: Family::default(),
        };
        status.register();
        status
    }
}

impl Status {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("watch_errors", "Failed lists and watches, by resource and kind", self.watch_errors.clone());
        registry.register(
            "watch_failing",
            "1 while the last list or watch of a resource has failed and the feed serves the last known state; otherwise 0",
            self.watch_failing.clone(),
        );
        registry.register(
            "left_out_entries",
            "Annotation entries that the feed currently does not serve, by reason",
            self.left_out.clone(),
        );
        registry.register(
            "snapshots",
            "Snapshots published; each differs from the previous snapshot",
            self.snapshots.clone(),
        );
        registry.register("service_ports", "Service ports in the snapshot", self.groups.clone());
        registry.register("members", "Members in the snapshot", self.members.clone());
        registry.register("dns_answers", "DNS queries answered, by response code", self.dns.clone());
        registry.register("http_answers", "HTTP requests answered, by class of the status code", self.http.clone());
        registry.register(
            "xds_messages",
            "xDS messages by resource type and event: subscribe, sent, ack, nack, stale, unknown_type or malformed",
            self.xds.clone(),
        );
        registry.register("xds_streams", "Open xDS streams", self.xds_streams.clone());
        registry.register(
            "xds_names",
            "Names to which all open xDS streams subscribe; --xds-max-names limits the number",
            self.xds_names.clone(),
        );
        registry.register(
            "refused_connections",
            "Clients that the feed refused, and connections and streams that it ended, because of --allow or a limit, \
             by interface and reason: allow, connections, requests, streams, names or memory",
            self.refused.clone(),
        );
        for subject in SUBJECTS {
            self.watch_failing.get_or_create(&SubjectLabels { subject: subject.as_str() }).set(0);
        }
        for reason in LeftOut::ALL {
            self.left_out.get_or_create(&ReasonLabels { reason: reason.as_str() }).set(0);
        }
    }

    /// Encodes the metrics in the `OpenMetrics` text format.
    ///
    /// # Errors
    ///
    /// Returns an error if the value of a metric cannot be formatted.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Sets the number of annotation entries that are currently left out, by reason.
    pub fn set_left_out(&self, sums: &BTreeMap<LeftOut, usize>) {
        for reason in LeftOut::ALL {
            let count = sums.get(&reason).copied().unwrap_or_default();
            self.left_out.get_or_create(&ReasonLabels { reason: reason.as_str() }).set(gauge(count));
        }
    }

    /// Counts a published snapshot, and records the number of its groups and members.
    pub fn record_snapshot(&self, groups: usize, members: usize) {
        self.snapshots.inc();
        self.groups.set(gauge(groups));
        self.members.set(gauge(members));
    }

    /// Counts a DNS answer by its response code.
    pub fn count_dns(&self, answer: &'static str) {
        self.dns.get_or_create(&AnswerLabels { answer }).inc();
    }

    /// Creates the counter of DNS answers with a response code, because an alert computes the increase of this counter.
    /// Prometheus sees no increase in the first sample of a series, so the series has to exist before the first answer.
    pub fn create_dns_counter(&self, answer: &'static str) {
        drop(self.dns.get_or_create(&AnswerLabels { answer }));
    }

    /// Counts an HTTP answer by its status code class, such as `2xx`.
    pub fn count_http(&self, answer: &'static str) {
        self.http.get_or_create(&AnswerLabels { answer }).inc();
    }

    /// Counts an xDS message. `kind` is the short name of the resource type.
    pub fn count_xds(&self, kind: &'static str, event: &'static str) {
        self.xds.get_or_create(&XdsLabels { r#type: kind, event }).inc();
    }

    /// Like [`Self::create_dns_counter`], for the counter of an xDS event.
    pub fn create_xds_counter(&self, kind: &'static str, event: &'static str) {
        drop(self.xds.get_or_create(&XdsLabels { r#type: kind, event }));
    }

    /// Adds `difference` to the number of open xDS streams.
    pub fn add_xds_stream(&self, difference: i64) {
        self.xds_streams.inc_by(difference);
    }

    /// Sets the number of names to which all xDS streams subscribe.
    pub fn set_xds_names(&self, names: usize) {
        self.xds_names.set(gauge(names));
    }

    /// Counts a client that an interface has refused, or a connection or stream that the interface has ended.
    pub fn count_refused(&self, interface: &'static str, reason: ClientRefusal) {
        self.refused.get_or_create(&RefusalLabels { interface, reason: reason.as_str() }).inc();
    }

    /// Returns one line that names the failing watches; `None` if no watch fails.
    pub fn outage(&self) -> Option<String> {
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<String> =
            failing.iter().map(|(subject, kind)| format!("{subject} ({})", kind.as_str())).collect();
        (!names.is_empty())
            .then(|| format!("the watch of {} is interrupted: the last known state is served", names.join(", ")))
    }
}

impl WatchObserver for Status {
    fn process(&self) -> &'static str {
        "feed"
    }

    fn manifest(&self) -> &'static str {
        "deploy/npl-feed.yaml"
    }

    fn page(&self) -> String {
        pages::FEED_FAILURES.to_owned()
    }

    fn record_failure(&self, subject: WatchedResource, kind: FailureKind, _cause: &str) {
        self.watch_errors.get_or_create(&ErrorLabels { subject: subject.as_str(), kind: kind.as_str() }).inc();
        if kind.only_restarts_watch() {
            return;
        }
        self.failing.lock().unwrap_or_else(PoisonError::into_inner).insert(subject, kind);
        self.watch_failing.get_or_create(&SubjectLabels { subject: subject.as_str() }).set(1);
    }

    fn record_success(&self, subject: WatchedResource) {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner).remove(&subject);
        self.watch_failing.get_or_create(&SubjectLabels { subject: subject.as_str() }).set(0);
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    #[test]
    fn an_expired_watch_is_counted_and_is_no_outage() {
        let status = Status::default();
        let outage = |kind| {
            status.record_failure(WatchedResource::Pods, kind, "");
            (status.outage(), status.encode().unwrap())
        };
        for kind in [FailureKind::Expired, FailureKind::Restored] {
            let (outage, metrics) = outage(kind);
            assert_eq!(outage, None);
            assert!(metrics.contains("npl_feed_watch_failing{subject=\"pods\"} 0\n"), "{metrics}");
            let counted = format!("npl_feed_watch_errors_total{{subject=\"pods\",kind=\"{}\"}} 1\n", kind.as_str());
            assert!(metrics.contains(&counted), "{metrics}");
        }
        let (text, metrics) = outage(FailureKind::Unreachable);
        assert!(text.is_some_and(|text| text.contains("pods (unreachable)")));
        assert!(metrics.contains("npl_feed_watch_failing{subject=\"pods\"} 1\n"), "{metrics}");
        status.record_success(WatchedResource::Pods);
        assert_eq!(status.outage(), None);
    }

    /// Returns the names of the feed's metrics in a file of the chart.
    fn metrics_in(text: &str) -> BTreeSet<&str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        text.split(move |c| !is_part(c)).filter(|word| word.starts_with("npl_feed_")).collect()
    }

    #[test]
    fn alerts_and_dashboard_name_metrics_that_exist() {
        let status = Status::default();
        // A metric family without series has no line in the text.
        status.count_dns("noerror");
        status.count_http("2xx");
        status.count_xds("cds", "ack");
        status.count_refused("xds", ClientRefusal::Names);
        status.record_failure(WatchedResource::Pods, FailureKind::Unreachable, "");
        let text = status.encode().unwrap();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let known: BTreeSet<String> = types
            .map(|(name, kind)| if kind == "counter" { format!("{name}_total") } else { name.to_owned() })
            .collect();
        for file in ["alerts.yaml", "dashboard.json"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/npl/files").join(file);
            let text = fs::read_to_string(path).unwrap();
            let named = metrics_in(&text);
            assert!(named.len() > 3, "{named:?}");
            let unknown: Vec<_> = named.into_iter().filter(|name| !known.contains(*name)).collect();
            assert!(unknown.is_empty(), "{file} names {unknown:?}; the feed has {known:?}");
        }
    }
}

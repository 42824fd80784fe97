// SPDX-License-Identifier: Apache-2.0
//! Counts the agents' requests by kind: the API server has one flow schema per kind, and counts the requests of each.

use anyhow::{Context as _, Result, ensure};
use npl_testkit::api_client::ApiClient;
use npl_testkit::control_plane::AGENT_USER;
use npl_testkit::poll;
use serde_json::json;

use super::environment::LIMIT;

const SCHEMAS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
const QUESTIONS: &str = "npl-questions";
const WRITES: &str = "npl-writes";
const WATCHES: &str = "npl-watches";
const READS: &str = "npl-reads";
const DISPATCHED: &str = "apiserver_flowcontrol_dispatched_requests_total";
const REJECTED: &str = "apiserver_flowcontrol_rejected_requests_total";
/// The priority level that the API server uses for service accounts by default. With this level, the schemas do not
/// change how the API server schedules the agents' requests.
const LEVEL: &str = "workload-low";

/// The number of requests of all agents since [`Requests::count_from_now_on`], by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Permission checks, which are POST requests.
    pub(crate) questions: u64,
    /// Requests that may change an object.
    pub(crate) writes: u64,
    /// Watch requests.
    pub(crate) watches: u64,
    /// All other requests.
    pub(crate) reads: u64,
}

impl Requests {
    /// Makes the API server count requests from now on.
    pub(crate) fn count_from_now_on(client: &ApiClient) -> Result<()> {
        let verbs = [
            (QUESTIONS, 50, "authorization.k8s.io", json!(["create"])),
            (WRITES, 51, "*", json!(["create", "update", "patch", "delete"])),
            (WATCHES, 52, "*", json!(["watch"])),
            (READS, 53, "*", json!(["*"])),
        ];
        for (name, precedence, group, verbs) in verbs {
            let schema = json!({
                "metadata": {"name": name},
                "spec": {
                    "priorityLevelConfiguration": {"name": LEVEL},
                    "matchingPrecedence": precedence,
                    "rules": [{
                        "subjects": [{"kind": "User", "user": {"name": AGENT_USER}}],
                        "resourceRules": [{
                            "verbs": verbs,
                            "apiGroups": [group],
                            "resources": ["*"],
                            "namespaces": ["*"],
                            "clusterScope": true,
                        }],
                    }],
                },
            });
            client.create(SCHEMAS, &schema)?;
        }
        let dump = || client.text("/debug/api_priority_and_fairness/dump_priority_levels").ok();
        // The API server applies new schemas asynchronously and in order, so waiting for the last one is enough.
        let is_followed = || {
            let schema = client.get(&format!("{SCHEMAS}/{READS}")).ok()?;
            let conditions = schema.pointer("/status/conditions")?.as_array()?.len();
            (conditions > 0 && dump().is_some()).then_some(())
        };
        poll::until("the API server to count requests by kind", LIMIT, is_followed).map(drop)
    }

    /// Returns the current counts.
    pub(crate) fn counted(client: &ApiClient) -> Result<Self> {
        Self::in_metrics(&client.text("/metrics")?)
    }

    /// Returns the counts in the API server's metrics.
    pub(crate) fn in_metrics(metrics: &str) -> Result<Self> {
        let of = |schema| sum_of(metrics, DISPATCHED, &format!("flow_schema=\"{schema}\""));
        Ok(Self { questions: of(QUESTIONS)?, writes: of(WRITES)?, watches: of(WATCHES)?, reads: of(READS)? })
    }

    /// Returns the number of requests of all clients that the API server has rejected since its start.
    pub(crate) fn refused(client: &ApiClient) -> Result<u64> {
        sum_of(&client.text("/metrics")?, REJECTED, "")
    }

    /// Returns the requests since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        let Self { questions, writes, watches, reads } = before;
        Self {
            questions: self.questions - questions,
            writes: self.writes - writes,
            watches: self.watches - watches,
            reads: self.reads - reads,
        }
    }

    /// The number of requests of all kinds.
    pub(crate) fn all(self) -> u64 {
        self.but_watches() + self.watches
    }

    /// The number of requests without watches.
    pub(crate) fn but_watches(self) -> u64 {
        self.questions + self.writes + self.reads
    }

    /// Fails if the running agent's requests are not counted: a missing count must not appear as zero requests.
    pub(crate) fn ensure_counted(self) -> Result<()> {
        ensure!(self.watches >= 3, "the API server does not count the agent's watches: {self:?}");
        Ok(())
    }
}

/// Returns the sum of a metric's values whose labels contain `label`.
pub(crate) fn sum_of(metrics: &str, name: &str, label: &str) -> Result<u64> {
    let is_meant =
        |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') && rest.contains(label));
    let count = |line: &str| -> Result<u64> {
        let count = line.rsplit(' ').next().unwrap_or_default();
        let count: f64 = count.parse().with_context(|| format!("parse the value of `{line}`"))?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
        Ok(count as u64)
    };
    metrics.lines().filter(is_meant).map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::{DISPATCHED, Requests, sum_of};

    const METRICS: &str = "# TYPE apiserver_flowcontrol_dispatched_requests_total counter
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"npl-reads\",priority_level=\"workload-low\"} 4
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"npl-writes\",priority_level=\"workload-low\"} 1e+03
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"probes\",priority_level=\"exempt\"} 7
";

    #[test]
    fn requests_are_counted_by_their_schemas() {
        let counted = Requests::in_metrics(METRICS).unwrap();
        assert_eq!(counted, Requests { questions: 0, writes: 1000, watches: 0, reads: 4 });
        assert_eq!((counted.all(), counted.since(counted).all()), (1004, 0));
    }

    #[test]
    fn a_metric_is_summed_over_its_labels() {
        assert_eq!(sum_of(METRICS, DISPATCHED, "").unwrap(), 1011);
        assert_eq!(sum_of(METRICS, "apiserver_flowcontrol", "").unwrap(), 0);
    }
}

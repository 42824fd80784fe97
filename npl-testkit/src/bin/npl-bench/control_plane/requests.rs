// SPDX-License-Identifier: Apache-2.0
//! What the API server says that the agents asked of it: it sorts requests by who sends them, and counts each sort.

use anyhow::{Context as _, Result, ensure};
use npl_testkit::api_client::ApiClient;
use npl_testkit::control_plane::AGENT_USER;
use npl_testkit::poll;
use serde_json::json;

use super::scene::LIMIT;

const SCHEMAS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
const WRITES: &str = "npl-writes";
const WATCHES: &str = "npl-watches";
const READS: &str = "npl-reads";
/// The level of all service accounts: the agents are treated as without these schemas.
const LEVEL: &str = "workload-low";

/// Requests of all agents since the API server started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Everything that may change an object, and the questions about permissions.
    pub(crate) writes: u64,
    /// Watches that were opened.
    pub(crate) watches: u64,
    /// Everything else.
    pub(crate) reads: u64,
}

impl Requests {
    /// Has the API server count; what was asked before is not counted.
    pub(crate) fn count_from_now_on(client: &ApiClient) -> Result<()> {
        let verbs = [
            (WRITES, 50, json!(["create", "update", "patch", "delete"])),
            (WATCHES, 51, json!(["watch"])),
            (READS, 52, json!(["*"])),
        ];
        for (name, precedence, verbs) in verbs {
            let schema = json!({
                "metadata": {"name": name},
                "spec": {
                    "priorityLevelConfiguration": {"name": LEVEL},
                    "matchingPrecedence": precedence,
                    "rules": [{
                        "subjects": [{"kind": "User", "user": {"name": AGENT_USER}}],
                        "resourceRules": [{
                            "verbs": verbs,
                            "apiGroups": ["*"],
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
        // The server's own controller takes new schemas in; the last one that was made is the last to be there.
        let is_followed = || {
            let schema = client.get(&format!("{SCHEMAS}/{READS}")).ok()?;
            let conditions = schema.pointer("/status/conditions")?.as_array()?.len();
            (conditions > 0 && dump().is_some()).then_some(())
        };
        poll::until("the API server to count requests by account", LIMIT, is_followed).map(drop)
    }

    /// What was counted.
    pub(crate) fn counted(client: &ApiClient) -> Result<Self> {
        let metrics = client.text("/metrics")?;
        let of = |schema: &str| -> Result<u64> {
            let marks = ["apiserver_flowcontrol_dispatched_requests_total{", &format!("flow_schema=\"{schema}\"")];
            let lines = metrics.lines().filter(|line| marks.iter().all(|mark| line.contains(mark)));
            lines
                .map(|line| {
                    let count = line.rsplit(' ').next().unwrap_or_default();
                    let count: f64 = count.parse().with_context(|| format!("read the count of `{line}`"))?;
                    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
                    Ok(count as u64)
                })
                .sum()
        };
        Ok(Self { writes: of(WRITES)?, watches: of(WATCHES)?, reads: of(READS)? })
    }

    /// Everything but watches that was asked since `before`.
    pub(crate) fn but_watches_since(self, before: Self) -> u64 {
        (self.writes - before.writes) + (self.reads - before.reads)
    }

    /// Fails if an agent that is there was not counted: a figure of nothing must not look like none.
    pub(crate) fn ensure_counted(self) -> Result<()> {
        ensure!(self.watches >= 3, "the API server counts no watches of the agent: {self:?}");
        Ok(())
    }
}

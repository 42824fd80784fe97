// SPDX-License-Identifier: Apache-2.0
//! Checks at start that an admission policy such as that of `deploy/npl.yaml` confines this agent. Without the check, a
//! missing policy, or one for another service account, would go unnoticed, because every write of the agent succeeds
//! without a policy.

use std::sync::{Arc, OnceLock};

use kube::{
    Api, Client, Resource as _,
    api::{ListParams, Patch, PatchParams},
    core::Request,
};
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::{
    backoff::Jittered,
    client::bounded,
    failure::{FailureKind, root_cause},
    objects::PodObject,
};

/// The label that the dry run adds. The agent never writes labels.
const LABEL: &str = "npl-agent-dry-run";
/// Number of dry runs until a missing policy is reported: the API server applies a new policy only after a few seconds.
const ATTEMPTS: usize = 6;

/// The result of the check, for the agent's commands. Clones share the same result.
#[derive(Debug, Clone, Default)]
pub struct ConfinementResult(Arc<OnceLock<bool>>);

impl ConfinementResult {
    /// Whether an admission policy confines this agent; `None` as long as the API server has not shown this.
    pub fn is_confined(&self) -> Option<bool> {
        self.0.get().copied()
    }
}

/// The API server's answer to a write that an agent must not make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Confinement {
    /// The API server rejects the write, so a policy confines the agent.
    Confined,
    /// The API server admits the write, so no policy confines the agent.
    Unconfined,
    /// The Node has no Pod for the dry run, or the API server gives no definite answer.
    Unknown,
}

/// Logs a warning if the API server would let this agent change more of a Pod than its annotation and condition.
pub(super) async fn check(client: &Client, node_name: &str, result: &ConfinementResult) {
    let found = confirmed(client, node_name).await;
    if found != Confinement::Unknown {
        result.0.get_or_init(|| found == Confinement::Confined);
    }
    match found {
        Confinement::Confined => debug!("an admission policy confines this agent"),
        Confinement::Unknown => debug!("the API server did not show whether an admission policy confines this agent"),
        Confinement::Unconfined => warn!(
            "no admission policy confines this agent: its token may change labels and status of every Pod; apply the \
             ValidatingAdmissionPolicy npl-agent and its binding of deploy/npl.yaml, and let its matchConditions name the \
             agent's service account"
        ),
    }
}

async fn confirmed(client: &Client, node_name: &str) -> Confinement {
    let mut last = Confinement::Unknown;
    for delay in Jittered::new().take(ATTEMPTS) {
        match bounded(probe(client, node_name)).await {
            Ok(Confinement::Confined) => return Confinement::Confined,
            Ok(other) => last = other,
            Err(err) => debug!(err = root_cause(&err), "checking the admission policy failed"),
        }
        sleep(delay).await;
    }
    last
}

/// Adds a label to a Pod of this Node, in a dry run that stores nothing.
async fn probe(client: &Client, node_name: &str) -> kube::Result<Confinement> {
    let of_this_node = ListParams::default().fields(&format!("spec.nodeName={node_name}")).limit(1);
    let pods = Api::<PodObject>::all(client.clone()).list(&of_this_node).await?;
    let Some(pod) = pods.items.into_iter().next().map(|pod| pod.metadata.object) else {
        return Ok(Confinement::Unknown);
    };
    let label = Patch::Merge(json!({ "metadata": { "labels": { LABEL: "true" } } }));
    let params = PatchParams { dry_run: true, ..PatchParams::default() };
    let url = PodObject::url_path(&(), pod.namespace.as_deref());
    let request = Request::new(url)
        .patch_subresource("status", pod.name.as_deref().unwrap_or_default(), &params, &label)
        .map_err(kube::Error::BuildRequest)?;
    match client.request::<IgnoredAny>(request).await {
        Ok(_stored_nothing) => Ok(Confinement::Unconfined),
        // An admission policy rejects with 422, a webhook with any other error. A 404 (the Pod was deleted) or a 409
        // does not show whether a policy exists.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(Confinement::Unknown),
        Err(err) if matches!(FailureKind::of(&err), FailureKind::Forbidden | FailureKind::Rejected) => {
            Ok(Confinement::Confined)
        }
        Err(err) => Err(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::mock::{MockServer, api_server, refusal};

    const DENIED: &str = "pods \"web-0\" is forbidden: ValidatingAdmissionPolicy 'npl-agent' with binding 'npl-agent' denied \
                          request: npl-agent may not write to a Pod's labels and finalizers";

    async fn confinement(server: impl AsyncFnOnce(&mut MockServer)) -> Confinement {
        let (client, mut mock) = api_server();
        let (result, ()) = tokio::join!(confirmed(&client, "worker-1"), server(&mut mock));
        result
    }

    /// Answers the list of Pods and, if there is a Pod, the dry run.
    async fn answer(server: &mut MockServer, pods: &[&str], code: u16, body: &str) {
        let list = server.next_request().await;
        assert_eq!(list.line, "GET /api/v1/pods?&fieldSelector=spec.nodeName%3Dworker-1&limit=1");
        let items: Vec<_> =
            pods.iter().map(|name| json!({ "metadata": { "namespace": "shop", "name": name } })).collect();
        list.answer(200, json!({ "metadata": {}, "items": items }).to_string());
        if pods.is_empty() {
            return;
        }
        let patch = server.next_request().await;
        assert_eq!(patch.line, "PATCH /api/v1/namespaces/shop/pods/web-0/status?&dryRun=All");
        assert_eq!(patch.body, json!({ "metadata": { "labels": { LABEL: "true" } } }));
        patch.answer(code, body);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_dry_run_proves_the_policy() {
        let denied = refusal(422, "Invalid", DENIED);
        let found = confinement(async |server: &mut MockServer| answer(server, &["web-0"], 422, &denied).await).await;
        assert_eq!(found, Confinement::Confined);
    }

    #[tokio::test(start_paused = true)]
    async fn a_policy_that_takes_effect_late_is_waited_for() {
        let denied = refusal(422, "Invalid", DENIED);
        let found = confinement(async |server: &mut MockServer| {
            answer(server, &["web-0"], 200, "{}").await;
            answer(server, &[], 0, "").await;
            answer(server, &["web-0"], 503, "").await;
            answer(server, &["web-0"], 422, &denied).await;
        });
        assert_eq!(found.await, Confinement::Confined);
    }

    #[tokio::test(start_paused = true)]
    async fn an_admitted_dry_run_shows_that_no_policy_confines_the_agent() {
        let found = confinement(async |server: &mut MockServer| {
            for _ in 0..ATTEMPTS {
                answer(server, &["web-0"], 200, "{}").await;
            }
        });
        assert_eq!(found.await, Confinement::Unconfined);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_pods_proves_nothing() {
        let found = confinement(async |server: &mut MockServer| {
            for _ in 0..ATTEMPTS {
                answer(server, &[], 0, "").await;
            }
        });
        assert_eq!(found.await, Confinement::Unknown);
    }
}

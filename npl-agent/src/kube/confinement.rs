// SPDX-License-Identifier: Apache-2.0
//! Checks at start, and then every 15 minutes, that an admission policy such as the one in `deploy/npl.yaml` restricts
//! the writes of this agent. If the policy is missing or names another service account, the API server accepts every
//! write that the agent's RBAC permissions allow. Only this check shows the mistake.

use std::time::Duration;

use kube::{
    Api, Client, Resource as _,
    api::{ListParams, Patch, PatchParams},
    core::Request,
};
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::{sync::watch, time::sleep};
use tracing::{debug, warn};

use super::{
    backoff::Jittered,
    client::bounded,
    failure::{FailureKind, root_cause},
    objects::PodObject,
};

use crate::core::pages;

/// The label that the dry run adds to a Pod. The agent never writes labels, so a policy that restricts the agent to its
/// own writes rejects this label.
const LABEL: &str = "npl-agent-dry-run";
/// The maximum number of dry runs in one check. A missing policy is reported only if the API server rejects none of
/// these dry runs. One dry run is not enough, because the API server applies a new policy only after a few seconds.
const ATTEMPTS: usize = 6;

/// The time between two checks of the admission policy. One check usually takes a single request to the API server, a
/// patch with `dryRun`.
const INTERVAL: Duration = Duration::from_mins(15);

/// Whether an admission policy restricts this agent, according to the last check with a definite result. The agent's
/// commands show this result. Clones of this value share the result.
#[derive(Debug, Clone, Default)]
pub struct ConfinementResult(watch::Sender<Option<bool>>);

impl ConfinementResult {
    /// Returns whether an admission policy restricts the writes of this agent; `None` until a check has had a definite
    /// result.
    pub fn is_confined(&self) -> Option<bool> {
        *self.0.borrow()
    }

    /// Stores the result of a check, and returns whether it differs from the previous result.
    fn replace(&self, is_confined: bool) -> bool {
        self.0.send_replace(Some(is_confined)) != Some(is_confined)
    }
}

/// The API server's answer to a write that an agent must not make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Confinement {
    /// The API server rejects the write, so a policy restricts the agent.
    Confined,
    /// The API server admits the write, so no policy restricts the agent.
    Unconfined,
    /// The result is not known, because the Node has no Pod for the dry run, or because the API server gives no
    /// definite answer.
    Unknown,
}

/// Repeats the check, because an operator may remove or apply the policy while the agent runs. Logs a warning if the
/// API server lets this agent change more of a Pod than the agent's own annotation and condition; repeats the warning
/// only after a check that found a policy.
pub(super) async fn keep_checking(client: &Client, node_name: &str, result: &ConfinementResult) -> ! {
    let mut dry_run = DryRun { client, node_name, pod: None };
    loop {
        let found = confirmed(&mut dry_run).await;
        if found == Confinement::Unknown {
            debug!("the API server did not show whether an admission policy restricts this agent's writes");
        } else if result.replace(found == Confinement::Confined) {
            log(found);
        }
        sleep(INTERVAL).await;
    }
}

fn log(found: Confinement) {
    if found == Confinement::Confined {
        debug!("an admission policy restricts this agent's writes");
    } else {
        warn!(
            see = pages::url(&pages::of_check("admission_policy")),
            "no admission policy restricts this agent's writes: the agent's token may change labels and status of every \
             Pod; apply the ValidatingAdmissionPolicy npl-agent and its binding from deploy/npl.yaml, and let the \
             matchConditions of the policy name the agent's service account"
        );
    }
}

async fn confirmed(dry_run: &mut DryRun<'_>) -> Confinement {
    let mut last = Confinement::Unknown;
    for delay in Jittered::new().take(ATTEMPTS) {
        match bounded(dry_run.probe()).await {
            Ok(Confinement::Confined) => return Confinement::Confined,
            Ok(other) => last = other,
            Err(err) => debug!(err = root_cause(&err), "checking the admission policy failed"),
        }
        sleep(delay).await;
    }
    last
}

/// Sends a write to a Pod of this Node as a dry run: the API server runs its admission policies, but stores nothing.
struct DryRun<'a> {
    client: &'a Client,
    node_name: &'a str,
    /// Namespace and name of the Pod of the last rejected dry run. The next check uses the same Pod, because listing
    /// Pods costs the API server more than the dry run.
    pod: Option<(String, String)>,
}

impl DryRun<'_> {
    /// Finds an arbitrary Pod of this Node, and returns the Pod's namespace and name.
    async fn find_pod(&self) -> kube::Result<Option<(String, String)>> {
        let of_this_node = ListParams::default().fields(&format!("spec.nodeName={}", self.node_name)).limit(1);
        let pods = Api::<PodObject>::all(self.client.clone()).list(&of_this_node).await?;
        let pod = pods.items.into_iter().next().map(|pod| pod.metadata.object);
        Ok(pod.map(|pod| (pod.namespace.unwrap_or_default(), pod.name.unwrap_or_default())))
    }

    /// Tries in a dry run to add a label to a Pod of this Node, and returns whether the API server rejects the label.
    async fn probe(&mut self) -> kube::Result<Confinement> {
        if self.pod.is_none() {
            self.pod = self.find_pod().await?;
        }
        let Some((namespace, name)) = &self.pod else { return Ok(Confinement::Unknown) };
        let answer = write(self.client, namespace, name).await;
        if !matches!(answer, Ok(Confinement::Confined)) {
            // The Pod may no longer exist on this Node, so the next dry run must find a Pod again.
            self.pod = None;
        }
        answer
    }
}

async fn write(client: &Client, namespace: &str, name: &str) -> kube::Result<Confinement> {
    let label = Patch::Merge(json!({ "metadata": { "labels": { LABEL: "true" } } }));
    let params = PatchParams { dry_run: true, ..PatchParams::default() };
    let url = PodObject::url_path(&(), Some(namespace));
    let request =
        Request::new(url).patch_subresource("status", name, &params, &label).map_err(kube::Error::BuildRequest)?;
    match client.request::<IgnoredAny>(request).await {
        Ok(_stored_nothing) => Ok(Confinement::Unconfined),
        // An admission policy rejects a write with the status 422; a webhook chooses the status. A 404 (the Pod was
        // deleted) or a 409 does not show whether a policy exists.
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

    /// A test sleeps for 14 of the 15 minutes between two checks before it waits for the next request, because the mock
    /// server waits at most 10 minutes for a request.
    const ALMOST: Duration = Duration::from_mins(14);
    const DENIED: &str = "pods \"web-0\" is forbidden: ValidatingAdmissionPolicy 'npl-agent' with binding 'npl-agent' denied \
                          request: npl-agent may not write to a Pod's labels and finalizers";

    async fn confinement(server: impl AsyncFnOnce(&mut MockServer)) -> Confinement {
        let (client, mut mock) = api_server();
        let mut dry_run = DryRun { client: &client, node_name: "worker-1", pod: None };
        let (result, ()) = tokio::join!(confirmed(&mut dry_run), server(&mut mock));
        result
    }

    /// Answers the agent's list of Pods with `pods`. If `pods` is not empty, also answers the dry run with `code` and
    /// `body`.
    async fn answer(server: &mut MockServer, pods: &[&str], code: u16, body: &str) {
        let list = server.next_request().await;
        assert_eq!(list.line, "GET /api/v1/pods?&fieldSelector=spec.nodeName%3Dworker-1&limit=1");
        let items: Vec<_> =
            pods.iter().map(|name| json!({ "metadata": { "namespace": "shop", "name": name } })).collect();
        list.answer(200, json!({ "metadata": {}, "items": items }).to_string());
        if !pods.is_empty() {
            answer_dry_run(server, code, body).await;
        }
    }

    async fn answer_dry_run(server: &mut MockServer, code: u16, body: &str) {
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
    /// If the agent checked only at its start, `npl-agent doctor` would not notice an admission policy that is removed
    /// or applied later.
    #[tokio::test(start_paused = true)]
    async fn a_policy_that_is_removed_and_applied_again_is_noticed() {
        let denied = refusal(422, "Invalid", DENIED);
        let (client, mut server) = api_server();
        let result = ConfinementResult::default();
        let served = async {
            answer(&mut server, &["web-0"], 422, &denied).await;
            // After a rejected dry run, the next check uses the same Pod, so it does not list Pods.
            sleep(ALMOST).await;
            assert_eq!(result.is_confined(), Some(true));
            answer_dry_run(&mut server, 200, "{}").await;
            for _ in 1..ATTEMPTS {
                answer(&mut server, &["web-0"], 200, "{}").await;
            }
            sleep(ALMOST).await;
            assert_eq!(result.is_confined(), Some(false));
            answer(&mut server, &["web-0"], 422, &denied).await;
            sleep(ALMOST).await;
            assert_eq!(result.is_confined(), Some(true));
        };
        tokio::select! {
            never = keep_checking(&client, "worker-1", &result) => never,
            () = served => {}
        }
    }
}

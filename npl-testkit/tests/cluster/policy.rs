// SPDX-License-Identifier: Apache-2.0
//! Tests that an agent's token permits only the writes that the agent needs.

use npl_testkit::api_client::ApiClient;
use npl_testkit::cluster::MAPPING_ANNOTATION;
use npl_testkit::poll;
use serde_json::{Value, json};

use crate::agent;
use crate::world::{AGENT_NAMESPACE, LIMIT, NAMESPACE, Pod, World};

pub(crate) fn an_agent_may_write_its_annotation_and_nothing_else(world: &mut World) {
    let agent = agent::on(world, "node-1");
    let shop = world.wait_for_shop(4);
    let on = |node: &str| shop.values().find(|pod| pod.node == node).unwrap();
    let (own, other) = (on("node-1"), on("node-2"));
    let bound = client(world, &["--bound-object-kind=Pod", "--bound-object-name", &agent.name]);

    // Retry, because the admission policy takes effect only some time after its creation.
    let labels = json!({"metadata": {"labels": {"app": "mine"}}});
    let denied = |error: anyhow::Error| format!("{error:#}").contains("denied request");
    let refused = || patch(&bound, own, &labels).is_err_and(denied).then_some(());
    poll::until("the admission policy to take effect", LIMIT, refused).unwrap();

    let annotation = own.annotation.as_deref().unwrap();
    let of_ours = json!({"metadata": {"annotations": {MAPPING_ANNOTATION: annotation}}});
    patch(&bound, own, &of_ours).unwrap();
    let condition = |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "False"}]}});
    strategic_patch(&bound, own, &condition("nodeportlocal.antrea.io/published")).unwrap();
    for kind in ["Ready", "example.org/published"] {
        let error = format!("{:#}", strategic_patch(&bound, own, &condition(kind)).unwrap_err());
        assert!(error.contains("denied request: ") && error.contains("status"), "{kind}: {error}");
    }
    for (what, change) in [
        ("labels", labels),
        ("labels", json!({"metadata": {"finalizers": ["example.org/mine"]}})),
        ("annotations", json!({"metadata": {"annotations": {"example.org/mine": "x"}}})),
        (
            "annotations",
            json!({"metadata": {"annotations": {MAPPING_ANNOTATION: annotation, "kubectl.kubernetes.io/x": ""}}}),
        ),
        ("status", json!({"status": {"phase": "Failed"}})),
        ("status", json!({"status": {"podIP": "203.0.113.1", "podIPs": [{"ip": "203.0.113.1"}]}})),
        ("status", json!({"metadata": {"annotations": {MAPPING_ANNOTATION: "[]"}}, "status": {"reason": "x"}})),
    ] {
        let error = format!("{:#}", patch(&bound, own, &change).unwrap_err());
        assert!(error.contains("denied request: ") && error.contains(what), "{change}: {error}");
    }
    let error = format!("{:#}", patch(&bound, other, &of_ours).unwrap_err());
    assert!(error.contains("of its own Node only"), "{error}");
    // A token that is not bound to a Pod names no Node, so it permits no write.
    let error = format!("{:#}", patch(&client(world, &[]), own, &of_ours).unwrap_err());
    assert!(error.contains("of its own Node only"), "{error}");
    assert_eq!(world.wait_for_shop(4), shop, "a rejected request has changed a Pod");
}

/// Returns a client with a token of the agent's service account.
fn client(world: &mut World, flags: &[&str]) -> ApiClient {
    let words = ["create", "token", "npl-agent", "--namespace", AGENT_NAMESPACE];
    let token = world.kubectl(&[&words, flags].concat());
    world.cluster.plane().client_with(token.trim()).unwrap()
}

fn patch(client: &ApiClient, pod: &Pod, change: &Value) -> anyhow::Result<()> {
    client.merge_patch(&status(pod), change).map(drop)
}

fn strategic_patch(client: &ApiClient, pod: &Pod, change: &Value) -> anyhow::Result<()> {
    client.strategic_patch(&status(pod), change).map(drop)
}

fn status(pod: &Pod) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/pods/{}/status", pod.name)
}

// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};

use super::*;
use crate::kube::{
    mock::{bookmark, end_of_initial_events as end},
    objects::PodObject,
};

type Complete = CompleteList<String>;

/// Applies these events; each model is the name and the label `state` of a Pod. Pods with the state `unneeded` are
/// skipped.
fn apply(events: &[Value]) -> Result<Option<Complete>, StreamFailure> {
    let mut objects = InitialObjects::new();
    for (index, event) in events.iter().enumerate() {
        let event: WatchEvent<PodObject> = serde_json::from_value(event.clone()).unwrap();
        let model = |pod: PodObject| {
            let state =
                pod.metadata.object.labels.as_ref().and_then(|labels| labels.get("state")).cloned().unwrap_or_default();
            (state != "unneeded").then(|| format!("{} {state}", pod.metadata.object.name.clone().unwrap_or_default()))
        };
        let complete = objects.apply(event, model)?;
        assert!(complete.is_none() || index + 1 == events.len(), "event {index} is not the end");
        if complete.is_some() {
            return Ok(complete);
        }
    }
    Ok(None)
}

fn event(kind: &str, namespace: &str, name: &str, state: &str) -> Value {
    let metadata = json!({ "namespace": namespace, "name": name, "uid": name, "labels": { "state": state } });
    json!({ "type": kind, "object": { "metadata": metadata } })
}

fn complete(objects: &[&str], version: &str) -> Complete {
    CompleteList { objects: objects.iter().map(ToString::to_string).collect(), version: version.to_owned() }
}

#[test]
fn only_the_end_of_the_initial_events_completes_a_list() {
    let (a, b) = (event("ADDED", "x", "a", "new"), event("ADDED", "x", "b", "new"));
    assert_eq!(apply(&[a.clone(), b.clone()]), Ok(None));
    assert_eq!(apply(&[a, b, end("7")]), Ok(Some(complete(&["a new", "b new"], "7"))));
    assert_eq!(apply(&[end("7")]), Ok(Some(complete(&[], "7"))));
}

#[test]
fn changes_among_the_initial_events_replace_the_previous_state() {
    let events = [
        event("ADDED", "x", "a", "new"),
        event("ADDED", "x", "b", "new"),
        event("ADDED", "x", "c", "new"),
        event("ADDED", "y", "b", "new"),
        event("ADDED", "y", "d", "unneeded"),
        event("MODIFIED", "x", "a", "changed"),
        event("DELETED", "x", "b", "new"),
        event("MODIFIED", "x", "c", "unneeded"),
        end("9"),
    ];
    assert_eq!(apply(&events), Ok(Some(complete(&["a changed", "b new"], "9"))));
}

#[test]
fn a_bookmark_without_the_annotation_means_that_streaming_lists_are_not_supported() {
    let unsupported = Err(StreamFailure::without_end());
    let added = event("ADDED", "x", "a", "new");
    assert_eq!(apply(&[added.clone(), bookmark("7", &json!({}))]), unsupported);
    assert_eq!(apply(&[added, bookmark("7", &json!({ "k8s.io/initial-events-end": "false" }))]), unsupported);
}

#[test]
fn an_end_without_a_version_is_not_a_complete_list() {
    let malformed = StreamFailure::Unsupported(RequestFailure::without_version().cause);
    assert_eq!(apply(&[end("")]), Err(malformed));
}

#[test]
fn errors_that_depend_on_streaming_lists_differ_from_others() {
    let error = |code: u16| {
        let status = json!({ "kind": "Status", "status": "Failure", "code": code, "message": "refused" });
        apply(&[event("ADDED", "x", "a", "new"), json!({ "type": "ERROR", "object": status })])
    };
    for code in [400, 404, 405, 410, 422] {
        assert_eq!(error(code), Err(StreamFailure::Unsupported("refused".to_owned())), "{code}");
    }
    for code in [401, 403, 500, 503] {
        assert!(matches!(error(code), Err(StreamFailure::Failed(_))), "{code}");
    }
    assert!(matches!(error(429), Err(StreamFailure::Throttled(_))));
    assert!(matches!(error(504), Err(StreamFailure::OutdatedCache(_))));
}

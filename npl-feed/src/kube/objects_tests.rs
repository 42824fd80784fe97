// SPDX-License-Identifier: Apache-2.0

use serde_json::json;

use super::*;

fn keys() -> AnnotationKeys {
    AnnotationKeys::new("nodeportlocal.antrea.io")
}

#[test]
fn a_pod_has_its_node_readiness_and_age() {
    let pod: FeedPod = serde_json::from_value(json!({
        "metadata": { "name": "a", "namespace": "default", "uid": "1", "creationTimestamp": "1970-01-01T00:01:40Z",
                      "annotations": { "nodeportlocal.antrea.io": "[]" } },
        "spec": { "nodeName": "node-1" },
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    }))
    .unwrap();
    let pod = pod.convert(&keys()).unwrap().object;
    assert_eq!((pod.node.as_deref(), pod.is_ready, pod.created), (Some("node-1"), true, 100));
    assert!(FeedPod::is_relevant(&pod));
}

#[test]
fn a_service_keeps_names_and_numbers_of_its_valid_ports() {
    let service: FeedService = serde_json::from_value(json!({
        "metadata": { "name": "a", "namespace": "default", "uid": "1" },
        "spec": { "ports": [{ "name": "http", "port": 80, "targetPort": "web" }, { "name": "bad", "port": 0 },
                            { "port": 53, "protocol": "UDP" }] },
    }))
    .unwrap();
    let ports = service.convert(&keys()).unwrap().object.ports;
    let names: Vec<_> = ports.iter().map(|port| (port.name.as_deref(), port.number)).collect();
    assert_eq!(names, [(Some("http"), 80), (None, 53)]);
}

#[test]
fn a_node_has_the_zone_of_its_label() {
    let node: FeedNode =
        serde_json::from_value(json!({ "metadata": { "name": "n", "labels": { ZONE: "west" } } })).unwrap();
    assert_eq!(&*node.convert(&keys()).unwrap().object.zone, "west");
    let node: FeedNode = serde_json::from_value(json!({ "metadata": { "name": "n" } })).unwrap();
    assert_eq!(&*node.convert(&keys()).unwrap().object.zone, "");
}

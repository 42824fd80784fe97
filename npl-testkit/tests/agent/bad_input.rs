// SPDX-License-Identifier: Apache-2.0
//! Tests that a malformed or extreme object does not affect the service of other objects.

use std::net::IpAddr;

use npl_testkit::cluster::{MAPPING_ANNOTATION, PodObject, Port, ServiceObject};
use npl_testkit::echo::Protocol;
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, NODE, World};

/// Returns wrong values of a Pod's annotation. The agent must replace each wrong value.
fn wrong_annotations(right: &str) -> Vec<String> {
    vec![
        String::new(),
        "null".to_owned(),
        "{}".to_owned(),
        "not JSON".to_owned(),
        r#"[{"podPort":"8080","nodeIP":"192.0.2.10","nodePort":"61000","protocol":"tcp","protocols":["tcp"]}]"#
            .to_owned(),
        r#"[{"podPort":8080.0,"nodeIP":"192.0.2.10","nodePort":61000.0,"protocol":"tcp","protocols":["tcp"]}]"#
            .to_owned(),
        r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61000,"nodePort":61001,"protocol":"tcp"}]"#.to_owned(),
        right.replace("}]", r#","NODEPORT":1}]"#),
        right.replace("192.0.2.10", "192.0.2.99"),
        format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)),
        format!("[{}]", vec![right.trim_matches(['[', ']']); 1_000].join(",")),
    ]
}

/// The agent restores the annotation of a Pod three times immediately, and later with a growing delay. Therefore, the
/// test changes each Pod's annotation three times at most.
#[test]
fn a_tampered_annotation_of_any_content_is_restored() {
    const AT_ONCE: usize = 3;
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    let count = wrong_annotations("").len();
    let pods: Vec<_> = (0..count.div_ceil(AT_ONCE)).map(|number| format!("web-{number}")).collect();
    for (number, pod) in pods.iter().enumerate() {
        world.create_pod(pod);
        world.wait_for_entries(pod, 2);
        let right = world.cluster.pod_annotation(NAMESPACE, pod).unwrap().unwrap();
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}");
        for value in wrong_annotations(&right).into_iter().skip(number * AT_ONCE).take(AT_ONCE) {
            let tampered = json!({"metadata": {"annotations": {MAPPING_ANNOTATION: value}}});
            world.cluster.client().merge_patch(&path, &tampered).unwrap();
            world.annotations.wait_for(pod, LIMIT, |value| value == Some(&right)).unwrap();
        }
    }
    // The agent's reaction to the change of the Service shows that the agent still watches Services.
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    for pod in &pods {
        world.annotations.wait_for(pod, LIMIT, |value| value.is_none()).unwrap();
    }
    world.enable_service();
    world.assert_served("web-0");
}

#[test]
fn objects_at_the_limits_of_the_api_are_served() {
    let mut world = World::with_agent(&[]);
    let name = "a".repeat(253);
    let ports: Vec<Port> = (1..=250).map(|n| Port::new(&format!("p{n}"), 65_535 - n, Protocol::Tcp)).collect();
    let nowhere = Port::new("nowhere", 1, Protocol::Tcp).to("a-15-byte-name1");
    let service = ServiceObject::new(NAMESPACE, &"s".repeat(63), "limits", [ports, vec![nowhere]].concat()).enabled();
    world.cluster.create_service(&service).unwrap();
    world.cluster.create_pod(&PodObject::new(NAMESPACE, &name, NODE, "limits")).unwrap();
    let ip = IpAddr::from([10, 99, 0, 1]);
    world.cluster.set_pod_running(NAMESPACE, &name, world.node_ip(), &[ip]).unwrap();
    let entries = world.wait_for_entries(&name, 250);
    assert!(entries.iter().any(|entry| entry.pod_port == 65_534));
    assert_eq!(world.writes(&name), 1);
    // The agent creates the Event about the unresolvable port name, although the Pod's name has the maximum length.
    world.wait_for_metric(r#"npl_events_total{outcome="created"} 1"#);
}

#[test]
fn unserved_services_do_not_affect_the_service_of_a_pod() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let before = world.wait_for_entries("web-0", 2);
    let services = format!("/api/v1/namespaces/{NAMESPACE}/services");
    let enabled = json!({"nodeportlocal.antrea.io/enabled": "true"});
    let nonsense = [
        json!({"metadata": {"name": "nobody"}, "spec": {"ports": [{"port": 80, "targetPort": 8081}]}}),
        json!({"metadata": {"name": "away"}, "spec": {"type": "ExternalName", "externalName": "example.org"}}),
        json!({"metadata": {"name": "none"}, "spec": {"clusterIP": "None", "selector": {"app": "web"}}}),
        json!({"metadata": {"name": "node"}, "spec": {"type": "NodePort", "selector": {"app": "web"},
               "ports": [{"port": 80, "targetPort": 8082}]}}),
    ];
    for mut service in nonsense {
        service["metadata"]["annotations"] = enabled.clone();
        world.cluster.client().create(&services, &service).unwrap();
    }
    world.create_pod("web-1");
    assert_eq!(world.wait_for_entries("web-1", 2).len(), 2);
    assert_eq!(world.wait_for_entries("web-0", 2), before);
    assert_eq!(world.writes("web-0"), 1);
}

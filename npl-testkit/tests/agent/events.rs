// SPDX-License-Identifier: Apache-2.0
//! Tests that the agent reports each problem as an Event on the affected Pod or Service.

use std::net::TcpListener;

use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use serde_json::{Value, json};

use crate::world::{LIMIT, NAMESPACE, POD_PORT, World};

/// Returns the agent's Events about an object.
fn events(world: &World, object: &str) -> Vec<Value> {
    let list = world.cluster.client().get(&format!("/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")).unwrap();
    let is_about = |event: &&Value| {
        event["reportingController"] == "npl-agent" && event.pointer("/regarding/name").unwrap() == object
    };
    list["items"].as_array().unwrap().iter().filter(is_about).cloned().collect()
}

/// Waits until there is exactly one Event about an object with this reason.
pub(crate) fn wait_for_event(world: &World, object: &str, reason: &str) -> Value {
    let the_one = || {
        let mut of_reason = events(world, object);
        of_reason.retain(|event| event["reason"] == reason);
        if let [event] = of_reason.as_slice() { Some(event.clone()) } else { None }
    };
    let waited = poll::until(&format!("the Event {reason} about {object}"), LIMIT, the_one);
    assert!(waited.is_ok(), "{waited:?}: {:?}", events(world, object));
    waited.unwrap().0
}

/// Returns the note of an Event without the URL at its end, which links to the documentation of the Event's reason.
pub(crate) fn text(event: &Value) -> &str {
    let (note, reason) = (event["note"].as_str().unwrap(), event["reason"].as_str().unwrap());
    let page = "https://github.com/npl-project/npl/blob/main/docs/reference/events.md";
    let end = format!("; see {page}#{}", reason.to_lowercase());
    assert!(note.ends_with(&end), "the note does not end with {end}: {note}");
    note.strip_suffix(&end).unwrap()
}

/// Returns the output of `kubectl describe` for an object.
fn described(world: &World, kind: &str, name: &str) -> String {
    world.cluster.kubectl(&["describe", kind, name, "--namespace", NAMESPACE]).unwrap()
}

#[test]
fn port_exhaustion_is_reported_on_the_pod_once_and_ends_with_the_first_free_port() {
    let mut world = World::new();
    world.create_node();
    let holder = world.topology.node().run(|| TcpListener::bind("0.0.0.0:61000").unwrap()).unwrap();
    world.start_agent(&["--port-range", "61000-61001", "--quarantine", "1s"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.wait_for_entries("web-0", 2);
    world.create_pod("web-1");
    let event = wait_for_event(&world, "web-1", "PortRangeExhausted");
    assert_eq!(text(&event), "no IPv4 node port is free for pod port 8080/tcp: widen the agent's --port-range");
    assert_eq!(event.pointer("/regarding/kind").unwrap(), "Pod");
    assert!(described(&world, "pod", "web-1").contains("PortRangeExhausted"));
    assert_eq!(world.wait_for_entries("web-1", 1)[0].protocol, Protocol::Udp, "the Pod's other port is not served");
    world.wait_for_metric(r#"npl_problems{reason="PortRangeExhausted"} 1"#);
    // The second Event is about the Service: the two protocols of its target port get separate node ports.
    wait_for_event(&world, "web", "ProtocolsNotMerged");
    world.wait_for_metric(r#"npl_events_total{outcome="created"} 2"#);
    world.delete_pod("web-0");
    world.wait_for_entries("web-1", 2);
    world.assert_served("web-1");
    let metrics = world.agent().metrics().unwrap();
    assert!(!metrics.contains("PortRangeExhausted"), "{metrics}");
    let after = wait_for_event(&world, "web-1", "PortRangeExhausted");
    assert_eq!(after["series"], Value::Null, "a solved problem was reported again");
    drop(holder);
}

#[test]
fn an_unresolvable_target_port_is_reported_on_the_pod_and_its_other_ports_are_served() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    let nowhere = Port::new("admin", 81, Protocol::Tcp).to("nowhere");
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "admin", "web", vec![nowhere]).enabled()).unwrap();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let event = wait_for_event(&world, "web-0", "UnresolvedTargetPort");
    let note = text(&event);
    assert!(note.contains("\"nowhere\"") && note.contains("shop/admin"), "{note}");
    assert!(described(&world, "pod", "web-0").contains("UnresolvedTargetPort"));
    world.wait_for_metric(r#"npl_problems{reason="UnresolvedTargetPort"} 1"#);
}

#[test]
fn an_unsupported_protocol_is_reported_on_the_service() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    let sctp =
        json!([{"op": "add", "path": "/spec/ports/-", "value": {"name": "sctp", "port": 99, "protocol": "SCTP"}}]);
    let patch = ["patch", "service", "web", "--namespace", NAMESPACE, "--type", "json", "--patch", &sctp.to_string()];
    world.cluster.kubectl(&patch).unwrap();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let event = wait_for_event(&world, "web", "UnsupportedProtocol");
    assert_eq!(
        text(&event),
        "protocol sctp is not among the agent's --protocols, so ports of this protocol get no node port; the \
         service's other ports are served: add sctp to --protocols"
    );
    assert!(described(&world, "service", "web").contains("UnsupportedProtocol"));
    world.wait_for_metric(r#"npl_problems{reason="UnsupportedProtocol"} 1"#);
}

#[test]
fn a_mapping_that_has_the_node_port_of_a_service_is_reported_on_both() {
    let mut world = World::with_agent(&["--port-range", "32000-32001"]);
    let port = Port::new("web", POD_PORT, Protocol::Tcp);
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "web", "web", vec![port]).enabled()).unwrap();
    world.create_pod("web-0");
    world.create_pod("web-1");
    world.wait_for_entries("web-1", 1);
    let taken = world.wait_for_entries("web-0", 1)[0].node_port;
    let service = json!({"metadata": {"name": "ingress"}, "spec": {"type": "NodePort", "selector": {"app": "ingress"},
                         "ports": [{"port": 80, "nodePort": taken}]}});
    world.cluster.client().create(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service).unwrap();
    wait_for_event(&world, "web-0", "NodePortConflict");
    wait_for_event(&world, "ingress", "NodePortShadowed");
    assert_eq!(world.wait_for_entries("web-0", 1)[0].node_port, taken, "no other node port is free");
}

#[test]
fn a_host_port_conflict_is_reported_on_the_pod() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let taken = world.address("web-0", Protocol::Tcp).port();
    world.create_pod_with_port("web-1", Port::new("web", POD_PORT, Protocol::Tcp).on_host(taken));
    let event = wait_for_event(&world, "web-1", "HostPortConflict");
    assert!(text(&event).starts_with(&format!("host port {taken}/tcp is in use")), "{event}");
    assert_eq!(world.wait_for_entries("web-1", 1)[0].protocol, Protocol::Udp, "the Pod's other port is not served");
    world.assert_served("web-0");
    world.wait_for_metric(r#"npl_problems{reason="HostPortConflict"} 1"#);
}

#[test]
fn another_writer_of_the_annotation_is_reported_by_its_field_manager() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let published = world.wait_for_entries("web-0", 2);
    for _ in 0..4 {
        let value = "nodeportlocal.antrea.io=[]";
        let arguments = ["annotate", "pod", "web-0", value, "--namespace", NAMESPACE, "--overwrite"];
        world.cluster.kubectl(&[&arguments[..], &["--field-manager", "antrea-agent"]].concat()).unwrap();
        world.wait_for_entries("web-0", published.len());
    }
    let event = wait_for_event(&world, "web-0", "AnnotationContested");
    assert!(text(&event).contains("\"antrea-agent\""), "{event}");
    world.wait_for_metric(r#"npl_problems{reason="AnnotationContested"} 1"#);
}

#[test]
fn a_restarted_agent_increments_the_count_of_an_existing_event() {
    let mut world = World::with_agent(&[]);
    let nowhere = Port::new("admin", 81, Protocol::Tcp).to("nowhere");
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "admin", "web", vec![nowhere]).enabled()).unwrap();
    world.create_pod("web-0");
    let first = wait_for_event(&world, "web-0", "UnresolvedTargetPort");
    assert_eq!(first["series"], Value::Null);
    for count in [2, 3] {
        world.agent().restart().unwrap();
        let is_counted = || (events(&world, "web-0")[0].pointer("/series/count")? == count).then_some(());
        poll::until("the count of the Event", LIMIT, is_counted).unwrap();
    }
    assert_eq!(events(&world, "web-0").len(), 1);
    world.wait_for_metric(r#"npl_events_total{outcome="repeated"} 1"#);
}

#[test]
fn an_agent_without_permission_for_events_serves_and_logs_a_warning() {
    let mut world = World::new();
    world.create_node();
    let without = json!([{"op": "test", "path": "/rules/4/resources", "value": ["events"]},
                         {"op": "remove", "path": "/rules/4"}]);
    world
        .cluster
        .kubectl(&["patch", "clusterrole", "npl-agent", "--type", "json", "--patch", &without.to_string()])
        .unwrap();
    world.wait_until_denied("create", "events.k8s.io", "events");
    world.start_agent(&[]);
    world.create_service();
    world.enable_service();
    let nowhere = Port::new("admin", 81, Protocol::Tcp).to("nowhere");
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "admin", "web", vec![nowhere]).enabled()).unwrap();
    world.create_pod("web-0");
    world.assert_served("web-0");
    // Two Events are denied: the Event about the target port, and the Event about the two protocols of one Pod port.
    world.wait_for_metric(r#"npl_events_total{outcome="denied"} 2"#);
    let log = std::fs::read_to_string(world.agent().process().log()).unwrap();
    assert!(log.contains("may not create and patch Events, so users do not see why"), "{log}");
    assert!(events(&world, "web-0").is_empty());
}

// SPDX-License-Identifier: Apache-2.0
//! Tests every annotation format, with the default annotation domain and with another one.

use npl_testkit::cluster::{Entry, MAPPING_ANNOTATION};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, World};

/// Returns the annotation that the agent publishes with these flags under an annotation domain, for the first two node
/// ports.
fn published(domain: &str, flags: &[&str]) -> String {
    let mut world = World::with_agent(flags);
    world.create_service();
    let enable = json!({"metadata": {"annotations": {format!("{domain}/enabled"): "true"}}});
    world.cluster.client().merge_patch(&format!("/api/v1/namespaces/{NAMESPACE}/services/web"), &enable).unwrap();
    world.create_pod("web-0");
    let annotations = || {
        let pod = world.cluster.client().get(&format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0")).ok()?;
        pod.pointer("/metadata/annotations").cloned()
    };
    let (annotations, _) = poll::until("the annotation", LIMIT, annotations).unwrap();
    let value = annotations.get(domain).unwrap().as_str().unwrap().to_owned();
    assert_eq!(annotations.as_object().unwrap().len(), 1, "the Pod has more than one annotation: {annotations}");
    // `Entry::parse` also verifies that the models of both consumers, AKO and F5 CIS, read the same pool members from
    // the annotation.
    for entry in Entry::parse(&value).unwrap() {
        world.assert_answers(entry.protocol, entry.address(), "web-0");
    }
    value
}

#[test]
fn antrea_1_7_is_the_default_format_and_the_annotation_domain_is_configurable() {
    let expected = r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61000,"protocol":"tcp","protocols":["tcp"]},{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61001,"protocol":"udp","protocols":["udp"]}]"#;
    assert_eq!(published(MAPPING_ANNOTATION, &[]), expected);
    let domain = "npl.example.org";
    assert_eq!(published(domain, &["--annotation-domain", domain, "--annotation-format", "v1.7"]), expected);
}

#[test]
fn the_format_of_antrea_2_0_has_no_protocols_field() {
    assert_eq!(
        published(MAPPING_ANNOTATION, &["--annotation-format", "v2.0"]),
        r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61000,"protocol":"tcp"},{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61001,"protocol":"udp"}]"#
    );
}

#[test]
fn the_format_of_antrea_2_6_has_the_ip_family() {
    assert_eq!(
        published(MAPPING_ANNOTATION, &["--annotation-format", "v2.6"]),
        r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61000,"protocol":"tcp","ipFamily":"IPv4"},{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61001,"protocol":"udp","ipFamily":"IPv4"}]"#
    );
}

#[test]
fn merged_protocols_are_one_element_with_one_node_port_that_serves_both() {
    let mut world = World::with_agent(&["--protocol-pairing", "merged"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let entries = world.wait_for_entries("web-0", 2);
    assert_eq!(entries[0].node_port, entries[1].node_port, "{entries:?}");
    world.assert_served("web-0");
}

/// SCTP is served only if `--protocols` names it, because consumers that ignore the protocol in the annotation would
/// use an SCTP node port as a TCP node port.
#[test]
fn sctp_is_served_and_published_when_enabled() {
    let mut world = World::with_agent(&["--protocols", "tcp,udp,sctp"]);
    world.create_service();
    world.enable_service();
    let port = json!({"name": "sctp", "port": 99, "targetPort": 2905, "protocol": "SCTP"});
    let patch = json!([{"op": "add", "path": "/spec/ports/-", "value": port}]).to_string();
    world
        .cluster
        .kubectl(&["patch", "service", "web", "--namespace", NAMESPACE, "--type", "json", "--patch", &patch])
        .unwrap();
    world.create_pod("web-0");
    let entries = world.wait_for_entries("web-0", 3);
    let sctp = entries.iter().find(|entry| entry.protocol == Protocol::Sctp).unwrap();
    assert_eq!((sctp.pod_port, sctp.node_ip), (2905, world.node_ip()));
    let is_it = |mapping: &serde_json::Value| mapping["protocol"] == "sctp" && mapping["nodePort"] == sctp.node_port;
    assert!(world.kernel_mappings().iter().any(is_it), "{:?}", world.kernel_mappings());
    // The SCTP port of the Service must not affect the node ports of the other protocols.
    for entry in entries.iter().filter(|entry| entry.protocol != Protocol::Sctp) {
        world.assert_answers(entry.protocol, entry.address(), "web-0");
    }
}

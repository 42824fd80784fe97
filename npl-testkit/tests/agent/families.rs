// SPDX-License-Identifier: Apache-2.0
//! Tests IPv6 and dual-stack: each address family of a Service has its own mappings, and requests in each family reach
//! the Pod.

use std::net::IpAddr;

use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::traffic;
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, NODE, World};

/// Creates a dual-stack Node with an agent and the enabled Service `web` with these `spec` fields.
pub(crate) fn world_with_service(spec: &serde_json::Value) -> World {
    let mut world = World::new();
    let addresses = world.topology.node_addresses();
    world.cluster.create_node(NODE, &[addresses.v4.into(), addresses.v6.into()]).unwrap();
    world.start_agent(&[]);
    world.create_service();
    set_service(&world, spec);
    world.enable_service();
    world
}

pub(crate) fn set_service(world: &World, spec: &serde_json::Value) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/services/web");
    world.cluster.client().merge_patch(&path, &json!({"spec": spec})).unwrap();
}

/// Creates a running Pod with one address per family.
pub(crate) fn create_dual_stack_pod(world: &mut World, name: &str) {
    world.create_unready_pod(name);
    let ips = world.topology.pods().iter().find(|pod| pod.name == name).unwrap().ips();
    world.cluster.set_pod_running(NAMESPACE, name, world.node_ip(), &ips).unwrap();
}

/// Asserts that the Pod responds at each entry's address and observes the client's address of that family.
#[track_caller]
pub(crate) fn assert_served(world: &World, pod: &str, entries: &[Entry]) {
    let client = world.topology.client();
    for entry in entries {
        let client_ip: IpAddr =
            if entry.node_ip.is_ipv4() { client.addresses.v4.into() } else { client.addresses.v6.into() };
        let answer = traffic::request(&client.netns, entry.protocol, entry.address(), "who?").unwrap();
        assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod, client_ip), "{entry:?}");
    }
}

#[test]
fn dual_stack_service_is_served_in_both_families() {
    let mut world = world_with_service(&json!({"ipFamilyPolicy": "RequireDualStack"}));
    create_dual_stack_pod(&mut world, "web-0");
    let entries = world.wait_for_entries("web-0", 4);
    let v6_first: Vec<bool> = entries.iter().map(|entry| entry.node_ip.is_ipv6()).collect();
    assert_eq!(v6_first, [true, true, false, false], "{entries:?}");
    assert_served(&world, "web-0", &entries);

    for family in ["IPv4", "IPv6"] {
        for direction in ["request", "reply"] {
            let line = format!("npl_datapath_packets_total{{family=\"{family}\",direction=\"{direction}\"}} ");
            let metrics = world.agent().metrics().unwrap();
            let count = metrics.lines().find_map(|text| text.strip_prefix(line.as_str())).unwrap();
            assert!(count.parse::<u64>().unwrap() > 1, "{line}{count}");
        }
    }

    // A restart must keep all four mappings, and must not rewrite the annotation.
    let writes = world.annotations.history("web-0").len();
    world.agent().restart().unwrap();
    assert_served(&world, "web-0", &entries);
    assert_eq!(world.wait_for_entries("web-0", 4), entries);
    assert_eq!(world.annotations.history("web-0").len(), writes);
}

#[test]
fn ipv6_service_is_served_in_its_family_only() {
    let mut world = World::new();
    let addresses = world.topology.node_addresses();
    world.cluster.create_node(NODE, &[addresses.v4.into(), addresses.v6.into()]).unwrap();
    world.start_agent(&[]);
    let service = json!({
        "metadata": {"name": "web", "namespace": NAMESPACE, "annotations": {"nodeportlocal.antrea.io/enabled": "true"}},
        "spec": {
            "selector": {"app": "web"},
            "ipFamilies": ["IPv6"],
            "ports": [{"name": "http", "port": 80, "targetPort": "web", "protocol": "TCP"}],
        },
    });
    world.cluster.client().create(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service).unwrap();
    create_dual_stack_pod(&mut world, "web-0");
    let entries = world.wait_for_entries("web-0", 1);
    assert_eq!((entries[0].node_ip, entries[0].protocol), (addresses.v6.into(), Protocol::Tcp));
    assert_served(&world, "web-0", &entries);
}

#[test]
fn service_that_gains_and_loses_a_family_keeps_the_node_ports_of_the_other() {
    let mut world = world_with_service(&json!({"ipFamilyPolicy": "SingleStack"}));
    create_dual_stack_pod(&mut world, "web-0");
    let single = world.wait_for_entries("web-0", 2);
    set_service(&world, &json!({"ipFamilyPolicy": "RequireDualStack"}));
    let dual = world.wait_for_entries("web-0", 4);
    assert_eq!(dual[2..], single, "the IPv4 mappings have changed");
    assert_served(&world, "web-0", &dual);
    let path = format!("/api/v1/namespaces/{NAMESPACE}/services/web");
    let service = world.cluster.client().get(&path).unwrap();
    let first = service.pointer("/spec/clusterIPs/0").unwrap();
    let one_family = json!({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4"], "clusterIPs": [first]});
    set_service(&world, &one_family);
    let last = |value: Option<&str>| value.is_some_and(|text| Entry::parse(text).is_ok_and(|it| it == single));
    world.annotations.wait_for("web-0", LIMIT, last).unwrap();
    assert_served(&world, "web-0", &single);
}

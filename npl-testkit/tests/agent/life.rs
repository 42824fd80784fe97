// SPDX-License-Identifier: Apache-2.0
//! Tests the mappings of Pods and Services that are created, changed and deleted.

use std::collections::BTreeSet;
use std::net::TcpListener;

use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::traffic;
use serde_json::json;

use crate::world::{LIMIT, NAMESPACE, POD_PORT, World};

#[test]
fn a_disabled_service_is_withdrawn_first_and_translated_until_the_drain_ends() {
    let mut world = World::with_agent(&["--drain", "6s", "--quarantine", "1s"]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    let history: Vec<_> = world.annotations.history("web-0").into_iter().map(|seen| seen.value).collect();
    assert_eq!(history.get(history.len() - 2), Some(&Some("[]".to_owned())), "{history:?}");
    let answer = traffic::tcp_request(&world.topology.client().netns, server, "still there?").unwrap();
    assert_eq!(answer.pod, "web-0");
    world.wait_for_kernel_mappings(0);
    let refused = traffic::tcp_request(&world.topology.client().netns, server, "gone?").unwrap_err();
    assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
}

#[test]
fn a_service_enabled_again_during_the_drain_keeps_its_node_ports() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let before = world.wait_for_entries("web-0", 2);
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    world.enable_service();
    assert_eq!(world.wait_for_entries("web-0", 2), before);
    world.assert_served("web-0");
}

#[test]
fn a_deleted_pods_node_ports_refuse_connections_and_its_successor_gets_others() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    let before: BTreeSet<u16> = world.wait_for_entries("web-0", 2).iter().map(|entry| entry.node_port).collect();
    world.delete_pod("web-0");
    world.wait_for_kernel_mappings(0);
    let refused = traffic::tcp_request(&world.topology.client().netns, server, "gone?").unwrap_err();
    assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
    // The next Pod has the same name as the deleted one, as in a StatefulSet.
    world.create_pod("web-0");
    let differs = |value: Option<&str>| {
        value.is_some_and(|text| {
            text.contains("nodePort") && before.iter().all(|port| !text.contains(&port.to_string()))
        })
    };
    world.annotations.wait_for("web-0", LIMIT, differs).unwrap();
    world.assert_served("web-0");
}

#[test]
fn a_port_in_use_by_another_process_is_skipped() {
    let mut world = World::new();
    world.create_node();
    let holder = world.topology.node().run(|| TcpListener::bind("0.0.0.0:61000").unwrap()).unwrap();
    world.start_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let ports: Vec<u16> = world.wait_for_entries("web-0", 2).iter().map(|entry| entry.node_port).collect();
    assert!(
        !world.wait_for_entries("web-0", 2).iter().any(|it| it.node_port == 61000 && it.protocol == Protocol::Tcp),
        "{ports:?}"
    );
    world.assert_served("web-0");
    drop(holder);
}

#[test]
fn a_tampered_annotation_is_corrected() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.wait_for_entries("web-0", 2);
    let right = world.cluster.pod_annotation(NAMESPACE, "web-0").unwrap();
    for wrong in ["not JSON", "[]", r#"[{"podPort":8080,"nodeIP":"203.0.113.9","nodePort":1}]"#] {
        let text = format!("nodeportlocal.antrea.io={wrong}");
        world.cluster.kubectl(&["annotate", "--overwrite", "pod", "web-0", "--namespace", NAMESPACE, &text]).unwrap();
        world.annotations.wait_for("web-0", LIMIT, |value| value == right.as_deref()).unwrap();
    }
    world.assert_served("web-0");
}

#[test]
fn a_closed_pod_port_refuses_the_client_as_without_translation() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    world.servers.clear();
    let refused = traffic::tcp_request(&world.topology.client().netns, server, "closed?").unwrap_err();
    assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
}

/// After a reboot of the Node, the status of each Pod contains the address of its previous sandbox until the kubelet
/// has created a new sandbox. The new sandbox may have another address. In this test, the two Pods swap their
/// addresses.
#[test]
fn after_a_reboot_the_outdated_address_of_a_pod_is_not_mapped_until_the_pod_has_a_sandbox() {
    let mut world = World::with_agent(&["--drain", "1s", "--quarantine", "1s"]);
    world.create_service();
    world.enable_service();
    let pods = ["web-0", "web-1"];
    for pod in pods {
        world.create_pod(pod);
        world.assert_served(pod);
    }
    // A reboot removes all kernel state, as `cleanup` does here. In the new sandboxes, each Pod's server listens at the
    // other Pod's previous address.
    world.agent().kill().unwrap();
    world.agent_options(&[]).command(&["cleanup"]).unwrap();
    world.servers.clear();
    let sandboxes: Vec<_> = world.topology.pods().iter().map(|pod| (pod.netns.clone(), pod.ip())).collect();
    for (pod, (netns, _)) in pods.iter().zip(sandboxes.iter().rev()) {
        world.servers.push(EchoServer::start_in(netns, pod, &[POD_PORT]).unwrap());
    }
    let no_sandbox = json!({"status": {"conditions": [
        {"type": "PodReadyToStartContainers", "status": "False"}, {"type": "Ready", "status": "False"},
    ]}});
    for pod in pods {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status");
        world.cluster.client().merge_patch(&path, &no_sandbox).unwrap();
    }
    world.agent().restart().unwrap();
    for pod in pods {
        world.annotations.wait_for(pod, LIMIT, |value| value.is_none_or(|text| text == "[]")).unwrap();
    }
    // The agent keeps the node ports of both Pods reserved, and maps no node port.
    let mapped = |world: &World| world.kernel_mappings().iter().filter(|it| it["inKernel"] == true).count();
    assert_eq!(mapped(&world), 0, "an outdated address is mapped: {:?}", world.kernel_mappings());
    for (served, (pod, (_, ip))) in pods.iter().zip(sandboxes.iter().rev()).enumerate() {
        world.cluster.set_pod_running(NAMESPACE, pod, world.node_ip(), &[(*ip).into()]).unwrap();
        world.assert_served(pod);
        assert_eq!(mapped(&world), 2 * (served + 1), "{:?}", world.kernel_mappings());
    }
}

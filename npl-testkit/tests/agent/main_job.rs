// SPDX-License-Identifier: Apache-2.0
//! From `kubectl annotate service` to a packet answered by the Pod.

use npl_testkit::echo::Protocol;
use npl_testkit::residue::Residue;
use npl_testkit::traffic::{self, UdpOptions};

use crate::world::{NAMESPACE, World};

#[test]
fn an_annotated_service_leads_clients_to_its_pods_and_they_see_the_clients_address() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    for pod in ["web-0", "web-1", "web-2"] {
        world.create_pod(pod);
    }
    let annotate = ["annotate", "service", "web", "--namespace", NAMESPACE, "nodeportlocal.antrea.io/enabled=true"];
    world.cluster.kubectl(&annotate).unwrap();
    for pod in ["web-0", "web-1", "web-2"] {
        world.assert_served(pod);
    }
    assert_eq!(world.kernel_mappings().len(), 6);
}

#[test]
fn the_annotation_has_exactly_the_documented_form() {
    let mut world = World::with_agent(&["--port-range", "61100-61200"]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.wait_for_entries("web-0", 2);
    let value = world.cluster.pod_annotation(NAMESPACE, "web-0").unwrap().unwrap();
    assert_eq!(
        value,
        r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61100,"protocol":"tcp","protocols":["tcp"]},{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61101,"protocol":"udp","protocols":["udp"]}]"#
    );
    let history = world.annotations.history("web-0");
    assert_eq!(history.iter().filter(|seen| seen.value.is_some()).count(), 1, "one write for two ports: {history:?}");
}

#[test]
fn a_datagram_without_checksum_is_answered_too() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let server = world.address("web-0", Protocol::Udp);
    let options = UdpOptions { checksum: false, ..UdpOptions::default() };
    let answer = traffic::udp_request(&world.topology.client().netns, server, b"bare", options).unwrap();
    assert_eq!(answer.answer.pod, "web-0");
}

#[test]
fn another_service_port_range_and_pods_of_other_services_are_left_alone() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.create_pod("web-0");
    // Not enabled: nothing is published and nothing is mapped, whatever else happens.
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    world.create_pod("web-1");
    world.enable_service();
    world.wait_for_entries("web-1", 2);
    assert_eq!(world.annotations.history("web-1").iter().filter(|seen| seen.value.is_some()).count(), 1);
}

#[test]
fn nothing_is_left_when_a_world_has_ended() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    assert!(residue.lines().count() > 5, "a world that is up has left something: {residue:?}");
    drop(world);
    residue.assert_gone().unwrap();
}

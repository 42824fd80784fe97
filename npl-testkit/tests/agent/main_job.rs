// SPDX-License-Identifier: Apache-2.0
//! Tests the whole path: from the annotation of a Service to a packet that the Pod answers.

use npl_testkit::cluster::{PodObject, Port, ServiceObject};
use npl_testkit::echo::Protocol;
use npl_testkit::residue::Residue;
use npl_testkit::traffic::{self, UdpOptions};

use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

#[test]
fn clients_reach_the_pods_of_an_annotated_service_without_source_nat() {
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
fn the_annotation_has_exactly_the_documented_format() {
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
    assert_eq!(
        history.iter().filter(|seen| seen.value.is_some()).count(),
        1,
        "two ports must be published with one write: {history:?}"
    );
}

#[test]
fn a_datagram_without_checksum_is_answered() {
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
fn pods_are_published_only_while_their_service_is_enabled() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.create_pod("web-0");
    // The Pod `web-1` is created after the agent has read the disabled Service.
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    world.create_pod("web-1");
    // The agent writes the mappings of all known Pods before it publishes one of them. So as soon as the last Pod is
    // published, its mapping is the only one, unless the agent has mapped a Pod of the disabled Service.
    let port = Port::new("http", 80, Protocol::Tcp).to(POD_PORT);
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "other", "other", vec![port]).enabled()).unwrap();
    world.cluster.create_pod(&PodObject::new(NAMESPACE, "other-0", NODE, "other")).unwrap();
    let pod = world.topology.add_pod(&world.run, "other-0").unwrap();
    world.cluster.set_pod_running(NAMESPACE, "other-0", world.node_ip(), &[pod.ip().into()]).unwrap();
    world.wait_for_entries("other-0", 1);
    let mappings = world.kernel_mappings();
    assert_eq!(mappings.len(), 1, "{mappings:?}");
    for pod in ["web-0", "web-1"] {
        assert_eq!(world.writes(pod), 0, "{:?}", world.annotations.history(pod));
    }

    world.enable_service();
    for pod in ["web-0", "web-1"] {
        world.wait_for_entries(pod, 2);
        assert_eq!(world.writes(pod), 1, "{:?}", world.annotations.history(pod));
    }

    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    for pod in ["web-0", "web-1"] {
        world.annotations.wait_for(pod, LIMIT, |value| value.is_none()).unwrap();
    }
    world.wait_for_entries("other-0", 1);
}

#[test]
fn the_test_environment_leaves_nothing_behind() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    assert!(residue.lines().count() > 5, "a running test environment must have residue: {residue:?}");
    drop(world);
    residue.assert_gone().unwrap();
}

// SPDX-License-Identifier: Apache-2.0
//! Tests how the agent receives its first objects: the Services in a compressed list, and the Pods through a streaming
//! list.

use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::control_plane::AuditLog;
use npl_testkit::echo::Protocol;

use crate::world::{NAMESPACE, POD_PORT, World};

/// The number of Services. Their list exceeds 128 KiB, the size from which the API server compresses responses.
const SERVICES: usize = 400;

#[test]
fn the_list_of_services_is_received_compressed() {
    let mut world = World::behind_proxy_without_agent();
    for number in 0..SERVICES {
        let port = Port::new("http", 80, Protocol::Tcp).to(POD_PORT);
        let service = ServiceObject::new(NAMESPACE, &format!("web-{number}"), "web", vec![port]);
        world.cluster.create_service(&service).unwrap();
    }
    let uncompressed = world.cluster.client().text("/api/v1/services?limit=500").unwrap().len();
    world.start_agent(&[]);
    let received = usize::try_from(world.proxy().bytes_from_server()).unwrap();
    assert!(received * 3 < uncompressed, "{received} bytes received; the uncompressed list has {uncompressed} bytes");
}

/// Starts an agent and publishes two Pods. Returns the verbs of the agent's lists and watches of the Node's Pods, in
/// the order of the answers.
fn reads_of_pods((mut world, audit): (World, AuditLog)) -> Vec<String> {
    world.create_node();
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    world.start_agent(&[]);
    world.assert_served("web-0");
    world.create_pod("web-1");
    world.assert_served("web-1");
    let requests = audit.requests().unwrap().into_iter();
    let reads = requests.filter(|it| it.resource == "pods" && ["list", "watch"].contains(&&*it.verb));
    // Leave out the agent's check of the admission policy, which lists a single Pod.
    let reads = reads.filter(|it| !it.uri.contains("limit=1"));
    reads.map(|it| it.verb).collect()
}

#[test]
fn the_pods_of_the_node_are_received_by_a_streaming_list() {
    assert_eq!(reads_of_pods(World::audited()), ["watch"]);
}

#[test]
fn pods_are_listed_if_the_api_server_does_not_support_streaming_lists() {
    let reads = reads_of_pods(World::audited_with_flags(&["--feature-gates=WatchList=false"]));
    assert_eq!(reads, ["watch", "list", "watch"], "the API server refuses the first watch");
}

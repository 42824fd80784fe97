// SPDX-License-Identifier: Apache-2.0
//! Tests an agent that reads only the Services of certain namespaces.

use std::collections::BTreeSet;
use std::net::IpAddr;

use npl_testkit::cluster::{PodObject, Port, ServiceObject};
use npl_testkit::control_plane::AuditLog;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;

use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

/// A namespace besides [`NAMESPACE`].
const OTHER: &str = "billing";
/// The only Pod of [`OTHER`].
const OTHER_POD: &str = "bill-0";

/// Creates an enabled Service and a Pod that the Service selects. No host has the address of the Pod.
fn create_other_namespace(world: &World) {
    world.cluster.create_namespace(OTHER).unwrap();
    let port = Port::new("http", 80, Protocol::Tcp).to(POD_PORT);
    world.cluster.create_service(&ServiceObject::new(OTHER, "bill", "bill", vec![port]).enabled()).unwrap();
    world.cluster.create_pod(&PodObject::new(OTHER, OTHER_POD, NODE, "bill")).unwrap();
    let ip = IpAddr::from([10, 99, 0, 1]);
    world.cluster.set_pod_running(OTHER, OTHER_POD, world.node_ip(), &[ip]).unwrap();
}

/// Returns the verbs and namespaces of the agent's requests for Services, after the first `skipped` requests.
fn service_requests(audit: &AuditLog, skipped: usize) -> BTreeSet<(String, Option<String>)> {
    let requests = audit.requests().unwrap().into_iter().skip(skipped);
    requests.filter(|it| it.resource == "services").map(|it| (it.verb, it.namespace)).collect()
}

/// Waits until the agent's requests for Services, without the first `skipped` requests of the log, are exactly
/// `expected`.
#[track_caller]
fn wait_for_requests(audit: &AuditLog, skipped: usize, expected: &BTreeSet<(String, Option<String>)>) {
    let are_equal = || (service_requests(audit, skipped) == *expected).then_some(());
    let waited = poll::until("the agent's requests for Services", LIMIT, are_equal);
    assert!(waited.is_ok(), "{waited:?}: {:?}", service_requests(audit, skipped));
}

/// The requests of an agent that reads the Services of these namespaces.
fn reads_of(namespaces: &[&str]) -> BTreeSet<(String, Option<String>)> {
    let of = |namespace: &&str| ["list", "watch"].map(|verb| (verb.to_owned(), Some((*namespace).to_owned())));
    namespaces.iter().flat_map(of).collect()
}

#[test]
fn node_ports_follow_the_namespaces_and_services_of_other_namespaces_are_not_read() {
    let (mut world, audit) = World::audited();
    world.create_node();
    create_other_namespace(&world);
    world.create_service();
    world.enable_service();
    // The namespace `later` does not exist.
    world.start_agent(&["--namespaces", "shop,later", "--drain", "0s"]);
    world.create_pod("web-0");
    world.assert_served("web-0");
    world.wait_for_kernel_mappings(2);
    assert_eq!(world.cluster.pod_annotation(OTHER, OTHER_POD).unwrap(), None);
    wait_for_requests(&audit, 0, &reads_of(&[NAMESPACE, "later"]));
    for object in [format!("pod/{OTHER}/{OTHER_POD}"), format!("service/{OTHER}/bill")] {
        let (code, chain) = world.agent_options(&[]).exit_code_and_output(&["why", &object]).unwrap();
        assert!(code == 1 && chain.contains("--namespaces excludes the namespace billing"), "{code} {chain}");
    }

    // A restarted agent must withdraw the node ports of namespaces that it no longer reads.
    world.agent = None;
    let before = audit.requests().unwrap().len();
    world.start_agent(&["--namespaces", OTHER, "--drain", "0s"]);
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    world.cluster.wait_for_annotation(OTHER, OTHER_POD, LIMIT, |value| value.is_some()).unwrap();
    world.wait_for_kernel_mappings(1);
    wait_for_requests(&audit, before, &reads_of(&[OTHER]));

    // Without the flag, the agent reads the Services of the whole cluster with one list and one watch.
    world.agent = None;
    let before = audit.requests().unwrap().len();
    world.start_agent(&["--namespaces", "", "--drain", "0s"]);
    world.assert_served("web-0");
    world.wait_for_kernel_mappings(3);
    let all = ["list", "watch"].map(|verb| (verb.to_owned(), None));
    wait_for_requests(&audit, before, &all.into());
}

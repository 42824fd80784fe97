// SPDX-License-Identifier: Apache-2.0
//! Tests features of Cilium that no other network of the tests has: `CiliumNetworkPolicy`, and node ports of Services
//! that Cilium's programs serve at the hooks of NPL's programs.

use std::net::SocketAddr;

use npl_testkit::echo::Protocol;
use npl_testkit::real_cluster::{Node, NodeNumber, client_addresses};
use npl_testkit::topology::host_prefix;
use serde_json::{Value, json};

use crate::clients;
use crate::network_policy::{NAME, answering, wait};
use crate::traffic::{PORTS, assert_answers, assert_served};
use crate::world::{NAMESPACE, World};

/// The node port of the test's Service of type `NodePort`, which Cilium serves.
const NODE_PORT: u16 = 30080;

/// Returns a `CiliumNetworkPolicy` that admits only clients with addresses in these ranges, and only to the TCP port of
/// the shop.
fn policy(ranges: &[String]) -> Value {
    json!({
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": "web"}},
            "ingress": [{"fromCIDR": ranges, "toPorts": [{"ports": [{"port": "8080", "protocol": "TCP"}]}]}],
        },
    })
}

pub(crate) fn a_cilium_network_policy_admits_the_named_client_at_the_named_port(world: &mut World) {
    let pod = world.wait_for_shop(4).into_values().next().unwrap();
    let outside = clients::outside(world);
    let other = clients::node(world, &world.other_node(&pod).name());
    let api = world.cluster.cluster().client();
    let policies = format!("/apis/cilium.io/v2/namespaces/{NAMESPACE}/ciliumnetworkpolicies");
    api.create(&policies, &policy(&client_addresses().map(host_prefix))).unwrap();
    // In each family, one of the Pod's node ports is mapped to the TCP port.
    wait("the policy to refuse UDP and the client on the other Node", &|| {
        answering(world, &outside, &pod) == PORTS / 2 && answering(world, &other, &pod) == 0
    });
    for entry in world.entries(&pod.name, PORTS).iter().filter(|entry| entry.protocol == Protocol::Tcp) {
        assert_answers(&outside, &pod, Protocol::Tcp, entry.address());
    }

    // A policy that admits only other clients refuses the outside client at all node ports.
    let others = ["203.0.113.1/32".to_owned(), "2001:db8:ffff::1/128".to_owned()];
    let path = format!("{policies}/{NAME}");
    api.merge_patch(&path, &policy(&others)).unwrap();
    wait("the policy to refuse the outside client", &|| answering(world, &outside, &pod) == 0);
    api.delete(&path).unwrap();
    wait("the end of the policy", &|| {
        answering(world, &outside, &pod) == PORTS && answering(world, &other, &pod) == PORTS
    });
}

pub(crate) fn node_ports_of_services_work_beside_mappings(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let outside = clients::outside(world);
    let api = world.cluster.cluster().client();
    let services = format!("/api/v1/namespaces/{NAMESPACE}/services");
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {
            "type": "NodePort",
            "ipFamilyPolicy": "RequireDualStack",
            "selector": {"app": "web"},
            "ports": [{"port": 80, "targetPort": 8080, "nodePort": NODE_PORT}],
        },
    });
    api.create(&services, &service).unwrap();
    let numbers = || world.cluster.nodes().iter().map(Node::number);
    for address in numbers().flat_map(NodeNumber::addresses) {
        let server = SocketAddr::new(address, NODE_PORT);
        let is_served = || outside.ask(Protocol::Tcp, server).is_ok_and(|answer| shop.contains_key(&answer.pod));
        wait(&format!("the Service to respond at {server}"), &is_served);
    }
    for pod in shop.values() {
        assert_eq!(assert_served(world, &outside, pod), PORTS);
    }
    api.delete(&format!("{services}/{NAME}")).unwrap();
    assert_eq!(world.wait_for_shop(4), shop, "the Service must not change the annotations of mappings");
}

// SPDX-License-Identifier: Apache-2.0
//! Tests the NetworkPolicy of a real policy engine, which matches node port traffic by the client's original address.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use npl_testkit::poll;
use npl_testkit::real_cluster::{Node, client_addresses};
use serde_json::{Value, json};

use crate::clients::{self, Client};
use crate::traffic::{PORTS, assert_served};
use crate::world::{LIMIT, NAMESPACE, Pod, World};

const NAME: &str = "of-the-test";

fn policies() -> String {
    format!("/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies")
}

/// A NetworkPolicy for the Pods of the shop with these ingress rules.
fn policy(ingress: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"], "ingress": ingress},
    })
}

/// The number of a Pod's annotation entries at which a client gets an answer. The client connects to all entries in
/// parallel, because a connection that the policy drops waits for its timeout.
fn answering(world: &World, client: &Client, pod: &Pod) -> usize {
    let (entries, answering) = (world.entries(&pod.name, PORTS), AtomicUsize::new(0));
    thread::scope(|scope| {
        for entry in &entries {
            scope.spawn(|| {
                let is_answered = client.ask(entry.protocol, entry.address()).is_ok();
                answering.fetch_add(usize::from(is_answered), Ordering::Relaxed);
            });
        }
    });
    answering.into_inner()
}

pub(crate) fn a_network_policy_admits_the_named_clients_alone(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let pod = shop.values().next().unwrap();
    let outside = clients::outside(world);
    let other = world.cluster.nodes().iter().map(Node::name).find(|name| *name != pod.node).unwrap();
    let other = clients::node(world, &other);
    let wait = |what: &str, is_reached: &dyn Fn() -> bool| {
        poll::until(what, LIMIT, || is_reached().then_some(())).unwrap();
    };
    let api = world.cluster.cluster().client();
    let blocks: Vec<Value> = client_addresses()
        .into_iter()
        .map(|address| json!({"ipBlock": {"cidr": format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })}}))
        .collect();
    api.create(&policies(), &policy(&json!([{"from": blocks}]))).unwrap();
    wait("the refusal of the other Node", &|| answering(world, &other, pod) == 0);
    assert_eq!(assert_served(world, &outside, pod), PORTS, "the policy names this client");

    let path = format!("{}/{NAME}", policies());
    api.merge_patch(&path, &json!({"spec": {"ingress": []}})).unwrap();
    wait("the refusal of the outside client", &|| answering(world, &outside, pod) == 0);
    assert_eq!(answering(world, &other, pod), 0);

    api.delete(&path).unwrap();
    wait("the end of the policy", &|| {
        [&outside, &other].into_iter().all(|client| answering(world, client, pod) == PORTS)
    });
}

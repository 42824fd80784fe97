// SPDX-License-Identifier: Apache-2.0
//! Tests the NetworkPolicy of a real policy engine, which matches node port traffic by the client's original address.

use std::net::TcpStream;
use std::thread;

use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::real_cluster::client_addresses;
use npl_testkit::topology::host_prefix;
use npl_testkit::traffic::{tcp_ask, tcp_connect};
use serde_json::{Value, json};

use crate::agent;
use crate::clients::{self, Client};
use crate::traffic::{PORTS, assert_served};
use crate::world::{LIMIT, NAMESPACE, Pod, World};

pub(crate) const NAME: &str = "of-the-test";

fn policies() -> String {
    format!("/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies")
}

/// Returns a NetworkPolicy for the Pods of the shop with these ingress rules.
fn policy(ingress: &Value) -> Value {
    policy_for(&json!({"matchLabels": {"app": "web"}}), ingress)
}

/// Returns a NetworkPolicy that denies all clients access to all Pods of the shop's namespace.
fn default_deny() -> Value {
    policy_for(&json!({}), &json!([]))
}

fn policy_for(pods: &Value, ingress: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    })
}

pub(crate) fn wait(what: &str, is_reached: &dyn Fn() -> bool) {
    poll::until(what, LIMIT, || is_reached().then_some(())).unwrap();
}

/// Returns the number of a Pod's annotation entries at which a client gets an answer.
pub(crate) fn answering(world: &World, client: &Client, pod: &Pod) -> usize {
    answered_protocols(client, &world.entries(&pod.name, PORTS)).len()
}

/// Returns the protocols of those entries at which a client gets an answer, in the order of the entries. The client
/// connects to all entries in parallel, because a connection that the policy drops waits for its timeout.
pub(crate) fn answered_protocols(client: &Client, entries: &[Entry]) -> Vec<Protocol> {
    thread::scope(|scope| {
        let ask = |entry: &Entry| client.ask(entry.protocol, entry.address()).ok().map(|_answer| entry.protocol);
        let mut requests = Vec::with_capacity(entries.len());
        for entry in entries {
            requests.push(scope.spawn(move || ask(entry)));
        }
        requests.into_iter().filter_map(|request| request.join().unwrap()).collect()
    })
}

pub(crate) fn a_network_policy_admits_the_named_clients_alone(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let pod = shop.values().next().unwrap();
    let outside = clients::outside(world);
    let other = clients::node(world, &world.other_node(pod).name());
    let api = world.cluster.cluster().client();
    let blocks: Vec<Value> =
        client_addresses().into_iter().map(|address| json!({"ipBlock": {"cidr": host_prefix(address)}})).collect();
    api.create(&policies(), &policy(&json!([{"from": blocks}]))).unwrap();
    wait("the policy to refuse the client on the other Node", &|| answering(world, &other, pod) == 0);
    assert_eq!(assert_served(world, &outside, pod), PORTS, "the policy names this client");

    let path = format!("{}/{NAME}", policies());
    api.merge_patch(&path, &json!({"spec": {"ingress": []}})).unwrap();
    wait("the policy to refuse the outside client", &|| answering(world, &outside, pod) == 0);
    assert_eq!(answering(world, &other, pod), 0);

    api.delete(&path).unwrap();
    let all_answer = |clients: &[&Client]| clients.iter().all(|client| answering(world, client, pod) == PORTS);
    wait("the end of the policy", &|| all_answer(&[&outside, &other]));

    api.create(&policies(), &default_deny()).unwrap();
    wait("the policy to refuse all clients", &|| answering(world, &outside, pod) + answering(world, &other, pod) == 0);
    api.delete(&path).unwrap();
    wait("the end of the default policy", &|| all_answer(&[&outside, &other]));
}

/// Like direct connections to the Pod, connections that are open when a policy comes into effect are not ended by the
/// policy: the rules of the engines in netfilter accept packets of established connections first.
pub(crate) fn a_network_policy_does_not_end_open_connections(world: &mut World) {
    let pod = world.wait_for_shop(4).into_values().next().unwrap();
    let outside = clients::outside(world);
    let entries = world.entries(&pod.name, PORTS);
    let is_tcp = |entry: &&Entry| entry.protocol == Protocol::Tcp;
    let connect = |entry: &Entry| tcp_connect(world.cluster.client(), entry.address()).unwrap();
    let open: Vec<TcpStream> = entries.iter().filter(is_tcp).map(connect).collect();
    assert_eq!(open.len(), PORTS / 2);
    let assert_open = || {
        for connection in &open {
            assert_eq!(tcp_ask(connection, "who?").unwrap().pod, pod.name);
        }
    };
    assert_open();
    let api = world.cluster.cluster().client();
    api.create(&policies(), &default_deny()).unwrap();
    wait("the policy to refuse new connections", &|| answering(world, &outside, &pod) == 0);
    assert_open();
    api.delete(&format!("{}/{NAME}", policies())).unwrap();
    wait("the end of the policy", &|| answering(world, &outside, &pod) == PORTS);
    assert_open();
}

/// Waits until the policy engine of every Node has applied a new NetworkPolicy, and then its removal.
pub(crate) fn wait_for_the_engine(world: &World) {
    let shop = world.wait_for_shop(4);
    let outside = clients::outside(world);
    let api = world.cluster.cluster().client();
    api.create(&policies(), &default_deny()).unwrap();
    wait("the policy on every Node", &|| shop.values().all(|pod| answering(world, &outside, pod) == 0));
    api.delete(&format!("{}/{NAME}", policies())).unwrap();
    wait("the end of the policy", &|| shop.values().all(|pod| answering(world, &outside, pod) == PORTS));
}

/// With only `--forwarding redirect`, an agent on a Node with a policy engine forwards through the stack, so that
/// policies apply. With `--ignore-network-policy` in addition, the agent redirects, and policies do not apply.
pub(crate) fn redirect_is_refused_until_network_policy_is_ignored(world: &mut World) {
    let pod = world.wait_for_shop(4).into_values().next().unwrap();
    let outside = clients::outside(world);
    let api = world.cluster.cluster().client();
    let reports = |subcommand: &str, text: &str| {
        let agent = agent::on(world, &pod.node);
        let is_reported = || world.agent_command(&agent, &[subcommand]).contains(text);
        wait(&format!("{subcommand} to report `{text}`"), &is_reported);
    };

    world.set_agent_variables(&["NPL_FORWARDING=redirect"]);
    reports("doctor", "--forwarding redirect is refused");
    reports("status", "--forwarding redirect is refused");
    api.create(&policies(), &default_deny()).unwrap();
    wait("the policy to apply", &|| answering(world, &outside, &pod) == 0);

    world.set_agent_variables(&["NPL_IGNORE_NETWORK_POLICY=true"]);
    reports("doctor", "redirected packets bypass the NetworkPolicy");
    wait("redirected packets to bypass the policy", &|| answering(world, &outside, &pod) == PORTS);

    world.set_agent_variables(&["NPL_FORWARDING-", "NPL_IGNORE_NETWORK_POLICY-"]);
    wait("the policy to apply again", &|| answering(world, &outside, &pod) == 0);
    api.delete(&format!("{}/{NAME}", policies())).unwrap();
    wait("the end of the policy", &|| answering(world, &outside, &pod) == PORTS);
}

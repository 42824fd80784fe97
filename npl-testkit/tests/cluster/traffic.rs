// SPDX-License-Identifier: Apache-2.0
//! Tests requests from all kinds of clients to the node ports of all Pods.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Context as _;
use npl_testkit::cluster::timeout_option;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;

use crate::clients::{self, Client};
use crate::world::{LIMIT, NAMESPACE, Pod, World};

/// The number of node ports of a Pod of the shop: TCP and UDP, each in both families.
pub(crate) const PORTS: usize = 4;

pub(crate) fn every_client_is_answered_by_the_pod_of_the_node_port(world: &mut World) {
    let pods = world.wait_for_shop(4);
    let clients = clients::all(world);
    assert_eq!(clients.len(), 5, "the clients are the external client, two Nodes, and one Pod per Node");
    let mut asked = 0;
    for pod in pods.values() {
        asked += clients.iter().map(|client| assert_served(world, client, pod)).sum::<usize>();
    }
    println!("    {asked} requests from {} clients to {} Pods", clients.len(), pods.len());
    assert_eq!(asked, pods.len() * clients.len() * PORTS);
    let nodes: BTreeSet<&str> = pods.values().map(|pod| pod.node.as_str()).collect();
    assert_eq!(nodes.len(), 2, "there must be Pods on both Nodes");
}

pub(crate) fn a_node_reaches_its_own_pods_by_loopback(world: &mut World) {
    for pod in world.wait_for_shop(4).values() {
        let client = clients::node(world, &pod.node);
        for entry in world.entries(&pod.name, PORTS) {
            let loopback: IpAddr =
                if entry.address().is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            assert_answers(&client, pod, entry.protocol, SocketAddr::new(loopback, entry.node_port));
        }
    }
}

pub(crate) fn a_replaced_pod_gets_new_node_ports(world: &mut World) {
    let before = world.wait_for_shop(4);
    let gone = before.values().next().unwrap();
    let old = world.entries(&gone.name, PORTS);
    world.kubectl(&["delete", "pod", &gone.name, "--namespace", NAMESPACE, timeout_option()]);
    let after = world.wait_for_shop(4);
    let new: Vec<&Pod> = after.values().filter(|pod| !before.contains_key(&pod.name)).collect();
    assert_eq!(new.len(), 1, "{after:?}");
    let outside = clients::outside(world);
    assert_eq!(assert_served(world, &outside, new[0]), PORTS);
    // Requests to the old node ports must fail: the ports belonged to the deleted Pod and are in quarantine.
    for entry in old {
        let refused = || outside.ask(entry.protocol, entry.address()).is_err();
        poll::until("the old node port to stop responding", LIMIT, || refused().then_some(())).unwrap();
    }
}

/// Sends a request to each node port of a Pod. Returns the number of requests.
pub(crate) fn assert_served(world: &World, client: &Client, pod: &Pod) -> usize {
    let entries = world.entries(&pod.name, PORTS);
    for entry in &entries {
        assert_answers(client, pod, entry.protocol, entry.address());
    }
    let kinds: BTreeSet<(Protocol, bool)> =
        entries.iter().map(|entry| (entry.protocol, entry.address().is_ipv6())).collect();
    assert_eq!(kinds.len(), PORTS, "{entries:?}");
    entries.len()
}

/// Sends a request to an address. This Pod must respond and observe the client's address.
pub(crate) fn assert_answers(client: &Client, pod: &Pod, protocol: Protocol, server: SocketAddr) {
    let what = format!("{} to {server} of {} on {}", client.name, pod.name, pod.node);
    let answer = client.ask(protocol, server).context(what.clone()).unwrap();
    assert_eq!((answer.pod.as_str(), answer.node.as_deref()), (pod.name.as_str(), Some(pod.node.as_str())), "{what}");
    assert_eq!(answer.client.ip(), client.address_towards(pod, server.ip()), "{what}");
    assert_eq!(answer.protocol, protocol, "{what}");
}

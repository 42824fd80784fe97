// SPDX-License-Identifier: Apache-2.0
//! All kinds of clients that can connect to a Pod: outside of the cluster, on Nodes, and in Pods.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use npl_testkit::echo::{Answer, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::real_cluster::{Cni, NodeNumber, Space, client_addresses};
use npl_testkit::traffic;

use crate::world::{NAMESPACE, Pod, World};

/// A client with its own network namespace and addresses.
pub(crate) struct Client {
    pub(crate) name: String,
    netns: Netns,
    place: Place,
}

/// Where a client is, which determines the source address that a Pod observes.
enum Place {
    Outside,
    Node {
        number: NodeNumber,
        space: Space,
        cni: Cni,
    },
    /// In a Pod on a Node. Other machines observe the Node's address if the CNI masquerades.
    Pod {
        addresses: Vec<IpAddr>,
        number: NodeNumber,
        space: Space,
        cni: Cni,
    },
}

impl Client {
    /// Sends one request. On a Node, the sending process is in the Node's cgroup, which has the agent's socket
    /// programs.
    pub(crate) fn ask(&self, protocol: Protocol, server: SocketAddr) -> Result<Answer> {
        let space = match &self.place {
            Place::Outside => return traffic::request(&self.netns, protocol, server, "who?"),
            Place::Node { space, .. } | Place::Pod { space, .. } => space,
        };
        let mut command = self.netns.command(env!("CARGO_BIN_EXE_npl-cluster"))?;
        command.args(["ask", &protocol.to_string(), &server.to_string()]);
        serde_json::from_str(&space.output(command)?).context("parse the response")
    }

    /// Returns the source addresses, one of each family, that the kernel chooses for packets to a Pod. Without a
    /// bridge, the kernel chooses among several addresses of the Node.
    fn sources_towards(&self, pod: &Pod) -> Vec<IpAddr> {
        let source = |address: &IpAddr| {
            let route = self.netns.ip(&format!("route get {address}")).unwrap();
            let mut words = route.split_whitespace().skip_while(|word| *word != "src");
            words.nth(1).unwrap().parse().unwrap()
        };
        pod.ips.iter().map(source).collect()
    }

    /// Returns the client address that the Pod must observe: the packet's source address when the packet reaches the
    /// Pod's Node. A Node has several addresses. If the CNI has a bridge for the Pods, the Node sends packets to its
    /// own Pods from the bridge's address.
    pub(crate) fn address_towards(&self, pod: &Pod, server: IpAddr) -> IpAddr {
        let addresses = match &self.place {
            Place::Outside => client_addresses().to_vec(),
            Place::Node { number, cni, .. } if number.name() == pod.node && cni.has_bridge() => {
                number.bridge_addresses().to_vec()
            }
            Place::Node { number, .. } if number.name() == pod.node => self.sources_towards(pod),
            Place::Node { number, .. } => number.addresses().to_vec(),
            Place::Pod { number, cni, .. } if cni.masquerades() && number.name() != pod.node => {
                number.addresses().to_vec()
            }
            Place::Pod { addresses, .. } => addresses.clone(),
        };
        addresses.into_iter().find(|address| address.is_ipv4() == server.is_ipv4()).unwrap()
    }
}

/// Returns the client outside of the cluster. Mappings are intended for such clients.
pub(crate) fn outside(world: &World) -> Client {
    Client { name: "outside client".to_owned(), netns: world.cluster.client().clone(), place: Place::Outside }
}

/// Returns a Node as a client.
pub(crate) fn node(world: &World, name: &str) -> Client {
    let node = world.cluster.node(name).unwrap();
    let place = Place::Node { number: node.number(), space: node.space().clone(), cni: world.cluster.cni() };
    Client { name: node.name(), netns: node.netns().clone(), place }
}

/// Returns all clients of a cluster.
pub(crate) fn all(world: &World) -> Vec<Client> {
    let nodes = world.cluster.nodes().iter().map(|it| node(world, &it.name()));
    let pods = world.pods(NAMESPACE, "app=caller").into_iter().map(|caller| pod(world, caller));
    [outside(world)].into_iter().chain(nodes).chain(pods).collect()
}

/// Returns the client in a Pod on this Node.
pub(crate) fn pod_on(world: &World, node: &str) -> Client {
    pod(world, world.pods(NAMESPACE, "app=caller").into_iter().find(|caller| caller.node == node).unwrap())
}

fn pod(world: &World, caller: Pod) -> Client {
    let node = world.cluster.node(&caller.node).unwrap();
    let (number, space) = (node.number(), node.space().clone());
    Client {
        name: format!("Pod {} on {}", caller.name, caller.node),
        netns: world.cluster.pod_netns(NAMESPACE, &caller.name).unwrap(),
        place: Place::Pod { addresses: caller.ips, number, space, cni: world.cluster.cni() },
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Everybody who may ask a Pod something.

use std::net::IpAddr;

use npl_testkit::netns::Netns;
use npl_testkit::real_cluster::client_addresses;

use crate::world::{NAMESPACE, World};

/// Somebody with a network and addresses of its own.
pub(crate) struct Client {
    pub(crate) name: String,
    pub(crate) netns: Netns,
    /// Of each family.
    addresses: Vec<IpAddr>,
    /// The Node that it is on or in, if any.
    node: Option<String>,
}

impl Client {
    /// The address that a server of the same family must see.
    pub(crate) fn address_towards(&self, server: IpAddr) -> IpAddr {
        *self.addresses.iter().find(|address| address.is_ipv4() == server.is_ipv4()).unwrap()
    }

    /// Whether its requests to a Node go through mappings. Its own Node's do not: the agent there serves the sockets of the
    /// Node's cgroup, and those of this process are in another.
    pub(crate) fn reaches_mappings_of(&self, node: &str) -> bool {
        self.node.as_deref() != Some(node)
    }
}

/// The client that mappings are made for.
pub(crate) fn outside(world: &World) -> Client {
    Client {
        name: "outside client".to_owned(),
        netns: world.cluster.client().clone(),
        addresses: client_addresses().to_vec(),
        node: None,
    }
}

/// Every client of a cluster.
pub(crate) fn all(world: &World) -> Vec<Client> {
    let nodes = world.cluster.nodes().iter().map(|node| Client {
        name: node.name(),
        netns: node.netns().clone(),
        addresses: node.number().addresses().to_vec(),
        node: Some(node.name()),
    });
    let pods = world.pods(NAMESPACE, "app=caller").into_iter().map(|pod| Client {
        name: format!("Pod {} on {}", pod.name, pod.node),
        netns: world.cluster.pod_netns(NAMESPACE, &pod.name).unwrap(),
        addresses: pod.ips,
        node: Some(pod.node),
    });
    [outside(world)].into_iter().chain(nodes).chain(pods).collect()
}

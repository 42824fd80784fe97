// SPDX-License-Identifier: Apache-2.0
//! Tests filter rules of other software on a Node, such as those of an implementation of NetworkPolicy. The rules must
//! see the packet after the translation, with the client's address as source and the Pod's address as destination.

use std::thread;

use npl_testkit::real_cluster::client_addresses;

use crate::clients;
use crate::traffic::{PORTS, assert_served};
use crate::world::{Pod, World};

/// Returns rules under which only the client with these addresses can open connections to this Pod. The rules allow
/// connections to all other destinations.
fn rules(pod: &Pod, clients: &[String; 2]) -> String {
    let address = |is_ipv4: bool| pod.ips.iter().find(|ip| ip.is_ipv4() == is_ipv4).unwrap();
    let (v4, v6) = (address(true), address(false));
    let [client_v4, client_v6] = clients;
    format!(
        "table inet npl-test-policy {{
            chain forward {{
                type filter hook forward priority filter; policy drop;
                ct state invalid drop
                ct state established,related accept
                ip daddr {v4} ip saddr {client_v4} accept
                ip6 daddr {v6} ip6 saddr {client_v6} accept
                ip daddr != {v4} accept
                ip6 daddr != {v6} accept
            }}
        }}"
    )
}

pub(crate) fn a_policy_for_the_clients_address_is_enforced(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let pod = shop.values().next().unwrap();
    let netns = world.cluster.node(&pod.node).unwrap().netns().clone();
    let outside = clients::outside(world);
    let other = world.other_node(pod);
    let other_node = clients::node(world, &other.name());
    let entries = world.entries(&pod.name, PORTS);

    for (allowed, allowed_addresses, refused) in
        [(&outside, client_addresses(), &other_node), (&other_node, other.addresses(), &outside)]
    {
        netns.nft(&rules(pod, &allowed_addresses.map(|address| address.to_string()))).unwrap();
        assert_eq!(assert_served(world, allowed, pod), PORTS);
        // The refused client sends to all node ports of the Pod at the same time, because a dropped request ends only
        // with its timeout.
        thread::scope(|scope| {
            for entry in &entries {
                scope.spawn(move || {
                    let answer = refused.ask(entry.protocol, entry.address());
                    assert!(
                        answer.is_err(),
                        "the policy must drop requests of {} to {}: {answer:?}",
                        refused.name,
                        pod.name
                    );
                });
            }
        });
        netns.nft("delete table inet npl-test-policy").unwrap();
    }
    assert_eq!(assert_served(world, &outside, pod), PORTS);
}

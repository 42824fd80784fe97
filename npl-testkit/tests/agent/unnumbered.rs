// SPDX-License-Identifier: Apache-2.0
//! Tests a Node whose address is on `lo`, and whose two uplinks have no addresses of their own, as with BGP to the host.

use npl_testkit::agent::Agent;
use npl_testkit::topology::Client;
use npl_testkit::{poll, traffic};
use serde_json::json;

use crate::doctor::{assert_ok, assert_reported, finding};
use crate::families::{create_dual_stack_pod, set_service};
use crate::redirect::{NOTHING_IS_FORWARDED, wait_for_redirected_pods};
use crate::world::{LIMIT, NODE, World};

/// The Node's addresses are on `lo`. The uplinks have only link-local addresses, and no default route exists. The Pods'
/// gateway is on `lo`, too, because without a default route the Node does not answer ARP requests for other addresses.
const NODE_ON_LOOPBACK: &str = "addr flush dev eth0 scope global\n\
                                addr flush dev eth1 scope global\n\
                                route del default via 2001:db8:0:1::1 dev eth0\n\
                                addr add 169.254.1.1/32 dev lo scope link\n\
                                addr add 192.0.2.10/32 dev lo\n\
                                addr add 2001:db8:0:1::10/128 dev lo\n\
                                addr add fe80::a/64 dev eth0 nodad\n\
                                addr add fe80::a/64 dev eth1 nodad";

/// Routes to the clients' networks, as a BGP daemon adds them. The next hop on `eth0` is a link-local IPv6 address,
/// also for IPv4. The next hops on `eth1` are global addresses that no route of `eth1` covers.
const ROUTES_OF_BGP: &str = "route add 198.51.100.0/24 src 192.0.2.10 via inet6 fe80::b dev eth0\n\
                             route add 2001:db8:0:2::/64 src 2001:db8:0:1::10 via fe80::b dev eth0\n\
                             route add 203.0.113.0/24 src 192.0.2.10 via 203.0.113.2 dev eth1 onlink\n\
                             route add 2001:db8:0:3::/64 src 2001:db8:0:1::10 via 2001:db8:0:3::2 dev eth1 onlink";

/// A VXLAN device like that of a CNI, through which no client outside of the cluster reaches the Node.
const VXLAN: &str = "link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.10\n\
                     addr add 10.244.9.0/32 dev flannel.1\n\
                     link set flannel.1 up";

/// Replaces a client's network by routes to the Node's two addresses only.
fn disconnect_from_node_network(client: &Client) {
    let (v4, v6) = (client.addresses.v4, client.addresses.v6);
    let lines = format!(
        "addr flush dev eth0 scope global\n\
         addr add {v4}/32 dev eth0\n\
         addr add {v6}/128 dev eth0 nodad\n\
         addr add fe80::b/64 dev eth0 nodad\n\
         route add 192.0.2.10/32 via inet6 fe80::a dev eth0 src {v4}\n\
         route add 2001:db8:0:1::10/128 via fe80::a dev eth0 src {v6}"
    );
    client.netns.ip(&lines).unwrap();
}

/// Asserts that both clients reach the Pod in both families and with both protocols, and that the Pod observes the
/// clients' addresses. A client accepts a response only if its source is the Node's address.
#[track_caller]
fn assert_served_by_both_uplinks(world: &World, pod: &str) {
    let entries = world.wait_for_entries(pod, 4);
    assert_eq!(entries.iter().filter(|entry| entry.node_ip.is_ipv6()).count(), 2, "{entries:?}");
    for client in world.topology.clients() {
        for entry in &entries {
            let answer = traffic::request(&client.netns, entry.protocol, entry.address(), "who?").unwrap();
            let addresses = client.addresses;
            let client_ip = if entry.node_ip.is_ipv4() { addresses.v4.into() } else { addresses.v6.into() };
            assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod, client_ip), "{entry:?}");
        }
    }
}

/// The case of cilium/cilium#12317.
#[test]
fn node_ports_of_an_address_on_lo_are_served_by_unnumbered_uplinks_and_not_published_without_their_routes() {
    let mut world = World::with_clients(2);
    world.topology.node().ip(&[NODE_ON_LOOPBACK, VXLAN].join("\n")).unwrap();
    world.topology.clients().iter().for_each(disconnect_from_node_network);
    let addresses = world.topology.node_addresses();
    world.cluster.create_node(NODE, &[addresses.v4.into(), addresses.v6.into()]).unwrap();
    world.create_service();
    set_service(&world, &json!({"ipFamilyPolicy": "RequireDualStack"}));
    world.enable_service();
    create_dual_stack_pod(&mut world, "web-0");
    // The agent is not ready while no uplink has the programs.
    world.agent = Some(Agent::launch(world.agent_options(&["--resync", "1s"])).unwrap());
    // As soon as the agent waits for an uplink only, the agent has read the Pod and the Service.
    poll::until("the agent to wait for an uplink only", LIMIT, || {
        let why = world.agent_options(&[]).exit_code_and_output(&["why", "pod/shop/web-0"]);
        why.is_ok_and(|(_, chain)| chain.contains("──► device")).then_some(())
    })
    .unwrap();
    poll::until("the failed check `datapath`", LIMIT, || (finding(&world, "datapath").state == "failed").then_some(()))
        .unwrap();
    assert_reported(&world, "datapath", "failed", "the agent publishes no node ports");
    assert_eq!(world.kernel_mappings(), Vec::<serde_json::Value>::new());
    assert_eq!(world.writes("web-0"), 0, "{:?}", world.annotations.history("web-0"));

    world.topology.node().ip(ROUTES_OF_BGP).unwrap();
    // The agent publishes the Pod as soon as one uplink has the programs.
    poll::until("programs on both uplinks", LIMIT, || {
        finding(&world, "datapath").found.contains("eth0, eth1").then_some(())
    })
    .unwrap();
    assert_served_by_both_uplinks(&world, "web-0");
    assert_ok(&world, "datapath", "eth0, eth1");
    assert_ok(&world, "addresses", "on all");

    world.agent().kill().unwrap();
    world.start_agent(&["--forwarding", "redirect"]);
    wait_for_redirected_pods(&world, 2);
    world.topology.node().nft(NOTHING_IS_FORWARDED).unwrap();
    assert_served_by_both_uplinks(&world, "web-0");
}

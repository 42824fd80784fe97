// SPDX-License-Identifier: Apache-2.0
//! Tests Nodes whose network is not just a single uplink with the Node's address and the default route. The Nodes have
//! a bridge with a physical port, a second address with its own routing table, or Pods on the Node's own network. Each
//! test compares the outcome of clients' requests with the annotation or with the doctor's findings.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use npl_testkit::cluster::{PodObject, Port};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::{poll, traffic};

use crate::doctor::{assert_ok, assert_reported, finding};
use crate::events::{text, wait_for_event};
use crate::world::{LIMIT, NAMESPACE, NODE, POD_PORT, World};

fn is_answered(client: &Netns, server: SocketAddr) -> bool {
    [Protocol::Tcp, Protocol::Udp].iter().all(|protocol| traffic::request(client, *protocol, server, "who?").is_ok())
}

/// Waits until the doctor's check `key` has this state.
#[track_caller]
fn wait_for_state(world: &World, key: &str, state: &str) {
    let waited = poll::until(&format!("the state {state} of {key}"), LIMIT, || {
        (finding(world, key).state == state).then_some(())
    });
    let last = finding(world, key);
    assert!(waited.is_ok(), "{waited:?}: {} {}", last.state, last.found);
}

/// The address of a Pod whose only network device is a macvlan device on the Node's uplink.
const MACVLAN_POD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 77);

/// Creates a running Pod whose macvlan device is on the Node's uplink.
fn create_macvlan_pod(world: &mut World, name: &str) -> Netns {
    let pod = world.run.netns("pod-macvlan").unwrap();
    let node = world.topology.node();
    node.ip(&format!("link add mac0 link eth0 type macvlan mode bridge\nlink set mac0 netns {}", pod.name())).unwrap();
    pod.ip(&format!(
        "link set mac0 name eth0\n\
         addr add {MACVLAN_POD}/24 dev eth0\n\
         link set eth0 up\n\
         route add default via 192.0.2.1"
    ))
    .unwrap();
    world.servers.push(EchoServer::start_in(&pod, name, &[POD_PORT]).unwrap());
    let object = PodObject::new(NAMESPACE, name, NODE, "web");
    world.cluster.create_pod(&object.with_ports(vec![Port::new("web", POD_PORT, Protocol::Tcp)])).unwrap();
    world.cluster.set_pod_running(NAMESPACE, name, world.node_ip(), &[MACVLAN_POD.into()]).unwrap();
    pod
}

/// The case of spidernet-io/spiderpool#2039. Clients reach this Pod only at the Pod's own address.
#[test]
fn a_macvlan_pod_on_the_uplink_is_not_published_and_has_an_event() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    assert_ok(&world, "node_network", "no Pod");
    let _pod = create_macvlan_pod(&mut world, "web-mac");
    let event = wait_for_event(&world, "web-mac", "PodOnNodeNetwork");
    assert!(text(&event).contains("the node's device eth0"), "{event}");
    assert_eq!(world.writes("web-mac"), 0, "{:?}", world.annotations.history("web-mac"));
    assert!(is_answered(&world.topology.client().netns, (MACVLAN_POD, POD_PORT).into()));
    world.assert_served("web-0");
    assert_reported(&world, "node_network", "warning", "the Pods' own addresses");
    assert!(finding(&world, "node_network").found.contains("shop/web-mac"));

    // With a macvlan device of its own, the Node reaches the Pod, but the Pod's replies to clients still bypass the
    // Node.
    let shim = "link add shim link eth0 type macvlan mode bridge\n\
                addr add 192.0.2.11/32 dev shim\n\
                link set shim up\n\
                route add 192.0.2.77/32 dev shim";
    world.topology.node().ip(shim).unwrap();
    let is_reached = || is_answered(world.topology.node(), (MACVLAN_POD, POD_PORT).into()).then_some(());
    poll::until("the answer of the Pod to the Node", LIMIT, is_reached).unwrap();
    let names_shim = || finding(&world, "node_network").found.contains("shim on eth0").then_some(());
    poll::until("the name of the macvlan device", LIMIT, names_shim).unwrap();
    assert_eq!(world.writes("web-mac"), 0, "{:?}", world.annotations.history("web-mac"));
    world.assert_served("web-0");

    world.cluster.delete_pod(NAMESPACE, "web-mac").unwrap();
    wait_for_state(&world, "node_network", "ok");
    world.assert_served("web-0");
}

/// The case of kubernetes/kubernetes#101910: a rule gives the Node's second address a routing table of its own. The
/// client is beyond the network of the second uplink, so the main table routes the replies through the first uplink.
/// There, the first client drops the replies, as the network of a provider does.
#[test]
fn replies_of_a_second_address_with_its_own_table_are_lost_as_doctor_reports_and_answered_with_redirect() {
    const SECOND: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
    let mut world = World::with_clients(2);
    let client = world.topology.clients()[1].netns.clone();
    client.ip("addr add 198.18.0.9/32 dev lo\nroute replace 203.0.113.0/24 dev eth0 src 198.18.0.9").unwrap();
    let rule = "rule add from 203.0.113.10 lookup 100 priority 1000\n\
                route add default via 203.0.113.2 dev eth1 table 100";
    world.topology.node().ip(rule).unwrap();
    world.cluster.create_node(NODE, &[SECOND.into()]).unwrap();
    world.start_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let server = world.address("web-0", Protocol::Tcp);
    assert_eq!(server.ip(), IpAddr::from(SECOND));
    let is_served = || traffic::tcp_request(&client, server, "who?").is_ok();
    assert_reported(&world, "reply_routes", "warning", "set --forwarding redirect");
    assert!(!is_served(), "doctor reports that replies are misrouted, but they arrive");

    world.agent().kill().unwrap();
    world.start_agent(&["--forwarding", "redirect"]);
    poll::until("the answer with redirect", LIMIT, || is_served().then_some(())).unwrap();
    assert_ok(&world, "reply_routes", "redirect");

    world.agent().kill().unwrap();
    world.start_agent(&[]);
    wait_for_state(&world, "reply_routes", "warning");
    assert!(!is_served(), "doctor reports that replies are misrouted, but they arrive");
    world.topology.node().ip("route replace default via 203.0.113.2 dev eth1").unwrap();
    wait_for_state(&world, "reply_routes", "ok");
    poll::until("the answer by the main table", LIMIT, || is_served().then_some(())).unwrap();
}

/// A bridge like those of `OpenStack` and libvirt. The bridge has an address, and a port that is connected to the
/// network outside the Node. In this test, the port is a macvlan device instead of the VLAN device or bond of a real
/// Node.
const BRIDGE: &str = "addr flush dev eth1 scope global\n\
                      link add port1 link eth1 type macvlan mode passthru\n\
                      link add br-ex type bridge\n\
                      link set port1 master br-ex\n\
                      link set port1 up\n\
                      link set br-ex up\n\
                      addr add 203.0.113.10/24 dev br-ex";

#[test]
fn a_bridge_with_an_address_and_a_port_that_leaves_the_node_is_an_uplink() {
    let mut world = World::with_clients(2);
    world.topology.node().ip(BRIDGE).unwrap();
    // A bridge like that of a CNI: its only port is a Pod's veth device. The agent must not choose this bridge as an
    // uplink, although the bridge has an address.
    let of_pods = "link add cni0 type bridge\n\
                   addr add 10.88.0.1/24 dev cni0\n\
                   link add vethpod type veth peer name vethpod-end\n\
                   link set vethpod master cni0 up\n\
                   link set cni0 up";
    world.topology.node().ip(of_pods).unwrap();
    world.create_node();
    world.start_agent(&[]);
    world.serve(&["web-0"]);
    assert_ok(&world, "datapath", "programs on br-ex, eth0;");
    let second = world.topology.clients()[1].netns.clone();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut server = world.address("web-0", protocol);
        for address in [world.node_ip(), "203.0.113.10".parse().unwrap()] {
            server.set_ip(address);
            let answer = traffic::request(&second, protocol, server, "who?").unwrap();
            assert_eq!(answer.pod, "web-0", "{server}");
        }
    }
}

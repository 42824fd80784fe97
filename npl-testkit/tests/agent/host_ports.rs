// SPDX-License-Identifier: Apache-2.0
//! Tests a Pod with a `hostPort`, on a Node whose CNI does or does not serve host ports.

use std::net::SocketAddr;

use npl_testkit::cluster::Port;
use npl_testkit::echo::Protocol;
use npl_testkit::traffic;

use crate::doctor::{assert_ok, assert_reported, finding};
use crate::world::{POD_PORT, World};

const HOST_PORT: u16 = 8090;

/// The case of kubernetes/kubernetes#23920. NPL publishes the `hostPort` in both cases, as Antrea does.
#[test]
fn a_host_port_that_the_cni_does_not_serve_is_published_and_reported_by_doctor() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    world.create_pod_with_port("web-0", Port::new("web", POD_PORT, Protocol::Tcp).on_host(HOST_PORT));
    let server = world.address("web-0", Protocol::Tcp);
    assert_eq!(server, SocketAddr::new(world.node_ip(), HOST_PORT));
    assert_eq!(world.kernel_mappings().len(), 1, "only the UDP port of the Pod needs a mapping");
    world.assert_answers(Protocol::Udp, world.address("web-0", Protocol::Udp), "web-0");
    let is_answered = |world: &World| traffic::tcp_request(&world.topology.client().netns, server, "who?").is_ok();
    assert!(!is_answered(&world), "nothing serves the host port");
    assert_reported(&world, "host_ports", "warning", "portmap");
    let found = finding(&world, "host_ports").found;
    assert!(found.contains(&format!("{server} of shop/web-0")), "{found}");

    // The rules of the CNI's plug-in portmap, for clients outside and on the Node.
    let dnat = format!(
        "ip daddr {} tcp dport {HOST_PORT} dnat to {}:{POD_PORT}",
        world.node_ip(),
        world.topology.pods()[0].ip()
    );
    let rules = format!(
        "table ip npl_test {{
           chain prerouting {{ type nat hook prerouting priority dstnat; {dnat}; }}
           chain output {{ type nat hook output priority -100; {dnat}; }}
         }}"
    );
    world.topology.node().nft(&rules).unwrap();
    assert_ok(&world, "host_ports", "1 of 1 TCP host ports tested");
    assert!(is_answered(&world), "doctor reports no problem, but the host port is not served");

    // A Pod that does not listen shows nothing about the CNI.
    world.topology.node().nft("delete table ip npl_test").unwrap();
    world.servers.clear();
    assert_ok(&world, "host_ports", "0 of 1 TCP host ports tested");
}

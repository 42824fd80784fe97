// SPDX-License-Identifier: Apache-2.0
//! Tests clients on the Node: which destination addresses are translated to Pods, and which reach the host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use npl_agent::core::model::{Family, Frontend, NodePort, Protocol};
use npl_testkit::echo::EchoServer;
use npl_testkit::traffic;

use super::scene::{PROTOCOLS, Scene, has_loopback, loopback_addresses, loopback_frontends, mapped};
use crate::world::NODE_PORT;

#[test]
fn clients_on_the_node_reach_each_pod_by_node_addresses() {
    let scene = Scene::new(2);
    for (index, (pod, _)) in scene.world.pods.iter().enumerate() {
        for mut server in scene.server_addresses() {
            server.set_port(NODE_PORT + u16::try_from(index).unwrap());
            scene.assert_answers(scene.world.node(), server, &pod.name);
        }
    }
}

#[test]
fn clients_on_the_node_reach_the_pod_by_loopback() {
    let scene = Scene::new(1);
    for server in loopback_addresses() {
        for protocol in PROTOCOLS {
            let answer = scene.ask(scene.world.node(), protocol, server).unwrap();
            assert_eq!(answer.pod, "web-0", "{server} by {protocol}");
            assert!(!answer.client.ip().is_loopback(), "the Pod sees {} for {server}", answer.client);
        }
    }
    if !has_loopback() {
        for server in loopback_frontends() {
            scene.assert_refused(scene.world.node(), server);
        }
    }
}

/// The kernel treats a connection to the unspecified address (`0.0.0.0` or `::`) as one to the loopback address of the
/// client's network namespace.
#[test]
fn clients_on_the_node_reach_the_pod_by_the_unspecified_address() {
    let scene = Scene::new(1);
    let v4: SocketAddr = (Ipv4Addr::UNSPECIFIED, NODE_PORT).into();
    let v6: SocketAddr = (Ipv6Addr::UNSPECIFIED, NODE_PORT).into();
    let [v4_loopback, v6_loopback] = loopback_frontends();
    for (server, loopback) in [(v4, v4_loopback), (v6, v6_loopback), (mapped(v4), mapped(v4_loopback))] {
        scene.assert_refused(&scene.world.pod().netns, server);
        if !has_loopback() {
            scene.assert_refused(scene.world.node(), server);
            continue;
        }
        scene.assert_answers(scene.world.node(), server, "web-0");
        let stream = scene.cgroup.run(|| traffic::tcp_connect(scene.world.node(), server).unwrap()).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), loopback, "{server}");
    }
}

#[test]
fn agent_reports_whether_loopback_is_supported() {
    let scene = Scene::unserved(1);
    let clients = scene.serve(&mut scene.world.open());
    assert_eq!((clients.cgroup.as_path(), clients.has_loopback), (scene.cgroup.path(), has_loopback()));
}

#[test]
fn pod_sees_the_nodes_address_for_local_clients() {
    let scene = Scene::new(1);
    for (server, node_ip) in scene.world.frontends().into_iter().zip(scene.world.node_ips()) {
        for protocol in PROTOCOLS {
            assert_eq!(scene.ask(scene.world.node(), protocol, server).unwrap().client.ip(), node_ip);
        }
    }
}

#[test]
fn local_request_to_an_unmapped_port_reaches_the_host() {
    let scene = Scene::new(1);
    for server in scene.server_addresses().into_iter().chain(loopback_frontends()) {
        let [mut in_range, mut out_of_range] = [server; 2];
        in_range.set_port(61_099);
        out_of_range.set_port(9);
        scene.assert_refused(scene.world.node(), in_range);
        scene.assert_refused(scene.world.node(), out_of_range);
    }
}

#[test]
fn unmapped_datagram_of_a_local_client_is_recorded() {
    let mut scene = Scene::new(1);
    // `time_until_quiet` considers traffic of both IP families and all protocols, because a node port number belongs to
    // only one Pod, in all families and protocols.
    let time_until_quiet = |scene: &mut Scene, node_port| {
        let frontend = Frontend { family: Family::V4, node_port: NodePort(node_port), protocol: Protocol::Udp };
        scene.world.datapath().time_until_quiet(frontend).unwrap()
    };
    for (mut server, port) in scene.world.frontends().into_iter().zip([61_098, 61_099]) {
        server.set_port(port);
        assert_eq!(time_until_quiet(&mut scene, port), None);
        scene.socket(scene.world.node(), server).send_to(b"hello", server).unwrap();
        assert!(time_until_quiet(&mut scene, port).is_some(), "{server}");
    }
}

#[test]
fn node_port_number_of_another_host_is_not_translated() {
    let scene = Scene::new(1);
    let _server = EchoServer::start_in(scene.world.client(), "outside", &[NODE_PORT]).unwrap();
    for ip in scene.world.client_ips() {
        scene.assert_answers(scene.world.node(), (ip, NODE_PORT).into(), "outside");
        scene.assert_answers(&scene.world.pod().netns, (ip, NODE_PORT).into(), "outside");
    }
}

#[test]
fn mapping_of_one_protocol_leaves_the_other_to_the_host() {
    let mut scene = Scene::new(1);
    let frontend = Frontend { family: Family::V4, node_port: NodePort(NODE_PORT), protocol: Protocol::Tcp };
    scene.world.datapath().remove_mapping(frontend).unwrap();
    let server = scene.world.frontend();
    assert!(scene.ask(scene.world.node(), PROTOCOLS[0], server).is_err(), "the removed mapping must not be served");
    assert_eq!(scene.ask(scene.world.node(), PROTOCOLS[1], server).unwrap().pod, "web-0");
}

#[test]
fn removed_mapping_is_refused_by_the_host() {
    let mut scene = Scene::new(1);
    for server in scene.server_addresses() {
        scene.assert_answers(scene.world.node(), server, "web-0");
    }
    for frontend in scene.world.datapath().mappings().unwrap().into_keys() {
        scene.world.datapath().remove_mapping(frontend).unwrap();
    }
    for server in scene.server_addresses().into_iter().chain(loopback_addresses()) {
        scene.assert_refused(scene.world.node(), server);
    }
}

#[test]
fn removed_node_address_is_not_translated_for_local_clients() {
    let mut scene = Scene::new(1);
    let [_v4, v6] = scene.world.node_ips();
    crate::world::set_addresses(scene.world.datapath(), &[v6]);
    scene.assert_refused(scene.world.node(), scene.world.frontend());
    scene.assert_answers(scene.world.node(), (v6, NODE_PORT).into(), "web-0");
}

#[test]
fn processes_of_other_cgroups_are_not_served() {
    let scene = Scene::new(1);
    let server: SocketAddr = (IpAddr::from(Ipv4Addr::LOCALHOST), NODE_PORT).into();
    for server in [server, scene.world.frontend()] {
        for protocol in PROTOCOLS {
            assert!(traffic::request(scene.world.node(), protocol, server, "hello").is_err(), "{server} {protocol}");
        }
    }
}

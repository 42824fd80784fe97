// SPDX-License-Identifier: Apache-2.0
//! Tests clients in Pods of the Node.

use std::net::UdpSocket;

use npl_agent::datapath::ClientScope;
use npl_testkit::echo::{Answer, EchoServer};
use npl_testkit::poll;
use npl_testkit::traffic::request_limit;

use super::peer_address::ask;
use super::scene::{PROTOCOLS, Scene, has_loopback, loopback_frontends, mapped};
use crate::world::NODE_PORT;

#[test]
fn pod_reaches_another_pods_mapping_with_its_own_address() {
    let scene = Scene::new(2);
    let client = &scene.world.pods[1].0;
    for (server, client_ip) in scene.world.frontends().into_iter().zip(client.ips()) {
        for server in [server, mapped(server)] {
            for protocol in PROTOCOLS {
                let answer = scene.ask(&client.netns, protocol, server).unwrap();
                assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client_ip), "{server} by {protocol}");
            }
        }
    }
}

#[test]
fn pod_reaches_its_own_mapping() {
    let scene = Scene::new(1);
    for (server, pod_ip) in scene.world.frontends().into_iter().zip(scene.world.pod().ips()) {
        for protocol in PROTOCOLS {
            let answer = scene.ask(&scene.world.pod().netns, protocol, server).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", pod_ip), "{server} by {protocol}");
        }
    }
}

#[test]
fn loopback_of_a_pod_is_not_translated() {
    let scene = Scene::new(2);
    let client = &scene.world.pods[1].0.netns;
    for server in loopback_frontends() {
        scene.assert_refused(client, server);
    }
    let _server = EchoServer::start_in(client, "sidecar", &[NODE_PORT]).unwrap();
    for server in loopback_frontends() {
        scene.assert_answers(client, server, "sidecar");
        scene.assert_answers(client, mapped(server), "sidecar");
    }
}

/// With `--local-clients host`, connections from Pods are not translated at the socket. Egress policies and service
/// meshes then see that a Pod connects to the node address, and not to the Pod to which the node port is mapped.
#[test]
fn pods_are_not_served_if_only_the_host_is() {
    let mut scene = Scene::new(2);
    let mut datapath = scene.world.datapath.take().unwrap();
    let restricted = scene.serve_scope(&mut datapath, ClientScope::Host);
    if !has_loopback() {
        let error = restricted.unwrap_err().to_string();
        assert!(error.contains("requires Linux 5.14"), "{error}");
        return;
    }
    let client = &scene.world.pods[1].0.netns;
    for server in scene.server_addresses() {
        scene.assert_answers(scene.world.node(), server, "web-0");
        scene.assert_refused(client, server);
    }
    scene.serve(&mut datapath);
    for server in scene.server_addresses() {
        scene.assert_answers(client, server, "web-0");
    }
}

/// The Node masquerades the clients of a Service's node port and, with `--random-fully`, may choose any source port. If
/// the source port is a mapped node port, the Pod's answer must reach the client, and not the Pod of the mapping.
#[test]
fn answer_to_a_masqueraded_client_behind_a_node_port_reaches_the_client() {
    const SERVICE: u16 = 5353;
    let scene = Scene::new(2);
    let server = &scene.world.pods[1].0;
    let serve = || EchoServer::start_in(&server.netns, "server", &[SERVICE]).unwrap();
    let _server = scene.cgroup.run(serve).unwrap();
    for (nat, server_ip) in scene.world.frontends().into_iter().zip(server.ips()) {
        // This socket has the address and port that the Node's masquerading gives to the client.
        let client = scene.world.node().run(|| UdpSocket::bind(nat)).unwrap().unwrap();
        client.set_read_timeout(Some(request_limit())).unwrap();
        for _ in 0..2 {
            client.send_to(b"who are you?", (server_ip, SERVICE)).unwrap();
            let mut buffer = [0; 512];
            let (length, sender) = poll::uninterrupted(|| client.recv_from(&mut buffer)).unwrap();
            let answer: Answer = serde_json::from_slice(&buffer[..length]).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client, sender.ip()), ("server", nat, server_ip));
        }
        drop(client);
        // The mapping must still serve clients in the network namespace of `server`.
        scene.assert_answers(&server.netns, nat, "web-0");
    }
}

/// A datagram with the node address and node port as source may be forged. Such a datagram must not end the translation
/// for a client that has sent through the mapping.
#[test]
fn client_of_a_mapping_is_served_after_a_datagram_from_the_node_port_itself() {
    let scene = Scene::new(2);
    let client = &scene.world.pods[1].0.netns;
    for nat in scene.world.frontends() {
        let socket = scene.socket(client, nat);
        let answer = ask(&socket, nat).0;
        let forger = scene.world.node().run(|| UdpSocket::bind(nat)).unwrap().unwrap();
        forger.send_to(b"forged", answer.client).unwrap();
        let (length, sender) = poll::uninterrupted(|| socket.recv_from(&mut [0; 64])).unwrap();
        assert_eq!((length, sender), (b"forged".len(), nat));
        assert_eq!(ask(&socket, nat).0.pod, "web-0");
    }
}

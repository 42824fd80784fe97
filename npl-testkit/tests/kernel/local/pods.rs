// SPDX-License-Identifier: Apache-2.0
//! Tests clients in Pods of the Node.

use npl_agent::datapath::ClientScope;
use npl_testkit::echo::EchoServer;

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

/// Egress policies and meshes must see connections of Pods to the node address, and not to the Pod behind it.
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

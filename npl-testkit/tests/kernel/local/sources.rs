// SPDX-License-Identifier: Apache-2.0
//! Tests allow-lists with local clients. For a client on the Node, the address to which it connects counts as its
//! source address.

use super::scene::{Scene, loopback_addresses};

#[test]
fn local_client_is_served_if_the_allow_list_has_the_nodes_address() {
    let mut scene = Scene::new(1);
    let [v4, v6] = scene.world.node_ips();
    scene.world.restrict(&format!("{v4},{v6}"));
    for server in scene.server_addresses() {
        scene.assert_answers(scene.world.node(), server, "web-0");
    }
    for server in loopback_addresses() {
        scene.assert_refused(scene.world.node(), server);
    }
    scene.world.restrict(&format!("{v4}/24"));
    let [listed, unlisted, mapped] = scene.server_addresses();
    scene.assert_answers(scene.world.node(), listed, "web-0");
    scene.assert_answers(scene.world.node(), mapped, "web-0");
    scene.assert_refused(scene.world.node(), unlisted);
}

#[test]
fn local_client_outside_of_the_allow_list_is_refused_by_the_host() {
    let mut scene = Scene::new(1);
    let clients = scene.world.client_ips().map(|ip| ip.to_string()).join(",");
    scene.world.restrict(&clients);
    for server in scene.server_addresses().into_iter().chain(loopback_addresses()) {
        scene.assert_refused(scene.world.node(), server);
    }
    scene.world.assert_answers();
    scene.world.restrict("127.0.0.0/8,::1");
    for server in loopback_addresses() {
        scene.assert_answers(scene.world.node(), server, "web-0");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Mappings that not everybody may use: a client on the Node comes from the address that it asks for.

use super::scene::{Scene, loopback_names};

#[test]
fn local_client_is_led_to_the_pod_if_the_list_has_the_nodes_address() {
    let mut scene = Scene::new(1);
    let [v4, v6] = scene.world.node_ips();
    scene.world.restrict(&format!("{v4},{v6}"));
    for server in scene.names() {
        scene.assert_answers(scene.world.node(), server, "web-0");
    }
    for server in loopback_names() {
        scene.assert_refused(scene.world.node(), server);
    }
    scene.world.restrict(&format!("{v4}/24"));
    let [ours, other, mapped] = scene.names();
    scene.assert_answers(scene.world.node(), ours, "web-0");
    scene.assert_answers(scene.world.node(), mapped, "web-0");
    scene.assert_refused(scene.world.node(), other);
}

#[test]
fn local_client_of_a_mapping_for_others_finds_the_host() {
    let mut scene = Scene::new(1);
    let clients = scene.world.client_ips().map(|ip| ip.to_string()).join(",");
    scene.world.restrict(&clients);
    for server in scene.names().into_iter().chain(loopback_names()) {
        scene.assert_refused(scene.world.node(), server);
    }
    scene.world.assert_answers();
    scene.world.restrict("127.0.0.0/8,::1");
    for server in loopback_names() {
        scene.assert_answers(scene.world.node(), server, "web-0");
    }
}

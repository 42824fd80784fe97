// SPDX-License-Identifier: Apache-2.0
//! Tests an agent that reads only Services with certain labels.

use crate::world::{LIMIT, NAMESPACE, World};

fn label(world: &World, label: &str) {
    world.cluster.kubectl(&["label", "service", "web", "--namespace", NAMESPACE, "--overwrite", label]).unwrap();
}

#[test]
fn node_ports_of_a_service_follow_its_labels_and_the_selector() {
    let mut world = World::with_agent(&["--service-selector", "tier in (web),!canary", "--drain", "0s"]);
    world.create_service();
    label(&world, "tier=web");
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");

    label(&world, "canary=true");
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    world.wait_for_kernel_mappings(0);

    label(&world, "canary-");
    world.assert_served("web-0");

    // A restarted agent must withdraw the node ports of Services that its new selector excludes.
    world.agent = None;
    world.start_agent(&["--service-selector", "tier=other", "--drain", "0s"]);
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    world.wait_for_kernel_mappings(0);
}

// SPDX-License-Identifier: Apache-2.0
//! Tests an agent that reads only the Services of certain namespaces, each by a separate list and watch.

use super::{
    script::{key, node, pod, service},
    world::{World, settings},
};
use crate::core::{
    model::{NodePort, settings::Settings},
    state::Prerequisite,
};

/// Returns a cluster whose namespaces `billing`, `shop` and `web` each have an enabled Service, and a Pod `p` that the
/// Service selects. The agent has not started.
fn cluster(namespaces: &str) -> World {
    let mut world = World::new(Settings { namespaces: namespaces.parse().unwrap(), ..settings("61000-61005") });
    world.put_node(node(&["192.0.2.1"]));
    for (number, namespace) in ["billing", "shop", "web"].iter().enumerate() {
        world.put_service(service(&[&format!("{namespace}/s"), "app=x", "8080/tcp"]));
        world.put_pod(pod(&[&format!("{namespace}/p"), "app=x", &format!("10.0.0.{number}")], None));
    }
    world
}

/// Starts an agent with this value of `--namespaces`, and waits until the drain of withdrawn node ports is over.
fn restart(world: &mut World, namespaces: &str) {
    world.settings.namespaces = namespaces.parse().unwrap();
    world.start();
    world.wait(100_000);
    world.assert_published_works();
}

fn published(world: &World) -> Vec<&'static str> {
    let is_published = |namespace: &&str| !world.published(&key(&format!("{namespace}/p"))).is_empty();
    ["billing", "shop", "web"].into_iter().filter(is_published).collect()
}

#[test]
fn only_pods_of_the_named_namespaces_get_node_ports() {
    let mut world = cluster("billing,shop");
    world.start();
    world.settle();
    assert_eq!(published(&world), ["billing", "shop"]);
}

#[test]
fn a_restart_with_fewer_namespaces_withdraws_drains_and_unmaps() {
    let mut world = cluster("");
    world.start();
    world.settle();
    assert_eq!((published(&world).len(), world.real.mappings.len()), (3, 3));

    restart(&mut world, "shop");
    assert_eq!((published(&world), world.real.mappings.len()), (vec!["shop"], 1));

    restart(&mut world, "");
    assert_eq!((published(&world).len(), world.real.mappings.len()), (3, 3));
}

#[test]
fn nothing_is_withdrawn_before_the_services_of_every_namespace_are_listed() {
    let mut world = cluster("billing,shop");
    world.start();
    world.settle();
    world.start_without_lists();
    world.put_node(node(&["192.0.2.1"]));
    world.list_pods();
    world.list_services(&Some("shop".into()));
    assert_eq!(world.state.missing_prerequisites(), [Prerequisite::Lists].into());
    world.settle();
    assert_eq!(published(&world), ["billing", "shop"]);
    world.list_services(&Some("billing".into()));
    assert!(world.state.missing_prerequisites().is_empty());
    assert_eq!(world.wait(100_000), []);
}

/// After a watch has expired, the agent lists the Services of the watch's namespace again.
#[test]
fn a_list_of_one_namespace_does_not_affect_services_of_another_namespace() {
    let mut world = cluster("billing,shop");
    world.put_service(service(&["billing/n", "nodeport", "61004"]));
    world.put_service(service(&["shop/n", "nodeport", "61005"]));
    world.start();
    world.settle();
    for name in ["shop/s", "shop/n"] {
        world.services.remove(&key(name));
    }
    world.list_services(&Some("shop".into()));
    world.wait(100_000);
    assert_eq!(published(&world), ["billing"]);
    let is_reserved = |port| world.state.snapshot.service_with_port(NodePort(port)).is_some();
    assert_eq!((is_reserved(61_004), is_reserved(61_005)), (true, false));
}

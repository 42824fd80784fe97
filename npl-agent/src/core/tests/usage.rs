// SPDX-License-Identifier: Apache-2.0
//! Tests the numbers of mappings and node ports for metrics, and for which Pods a publication is outstanding.

use super::{
    script::{key, node, pod, service, with_service},
    world::{World, settings},
};
use crate::core::{
    model::{Family, Protocol},
    ports::PortUsage,
};

fn usage(world: &World, protocol: Protocol) -> PortUsage {
    let all = world.state.port_usages(Family::V4);
    all.into_iter().find(|(of, _)| *of == protocol).unwrap().1
}

#[test]
fn free_ports_are_counted_for_each_protocol_before_the_first_op_and_later() {
    let mut world = World::new(settings("61000-61003"));
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        assert_eq!(usage(&world, protocol), PortUsage { free: 4, ..PortUsage::default() }, "{protocol}");
    }
    assert_eq!(world.state.mapping_count(Family::V4), 0);
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/s", "app=x", "8080/tcp"]));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.start();
    world.settle();
    assert_eq!(usage(&world, Protocol::Tcp).active, 1);
    assert_eq!(usage(&world, Protocol::Udp).active, 0);
}

#[test]
fn a_quarantined_port_is_no_mapping() {
    let mut world = with_service("61000-61003");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.start();
    world.settle();
    assert_eq!(world.state.mapping_count(Family::V4), 1);
    assert_eq!(world.state.mapping_count(Family::V6), 0);
    world.remove_pod(&key("a/p"));
    world.settle();
    assert_eq!(world.state.mapping_count(Family::V4), 0);
    let frontend = world.state.mappings().next().unwrap().frontend;
    assert_eq!(usage(&world, Protocol::Tcp).quarantined, 1);
    assert_eq!(world.state.pod_of(frontend), Some(&key("a/p")));
}

#[test]
fn a_publication_is_awaited_until_it_is_confirmed_and_not_while_no_port_is_free() {
    let mut world = World::new(settings("61000-61001"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/s", "app=x", "8080/tcp", "9090/tcp"]));
    world.start();
    world.settle();
    let (first, second, other) = (key("a/p"), key("a/q"), key("a/r"));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    assert!(world.state.changed_pods().iter().eq([&first]) && world.state.awaits_publication(&first));
    world.is_api_down = true;
    world.settle();
    assert!(world.state.changed_pods().is_empty());
    assert!(world.state.awaits_publication(&first), "the patch failed");
    world.is_api_down = false;
    world.wait(60_000);
    assert!(!world.state.awaits_publication(&first));

    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.put_pod(pod(&["a/r", "app=y", "10.0.0.7"], None));
    world.settle();
    assert!(!world.state.awaits_publication(&second), "both ports are in use");
    assert!(!world.state.awaits_publication(&other), "no Service selects the Pod");
    assert!(!world.state.awaits_publication(&key("a/unknown")));
}

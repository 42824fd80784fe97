// SPDX-License-Identifier: Apache-2.0
//! Counts of mappings and node ports, for metrics.

use super::{
    script::{key, node, pod, service},
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
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/s", "app=x", "8080/tcp"]));
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

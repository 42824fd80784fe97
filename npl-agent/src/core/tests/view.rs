// SPDX-License-Identifier: Apache-2.0
//! Tests the view of the agent's state that commands show.

use super::{
    script::{key, node, pod, service},
    world::{World, settings},
};
use crate::core::{
    state::RetirementStep,
    view::{NodePortView, PortState},
};

fn views(world: &World) -> Vec<NodePortView> {
    world.state.node_port_views(world.now)
}

fn only_state(world: &World) -> PortState {
    let views = views(world);
    assert_eq!(views.len(), 1, "{views:?}");
    views[0].state
}

fn world() -> World {
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1"]));
    world.start();
    world.put_service(service(&["a/s", "app=x", "8080/tcp"]));
    world
}

#[test]
fn a_node_port_is_reserved_live_published_draining_and_quarantined_in_this_order() {
    let mut world = world();
    world.is_api_down = true;
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    assert_eq!(views(&world), [], "no node port is allocated before the first pass");
    let reserve = world.state.pass(world.now).ops;
    assert_eq!((reserve.len(), only_state(&world)), (1, PortState::Reserved));
    world.settle();
    assert_eq!(only_state(&world), PortState::Live);
    let since = world.now;
    assert_eq!(world.state.unpublished_millis(since), [0]);
    assert_eq!(world.state.unpublished_millis(since.plus(7_000)), [7_000]);
    world.is_api_down = false;
    world.wait(60_000);
    assert_eq!(only_state(&world), PortState::Published);
    assert_eq!(world.state.unpublished_millis(world.now), [0; 0]);
    let view = views(&world).remove(0);
    assert_eq!((view.namespace.as_deref(), view.pod.as_deref()), (Some("a"), Some("p")));
    assert_eq!((view.services.as_slice(), view.pod_ip), (&["s".to_owned()][..], Some("10.0.0.5".parse().unwrap())));
    assert_eq!((view.age_millis, view.ends_in_millis), (Some(60_000), None));
    world.remove_service(&key("a/s"));
    world.settle();
    let view = views(&world).remove(0);
    assert_eq!((view.state, view.services.len(), view.ends_in_millis), (PortState::Draining, 0, Some(30_000)));
    world.wait(30_000);
    let view = views(&world).remove(0);
    assert_eq!((view.state, view.ends_in_millis), (PortState::Quarantined, Some(60_000)));
}

/// Returns the steps of the retirement that are not completed yet.
fn steps(world: &World) -> Vec<RetirementStep> {
    world.state.left_to_retire().into_keys().collect()
}

#[test]
fn remaining_steps_of_the_retirement_are_named_until_the_node_is_retired() {
    let mut world = world();
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.settle();
    assert_eq!((steps(&world), world.state.is_retired()), (Vec::new(), false), "the Node is not being retired");
    world.settings.is_retiring = true;
    world.is_api_down = true;
    world.start();
    world.settle();
    use RetirementStep::{Annotations, Mappings};
    assert_eq!(steps(&world), [Annotations, Mappings]);
    let left = world.state.left_to_retire();
    assert_eq!(left[&Annotations], "the API server to remove the annotations of 1 Pods, such as a/p");
    assert_eq!(left[&Mappings], "1 mappings to drain (--drain) and to be removed");
    world.is_api_down = false;
    world.wait(60_000);
    assert_eq!((steps(&world), world.state.is_retired()), (Vec::new(), true));
}

#[test]
fn a_node_without_an_address_can_be_retired() {
    let mut world = World::new(settings("61000-61003"));
    world.settings.is_retiring = true;
    let mut stale = pod(&["a/p", "app=x", "10.0.0.5"], None);
    stale.annotation = Some("[]".to_owned());
    world.put_pod(stale);
    world.start();
    assert!(!world.state.is_retired(), "the first pass has not run yet");
    world.settle();
    world.wait(60_000);
    assert!(world.state.is_retired(), "{:?}", world.state.left_to_retire());
}

#[test]
fn the_age_of_an_adopted_port_is_not_known() {
    let mut world = world();
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.settle();
    world.start();
    world.settle();
    let view = views(&world).remove(0);
    assert_eq!((view.state, view.age_millis), (PortState::Published, None));
}

#[test]
fn a_host_port_is_shown_beside_the_mappings() {
    let mut world = world();
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5", "port=web:8080/tcp@9090"], None));
    world.settle();
    let shown: Vec<_> = views(&world).iter().map(|view| (view.frontend.node_port.0, view.state)).collect();
    assert_eq!(shown, [(9090, PortState::HostPort)]);
}

#[test]
fn every_state_is_read_from_its_own_name() {
    for state in PortState::ALL {
        assert_eq!(state.to_string().parse(), Ok(state));
        assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
    }
    assert!("unknown".parse::<PortState>().is_err());
}

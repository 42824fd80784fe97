// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding redirect` on a Node with a policy engine. Redirected packets would bypass the engine's rules, so
//! the host's stack forwards the packets unless the operator chooses to bypass NetworkPolicy.

use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy};
use npl_agent::core::devices::xdp::Attach;
use npl_testkit::traffic;

use super::redirect::DROP_FORWARDED;
use crate::world::World;

/// For each policy engine: rules that identify the engine, and the command that removes them.
const ENGINES: [(&str, &str); 4] = [
    ("table ip filter {\n chain cali-FORWARD {\n }\n}", "delete table ip filter"),
    ("table ip6 filter {\n chain KUBE-POD-FW-ABC {\n }\n}", "delete table ip6 filter"),
    ("table inet kube-network-policies {\n chain postrouting {\n }\n}", "delete table inet kube-network-policies"),
    (
        "table inet kindnet-network-policies {\n chain postrouting {\n }\n}",
        "delete table inet kindnet-network-policies",
    ),
];

/// The number of addresses of two Pods.
const ADDRESSES: usize = 4;

#[track_caller]
fn redirected(world: &mut World, policy: NetworkPolicy) -> usize {
    world.follow_beside(Forwarding::Redirect, Attach::Tc, policy);
    world.datapath().redirected().unwrap().len()
}

#[test]
fn packets_take_the_stack_beside_a_policy_engine_unless_network_policy_is_ignored() {
    let mut world = World::new(2);
    for (rules, removal) in ENGINES {
        assert_eq!(redirected(&mut world, NetworkPolicy::Applies), ADDRESSES, "without a policy engine");
        world.node().nft(rules).unwrap();
        assert_eq!(redirected(&mut world, NetworkPolicy::Applies), 0, "{rules}");
        world.assert_answers();
        world.node().nft(DROP_FORWARDED).unwrap();
        assert!(traffic::tcp_connect(world.client(), world.frontend()).is_err(), "FORWARD rules must apply: {rules}");
        assert_eq!(redirected(&mut world, NetworkPolicy::Ignored), ADDRESSES, "{rules}");
        world.assert_answers();
        world.node().nft("delete table inet npl_test").unwrap();
        world.node().nft(removal).unwrap();
    }
}

/// Rules of kube-proxy and of the operator must not be mistaken for those of a policy engine.
#[test]
fn rules_of_other_software_do_not_prevent_a_redirect() {
    let mut world = World::new(2);
    world.node().nft("table ip nat {\n chain KUBE-SERVICES {\n }\n}").unwrap();
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_eq!(redirected(&mut world, NetworkPolicy::Applies), ADDRESSES);
    world.assert_answers();
}

// SPDX-License-Identifier: Apache-2.0
//! The agent as one of the Pods of a real Kubernetes: real Nodes, kubelets, containers and controllers, `deploy/npl.yaml`
//! as a user applies it, and requests from everywhere. Needs root; `cargo xtask test --real-cluster` has the rest.

#![expect(clippy::unwrap_used, reason = "what fails here ends the story")]
#![expect(clippy::print_stdout, reason = "this is its own harness")]

mod agent;
mod clients;
mod filters;
mod harness;
mod kinds;
mod load;
mod machine;
mod moves;
mod network;
mod offload;
mod policy;
mod publication;
mod restarts;
mod side_by_side;
mod table;
mod traffic;
mod uninstall;
mod world;

use std::process::ExitCode;

use npl_testkit::real_cluster::{Cni, KubeProxy};

use crate::harness::{Act, Story};
use crate::network::Network;

/// In the order in which they are told, on one cluster; [`THE_END`] comes after them.
const STORIES: &[Story] = &[
    Story::new("the_machine_itself_is_not_touched", machine::the_machine_itself_is_not_touched),
    Story::new("the_agent_is_ready_on_every_node", agent::the_agent_is_ready_on_every_node),
    Story::new("the_agent_has_two_capabilities_and_no_more", agent::the_agent_has_two_capabilities_and_no_more),
    Story::new("the_programs_are_loaded_ahead_of_the_agent", agent::the_programs_are_loaded_ahead_of_the_agent),
    Story::new(
        "an_agent_may_write_its_annotation_and_nothing_else",
        policy::an_agent_may_write_its_annotation_and_nothing_else,
    ),
    Story::new(
        "every_client_is_answered_by_the_pod_it_asked_for",
        traffic::every_client_is_answered_by_the_pod_it_asked_for,
    ),
    Story::new("a_node_reaches_its_own_pods_by_loopback", traffic::a_node_reaches_its_own_pods_by_loopback),
    Story::new(
        "every_kind_of_service_and_pod_is_published_as_it_should_be",
        kinds::every_kind_of_service_and_pod_is_published_as_it_should_be,
    ),
    Story::new("a_policy_for_the_clients_address_holds", filters::a_policy_for_the_clients_address_holds),
    Story::new("a_pod_that_is_replaced_is_served_anew", traffic::a_pod_that_is_replaced_is_served_anew),
    Story::new("an_agent_that_is_deleted_is_not_missed", agent::an_agent_that_is_deleted_is_not_missed),
    Story::new("a_rolling_update_loses_nothing", moves::a_rolling_update_loses_nothing),
    Story::new(
        "agents_that_are_deleted_are_not_missed_under_load",
        restarts::agents_that_are_deleted_are_not_missed_under_load,
    ),
    Story::new(
        "another_release_of_the_agent_is_rolled_out_and_back",
        restarts::another_release_of_the_agent_is_rolled_out_and_back,
    ),
    Story::new("forty_pods_come_and_go", moves::forty_pods_come_and_go),
    Story::new("a_node_is_drained_and_comes_back", moves::a_node_is_drained_and_comes_back),
    Story::new("kubelets_are_restarted", restarts::kubelets_are_restarted),
    Story::new("the_api_server_is_restarted", restarts::the_api_server_is_restarted),
    Story::new(
        "pods_of_the_same_names_are_replaced_under_a_balancer_that_is_late",
        moves::pods_of_the_same_names_are_replaced_under_a_balancer_that_is_late,
    ),
    Story::new("container_runtimes_are_restarted", restarts::container_runtimes_are_restarted),
    Story::new("etcd_is_restarted", restarts::etcd_is_restarted),
    Story::new(
        "a_container_that_crashes_beside_disturbs_nobody",
        moves::a_container_that_crashes_beside_disturbs_nobody,
    ),
    Story::new(
        "a_killed_cluster_leaves_nothing_and_another_goes_on",
        side_by_side::a_killed_cluster_leaves_nothing_and_another_goes_on,
    ),
    // The last, since its Pods stay.
    Story::new(
        "two_hundred_pods_at_once_are_published_before_they_are_ready",
        publication::two_hundred_pods_at_once_are_published_before_they_are_ready,
    ),
];

/// On a cluster that is connected otherwise, where only what could differ is told again.
const WHAT_COULD_DIFFER: &[Story] = &[
    Story::new(
        "every_client_is_answered_by_the_pod_it_asked_for",
        traffic::every_client_is_answered_by_the_pod_it_asked_for,
    ),
    Story::new("a_policy_for_the_clients_address_holds", filters::a_policy_for_the_clients_address_holds),
];

/// With agents that offload, where the first story has them do so.
const PAST_THE_STACK: &[Story] = &[
    Story::new("agents_are_told_to_offload_under_load", offload::agents_are_told_to_offload_under_load),
    Story::new(
        "a_conversation_goes_past_the_stack_until_a_rule_forbids_it",
        offload::a_conversation_goes_past_the_stack_until_a_rule_forbids_it,
    ),
    Story::new(
        "every_client_is_answered_while_agents_offload",
        traffic::every_client_is_answered_by_the_pod_it_asked_for,
    ),
    Story::new("a_policy_holds_while_agents_offload", filters::a_policy_for_the_clients_address_holds),
];

/// The last, since it is the agent's end.
const THE_END: Story = Story::new(
    "uninstalling_leaves_nothing_on_any_node_and_workloads_alone",
    uninstall::uninstalling_leaves_nothing_on_any_node_and_workloads_alone,
);

fn main() -> ExitCode {
    harness::run(|networks| {
        if networks.is_empty() {
            return vec![
                Act::new(Network::new(Cni::Bridge, KubeProxy::Iptables), &[STORIES]),
                Act::new(
                    Network::new(Cni::FlannelVxlan, KubeProxy::Nftables),
                    &[WHAT_COULD_DIFFER, PAST_THE_STACK, &[THE_END]],
                ),
            ];
        }
        networks.iter().map(|network| Act::new(*network, &[STORIES, PAST_THE_STACK, &[THE_END]])).collect()
    })
}

// SPDX-License-Identifier: Apache-2.0
//! The agent as one of the Pods of a real Kubernetes: real Nodes, kubelets, containers and controllers, `deploy/npl.yaml`
//! as a user applies it, and requests from everywhere. Needs root; `cargo xtask test --real-cluster` has the rest.

#![expect(clippy::unwrap_used, reason = "what fails here ends the story")]
#![expect(clippy::print_stdout, reason = "this is its own harness")]

mod agent;
mod clients;
mod harness;
mod machine;
mod policy;
mod side_by_side;
mod traffic;
mod world;

use std::process::ExitCode;

use crate::harness::Story;
use crate::world::World;

/// In the order in which they are told, on one cluster.
const STORIES: &[Story] = &[
    Story::new("the_machine_itself_is_not_touched", machine::the_machine_itself_is_not_touched),
    Story::new("the_agent_is_ready_on_every_node", agent::the_agent_is_ready_on_every_node),
    Story::new("the_agent_has_two_capabilities_and_no_more", agent::the_agent_has_two_capabilities_and_no_more),
    Story::new(
        "an_agent_may_write_its_annotation_and_nothing_else",
        policy::an_agent_may_write_its_annotation_and_nothing_else,
    ),
    Story::new(
        "every_client_is_answered_by_the_pod_it_asked_for",
        traffic::every_client_is_answered_by_the_pod_it_asked_for,
    ),
    Story::new("a_pod_that_is_replaced_is_served_anew", traffic::a_pod_that_is_replaced_is_served_anew),
    Story::new("an_agent_that_is_deleted_is_not_missed", agent::an_agent_that_is_deleted_is_not_missed),
    Story::new(
        "a_killed_cluster_leaves_nothing_and_another_goes_on",
        side_by_side::a_killed_cluster_leaves_nothing_and_another_goes_on,
    ),
];

fn main() -> ExitCode {
    harness::run(STORIES, World::start, World::end)
}

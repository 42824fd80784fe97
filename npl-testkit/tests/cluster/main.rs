// SPDX-License-Identifier: Apache-2.0
//! Tests the agent as a Pod of a real Kubernetes cluster with real kubelets, containers and controllers, with requests
//! from all kinds of clients. The agent is installed with `deploy/npl.yaml`. The tests need root; `cargo xtask test
//! --real-cluster` builds the other prerequisites.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![expect(clippy::print_stdout, reason = "the harness prints results")]

mod agent;
mod balancers;
mod calico;
mod chart;
mod cilium;
mod clients;
mod commands;
mod control;
mod filters;
mod harness;
mod kinds;
mod load;
mod machine;
mod moves;
mod network;
mod network_policy;
mod newcomer;
mod node_pod;
mod offload;
mod path_test;
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

use crate::harness::{ClusterTest, Suite};
use crate::network::Network;

/// The tests on the default network and on each network that `--network` names, in execution order.
const TESTS: &[ClusterTest] = &[
    ClusterTest::new("the_host_is_not_modified", machine::the_host_is_not_modified),
    ClusterTest::new("the_agent_is_ready_on_every_node", agent::the_agent_is_ready_on_every_node),
    ClusterTest::new("the_agent_has_two_capabilities_and_no_more", agent::the_agent_has_two_capabilities_and_no_more),
    ClusterTest::new(
        "the_programs_are_loaded_before_the_agent_starts",
        agent::the_programs_are_loaded_before_the_agent_starts,
    ),
    ClusterTest::new(
        "the_commands_of_the_documents_run_in_the_agents_pod",
        commands::the_commands_of_the_documents_run_in_the_agents_pod,
    ),
    ClusterTest::new("doctor_names_the_network_of_the_node", commands::doctor_names_the_network_of_the_node),
    ClusterTest::new(
        "kubectl_npl_test_passes_on_a_healthy_cluster",
        path_test::kubectl_npl_test_passes_on_a_healthy_cluster,
    ),
    ClusterTest::new("kubectl_npl_test_names_a_broken_path", path_test::kubectl_npl_test_names_a_broken_path)
        .except_on(Cni::bypasses_forward_rules),
    ClusterTest::new(
        "an_interrupted_kubectl_npl_test_removes_its_objects",
        path_test::an_interrupted_kubectl_npl_test_removes_its_objects,
    ),
    ClusterTest::new(
        "commands_run_in_a_pod_on_a_node_without_an_agent",
        node_pod::commands_run_in_a_pod_on_a_node_without_an_agent,
    ),
    ClusterTest::new(
        "the_support_archive_has_the_node_whose_agent_is_in_a_crash_loop",
        node_pod::the_support_archive_has_the_node_whose_agent_is_in_a_crash_loop,
    ),
    ClusterTest::new(
        "an_agent_may_write_its_annotation_and_nothing_else",
        policy::an_agent_may_write_its_annotation_and_nothing_else,
    ),
    ClusterTest::new(
        "every_client_is_answered_by_the_pod_of_the_node_port",
        traffic::every_client_is_answered_by_the_pod_of_the_node_port,
    ),
    ClusterTest::new("a_node_reaches_its_own_pods_by_loopback", traffic::a_node_reaches_its_own_pods_by_loopback),
    ClusterTest::new(
        "every_kind_of_service_and_pod_is_published_correctly",
        kinds::every_kind_of_service_and_pod_is_published_correctly,
    ),
    ClusterTest::new(
        "a_policy_for_the_clients_address_is_enforced",
        filters::a_policy_for_the_clients_address_is_enforced,
    )
    .except_on(Cni::bypasses_forward_rules),
    ClusterTest::new("a_replaced_pod_gets_new_node_ports", traffic::a_replaced_pod_gets_new_node_ports),
    ClusterTest::new("deleted_agents_do_not_interrupt_service", agent::deleted_agents_do_not_interrupt_service),
    ClusterTest::new("a_rolling_update_loses_no_request", moves::a_rolling_update_loses_no_request),
    ClusterTest::new("deleted_agents_lose_no_request_under_load", restarts::deleted_agents_lose_no_request_under_load),
    ClusterTest::new(
        "another_agent_release_is_rolled_out_and_back",
        restarts::another_agent_release_is_rolled_out_and_back,
    ),
    ClusterTest::new("forty_pods_are_created_and_deleted", moves::forty_pods_are_created_and_deleted),
    ClusterTest::new("a_node_is_drained_and_uncordoned", moves::a_node_is_drained_and_uncordoned),
    ClusterTest::new("kubelets_are_restarted", restarts::kubelets_are_restarted),
    ClusterTest::new("the_api_server_is_restarted", restarts::the_api_server_is_restarted),
    ClusterTest::new(
        "pods_are_replaced_under_the_same_names_with_a_delayed_balancer",
        moves::pods_are_replaced_under_the_same_names_with_a_delayed_balancer,
    ),
    ClusterTest::new("container_runtimes_are_restarted", restarts::container_runtimes_are_restarted),
    ClusterTest::new("etcd_is_restarted", restarts::etcd_is_restarted),
    ClusterTest::new("real_load_balancers_lose_no_request", balancers::real_load_balancers_lose_no_request),
    ClusterTest::new("a_crashing_container_affects_no_other_pod", moves::a_crashing_container_affects_no_other_pod),
    ClusterTest::new(
        "a_killed_cluster_leaves_nothing_behind_and_another_is_not_affected",
        side_by_side::a_killed_cluster_leaves_nothing_behind_and_another_is_not_affected,
    ),
    // This test is the last of the list, because its two hundred Pods are not deleted.
    ClusterTest::new(
        "two_hundred_pods_at_once_are_published_before_they_are_ready",
        publication::two_hundred_pods_at_once_are_published_before_they_are_ready,
    ),
];

/// The tests whose results depend on the network. A run without `--network` repeats them on further networks.
const NETWORK_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "every_client_is_answered_by_the_pod_of_the_node_port",
        traffic::every_client_is_answered_by_the_pod_of_the_node_port,
    ),
    ClusterTest::new(
        "a_policy_for_the_clients_address_is_enforced",
        filters::a_policy_for_the_clients_address_is_enforced,
    )
    .except_on(Cni::bypasses_forward_rules),
];

/// Tests with `--forwarding offload`, which the first test of the list enables.
const OFFLOAD_TESTS: &[ClusterTest] = &[
    ClusterTest::new("agents_are_switched_to_offload_under_load", offload::agents_are_switched_to_offload_under_load),
    ClusterTest::new(
        "an_offloaded_connection_bypasses_the_stack_until_a_rule_drops_it",
        offload::an_offloaded_connection_bypasses_the_stack_until_a_rule_drops_it,
    )
    .except_on(Cni::is_cilium),
    ClusterTest::new(
        "every_client_is_answered_while_agents_offload",
        traffic::every_client_is_answered_by_the_pod_of_the_node_port,
    ),
    ClusterTest::new(
        "a_policy_is_enforced_while_agents_offload",
        filters::a_policy_for_the_clients_address_is_enforced,
    )
    .except_on(Cni::bypasses_forward_rules),
];

/// Tests for networks whose CNI has a daemon.
const DAEMON_TESTS: &[ClusterTest] =
    &[ClusterTest::new("network_daemons_are_killed_and_restarted", restarts::network_daemons_are_killed_and_restarted)];

/// Tests for networks with a policy engine.
const POLICY_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "a_network_policy_admits_the_named_clients_alone",
        network_policy::a_network_policy_admits_the_named_clients_alone,
    ),
    ClusterTest::new(
        "redirect_is_refused_until_network_policy_is_ignored",
        network_policy::redirect_is_refused_until_network_policy_is_ignored,
    )
    .except_on(Cni::is_cilium),
    ClusterTest::new(
        "a_network_policy_does_not_end_open_connections",
        network_policy::a_network_policy_does_not_end_open_connections,
    )
    .except_on(Cni::is_cilium),
];

/// Tests of policies that only Calico has.
const CALICO_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "a_global_network_policy_admits_the_named_clients_alone",
        calico::a_global_network_policy_admits_the_named_clients_alone,
    ),
    ClusterTest::new(
        "host_endpoint_policies_match_the_translated_packet",
        calico::host_endpoint_policies_match_the_translated_packet,
    ),
    ClusterTest::new(
        "redirected_packets_bypass_every_policy_of_calico",
        calico::redirected_packets_bypass_every_policy_of_calico,
    ),
];

/// Tests of features that only Cilium has.
const CILIUM_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "a_cilium_network_policy_admits_the_named_client_at_the_named_port",
        cilium::a_cilium_network_policy_admits_the_named_client_at_the_named_port,
    ),
    ClusterTest::new(
        "node_ports_of_services_work_beside_mappings",
        cilium::node_ports_of_services_work_beside_mappings,
    ),
];

/// Tests of restarts of the agents under load, which a run without `--network` repeats on networks with a policy engine.
const AGENT_RESTART_TESTS: &[ClusterTest] = &[ClusterTest::new(
    "deleted_agents_lose_no_request_under_load",
    restarts::deleted_agents_lose_no_request_under_load,
)];

/// Tests that are repeated after [`OFFLOAD_TESTS`] have enabled offload, on networks with a policy engine.
const OFFLOAD_POLICY_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "a_network_policy_admits_the_named_clients_alone_while_agents_offload",
        network_policy::a_network_policy_admits_the_named_clients_alone,
    ),
    ClusterTest::new(
        "a_network_policy_does_not_end_open_connections_while_agents_offload",
        network_policy::a_network_policy_does_not_end_open_connections,
    )
    .except_on(Cni::is_cilium),
    ClusterTest::new(
        "network_daemons_are_killed_and_restarted_while_agents_offload",
        restarts::network_daemons_are_killed_and_restarted,
    ),
];

/// Tests of [`CALICO_TESTS`] that are repeated after [`OFFLOAD_TESTS`] have enabled offload.
const OFFLOAD_CALICO_TESTS: &[ClusterTest] = &[
    ClusterTest::new(
        "a_global_network_policy_admits_the_named_clients_alone_while_agents_offload",
        calico::a_global_network_policy_admits_the_named_clients_alone,
    ),
    ClusterTest::new(
        "host_endpoint_policies_match_the_translated_packet_while_agents_offload",
        calico::host_endpoint_policies_match_the_translated_packet,
    ),
];

/// Tests of an installation with Helm, which takes over the agents of the manifest.
const CHART: &[ClusterTest] = &[
    ClusterTest::new(
        "a_release_is_installed_upgraded_and_rolled_back_under_load",
        chart::a_release_is_installed_upgraded_and_rolled_back_under_load,
    ),
    ClusterTest::new("helm_uninstall_retires_every_node", chart::helm_uninstall_retires_every_node),
    ClusterTest::new(
        "the_commands_of_the_readme_work_from_install_to_uninstall",
        chart::the_commands_of_the_readme_work_from_install_to_uninstall,
    ),
];

/// The last tests, because they uninstall the agent.
const UNINSTALL: &[ClusterTest] = &[
    ClusterTest::new(
        "the_cleanup_daemon_set_removes_what_deleted_agents_have_left",
        uninstall::the_cleanup_daemon_set_removes_what_deleted_agents_have_left,
    ),
    ClusterTest::new(
        "uninstalling_removes_everything_and_does_not_affect_workloads",
        uninstall::uninstalling_removes_everything_and_does_not_affect_workloads,
    ),
];

fn main() -> ExitCode {
    harness::run(|networks| {
        if networks.is_empty() {
            return default_suites();
        }
        networks.iter().map(|network| whole_suite(*network)).collect()
    })
}

/// Returns the suites of a run without `--network`: all tests on the first network, and on each further network the
/// tests whose results depend on the network.
fn default_suites() -> Vec<Suite> {
    vec![
        Suite::new(Network::new(Cni::Bridge, KubeProxy::Iptables), &[TESTS]),
        Suite::new(
            Network::new(Cni::FlannelVxlan, KubeProxy::Nftables),
            &[NETWORK_TESTS, OFFLOAD_TESTS, CHART, UNINSTALL],
        ),
        Suite::new(
            Network::new(Cni::CalicoVxlan, KubeProxy::Iptables),
            &[POLICY_TESTS, CALICO_TESTS, DAEMON_TESTS, NETWORK_TESTS, AGENT_RESTART_TESTS],
        ),
        Suite::new(
            Network::new(Cni::CiliumNative, KubeProxy::None),
            &[POLICY_TESTS, CILIUM_TESTS, DAEMON_TESTS, NETWORK_TESTS, AGENT_RESTART_TESTS],
        ),
    ]
}

/// Returns all tests that run on a network.
fn whole_suite(network: Network) -> Suite {
    if network.cni.has_policy_engine() {
        // The test that publishes two hundred Pods leaves them running, so the policy tests run before it.
        let (own, own_offload): (&[ClusterTest], &[ClusterTest]) = match network.cni {
            cni if cni.is_calico() => (CALICO_TESTS, OFFLOAD_CALICO_TESTS),
            cni if cni.is_cilium() => (CILIUM_TESTS, &[]),
            _ => (&[], &[]),
        };
        let offload = [OFFLOAD_TESTS, OFFLOAD_POLICY_TESTS, own_offload].concat();
        return Suite::new(network, &[POLICY_TESTS, own, DAEMON_TESTS, TESTS, &offload, CHART, UNINSTALL]);
    }
    if network.cni == Cni::Bridge {
        return Suite::new(network, &[TESTS, OFFLOAD_TESTS, CHART, UNINSTALL]);
    }
    Suite::new(network, &[DAEMON_TESTS, TESTS, OFFLOAD_TESTS, CHART, UNINSTALL])
}

// SPDX-License-Identifier: Apache-2.0
//! Restarts components of the cluster under load.

use std::time::{Duration, Instant};

use npl_testkit::cluster::timeout_option;
use npl_testkit::poll;

use crate::load::{self, Under};
use crate::network_policy;
use crate::world::{AGENT_NAMESPACE, LIMIT, World};

/// The agent's image in the manifest, and the same image under the name of another release.
const IMAGE: &str = "localhost/npl-agent:0.1.0";
const NEXT_IMAGE: &str = "localhost/npl-agent:next";

/// The duration of an outage of the API server, long enough to interrupt all watches.
const OUTAGE: Duration = Duration::from_secs(3);

pub(crate) fn deleted_agents_lose_no_request_under_load(world: &mut World) {
    Under::default().load(world, |world| {
        world.kubectl(&["delete", "pods", "--namespace", AGENT_NAMESPACE, "--all", timeout_option()]);
        world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
        load::renew(world, "deployment/elastic");
    });
}

pub(crate) fn another_agent_release_is_rolled_out_and_back(world: &mut World) {
    for node in world.cluster.nodes() {
        let tag = ["images", "tag", "--force", IMAGE, NEXT_IMAGE];
        npl_testkit::tools::output(node.ctr().args(tag)).unwrap();
    }
    let roll_to = |world: &World, image: &str| {
        let container = format!("npl-agent={image}");
        world.kubectl(&["set", "image", "daemonset/npl-agent", &container, "--namespace", AGENT_NAMESPACE]);
        world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
        let words = ["get", "pods", "--namespace", AGENT_NAMESPACE, "--output", "jsonpath={..containers[*].image}"];
        let images = world.kubectl(&words);
        assert!(images.split_whitespace().all(|running| running == image), "{images}");
    };
    Under::default().load(world, |world| {
        roll_to(world, NEXT_IMAGE);
        load::renew(world, "deployment/elastic");
        roll_to(world, IMAGE);
        load::renew(world, "deployment/elastic");
    });
}

pub(crate) fn kubelets_are_restarted(world: &mut World) {
    Under::default().load(world, |world| {
        for at in 0..world.cluster.nodes().len() {
            let name = world.cluster.nodes()[at].name();
            let before = lease(world, &name);
            world.cluster.nodes_mut()[at].restart_kubelet().unwrap();
            let is_back = || (lease(world, &name) != before).then_some(());
            poll::until(&format!("the kubelet of {name} to renew its lease"), LIMIT, is_back).unwrap();
        }
        load::renew(world, "deployment/elastic");
    });
}

pub(crate) fn container_runtimes_are_restarted(world: &mut World) {
    Under::default().load(world, |world| {
        for node in world.cluster.nodes_mut() {
            node.restart_containerd().unwrap();
        }
        load::renew(world, "deployment/elastic");
    });
}

pub(crate) fn the_api_server_is_restarted(world: &mut World) {
    Under::default().load(world, |world| {
        interrupt_the_api_server(world, OUTAGE);
        load::renew(world, "deployment/elastic");
    });
}

/// Kills the API server, and starts the server again after this time.
pub(crate) fn interrupt_the_api_server(world: &mut World, outage: Duration) {
    world.cluster.plane().kill_api_server().unwrap();
    let start = Instant::now();
    poll::until("the end of the outage", LIMIT, || (start.elapsed() > outage).then_some(())).unwrap();
    world.cluster.plane().start_api_server().unwrap();
}

pub(crate) fn etcd_is_restarted(world: &mut World) {
    Under::default().load(world, |world| {
        world.cluster.plane().restart_etcd().unwrap();
        load::renew(world, "deployment/elastic");
    });
}

/// Kills the CNI's daemon on every Node. New Pods show that the restarted daemon works, and so does a new NetworkPolicy
/// if the daemon is a policy engine.
pub(crate) fn network_daemons_are_killed_and_restarted(world: &mut World) {
    let may_lose_ipv6 = world.cluster.cni().loses_ipv6_at_restart();
    Under { may_lose_ipv6, ..Under::default() }.load(world, |world| {
        for node in world.cluster.nodes_mut() {
            node.restart_network().unwrap();
        }
        if world.cluster.cni().has_policy_engine() {
            network_policy::wait_for_the_engine(world);
        }
        load::renew(world, "deployment/elastic");
    });
}

/// Returns the time of the kubelet's last lease renewal.
fn lease(world: &World, node: &str) -> String {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}");
    world.cluster.cluster().client().get(&path).unwrap()["spec"]["renewTime"].to_string()
}

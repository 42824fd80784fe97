// SPDX-License-Identifier: Apache-2.0
//! Tests the commands that README.md and docs/operate.md tell operators to run in the agent's Pod.

use std::collections::BTreeSet;
use std::fs;

use npl_testkit::real_cluster::{Cni, KubeProxy};
use npl_testkit::{poll, tools};

use crate::agent;
use crate::world::{LIMIT, World};

/// The documents that contain such commands, and the prefix of a line that can be run unchanged.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/operate.md"];
const BEGINNING: &str = "kubectl --namespace npl-system exec daemonset/npl-agent -- /npl-agent ";

/// Each subcommand in the documents, and a word that its output contains if it has found the agent's pins.
const OUTPUTS: [(&str, &str); 3] = [("doctor", "programs on"), ("mappings", "8080"), ("status", "running")];

/// A command without its own flags must find the pins of the agent, and `doctor` must report no failed check.
pub(crate) fn the_commands_of_the_documents_run_in_the_agents_pod(world: &mut World) {
    world.wait_for_shop(4);
    let mut subcommands = BTreeSet::new();
    for document in DOCUMENTS {
        let text = fs::read_to_string(tools::repository_file(document)).unwrap();
        let commands: Vec<&str> = text.lines().filter(|line| line.starts_with(BEGINNING)).collect();
        assert!(!commands.is_empty(), "{document} has no command for the agent's Pod");
        for command in commands {
            let command = command.split('#').next().unwrap_or_default();
            let words: Vec<&str> = command.split_whitespace().skip(1).collect();
            let output = world.kubectl(&words);
            let subcommand = words.last().copied().unwrap_or_default().to_owned();
            let (_, expected) = OUTPUTS.iter().find(|(name, _)| *name == subcommand).unwrap();
            assert!(output.contains(expected), "`{command}` printed: {output}");
            subcommands.insert(subcommand);
        }
    }
    assert!(subcommands.into_iter().eq(OUTPUTS.map(|(name, _)| name.to_owned())));
}

/// The doctor must name the CNI, the policy engine and the Service proxy that the cluster has.
pub(crate) fn doctor_names_the_network_of_the_node(world: &mut World) {
    world.wait_for_shop(4);
    let cni = match world.cluster.cni() {
        Cni::Bridge => "bridge plug-in",
        Cni::FlannelVxlan | Cni::FlannelHostGw => "flannel",
        Cni::CalicoVxlan | Cni::CalicoVxlanNftables | Cni::CalicoRoutes | Cni::CalicoRoutesNftables => "Calico",
        Cni::KubeRouter => "kube-router",
    };
    let service_proxy = match world.kube_proxy {
        KubeProxy::None => "no known Service proxy",
        KubeProxy::Iptables => "kube-proxy (iptables)",
        KubeProxy::Nftables => "kube-proxy (nftables)",
    };
    let policy_engine = if world.cluster.cni().has_policy_engine() { cni } else { "no known policy engine" };
    for node in world.cluster.nodes() {
        let agent = agent::on(world, &node.name());
        for (key, expected) in [("cni", cni), ("policy_engine", policy_engine), ("service_proxy", service_proxy)] {
            let is_named = || {
                let findings = world.agent_command(&agent, &["doctor", "--output", "json"]);
                let findings: Vec<serde_json::Value> = serde_json::from_str(&findings).unwrap();
                let finding = findings.into_iter().find(|it| it["key"] == key).unwrap();
                finding["found"].as_str().unwrap().starts_with(expected).then_some(())
            };
            poll::until(&format!("{key} of {} to be {expected}", node.name()), LIMIT, is_named).unwrap();
        }
    }
}

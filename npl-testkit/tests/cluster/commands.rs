// SPDX-License-Identifier: Apache-2.0
//! Tests the commands that the documents tell operators to run.

use std::fs;
use std::path::PathBuf;

use npl_testkit::real_cluster::{Cni, KubeProxy};
use npl_testkit::{poll, tools};

use crate::agent;
use crate::world::{LIMIT, NAMESPACE, World};

/// The first line of a block of shell commands that the test below runs, on a cluster with NPL and an enabled Service.
const MARK: &str = "```sh run";

/// Commands in marked blocks, and a word that the output contains if the command has found the agent's pins, the Pods
/// or the agents.
const OUTPUTS: [(&str, &str); 5] = [
    ("/npl-agent doctor", "programs on"),
    ("/npl-agent mappings", "8080"),
    ("/npl-agent status", "running"),
    ("kubectl get pods -l app=web", "\"podPort\":8080"),
    ("rollout status daemonset/npl-agent", "successfully rolled out"),
];

/// Returns README.md and the documents of the folder `docs`.
fn documents() -> Vec<PathBuf> {
    let files = fs::read_dir(tools::repository_file("docs")).unwrap().map(|entry| entry.unwrap().path());
    let documents = files.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    documents.chain([tools::repository_file("README.md")]).collect()
}

/// Returns the marked blocks of a document. A block may be indented as part of a list.
fn marked_blocks(text: &str) -> Vec<String> {
    let (mut blocks, mut block) = (Vec::new(), None::<String>);
    for line in text.lines().map(str::trim_start) {
        match block.take() {
            None if line == MARK => block = Some(String::new()),
            None => {}
            Some(commands) if line == "```" => blocks.push(commands),
            Some(commands) => block = Some(commands + line + "\n"),
        }
    }
    blocks
}

/// Every marked block must succeed when an administrator runs it on a workstation. The commands in the agent's Pod must
/// find the pins of the agent without flags, and `doctor` must report no failed check.
pub(crate) fn the_commands_of_the_documents_run_in_the_agents_pod(world: &mut World) {
    world.wait_for_shop(4);
    let mut seen = vec![false; OUTPUTS.len()];
    for document in documents() {
        for block in marked_blocks(&fs::read_to_string(&document).unwrap()) {
            // The commands of the documents use the namespace of the user's context, and a placeholder for a Node.
            let script = format!(
                "set -eu\nkubectl() {{ command kubectl --namespace {NAMESPACE} \"$@\"; }}\n{}",
                block.replace("=NODE ", "=node-1 ")
            );
            let mut command = world.cluster.cluster().command("sh").unwrap();
            let output = tools::output(command.args(["-c", &script])).unwrap();
            for ((part, expected), seen) in OUTPUTS.iter().zip(&mut seen).filter(|((part, _), _)| block.contains(part))
            {
                assert!(output.contains(expected), "`{part}` of {} printed: {output}", document.display());
                *seen = true;
            }
        }
    }
    assert!(seen.iter().all(|seen| *seen), "no marked block has a command of {OUTPUTS:?}: {seen:?}");
}

/// The doctor must name the CNI, the policy engine and the Service proxy that the cluster has.
pub(crate) fn doctor_names_the_network_of_the_node(world: &mut World) {
    world.wait_for_shop(4);
    let cni = match world.cluster.cni() {
        Cni::Bridge => "bridge plug-in",
        Cni::FlannelVxlan | Cni::FlannelHostGw => "flannel",
        Cni::CalicoVxlan | Cni::CalicoVxlanNftables | Cni::CalicoRoutes | Cni::CalicoRoutesNftables => "Calico",
        Cni::KubeRouter => "kube-router",
        Cni::CiliumVxlan | Cni::CiliumNative => "Cilium",
    };
    let service_proxy = match world.kube_proxy {
        KubeProxy::None if world.cluster.cni().is_cilium() => "Cilium",
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

// SPDX-License-Identifier: Apache-2.0
//! Tests an installation with Helm, from install to uninstall, with the commands of README.md and docs/install.md.

use std::fs;
use std::time::Instant;

use npl_testkit::cluster::timeout_option;
use npl_testkit::poll;
use npl_testkit::{helm, tools};

use crate::agent;
use crate::load::{self, Under};
use crate::newcomer;
use crate::traffic::PORTS;
use crate::uninstall;
use crate::world::{AGENT_NAMESPACE, LIMIT, NAMESPACE, World};

/// A group of Nodes that contains one of the Nodes.
const GROUP: [&str; 2] = [
    "--set-json",
    r#"nodeGroups=[{"name":"edge","nodeLabel":{"key":"kubernetes.io/hostname","values":["node-1"]},"config":{"resync":"10s"}}]"#,
];

/// Helm takes over the agents that the manifest has installed, upgrades the release, and rolls it back. One Node joins a
/// group of Nodes and leaves the group again. No request fails.
pub(crate) fn a_release_is_installed_upgraded_and_rolled_back_under_load(world: &mut World) {
    Under::default().load(world, |world| {
        run(world, "helm upgrade --install npl deploy/chart/npl --namespace npl-system --take-ownership", &[]);
        let changed = ["--set", "metrics.enabled=true,config.drain=10s"];
        run(world, "helm upgrade npl deploy/chart/npl --namespace npl-system --reset-then-reuse-values", &changed);
        assert_eq!(drain(world), "10s");
        load::renew(world, "deployment/elastic");
        run(world, "helm rollback npl --namespace npl-system", &[]);
        assert_eq!(drain(world), "");
        load::renew(world, "deployment/elastic");
        run(world, "helm upgrade npl deploy/chart/npl --namespace npl-system --reset-then-reuse-values", &GROUP);
        wait_for_agents(world, ["npl-agent-edge", "npl-agent"]);
        load::renew(world, "deployment/elastic");
        run(world, "helm rollback npl --namespace npl-system", &[]);
        wait_for_agents(world, ["npl-agent"; 2]);
        load::renew(world, "deployment/elastic");
    });
}

/// Waits until each Node runs exactly one agent, which is ready and belongs to the DaemonSet with this name.
fn wait_for_agents(world: &World, daemon_sets: [&str; 2]) {
    let expected: Vec<_> = ["node-1", "node-2"].into_iter().zip(daemon_sets).collect();
    let is_reached = || {
        let agents = agent::all(world);
        let owner = |name: &'_ str| name.rsplit_once('-').map_or("", |(owner, _)| owner).to_owned();
        let mut found: Vec<_> = agents.iter().map(|pod| (pod.node.as_str(), owner(&pod.name))).collect();
        found.sort_unstable();
        let is_expected = found.iter().map(|(node, owner)| (*node, owner.as_str())).eq(expected.iter().copied());
        (is_expected && agents.iter().all(|pod| pod.is_ready)).then_some(())
    };
    poll::until(&format!("agents of {daemon_sets:?}"), LIMIT, is_reached).unwrap();
}

/// The uninstall hook withdraws the annotations before the agents stop, on Nodes with and without a group.
pub(crate) fn helm_uninstall_retires_every_node(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let entries: Vec<_> = shop.keys().flat_map(|pod| world.entries(pod, PORTS)).collect();
    // The drain is shortened from the default of 30 s, so that the test takes less time.
    let short = ["--set", "config.drain=2s", GROUP[0], GROUP[1]];
    run(world, "helm upgrade npl deploy/chart/npl --namespace npl-system --reset-then-reuse-values", &short);
    wait_for_agents(world, ["npl-agent-edge", "npl-agent"]);
    run(world, "helm uninstall npl --namespace npl-system", &[]);
    uninstall::assert_removed(world, &shop, entries);
    let kinds = "daemonsets,jobs,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,flowschemas,\
                 prioritylevelconfigurations,validatingadmissionpolicies,resourcequotas";
    let label = ["--all-namespaces", "--selector", "app.kubernetes.io/name=npl", "--output", "name"];
    let gone = || world.kubectl(&[&["get", kinds][..], &label].concat()).is_empty().then_some(());
    poll::until("the objects of the release to be deleted", LIMIT, gone).unwrap();
}

/// The commands of README.md install NPL, show the traffic of a Service and the translation of a packet, and remove
/// NPL. The test skips the build of the image, and adds `--wait` and a timeout to `helm uninstall`. In the commands
/// `top` and `trace`, the test replaces the DaemonSet by an agent's Pod, and the node port by a node port of a Pod of
/// the shop.
pub(crate) fn the_commands_of_the_readme_work_from_install_to_uninstall(world: &mut World) {
    let started = Instant::now();
    install(world);
    newcomer::watch_traffic_and_trace_a_packet(world);
    let shop = world.wait_for_shop(4);
    let entries: Vec<_> = shop.keys().flat_map(|pod| world.entries(pod, PORTS)).collect();
    let uninstall = "helm uninstall npl --namespace npl-system";
    assert!(newcomer::readme().contains(&format!("`{uninstall}`")), "README.md does not have `{uninstall}`");
    execute(world, uninstall, &["--wait", timeout_option()]);
    uninstall::assert_removed(world, &shop, entries);
    println!("from `helm install` to the end of `helm uninstall`: {:.0?}", started.elapsed());
    // NPL is installed again, because the next tests uninstall running agents.
    install(world);
}

/// Runs the commands of the section "Install" in README.md, which must result in a working installation.
fn install(world: &World) {
    let text = newcomer::readme();
    let section = text.split_once("\n## Install\n").unwrap().1.split_once("\n## ").unwrap().0;
    let block = section.split_once("```sh\n").unwrap().1.split_once("```").unwrap().0;
    let commands: Vec<&str> = block
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .collect();
    // The first command builds the image and is skipped, because the image is already on every Node of the test's
    // cluster.
    assert_eq!(commands.first(), Some(&"cargo xtask image"), "{commands:?}");
    assert!(commands.len() > 2, "{commands:?}");
    for command in &commands[1..] {
        execute(world, command, &[]);
    }
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
    for pod in world.wait_for_shop(4).into_keys() {
        world.entries(&pod, PORTS);
    }
    assert!(world.kubectl(&["get", "service", "web", "--output", "yaml"]).contains("nodeportlocal.antrea.io/enabled"));
    // The example is deleted without a test of its Pods, which cannot start: the Nodes cannot reach the registry of the
    // image.
    world.kubectl(&["delete", "deployment/web", "service/web", timeout_option()]);
    assert_eq!(world.pods(NAMESPACE, "app=web").len(), 4);
}

/// Runs a command that docs/install.md contains, with further arguments.
fn run(world: &World, command: &str, further: &[&str]) {
    let text = fs::read_to_string(tools::repository_file("docs/install.md")).unwrap();
    assert!(text.contains(command), "docs/install.md does not have `{command}`");
    execute(world, command, &[&["--wait", timeout_option()], further].concat());
}

fn execute(world: &World, command: &str, further: &[&str]) {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap();
    let found = helm::command().unwrap();
    let program = if program == "helm" { found.get_program() } else { program.as_ref() };
    let mut command = world.cluster.cluster().command(program).unwrap();
    command.args(words).args(further).current_dir(tools::repository_file("."));
    // Helm's caches and configuration are placed in the directory of the test run, so that they are removed with it.
    let run = world.cluster.run();
    command.env("HELM_CACHE_HOME", run.file("helm-cache")).env("HELM_CONFIG_HOME", run.file("helm-config"));
    tools::output(&mut command).unwrap();
}

/// Returns the value of `NPL_DRAIN` in the DaemonSet; empty if the variable is unset.
fn drain(world: &World) -> String {
    let path = "jsonpath={.spec.template.spec.containers[0].env[?(@.name==\"NPL_DRAIN\")].value}";
    world.kubectl(&["get", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, "--output", path])
}

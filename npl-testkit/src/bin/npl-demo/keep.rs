// SPDX-License-Identifier: Apache-2.0
//! Keeps the environment running for exploration.

use anyhow::Result;
use npl_testkit::interrupt;

use crate::environment::{Environment, NAMESPACE, TCP_PORT};
use crate::report::Report;

/// Prints commands to inspect the environment and waits for Ctrl-C.
pub(crate) fn wait(report: &mut Report, env: &Environment) -> Result<()> {
    report.step("The demo keeps running: explore it as root in another terminal")?;
    let (node, client) = (env.topology.node().name(), env.client().name());
    let agent = env.node_command();
    let (binary, bpffs) = (agent.binary.display(), agent.bpffs.display());
    let kubeconfig = env.plane().admin_kubeconfig();
    let mappings = agent.command_json("mappings")?;
    let port = mappings.as_array().into_iter().flatten().find(|mapping| mapping["podPort"] == TCP_PORT);
    let port = port.map_or_else(|| "61000".to_owned(), |mapping| mapping["nodePort"].to_string());
    let commands = [
        (
            "annotations",
            format!(
                "ip netns exec {node} kubectl --kubeconfig {} get pods --namespace {NAMESPACE} --output yaml",
                kubeconfig.display()
            ),
        ),
        ("agent status", format!("ip netns exec {node} {binary} status --bpffs {bpffs}")),
        ("mappings", format!("ip netns exec {node} {binary} mappings --bpffs {bpffs}")),
        (
            "kernel map",
            format!(
                "bpftool map dump pinned {bpffs}/npl/v{}/{}",
                npl_common::names::ABI_VERSION,
                npl_common::names::MAP_MAPPING_V4
            ),
        ),
        ("agent metrics", format!("ip netns exec {node} curl --silent http://{}/metrics", env.agent.listen())),
        ("agent log", format!("tail --follow {}", agent.log.display())),
        ("request", format!("ip netns exec {client} curl --silent http://{}:{port}/", env.node_ip())),
    ];
    for (what, command) in &commands {
        report.say(&format!("{what:<18} {command}"))?;
    }
    report.say("Press Ctrl-C to remove everything.")?;
    report.record("lookAround", &commands.map(|(_, command)| command))?;
    report.publish()?;
    interrupt::wait();
    Ok(())
}

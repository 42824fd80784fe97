// SPDX-License-Identifier: Apache-2.0
//! The sequence of the demo's steps, and the teardown.

use anyhow::{Result, bail};

use crate::report::{Report, milliseconds};
use crate::stage::{NODE, Stage};
use crate::{answers, counters, keep, publish, replace, restart};

/// Runs the demo and removes its environment, also after an error.
pub(crate) fn tell(report: &mut Report, keep_up: bool) -> Result<()> {
    report.chapter("Start a cluster of one Node, with network namespaces as machines")?;
    let mut stage = Stage::build()?;
    introduce(report, &stage)?;
    if let Err(err) = play(report, &mut stage) {
        bail!("{err:#}\n{}", stage.agent.process().log_tail(20));
    }
    if keep_up {
        keep::wait(report, &stage)?;
    }
    end(report, stage)
}

fn introduce(report: &mut Report, stage: &Stage) -> Result<()> {
    let road = format!("client {} ── {NODE} {} ", stage.client_ip(), stage.node_ip());
    for (at, pod) in stage.topology.pods().iter().enumerate() {
        let start = if at == 0 { road.clone() + "─┬─" } else { " ".repeat(road.chars().count()) + " ├─" };
        report.say(&format!("{start} {} {}", pod.name, pod.ip()))?;
    }
    report.say(&format!("kube-apiserver ready after {} ms", milliseconds(stage.times.control_plane)))?;
    report.say(&format!("npl-agent ready after {} ms", milliseconds(stage.times.agent)))?;
    report.record("controlPlaneReadyMilliseconds", &stage.times.control_plane.as_millis())?;
    report.record("agentReadyMilliseconds", &stage.times.agent.as_millis())
}

fn play(report: &mut Report, stage: &mut Stage) -> Result<()> {
    let routes = publish::tell(report, stage)?;
    answers::tell(report, stage, &routes)?;
    let routes = replace::tell(report, stage, routes)?;
    restart::tell(report, stage, &routes)?;
    counters::tell(report, stage)
}

fn end(report: &mut Report, mut stage: Stage) -> Result<()> {
    report.chapter("Stop the agent and remove everything")?;
    let inventory = stage.inventory()?;
    let status = stage.end_agent()?;
    report.claim("the agent exits cleanly on SIGTERM", status.success(), status.to_string())?;
    report.say("$ npl-agent cleanup")?;
    stage.node_command().command(&["cleanup"])?;
    let left = stage.inventory()?;
    let left: Vec<&str> = left.lines().filter(|line| line.starts_with("pin ") || line.starts_with("BPF ")).collect();
    report.claim("`npl-agent cleanup` removes all programs, maps and pins", left.is_empty(), left.join(", "))?;
    drop(stage);
    let gone = inventory.assert_gone();
    let detail =
        gone.as_ref().map_or_else(ToString::to_string, |()| format!("{} objects removed", inventory.lines().count()));
    report.claim("no namespace, process, mount, program or map remains", gone.is_ok(), detail)
}

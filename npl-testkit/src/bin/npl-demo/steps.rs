// SPDX-License-Identifier: Apache-2.0
//! The sequence of the demo's steps, and the teardown.

use anyhow::{Result, bail};

use crate::environment::{Environment, NODE};
use crate::report::{Report, milliseconds};
use crate::{answers, counters, keep, publish, replace, restart};

/// Runs the demo and removes its environment, also after an error.
pub(crate) fn run(report: &mut Report, keep_up: bool) -> Result<()> {
    report.step("Start a cluster of one Node, with network namespaces as machines")?;
    let mut env = Environment::build()?;
    describe(report, &env)?;
    if let Err(err) = run_steps(report, &mut env) {
        bail!("{err:#}\n{}", env.agent.process().log_tail(20));
    }
    if keep_up {
        keep::wait(report, &env)?;
    }
    end(report, env)
}

fn describe(report: &mut Report, env: &Environment) -> Result<()> {
    let path = format!("client {} ── {NODE} {} ", env.client_ip(), env.node_ip());
    for (at, pod) in env.topology.pods().iter().enumerate() {
        let start = if at == 0 { path.clone() + "─┬─" } else { " ".repeat(path.chars().count()) + " ├─" };
        report.say(&format!("{start} {} {}", pod.name, pod.ip()))?;
    }
    report.say(&format!("kube-apiserver ready after {} ms", milliseconds(env.times.control_plane)))?;
    report.say(&format!("npl-agent ready after {} ms", milliseconds(env.times.agent)))?;
    report.record("controlPlaneReadyMilliseconds", &env.times.control_plane.as_millis())?;
    report.record("agentReadyMilliseconds", &env.times.agent.as_millis())
}

fn run_steps(report: &mut Report, env: &mut Environment) -> Result<()> {
    let routes = publish::run(report, env)?;
    answers::run(report, env, &routes)?;
    let routes = replace::run(report, env, routes)?;
    restart::run(report, env, &routes)?;
    counters::run(report, env)
}

fn end(report: &mut Report, mut env: Environment) -> Result<()> {
    report.step("Stop the agent and remove everything")?;
    let inventory = env.inventory()?;
    let status = env.end_agent()?;
    report.claim("the agent exits cleanly on SIGTERM", status.success(), status.to_string())?;
    report.say("$ npl-agent cleanup")?;
    env.node_command().command(&["cleanup"])?;
    let left = env.inventory()?;
    let left: Vec<&str> = left.lines().filter(|line| line.starts_with("pin ") || line.starts_with("BPF ")).collect();
    report.claim("`npl-agent cleanup` removes all programs, maps and pins", left.is_empty(), left.join(", "))?;
    drop(env);
    let gone = inventory.assert_gone();
    let detail =
        gone.as_ref().map_or_else(ToString::to_string, |()| format!("{} objects removed", inventory.lines().count()));
    report.claim("no namespace, process, mount, program or map remains", gone.is_ok(), detail)
}

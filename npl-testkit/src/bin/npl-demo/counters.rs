// SPDX-License-Identifier: Apache-2.0
//! Shows the packet counters of the datapath, and checks them against the demo's traffic.

use anyhow::Result;
use serde_json::Value;

use crate::environment::Environment;
use crate::report::Report;

/// Prints the counters and compares them with the demo's traffic.
pub(crate) fn run(report: &mut Report, env: &Environment) -> Result<()> {
    report.step("Show the counters")?;
    report.say("$ npl-agent status")?;
    report.quote(&env.node_command().command(&["status"])?)?;
    report.say("$ npl-agent mappings")?;
    report.quote(&env.node_command().command(&["mappings"])?)?;
    let mappings = env.node_command().command_json("mappings")?;
    let status = env.node_command().command_json("status")?;
    let all: Vec<&Value> = mappings.as_array().into_iter().flatten().collect();
    let has_carried = |mapping: &&&Value| {
        ["requestPackets", "replyPackets"].iter().all(|key| mapping.get(key).and_then(Value::as_u64) > Some(0))
    };
    let carried = all.iter().filter(has_carried).count();
    let detail = format!("{carried} of {}", all.len());
    report.claim("every mapping has translated requests and replies", carried == all.len() && carried > 0, detail)?;
    let dropped = status.pointer("/reasons/rewrite_failed").and_then(Value::as_u64);
    report.claim("no packet was dropped because of a failed rewrite", dropped == Some(0), "")?;
    report.claim("/metrics exports the packet counters", env.agent.metrics()?.contains("npl_datapath_packets"), "")?;
    report.record("finalMappings", &mappings)?;
    report.record("status", &status)
}

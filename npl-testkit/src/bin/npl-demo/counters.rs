// SPDX-License-Identifier: Apache-2.0
//! What the kernel has counted.

use anyhow::Result;
use serde_json::Value;

use crate::report::Report;
use crate::stage::Stage;

/// Shows the counters and checks them against what the story did.
pub(crate) fn tell(report: &mut Report, stage: &Stage) -> Result<()> {
    report.chapter("The counters at the end")?;
    report.say("$ npl-agent status")?;
    report.quote(&stage.node_command().command(&["status"])?)?;
    report.say("$ npl-agent mappings")?;
    report.quote(&stage.node_command().command(&["mappings"])?)?;
    let mappings = stage.node_command().command_json("mappings")?;
    let status = stage.node_command().command_json("status")?;
    let all: Vec<&Value> = mappings.as_array().into_iter().flatten().collect();
    let has_carried = |mapping: &&&Value| {
        ["requestPackets", "replyPackets"].iter().all(|key| mapping.get(key).and_then(Value::as_u64) > Some(0))
    };
    let carried = all.iter().filter(has_carried).count();
    let detail = format!("{carried} of {}", all.len());
    report.claim("every mapping has carried requests and replies", carried == all.len() && carried > 0, detail)?;
    let dropped = status.pointer("/reasons/rewrite_failed").and_then(Value::as_u64);
    report.claim("no packet was dropped", dropped == Some(0), "")?;
    report.claim("/metrics has the same counters", stage.agent.metrics()?.contains("npl_datapath_packets"), "")?;
    report.record("finalMappings", &mappings)?;
    report.record("status", &status)
}

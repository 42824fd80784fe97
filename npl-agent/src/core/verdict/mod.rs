// SPDX-License-Identifier: Apache-2.0
//! Decides whether the Node serves its node ports, from the state that the agent reports and from the kernel's state.

use std::fmt;

use npl_common::reason::Reason;
use serde::{Deserialize, Serialize};

use super::{
    devices::filter_order::ProgramsAhead,
    pages,
    view::{AgentView, WatchFailure, WatchState, WatchView},
};

/// A write to a Pod that takes longer than this time, in milliseconds, counts as a fault. A write usually takes
/// milliseconds; while a rollout exhausts the rate limit of writes, a write takes seconds.
const OVERDUE_MILLIS: u64 = 5_000;
/// A map counts as nearly full if it contains at least this percentage of the elements for which it has room.
const NEARLY_FULL_PERCENT: usize = 90;

/// The verdict of a command such as `status` on a Node. The commands `why` and `kubectl npl test` use the same values
/// for their verdicts on Pods, Services and the cluster.
///
/// The variants are in ascending order of precedence: the verdict on several Nodes is the greatest of their verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HealthVerdict {
    /// The Node serves all its node ports.
    Healthy,
    /// The state of the agent or of the kernel is unknown.
    CannotTell,
    /// Some traffic is lost, or the agent does not process changes.
    AtRisk,
}

impl HealthVerdict {
    /// The exit code of a command with this verdict.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Healthy => 0,
            Self::AtRisk => 1,
            Self::CannotTell => 2,
        }
    }

    /// Returns the verdict that results from these findings.
    pub fn of(findings: &[HealthFinding]) -> Self {
        let has = |weight| findings.iter().any(|finding| finding.weight == weight);
        if has(Weight::Risk) {
            Self::AtRisk
        } else if has(Weight::Unknown) {
            Self::CannotTell
        } else {
            Self::Healthy
        }
    }
}

impl fmt::Display for HealthVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Healthy => "healthy",
            Self::AtRisk => "traffic at risk",
            Self::CannotTell => "cannot tell",
        })
    }
}

/// How a finding affects the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weight {
    /// The finding means that traffic is lost now or will be lost.
    Risk,
    /// The finding means that a fact is missing on which the verdict depends.
    Unknown,
    /// The finding only informs the operator: it does not affect the verdict.
    Notice,
}

/// One observation about the Node, and its effect on the verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthFinding {
    /// The effect of the finding on the verdict.
    pub weight: Weight,
    /// The text of the finding: an observation and its effect on traffic.
    pub text: String,
    /// The documentation section about causes and remedies: file and anchor.
    pub page: &'static str,
}

/// The number of elements in a BPF map, and the number for which the map has room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TableFill {
    /// The name of the map.
    pub map: &'static str,
    /// The number of elements in the map.
    pub used: usize,
    /// The maximum number of elements of the map.
    pub capacity: usize,
    /// Whether the kernel evicts the least recently used element when the map is full.
    pub evicts: bool,
}

/// The facts about the Node on which the verdict depends.
#[derive(Debug, Clone, Copy)]
pub struct HealthFacts<'a> {
    /// Whether the datapath's maps are pinned.
    pub is_installed: bool,
    /// Whether an agent holds the lock of the BPF file system.
    pub is_agent_running: bool,
    /// The state that the agent reports, or the reason why the agent did not answer.
    pub agent: Result<&'a AgentView, &'a str>,
    /// The number of uplinks with attached programs, as the kernel lists them.
    pub attached_uplinks: usize,
    /// By device: the programs of other software that run ahead of NPL's programs.
    pub programs_ahead: &'a ProgramsAhead,
    /// For each map, the number of elements in the map, and the number for which the map has room.
    pub tables: &'a [TableFill],
    /// The number of packets that the programs counted under each reason within the sampling interval; empty if no
    /// interval was requested.
    pub recent_reasons: &'a [(Reason, u64)],
}

/// Returns all findings, sorted by their effect on the verdict, the worst first.
pub fn findings(facts: &HealthFacts<'_>) -> Vec<HealthFinding> {
    let mut findings = of_presence(facts);
    if let Ok(agent) = facts.agent {
        findings.extend(of_agent(agent));
    }
    findings.extend(of_kernel(facts));
    findings.sort_by_key(|finding| finding.weight);
    findings
}

fn risk(text: impl Into<String>, page: &'static str) -> HealthFinding {
    HealthFinding { weight: Weight::Risk, text: text.into(), page }
}

fn unknown(text: impl Into<String>, page: &'static str) -> HealthFinding {
    HealthFinding { weight: Weight::Unknown, text: text.into(), page }
}

fn notice(text: impl Into<String>, page: &'static str) -> HealthFinding {
    HealthFinding { weight: Weight::Notice, text: text.into(), page }
}

fn of_presence(facts: &HealthFacts<'_>) -> Vec<HealthFinding> {
    match (facts.agent, facts.is_agent_running, facts.is_installed) {
        (Ok(_), _, _) => Vec::new(),
        (Err(_), false, true) => vec![risk(
            "no agent runs on this Node: existing mappings are served, but changes of Pods and Services are not applied",
            pages::NOT_READY,
        )],
        (Err(_), false, false) => vec![unknown(
            "NPL is not installed on this Node: no agent has run, or `npl-agent cleanup` has removed NPL's state",
            pages::NOT_READY,
        )],
        (Err(reason), true, _) => {
            vec![unknown(format!("an agent runs, but its state cannot be read: {reason}"), pages::LOCAL_SOCKET)]
        }
    }
}

fn of_agent(agent: &AgentView) -> Vec<HealthFinding> {
    let mut findings = Vec::new();
    for missing in &agent.waits_for {
        findings.push(risk(
            format!("the agent waits for {missing}, and publishes no node port until then"),
            pages::NOT_READY,
        ));
    }
    if agent.is_retiring {
        let mut text = "the Node is being retired: its node ports are withdrawn".to_owned();
        if !agent.retirement_waits_for.is_empty() {
            text = format!("{text}; waiting for {}", agent.retirement_waits_for.join(", and for "));
        }
        findings.push(notice(text, pages::STATES));
    } else if !agent.is_ready && agent.waits_for.is_empty() && agent.reaches_clients {
        findings.push(risk("the agent has not completed its first pass over all Pods", pages::NOT_READY));
    }
    if !agent.reaches_clients && !agent.is_retiring {
        let text = "no device through which clients reach the Node has the programs: name the uplinks with --devices";
        findings.push(risk(text, pages::DOCTOR));
    }
    for device in agent.devices.iter().filter(|device| !device.is_attached) {
        let text =
            format!("device {} has no programs, so clients behind it are not served: {}", device.name, device.reason);
        findings.push(risk(text, pages::DOCTOR));
    }
    for device in &agent.former_programs_on {
        let text = format!("device {device} is served by programs of an earlier agent, which therefore stay attached");
        findings.push(notice(text, pages::DOCTOR));
    }
    findings.extend(agent.watches.iter().filter_map(of_watch));
    findings.extend(of_ports(agent));
    for refusal in &agent.refusals {
        let text =
            format!("{} {}/{}: {} ({})", refusal.kind, refusal.namespace, refusal.name, refusal.text, refusal.reason);
        findings.push(if refusal.is_served { notice(text, pages::EVENTS) } else { risk(text, pages::EVENTS) });
    }
    let overdue = agent.unpublished_millis.iter().filter(|millis| **millis > OVERDUE_MILLIS).count();
    if overdue > 0 {
        let text = format!(
            "{overdue} Pods have waited for more than {} s for their annotation or readiness gate to be written ({} \
             patches without an answer)",
            OVERDUE_MILLIS / 1_000,
            agent.pending_patches
        );
        findings.push(risk(text, pages::NO_ANNOTATION));
    }
    findings
}

fn of_watch(watch: &WatchView) -> Option<HealthFinding> {
    let resource = &watch.resource;
    match watch.state() {
        WatchState::Failed(WatchFailure { for_millis, error }) => {
            let seconds = for_millis / 1_000;
            let text = format!(
                "the watch of {resource} has been failing for {seconds} s, so changes are not applied: {error}"
            );
            Some(risk(text, pages::SIGNALS))
        }
        WatchState::Interrupted(WatchFailure { error, .. }) => {
            Some(notice(format!("the watch of {resource} is interrupted: {error}"), pages::SIGNALS))
        }
        WatchState::Silent { millis } => {
            let text = format!(
                "the watch of {resource} has received no data for {} s: changes may not be applied",
                millis / 1_000
            );
            Some(risk(text, pages::SIGNALS))
        }
        WatchState::Works | WatchState::NotListed => None,
    }
}

fn of_ports(agent: &AgentView) -> Option<HealthFinding> {
    let scarce = agent.port_usage.iter().min_by_key(|usage| usage.free)?;
    let total = scarce.used + scarce.draining + scarce.quarantined + scarce.free;
    let (protocol, free) = (scarce.protocol, scarce.free);
    let remedy = "widen NPL_PORT_RANGE, or shorten NPL_QUARANTINE";
    if free == 0 {
        return Some(risk(
            format!("no node port is free for {protocol}, so further Pods get no node port: {remedy}"),
            pages::SIZES,
        ));
    }
    let is_scarce = free * 100 < total * (100 - NEARLY_FULL_PERCENT);
    is_scarce.then(|| notice(format!("only {free} node ports are free for {protocol}: {remedy}"), pages::SIZES))
}

fn of_kernel(facts: &HealthFacts<'_>) -> Vec<HealthFinding> {
    let mut findings = Vec::new();
    if facts.is_installed && facts.agent.is_err() && facts.attached_uplinks == 0 {
        findings.push(risk("the programs are not attached to any device: no node port works", pages::DOCTOR));
    }
    for (device, programs) in facts.programs_ahead {
        let programs = programs.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let text = format!(
            "on device {device}, programs of other software run ahead of NPL's program, and may prevent NPL's program \
             from running: {programs}"
        );
        findings.push(risk(text, pages::PROGRAM_AHEAD));
    }
    for TableFill { map, used, capacity, evicts } in facts.tables.iter().copied() {
        if used * 100 < capacity * NEARLY_FULL_PERCENT {
            continue;
        }
        let text = format!("map {map} is nearly full: {used} of {capacity} elements");
        findings.push(if evicts { notice(text, pages::SIZES) } else { risk(text, pages::SIZES) });
    }
    let recent =
        |wanted: Reason| facts.recent_reasons.iter().find(|(reason, _)| *reason == wanted).map_or(0, |it| it.1);
    if recent(Reason::RewriteFailed) > 0 {
        findings.push(risk("packets are dropped now because the kernel lacks memory (rewrite_failed)", pages::REASONS));
    }
    if recent(Reason::SourceRefused) > 0 {
        let text = "packets of clients outside of allowed-source-ranges are dropped now (source_refused)";
        findings.push(notice(text, pages::REASONS));
    }
    findings
}

#[cfg(test)]
mod tests;

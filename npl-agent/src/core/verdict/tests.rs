// SPDX-License-Identifier: Apache-2.0
//! Tests the findings about a Node, and the verdicts that result from the findings.

use npl_common::reason::Reason;

use super::{HealthFacts, HealthFinding, HealthVerdict, TableFill, Weight, findings};
use crate::core::{
    devices::filter_order::ProgramsAhead,
    model::{Family, Protocol},
    view::{AgentView, DeviceView, PortUsageView, RefusalView, WatchFailure, WatchView},
};

/// A part of the text of a finding, and the change to a healthy agent's state that causes this finding.
type Change = (&'static str, fn(&mut AgentView));

fn watch(heard: u64, failing_for: Option<u64>) -> WatchView {
    let failure = failing_for.map(|for_millis| WatchFailure { for_millis, error: "connection refused".to_owned() });
    WatchView { resource: "services".to_owned(), heard_millis_ago: Some(heard), failure }
}

fn usage(free: usize) -> PortUsageView {
    PortUsageView { family: Family::V4, protocol: Protocol::Tcp, used: 100 - free, draining: 0, quarantined: 0, free }
}

fn healthy() -> AgentView {
    AgentView {
        is_ready: true,
        reaches_clients: true,
        watches: vec![watch(60_000, None)],
        devices: vec![DeviceView { name: "eth0".to_owned(), is_attached: true, reason: "named".to_owned() }],
        port_usage: vec![usage(50)],
        ..AgentView::default()
    }
}

/// No program of other software runs ahead of NPL's programs.
static NONE_AHEAD: ProgramsAhead = ProgramsAhead::new();

fn facts(agent: &AgentView) -> HealthFacts<'_> {
    HealthFacts {
        is_installed: true,
        is_agent_running: true,
        agent: Ok(agent),
        attached_uplinks: 1,
        programs_ahead: &NONE_AHEAD,
        tables: &[],
        recent_reasons: &[],
    }
}

fn refusal(reason: &str, is_served: bool) -> RefusalView {
    RefusalView {
        kind: "pod".to_owned(),
        namespace: "shop".to_owned(),
        name: "web-0".to_owned(),
        reason: reason.to_owned(),
        is_served,
        text: "too few ports".to_owned(),
    }
}

/// Returns the only finding after a change to a healthy agent's state.
fn finding(change: impl FnOnce(&mut AgentView)) -> HealthFinding {
    let mut agent = healthy();
    change(&mut agent);
    let mut findings = findings(&facts(&agent));
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.remove(0)
}

#[test]
fn an_agent_that_serves_all_pods_is_healthy() {
    let agent = healthy();
    let findings = findings(&facts(&agent));
    assert_eq!((findings.as_slice(), HealthVerdict::of(&findings)), (&[][..], HealthVerdict::Healthy));
    assert_eq!(HealthVerdict::Healthy.exit_code(), 0);
}

#[test]
fn each_fault_of_the_agent_is_a_risk_that_is_named() {
    let faults: [Change; 9] = [
        ("waits for the lists", |agent| {
            agent.is_ready = false;
            agent.waits_for.push("the lists".to_owned());
        }),
        ("first pass", |agent| agent.is_ready = false),
        ("no device through which clients", |agent| agent.reaches_clients = false),
        ("device eth0 has no programs, so clients behind it are not served", |agent| {
            agent.devices[0].is_attached = false;
        }),
        ("failing for 31 s", |agent| agent.watches[0] = watch(0, Some(31_000))),
        ("received no data for 400 s", |agent| agent.watches[0] = watch(400_000, None)),
        ("no node port is free for tcp", |agent| agent.port_usage[0] = usage(0)),
        ("2 Pods have waited", |agent| agent.unpublished_millis = vec![5_001, 5_000, 60_000]),
        ("pod shop/web-0: too few ports (PortRangeExhausted)", |agent| {
            agent.refusals.push(refusal("PortRangeExhausted", false));
        }),
    ];
    for (text, change) in faults {
        let finding = finding(change);
        assert!(finding.weight == Weight::Risk && finding.text.contains(text), "{text}: {finding:?}");
    }
}

#[test]
fn a_write_that_has_just_been_sent_is_no_sign() {
    let agent = AgentView { unpublished_pods: 2, unpublished_millis: vec![0, 5_000], pending_patches: 2, ..healthy() };
    let findings = findings(&facts(&agent));
    assert_eq!((findings.as_slice(), HealthVerdict::of(&findings)), (&[][..], HealthVerdict::Healthy));
}

#[test]
fn a_fault_that_loses_no_traffic_is_a_notice() {
    let notices: [Change; 6] = [
        ("ProtocolsNotMerged", |agent| agent.refusals.push(refusal("ProtocolsNotMerged", true))),
        ("is interrupted", |agent| agent.watches[0] = watch(0, Some(29_000))),
        ("only 9 node ports", |agent| agent.port_usage[0] = usage(9)),
        ("being retired", |agent| agent.is_retiring = true),
        ("waiting for the drain of 2 mappings", |agent| {
            agent.is_retiring = true;
            agent.retirement_waits_for = vec!["the drain of 2 mappings".to_owned()];
        }),
        ("device eth1 is served by programs of an earlier agent", |agent| {
            agent.former_programs_on = vec!["eth1".to_owned()];
        }),
    ];
    for (text, change) in notices {
        let finding = finding(change);
        assert!(finding.weight == Weight::Notice && finding.text.contains(text), "{text}: {finding:?}");
        assert_eq!(HealthVerdict::of(&[finding]), HealthVerdict::Healthy);
    }
}

#[test]
fn without_an_agent_the_verdict_depends_on_the_lock_and_the_pins() {
    let verdict = |is_agent_running, is_installed| {
        let agent = Err("no socket");
        let none = AgentView::default();
        let facts = HealthFacts { is_installed, is_agent_running, agent, ..facts(&none) };
        HealthVerdict::of(&findings(&facts))
    };
    assert_eq!(verdict(false, true), HealthVerdict::AtRisk, "changes are not applied");
    assert_eq!(verdict(true, true), HealthVerdict::CannotTell, "the agent starts or hangs");
    assert_eq!(verdict(false, false), HealthVerdict::CannotTell, "not installed");
    assert_eq!((HealthVerdict::AtRisk.exit_code(), HealthVerdict::CannotTell.exit_code()), (1, 2));
}

#[test]
fn a_program_ahead_of_npls_is_a_risk() {
    let agent = healthy();
    let ahead = ProgramsAhead::from([("eth0".to_owned(), ["cil_from_netdev".to_owned()].into())]);
    let findings = findings(&HealthFacts { programs_ahead: &ahead, ..facts(&agent) });
    assert_eq!(findings.iter().map(|finding| finding.weight).collect::<Vec<_>>(), [Weight::Risk]);
    let text = &findings[0].text;
    assert!(text.contains("on device eth0, ") && text.ends_with(": cil_from_netdev"), "{text}");
}

#[test]
fn full_maps_and_drops_are_findings() {
    let agent = healthy();
    let table = |used, evicts| TableFill { map: "npl_mapping_v4", used, capacity: 100, evicts };
    let weights = |tables: &[TableFill], recent_reasons: &[(Reason, u64)]| {
        let findings = findings(&HealthFacts { tables, recent_reasons, ..facts(&agent) });
        findings.iter().map(|finding| finding.weight).collect::<Vec<_>>()
    };
    assert_eq!(weights(&[table(89, false)], &[]), []);
    assert_eq!(weights(&[table(90, false), table(90, true)], &[]), [Weight::Risk, Weight::Notice]);
    assert_eq!(weights(&[], &[(Reason::NoMapping, 9), (Reason::RewriteFailed, 0)]), []);
    let dropped = [(Reason::SourceRefused, 1), (Reason::RewriteFailed, 1)];
    assert_eq!(weights(&[], &dropped), [Weight::Risk, Weight::Notice]);
}

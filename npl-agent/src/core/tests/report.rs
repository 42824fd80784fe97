// SPDX-License-Identifier: Apache-2.0
//! Tests when problems are reported by Events, and when problems are logged.

use std::collections::BTreeMap;

use super::{FRESH_MILLIS, QUIET_MILLIS, REFRESH_MILLIS, Reports, SETTLE_MILLIS, SPREAD_MILLIS, Warnings};
use crate::core::{
    model::{Family, Moment, ObjectKey, PodPort, PodUid, Protocol, ServiceUid},
    publish::problem::{AffectedObject, Cause, Problem},
};

fn exhausted(pod: &str, pod_port: u16) -> Problem {
    let subject = AffectedObject::Pod(ObjectKey::new("a", pod), PodUid(pod.into()));
    Problem {
        subject,
        cause: Cause::RangeExhausted { pod_port: PodPort(pod_port), protocol: Protocol::Tcp, family: Family::V4 },
    }
}

fn unsupported(service: &str) -> Problem {
    let subject = AffectedObject::Service(ObjectKey::new("a", service), ServiceUid(service.into()));
    Problem { subject, cause: Cause::UnsupportedProtocol { protocol: Protocol::Sctp } }
}

/// Takes the Events that are due until the time `until`, and returns them in the order in which they are due.
fn reported(reports: &mut Reports, until: u64) -> Vec<String> {
    let mut reported = Vec::new();
    while let Some(due) = reports.next_due().filter(|due| due.0 <= until) {
        reported
            .push(reports.take_due(due).map(|report| format!("{} {} {}", due.0, report.reason, report.note)).unwrap());
    }
    reported
}

#[test]
fn a_lasting_problem_is_reported_once_and_again_before_its_event_expires() {
    let mut reports = Reports::default();
    let problems = [exhausted("p", 80)];
    reports.observe(&problems, Moment(0));
    let reported = reported(&mut reports, SETTLE_MILLIS + REFRESH_MILLIS);
    let note = "no IPv4 node port is free for pod port 80/tcp: widen the agent's --port-range";
    let expected = [SETTLE_MILLIS, SETTLE_MILLIS + REFRESH_MILLIS].map(|at| format!("{at} PortRangeExhausted {note}"));
    assert_eq!(reported, expected);
}

#[test]
fn observing_the_same_problem_again_changes_nothing() {
    let mut reports = Reports::default();
    let problems = [exhausted("p", 80)];
    for at in 0..100 {
        reports.observe(&problems, Moment(at * 1_000));
        reported(&mut reports, at * 1_000);
    }
    assert_eq!(reports.next_due(), Some(Moment(SETTLE_MILLIS + REFRESH_MILLIS)));
}

#[test]
fn a_short_problem_is_never_reported_and_leaves_no_entry() {
    let mut reports = Reports::default();
    let problems = [exhausted("p", 80)];
    for round in 0..1_000 {
        reports.observe(&problems, Moment(round));
        assert_eq!(reported(&mut reports, round), Vec::<String>::new());
        reports.observe(&[], Moment(round));
        assert_eq!(reports.entries.len(), 0);
    }
}

#[test]
fn a_flapping_problem_is_reported_once_a_minute_at_most() {
    let mut reports = Reports::default();
    let problems = [unsupported("s")];
    let mut count = 0;
    for second in 0..600 {
        let now = second * 2_000;
        reports.observe(&problems, Moment(now));
        count += reported(&mut reports, now + 1_500).len();
        reports.observe(&[], Moment(now + 1_500));
    }
    let minutes = 600 * 2_000 / QUIET_MILLIS;
    assert!((minutes - 1..=minutes).contains(&(count as u64)), "{count} in {minutes} minutes");
    reports.observe(&[], Moment(600 * 2_000 + QUIET_MILLIS));
    assert_eq!(reports.entries.len(), 0, "problems that have ended are dropped");
}

#[test]
fn ports_of_a_pod_with_the_same_problem_are_one_report() {
    let mut reports = Reports::default();
    let (first, second, other) = (exhausted("p", 80), exhausted("p", 81), exhausted("q", 80));
    reports.observe(&[first, second.clone(), other.clone()], Moment(0));
    let reported = reported(&mut reports, SETTLE_MILLIS);
    assert_eq!(reported.len(), 2);
    assert!(
        reported[0].ends_with("pod port 80/tcp: widen the agent's --port-range (1 more like this)"),
        "{reported:?}"
    );
    reports.observe(&[second, other], Moment(SETTLE_MILLIS));
    assert_eq!(
        reports.next_due(),
        Some(Moment(SETTLE_MILLIS + QUIET_MILLIS)),
        "a changed text is reported again after the quiet period"
    );
}

#[test]
fn a_failed_report_is_due_again_soon() {
    let mut reports = Reports::default();
    reports.observe(&[exhausted("p", 80)], Moment(0));
    let report = reports.take_due(Moment(SETTLE_MILLIS)).unwrap();
    reports.record_failure(&report, Moment(SETTLE_MILLIS));
    assert_eq!(reports.next_due(), Some(Moment(SETTLE_MILLIS + QUIET_MILLIS)));
}

#[test]
fn a_mark_depends_on_object_reason_and_note() {
    let mark = |problem: &Problem| {
        let mut reports = Reports::default();
        reports.observe(std::slice::from_ref(problem), Moment(0));
        reports.take_due(Moment(SETTLE_MILLIS)).unwrap().mark()
    };
    assert_eq!(mark(&exhausted("p", 80)), mark(&exhausted("p", 80)));
    let others = [exhausted("p", 81), exhausted("q", 80), unsupported("p")];
    assert!(others.iter().all(|other| mark(other) != mark(&exhausted("p", 80))));
}

#[test]
fn a_problem_that_comes_and_goes_is_warned_of_once_a_minute() {
    let mut warnings = Warnings::default();
    let flapping = unsupported("s");
    let mut given = 0;
    for at in (0..3 * QUIET_MILLIS).step_by(1_000) {
        given += warnings.observe(std::slice::from_ref(&flapping), Moment(at)).len();
        given += warnings.observe(&[], Moment(at + 500)).len();
    }
    assert_eq!(given, 3);
}

#[test]
fn a_lasting_problem_is_warned_of_once_and_delays_no_other() {
    let mut warnings = Warnings::default();
    let both = [exhausted("p", 80), exhausted("p", 81)];
    assert_eq!(warnings.observe(&both, Moment(0)), both);
    assert!(warnings.observe(&both, Moment(2 * QUIET_MILLIS)).is_empty());
    let three = [both.as_slice(), &[unsupported("s")]].concat();
    assert_eq!(warnings.observe(&three, Moment(2 * QUIET_MILLIS)), [unsupported("s")]);
}

#[test]
fn a_lasting_problem_that_another_of_its_object_delays_is_warned_of_after_the_quiet_time() {
    let mut warnings = Warnings::default();
    let (former, lasting) = ([exhausted("p", 80)], [exhausted("p", 81)]);
    assert_eq!(warnings.observe(&former, Moment(0)), former);
    assert!(warnings.observe(&lasting, Moment(1_000)).is_empty());
    assert_eq!(warnings.observe(&lasting, Moment(QUIET_MILLIS + 1_000)), lasting);
    assert!(warnings.observe(&lasting, Moment(3 * QUIET_MILLIS)).is_empty());
}

/// The number of Nodes of a large cluster.
const NODES: usize = 5_000;
/// The time in milliseconds for which the API server keeps an Event.
const LIFETIME: u64 = 60 * 60_000;
/// The number of requests that an agent sends if the Event exists: one to create the Event, and one to read the Event.
const REQUESTS: usize = 2;

/// One Service has a problem for four hours. The model of the API server has one Event. Each agent creates the Event if
/// the Event is absent. Otherwise, the agent increments the Event's count if no agent has done so recently.
#[test]
fn the_agents_of_many_nodes_share_the_event_of_a_service() {
    let mut agents: Vec<Reports> = (0..NODES).map(|number| Reports::of_node(&format!("node-{number}"))).collect();
    let problems = [unsupported("s")];
    let mut due: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (number, agent) in agents.iter_mut().enumerate() {
        agent.observe(&problems, Moment(0));
        due.entry(agent.next_due().unwrap().0).or_default().push(number);
    }
    let (mut observed, mut writes, mut per_second) = (None::<u64>, Vec::new(), BTreeMap::<u64, usize>::new());
    while let Some((now, numbers)) = due.pop_first().filter(|(now, _)| *now < 4 * LIFETIME) {
        for number in numbers {
            let report = agents[number].take_due(Moment(now)).unwrap();
            due.entry(agents[number].next_due().unwrap().0).or_default().push(number);
            let age = observed.map(|at| now - at);
            assert!(age.is_none_or(|age| age < LIFETIME), "the Event has expired");
            *per_second.entry(now / 1_000).or_default() += REQUESTS;
            if report.increments_event(age) {
                writes.push(now);
                *per_second.entry(now / 1_000).or_default() += 1;
                observed = Some(now);
            }
        }
    }
    let most = per_second.values().copied().max().unwrap();
    let mean = NODES * REQUESTS / usize::try_from(SPREAD_MILLIS / 1_000).unwrap();
    assert!(most < 2 * mean, "{most} requests in one second, {mean} on average");
    let at_most = 4 * LIFETIME / FRESH_MILLIS;
    assert!((4..=at_most).contains(&(writes.len() as u64)), "{writes:?}");
    assert_eq!(writes.iter().filter(|at| **at < FRESH_MILLIS).count(), 1, "{writes:?}");
}

/// The text of a Service's Event depends on the Pods of the Node, so the text may change several times a second.
#[test]
fn a_text_that_changes_again_and_again_does_not_postpone_the_event() {
    for interval in [10, 500, SETTLE_MILLIS, 10_000] {
        let mut reports = Reports { service_delay: SPREAD_MILLIS - 1, ..Reports::default() };
        let texts = [vec![unsupported("s")], vec![unsupported("s"), unsupported("s")]];
        let mut sent = Vec::new();
        let moments = (0..120_000).step_by(usize::try_from(interval).unwrap());
        for (at, problems) in moments.zip(texts.iter().cycle()) {
            reports.observe(problems, Moment(at));
            sent.extend(reported(&mut reports, at + interval - 1));
        }
        assert_eq!(sent.len(), 1, "the text changes every {interval} ms: {sent:?}");
    }
}

#[test]
fn the_event_of_a_pod_is_neither_delayed_nor_shared() {
    let mut reports = Reports::of_node("node-1");
    reports.observe(&[exhausted("p", 80)], Moment(0));
    assert_eq!(reports.next_due(), Some(Moment(SETTLE_MILLIS)));
    assert!(reports.take_due(Moment(SETTLE_MILLIS)).unwrap().increments_event(Some(0)));
}

// SPDX-License-Identifier: Apache-2.0

use super::{QUIET_MILLIS, REFRESH_MILLIS, Reports, SETTLE_MILLIS, Warnings};
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

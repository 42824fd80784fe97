// SPDX-License-Identifier: Apache-2.0
//! Tests of Namespaces that exist for one command only.

use std::{fs, time::Instant};

use super::*;
use crate::cli::kubectl::script::Script;

const LAB: Kind = Kind { label: "npl-lab", level: "restricted" };

fn namespace(kubectl: Kubectl<'_>) -> TemporaryNamespace<'_> {
    TemporaryNamespace::new(kubectl, &LAB)
}

#[test]
fn a_removal_that_fails_is_tried_again() {
    let script = Script::new("retry", "echo >> tries; [ $(wc -l < tries) -gt 1 ] || { echo busy >&2; exit 1; }");
    assert!(script.with_kubectl(|kubectl| namespace(kubectl).remove(&Interrupt::new(Duration::from_mins(1)))));
    assert_eq!(fs::read(script.0.join("tries")).unwrap().len(), 2);
}

#[test]
fn a_removal_that_always_fails_ends_with_kubectls_reason() {
    let script = Script::new("fail", "echo >> tries; echo forbidden >&2; exit 1");
    let removed = script.with_kubectl(|kubectl| namespace(kubectl).try_remove(&Interrupt::new(REMOVAL)));
    assert_eq!(removed.unwrap_err().to_string(), "forbidden");
    assert_eq!(fs::read(script.0.join("tries")).unwrap().len(), ATTEMPTS);
    let hint = script.with_kubectl(|kubectl| kubectl.line(&["delete", "namespace", "npl-lab-a"]));
    assert_eq!(hint, "kubectl --context lab delete namespace npl-lab-a");
}

#[test]
fn a_request_that_hangs_ends_at_the_time_limit() {
    let script = Script::new("hang", "exec sleep 60");
    let interrupt = Interrupt::new(Duration::from_millis(200));
    let start = Instant::now();
    let listed = script.with_kubectl(|kubectl| kubectl.within(&interrupt).list(&["pods"]));
    assert!(listed.unwrap_err().to_string().contains("time limit"));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn only_namespaces_of_the_same_command_are_named() {
    let namespace = |name: &str| json!({"metadata": {"name": name}});
    assert_eq!(leftover(&namespace("npl-lab-left"), &LAB), Some("npl-lab-left"));
    for other in ["production", "npl-lab", "npl-labs-left"] {
        assert_eq!(leftover(&namespace(other), &LAB), None);
    }
    let ending = json!({"metadata": {"name": "npl-lab-left", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
    assert_eq!(leftover(&ending, &LAB), None);
}

#[test]
fn a_container_that_has_ended_is_reported_at_once() {
    let pod = |status: Value| json!({"metadata": {"name": "echo-1"}, "status": {"containerStatuses": [status]}});
    assert_eq!(progress(&pod(json!({"state": {"running": {}}}))), Progress::Running);
    let waiting = json!({"state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no image"}}});
    let text = "Pod echo-1 does not run: ErrImageNeverPull no image";
    assert_eq!(progress(&pod(waiting)), Progress::Waiting(text.to_owned()));
    let ended = json!({"reason": "Error", "message": "unrecognized subcommand 'echo'\n"});
    let back_off = json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}});
    let text = "the container of Pod echo-1 has ended: Error unrecognized subcommand 'echo'";
    assert_eq!(progress(&pod(back_off)), Progress::Ended(text.to_owned()));
}

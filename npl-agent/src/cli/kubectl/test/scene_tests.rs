// SPDX-License-Identifier: Apache-2.0
//! Tests in which a script takes the place of kubectl.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process};

use super::*;
use crate::config::kubectl_args::ConnectionArgs;

/// A directory with a script that takes the place of kubectl. The directory is removed at the end of the test.
struct Script(PathBuf);

impl Script {
    fn new(name: &str, script: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("npl-agent-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("kubectl");
        fs::write(&path, format!("#!/bin/sh\ncd {}\n{script}", folder.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    /// Calls `use_it` with the scene of a test on one Node, whose objects do not exist yet.
    fn with_scene<T>(&self, use_it: impl FnOnce(&Scene<'_>) -> T) -> T {
        let connection = ConnectionArgs {
            context: Some("lab".to_owned()),
            kubeconfig: None,
            agent_namespace: "npl-system".to_owned(),
            annotation_domain: "nodeportlocal.antrea.io".to_owned(),
        };
        let program = self.0.join("kubectl");
        let kubectl = Kubectl { program: program.to_str().unwrap(), connection: &connection, interrupt: None };
        use_it(&Scene::new(kubectl, &[Site::default()]).unwrap())
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[test]
fn a_removal_that_fails_is_tried_again() {
    let script = Script::new("retry", "echo >> tries; [ $(wc -l < tries) -gt 1 ] || { echo busy >&2; exit 1; }");
    assert!(script.with_scene(|scene| scene.remove(&Interrupt::new(Duration::from_mins(1)))));
    assert_eq!(fs::read(script.0.join("tries")).unwrap().len(), 2);
}

#[test]
fn a_removal_that_always_fails_ends_with_kubectls_reason() {
    let script = Script::new("fail", "echo >> tries; echo forbidden >&2; exit 1");
    let removed = script.with_scene(|scene| scene.try_remove(&Interrupt::new(REMOVAL)));
    assert_eq!(removed.unwrap_err().to_string(), "forbidden");
    assert_eq!(fs::read(script.0.join("tries")).unwrap().len(), ATTEMPTS);
    let hint = script.with_scene(|scene| scene.kubectl.line(&["delete", "namespace", "npl-test-a"]));
    assert_eq!(hint, "kubectl --context lab delete namespace npl-test-a");
}

#[test]
fn a_request_that_hangs_ends_at_the_time_limit() {
    let script = Script::new("hang", "exec sleep 60");
    let interrupt = Interrupt::new(Duration::from_millis(200));
    let start = std::time::Instant::now();
    let listed = script.with_scene(|scene| scene.kubectl.within(&interrupt).list(&["pods"]));
    assert!(listed.unwrap_err().to_string().contains("time limit"));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn only_namespaces_of_tests_are_named() {
    let namespace = |name: &str| json!({"metadata": {"name": name}});
    assert_eq!(leftover(&namespace("npl-test-left")), Some("npl-test-left"));
    assert_eq!(leftover(&namespace("production")), None);
    let ending = json!({"metadata": {"name": "npl-test-left", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
    assert_eq!(leftover(&ending), None);
}

#[test]
fn the_ports_of_all_protocols_differ() {
    Script::new("ports", "").with_scene(|scene| {
        let service = scene.service();
        let ports = service["spec"]["ports"].as_array().unwrap();
        let numbers: BTreeSet<u64> = ports.iter().filter_map(|port| port["port"].as_u64()).collect();
        assert_eq!((numbers.len(), ports.len()), (2, 2));
    });
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

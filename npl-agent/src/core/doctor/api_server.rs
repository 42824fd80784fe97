// SPDX-License-Identifier: Apache-2.0
//! Checks whether the running agent receives changes from the API server.

use super::{Facts, Finding};
use crate::core::{
    certificate,
    view::{WatchFailure, WatchState},
};

pub(super) fn api_server(facts: &Facts) -> Finding {
    const MEANING: &str =
        "the programs keep translating packets, but changes of Pods, Services and the Node are not applied";
    let key = "api_server";
    let watches = match facts.answer_of_agent(key, &facts.watches) {
        Ok(watches) => watches,
        Err(finding) => return finding,
    };
    let (mut faults, mut interruptions, mut without_list) = (Vec::new(), Vec::new(), Vec::new());
    let mut about_certificate = None;
    for watch in watches {
        let resource = &watch.resource;
        match watch.state() {
            WatchState::Works => {}
            WatchState::NotListed => without_list.push(resource.as_str()),
            WatchState::Interrupted(WatchFailure { error, .. }) => {
                about_certificate = about_certificate.or(certificate::advice(error));
                interruptions.push(format!("the watch of {resource} is interrupted: {error}"));
            }
            WatchState::Failed(WatchFailure { for_millis, error }) => {
                about_certificate = about_certificate.or(certificate::advice(error));
                faults.push(format!("the watch of {resource} has been failing for {} s: {error}", for_millis / 1_000));
            }
            WatchState::Silent { millis } => {
                faults.push(format!("the watch of {resource} has received no data for {} s", millis / 1_000));
            }
        }
    }
    if !faults.is_empty() {
        let advice = about_certificate.unwrap_or(
            "check that the API server is reachable from the Node, and that the agent's ServiceAccount has the \
             permissions that deploy/npl.yaml grants",
        );
        return Finding::failed(key, faults.join("; "), format!("{MEANING}: {advice}"));
    }
    if !interruptions.is_empty() {
        let advice = about_certificate.unwrap_or("the agent tries again; if the interruption lasts, the check fails");
        let advice = format!("{MEANING}: {advice}");
        return Finding::warning(key, interruptions.join("; "), advice);
    }
    if !without_list.is_empty() || watches.is_empty() {
        let found = format!("the agent has not received the first list of {}", listed(&without_list));
        return Finding::unknown(key, found, "the agent has just started: run the check again after a few seconds");
    }
    let resources: Vec<&str> = watches.iter().map(|watch| watch.resource.as_str()).collect();
    Finding::ok(key, format!("the agent receives changes of {}", listed(&resources)))
}

fn listed(resources: &[&str]) -> String {
    if resources.is_empty() { "any resource".to_owned() } else { resources.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::super::{Facts, State, tests::check};
    use crate::core::view::{WatchFailure, WatchView};

    const KEY: &str = "api_server";

    fn watch(facts: &mut Facts) -> &mut WatchView {
        facts.watches.as_mut().unwrap().first_mut().unwrap()
    }

    fn fails_for(facts: &mut Facts, millis: u64) {
        fails_with(facts, millis, "connection refused");
    }

    fn fails_with(facts: &mut Facts, millis: u64, error: &str) {
        watch(facts).failure = Some(WatchFailure { for_millis: millis, error: error.to_owned() });
    }

    /// The agent's log states the same causes (tests in `kube/client_tests.rs`).
    #[test]
    fn a_certificate_that_the_agent_cannot_verify_is_reported() {
        const UNSUPPORTED: &str = "invalid peer certificate: UnsupportedSignatureAlgorithmContext(..)";
        check(&[
            (
                |it| fails_with(it, 31_000, UNSUPPORTED),
                KEY,
                State::Failed,
                "invalid peer certificate",
                "certificate cannot be verified",
            ),
            (
                |it| fails_with(it, 0, UNSUPPORTED),
                KEY,
                State::Warning,
                "invalid peer certificate",
                "certificate cannot be verified",
            ),
            (
                |it| fails_with(it, 31_000, "received fatal alert: HandshakeFailure"),
                KEY,
                State::Failed,
                "HandshakeFailure",
                "ECDSA P-521 key",
            ),
        ]);
    }

    #[test]
    fn a_watch_that_fails_or_receives_nothing_is_reported() {
        check(&[
            (|_| {}, KEY, State::Ok, "receives changes of pods, services", ""),
            (
                |it| fails_for(it, 31_000),
                KEY,
                State::Failed,
                "pods has been failing for 31 s: connection refused",
                "ServiceAccount",
            ),
            (|it| fails_for(it, 29_000), KEY, State::Warning, "interrupted: connection refused", "tries again"),
            (
                |it| watch(it).heard_millis_ago = Some(400_000),
                KEY,
                State::Failed,
                "pods has received no data for 400 s",
                "are not applied",
            ),
            (|it| watch(it).heard_millis_ago = Some(200_000), KEY, State::Ok, "receives changes of pods", ""),
            (
                |it| {
                    fails_for(it, 31_000);
                    watch(it).heard_millis_ago = None;
                },
                KEY,
                State::Failed,
                "pods has been failing",
                "API server",
            ),
            (|it| watch(it).heard_millis_ago = None, KEY, State::Unknown, "the first list of pods", "again"),
            (|it| it.watches = Ok(Vec::new()), KEY, State::Unknown, "the first list of any resource", "again"),
            (|it| it.watches = Err("no socket".to_owned()), KEY, State::Unknown, "no socket", "--runtime-dir"),
            (
                |it| {
                    it.is_agent_running = false;
                    it.watches = Err("no socket".to_owned());
                },
                KEY,
                State::Ok,
                "no agent runs",
                "",
            ),
        ]);
    }
}

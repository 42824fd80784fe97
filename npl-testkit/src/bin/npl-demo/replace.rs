// SPDX-License-Identifier: Apache-2.0
//! Deletes one Pod and creates another during continuous requests.

use std::time::{Duration, Instant};

use anyhow::Result;
use npl_testkit::echo::Protocol;
use npl_testkit::traffic::{Load, Report as LoadReport, Request, tcp_request};
use serde_json::json;

use crate::environment::Environment;
use crate::publish::{Routes, entry, wait_for_route};
use crate::report::{Report, milliseconds};

/// The number of requests per second.
const RATE: u32 = 200;

/// The number of responses for which the demo waits before and after each change.
const ANSWERS: u64 = 100;

/// The time limit for these responses, far above the usual duration.
const LIMIT: Duration = Duration::from_mins(1);

const OLD: &str = "web-1";
const NEW: &str = "web-3";

/// Replaces a Pod and returns the annotation entries of all Pods.
pub(crate) fn run(report: &mut Report, env: &mut Environment, mut routes: Routes) -> Result<Routes> {
    report.step(&format!("Delete {OLD} and create {NEW} during {RATE} requests per second"))?;
    let load = Load::start(env.client(), RATE, requests(env, &routes));
    load.wait_for_answers(ANSWERS, LIMIT)?;
    let abandoned = entry(&routes, OLD, Protocol::Tcp)?.address();
    // Stop the requests to the old Pod before its deletion, because a load balancer sends no requests to a terminating
    // Pod.
    routes.remove(OLD);
    load.replace(requests(env, &routes));
    env.remove_pod(OLD)?;
    report.say(&format!("{OLD} is deleted; requests to the other Pods continue"))?;
    load.wait_for_answers(ANSWERS, LIMIT)?;
    let created = Instant::now();
    env.add_pod(NEW)?;
    let (entries, at) = wait_for_route(env, NEW)?;
    let delay = at.saturating_duration_since(created);
    report.say(&format!("{NEW} was annotated {} ms after the creation of its Pod object", milliseconds(delay)))?;
    routes.insert(NEW.to_owned(), entries);
    load.replace(requests(env, &routes));
    load.wait_for_answers(ANSWERS, LIMIT)?;
    let result = load.stop();
    let from_new: u64 = answers_of(&result, NEW);
    claim_nothing_lost(report, &result)?;
    report.claim(&format!("{NEW} responds to requests"), from_new > 0, format!("{from_new} responses"))?;
    let stale = tcp_request(env.client(), abandoned, "still there?");
    let detail = stale.as_ref().map_or_else(|_refused| String::new(), |answer| format!("{} responded", answer.pod));
    report.claim(&format!("the node port of {OLD} no longer responds"), stale.is_err(), detail)?;
    report.record(
        "replacement",
        &json!({
            "deleted": OLD,
            "created": NEW,
            "annotatedAfterMilliseconds": delay.as_secs_f64() * 1000.0,
            "requests": result.total(),
            "failures": result.failures.len(),
        }),
    )?;
    Ok(routes)
}

/// Returns one request per Pod and protocol.
pub(crate) fn requests(env: &Environment, routes: &Routes) -> Vec<Request> {
    let client = env.client_ip();
    let each = routes.iter().flat_map(|(pod, entries)| entries.iter().map(move |entry| (pod, entry)));
    each.map(|(pod, entry)| Request { protocol: entry.protocol, server: entry.address(), pod: pod.clone(), client })
        .collect()
}

/// Checks that every request received the expected response.
pub(crate) fn claim_nothing_lost(report: &mut Report, result: &LoadReport) -> Result<()> {
    for failure in result.failures.iter().take(5) {
        let (request, at) = (&failure.request, milliseconds(failure.at));
        report.say(&format!(
            "{at} ms after the start, {} request to {}: {}",
            request.protocol, request.server, failure.error
        ))?;
    }
    let detail = format!(
        "{} responses, {} failures, slowest response {} ms",
        result.total(),
        result.failures.len(),
        milliseconds(result.slowest)
    );
    report.claim("no request was lost or reached the wrong Pod", result.failures.is_empty(), detail)
}

fn answers_of(result: &LoadReport, pod: &str) -> u64 {
    result.answered.iter().filter(|((name, _), _)| name == pod).map(|(_, count)| count).sum()
}

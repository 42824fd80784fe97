// SPDX-License-Identifier: Apache-2.0
//! Replaces Pods and agents while a load balancer sends requests.

use std::time::Duration;

use anyhow::Result;
use npl_testkit::balancer::{Balancer, Kind, Options, Port, Report as LoadReport};
use npl_testkit::cluster::timeout_option;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::real_cluster::{RealCluster, client_addresses};

use super::{AGENT_NAMESPACE, NAMESPACE, show};
use crate::report::Report;

/// The number of requests per second.
const RATE: u32 = 500;

/// The Service's target ports.
const PORTS: [Port; 2] =
    [Port { target: 8080, protocol: Protocol::Tcp }, Port { target: 5300, protocol: Protocol::Udp }];

/// The members of four Pods: one per Pod, protocol and address family.
const MEMBERS: usize = 16;

const LIMIT: Duration = Duration::from_mins(1);

/// Replaces every Pod and both agents under load.
pub(super) fn run(report: &mut Report, cluster: &RealCluster) -> Result<()> {
    report.step(&format!("Replace all Pods and agents while a load balancer sends {RATE} requests per second"))?;
    let options = Options {
        namespace: NAMESPACE.to_owned(),
        ports: PORTS.to_vec(),
        rate: RATE,
        delay: Duration::ZERO,
        addresses: client_addresses().to_vec(),
    };
    let balancer = Balancer::start(cluster.cluster().client(), cluster.client(), &options)?;
    settle(&balancer)?;
    show(report, cluster, &["rollout", "restart", "deployment/web", "--namespace", NAMESPACE])?;
    show(report, cluster, &["rollout", "status", "deployment/web", "--namespace", NAMESPACE, timeout_option()])?;
    settle(&balancer)?;
    show(report, cluster, &["delete", "pods", "--all", "--namespace", AGENT_NAMESPACE, timeout_option()])?;
    show(
        report,
        cluster,
        &["rollout", "status", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, timeout_option()],
    )?;
    settle(&balancer)?;
    let result = balancer.stop()?;
    claim(report, &result)
}

/// Waits until the balancer has all members and has sent a request to each.
fn settle(balancer: &Balancer) -> Result<()> {
    let complete = || (balancer.members().len() == MEMBERS).then_some(());
    poll::until("all members of the load balancer", LIMIT, complete)?;
    balancer.wait_for_a_round(LIMIT)
}

fn claim(report: &mut Report, result: &LoadReport) -> Result<()> {
    report.quote(&result.to_string())?;
    for failure in result.failures.iter().take(5) {
        let at = failure.at.as_secs_f32();
        report.say(&format!(
            "{at:.1} s after the start, {} of {}: {}",
            failure.member.server, failure.member.pod, failure.error
        ))?;
    }
    let lost = [Kind::Lost, Kind::Refused].map(|kind| result.count(kind)).iter().sum::<u64>() + result.unserved;
    let wrong = result.count(Kind::Wrong);
    report.claim("no request was lost", lost == 0, format!("{lost} of {}", result.requests()))?;
    report.claim(
        "no request reached the wrong Pod",
        wrong == 0,
        format!("responses from {} Pods", result.pods.len()),
    )?;
    report.record("requests", &result.requests())
}

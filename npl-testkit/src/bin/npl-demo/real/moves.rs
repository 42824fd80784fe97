// SPDX-License-Identifier: Apache-2.0
//! Everything moves while a load balancer sends.

use std::time::Duration;

use anyhow::Result;
use npl_testkit::balancer::{Balancer, Kind, Options, Port, Report as LoadReport};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::real_cluster::{RealCluster, client_addresses};

use super::{AGENT_NAMESPACE, NAMESPACE, TIMEOUT, show};
use crate::report::Report;

/// Requests in a second.
const RATE: u32 = 500;

/// The Service's ports at a Pod.
const PORTS: [Port; 2] =
    [Port { target: 8080, protocol: Protocol::Tcp }, Port { target: 5300, protocol: Protocol::Udp }];

/// Members that the four Pods are: one of each protocol and family.
const MEMBERS: usize = 16;

const LIMIT: Duration = Duration::from_mins(1);

/// Replaces every Pod, and both agents, under load.
pub(super) fn tell(report: &mut Report, cluster: &RealCluster) -> Result<()> {
    report.chapter(&format!("A load balancer sends {RATE} requests a second, and everything is replaced"))?;
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
    show(report, cluster, &["rollout", "status", "deployment/web", "--namespace", NAMESPACE, TIMEOUT])?;
    settle(&balancer)?;
    show(report, cluster, &["delete", "pods", "--all", "--namespace", AGENT_NAMESPACE, TIMEOUT])?;
    show(report, cluster, &["rollout", "status", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, TIMEOUT])?;
    settle(&balancer)?;
    let result = balancer.stop()?;
    claim(report, &result)
}

/// Waits until the balancer has as many members as there should be, and has asked each.
fn settle(balancer: &Balancer) -> Result<()> {
    let complete = || (balancer.members().len() == MEMBERS).then_some(());
    poll::until("a balancer that knows every Pod", LIMIT, complete)?;
    balancer.wait_for_a_round(LIMIT)
}

fn claim(report: &mut Report, result: &LoadReport) -> Result<()> {
    report.quote(&result.to_string())?;
    for failure in result.failures.iter().take(5) {
        let at = failure.at.as_secs_f32();
        report
            .say(&format!("after {at:.1} s, {} of {}: {}", failure.member.server, failure.member.pod, failure.error))?;
    }
    let lost = [Kind::Lost, Kind::Refused].map(|kind| result.count(kind)).iter().sum::<u64>() + result.unserved;
    let wrong = result.count(Kind::Wrong);
    report.claim("no request is lost", lost == 0, format!("{lost} of {}", result.requests()))?;
    report.claim("no request is answered by the wrong Pod", wrong == 0, format!("by {} Pods", result.pods.len()))?;
    report.record("requests", &result.requests())
}

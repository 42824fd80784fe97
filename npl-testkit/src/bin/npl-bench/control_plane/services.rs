// SPDX-License-Identifier: Apache-2.0
//! Measures an agent in a cluster with many Services, few of which select Pods of the agent's Node.

use std::time::Duration;

use anyhow::Result;
use npl_testkit::cluster::ServiceObject;
use serde_json::json;

use super::environment::{
    Agents, Environment, LIMIT, NAMESPACE, NODE, POD_PORT, in_parallel, is_published, let_pass, numbered, service,
};
use super::figures::{PEAK_10000, RESIDENT_2000, RESIDENT_10000, SERVICE_CHANGE};
use super::life::{CROWD, CROWD_PODS};
use super::usage;
use crate::Effort;
use crate::figures::{Figure, Samples, say};

/// The namespace of unrelated Services.
pub(super) const OTHERS: &str = "others";
/// The name of the Service that the bench changes. The Service selects one Pod.
const CHANGING: &str = "changing";
/// The number of enabled unrelated Services, which select no Pods.
const ENABLED: usize = 100;
/// The time that the agent gets to complete its work after its start, or after the last of a thousand events.
const SETTLES: Duration = Duration::from_secs(1);

/// Measures with 1000, 2000 and 10 000 Services. Creates the Pods of the Service `CROWD` unless they exist.
pub(crate) fn measure(env: &mut Environment<'_>, effort: Effort, samples: &mut Samples) -> Result<()> {
    let crowd = numbered(CROWD, CROWD_PODS);
    if env.cluster.client().find(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", crowd[0]))?.is_none() {
        env.create_pods(&crowd, NODE, CROWD)?;
        env.run_pods(&crowd)?;
        env.create_service(CROWD)?;
    }
    let changing = [format!("{CHANGING}-0")];
    env.create_pods(&changing, NODE, CHANGING)?;
    env.run_pods(&changing)?;
    env.create_service(CHANGING)?;
    env.cluster.set_service_enabled(NAMESPACE, CROWD, true)?;
    env.cluster.set_service_enabled(NAMESPACE, CHANGING, true)?;
    env.cluster.create_namespace(OTHERS)?;

    let mut agents = env.start_agent()?;
    env.wait_for_all(&crowd, is_published)?;
    let mut others = Others::default();
    others.grow_to(env, 1000)?;
    let at_1000 = changes(env, &mut agents, effort)?;
    others.grow_to(env, 2000)?;
    resident(&mut agents, effort, samples, &RESIDENT_2000, None)?;
    others.grow_to(env, 10_000)?;
    let at_10000 = changes(env, &mut agents, effort)?;
    for (many, few) in at_10000.iter().zip(&at_1000) {
        samples.add(&SERVICE_CHANGE, &[*many], &[*few]);
    }
    resident(&mut agents, effort, samples, &RESIDENT_10000, Some(&PEAK_10000))
}

/// Services of the namespace [`OTHERS`].
#[derive(Debug, Default)]
pub(super) struct Others {
    made: usize,
}

impl Others {
    /// Creates Services until their number is `count`.
    pub(super) fn grow_to(&mut self, env: &Environment<'_>, count: usize) -> Result<()> {
        say(&format!("adding Services, up to {count}"));
        let numbers: Vec<usize> = (self.made..count).collect();
        in_parallel(&numbers, |number| {
            let name = Self::name(*number);
            let other = service(OTHERS, &name, &name);
            env.cluster.create_service(&if *number < ENABLED { other.enabled() } else { other })
        })?;
        self.made = count;
        let_pass(SETTLES)
    }

    /// The name of the Service with this number.
    pub(super) fn name(number: usize) -> String {
        format!("other-{number}")
    }
}

/// Returns, for each round, the agent's mean CPU time for a change of one Service, in milliseconds.
fn changes(env: &Environment<'_>, agents: &mut Agents, effort: Effort) -> Result<Vec<f64>> {
    let pid = agents.agent.process().id();
    let mut rounds = Vec::new();
    for round in 0..effort.rounds {
        let before = usage::cpu_time(pid)?;
        for number in 0..effort.changes {
            let target = POD_PORT + 1 + u16::try_from((round + number) % 2)?;
            change_target(env, target)?;
            let pod_port = format!("\"podPort\":{target},");
            let names_it = |value: Option<&str>| value.is_some_and(|text| text.contains(&pod_port));
            env.annotations.wait_for(&format!("{CHANGING}-0"), LIMIT, names_it)?;
        }
        let spent = usage::cpu_time(pid)?.saturating_sub(before).as_secs_f64() * 1e3;
        rounds.push(spent / f64::from(u32::try_from(effort.changes)?));
    }
    Ok(rounds)
}

fn change_target(env: &Environment<'_>, target: u16) -> Result<()> {
    let ServiceObject { namespace, name, .. } = service(NAMESPACE, CHANGING, CHANGING);
    let ports = json!([{"name": "http", "port": 80, "protocol": "TCP", "targetPort": target}]);
    let path = format!("/api/v1/namespaces/{namespace}/services/{name}");
    env.cluster.client().merge_patch_unread(&path, &json!({"spec": {"ports": ports}}))
}

/// Measures the resident memory of an agent that was running while the cluster grew, and then of the same agent after
/// each of several restarts.
fn resident(
    agents: &mut Agents,
    effort: Effort,
    samples: &mut Samples,
    figure: &Figure,
    peak: Option<&Figure>,
) -> Result<()> {
    for start in 0..=effort.rounds {
        if start > 0 {
            agents.agent.restart()?;
            let_pass(SETTLES)?;
        }
        let used = usage::memory(agents.agent.process().id())?;
        samples.add(figure, &[used.resident], &[]);
        if let Some(peak) = peak {
            samples.add(peak, &[used.peak], &[]);
        }
    }
    Ok(())
}

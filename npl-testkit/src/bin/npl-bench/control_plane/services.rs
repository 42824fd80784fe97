// SPDX-License-Identifier: Apache-2.0
//! A cluster with many Services, of which a Node needs few.

use std::time::Duration;

use anyhow::Result;
use npl_testkit::cluster::ServiceObject;
use serde_json::json;

use super::figures::{PEAK_10000, RESIDENT_2000, RESIDENT_10000, SERVICE_CHANGE};
use super::life::{CROWD, CROWD_PODS};
use super::scene::{
    Agents, LIMIT, NAMESPACE, NODE, POD_PORT, Scene, in_parallel, is_published, let_pass, numbered, service,
};
use super::usage;
use crate::Effort;
use crate::figures::{Figure, Samples, say};

/// Where other people's Services are.
const OTHERS: &str = "others";
/// The Service that changes, and its one Pod.
const CHANGING: &str = "changing";
/// Services of others that are enabled; they select nothing here.
const ENABLED: usize = 100;
/// After a start, and after the last event of a thousand.
const SETTLES: Duration = Duration::from_secs(1);

/// Measures with 1000, 2000 and 10 000 Services; the crowd's Pods are there already or are made.
pub(crate) fn measure(scene: &mut Scene<'_>, effort: Effort, samples: &mut Samples) -> Result<()> {
    let crowd = numbered(CROWD, CROWD_PODS);
    if scene.cluster.client().find(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", crowd[0]))?.is_none() {
        scene.create_pods(&crowd, NODE, CROWD)?;
        scene.run_pods(&crowd)?;
        scene.create_service(CROWD)?;
    }
    let changing = [format!("{CHANGING}-0")];
    scene.create_pods(&changing, NODE, CHANGING)?;
    scene.run_pods(&changing)?;
    scene.create_service(CHANGING)?;
    scene.cluster.set_service_enabled(NAMESPACE, CROWD, true)?;
    scene.cluster.set_service_enabled(NAMESPACE, CHANGING, true)?;
    scene.cluster.create_namespace(OTHERS)?;

    let mut agents = scene.start_agent()?;
    scene.wait_for_all(&crowd, is_published)?;
    let mut others = Others { made: 0 };
    others.grow_to(scene, 1000)?;
    let at_1000 = changes(scene, &mut agents, effort)?;
    others.grow_to(scene, 2000)?;
    resident(&mut agents, effort, samples, &RESIDENT_2000, None)?;
    others.grow_to(scene, 10_000)?;
    let at_10000 = changes(scene, &mut agents, effort)?;
    for (many, few) in at_10000.iter().zip(&at_1000) {
        samples.add(&SERVICE_CHANGE, &[*many], &[*few]);
    }
    resident(&mut agents, effort, samples, &RESIDENT_10000, Some(&PEAK_10000))
}

struct Others {
    made: usize,
}

impl Others {
    fn grow_to(&mut self, scene: &Scene<'_>, count: usize) -> Result<()> {
        say(&format!("{count} Services"));
        let numbers: Vec<usize> = (self.made..count).collect();
        in_parallel(&numbers, |number| {
            let name = format!("other-{number}");
            let other = service(OTHERS, &name, &name);
            scene.cluster.create_service(&if *number < ENABLED { other.enabled() } else { other })
        })?;
        self.made = count;
        let_pass(SETTLES)
    }
}

/// What a change of one Service costs an agent, in milliseconds of a processor, round by round.
fn changes(scene: &Scene<'_>, agents: &mut Agents, effort: Effort) -> Result<Vec<f64>> {
    let pid = agents.agent.process().id();
    let mut rounds = Vec::new();
    for round in 0..effort.rounds {
        let before = usage::cpu_time(pid)?;
        for number in 0..effort.changes {
            let target = POD_PORT + 1 + u16::try_from((round + number) % 2)?;
            change_target(scene, target)?;
            let pod_port = format!("\"podPort\":{target},");
            let names_it = |value: Option<&str>| value.is_some_and(|text| text.contains(&pod_port));
            scene.annotations.wait_for(&format!("{CHANGING}-0"), LIMIT, names_it)?;
        }
        let spent = usage::cpu_time(pid)?.saturating_sub(before).as_secs_f64() * 1e3;
        rounds.push(spent / f64::from(u32::try_from(effort.changes)?));
    }
    Ok(rounds)
}

fn change_target(scene: &Scene<'_>, target: u16) -> Result<()> {
    let ServiceObject { namespace, name, .. } = service(NAMESPACE, CHANGING, CHANGING);
    let ports = json!([{"name": "http", "port": 80, "protocol": "TCP", "targetPort": target}]);
    let path = format!("/api/v1/namespaces/{namespace}/services/{name}");
    scene.cluster.client().merge_patch_unread(&path, &json!({"spec": {"ports": ports}}))
}

/// What is resident of an agent that saw the cluster grow, and of those that start in it.
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

// SPDX-License-Identifier: Apache-2.0
//! Measures an agent from its start to its restart, round by round. Each round begins without kernel state and without
//! annotations.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::environment::{Agents, Environment, LIMIT, NAMESPACE, NODE, is_published, let_pass, numbered};
use super::figures::{
    ANNOTATION_BUSY, ANNOTATION_IDLE, CPU_1000, PODS_200, PODS_1000, STEADY_CPU, STEADY_REQUESTS, WITHDRAWN_200,
};
use super::plain::Plain;
use super::requests::Requests;
use super::{recovery, usage};
use crate::Effort;
use crate::figures::{Figure, Samples, say};

/// The names of the Services. The name of a Pod starts with the name of the Pod's Service.
const SINGLE: &str = "single";
const FEW: &str = "few";
pub(crate) const CROWD: &str = "crowd";

const FEW_PODS: usize = 200;
pub(crate) const CROWD_PODS: usize = 1000;

/// The time after the last annotation within which the agent completes its other work.
const SETTLES: Duration = Duration::from_millis(300);

/// The Pods that all rounds use.
struct Pods {
    few: Vec<String>,
    crowd: Vec<String>,
    plain: Plain,
}

/// Creates the Pods and Services, and measures all rounds.
pub(crate) fn measure(env: &mut Environment<'_>, effort: Effort, samples: &mut Samples) -> Result<()> {
    Requests::count_from_now_on(env.cluster.client())?;
    let few = numbered(FEW, FEW_PODS);
    let crowd = numbered(CROWD, CROWD_PODS);
    for (pods, app) in [(&few, FEW), (&crowd, CROWD)] {
        env.create_pods(pods, NODE, app)?;
        env.run_pods(pods)?;
        env.create_service(app)?;
    }
    env.create_service(SINGLE)?;
    env.cluster.set_service_enabled(NAMESPACE, SINGLE, true)?;
    let mut pods = Pods { few, crowd, plain: Plain::new(env, numbered("plain", CROWD_PODS))? };
    for number in 0..effort.rounds {
        say(&format!("measuring an agent from start to restart, round {} of {}", number + 1, effort.rounds));
        Round { number, effort, env, pods: &mut pods, samples }.run()?;
    }
    env.cluster.delete_service(NAMESPACE, SINGLE)?;
    env.cluster.delete_service(NAMESPACE, FEW)
}

struct Round<'a, 'b> {
    number: usize,
    effort: Effort,
    env: &'a mut Environment<'b>,
    pods: &'a mut Pods,
    samples: &'a mut Samples,
}

impl Round<'_, '_> {
    fn run(&mut self) -> Result<()> {
        let mut agents = self.env.start_agent()?;
        Requests::counted(self.env.cluster.client())?.ensure_counted()?;
        let mut singles = self.latencies("idle", &ANNOTATION_IDLE)?;
        self.few_pods()?;
        self.withdrawal()?;
        self.many_pods(&mut agents)?;
        singles.extend(self.latencies("busy", &ANNOTATION_BUSY)?);
        self.steady(&mut agents)?;
        let late = format!("{SINGLE}-{}-late", self.number);
        self.env.create_pods(std::slice::from_ref(&late), NODE, SINGLE)?;
        let published = [self.pods.crowd.as_slice(), &singles].concat();
        let mut agents = recovery::restart(self.env, agents, &published, &late, self.samples)?;
        recovery::flush(&mut agents, published.len() + 1, self.samples)?;
        drop(agents);
        singles.push(late);
        self.tidy_up(&singles)
    }

    /// For one Pod after the other, measures the time from the Pod's address to its annotation, and then the time of
    /// one patch without the agent.
    fn latencies(&mut self, when: &str, figure: &Figure) -> Result<Vec<String>> {
        let pods = numbered(&format!("{SINGLE}-{}-{when}", self.number), self.effort.latencies);
        self.env.create_pods(&pods, NODE, SINGLE)?;
        self.env.collect_garbage()?;
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for (number, pod) in pods.iter().enumerate() {
            self.env.run_pod(pod)?;
            let has_address = Instant::now();
            let seen = self.env.annotations.wait_for(pod, LIMIT, is_published)?;
            ours.push(seen.at.saturating_duration_since(has_address).as_secs_f64() * 1e3);
            floor.push(self.pods.plain.one(self.env, number)?);
        }
        self.samples.add(figure, &ours, &floor);
        Ok(pods)
    }

    fn few_pods(&mut self) -> Result<()> {
        let floor = |round: &mut Self| round.pods.plain.all(round.env, FEW_PODS);
        self.beside(&PODS_200, floor, |round| {
            round.env.cluster.set_service_enabled(NAMESPACE, FEW, true)?;
            round.seconds_until(Instant::now(), &round.pods.few, is_published)
        })
    }

    fn withdrawal(&mut self) -> Result<()> {
        let floor = |round: &mut Self| round.pods.plain.all_withdrawn(round.env, FEW_PODS);
        self.beside(&WITHDRAWN_200, floor, |round| {
            round.env.cluster.delete_service(NAMESPACE, FEW)?;
            round.seconds_until(Instant::now(), &round.pods.few, |value| value.is_none())
        })?;
        self.env.create_service(FEW)
    }

    fn many_pods(&mut self, agents: &mut Agents) -> Result<()> {
        let pid = agents.agent.process().id();
        let mut cpu = Duration::ZERO;
        let floor = |round: &mut Self| round.pods.plain.all(round.env, CROWD_PODS);
        self.beside(&PODS_1000, floor, |round| {
            let before = usage::cpu_time(pid)?;
            round.env.cluster.set_service_enabled(NAMESPACE, CROWD, true)?;
            let ours = round.seconds_until(Instant::now(), &round.pods.crowd, is_published)?;
            let_pass(SETTLES)?;
            cpu = usage::cpu_time(pid)?.saturating_sub(before);
            Ok(ours)
        })?;
        self.samples.add(&CPU_1000, &[cpu.as_secs_f64()], &[]);
        Ok(())
    }

    /// Measures a figure between two measurements of the same patches without the agent, and compares the figure with
    /// the mean of these two. A gradual change of the machine's speed thus affects the figure and the mean equally.
    fn beside(
        &mut self,
        figure: &Figure,
        floor: impl Fn(&mut Self) -> Result<f64>,
        ours: impl FnOnce(&mut Self) -> Result<f64>,
    ) -> Result<()> {
        let before = floor(self)?;
        self.env.collect_garbage()?;
        let ours = ours(self)?;
        let after = floor(self)?;
        self.samples.add(figure, &[ours], &[f64::midpoint(before, after)]);
        Ok(())
    }

    /// Measures the requests and the CPU time of an idle agent.
    fn steady(&mut self, agents: &mut Agents) -> Result<()> {
        let_pass(SETTLES)?;
        let pid = agents.agent.process().id();
        let requests = Requests::counted(self.env.cluster.client())?;
        let (began, before) = (Instant::now(), usage::cpu_time(pid)?);
        let_pass(self.effort.steady)?;
        let cpu = usage::cpu_time(pid)?.saturating_sub(before).as_secs_f64() / began.elapsed().as_secs_f64();
        let asked = Requests::counted(self.env.cluster.client())?.since(requests).but_watches();
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        self.samples.add(&STEADY_REQUESTS, &[asked as f64], &[]);
        self.samples.add(&STEADY_CPU, &[cpu * 100.0], &[]);
        Ok(())
    }

    fn seconds_until(&self, began: Instant, pods: &[String], wanted: impl Fn(Option<&str>) -> bool) -> Result<f64> {
        let last = self.env.wait_for_all(pods, wanted)?;
        Ok(last.saturating_duration_since(began).as_secs_f64())
    }

    /// Prepares the next round after the agent has ended: disables the Service [`CROWD`], deletes the Pods `singles`,
    /// which only this round uses, and removes the annotations of the Pods of [`CROWD`].
    fn tidy_up(&self, singles: &[String]) -> Result<()> {
        self.env.cluster.set_service_enabled(NAMESPACE, CROWD, false)?;
        self.env.delete_pods(singles)?;
        self.pods.plain.clear(&self.pods.crowd)?;
        self.env.wait_for_all(&self.pods.crowd, |value| value.is_none()).map(drop)
    }
}

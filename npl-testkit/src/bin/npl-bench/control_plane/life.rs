// SPDX-License-Identifier: Apache-2.0
//! An agent's life, round by round: each begins with a Node whose kernel knows nothing, and Pods without annotations.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::figures::{
    ANNOTATION_BUSY, ANNOTATION_IDLE, CPU_1000, PODS_200, PODS_1000, STEADY_CPU, STEADY_REQUESTS, WITHDRAWN_200,
};
use super::plain::Plain;
use super::requests::Requests;
use super::scene::{Agents, LIMIT, NAMESPACE, NODE, Scene, is_published, let_pass, numbered};
use super::{upset, usage};
use crate::Effort;
use crate::figures::{Figure, Samples, say};

/// The Services, whose Pods have the same name and a number.
const SINGLE: &str = "single";
const FEW: &str = "few";
pub(crate) const CROWD: &str = "crowd";

const FEW_PODS: usize = 200;
pub(crate) const CROWD_PODS: usize = 1000;

/// What is left to do after the last annotation is done by then.
const SETTLES: Duration = Duration::from_millis(300);

/// The Pods of one round and those of all.
struct Cast {
    few: Vec<String>,
    crowd: Vec<String>,
    plain: Plain,
}

/// Measures the rounds.
pub(crate) fn measure(scene: &mut Scene<'_>, effort: Effort, samples: &mut Samples) -> Result<()> {
    Requests::count_from_now_on(scene.cluster.client())?;
    let few = numbered(FEW, FEW_PODS);
    let crowd = numbered(CROWD, CROWD_PODS);
    for (pods, app) in [(&few, FEW), (&crowd, CROWD)] {
        scene.create_pods(pods, NODE, app)?;
        scene.run_pods(pods)?;
        scene.create_service(app)?;
    }
    scene.create_service(SINGLE)?;
    scene.cluster.set_service_enabled(NAMESPACE, SINGLE, true)?;
    let mut cast = Cast { few, crowd, plain: Plain::new(scene, numbered("plain", CROWD_PODS))? };
    for number in 0..effort.rounds {
        say(&format!("life of an agent, round {} of {}", number + 1, effort.rounds));
        Round { number, effort, scene, cast: &mut cast, samples }.run()?;
    }
    scene.cluster.delete_service(NAMESPACE, SINGLE)?;
    scene.cluster.delete_service(NAMESPACE, FEW)
}

struct Round<'a, 'b> {
    number: usize,
    effort: Effort,
    scene: &'a mut Scene<'b>,
    cast: &'a mut Cast,
    samples: &'a mut Samples,
}

impl Round<'_, '_> {
    fn run(&mut self) -> Result<()> {
        let mut agents = self.scene.start_agent()?;
        Requests::counted(self.scene.cluster.client())?.ensure_counted()?;
        let mut singles = self.latencies("idle", &ANNOTATION_IDLE)?;
        self.few_pods()?;
        self.withdrawal()?;
        self.many_pods(&mut agents)?;
        singles.extend(self.latencies("busy", &ANNOTATION_BUSY)?);
        self.steady(&mut agents)?;
        let late = format!("{SINGLE}-{}-late", self.number);
        self.scene.create_pods(std::slice::from_ref(&late), NODE, SINGLE)?;
        let published = [self.cast.crowd.as_slice(), &singles].concat();
        let mut agents = upset::restart(self.scene, agents, &published, &late, self.samples)?;
        upset::flush(&mut agents, published.len() + 1, self.samples)?;
        drop(agents);
        singles.push(late);
        self.tidy_up(&singles)
    }

    /// One Pod after the other, and after each the floor.
    fn latencies(&mut self, when: &str, figure: &Figure) -> Result<Vec<String>> {
        let pods = numbered(&format!("{SINGLE}-{}-{when}", self.number), self.effort.latencies);
        self.scene.create_pods(&pods, NODE, SINGLE)?;
        self.scene.collect_garbage()?;
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for (number, pod) in pods.iter().enumerate() {
            self.scene.run_pod(pod)?;
            let has_address = Instant::now();
            let seen = self.scene.annotations.wait_for(pod, LIMIT, is_published)?;
            ours.push(seen.at.saturating_duration_since(has_address).as_secs_f64() * 1e3);
            floor.push(self.cast.plain.one(self.scene, number)?);
        }
        self.samples.add(figure, &ours, &floor);
        Ok(pods)
    }

    fn few_pods(&mut self) -> Result<()> {
        let floor = |round: &mut Self| round.cast.plain.all(round.scene, FEW_PODS);
        self.beside(&PODS_200, floor, |round| {
            round.scene.cluster.set_service_enabled(NAMESPACE, FEW, true)?;
            round.seconds_until(Instant::now(), &round.cast.few, is_published)
        })
    }

    fn withdrawal(&mut self) -> Result<()> {
        let floor = |round: &mut Self| round.cast.plain.all_withdrawn(round.scene, FEW_PODS);
        self.beside(&WITHDRAWN_200, floor, |round| {
            round.scene.cluster.delete_service(NAMESPACE, FEW)?;
            round.seconds_until(Instant::now(), &round.cast.few, |value| value.is_none())
        })?;
        self.scene.create_service(FEW)
    }

    fn many_pods(&mut self, agents: &mut Agents) -> Result<()> {
        let pid = agents.agent.process().id();
        let mut cpu = Duration::ZERO;
        let floor = |round: &mut Self| round.cast.plain.all(round.scene, CROWD_PODS);
        self.beside(&PODS_1000, floor, |round| {
            let before = usage::cpu_time(pid)?;
            round.scene.cluster.set_service_enabled(NAMESPACE, CROWD, true)?;
            let ours = round.seconds_until(Instant::now(), &round.cast.crowd, is_published)?;
            let_pass(SETTLES)?;
            cpu = usage::cpu_time(pid)?.saturating_sub(before);
            Ok(ours)
        })?;
        self.samples.add(&CPU_1000, &[cpu.as_secs_f64()], &[]);
        Ok(())
    }

    /// Beside the mean of the floor before and after: what slows the machine down by and by favours neither.
    fn beside(
        &mut self,
        figure: &Figure,
        floor: impl Fn(&mut Self) -> Result<f64>,
        ours: impl FnOnce(&mut Self) -> Result<f64>,
    ) -> Result<()> {
        let before = floor(self)?;
        self.scene.collect_garbage()?;
        let ours = ours(self)?;
        let after = floor(self)?;
        self.samples.add(figure, &[ours], &[f64::midpoint(before, after)]);
        Ok(())
    }

    /// Nothing happens, and nobody looks.
    fn steady(&mut self, agents: &mut Agents) -> Result<()> {
        let_pass(SETTLES)?;
        let pid = agents.agent.process().id();
        let requests = Requests::counted(self.scene.cluster.client())?;
        let (began, before) = (Instant::now(), usage::cpu_time(pid)?);
        let_pass(self.effort.steady)?;
        let cpu = usage::cpu_time(pid)?.saturating_sub(before).as_secs_f64() / began.elapsed().as_secs_f64();
        let asked = Requests::counted(self.scene.cluster.client())?.since(requests).but_watches();
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        self.samples.add(&STEADY_REQUESTS, &[asked as f64], &[]);
        self.samples.add(&STEADY_CPU, &[cpu * 100.0], &[]);
        Ok(())
    }

    fn seconds_until(&self, began: Instant, pods: &[String], wanted: impl Fn(Option<&str>) -> bool) -> Result<f64> {
        let last = self.scene.wait_for_all(pods, wanted)?;
        Ok(last.saturating_duration_since(began).as_secs_f64())
    }

    /// Leaves the Pods as the next round expects them; no agent runs.
    fn tidy_up(&self, singles: &[String]) -> Result<()> {
        self.scene.cluster.set_service_enabled(NAMESPACE, CROWD, false)?;
        self.scene.delete_pods(singles)?;
        self.cast.plain.clear(&self.cast.crowd)?;
        self.scene.wait_for_all(&self.cast.crowd, |value| value.is_none()).map(drop)
    }
}

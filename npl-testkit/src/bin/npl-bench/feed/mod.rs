// SPDX-License-Identifier: Apache-2.0
//! Measures the feed: the time from a Pod's annotation to the first request that a real load balancer sends to the Pod,
//! and the feed's memory and processor time with many members.
//!
//! API server, feed and load balancers are real, and run in one network namespace without NPL's kernel programs. Pods
//! are only API objects; echo servers at the Pods' node ports answer instead. The bench writes the annotations as an
//! agent would.

mod figures;
mod scene;
mod size;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::load_balancers::{self, LoadBalancer};
use npl_testkit::run::Run;
use npl_testkit::{interrupt, poll, process};

pub(crate) use self::figures::FIGURES;
use self::figures::{BALANCERS, LONG_POLL, RESIDENT, Receives, STEADY_CPU, XDS_AFTER_EVENT, XDS_ENVOY};
use self::scene::{BALANCER, INTERVAL, LIMIT, Scene};
use crate::Effort;
use crate::figures::{Figure, Samples, Stage, say};

/// The time between two requests to the load balancer. The load balancer sends every second request to the new Pod, so
/// a measured time is too long by at most twice this time plus the duration of two requests.
const PACE: Duration = Duration::from_millis(1);

/// The number of successive answers by the other Pod after which the bench assumes that the load balancer no longer
/// uses a deleted Pod.
const QUIET: usize = 20;

/// Two times in milliseconds, both from the patch that writes an annotation: until a client or the load balancer has
/// received the change from the feed, and until the patch's event arrives on a watch.
type Lag = (f64, f64);

/// Measures the elements of `figures` that belong to this stage.
pub(crate) fn measure(figures: &[&Figure], effort: Effort, samples: &mut Samples) -> Result<()> {
    if !figures.iter().any(|figure| figure.stage == Stage::Feed) {
        return Ok(());
    }
    let is_meant = |figure: &Figure| figures.iter().any(|meant| meant.name == figure.name);
    let run = Run::start()?;
    say("starting a control plane and the feed");
    let netns = scene::namespace(&run)?;
    let plane = ControlPlane::start(&run, Some(&netns))?;
    netns.run(|| {
        let (mut scene, _permanent) = Scene::start(&run, &netns, &plane)?;
        if is_meant(&LONG_POLL) {
            say("a client polls the feed by HTTP");
            for _ in 0..effort.latencies {
                let (lag, event) = long_poll(&mut scene)?;
                samples.add(&LONG_POLL, &[lag], &[event]);
            }
        }
        let is_measured =
            |figure: &Figure| is_meant(figure) || (figure.name == XDS_ENVOY.name && is_meant(&XDS_AFTER_EVENT));
        for (figure, balancer, receives) in BALANCERS.iter().filter(|(figure, ..)| is_measured(figure)) {
            say(&format!("{} reads the feed", balancer.name));
            for (lag, event) in lags(&mut scene, balancer, *receives, effort)? {
                samples.add(figure, &[lag], &[event]);
                if figure.name == XDS_ENVOY.name {
                    // A request may reach the new Pod before the plain watch delivers the event.
                    samples.add(&XDS_AFTER_EVENT, &[(lag - event).max(0.0)], &[]);
                }
            }
        }
        if is_meant(&RESIDENT) || is_meant(&STEADY_CPU) {
            size::measure(&mut scene, effort, samples)?;
        }
        Ok(())
    })?
}

/// Measures the time from an annotation to the response to a long poll.
fn long_poll(scene: &mut Scene<'_>) -> Result<Lag> {
    let version = scene.members("")?.version;
    let pod = scene.create_pod()?;
    let (began, answered) = thread::scope(|scope| {
        let polling = scope.spawn(|| {
            let body = scene.members(&format!("?index={version}&wait=60s"))?;
            ensure!(body.version != version, "the long poll ended without a change");
            Ok(Instant::now())
        });
        // The feed must have received the request before the annotation changes.
        thread::sleep(INTERVAL / 20);
        let began = scene.annotate(&pod)?;
        anyhow::Ok((began, process::joined(polling)?))
    })?;
    let lag = (millis(began, answered), millis(began, scene.event_of(&pod)?));
    scene.delete(&pod)?;
    poll::until_gone("the removal of the Pod", LIMIT, || scene.members("").is_ok_and(|body| body.members.len() == 1))?;
    Ok(lag)
}

/// Measures, for each of several Pods, the time from the Pod's annotation to the first request that the load balancer
/// sends to the Pod.
fn lags(scene: &mut Scene<'_>, balancer: &LoadBalancer, receives: Receives, effort: Effort) -> Result<Vec<Lag>> {
    let process = scene.launch(balancer)?;
    let count = if receives == Receives::Pushed { effort.latencies } else { effort.polled };
    let mut lags = Vec::new();
    for number in 0..u32::try_from(count)? {
        ensure!(!interrupt::is_requested(), "interrupted");
        if receives == Receives::Asked {
            // At its end, `lag` deletes the Pod and waits until the load balancer no longer uses the Pod, so `lag`
            // returns shortly after the load balancer has queried the feed. The pauses distribute the writes of
            // annotations over the query interval; without the pauses, every annotation would be written just after a
            // query.
            thread::sleep(INTERVAL * number / u32::try_from(count)?);
        }
        lags.push(lag(scene).with_context(|| process.log_tail(10))?);
    }
    Ok(lags)
}

fn lag(scene: &mut Scene<'_>) -> Result<Lag> {
    let pod = scene.create_pod()?;
    let began = scene.annotate(&pod)?;
    let first = first_request(&pod.name)?;
    let lag = (millis(began, first), millis(began, scene.event_of(&pod)?));
    scene.delete(&pod)?;
    let mut others = 0;
    while others < QUIET {
        ensure!(first.elapsed() < LIMIT, "the load balancer still uses {}", pod.name);
        others = if load_balancers::ask(BALANCER)?.pod == pod.name { 0 } else { others + 1 };
    }
    Ok(lag)
}

/// The time at which the client sent the first request that the Pod answered.
fn first_request(pod: &str) -> Result<Instant> {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        let sent = Instant::now();
        if load_balancers::ask(BALANCER)?.pod == pod {
            return Ok(sent);
        }
        thread::sleep(PACE);
    }
    bail!("no request reached {pod} in {} s", LIMIT.as_secs())
}

fn millis(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

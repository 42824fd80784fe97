// SPDX-License-Identifier: Apache-2.0
//! The control plane: how soon Pods are annotated, and what it costs, with the built agent against a real API server.
//!
//! Pods are objects without processes: the bench says what a kubelet would. Whatever depends on the API server's own
//! speed is measured beside what a plain client gets for the same requests, in the same round.

mod figures;
mod fleet;
mod kernel;
mod life;
mod plain;
mod requests;
mod scene;
mod services;
mod upset;
mod usage;

use anyhow::Result;
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::run::Run;
use npl_testkit::topology::{Options, Topology};

pub(crate) use self::figures::FIGURES;
use self::scene::Scene;
use crate::Effort;
use crate::figures::{Figure, Samples, Stage, say};

/// Measures the figures, and no stage that none of them needs.
pub(crate) fn measure(figures: &[&Figure], effort: Effort, samples: &mut Samples) -> Result<()> {
    let run = Run::start()?;
    let needs = |stage: Stage| figures.iter().any(|figure| figure.stage == stage);
    if needs(Stage::Kernel) {
        say("the datapath alone");
        kernel::measure(&run, effort, samples)?;
    }
    if needs(Stage::Fleet) {
        fleet::measure(&run, effort, samples)?;
    }
    if needs(Stage::Life) || needs(Stage::Services) {
        say("starting a control plane");
        let topology = Topology::new(&run, "", Options::default())?;
        let plane = ControlPlane::start(&run, Some(topology.node()))?;
        topology.node().run(|| -> Result<()> {
            let mut scene = Scene::new(&run, &topology, &plane)?;
            if needs(Stage::Life) {
                life::measure(&mut scene, effort, samples)?;
            }
            if needs(Stage::Services) {
                services::measure(&mut scene, effort, samples)?;
            }
            Ok(())
        })??;
    }
    Ok(())
}

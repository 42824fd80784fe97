// SPDX-License-Identifier: Apache-2.0
//! Measures the agent's control plane with a real API server: the time until Pods are annotated, and the agent's CPU
//! time, memory and requests.
//!
//! Pods are only API objects without processes, and the bench writes their status as a kubelet would. Figures that
//! depend on the API server's own speed are compared with the same requests of a plain client in the same round.

mod api_load;
mod environment;
mod figures;
mod fleet;
mod kernel;
mod life;
mod plain;
mod recovery;
mod requests;
mod services;
pub(crate) mod usage;

use anyhow::Result;
use npl_testkit::run::Run;

pub(crate) use self::environment::{in_parallel, let_pass};
pub(crate) use self::figures::FIGURES;
use crate::Effort;
use crate::figures::{Figure, Samples, Stage, say};

/// Measures these figures. Stages that none of the figures needs are not run.
pub(crate) fn measure(figures: &[&Figure], effort: Effort, samples: &mut Samples) -> Result<()> {
    let run = Run::start()?;
    let needs = |stage: Stage| figures.iter().any(|figure| figure.stage == stage);
    if needs(Stage::Kernel) {
        say("installing mappings in the kernel");
        kernel::measure(&run, effort, samples)?;
    }
    if needs(Stage::Fleet) {
        fleet::measure(&run, effort, samples)?;
    }
    if needs(Stage::ApiLoad) {
        api_load::measure(effort, samples)?;
    }
    if needs(Stage::Life) || needs(Stage::Services) {
        environment::with_control_plane(&run, &[], |env| {
            if needs(Stage::Life) {
                life::measure(env, effort, samples)?;
            }
            if needs(Stage::Services) {
                services::measure(env, effort, samples)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

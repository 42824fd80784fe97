// SPDX-License-Identifier: Apache-2.0
//! Runs the Helm that `cargo xtask setup` builds, with the chart of this checkout.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::tools;

/// The folder of the chart.
pub fn chart() -> PathBuf {
    tools::repository_file("deploy/chart/npl")
}

/// Returns a command that runs Helm.
///
/// # Errors
/// Returns an error if `NPL_HELM_DIR`, which `cargo xtask test` sets, is unset.
pub fn command() -> Result<Command> {
    let folder = env::var_os("NPL_HELM_DIR")
        .context("NPL_HELM_DIR is unset: run the tests by `cargo xtask test`, which builds Helm")?;
    Ok(Command::new(PathBuf::from(folder).join("helm")))
}

/// Returns the output of `helm template` for the chart in the namespace `npl-system`, with further arguments.
///
/// # Errors
/// Returns an error if Helm refuses the values; the error contains Helm's message.
pub fn template(arguments: &[&str]) -> Result<String> {
    let mut helm = command()?;
    helm.args(["template", "npl"]).arg(chart()).args(["--namespace", "npl-system"]).args(arguments);
    tools::output(&mut helm)
}

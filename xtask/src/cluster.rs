// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask cluster`: starts, stops and uses a Kubernetes cluster of several Nodes on this machine.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::demo::{FIRST_PROCESS, Parts};
use crate::setup::Component;
use crate::{build, process};

/// Arguments of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Options {
    /// `up [--nodes 2] [--kube-proxy none|iptables|nftables]
    /// [--cni bridge|flannel-vxlan|flannel-host-gw|calico-vxlan|calico-vxlan-nftables|calico-routes|
    /// calico-routes-nftables|kube-router|cilium-vxlan|cilium-native]`, `down [--all]`, `status`, `kubectl …`, `exec NODE …`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the programs that are missing, and replaces this process with npl-testkit's program `npl-cluster`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let built = build::built_folder().join("npl-cluster");
    if !options.arguments.iter().any(|word| word == "up") {
        // A command for a running cluster uses the existing `npl-cluster`, and compiles it only if it is missing.
        let program = if built.exists() { built } else { compile()? };
        return process::become_program_quietly(Command::new(program).args(&options.arguments));
    }
    let extent = Component::of_networks(&options.arguments);
    let parts = Parts::make_for(&FIRST_PROCESS, extent)?;
    let mut command = Command::new(built);
    parts.pass_to(&mut command);
    process::become_program(command.args(&options.arguments))
}

fn compile() -> Result<PathBuf> {
    process::say("cluster: compiling npl-cluster");
    // Both packages are built in one run of cargo, so that their dependencies have the same features and are compiled
    // once.
    process::run(
        build::cargo("build").args(["--package", "npl-agent", "--package", "npl-testkit"]).args(FIRST_PROCESS),
    )?;
    Ok(build::built_folder().join("npl-cluster"))
}

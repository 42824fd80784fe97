// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask image`: the agent's container image, and those that tests and the real cluster run beside it.

mod archive;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{build, build_ebpf, paths, process};
use archive::Image;

/// What the agent's image is called unless the user says otherwise; `deploy/npl.yaml` names it.
const AGENT: &str = concat!("localhost/npl-agent:", env!("CARGO_PKG_VERSION"));

/// The program in the agent's image.
const AGENT_PROGRAM: &str = "npl-agent";

/// What a real cluster runs beside the agent: a server that says who it is, and what keeps a Pod's namespaces.
const COMPANIONS: [(&str, &str); 2] = [
    ("npl-echo", concat!("localhost/npl-echo:", env!("CARGO_PKG_VERSION"))),
    ("npl-pause", concat!("localhost/npl-pause:", env!("CARGO_PKG_VERSION"))),
];

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The name that the agent's image has once it is loaded.
    #[arg(long, default_value = AGENT)]
    name: String,
}

/// Builds the agent and packs it.
pub(crate) fn run(options: &Options) -> Result<()> {
    build_ebpf::build()?;
    let agent = build::build_agent(&[])?;
    pack_agent(&options.name, &agent)?;
    pack_companions()
}

/// Packs everything that a real cluster needs, around an agent that was built.
pub(crate) fn pack_all(agent: &Path) -> Result<()> {
    pack_agent(AGENT, agent)?;
    pack_companions()
}

/// Where [`pack_all`] leaves them.
pub(crate) fn archives() -> impl Iterator<Item = PathBuf> {
    [AGENT_PROGRAM].into_iter().chain(COMPANIONS.map(|(program, _)| program)).map(archive::path_for)
}

fn pack_agent(name: &str, agent: &Path) -> Result<()> {
    process::say("image: packing the agent into an OCI archive");
    let licences = "Apache-2.0 AND GPL-2.0-only";
    let archive = Image { name, program: AGENT_PROGRAM, arguments: &["run"], licences, binary: agent }.pack()?;
    process::detail(&format!("load it with: ctr --namespace k8s.io images import {}", paths::shown(&archive)));
    Ok(())
}

fn pack_companions() -> Result<()> {
    process::say("image: what tests and the real cluster run beside the agent");
    let mut compile = build::cargo("build");
    // With the agent named beside it, both use dependencies with the same features, which are compiled once.
    compile.args(["--package", "npl-agent", "--package", "npl-testkit"]);
    for (program, _) in COMPANIONS {
        compile.args(["--bin", program]);
    }
    process::run(&mut compile)?;
    for (program, name) in COMPANIONS {
        let binary = build::built_folder().join(program);
        Image { name, program, arguments: &[], licences: "Apache-2.0", binary: &binary }.pack()?;
    }
    Ok(())
}

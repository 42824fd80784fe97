// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask image`: packs the container images of the agent and of the programs that tests and the real cluster
//! run.

mod archive;
mod bill;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::build_ebpf::Features;
use crate::{build, paths, process};
use archive::Image;

/// The default name of the agent's image, which `deploy/npl.yaml` uses.
const AGENT: &str = concat!("localhost/npl-agent:", env!("CARGO_PKG_VERSION"));

/// The default name of a trace build's image.
const TRACE: &str = concat!("localhost/npl-agent:", env!("CARGO_PKG_VERSION"), "-trace");

/// The images besides the agent's: the feed, which `deploy/npl-feed.yaml` uses; for a real cluster, an echo server and
/// the pause program of Pods.
const COMPANIONS: [(&str, &str); 3] = [
    (build::FEED, concat!("localhost/npl-feed:", env!("CARGO_PKG_VERSION"))),
    ("npl-echo", concat!("localhost/npl-echo:", env!("CARGO_PKG_VERSION"))),
    ("npl-pause", concat!("localhost/npl-pause:", env!("CARGO_PKG_VERSION"))),
];

/// The maximum size of the agent's archive in bytes. The size is limited because each Node downloads the image.
const LARGEST_ARCHIVE: u64 = 15_000_000;

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of the agent's image; that of a trace build ends with `-trace` by default.
    #[arg(long, default_value = AGENT, default_value_if("features", "trace", TRACE))]
    name: String,
    #[command(flatten)]
    features: Features,
}

/// Builds the agent and packs all images.
pub(crate) fn run(options: &Options) -> Result<()> {
    let agent = build::build_with(&options.features)?;
    if options.features.has_trace() {
        return pack_agent(&options.name, build::TRACE_AGENT, &agent);
    }
    pack_agent(&options.name, build::AGENT, &agent)?;
    pack_companions()
}

/// Packs all images of a real cluster. The agent's image gets the binary `agent`, which is built already.
pub(crate) fn pack_all(agent: &Path) -> Result<()> {
    pack_agent(AGENT, build::AGENT, agent)?;
    pack_companions()
}

/// Returns the paths of the archives that [`pack_all`] writes.
pub(crate) fn archives() -> impl Iterator<Item = PathBuf> {
    [build::AGENT].into_iter().chain(COMPANIONS.map(|(program, _)| program)).map(archive::path_for)
}

fn pack_agent(name: &str, archive: &str, agent: &Path) -> Result<()> {
    process::say("image: packing the agent into an OCI archive");
    let licenses = "Apache-2.0 AND GPL-2.0-only";
    let image = Image { name, archive, program: build::AGENT, arguments: &["run"], licenses, binary: agent };
    let archive = image.pack()?;
    let size = fs::metadata(&archive).with_context(|| format!("read the size of {}", archive.display()))?.len();
    process::detail(&format!("{} kB", size / 1000));
    if size > LARGEST_ARCHIVE {
        bail!(
            "{} has {size} bytes, and the limit is {LARGEST_ARCHIVE}: reduce the size of the agent, or raise the limit \
             in xtask/src/image/mod.rs",
            paths::shown(&archive)
        );
    }
    let bill = bill::write()?;
    process::detail(&format!("its software bill of materials: {}", paths::shown(&bill)));
    process::detail(&format!("load it with: ctr --namespace k8s.io images import {}", paths::shown(&archive)));
    Ok(())
}

fn pack_companions() -> Result<()> {
    process::say("image: packing the feed, the echo server and the pause program");
    let mut compile = build::cargo("build");
    // All packages are built in one run of cargo, so that their dependencies have the same features and are compiled
    // once.
    compile.args(["--package", "npl-agent", "--package", "npl-feed", "--package", "npl-testkit"]);
    for (program, _) in COMPANIONS {
        compile.args(["--bin", program]);
    }
    process::run(&mut compile)?;
    for (program, name) in COMPANIONS {
        let binary = build::built_folder().join(program);
        Image { name, archive: program, program, arguments: &[], licenses: "Apache-2.0", binary: &binary }.pack()?;
    }
    Ok(())
}

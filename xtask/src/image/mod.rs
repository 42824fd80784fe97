// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask image`: packs the container images of the agent and of the programs that tests and the real cluster
//! run, and the archive of the kubectl plug-in.

mod archive;
mod bill;
mod plugin;

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

/// The maximum size of the archives of the agent and of the feed in bytes. The size is limited because each Node
/// downloads the agent's image, and some Nodes the feed's.
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

/// Builds the agent, and packs all images and the kubectl plug-in.
pub(crate) fn run(options: &Options) -> Result<()> {
    let agent = build::build_with(&options.features)?;
    if options.features.has_trace() {
        return pack_agent(&options.name, build::TRACE_AGENT, &agent);
    }
    pack_named(&options.name, &agent)
}

/// Packs all images of a real cluster, and the kubectl plug-in. The agent's image and the plug-in get the binary
/// `agent`, which is built already.
pub(crate) fn pack_all(agent: &Path) -> Result<()> {
    pack_named(AGENT, agent)
}

fn pack_named(name: &str, agent: &Path) -> Result<()> {
    pack_agent(name, build::AGENT, agent)?;
    plugin::pack(agent)?;
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
    finish(&archive, build::AGENT)?;
    process::detail(&format!("load it with: ctr --namespace k8s.io images import {}", paths::shown(&archive)));
    Ok(())
}

/// Checks the size of a shipped image, and writes the bill of materials of its program.
fn finish(archive: &Path, program: &str) -> Result<()> {
    let size = fs::metadata(archive).with_context(|| format!("read the size of {}", archive.display()))?.len();
    process::detail(&format!("{} kB", size / 1000));
    check_size(archive, size)?;
    let bill = bill::write(program)?;
    process::detail(&format!("its software bill of materials: {}", paths::shown(&bill)));
    Ok(())
}

fn check_size(archive: &Path, size: u64) -> Result<()> {
    if size > LARGEST_ARCHIVE {
        bail!("{} has {size} bytes, and the limit is {LARGEST_ARCHIVE}", paths::shown(archive));
    }
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
        let image = Image { name, archive: program, program, arguments: &[], licenses: "Apache-2.0", binary: &binary };
        let archive = image.pack()?;
        // The other companions are programs of tests, which are not shipped.
        if program == build::FEED {
            finish(&archive, program)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{LARGEST_ARCHIVE, check_size};

    #[test]
    fn an_image_that_is_too_large_is_refused_with_its_name() {
        check_size(Path::new("npl-feed.oci.tar"), LARGEST_ARCHIVE).unwrap();
        let error = check_size(Path::new("npl-feed.oci.tar"), LARGEST_ARCHIVE + 1).unwrap_err().to_string();
        assert_eq!(error, "npl-feed.oci.tar has 15000001 bytes, and the limit is 15000000");
    }
}

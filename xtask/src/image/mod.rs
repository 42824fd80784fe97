// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask image`: packs the container images of the agent and of the programs that tests and the real cluster
//! run, and the archive of the kubectl plug-in.

mod archive;
mod bill;
mod plugin;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::arch::Arch;
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
/// downloads the agent's image, and some Nodes download the feed's image.
const LARGEST_ARCHIVE: u64 = 15_000_000;

/// Arguments of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of the agent's image. By default, the name of a trace build's image ends with `-trace`.
    #[arg(long, default_value = AGENT, default_value_if("features", "trace", TRACE))]
    name: String,
    #[command(flatten)]
    features: Features,
    /// The processor architectures of the images. The names of the archives contain the architectures, unless the only
    /// architecture is this machine's.
    #[arg(long, value_delimiter = ',', default_values_t = [Arch::native()])]
    arch: Vec<Arch>,
}

/// Builds the agent, and packs all images and the kubectl plug-in.
pub(crate) fn run(options: &Options) -> Result<()> {
    let archs = &options.arch;
    let build = |arch: &Arch| Ok((*arch, build::build_with(&options.features, *arch)?));
    let agents = archs.iter().map(build).collect::<Result<Vec<_>>>()?;
    if options.features.has_trace() {
        return pack_agent(&options.name, build::TRACE_AGENT, &agents);
    }
    pack_named(&options.name, &agents)
}

/// Packs all images of a real cluster, and the kubectl plug-in. The agent's image and the plug-in get the binary
/// `agent`, which is built already.
pub(crate) fn pack_all(agent: &Path) -> Result<()> {
    pack_named(AGENT, &[(Arch::native(), agent.to_owned())])
}

fn pack_named(name: &str, agents: &[(Arch, PathBuf)]) -> Result<()> {
    pack_agent(name, build::AGENT, agents)?;
    // The plug-in's manifest has one platform: the platform of this machine.
    if let Some((_, agent)) = agents.iter().find(|(arch, _)| arch.is_native()) {
        plugin::pack(agent)?;
    }
    pack_companions(&agents.iter().map(|(arch, _)| *arch).collect::<Vec<_>>())
}

/// Returns the paths of the archives that [`pack_all`] writes.
pub(crate) fn archives() -> impl Iterator<Item = PathBuf> {
    [build::AGENT].into_iter().chain(COMPANIONS.map(|(program, _)| program)).map(archive::path_for)
}

fn pack_agent(name: &str, archive: &str, agents: &[(Arch, PathBuf)]) -> Result<()> {
    process::say("image: packing the agent into an OCI archive");
    let licenses = "Apache-2.0 AND GPL-2.0-only";
    let archive = &marked(archive, agents);
    let image = Image { name, archive, program: build::AGENT, arguments: &["run"], licenses, binaries: agents };
    let archive = pack_shipped(&image)?;
    process::detail(&format!("load it with: ctr --namespace k8s.io images import {}", paths::shown(&archive)));
    Ok(())
}

/// Packs an image that is shipped, checks its size, and writes the bill of materials of its program for each
/// architecture. Returns the path of the archive.
fn pack_shipped(image: &Image<'_>) -> Result<PathBuf> {
    let archive = image.pack()?;
    let size = fs::metadata(&archive).with_context(|| format!("read the size of {}", archive.display()))?.len();
    process::detail(&format!("{} kB", size / 1000));
    check_size(&archive, size, LARGEST_ARCHIVE * image.binaries.len() as u64)?;
    for (arch, _) in image.binaries {
        let bill = bill::write(image.program, *arch)?;
        process::detail(&format!("its software bill of materials: {}", paths::shown(&bill)));
    }
    Ok(archive)
}

fn check_size(archive: &Path, size: u64, limit: u64) -> Result<()> {
    if size > limit {
        bail!(
            "{} has {size} bytes, and the limit is {limit}: reduce the size of the program, or raise the limit in \
             xtask/src/image/mod.rs",
            paths::shown(archive)
        );
    }
    Ok(())
}

/// Appends the architectures of an archive's binaries to the archive's name, unless the only architecture is this
/// machine's.
fn marked(archive: &str, binaries: &[(Arch, PathBuf)]) -> String {
    match binaries {
        [(arch, _)] => arch.mark(archive),
        binaries => binaries.iter().fold(archive.to_owned(), |name, (arch, _)| format!("{name}-{arch}")),
    }
}

fn pack_companions(archs: &[Arch]) -> Result<()> {
    process::say("image: packing the feed, the echo server and the pause program");
    for arch in archs {
        let mut compile = build::cargo_for(*arch, "build")?;
        compile.args(build::PACKAGES);
        for (program, _) in COMPANIONS {
            compile.args(["--bin", program]);
        }
        process::run(&mut compile)?;
    }
    for (program, name) in COMPANIONS {
        let built = |arch: &Arch| (*arch, build::built_folder_of(*arch).join(program));
        let binaries = &archs.iter().map(built).collect::<Vec<_>>();
        let (archive, licenses) = (&marked(program, binaries), "Apache-2.0");
        let image = Image { name, archive, program, arguments: &[], licenses, binaries };
        // The other companions are programs of tests, which are not shipped.
        if program == build::FEED {
            pack_shipped(&image)?
        } else {
            image.pack()?
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{Arch, LARGEST_ARCHIVE, check_size, marked};

    #[test]
    fn an_image_that_is_too_large_is_refused_with_its_name() {
        let check = |size| check_size(Path::new("npl-feed.oci.tar"), size, LARGEST_ARCHIVE);
        check(LARGEST_ARCHIVE).unwrap();
        let error = check(LARGEST_ARCHIVE + 1).unwrap_err().to_string();
        assert!(error.starts_with("npl-feed.oci.tar has 15000001 bytes, and the limit is 15000000: "), "{error}");
    }

    #[test]
    fn an_archive_is_named_after_its_architectures_unless_it_is_only_for_this_machine() {
        let of = |archs: &[Arch]| marked("a", &archs.iter().map(|arch| (*arch, PathBuf::new())).collect::<Vec<_>>());
        assert_eq!(of(&[Arch::native()]), "a");
        assert_eq!(of(&[Arch::Amd64, Arch::Arm64]), "a-amd64-arm64");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Writes a container image as an OCI archive, without a container runtime.
//!
//! The same binary always results in an archive with the same bytes, because owners, times and the order of files are
//! fixed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::{paths, process};

/// The media type of an image's manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Returns the path of the image archive with this name.
pub(super) fn path_for(archive: &str) -> PathBuf {
    paths::target_dir().join(format!("{archive}.oci.tar"))
}

/// An image that contains only one static binary.
#[derive(Debug, Clone)]
pub(super) struct Image<'a> {
    /// The name that the image has when it is loaded from the archive.
    pub(super) name: &'a str,
    /// The name of the archive file, without its ending.
    pub(super) archive: &'a str,
    /// The binary's name in the image, and the image's title.
    pub(super) program: &'a str,
    /// The default arguments of the binary.
    pub(super) arguments: &'a [&'a str],
    /// The license expression for the code in the image.
    pub(super) licenses: &'a str,
    /// The path of the binary on this machine.
    pub(super) binary: &'a Path,
}

impl Image<'_> {
    /// Packs the image into `target/<archive>.oci.tar`.
    pub(super) fn pack(&self) -> Result<PathBuf> {
        let work = paths::target_dir().join("image").join(self.archive);
        if work.exists() {
            fs::remove_dir_all(&work).with_context(|| format!("remove the old {}", work.display()))?;
        }
        let blobs = work.join("archive/blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;
        let layer_tar = self.layer(&work)?;
        let diff_id = sha256(&layer_tar)?;
        process::ask(Command::new("gzip").args(["--no-name", "--best"]).arg(&layer_tar))?;
        let layer = store(&blobs, &fs::read(layer_tar.with_extension("tar.gz")).context("read the packed layer")?)?;
        let config = store(&blobs, self.config(&diff_id).to_string().as_bytes())?;
        let manifest = store(&blobs, manifest(&config, &layer).to_string().as_bytes())?;

        let root = work.join("archive");
        fs::write(root.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())
            .context("write oci-layout")?;
        fs::write(root.join("index.json"), index(&manifest, self.name).to_string()).context("write index.json")?;
        let archive = path_for(self.archive);
        process::ask(tar(&archive, &root).args(["blobs", "index.json", "oci-layout"]))?;
        process::say(&format!("{}: {}, manifest sha256:{}", paths::shown(&archive), self.name, manifest.digest));
        Ok(archive)
    }

    /// Writes the image's only layer, which contains the binary without symbols in the root directory.
    fn layer(&self, work: &Path) -> Result<PathBuf> {
        let root = work.join("root");
        fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        strip(self.binary, &root.join(self.program))?;
        let layer = work.join("layer.tar");
        process::ask(tar(&layer, &root).args(["--mode=0755", self.program]))?;
        Ok(layer)
    }

    fn config(&self, diff_id: &str) -> Value {
        let Self { name: _, archive: _, program, arguments, licenses, binary: _ } = self;
        json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": [format!("/{program}")],
                "Cmd": arguments,
                "Labels": {
                    "org.opencontainers.image.documentation": concat!(env!("CARGO_PKG_REPOSITORY"), "/tree/main/docs"),
                    "org.opencontainers.image.licenses": licenses,
                    "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
                    "org.opencontainers.image.title": program,
                    "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
                },
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{diff_id}")] },
        })
    }
}

/// Copies a binary without its symbols, which are a quarter of its size. The symbols are not needed, because panic
/// messages contain file and line without them.
pub(super) fn strip(from: &Path, to: &Path) -> Result<()> {
    process::ask(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(from))
        .with_context(|| format!("strip {}", from.display()))
        .map(drop)
}

/// A file in the archive. The image's manifest or the archive's index refers to the file by its hash.
struct Blob {
    digest: String,
    size: u64,
}

/// Returns a command that packs files below `root`, which the caller adds as arguments, into a new archive.
pub(super) fn tar(archive: &Path, root: &Path) -> Command {
    let mut command = Command::new("tar");
    command.arg("--create").arg("--file").arg(archive).arg("--directory").arg(root);
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--format=ustar"]);
    command
}

/// Adds a file to the archive, with its hash as its name.
fn store(blobs: &Path, content: &[u8]) -> Result<Blob> {
    let unnamed = blobs.join("new");
    fs::write(&unnamed, content).with_context(|| format!("write {}", unnamed.display()))?;
    let digest = sha256(&unnamed)?;
    fs::rename(&unnamed, blobs.join(&digest)).with_context(|| format!("rename a blob to {digest}"))?;
    Ok(Blob { digest, size: content.len().try_into().context("convert the size of a blob")? })
}

/// Returns the SHA-256 hash of a file in hexadecimal.
pub(super) fn sha256(file: &Path) -> Result<String> {
    let answer = process::ask(Command::new("sha256sum").arg(file).stderr(Stdio::piped()))?;
    match answer.split(' ').next() {
        Some(digest) if digest.len() == 64 => Ok(digest.to_owned()),
        _ => bail!("sha256sum printed no hash but {answer:?}"),
    }
}

/// Returns Go's name of this machine's processor architecture, which container images and krew use.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn manifest(config: &Blob, layer: &Blob) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor("application/vnd.oci.image.config.v1+json"),
        "layers": [layer.descriptor("application/vnd.oci.image.layer.v1.tar+gzip")],
    })
}

fn index(manifest: &Blob, name: &str) -> Value {
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let mut descriptor = manifest.descriptor(MANIFEST);
    descriptor["annotations"] = json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    })
}

impl Blob {
    fn descriptor(&self, media_type: &str) -> Value {
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", self.digest), "size": self.size })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::{env, fs};

    use object::Object as _;

    use super::{Blob, Image, index, json, manifest, strip};
    use crate::paths;

    #[test]
    fn descriptors_name_digest_and_size() {
        let blob = |digest: &str, size| Blob { digest: digest.to_owned(), size };
        let manifest = manifest(&blob("aa", 1), &blob("bb", 2));
        assert_eq!(
            manifest["config"],
            json!({ "mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:aa", "size": 1 })
        );
        assert_eq!(manifest["layers"][0]["digest"], "sha256:bb");
        assert_eq!(manifest["layers"][0]["size"], 2);
        let index = index(&blob("cc", 3), "r/n:1.2");
        assert_eq!(index["manifests"][0]["size"], 3);
        assert_eq!(
            index["manifests"][0]["annotations"],
            json!({ "io.containerd.image.name": "r/n:1.2", "org.opencontainers.image.ref.name": "1.2" })
        );
    }

    #[test]
    fn two_packs_of_one_binary_have_the_same_bytes() {
        let pack = |archive: &str| {
            let binary = Path::new("/bin/true");
            let image = Image { name: "r/n:1.2", archive, program: "p", arguments: &[], licenses: "L", binary };
            let path = image.pack().unwrap();
            let bytes = fs::read(&path).unwrap();
            fs::remove_file(path).unwrap();
            fs::remove_dir_all(paths::target_dir().join("image").join(archive)).unwrap();
            bytes
        };
        assert!(pack("first-pack") == pack("second-pack"));
    }

    #[test]
    fn a_packed_binary_has_no_symbols() {
        let folder = paths::target_dir().join("strip-test");
        fs::create_dir_all(&folder).unwrap();
        let (own, stripped) = (env::current_exe().unwrap(), folder.join("stripped"));
        strip(&own, &stripped).unwrap();
        let symbols = |path: &Path| {
            let bytes = fs::read(path).unwrap();
            let file = object::File::parse(&*bytes).unwrap();
            file.symbols().count()
        };
        assert!(symbols(&own) > 0);
        assert_eq!(symbols(&stripped), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_configuration_names_the_program_and_its_arguments() {
        let image = Image {
            name: "r/n:1.2",
            archive: "a",
            program: "p",
            arguments: &["run"],
            licenses: "L",
            binary: Path::new("/b"),
        };
        let config = image.config("dd");
        assert_eq!(config["config"]["Entrypoint"], json!(["/p"]));
        assert_eq!(config["config"]["Cmd"], json!(["run"]));
        assert_eq!(config["rootfs"]["diff_ids"], json!(["sha256:dd"]));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! One image as an OCI archive, without a container runtime.
//!
//! The same binary gives the same archive: owners, times and order are fixed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{paths, process};

/// Where the archive of an image is that holds this program.
pub(super) fn path_for(program: &str) -> PathBuf {
    paths::target_dir().join(format!("{program}.oci.tar"))
}

/// An image that holds one static binary and nothing else.
#[derive(Debug, Clone)]
pub(super) struct Image<'a> {
    /// What it is called once it is loaded.
    pub(super) name: &'a str,
    /// The binary's name in the image, and the image's title.
    pub(super) program: &'a str,
    /// The binary's arguments, unless a container has its own.
    pub(super) arguments: &'a [&'a str],
    /// Whose code is in it.
    pub(super) licences: &'a str,
    /// The binary.
    pub(super) binary: &'a Path,
}

impl Image<'_> {
    /// Packs it into `target/<program>.oci.tar`.
    pub(super) fn pack(&self) -> Result<PathBuf> {
        let work = paths::target_dir().join("image").join(self.program);
        if work.exists() {
            fs::remove_dir_all(&work).with_context(|| format!("remove the old {}", work.display()))?;
        }
        let blobs = work.join("archive/blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;
        let layer_tar = self.layer(&work)?;
        let diff_id = sha256(&layer_tar)?;
        process::ask(Command::new("gzip").args(["--no-name", "--best"]).arg(&layer_tar))?;
        let layer = store(&blobs, &fs::read(layer_tar.with_extension("tar.gz")).context("read the packed layer")?)?;
        let config = store(&blobs, self.config(&diff_id).as_bytes())?;
        let manifest = store(&blobs, manifest(&config, &layer).as_bytes())?;

        let root = work.join("archive");
        fs::write(root.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).context("write oci-layout")?;
        fs::write(root.join("index.json"), index(&manifest, self.name)).context("write index.json")?;
        let archive = path_for(self.program);
        process::ask(tar(&archive, &root).args(["blobs", "index.json", "oci-layout"]))?;
        process::say(&format!("{}: {}, manifest sha256:{}", paths::shown(&archive), self.name, manifest.digest));
        Ok(archive)
    }

    /// The one layer: the binary at the root.
    fn layer(&self, work: &Path) -> Result<PathBuf> {
        let root = work.join("root");
        fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        fs::copy(self.binary, root.join(self.program)).with_context(|| format!("copy {}", self.binary.display()))?;
        let layer = work.join("layer.tar");
        process::ask(tar(&layer, &root).args(["--mode=0755", self.program]))?;
        Ok(layer)
    }

    fn config(&self, diff_id: &str) -> String {
        let (version, source) = (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_REPOSITORY"));
        let Self { name: _, program, arguments, licences, binary: _ } = self;
        let arguments: Vec<String> = arguments.iter().map(|word| format!(r#""{word}""#)).collect();
        format!(
            r#"{{"architecture":"{}","os":"linux","config":{{"Entrypoint":["/{program}"],"Cmd":[{}],"Labels":{{"org.opencontainers.image.licenses":"{licences}","org.opencontainers.image.source":"{source}","org.opencontainers.image.title":"{program}","org.opencontainers.image.version":"{version}"}}}},"rootfs":{{"type":"layers","diff_ids":["sha256:{diff_id}"]}}}}"#,
            architecture(),
            arguments.join(",")
        )
    }
}

/// Something in the archive that others refer to by its hash.
struct Blob {
    digest: String,
    size: u64,
}

fn tar(archive: &Path, root: &Path) -> Command {
    let mut command = Command::new("tar");
    command.arg("--create").arg("--file").arg(archive).arg("--directory").arg(root);
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--format=ustar"]);
    command
}

/// Puts content into the archive under its hash.
fn store(blobs: &Path, content: &[u8]) -> Result<Blob> {
    let unnamed = blobs.join("new");
    fs::write(&unnamed, content).with_context(|| format!("write {}", unnamed.display()))?;
    let digest = sha256(&unnamed)?;
    fs::rename(&unnamed, blobs.join(&digest)).with_context(|| format!("name a blob {digest}"))?;
    Ok(Blob { digest, size: content.len().try_into().context("measure a blob")? })
}

fn sha256(file: &Path) -> Result<String> {
    let answer = process::ask(Command::new("sha256sum").arg(file).stderr(Stdio::piped()))?;
    match answer.split(' ').next() {
        Some(digest) if digest.len() == 64 => Ok(digest.to_owned()),
        _ => bail!("sha256sum answered {answer:?}"),
    }
}

/// Go's name of the processor, which images use.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn manifest(config: &Blob, layer: &Blob) -> String {
    format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{},"layers":[{}]}}"#,
        config.descriptor("application/vnd.oci.image.config.v1+json"),
        layer.descriptor("application/vnd.oci.image.layer.v1.tar+gzip")
    )
}

fn index(manifest: &Blob, name: &str) -> String {
    let descriptor = manifest.descriptor("application/vnd.oci.image.manifest.v1+json");
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let annotations =
        format!(r#""annotations":{{"io.containerd.image.name":"{name}","org.opencontainers.image.ref.name":"{tag}"}}"#);
    let annotated = format!("{},{annotations}}}", descriptor.trim_end_matches('}'));
    format!(r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{annotated}]}}"#)
}

impl Blob {
    fn descriptor(&self, media_type: &str) -> String {
        format!(r#"{{"mediaType":"{media_type}","digest":"sha256:{}","size":{}}}"#, self.digest, self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::{Blob, index, manifest};

    #[test]
    fn descriptors_name_digest_and_size() {
        let blob = |digest: &str, size| Blob { digest: digest.to_owned(), size };
        let manifest = manifest(&blob("aa", 1), &blob("bb", 2));
        assert!(manifest.contains(
            r#""config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:aa","size":1}"#
        ));
        assert!(manifest.contains(r#""digest":"sha256:bb","size":2}]"#));
        let index = index(&blob("cc", 3), "r/n:1.2");
        assert!(index.contains(r#""size":3,"annotations":{"io.containerd.image.name":"r/n:1.2","org.opencontainers.image.ref.name":"1.2"}}]"#));
    }
}

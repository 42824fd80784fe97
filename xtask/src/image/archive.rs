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

use crate::arch::Arch;
use crate::{paths, process};

/// The media type of an image's manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The media type of an index, which refers to one manifest per architecture.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Returns the path of the image archive with this name.
pub(super) fn path_for(archive: &str) -> PathBuf {
    paths::target_dir().join(format!("{archive}.oci.tar"))
}

/// An image that contains only one static binary, for one architecture or several.
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
    /// The architectures of the image, each with the path of its binary on this machine.
    pub(super) binaries: &'a [(Arch, PathBuf)],
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
        let store_manifest = |(arch, binary): &(Arch, PathBuf)| {
            let manifest = self.store_manifest(&blobs, &work.join(arch.name()), *arch, binary)?;
            Ok((*arch, manifest))
        };
        let manifests = self.binaries.iter().map(store_manifest).collect::<Result<Vec<_>>>()?;
        let (media_type, image) = match <[_; 1]>::try_from(manifests) {
            Ok([(_, manifest)]) => (MANIFEST, manifest),
            Err(manifests) => (INDEX, store(&blobs, of_platforms(&manifests).to_string().as_bytes())?),
        };

        let root = work.join("archive");
        fs::write(root.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())
            .context("write oci-layout")?;
        fs::write(root.join("index.json"), index(media_type, &image, self.name).to_string())
            .context("write index.json")?;
        let archive = path_for(self.archive);
        process::ask(tar(&archive, &root).args(["blobs", "index.json", "oci-layout"]))?;
        process::say(&format!("{}: {}, manifest sha256:{}", paths::shown(&archive), self.name, image.digest));
        Ok(archive)
    }

    /// Adds layer, configuration and manifest for one architecture to the archive. `work` is a new directory.
    fn store_manifest(&self, blobs: &Path, work: &Path, arch: Arch, binary: &Path) -> Result<Blob> {
        let layer_tar = self.layer(work, arch, binary)?;
        let diff_id = sha256(&layer_tar)?;
        process::ask(Command::new("gzip").args(["--no-name", "--best"]).arg(&layer_tar))?;
        let layer = store(blobs, &fs::read(layer_tar.with_extension("tar.gz")).context("read the packed layer")?)?;
        let config = store(blobs, self.config(arch, &diff_id).to_string().as_bytes())?;
        store(blobs, manifest(&config, &layer).to_string().as_bytes())
    }

    /// Writes the image's only layer, which contains the binary without symbols in the root directory.
    fn layer(&self, work: &Path, arch: Arch, binary: &Path) -> Result<PathBuf> {
        let root = work.join("root");
        fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        strip(arch, binary, &root.join(self.program))?;
        let layer = work.join("layer.tar");
        process::ask(tar(&layer, &root).args(["--mode=0755", self.program]))?;
        Ok(layer)
    }

    fn config(&self, arch: Arch, diff_id: &str) -> Value {
        let Self { name: _, archive: _, program, arguments, licenses, binaries: _ } = self;
        json!({
            "architecture": arch.name(),
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
/// messages contain file and line even without symbols.
pub(super) fn strip(arch: Arch, from: &Path, to: &Path) -> Result<()> {
    let program = if arch.is_native() { "strip".to_owned() } else { format!("{}-strip", arch.gnu_prefix()) };
    process::ask(Command::new(program).arg("--strip-all").arg("-o").arg(to).arg(from))
        .with_context(|| format!("strip {}", from.display()))
        .map(drop)
}

/// A file in the archive. The image's manifest or the archive's index refers to the file by its hash.
struct Blob {
    digest: String,
    size: u64,
}

/// Returns a command that packs files into a new archive. The caller adds the files, which are below `root`, as
/// arguments.
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

fn manifest(config: &Blob, layer: &Blob) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor("application/vnd.oci.image.config.v1+json"),
        "layers": [layer.descriptor("application/vnd.oci.image.layer.v1.tar+gzip")],
    })
}

/// Returns the index of an image for several architectures.
fn of_platforms(manifests: &[(Arch, Blob)]) -> Value {
    let descriptor = |(arch, manifest): &(Arch, Blob)| {
        let mut descriptor = manifest.descriptor(MANIFEST);
        descriptor["platform"] = json!({ "architecture": arch.name(), "os": "linux" });
        descriptor
    };
    let manifests: Vec<_> = manifests.iter().map(descriptor).collect();
    json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests })
}

/// Returns the index of the archive, which refers to the manifest or the index of its only image.
fn index(media_type: &str, image: &Blob, name: &str) -> Value {
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let mut descriptor = image.descriptor(media_type);
    descriptor["annotations"] = json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
    json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
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
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    use object::Object as _;

    use super::{Arch, Blob, Image, MANIFEST, index, json, manifest, of_platforms, strip};
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
        let index = index(MANIFEST, &blob("cc", 3), "r/n:1.2");
        assert_eq!(index["manifests"][0]["size"], 3);
        assert_eq!(
            index["manifests"][0]["annotations"],
            json!({ "io.containerd.image.name": "r/n:1.2", "org.opencontainers.image.ref.name": "1.2" })
        );
    }

    #[test]
    fn an_image_for_two_architectures_names_the_platform_of_each_manifest() {
        let blob = |digest: &str| Blob { digest: digest.to_owned(), size: 1 };
        let image = of_platforms(&[(Arch::Amd64, blob("aa")), (Arch::Arm64, blob("bb"))]);
        assert_eq!(image["mediaType"], "application/vnd.oci.image.index.v1+json");
        for (place, digest, architecture) in [(0, "sha256:aa", "amd64"), (1, "sha256:bb", "arm64")] {
            let manifest = &image["manifests"][place];
            assert_eq!(manifest["digest"], digest);
            assert_eq!(manifest["mediaType"], MANIFEST);
            assert_eq!(manifest["platform"], json!({ "architecture": architecture, "os": "linux" }));
        }
    }

    #[test]
    fn two_packs_of_one_binary_have_the_same_bytes() {
        let pack = |archive: &str| {
            let binaries = &[(Arch::native(), PathBuf::from("/bin/true"))];
            let image = Image { name: "r/n:1.2", archive, program: "p", arguments: &[], licenses: "L", binaries };
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
        strip(Arch::native(), &own, &stripped).unwrap();
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
    fn the_configuration_names_architecture_program_and_arguments() {
        let image =
            Image { name: "r/n:1.2", archive: "a", program: "p", arguments: &["run"], licenses: "L", binaries: &[] };
        let config = image.config(Arch::Arm64, "dd");
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["config"]["Entrypoint"], json!(["/p"]));
        assert_eq!(config["config"]["Cmd"], json!(["run"]));
        assert_eq!(config["rootfs"]["diff_ids"], json!(["sha256:dd"]));
    }
}

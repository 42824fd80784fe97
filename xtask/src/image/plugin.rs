// SPDX-License-Identifier: Apache-2.0
//! Writes the kubectl plug-in for krew: the archive with the agent's binary under the name `kubectl-npl`, and the
//! plug-in's manifest with the hash of the archive. The same binary always results in an archive with the same bytes.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::archive::{sha256, strip, tar};
use crate::arch::Arch;
use crate::{paths, process};

/// The name of the plug-in's binary. kubectl runs this binary for `kubectl npl`.
const PROGRAM: &str = "kubectl-npl";

/// The licenses of the binary, with their paths in the repository and in the archive. The krew index requires
/// `LICENSE`; the kernel programs in the binary are under the GPL.
const LICENSES: [(&str, &str); 2] = [("LICENSE", "LICENSE"), ("npl-ebpf/LICENSE-GPL2", "LICENSE-GPL2")];

/// The template of the manifest.
const TEMPLATE: &str = "deploy/krew/npl.yaml";

/// Packs the plug-in into `target/krew/`: `kubectl-npl-linux-<architecture>.tar.gz` and `npl.yaml`.
pub(super) fn pack(agent: &Path) -> Result<()> {
    process::say("image: packing the agent as a kubectl plug-in for krew");
    let folder = paths::target_dir().join("krew");
    let archive = pack_into(&folder, agent)?;
    let template = fs::read_to_string(paths::root().join(TEMPLATE)).with_context(|| format!("read {TEMPLATE}"))?;
    let path = folder.join("npl.yaml");
    fs::write(&path, manifest(&template, &sha256(&archive)?)?).with_context(|| format!("write {}", path.display()))?;
    process::detail(&format!(
        "install it with: kubectl krew install --manifest={} --archive={}",
        paths::shown(&path),
        paths::shown(&archive)
    ));
    Ok(())
}

/// Writes the archive into a folder, and returns the archive's path.
fn pack_into(folder: &Path, agent: &Path) -> Result<PathBuf> {
    let root = folder.join("root");
    fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
    strip(Arch::native(), agent, &root.join(PROGRAM))?;
    for (source, name) in LICENSES {
        fs::copy(paths::root().join(source), root.join(name)).with_context(|| format!("copy {source}"))?;
    }
    let files = [PROGRAM].into_iter().chain(LICENSES.map(|(_, name)| name));
    for (file, mode) in files.clone().zip([0o755, 0o644, 0o644]) {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(root.join(file), permissions).with_context(|| format!("set the mode of {file}"))?;
    }
    let uncompressed = folder.join(format!("{PROGRAM}-linux-{}.tar", Arch::native()));
    process::ask(tar(&uncompressed, &root).args(files))?;
    process::ask(Command::new("gzip").args(["--no-name", "--force"]).arg(&uncompressed))?;
    Ok(uncompressed.with_extension("tar.gz"))
}

/// Fills in the version, the architecture and the hash of the archive, and removes the comment about the template.
fn manifest(template: &str, digest: &str) -> Result<String> {
    let mut text: String =
        template.lines().filter(|line| !line.starts_with('#')).flat_map(|line| [line, "\n"]).collect();
    let version = concat!("v", env!("CARGO_PKG_VERSION"));
    for (placeholder, content) in [("VERSION", version), ("ARCH", Arch::native().name()), ("SHA256", digest)] {
        ensure!(text.contains(placeholder), "{TEMPLATE} does not contain {placeholder}");
        text = text.replace(placeholder, content);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{Arch, manifest, pack_into};
    use crate::{paths, process};

    #[test]
    fn two_packs_of_one_plugin_have_the_same_bytes_and_contain_the_licenses() {
        let pack = |name: &str| {
            let folder = paths::target_dir().join(name);
            let archive = pack_into(&folder, Path::new("/bin/true")).unwrap();
            let mut list = std::process::Command::new("tar");
            let listed = process::ask(list.args(["--list", "--verbose", "--gzip", "--file"]).arg(&archive)).unwrap();
            let bytes = fs::read(archive).unwrap();
            fs::remove_dir_all(folder).unwrap();
            (bytes, listed)
        };
        let ((first, listed), (second, _)) = (pack("first-plugin"), pack("second-plugin"));
        assert!(first == second);
        let entries: Vec<(&str, &str)> =
            listed.lines().map(|line| (line.split(' ').next().unwrap(), line.rsplit(' ').next().unwrap())).collect();
        assert_eq!(entries, [("-rwxr-xr-x", "kubectl-npl"), ("-rw-r--r--", "LICENSE"), ("-rw-r--r--", "LICENSE-GPL2")]);
    }

    #[test]
    fn the_manifest_has_the_version_and_the_hash_of_the_archive() {
        let template = fs::read_to_string(paths::root().join(super::TEMPLATE)).unwrap();
        let text = manifest(&template, "d1ge57").unwrap();
        assert!(text.starts_with("apiVersion: krew"), "{text}");
        let has = |line: &str| text.lines().any(|it| it.trim() == line);
        assert!(has(concat!("version: v", env!("CARGO_PKG_VERSION"))), "{text}");
        assert!(has("sha256: d1ge57"), "{text}");
        let arch = Arch::native().name();
        assert!(has(&format!("arch: {arch}")), "{text}");
        let archive = format!("/v{}/kubectl-npl-linux-{arch}.tar.gz", env!("CARGO_PKG_VERSION"));
        assert!(text.contains(&archive), "{text}");
        assert!(manifest("version: VERSION, ARCH", "d1ge57").unwrap_err().to_string().contains("SHA256"));
    }
}

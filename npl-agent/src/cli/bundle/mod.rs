// SPDX-License-Identifier: Apache-2.0
//! `npl-agent bundle`: writes a support archive of this Node with a fixed list of documents. The archive contains no
//! Secret, no environment variable, no content of a configuration file of the Node, and no annotation or label of a
//! Kubernetes object.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _, Write as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, bail};
use flate2::{Compression, write::GzEncoder};
use npl_common::names::{ABI_VERSION, PINNED_MAPS};
use serde::Serialize;
use serde_json::{Value, json};

use super::{doctor, flows, mappings, new_private_file, note, print_json, status};
use crate::{
    config::args::{BundleArgs, OutputFormat},
    datapath::{Pins, kernel_clock, preflight},
    local,
};

/// The directory in the archive that contains the documents.
pub(super) const FOLDER: &str = "npl-bundle";
/// The name and the content of each document.
pub(super) const DOCUMENTS: [(&str, &str); 8] = [
    ("version.json", "versions of agent, maps and kernel"),
    ("status.json", "the output of `npl-agent status`"),
    ("mappings.json", "the output of `npl-agent mappings --all`"),
    ("doctor.json", "the output of `npl-agent doctor`"),
    ("flows.json", "the output of `npl-agent flows`, with client addresses; only with --flows"),
    ("agent.json", "the state of the running agent: names of Pods, Services and devices"),
    ("pins.json", "for each map of NPL, whether the map is pinned"),
    ("errors.json", "the documents that could not be read, and why"),
];

/// The documents of the archive, by file name.
pub(super) type Documents = BTreeMap<&'static str, Value>;

/// Writes the archive to a file or to standard output. With `--output json`, prints the documents as one JSON object
/// instead.
///
/// # Errors
///
/// If the output cannot be written. A document that cannot be read causes no error: `errors.json` in the archive names
/// the document and the reason.
pub async fn show(args: &BundleArgs) -> anyhow::Result<()> {
    let documents = gather(args).await;
    if args.node.view.output == OutputFormat::Json {
        return print_json(&documents);
    }
    let archive = archive(&documents).context("write the archive")?;
    match new_file(args.file.as_deref())? {
        Some(path) => {
            let written = new_private_file(path).and_then(|mut file| file.write_all(&archive));
            written.with_context(|| format!("write {}: choose the path of a new file", path.display()))?;
            note(&format!("wrote {} bytes to {}", archive.len(), path.display()));
        }
        None => io::stdout().lock().write_all(&archive).context("write to standard output")?,
    }
    Ok(())
}

/// Returns the path of the archive from `--file`; `None` for standard output.
///
/// # Errors
///
/// If the flag is not given, and standard output is a terminal.
pub(super) fn new_file(file: Option<&Path>) -> anyhow::Result<Option<&Path>> {
    if file.is_none() && io::stdout().is_terminal() {
        bail!("the binary archive is not written to a terminal: redirect the output, or give --file npl-bundle.tar.gz")
    }
    Ok(file.filter(|path| *path != Path::new("-")))
}

/// Collects every document of the archive.
async fn gather(args: &BundleArgs) -> Documents {
    let (view, runtime_dir) = (&args.node.view, &args.node.runtime_dir);
    let mut errors = BTreeMap::new();
    let mut documents = Documents::new();
    let mut add = |name: &'static str, document: anyhow::Result<Value>| match document {
        Ok(document) => drop(documents.insert(name, document)),
        Err(error) => drop(errors.insert(name, format!("{error:#}"))),
    };
    let kernel = preflight::kernel_facts();
    let version = json!({
        "agent": env!("CARGO_PKG_VERSION"),
        "abi": ABI_VERSION,
        "kernel": kernel.release,
        "hasTcx": kernel.has_tcx,
        "architecture": std::env::consts::ARCH,
        "uptimeSeconds": kernel_clock().as_secs(),
    });
    add("version.json", Ok(version));
    add("status.json", status::document(view, runtime_dir, Duration::from_secs(1)).await);
    add("mappings.json", mappings::document(view, runtime_dir).await);
    add("doctor.json", document(doctor::findings(&args.node).await));
    add("agent.json", local::ask(runtime_dir).await.map_err(Into::into).and_then(document));
    let pins = Pins::new(&view.bpffs);
    let is_pinned: BTreeMap<&str, bool> = PINNED_MAPS.iter().map(|name| (*name, pins.map(name).exists())).collect();
    add("pins.json", document(is_pinned));
    if args.flows {
        add("flows.json", flows::document(view, runtime_dir).await);
    }
    documents.insert("errors.json", json!(errors));
    documents
}

pub(super) fn document(value: impl Serialize) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(value)?)
}

/// Packs the documents into a compressed tar archive.
pub(super) fn archive(documents: &Documents) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    append(&mut archive, "README.txt", readme().as_bytes())?;
    for (name, document) in documents {
        append(&mut archive, name, serde_json::to_string_pretty(document)?.as_bytes())?;
    }
    archive.into_inner()?.finish()
}

fn readme() -> String {
    format!(
        "npl-agent bundle: the state of NPL on one Node.\n\n{}\nNot in this archive: Secrets, tokens, environment \
         variables, kubeconfigs, logs, annotations and labels.\n",
        contents("", 16)
    )
}

/// Returns a line for each document: `indent`, the name in a column of `width` characters, and the description.
pub(super) fn contents(indent: &str, width: usize) -> String {
    DOCUMENTS.map(|(name, content)| format!("{indent}{name:<width$}{content}\n")).concat()
}

/// Adds a file with the mode 0600 below [`FOLDER`], so that after unpacking only the file's owner can read the file.
pub(super) fn append<W: io::Write>(archive: &mut tar::Builder<W>, name: &str, content: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o600);
    archive.append_data(&mut header, format!("{FOLDER}/{name}"), content)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use serde_json::json;

    use super::{DOCUMENTS, Documents, archive, readme};

    #[test]
    fn the_archive_contains_each_document_and_a_readme_that_explains_it() {
        let documents = Documents::from([("status.json", json!({"verdict": "healthy"})), ("errors.json", json!({}))]);
        let bytes = archive(&documents).unwrap();
        let mut files = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(GzDecoder::new(bytes.as_slice())).entries().unwrap() {
            let mut entry = entry.unwrap();
            let (name, mut text) = (entry.path().unwrap().display().to_string(), String::new());
            entry.read_to_string(&mut text).unwrap();
            files.insert(name, text);
        }
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(names, ["npl-bundle/README.txt", "npl-bundle/errors.json", "npl-bundle/status.json"]);
        assert!(files["npl-bundle/status.json"].contains("healthy"));
        for (name, _) in DOCUMENTS {
            assert!(readme().contains(name), "the README does not explain {name}");
        }
    }
}

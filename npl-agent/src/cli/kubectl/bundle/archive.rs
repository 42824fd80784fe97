// SPDX-License-Identifier: Apache-2.0
//! Writes the archive of the cluster, and reads the documents in the archives of the Nodes.

use std::io::{Read, Write};

use anyhow::{Context as _, ensure};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde::Serialize;

use super::summary::Summary;
use crate::cli::bundle::{DOCUMENTS, FOLDER, append, contents};

/// The maximum size in bytes of all documents of a Node after decompression.
const UNPACKED_BYTES: u64 = 128 << 20;
/// The documents of a Node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Unpacked {
    /// Name and content of each document.
    pub(super) documents: Vec<(&'static str, Vec<u8>)>,
    /// The number of files that are left out, because this version does not know their names.
    pub(super) ignored: usize,
}

impl Unpacked {
    /// The size in bytes of all documents.
    pub(super) fn bytes(&self) -> usize {
        self.documents.iter().map(|(_, content)| content.len()).sum()
    }
}

/// Reads the documents of a Node's archive. Only documents that `npl-agent bundle` of this version describes are read:
/// an agent of another version could add documents that the archive must not contain.
pub(super) fn unpack(compressed: &[u8]) -> anyhow::Result<Unpacked> {
    // The reader accepts one byte more than permitted: if it reads this byte, the documents exceed the limit.
    let mut limited = GzDecoder::new(compressed).take(UNPACKED_BYTES + 1);
    let unpacked = read_documents(&mut limited);
    ensure!(limited.limit() > 0, "the Node's documents have more than {} MiB", UNPACKED_BYTES >> 20);
    unpacked.context("read the Node's archive")
}

fn read_documents(archive: impl Read) -> anyhow::Result<Unpacked> {
    let mut unpacked = Unpacked::default();
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.strip_prefix(FOLDER).ok().and_then(|name| name.to_str());
        let is_file = entry.header().entry_type().is_file();
        match DOCUMENTS.iter().find(|(document, _)| is_file && name == Some(*document)) {
            Some((document, _)) => {
                let mut content = Vec::new();
                entry.read_to_end(&mut content)?;
                unpacked.documents.push((document, content));
            }
            None if name == Some("README.txt") => {}
            None => unpacked.ignored += 1,
        }
    }
    ensure!(!unpacked.documents.is_empty(), "the archive has no document");
    Ok(unpacked)
}

/// The archive that is being written.
pub(super) struct ClusterArchive<W: Write> {
    tar: tar::Builder<GzEncoder<W>>,
}

impl<W: Write> ClusterArchive<W> {
    pub(super) fn new(out: W) -> anyhow::Result<Self> {
        let mut archive = Self { tar: tar::Builder::new(GzEncoder::new(out, Compression::default())) };
        archive.add("README.txt", readme().as_bytes())?;
        Ok(archive)
    }

    fn add(&mut self, path: &str, content: &[u8]) -> anyhow::Result<()> {
        append(&mut self.tar, path, content).with_context(|| format!("write {path} to the archive"))
    }

    pub(super) fn add_node(&mut self, node: &str, unpacked: &Unpacked) -> anyhow::Result<()> {
        let folder = folder(node);
        unpacked.documents.iter().try_for_each(|(name, content)| self.add(&format!("nodes/{folder}/{name}"), content))
    }

    pub(super) fn add_cluster_document(&mut self, name: &str, document: &impl Serialize) -> anyhow::Result<()> {
        self.add(&format!("cluster/{name}"), &serde_json::to_vec_pretty(document)?)
    }

    /// Adds the summary and completes the archive.
    pub(super) fn finish(mut self, summary: &Summary) -> anyhow::Result<()> {
        self.add("summary.json", &serde_json::to_vec_pretty(summary)?)?;
        let mut out = self.tar.into_inner().and_then(GzEncoder::finish).context("write the archive")?;
        out.flush().context("write the archive")
    }
}

fn readme() -> String {
    format!(
        "kubectl npl bundle: the state of NPL in one cluster.

summary.json             each Node, whether its documents are in this archive, and if not, why
cluster/status.json      the rows of `kubectl npl status`, from the documents of the Nodes
cluster/nodes.json       names, addresses and versions of the Nodes
cluster/agents.json      the agents' Pods: Node, image, state, restarts
cluster/mappings.json    the output of `kubectl npl mappings`
cluster/check.json       the output of `kubectl npl check`
nodes/NODE/              the documents of `npl-agent bundle` on this Node:
{}
Not in this archive: Secrets, tokens, environment variables, kubeconfigs, logs, labels, and annotations of other
software.
",
        contents("  ", 23)
    )
}

/// Returns the name of a Node's folder. Replaces all characters except letters, digits, `-` and `.` by `_`. The API
/// server permits no other characters in the name of a Node, but a faulty server's answer must not lead to a path
/// outside the archive's folder.
fn folder(node: &str) -> String {
    let is_safe = |character: char| character.is_ascii_alphanumeric() || "-.".contains(character);
    let name: String = node.chars().map(|character| if is_safe(character) { character } else { '_' }).collect();
    if name.starts_with('.') { format!("_{name}") } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_node_is_below_the_folder_of_nodes() {
        assert_eq!(folder("node-1.example.com"), "node-1.example.com");
        assert_eq!(folder("../../etc"), "_.._.._etc");
        assert_eq!(folder(".."), "_..");
    }

    #[test]
    fn the_readme_explains_each_document() {
        for (name, _) in DOCUMENTS {
            assert!(readme().contains(&format!("  {name} ")), "{name}");
        }
    }
}

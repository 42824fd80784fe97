// SPDX-License-Identifier: Apache-2.0
//! What a cluster's owner leaves in its run's folder, for commands that come later.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use npl_testkit::real_cluster::{RealCluster, Space};
use npl_testkit::{cgroups::Cgroup, run};
use serde::{Deserialize, Serialize};

/// Tells a cluster that `up` has left running from one that belongs to a test.
const FILE: &str = "cluster.json";

/// A cluster that is up, or coming up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) id: String,
    /// In words: what it is made of.
    pub(crate) made_of: String,
    /// What there is once everything is ready.
    pub(crate) ready: Option<Ready>,
}

/// Where the parts of a cluster are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub(crate) kubeconfig: PathBuf,
    pub(crate) lan: String,
    pub(crate) client: String,
    pub(crate) nodes: Vec<NodeState>,
}

/// Where one Node is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeState {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) netns: String,
    pub(crate) directory: PathBuf,
    pub(crate) cgroup: String,
}

impl State {
    /// Writes it into the run's folder, whole or not at all.
    pub(crate) fn write(&self, directory: &Path) -> Result<()> {
        let (new, file) = (directory.join("cluster.json.new"), directory.join(FILE));
        let text = serde_json::to_string_pretty(self).context("write the cluster's state as JSON")?;
        fs::write(&new, text).with_context(|| format!("write {}", new.display()))?;
        fs::rename(&new, &file).with_context(|| format!("put {} in place", file.display()))
    }

    /// Every cluster whose owner is alive, with the owner.
    pub(crate) fn all() -> Vec<(Self, u32)> {
        let read = |id: &String| -> Option<(Self, u32)> {
            let owner = run::owner(id)?;
            let text = fs::read_to_string(run::directory_of(id).join(FILE)).ok()?;
            Some((serde_json::from_str(&text).ok()?, owner))
        };
        run::ids().iter().filter_map(read).collect()
    }

    /// The one that is meant.
    pub(crate) fn find(chosen: Option<&str>) -> Result<Self> {
        let all: Vec<Self> = Self::all().into_iter().map(|(state, _)| state).collect();
        let ids = all.iter().map(|state| state.id.as_str()).collect::<Vec<_>>().join(", ");
        let mut meant = all.iter().filter(|state| chosen.is_none_or(|id| id == state.id));
        match (meant.next(), meant.next()) {
            (Some(state), None) => Ok(state.clone()),
            (Some(_), Some(_)) => bail!("several clusters are up, {ids}: choose one with --cluster ID"),
            (None, _) if ids.is_empty() => bail!("no cluster is up: `cargo xtask cluster up` starts one"),
            (None, _) => bail!("no cluster {} is up, only {ids}", chosen.unwrap_or_default()),
        }
    }

    /// Its parts, if they are ready.
    pub(crate) fn ready(&self) -> Result<&Ready> {
        self.ready.as_ref().with_context(|| format!("cluster {} is not ready yet: wait for `up` to end", self.id))
    }
}

impl Ready {
    pub(crate) fn of(cluster: &RealCluster) -> Self {
        let nodes = cluster.nodes().iter().map(|node| NodeState {
            name: node.name(),
            address: node.number().v4().to_string(),
            netns: node.netns().name().to_owned(),
            directory: node.directory().to_owned(),
            cgroup: node.cgroup().to_owned(),
        });
        Self {
            kubeconfig: cluster.kubeconfig(),
            lan: cluster.lan().name().to_owned(),
            client: cluster.client().name().to_owned(),
            nodes: nodes.collect(),
        }
    }
}

impl NodeState {
    /// The Node's namespaces.
    pub(crate) fn space(&self) -> Result<Space> {
        Space::find(&self.directory, Cgroup::find(&self.cgroup)?)
    }
}

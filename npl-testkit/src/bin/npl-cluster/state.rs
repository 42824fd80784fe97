// SPDX-License-Identifier: Apache-2.0
//! State that a cluster's owner stores in the run's directory, for later commands.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use npl_testkit::real_cluster::{RealCluster, Space};
use npl_testkit::{cgroups::Cgroup, run};
use serde::{Deserialize, Serialize};

/// The state file. A cluster that `up` has started has this file; a cluster of a test has none.
const FILE: &str = "cluster.json";

/// A cluster that is running or starting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) id: String,
    /// A description of the cluster's configuration.
    pub(crate) made_of: String,
    /// The addresses, files and namespaces of the cluster's parts, once the cluster is ready.
    pub(crate) ready: Option<Ready>,
}

/// The addresses, files and namespaces of a cluster's parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub(crate) kubeconfig: PathBuf,
    pub(crate) lan: String,
    pub(crate) client: String,
    pub(crate) nodes: Vec<NodeState>,
}

/// The location of one Node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeState {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) netns: String,
    pub(crate) directory: PathBuf,
    pub(crate) cgroup: String,
}

impl State {
    /// Writes the state into the run's directory atomically.
    pub(crate) fn write(&self, directory: &Path) -> Result<()> {
        let (new, file) = (directory.join("cluster.json.new"), directory.join(FILE));
        let text = serde_json::to_string_pretty(self).context("format the cluster's state as JSON")?;
        fs::write(&new, text).with_context(|| format!("write {}", new.display()))?;
        fs::rename(&new, &file).with_context(|| format!("create {}", file.display()))
    }

    /// Returns all clusters whose owner is alive, with the owner's PID.
    pub(crate) fn all() -> Vec<(Self, u32)> {
        let read = |id: &String| -> Option<(Self, u32)> {
            let owner = run::owner(id)?;
            let text = fs::read_to_string(run::directory_of(id).join(FILE)).ok()?;
            Some((serde_json::from_str(&text).ok()?, owner))
        };
        run::ids().iter().filter_map(read).collect()
    }

    /// Returns the chosen cluster, or the only running cluster if none is chosen.
    pub(crate) fn find(chosen: Option<&str>) -> Result<Self> {
        let all: Vec<Self> = Self::all().into_iter().map(|(state, _)| state).collect();
        let ids = all.iter().map(|state| state.id.as_str()).collect::<Vec<_>>().join(", ");
        let mut meant = all.iter().filter(|state| chosen.is_none_or(|id| id == state.id));
        match (meant.next(), meant.next()) {
            (Some(state), None) => Ok(state.clone()),
            (Some(_), Some(_)) => bail!("several clusters are running ({ids}): choose one with --cluster ID"),
            (None, _) if ids.is_empty() => bail!("no cluster is running: start one with `cargo xtask cluster up`"),
            (None, _) => bail!("cluster {} is not running; running clusters: {ids}", chosen.unwrap_or_default()),
        }
    }

    /// Returns the addresses, files and namespaces of the cluster's parts, or an error if the cluster is still
    /// starting.
    pub(crate) fn ready(&self) -> Result<&Ready> {
        self.ready.as_ref().with_context(|| format!("cluster {} is still starting: wait until `up` completes", self.id))
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

// SPDX-License-Identifier: Apache-2.0
//! How Pods are connected.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::network::NodeNumber;

/// The network of the Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// A bridge on each Node, and routes between the Nodes.
    #[default]
    Bridge,
}

impl fmt::Display for Cni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
        })
    }
}

/// Writes the plug-ins' settings into the Node's folder.
pub(super) fn configure(cni: Cni, directory: &Path, node: NodeNumber) -> Result<()> {
    let folder = directory.join("run/npl/cni");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let settings = match cni {
        Cni::Bridge => bridge(node),
    };
    let file = folder.join("10-npl.conflist");
    fs::write(&file, settings.to_string()).with_context(|| format!("write {}", file.display()))
}

fn bridge(node: NodeNumber) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "npl",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "hairpinMode": true,
                // Everybody here has a route to every Pod.
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": node.pods_v4()}], [{"subnet": node.pods_v6()}]],
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

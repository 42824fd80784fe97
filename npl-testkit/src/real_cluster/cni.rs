// SPDX-License-Identifier: Apache-2.0
//! How Pods are connected.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::network::NodeNumber;

/// In a Node's folder: where the plug-ins' settings are.
const FOLDER: &str = "run/npl/cni";

/// The network of the Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// A bridge on each Node, and routes between the Nodes.
    #[default]
    Bridge,
    /// flannel, which puts what goes to another Node's Pods into UDP datagrams.
    FlannelVxlan,
    /// flannel, which routes it by the other Node.
    FlannelHostGw,
}

impl fmt::Display for Cni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::FlannelVxlan => "flannel-vxlan",
            Self::FlannelHostGw => "flannel-host-gw",
        })
    }
}

impl Cni {
    /// Whether a Pod is seen by other machines as its Node.
    pub const fn masquerades(self) -> bool {
        match self {
            Self::Bridge => false,
            Self::FlannelVxlan | Self::FlannelHostGw => true,
        }
    }
}

/// Makes the folder of the plug-ins' settings, in the Node's folder. A Node becomes ready when settings are in it.
pub(super) fn create_folder(directory: &Path) -> Result<()> {
    let folder = directory.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))
}

/// Has a bridge on the Node connect its Pods, whose packets may be as large as this, or as large as packets are.
pub(super) fn configure(directory: &Path, node: NodeNumber, mtu: Option<u32>) -> Result<()> {
    // Read as soon as it is there, so it is there whole.
    let (unfinished, file) =
        (directory.join(FOLDER).join(".unfinished"), directory.join(FOLDER).join("10-npl.conflist"));
    fs::write(&unfinished, bridge(node, mtu).to_string()).with_context(|| format!("write {}", unfinished.display()))?;
    fs::rename(&unfinished, &file).with_context(|| format!("create {}", file.display()))
}

fn bridge(node: NodeNumber, mtu: Option<u32>) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "npl",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "hairpinMode": true,
                "mtu": mtu.unwrap_or_default(),
                // Everybody has a route to every Pod, or else whoever made the network hides them.
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

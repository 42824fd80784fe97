// SPDX-License-Identifier: Apache-2.0
//! Configures the CNI plug-in that connects the Pods of a Node to the network.

use std::fmt;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::kube_proxy::KubeProxy;
use super::network::NodeNumber;
use crate::api_client::ApiClient;
use crate::poll;

/// The directory of the CNI configuration, relative to the Node's directory.
const FOLDER: &str = "run/npl/cni";

/// The file with the CNI configuration, relative to the Node's directory and to the root inside the Node.
pub(super) const FILE: &str = "run/npl/cni/10-npl.conflist";

/// The directory of all CNI plug-ins of a Node whose provider has its own plug-ins, relative to the Node's directory.
const PLUGINS: &str = "run/npl/cni-plugins";

/// The CNI plug-in that connects a cluster's Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Cni {
    /// A bridge on each Node, and routes between the Nodes.
    #[default]
    Bridge,
    /// flannel with VXLAN: packets between Nodes are encapsulated in UDP.
    FlannelVxlan,
    /// flannel with host-gw: routes between the Nodes without encapsulation.
    FlannelHostGw,
    /// Calico with VXLAN and the iptables dataplane.
    CalicoVxlan,
    /// Calico with VXLAN and the nftables dataplane.
    CalicoVxlanNftables,
    /// Calico with routes between the Nodes, without encapsulation, and the iptables dataplane.
    CalicoRoutes,
    /// Calico with routes between the Nodes, without encapsulation, and the nftables dataplane.
    CalicoRoutesNftables,
    /// kube-router with BGP routes between the Nodes, without encapsulation.
    KubeRouter,
    /// Cilium in place of kube-proxy, with VXLAN and masquerading by iptables.
    CiliumVxlan,
    /// Cilium in place of kube-proxy, with routes between the Nodes, and with masquerading and host routing by eBPF.
    CiliumNative,
}

/// The time limit for a kubelet to register its Node, which takes 2 s on an idle machine.
const REGISTRATION_LIMIT: Duration = Duration::from_mins(1);

/// Waits until a kubelet has registered its Node. Returns the API path of the Node.
pub(super) fn wait_for_registration(client: &ApiClient, node: NodeNumber) -> Result<String> {
    let path = format!("/api/v1/nodes/{}", node.name());
    let is_registered = || client.find(&path).ok().flatten();
    poll::until(&format!("the registration of {}", node.name()), REGISTRATION_LIMIT, is_registered)?;
    Ok(path)
}

/// Waits until a kubelet has registered its Node, and sets the Node's Pod ranges.
pub(super) fn assign_ranges(client: &ApiClient, node: NodeNumber) -> Result<()> {
    let path = wait_for_registration(client, node)?;
    let ranges = [node.pods_v4(), node.pods_v6()];
    client.merge_patch(&path, &json!({"spec": {"podCIDR": ranges[0], "podCIDRs": ranges}})).map(drop)
}

impl fmt::Display for Cni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::FlannelVxlan => "flannel-vxlan",
            Self::FlannelHostGw => "flannel-host-gw",
            Self::CalicoVxlan => "calico-vxlan",
            Self::CalicoVxlanNftables => "calico-vxlan-nftables",
            Self::CalicoRoutes => "calico-routes",
            Self::CalicoRoutesNftables => "calico-routes-nftables",
            Self::KubeRouter => "kube-router",
            Self::CiliumVxlan => "cilium-vxlan",
            Self::CiliumNative => "cilium-native",
        })
    }
}

impl Cni {
    /// Whether the test kit has to add routes between the Pods of different Nodes, because the CNI plug-in adds none.
    pub(super) const fn needs_routes(self) -> bool {
        matches!(self, Self::Bridge)
    }

    /// Whether the API server can connect to Pods, for example as a proxy for `kubectl get --raw`. The test kit's API
    /// server runs on a machine without the CNI, and only the test kit's own routes lead from this machine to Pods.
    pub const fn api_server_reaches_pods(self) -> bool {
        self.needs_routes()
    }

    /// Whether packets of Pods to other Nodes are masqueraded to the Node's address.
    pub const fn masquerades(self) -> bool {
        !matches!(self, Self::Bridge | Self::KubeRouter | Self::CiliumNative)
    }

    /// Whether the network enforces NetworkPolicy.
    pub const fn has_policy_engine(self) -> bool {
        self.has_policy_engine_in_netfilter() || self.is_cilium()
    }

    /// Whether the network enforces NetworkPolicy by rules in netfilter.
    pub const fn has_policy_engine_in_netfilter(self) -> bool {
        self.is_calico() || matches!(self, Self::KubeRouter)
    }

    /// Whether the CNI's own programs send the packets from the uplink to Pods, so that these packets bypass the
    /// FORWARD rules of other software.
    pub const fn bypasses_forward_rules(self) -> bool {
        matches!(self, Self::CiliumNative)
    }

    /// Returns the kube-proxy modes with which the network runs, the default mode first. Cilium replaces kube-proxy.
    pub const fn kube_proxy_modes(self) -> &'static [KubeProxy] {
        if self.is_cilium() {
            return &[KubeProxy::None];
        }
        &[KubeProxy::Iptables, KubeProxy::Nftables, KubeProxy::None]
    }

    /// Whether a bridge on each Node connects the Node's Pods. The Node then uses the bridge's address as the source of
    /// its packets to these Pods.
    pub const fn has_bridge(self) -> bool {
        !self.is_calico() && !self.is_cilium()
    }

    /// Whether a restart of the CNI's daemon loses packets over IPv6, with and without NPL. Calico's daemon, Felix,
    /// loses packets, because Felix deletes and restores all IPv6 routes at its start.
    pub const fn loses_ipv6_at_restart(self) -> bool {
        self.is_calico()
    }

    /// Whether the network is Cilium, whose programs forward packets of Pods in every forwarding mode of NPL.
    pub const fn is_cilium(self) -> bool {
        matches!(self, Self::CiliumVxlan | Self::CiliumNative)
    }

    /// Whether the network is Calico, which has policies of its own for Pods and for Nodes.
    pub const fn is_calico(self) -> bool {
        matches!(self, Self::CalicoVxlan | Self::CalicoVxlanNftables | Self::CalicoRoutes | Self::CalicoRoutesNftables)
    }
}

/// Creates the directory of the CNI configuration in the Node's directory. A Node becomes ready once this directory
/// contains a file.
pub(super) fn create_folder(directory: &Path) -> Result<()> {
    let folder = directory.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))
}

/// Links all CNI plug-ins of the machine into a new directory of the Node, to which a provider can add plug-ins.
/// Returns the path of the directory, and its path inside the Node.
pub(super) fn link_plugins(directory: &Path, machines: &Path) -> Result<(PathBuf, PathBuf)> {
    let folder = directory.join(PLUGINS);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for entry in fs::read_dir(machines).with_context(|| format!("list {}", machines.display()))? {
        let entry = entry.with_context(|| format!("list {}", machines.display()))?;
        let link = folder.join(entry.file_name());
        symlink(entry.path(), &link).with_context(|| format!("link {}", link.display()))?;
    }
    Ok((folder, Path::new("/").join(PLUGINS)))
}

/// Configures a bridge for the Node's Pods, with this MTU or the default one.
pub(super) fn configure(directory: &Path, node: NodeNumber, mtu: Option<u32>) -> Result<()> {
    write(directory, &bridge(node, mtu))
}

/// Writes the CNI configuration.
pub(super) fn write(directory: &Path, settings: &Value) -> Result<()> {
    // containerd reads the file as soon as it appears, so create it atomically.
    let (unfinished, file) = (directory.join(FOLDER).join(".unfinished"), directory.join(FILE));
    fs::write(&unfinished, settings.to_string()).with_context(|| format!("write {}", unfinished.display()))?;
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
                // The plug-in need not masquerade: every machine has routes to all Pods, or flannel's daemon adds the
                // masquerading rules.
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

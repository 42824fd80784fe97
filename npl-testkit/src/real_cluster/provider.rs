// SPDX-License-Identifier: Apache-2.0
//! The software that connects a cluster's Pods, and its daemons on each Node.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::calico::{Calico, Dataplane, Encapsulation};
use super::cilium::{Cilium, Routing};
use super::cni::{self, Cni};
use super::flannel::{self, Flannel};
use super::kube_router::{self, KubeRouter};
use super::network::NodeNumber;
use super::space::Space;
use crate::api_client::ApiClient;
use crate::cluster::Cluster;
use crate::control_plane::ControlPlane;
use crate::netns::Netns;
use crate::process::Process;

/// The software that connects a cluster's Pods.
#[derive(Clone, Debug)]
pub(super) enum Provider {
    Bridge,
    Flannel(Flannel),
    Calico(Calico),
    KubeRouter(KubeRouter),
    Cilium(Cilium),
}

/// The properties of a Node that a provider needs to connect the Node's Pods.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) number: NodeNumber,
    pub(super) netns: &'a Netns,
    pub(super) space: &'a Space,
    pub(super) directory: &'a Path,
}

/// The provider's processes on a Node.
#[derive(Debug)]
pub(super) struct Daemons {
    /// The process that configures the network, and enforces NetworkPolicy if the provider supports it.
    pub(super) main: Process,
    /// A process that assigns addresses to the Node's tunnel devices.
    pub(super) _tunnel_addresses: Option<Process>,
}

impl Provider {
    /// Finds the provider's programs, so that a missing program is reported before any process is started.
    pub(super) fn find(cni: Cni) -> Result<Self> {
        let calico = |encapsulation, dataplane| Calico::find(encapsulation, dataplane).map(Self::Calico);
        match cni {
            Cni::Bridge => Ok(Self::Bridge),
            Cni::FlannelVxlan => Flannel::find("vxlan").map(Self::Flannel),
            Cni::FlannelHostGw => Flannel::find("host-gw").map(Self::Flannel),
            Cni::CalicoVxlan => calico(Encapsulation::Vxlan, Dataplane::Iptables),
            Cni::CalicoVxlanNftables => calico(Encapsulation::Vxlan, Dataplane::Nftables),
            Cni::CalicoRoutes => calico(Encapsulation::None, Dataplane::Iptables),
            Cni::CalicoRoutesNftables => calico(Encapsulation::None, Dataplane::Nftables),
            Cni::KubeRouter => KubeRouter::find().map(Self::KubeRouter),
            Cni::CiliumVxlan => Cilium::find(Routing::Vxlan).map(Self::Cilium),
            Cni::CiliumNative => Cilium::find(Routing::Native).map(Self::Cilium),
        }
    }

    /// Prepares the CNI plug-ins of a Node before the Node's first process starts. Returns the path of the plug-ins'
    /// directory inside the Node.
    pub(super) fn prepare(&self, directory: &Path, node: NodeNumber, machines: &Path) -> Result<PathBuf> {
        match self {
            Self::Bridge => cni::configure(directory, node, None)?,
            Self::Calico(calico) => return calico.add_plugins(directory, machines),
            Self::Cilium(cilium) => return cilium.prepare(directory, machines),
            Self::Flannel(_) | Self::KubeRouter(_) => {}
        }
        Ok(machines.to_owned())
    }

    /// Creates the provider's custom resource definitions, if the provider has any.
    pub(super) fn define(&self, cluster: &Cluster) -> Result<()> {
        match self {
            Self::Calico(calico) => calico.define(cluster),
            Self::Cilium(cilium) => cilium.define(cluster),
            Self::Bridge | Self::Flannel(_) | Self::KubeRouter(_) => Ok(()),
        }
    }

    /// Starts the daemons on a Node whose kubelet runs.
    pub(super) fn start(&self, place: Place<'_>, plane: &ControlPlane, client: &ApiClient) -> Result<Option<Daemons>> {
        let (main, tunnel_addresses) = match self {
            Self::Bridge => return Ok(None),
            Self::Flannel(flannel) => (flannel.start(place, plane, client)?, None),
            Self::Calico(calico) => {
                let (felix, tunnel_addresses) = calico.start(place, plane, client)?;
                (felix, Some(tunnel_addresses))
            }
            Self::KubeRouter(router) => (router.start(place, plane, client)?, None),
            Self::Cilium(cilium) => (cilium.start(place, plane, client)?, None),
        };
        Ok(Some(Daemons { main, _tunnel_addresses: tunnel_addresses }))
    }

    /// Waits until the CNI's daemon can connect the Node's Pods, and completes the CNI's configuration on the Node. The
    /// daemons of all Nodes must already have been started.
    pub(super) fn connect(&self, place: Place<'_>, daemons: &Daemons, all: &[NodeNumber]) -> Result<()> {
        match self {
            Self::Bridge | Self::Calico(_) => Ok(()),
            Self::Flannel(_) => flannel::connect_pods(&daemons.main, place.number, place.directory),
            Self::KubeRouter(_) => kube_router::wait_for_routes(place, &daemons.main, all),
            Self::Cilium(cilium) => cilium.wait_for_programs(place, &daemons.main, all),
        }
    }

    /// Starts the main daemon of a Node again after it was killed.
    pub(super) fn restart(&self, place: Place<'_>) -> Result<Option<Process>> {
        match self {
            Self::Bridge => Ok(None),
            Self::Flannel(_) => flannel::run(place).map(Some),
            Self::Calico(calico) => calico.run(place).map(Some),
            Self::KubeRouter(_) => kube_router::run(place).map(Some),
            Self::Cilium(cilium) => cilium.run(place).map(Some),
        }
    }
}

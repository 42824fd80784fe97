// SPDX-License-Identifier: Apache-2.0
//! One Node of a cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::binaries::{Images, Programs};
use super::init::{self, InitArguments};
use super::kube_proxy::{self, KubeProxy};
use super::network::NodeNumber;
use super::provider::{Daemons, Place, Provider};
use super::space::{Init, Space};
use super::{cni, containerd, kubelet};
use crate::api_client::ApiClient;
use crate::control_plane::ControlPlane;
use crate::netns::Netns;
use crate::process::Process;
use crate::run::Run;

/// A Node: its namespaces, container runtime and kubelet. Dropping this value ends the Node's processes in field order.
#[derive(Debug)]
pub struct Node {
    number: NodeNumber,
    netns: Netns,
    directory: PathBuf,
    cgroup: String,
    provider: Provider,
    network: Option<Daemons>,
    kube_proxy: Option<Process>,
    kubelet: Option<Process>,
    containerd: Process,
    init: Init,
}

/// The programs, images and settings that all Nodes of a cluster use.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) init_program: PathBuf,
    pub(super) programs: Programs,
    pub(super) images: Images,
    pub(super) provider: Provider,
}

impl Node {
    /// Starts the parts that need no API server: the namespaces and the container runtime with all images.
    pub(super) fn boot(run: &Run, number: NodeNumber, netns: &Netns, parts: &Parts) -> Result<Self> {
        let name = number.name();
        let directory = run.file(&name);
        init::prepare_folders(&directory)?;
        cni::create_folder(&directory)?;
        let provider = parts.provider.clone();
        let plugins = provider.prepare(&directory, number, &parts.programs.cni)?;
        containerd::configure(&directory, &plugins)?;
        let cgroup = run.cgroup(&name)?;
        let arguments = InitArguments {
            name: name.clone(),
            directory: directory.clone(),
            cgroup: cgroup.name().to_owned(),
            binaries: parts.programs.folder.clone(),
            inner: false,
        };
        let init = Init::start(&parts.init_program, &arguments, netns, &cgroup)?;
        let containerd = containerd::start(init.space(), &name, &directory)?;
        containerd::import(&directory, &parts.images)?;
        let (netns, cgroup) = (netns.clone(), arguments.cgroup);
        let (network, kube_proxy, kubelet) = (None, None, None);
        Ok(Self { number, netns, directory, cgroup, provider, network, kube_proxy, kubelet, containerd, init })
    }

    /// Starts the components that connect to the API server.
    pub(super) fn join(&mut self, plane: &ControlPlane, mode: KubeProxy) -> Result<()> {
        kubelet::configure(&self.directory, self.number, plane)?;
        self.kubelet = Some(kubelet::start(self.init.space(), self.number, &self.directory)?);
        self.kube_proxy = kube_proxy::start(mode, self.init.space(), self.number, &self.directory, plane)?;
        Ok(())
    }

    /// Starts the daemons that connect the Pods of a Node that has joined the cluster.
    pub(super) fn start_network(&mut self, plane: &ControlPlane, client: &ApiClient) -> Result<()> {
        self.network = self.provider.start(self.place(), plane, client)?;
        Ok(())
    }

    /// Waits until the Node's Pods can be connected. The daemons of all Nodes must already have been started.
    pub(super) fn connect_pods(&self, all: &[NodeNumber]) -> Result<()> {
        self.network.iter().try_for_each(|daemons| self.provider.connect(self.place(), daemons, all))
    }

    fn place(&self) -> Place<'_> {
        let Self { number, netns, directory, init, .. } = self;
        Place { number: *number, netns, space: init.space(), directory }
    }

    /// The Node's name, such as `node-1`.
    pub fn name(&self) -> String {
        self.number.name()
    }

    /// The Node's number, from which its name and addresses are derived.
    pub fn number(&self) -> NodeNumber {
        self.number
    }

    /// The Node's network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Returns all of the Node's namespaces.
    pub fn space(&self) -> &Space {
        self.init.space()
    }

    /// The directory of the Node's files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The name of the Node's cgroup.
    pub fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// The container runtime process.
    pub fn containerd(&mut self) -> &mut Process {
        &mut self.containerd
    }

    /// Kills the container runtime and starts it again. Running Pods are not affected.
    pub fn restart_containerd(&mut self) -> Result<()> {
        self.containerd.kill()?;
        self.containerd = containerd::start(self.init.space(), &self.number.name(), &self.directory)?;
        Ok(())
    }

    /// Kills the kubelet and starts it again. Running Pods are not affected.
    pub fn restart_kubelet(&mut self) -> Result<()> {
        self.kubelet = None;
        self.kubelet = Some(kubelet::start(self.init.space(), self.number, &self.directory)?);
        Ok(())
    }

    /// Kills the daemon that connects the Node's Pods and enforces policies, and starts it again. Running Pods keep
    /// their network. Has no effect without a daemon.
    pub fn restart_network(&mut self) -> Result<()> {
        let Some(daemons) = &mut self.network else { return Ok(()) };
        daemons.main.kill_group()?;
        if let Some(main) = self.provider.restart(self.place())?
            && let Some(daemons) = &mut self.network
        {
            daemons.main = main;
        }
        Ok(())
    }

    /// Returns a `ctr` command for the Node's images and containers.
    pub fn ctr(&self) -> Command {
        containerd::ctr(&self.directory)
    }

    /// Returns the PIDs of all processes in a Pod's containers, as seen from outside the Node.
    pub fn pod_processes(&self, pod_uid: &str) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").context("list processes")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // If the process has exited since it was listed, the file is absent, and the process is skipped.
            let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
            if groups.contains(&format!("/{}/", self.cgroup)) && groups.contains(&format!("/pod{pod_uid}/")) {
                pids.push(pid);
            }
        }
        Ok(pids)
    }

    /// The last log lines of the Node's kubelet and container runtime, for error messages.
    pub fn log_tail(&self) -> String {
        let kubelet = self.kubelet.as_ref().map(|process| process.log_tail(10)).unwrap_or_default();
        format!("{kubelet}\n{}", self.containerd.log_tail(5))
    }
}

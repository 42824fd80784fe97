// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask demo`: the main job on one machine, told as a short story.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::setup::{self, Extent, Kubernetes, KubernetesBuild, Need};
use crate::{build, build_ebpf, image, paths, process};

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Passed on to the demo: `--real-cluster`, `--keep`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// For cargo: the program that owns a cluster, and whose processes are the first of each Node.
pub(crate) const FIRST_PROCESS: [&str; 2] = ["--bin", "npl-cluster"];

/// What the demo and the agent's tests run.
#[derive(Debug)]
pub(crate) struct Parts {
    agent: PathBuf,
    kubernetes: Kubernetes,
}

/// Parts in the making: Kubernetes, which takes longest, is begun before anything else.
#[derive(Debug)]
pub(crate) struct Preparation {
    extent: Extent,
    kubernetes: KubernetesBuild,
}

/// Parts of which Kubernetes is still in the making. What else is to be compiled is best compiled now: Go, which links
/// for long, leaves processors idle towards its end.
#[derive(Debug)]
pub(crate) struct AgentBuilt {
    agent: PathBuf,
    kubernetes: KubernetesBuild,
}

impl Preparation {
    /// Begins, if this machine can do it at all.
    pub(crate) fn begin(extent: Extent) -> Result<Self> {
        if !setup::is_root() {
            bail!("network namespaces and kernel programs need root: run it with `sudo --preserve-env=PATH,HOME`");
        }
        setup::require_kubectl()?;
        Ok(Self { extent, kubernetes: KubernetesBuild::start(extent) })
    }

    /// Builds the agent, and beside it what else cargo is told to, with what the machine lacks for running them.
    pub(crate) fn build_agent(self, beside: &[&str]) -> Result<AgentBuilt> {
        setup::ensure(&[Need::TestNetwork])?;
        if self.extent >= Extent::Nodes {
            setup::ensure(&[Need::Containers])?;
        }
        build_ebpf::build()?;
        Ok(AgentBuilt { agent: build::build_agent(beside)?, kubernetes: self.kubernetes })
    }
}

impl AgentBuilt {
    /// Packs the images that Nodes run.
    pub(crate) fn pack_images(&self) -> Result<()> {
        image::pack_all(&self.agent)
    }

    /// Waits for Kubernetes.
    pub(crate) fn finish(self) -> Result<Parts> {
        Ok(Parts { agent: self.agent, kubernetes: self.kubernetes.finish()? })
    }
}

impl Parts {
    /// Makes all of them, with a program of npl-testkit for them to be passed to: cargo is told which.
    pub(crate) fn make_for(program: &[&str], extent: Extent) -> Result<Self> {
        let has_nodes = extent >= Extent::Nodes;
        let mut beside = [&["--package", "npl-testkit"], program].concat();
        beside.extend(has_nodes.then_some(FIRST_PROCESS).into_iter().flatten());
        let agent_built = Preparation::begin(extent)?.build_agent(&beside)?;
        if has_nodes {
            agent_built.pack_images()?;
        }
        agent_built.finish()
    }

    /// Tells a program of npl-testkit where the parts are.
    pub(crate) fn pass_to(&self, command: &mut Command) {
        let Kubernetes { control_plane, nodes, flannel } = &self.kubernetes;
        command.env("NPL_AGENT", &self.agent).env("NPL_CONTROL_PLANE_DIR", control_plane);
        pass_objects_to(command);
        if let Some(nodes) = nodes {
            command.env("NPL_KUBERNETES_DIR", nodes).env("NPL_IMAGES_DIR", paths::target_dir());
        }
        if let Some(flannel) = flannel {
            command.env("NPL_FLANNEL_DIR", flannel);
        }
    }

    /// What an agent and its API server on another machine need of all that [`Self::pass_to`] names.
    pub(crate) fn of_agent(&self) -> impl Iterator<Item = PathBuf> {
        [self.agent.clone(), self.kubernetes.control_plane.clone()].into_iter()
    }

    /// What a real cluster on another machine needs of all that [`Self::pass_to`] names; its network is a bridge.
    pub(crate) fn of_nodes(&self) -> impl Iterator<Item = PathBuf> {
        let Kubernetes { control_plane, nodes, flannel: _ } = &self.kubernetes;
        [control_plane].into_iter().chain(nodes).cloned().chain(image::archives())
    }
}

/// Tells a program of npl-testkit where the kernel objects are that it loads.
pub(crate) fn pass_objects_to(command: &mut Command) {
    command.env("NPL_TRAFFIC_OBJECT", paths::bpf_object().with_file_name("npl-traffic.bpf.o"));
}

/// Builds what is missing and tells the story.
pub(crate) fn run(options: &Options) -> Result<()> {
    let is_real = options.arguments.iter().any(|argument| argument == "--real-cluster");
    let extent = if is_real { Extent::Nodes } else { Extent::ControlPlane };
    let parts = Parts::make_for(&["--bin", "npl-demo"], extent)?;
    process::become_program(&mut command(&parts, &options.arguments))
}

/// The demo as npl-testkit built it.
pub(crate) fn command(parts: &Parts, arguments: &[String]) -> Command {
    let mut command = Command::new(build::built_folder().join("npl-demo"));
    parts.pass_to(&mut command);
    command.args(arguments);
    command
}

// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask demo`: shows on one machine how clients reach Pods through node ports. This module also builds the
//! programs and images that tests need.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::setup::{self, Component, Extent, Kubernetes, KubernetesBuild, Need};
use crate::{build, build_ebpf, image, paths, process};

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Arguments of the demo: `--real-cluster`, `--keep`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Arguments for cargo that select the program `npl-cluster`, which owns a cluster and is the first process of each
/// Node.
pub(crate) const FIRST_PROCESS: [&str; 2] = ["--bin", "npl-cluster"];

/// The built programs and images that the demo and the tests of the agent use.
#[derive(Debug)]
pub(crate) struct Parts {
    agent: PathBuf,
    kubernetes: Kubernetes,
}

/// The first stage of the build: the build of Kubernetes, which takes longest, has been started.
#[derive(Debug)]
pub(crate) struct Preparation {
    has_nodes: bool,
    kubernetes: KubernetesBuild,
}

/// The second stage of the build: the agent is built, and the build of Kubernetes may still be running. Tests are
/// compiled in this stage: Go's linker, which runs at the same time, does not use all processors.
#[derive(Debug)]
pub(crate) struct AgentBuilt {
    agent: PathBuf,
    kubernetes: KubernetesBuild,
}

impl Preparation {
    /// Checks the requirements and starts the build of Kubernetes.
    pub(crate) fn begin(extent: Extent) -> Result<Self> {
        if !setup::is_root() {
            bail!(
                "network namespaces and kernel programs need root: run the command with `sudo --preserve-env=PATH,HOME`"
            );
        }
        setup::require_kubectl()?;
        Ok(Self { has_nodes: extent.contains(&Component::Nodes), kubernetes: KubernetesBuild::start(extent) })
    }

    /// Installs missing packages, and builds the agent and the targets that the cargo arguments in `further` select.
    pub(crate) fn build_agent(self, further: &[&str]) -> Result<AgentBuilt> {
        setup::ensure(&[Need::TestNetwork])?;
        if self.has_nodes {
            setup::ensure(&[Need::Containers])?;
        }
        build_ebpf::build()?;
        Ok(AgentBuilt { agent: build::build_agent(further)?, kubernetes: self.kubernetes })
    }
}

impl AgentBuilt {
    /// Packs the container images that Nodes run.
    pub(crate) fn pack_images(&self) -> Result<()> {
        image::pack_all(&self.agent)
    }

    /// Waits for the build of Kubernetes.
    pub(crate) fn finish(self) -> Result<Parts> {
        Ok(Parts { agent: self.agent, kubernetes: self.kubernetes.finish()? })
    }
}

impl Parts {
    /// Builds all parts, and the program of npl-testkit that the cargo arguments in `program` select.
    pub(crate) fn make_for(program: &[&str], extent: Extent) -> Result<Self> {
        let has_nodes = extent.contains(&Component::Nodes);
        let mut further = [&["--package", "npl-testkit"], program].concat();
        further.extend(has_nodes.then_some(FIRST_PROCESS).into_iter().flatten());
        let agent_built = Preparation::begin(extent)?.build_agent(&further)?;
        if has_nodes {
            agent_built.pack_images()?;
        }
        agent_built.finish()
    }

    /// Passes the paths of all parts to a program of npl-testkit, as environment variables.
    pub(crate) fn pass_to(&self, command: &mut Command) {
        let Kubernetes { control_plane, components } = &self.kubernetes;
        command.env("NPL_AGENT", &self.agent).env("NPL_FEED", self.agent.with_file_name(build::FEED));
        command.env("NPL_CONTROL_PLANE_DIR", control_plane);
        pass_objects_to(command);
        command.env("NPL_IMAGES_DIR", paths::target_dir());
        command.envs(components.iter().map(|(component, folder)| (component.variable(), folder)));
    }

    /// Returns the files that an agent and an API server on another machine need. [`Self::pass_to`] passes the paths of
    /// these files, among others.
    pub(crate) fn of_agent(&self) -> impl Iterator<Item = PathBuf> {
        [self.agent.clone(), self.kubernetes.control_plane.clone()].into_iter()
    }

    /// Returns the files that a real cluster with a bridge network on another machine needs. [`Self::pass_to`] passes
    /// the paths of these files, among others.
    pub(crate) fn of_nodes(&self) -> impl Iterator<Item = PathBuf> {
        let Kubernetes { control_plane, components } = &self.kubernetes;
        [control_plane].into_iter().chain(components.get(&Component::Nodes)).cloned().chain(image::archives())
    }
}

/// Passes to a program of npl-testkit, as environment variables, the paths of the kernel objects that the program
/// loads.
pub(crate) fn pass_objects_to(command: &mut Command) {
    command.env("NPL_TRAFFIC_OBJECT", paths::bpf_object().with_file_name("npl-traffic.bpf.o"));
    command.env("NPL_TRACE_OBJECT", paths::trace_object());
}

/// Builds the programs that are missing, and replaces this process with the demo.
pub(crate) fn run(options: &Options) -> Result<()> {
    let is_real = options.arguments.iter().any(|argument| argument == "--real-cluster");
    let extent = is_real.then_some(Component::Nodes).into_iter().collect();
    let parts = Parts::make_for(&["--bin", "npl-demo"], extent)?;
    process::become_program(&mut command(&parts, &options.arguments))
}

/// Returns a command that runs the built demo.
pub(crate) fn command(parts: &Parts, arguments: &[String]) -> Command {
    let mut command = Command::new(build::built_folder().join("npl-demo"));
    parts.pass_to(&mut command);
    command.args(arguments);
    command
}

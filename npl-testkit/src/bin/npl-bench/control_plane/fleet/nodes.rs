// SPDX-License-Identifier: Apache-2.0
//! Nodes with their own network namespace and BPF file system, and one API server on the same LAN.

use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use npl_testkit::agent::{Agent, Options};
use npl_testkit::mounts::BpfFs;
use npl_testkit::netns::Netns;
use npl_testkit::run::Run;

/// The address of the API server. The Nodes have the first addresses of the same network.
pub(super) const API_SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 254);
/// The first interface index of the bridge's ports, above the indexes that the kernel assigns in a new namespace. A
/// veth pair whose ends have equal indexes takes longer to come up.
const FIRST_PORT_INDEX: u32 = 1000;

/// A Node and its agent. Fields are dropped in declaration order, so the agent ends before its BPF file system and
/// namespace are removed.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) ip: Ipv4Addr,
    agent: Option<Agent>,
    bpffs: BpfFs,
    netns: Netns,
}

/// Returns the namespace of the API server, with the bridge that connects the Nodes.
pub(super) fn build_lan(run: &Run) -> Result<Netns> {
    let lan = run.netns("lan")?;
    lan.ip(&format!(
        "link add br0 type bridge forward_delay 0\n\
         addr add {API_SERVER}/24 dev br0\n\
         link set br0 up"
    ))?;
    Ok(lan)
}

impl Node {
    /// Connects a Node to the LAN, without an agent.
    pub(super) fn connect(run: &Run, lan: &Netns, number: u8) -> Result<Self> {
        let name = format!("fleet-{number}");
        let ip = Ipv4Addr::new(198, 51, 100, number);
        let netns = run.netns(&name)?;
        let index = FIRST_PORT_INDEX + u32::from(number);
        lan.ip(&format!(
            "link add {name} index {index} type veth peer name eth0 netns {}\n\
             link set {name} master br0\n\
             link set {name} up",
            netns.name()
        ))?;
        netns.ip(&format!(
            "addr add {ip}/24 dev eth0\n\
             link set eth0 up\n\
             route add default via {API_SERVER}"
        ))?;
        let bpffs = run.bpffs(&format!("bpf-{name}"))?;
        Ok(Self { name, ip, agent: None, bpffs, netns })
    }

    /// Starts the agent, and does not wait until the agent is ready. An earlier agent must have been killed.
    pub(super) fn launch(&mut self, run: &Run, kubeconfig: &Path) -> Result<()> {
        let log = run.file(&format!("{}.log", self.name));
        let options = Options::new(&self.netns, &self.name, kubeconfig, self.bpffs.path(), &log)?;
        self.agent = Some(Agent::launch(options)?);
        Ok(())
    }

    /// Waits until the agent is ready.
    pub(super) fn wait_until_ready(&mut self) -> Result<()> {
        self.agent()?.wait_until_ready().with_context(|| format!("the agent of {}", self.name))
    }

    /// Sends SIGKILL to the agent without waiting for its exit.
    pub(super) fn send_kill(&mut self) -> Result<()> {
        self.agent()?.signal(Signal::SIGKILL)
    }

    /// Waits for the agent's exit.
    pub(super) fn wait_for_exit(&mut self) -> Result<()> {
        self.agent()?.kill().map(drop)
    }

    /// The PID of the agent.
    pub(super) fn pid(&mut self) -> Result<u32> {
        Ok(self.agent()?.process().id())
    }

    fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().with_context(|| format!("no agent was started on {}", self.name))
    }
}

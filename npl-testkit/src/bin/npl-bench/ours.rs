// SPDX-License-Identifier: Apache-2.0
//! Loads and attaches NPL on a Node of a test network.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use caps::{CapSet, Capability};
use npl_agent::core::devices::DeviceSelection;
use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy};
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::model::settings::PortRange;
use npl_agent::core::model::{self, Backend, Family, Frontend, NodePort, PodPort};
use npl_agent::datapath::Datapath;
use npl_agent::devices::uplinks::Uplinks;
use npl_agent::nft_guard::GuardMode;
use npl_testkit::echo::Protocol;
use npl_testkit::mounts::BpfFs;
use npl_testkit::run::Run;
use npl_testkit::topology::Topology;

use crate::cases::MOST_MAPPINGS;
use crate::testbed::{FIRST_NODE_PORT, Mappings};

/// The settings with which NPL runs on a Node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    pub(crate) forwarding: Forwarding,
    pub(crate) attach: Attach,
    /// Whether the agent itself loads the programs, without `CAP_PERFMON`, so that the verifier adds speculation
    /// barriers.
    pub(crate) are_mitigated: bool,
}

impl Manner {
    pub(crate) const STACK: Self = Self::by(Forwarding::Stack);

    /// Creates settings for TC programs that are loaded with `CAP_PERFMON` before the agent starts.
    pub(crate) const fn by(forwarding: Forwarding) -> Self {
        Self { forwarding, attach: Attach::Tc, are_mitigated: false }
    }
}

/// The agent's datapath, with maps on a separate BPF file system. Fields are dropped in declaration order, so the file
/// system is unmounted last.
pub(crate) struct Ours {
    pub(crate) datapath: Datapath,
    manner: Manner,
    is_attached: bool,
    _bpffs: BpfFs,
}

impl Ours {
    /// Loads NPL's programs on a Node, writes these mappings, and attaches the programs to the uplink.
    pub(crate) fn load(run: &Run, name: &str, topology: &Topology, mappings: Mappings, manner: Manner) -> Result<Self> {
        if manner.forwarding == Forwarding::Offload {
            // The sysctl exists only if kernel conntrack is loaded, so a failure is ignored.
            let _there_or_not = topology.node().sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1");
        }
        let bpffs = run.bpffs(&format!("bpf-{name}"))?;
        let mut datapath = open_datapath(bpffs.path(), manner.are_mitigated)?;
        // The range contains the node ports and no Pod port: all Pod ports of the bench are below the range.
        let range: PortRange = format!("{FIRST_NODE_PORT}-{}", FIRST_NODE_PORT + MOST_MAPPINGS).parse()?;
        // The seed is arbitrary, but fixed, so that every run has the same hash collisions.
        datapath.configure(range, || 0x4e50_4c00_4e50_4c01)?;
        let mut ours = Self { datapath, manner, is_attached: false, _bpffs: bpffs };
        ours.set_mappings(mappings)?;
        ours.set_attached(topology, true)?;
        Ok(ours)
    }

    /// Replaces all mappings.
    pub(crate) fn set_mappings(&mut self, mappings: Mappings) -> Result<()> {
        let mut wanted = entries(mappings);
        for (frontend, backend) in self.datapath.mappings()? {
            if wanted.get(&frontend) == Some(&backend) {
                wanted.remove(&frontend);
            } else {
                self.datapath.remove_mapping(frontend)?;
            }
        }
        self.write(&wanted)
    }

    /// Adds mappings, and keeps the existing mappings.
    pub(crate) fn add_mappings(&mut self, mappings: Mappings) -> Result<()> {
        self.write(&entries(mappings))
    }

    fn write(&mut self, wanted: &BTreeMap<Frontend, Backend>) -> Result<()> {
        let refused = self.datapath.upsert_mappings(wanted);
        refused.into_values().next().map_or(Ok(()), Err).context("write the mappings")
    }

    /// Attaches the programs to the uplink, or detaches the programs.
    pub(crate) fn set_attached(&mut self, topology: &Topology, is_attached: bool) -> Result<()> {
        if self.is_attached == is_attached {
            return Ok(());
        }
        let uplink = topology.client().uplink.name();
        let selection = DeviceSelection::Named(is_attached.then(|| uplink.to_owned()).into_iter().collect());
        // A new `Uplinks` knows no earlier devices, so no grace period delays detaching.
        let mut uplinks = Uplinks::new(
            selection,
            (self.manner.forwarding, NetworkPolicy::Ignored),
            self.manner.attach,
            GuardMode::Off,
        );
        let node_ips = [topology.node_addresses().v4.into()];
        let coverage = topology.node().block_on(uplinks.follow(&mut self.datapath, &node_ips))??;
        ensure!(coverage.attached == usize::from(is_attached), "attaching to the uplink, or detaching from it, failed");
        let has_xdp = topology.node().ip(&format!("link show dev {uplink}"))?.contains("prog/xdp");
        let is_xdp = is_attached && self.manner.attach == Attach::Xdp;
        ensure!(has_xdp == is_xdp, "attaching the XDP program to the uplink's driver, or detaching it, failed");
        self.is_attached = is_attached;
        Ok(())
    }
}

/// The frontend and backend of each mapping.
fn entries(mappings: Mappings) -> BTreeMap<Frontend, Backend> {
    let protocol = match mappings.protocol {
        Protocol::Tcp => model::Protocol::Tcp,
        Protocol::Udp => model::Protocol::Udp,
        Protocol::Sctp => model::Protocol::Sctp,
    };
    let mapping = |(node_port, pod_port)| {
        let frontend = Frontend { family: Family::V4, node_port: NodePort(node_port), protocol };
        let (pod_ip, pod_port) = (mappings.pod_ip.into(), PodPort(pod_port));
        (frontend, Backend { pod_ip, pod_port, generation: 1, is_restricted: false })
    };
    mappings.ports().map(mapping).collect()
}

/// Returns the agent's datapath. With `are_mitigated`, the programs are loaded without `CAP_PERFMON`, with speculation
/// barriers.
pub(crate) fn open_datapath(bpffs: &Path, are_mitigated: bool) -> Result<Datapath> {
    if !are_mitigated {
        return Ok(Datapath::open(bpffs)?);
    }
    // aya probes kernel features only once per process, so the probe must run before capabilities are dropped.
    aya::features();
    let held = caps::read(None, CapSet::Effective)?;
    // Both capabilities are dropped, because with either of them, the verifier omits the speculation barriers.
    let kept = &held - &[Capability::CAP_PERFMON, Capability::CAP_SYS_ADMIN].into();
    caps::set(None, CapSet::Effective, &kept)?;
    let opened = Datapath::open(bpffs);
    caps::set(None, CapSet::Effective, &held)?;
    let datapath = opened?;
    ensure!(!datapath.hooks.are_unmitigated(), "the programs were loaded without speculation barriers");
    Ok(datapath)
}

// SPDX-License-Identifier: Apache-2.0
//! The state of the kernel, for commands that need no running agent.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use npl_common::{config::Config, names::PINNED_MAPS, reason::Reason};

use super::{
    error::DatapathError,
    next_hops::NextHops,
    pins::{Direction, Pins},
    preflight,
    tables::{MappingRecord, Tables},
};
use crate::core::devices::redirect::PodNextHop;

/// The datapath's state.
#[derive(Debug)]
pub struct Inspection {
    /// Whether anything is pinned; all else is empty if not.
    pub is_installed: bool,
    /// The programs' configuration.
    pub config: Option<Config>,
    /// The Node's addresses.
    pub local_addresses: Vec<IpAddr>,
    /// The directions of pinned links, by device index.
    pub links: BTreeMap<u32, Vec<Direction>>,
    /// The Pods that packets are redirected to.
    pub redirected: BTreeMap<IpAddr, PodNextHop>,
    /// Devices whose driver runs the XDP program, by their index.
    pub xdp_links: Vec<u32>,
    /// Why XDP or TC translates the requests of a device: a key of [`crate::core::devices::xdp::XdpReason`].
    pub xdp_reasons: BTreeMap<u32, String>,
    /// The socket hooks that serve local clients, each once.
    pub socket_hooks: Vec<&'static str>,
    /// The names of the pinned programs, by their build.
    pub programs: BTreeMap<String, Vec<String>>,
    /// Mappings with their counters, by node port.
    pub mappings: Vec<MappingRecord>,
    /// The number of connection tracking entries.
    pub flows: usize,
    /// Packets by reason.
    pub reasons: Vec<(Reason, u64)>,
}

impl Inspection {
    /// Reads everything by its pins.
    ///
    /// # Errors
    ///
    /// If the path is not a BPF file system, or the kernel refuses.
    pub fn read(bpffs: &Path) -> Result<Self, DatapathError> {
        preflight::check_bpffs(bpffs)?;
        let pins = Pins::new(bpffs);
        let mut links: BTreeMap<u32, Vec<Direction>> = BTreeMap::new();
        for (ifindex, direction) in pins.links()? {
            links.entry(ifindex).or_default().push(direction);
        }
        let (xdp_links, xdp_reasons) = (pins.xdp_links()?, pins.xdp_reasons()?);
        let mut socket_hooks: Vec<_> = pins.socket_links()?.into_iter().map(|(_, hook)| hook).collect();
        socket_hooks.dedup();
        let of_build = |build: String| pins.program_names(&build).map(|names| (build, names));
        let programs = pins.builds()?.into_iter().map(of_build).collect::<Result<_, _>>()?;
        let missing = PINNED_MAPS.iter().filter(|name| !pins.map(name).exists());
        let missing: Vec<&str> = missing.copied().collect();
        if let Some(first) = missing.first().filter(|_| missing.len() < PINNED_MAPS.len()) {
            return Err(DatapathError::Incomplete(pins.map(first)));
        }
        if !missing.is_empty() {
            return Ok(Self {
                is_installed: false,
                config: None,
                local_addresses: Vec::new(),
                links,
                redirected: BTreeMap::new(),
                xdp_links,
                xdp_reasons,
                socket_hooks,
                programs,
                mappings: Vec::new(),
                flows: 0,
                reasons: Vec::new(),
            });
        }
        let tables = Tables::open(&pins)?;
        Ok(Self {
            is_installed: true,
            config: Some(tables.config()?),
            local_addresses: tables.local_addresses()?.into_iter().collect(),
            links,
            redirected: NextHops::open(&pins)?.pods()?,
            xdp_links,
            xdp_reasons,
            socket_hooks,
            programs,
            mappings: tables.records()?,
            flows: tables.flow_count()?,
            reasons: tables.reasons()?,
        })
    }
}

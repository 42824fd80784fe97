// SPDX-License-Identifier: Apache-2.0
//! Reads the datapath's state from the kernel, for the commands `status`, `mappings` and `doctor`. These commands also
//! work while no agent runs.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use npl_common::{config::Config, names::PINNED_MAPS, reason::Reason};

use super::{
    error::DatapathError,
    next_hops::NextHops,
    pins::{Direction, Pins},
    preflight,
    tables::{MappingRecord, Tables},
};
use crate::core::{devices::redirect::PodNextHop, repairs::RepairJournal};

/// The state of the datapath, as read from the maps and pins in the kernel.
#[derive(Debug)]
pub struct Inspection {
    /// Whether the maps are pinned. If the maps are not pinned, all fields that are read from maps are empty.
    pub is_installed: bool,
    /// The configuration of the programs, from the map `npl_config`.
    pub config: Option<Config>,
    /// The node addresses whose node ports the programs translate.
    pub local_addresses: Vec<IpAddr>,
    /// The directions in which a TC program is attached to a device, by the device's ifindex.
    pub links: BTreeMap<u32, Vec<Direction>>,
    /// The next hop of each Pod whose packets are redirected.
    pub redirected: BTreeMap<IpAddr, PodNextHop>,
    /// Whether the agent refuses `--forwarding redirect`, because redirected packets would bypass a policy engine.
    pub is_redirect_refused: bool,
    /// The ifindexes of devices with an attached XDP program.
    pub xdp_links: Vec<u32>,
    /// For each device, by ifindex: why XDP translates the requests that the device receives, or why TC translates them
    /// instead. The text is the key of a [`crate::core::devices::xdp::XdpReason`].
    pub xdp_reasons: BTreeMap<u32, String>,
    /// The cgroup hooks to which a program for local clients is attached, without duplicates.
    pub socket_hooks: Vec<&'static str>,
    /// The names of the pinned programs, by the build to which the programs belong.
    pub programs: BTreeMap<String, Vec<String>>,
    /// Mappings with their counters, ordered by IP family, node port and protocol.
    pub mappings: Vec<MappingRecord>,
    /// For each [`Reason`], the number of packets that the programs counted.
    pub reasons: Vec<(Reason, u64)>,
}

impl Inspection {
    /// Reads the pinned maps and the names of pinned programs and links.
    ///
    /// # Errors
    ///
    /// If the path is not on a BPF file system, if only some of the maps are pinned, or if a map cannot be read.
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
                is_redirect_refused: false,
                xdp_links,
                xdp_reasons,
                socket_hooks,
                programs,
                mappings: Vec::new(),
                reasons: Vec::new(),
            });
        }
        let tables = Tables::open(&pins)?;
        Ok(Self {
            is_installed: true,
            config: Some(tables.config()?),
            local_addresses: tables.local_addresses()?.into_iter().collect(),
            links,
            redirected: NextHops::open(&pins, &RepairJournal::default())?.pods()?,
            is_redirect_refused: pins.redirect_refused_mark().exists(),
            xdp_links,
            xdp_reasons,
            socket_hooks,
            programs,
            mappings: tables.records()?,
            reasons: tables.reasons()?,
        })
    }
}

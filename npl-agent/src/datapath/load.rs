// SPDX-License-Identifier: Apache-2.0
//! The datapath as the rest of the agent uses it, opened over the pins of an earlier agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    time::Duration,
};

use npl_common::{config::Config, names::ABI_VERSION};

use super::{
    attach::Hooks, error::DatapathError, mappings::MappingWriter, next_hops::NextHops, pins::Pins, preflight,
    programs::Programs, tables::Tables, xdp::XdpDevices,
};
use crate::core::{
    devices::{Device, plan::DevicePlan, redirect::PodNextHop},
    model::{Backend, Frontend, settings::PortRange, sources::SourceRange},
};

/// The programs and their maps.
#[derive(Debug)]
pub struct Datapath {
    /// The programs.
    pub hooks: Hooks,
    /// The maps.
    pub tables: Tables,
    next_hops: NextHops,
    xdp_devices: XdpDevices,
    writer: MappingWriter,
}

impl Datapath {
    /// Checks the Node, takes over pinned programs and maps, and loads what is missing. Attaches nothing: devices keep
    /// an earlier agent's programs until [`Hooks::attach`] replaces them.
    ///
    /// # Errors
    ///
    /// If a requirement is not met, or the kernel refuses.
    pub fn open(bpffs: &Path) -> Result<Self, DatapathError> {
        preflight::check(bpffs)?;
        let pins = Pins::new(bpffs);
        pins.create()?;
        let programs = Programs::open(&pins)?;
        let tables = Tables::open(&pins)?;
        let next_hops = NextHops::open(&pins)?;
        let xdp_devices = XdpDevices::open(&pins)?;
        Tables::write_crc_table(&pins)?;
        let hooks = Hooks::new(programs, pins);
        Ok(Self { hooks, tables, next_hops, xdp_devices, writer: MappingWriter::default() })
    }

    /// Removes the next hops that a plan lacks or has different. Their packets take the host's stack from then on.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn retain_next_hops(&mut self, plan: &DevicePlan) -> Result<(), DatapathError> {
        self.next_hops.retain(&plan.programs, &plan.next_hops)?;
        self.tables.begin_epoch()
    }

    /// Adds the next hops of a plan whose programs are attached.
    ///
    /// # Errors
    ///
    /// Of each table that refuses or is full.
    pub fn add_next_hops(&mut self, plan: &DevicePlan) -> Vec<DatapathError> {
        let mut errors = self.next_hops.add(&plan.programs, &plan.next_hops);
        // Some may have been added before a refusal.
        errors.extend(self.tables.begin_epoch().err());
        errors
    }

    /// Has a device's driver run the XDP program. After a failure, no XDP program of NPL is attached to the device, and
    /// TC translates its requests.
    ///
    /// # Errors
    ///
    /// The reason.
    pub fn attach_xdp(&mut self, device: &Device) -> Result<(), DatapathError> {
        let mut devices = self.hooks.xdp_devices()?;
        devices.insert(device.ifindex);
        self.write_xdp_devices(&devices)?;
        let attached = self.hooks.attach_xdp(device);
        if attached.is_err() {
            self.write_xdp_devices(&self.hooks.xdp_devices()?)?;
        }
        attached
    }

    /// Detaches the XDP program from all devices but these.
    ///
    /// # Errors
    ///
    /// Of each device that refuses.
    pub fn retain_xdp(&mut self, devices: &BTreeSet<u32>) -> Vec<DatapathError> {
        let mut errors = self.hooks.retain_xdp(devices);
        errors.extend(self.hooks.xdp_devices().and_then(|devices| self.write_xdp_devices(&devices)).err());
        errors
    }

    /// Writes which devices have the XDP program. Behind it, the programs at TC record clients' datagrams to Pods
    /// differently.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn write_xdp_devices(&mut self, devices: &BTreeSet<u32>) -> Result<(), DatapathError> {
        self.xdp_devices.write(devices, &mut self.tables)
    }

    /// Checks that this agent's maps are the pinned ones, and restores missing folders.
    ///
    /// # Errors
    ///
    /// If a map's pin is missing or another map's: this agent's programs and the next one's would use different maps.
    pub fn check_pins(&self) -> Result<(), DatapathError> {
        self.hooks.programs.check_maps()?;
        self.hooks.pins.create()
    }

    /// The Pods that packets are redirected to.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn redirected(&self) -> Result<BTreeMap<IpAddr, PodNextHop>, DatapathError> {
        self.next_hops.pods()
    }

    /// The Pod addresses of all mappings at the last read.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.writer.pod_addresses()
    }

    /// Reads every mapping in the kernel, and repairs endpoints that do not match them.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn mappings(&mut self) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        self.writer.refresh(&mut self.tables)
    }

    /// Writes mappings; replaces existing ones atomically. Returns those that the kernel refused, or whose backend is
    /// of another family than the frontend.
    pub fn upsert_mappings(&mut self, wanted: &BTreeMap<Frontend, Backend>) -> BTreeMap<Frontend, DatapathError> {
        self.writer.upsert_all(&mut self.tables, wanted)
    }

    /// Writes one mapping.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or the backend is of another family than the frontend.
    pub fn upsert_mapping(&mut self, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        self.upsert_mappings(&BTreeMap::from([(frontend, backend)])).remove(&frontend).map_or(Ok(()), Err)
    }

    /// Removes a mapping, if it exists.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        self.writer.remove(&mut self.tables, frontend)
    }

    /// When a node port without a mapping counts as unused, if no more datagrams arrive; `None` if it does already.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn time_until_quiet(&self, frontend: Frontend) -> Result<Option<Duration>, DatapathError> {
        self.tables.time_until_quiet(frontend)
    }

    /// The allowed sources of every frontend, whether its mapping is restricted or not.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn sources(&self) -> Result<BTreeMap<Frontend, BTreeSet<SourceRange>>, DatapathError> {
        self.tables.sources()
    }

    /// Adds allowed sources of a mapping.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; some may have been added.
    pub fn allow_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        ranges.iter().try_for_each(|range| maps.allow_source(frontend, *range))
    }

    /// Removes allowed sources of a mapping, if they exist.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; some may have been removed.
    pub fn forget_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        ranges.iter().try_for_each(|range| maps.forget_source(frontend, *range))
    }

    /// Removes the connection tracking entries of endpoints that were removed since the last call.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self) -> Result<(), DatapathError> {
        self.writer.purge_flows(&mut self.tables)
    }

    /// Writes the range of ports that may have mappings: the configured range, extended by mappings that still drain.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn configure(&mut self, range: PortRange, seed: impl FnOnce() -> u64) -> Result<(), DatapathError> {
        let old = self.tables.config()?;
        let (mut port_min, mut port_max) = (range.start().0, range.end().0);
        for frontend in self.tables.entries()?.into_keys() {
            port_min = port_min.min(frontend.node_port.0);
            port_max = port_max.max(frontend.node_port.0);
        }
        // An agent of a version without a lookup cache may have changed mappings meanwhile.
        self.tables.clear_lookup_cache()?;
        // The slots of half-open entries depend on the seed, so it is kept.
        let seed = if old.abi == ABI_VERSION { old.seed } else { seed() };
        self.tables.set_config(Config { seed, port_min, port_max, abi: ABI_VERSION, ..old })?;
        // The state that an earlier agent has left.
        self.write_xdp_devices(&self.hooks.xdp_devices()?)?;
        // An earlier agent may have removed an address or endpoint, and been killed before it began an epoch.
        self.tables.begin_epoch()
    }
}

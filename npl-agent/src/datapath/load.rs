// SPDX-License-Identifier: Apache-2.0
//! The datapath as the rest of the agent sees it, opened over whatever an earlier agent left pinned.

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
    /// The programs on their devices.
    pub hooks: Hooks,
    /// The maps.
    pub tables: Tables,
    next_hops: NextHops,
    xdp_devices: XdpDevices,
    writer: MappingWriter,
}

impl Datapath {
    /// Checks the machine, adopts what is pinned, and loads what is missing. Attaches nothing yet: links of an earlier
    /// agent go on with the earlier programs until [`Hooks::attach`] replaces them.
    ///
    /// # Errors
    ///
    /// Whatever is missing, or the kernel's refusal.
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

    /// Has a device's driver run the program for drivers. If it does not, no program of ours is left with it, and TC does the
    /// work.
    ///
    /// # Errors
    ///
    /// Why it does not.
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

    /// Tells the programs at TC whose drivers run the one ahead of them, which notes a client's datagrams to Pods themselves.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn write_xdp_devices(&mut self, devices: &BTreeSet<u32>) -> Result<(), DatapathError> {
        self.xdp_devices.write(devices, &mut self.tables)
    }

    /// Checks that this agent's maps are those that the next one will find, and makes folders again that somebody has removed.
    ///
    /// # Errors
    ///
    /// If a map's pin is gone or another one's: the programs of this agent, and those of the next one, would work on different
    /// maps.
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

    /// The addresses of the Pods that mappings lead to, as of the last look.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.writer.pod_addresses()
    }

    /// Every mapping that the kernel holds; endpoints that do not fit them are put right on the way.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn mappings(&mut self) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        self.writer.refresh(&mut self.tables)
    }

    /// Writes mappings; an existing one of the same frontend is replaced at once. Returns those that the kernel refused,
    /// or whose backend is not of the frontend's family.
    pub fn upsert_mappings(&mut self, wanted: &BTreeMap<Frontend, Backend>) -> BTreeMap<Frontend, DatapathError> {
        self.writer.upsert_all(&mut self.tables, wanted)
    }

    /// Writes one mapping in the same way.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or the backend is not of the frontend's family.
    pub fn upsert_mapping(&mut self, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        self.upsert_mappings(&BTreeMap::from([(frontend, backend)])).remove(&frontend).map_or(Ok(()), Err)
    }

    /// Removes a mapping; one that is not there is as good as removed.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        self.writer.remove(&mut self.tables, frontend)
    }

    /// After what time a node port counts as silent that led nowhere and was sent datagrams to, if nobody sends from now on;
    /// nothing if it does already.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn time_until_quiet(&self, frontend: Frontend) -> Result<Option<Duration>, DatapathError> {
        self.tables.time_until_quiet(frontend)
    }

    /// Every frontend's allowed sources, whether its mapping asks for them or not.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn sources(&self) -> Result<BTreeMap<Frontend, BTreeSet<SourceRange>>, DatapathError> {
        self.tables.sources()
    }

    /// Lets sources use a mapping. Those that are there already stay.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; some may be there by then.
    pub fn allow_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        ranges.iter().try_for_each(|range| maps.allow_source(frontend, *range))
    }

    /// Lets sources not use a mapping any more; those that are not there are as good as forgotten.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; some may be gone by then.
    pub fn forget_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        ranges.iter().try_for_each(|range| maps.forget_source(frontend, *range))
    }

    /// Forgets the flows of endpoints that were removed since the last call.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self) -> Result<(), DatapathError> {
        self.writer.purge_flows(&mut self.tables)
    }

    /// Tells the programs which ports can be mapped: the configured ones, and those of mappings that still drain.
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
        // An agent of a version without hints may have changed mappings since they were left.
        self.tables.clear_lookup_cache()?;
        // Half-open flows are found by the seed, so it stays over a restart.
        let seed = if old.abi == ABI_VERSION { old.seed } else { seed() };
        self.tables.set_config(Config { seed, port_min, port_max, abi: ABI_VERSION, ..old })?;
        // As an earlier agent has left it.
        self.write_xdp_devices(&self.hooks.xdp_devices()?)?;
        // An agent that was killed may have taken an address or an endpoint out without one.
        self.tables.begin_epoch()
    }
}

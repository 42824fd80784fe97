// SPDX-License-Identifier: Apache-2.0
//! The interface by which the rest of the agent uses the datapath. An agent that starts adopts the pinned maps,
//! programs and links of an earlier agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};

use npl_common::{config::Config, names::ABI_VERSION};

use super::{
    attach::Hooks,
    error::DatapathError,
    host_connections, machine,
    mappings::MappingWriter,
    next_hops::NextHops,
    pins::Pins,
    predecessor::{self, Entries, Takeover},
    preflight,
    programs::Programs,
    tables::Tables,
    xdp::PreTcDevices,
};
use crate::{
    core::{
        devices::{Device, Direction, plan::DevicePlan, redirect::PodNextHop},
        model::{Backend, Frontend, NodePort, TranslatedConnection, settings::PortRange, sources::SourceRange},
        repairs::RepairJournal,
        sizes::{MaxFlows, TableSizes},
    },
    process::selinux,
};

/// NPL's kernel programs, the hooks to which the programs are attached, and the maps of the programs.
#[derive(Debug)]
pub struct Datapath {
    /// The programs, and the hooks to which they are attached.
    pub hooks: Hooks,
    /// The maps of mappings, conntrack entries, node addresses and counters.
    pub tables: Tables,
    /// The objects that other software has removed or changed, and that this agent restores.
    pub repairs: RepairJournal,
    next_hops: NextHops,
    pre_tc_devices: PreTcDevices,
    writer: MappingWriter,
    /// Whether pins of earlier agents may exist. This agent removes these pins after it has replaced the earlier
    /// programs.
    has_predecessors: bool,
    /// When the predecessors can be removed; `None` while their programs translate requests.
    replies_awaited_until: Option<Instant>,
    /// The hooks on which this agent has moved its filter ahead of the filters of other ABI versions.
    moved_filters: BTreeSet<(u32, Direction)>,
    /// The allowed sources that this process has read or written; `None` before the first reading, and after a failed
    /// write.
    known_sources: Option<BTreeMap<Frontend, BTreeSet<SourceRange>>>,
}

impl Datapath {
    /// Opens the datapath like [`Self::open_sized`], with the default sizes of maps for this machine.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::open_sized`].
    pub fn open(bpffs: &Path) -> Result<Self, DatapathError> {
        Self::open_sized(bpffs, MaxFlows::Auto)
    }

    /// Checks that the Node meets the requirements, adopts pinned maps and programs, creates missing maps and loads
    /// missing programs. Attaches no program: programs of an earlier agent stay attached until [`Hooks::attach`]
    /// replaces them. If a pinned map does not have the size and the flags that this agent needs, a new map replaces
    /// the pinned map. Mappings, allowed sources, conntrack entries and socket reverse NAT entries are copied to the
    /// new maps.
    ///
    /// # Errors
    ///
    /// If the Node does not meet a requirement, the maps do not fit into the container's memory, or the kernel rejects
    /// a map or a program.
    pub fn open_sized(bpffs: &Path, max_flows: MaxFlows) -> Result<Self, DatapathError> {
        preflight::check(bpffs)?;
        let sizes = machine::table_sizes(max_flows)?;
        Self::adopt(Pins::new(bpffs), sizes).map_err(|error| error.or_denied_by_selinux(selinux::enforced_type))
    }

    fn adopt(pins: Pins, sizes: TableSizes) -> Result<Self, DatapathError> {
        pins.create()?;
        predecessor::rename_pins(&pins)?;
        let repairs = RepairJournal::default();
        let mut programs = Programs::open(&pins, sizes)?;
        programs.hold_pins()?;
        let mut tables = Tables::open(&pins)?;
        tables.record_repairs(&repairs);
        tables.copy_from_predecessors(&pins, Entries::All)?;
        let next_hops = NextHops::open(&pins, &repairs)?;
        let pre_tc_devices = PreTcDevices::open(&pins, &repairs)?;
        Tables::write_crc_table(&pins)?;
        let hooks = Hooks::new(programs, pins, repairs.clone());
        Ok(Self {
            hooks,
            tables,
            next_hops,
            pre_tc_devices,
            writer: MappingWriter::new(repairs.clone()),
            has_predecessors: true,
            replies_awaited_until: None,
            moved_filters: BTreeSet::new(),
            known_sources: None,
            repairs,
        })
    }

    /// The ifindex of every device whose attached programs use the maps of a predecessor.
    ///
    /// # Errors
    ///
    /// If the pins cannot be listed.
    pub fn predecessor_devices(&self) -> Result<BTreeSet<u32>, DatapathError> {
        if self.has_predecessors { predecessor::devices(&self.hooks.pins) } else { Ok(BTreeSet::new()) }
    }

    /// Whether programs of predecessors still have to translate replies, so that [`Self::remove_predecessors`] would remove
    /// nothing.
    pub fn awaits_replies(&self, now: Instant) -> bool {
        self.has_predecessors && self.replies_awaited_until.is_some_and(|until| now < until)
    }

    /// Removes the programs and pins of agents of other ABI versions, in two steps. The first call detaches the programs
    /// that translate requests. The first call after the returned time detaches all other programs and removes the pins.
    /// Between these calls, the earlier programs translate replies to requests that they have translated. After a
    /// completed takeover, further calls have no effect.
    ///
    /// The agent calls this function only after it has written all mappings, and has attached its own programs to all
    /// devices that the earlier programs serve.
    ///
    /// # Errors
    ///
    /// If a pin or a filter cannot be removed. The next call tries to remove the remaining pins and filters.
    pub fn remove_predecessors(&mut self, now: Instant) -> Result<Takeover, DatapathError> {
        if !self.has_predecessors {
            return Ok(Takeover::Complete(Vec::new()));
        }
        let pins = &self.hooks.pins;
        let until = match self.replies_awaited_until {
            Some(until) => until,
            None => predecessor::take_requests(pins, &mut self.tables, now)?,
        };
        self.replies_awaited_until = Some(until);
        if self.awaits_replies(now) {
            return Ok(Takeover::AwaitsReplies { until });
        }
        let removed = predecessor::remove(pins)?;
        self.has_predecessors = false;
        Ok(Takeover::Complete(removed))
    }

    /// Removes the next hops that the plan does not contain with the same value. After the removal, the kernel stack
    /// forwards packets to the affected Pods.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn retain_next_hops(&mut self, plan: &DevicePlan) -> Result<(), DatapathError> {
        self.next_hops.retain(&plan.programs, &plan.next_hops)?;
        self.tables.begin_epoch()
    }

    /// Adds the next hops of a plan. The caller must already have attached the programs of the plan. Returns an error
    /// for each map that is full or cannot be written.
    pub fn add_next_hops(&mut self, plan: &DevicePlan) -> Vec<DatapathError> {
        let mut errors = self.next_hops.add(&plan.programs, &plan.next_hops);
        // A new epoch begins even if a next hop could not be added, because some next hops may have been added before
        // the error.
        errors.extend(self.tables.begin_epoch().err());
        errors
    }

    /// Attaches the XDP program to a device. If the function returns an error, no XDP program of NPL remains on the
    /// device, and the TC program translates the device's requests.
    ///
    /// # Errors
    ///
    /// If the kernel or the driver rejects the program.
    pub fn attach_xdp(&mut self, device: &Device) -> Result<(), DatapathError> {
        let mut devices = self.hooks.xdp_devices()?;
        devices.insert(device.ifindex);
        self.write_pre_tc_devices(&devices)?;
        let attached = self.hooks.attach_xdp(device);
        if attached.is_err() {
            self.write_pre_tc_devices(&self.hooks.xdp_devices()?)?;
        }
        attached
    }

    /// Attaches a program to a hook of a device, ahead of the programs of other ABI versions. If an earlier agent has
    /// attached a program to this hook, replaces that program without an interruption of translation.
    ///
    /// # Errors
    ///
    /// If the kernel rejects the attachment, or an `ingress` qdisc occupies the handle of clsact.
    pub fn attach(
        &mut self,
        device: &Device,
        direction: Direction,
        program: &'static str,
    ) -> Result<(), DatapathError> {
        let hook = (device.ifindex, direction);
        let may_be_behind = self.has_predecessors
            && !self.moved_filters.contains(&hook)
            && self.hooks.may_be_behind_predecessor(device.ifindex, direction)?;
        self.hooks.attach(device, direction, program)?;
        if may_be_behind {
            self.move_to_head(device, direction, program)?;
            self.moved_filters.insert(hook);
        }
        Ok(())
    }

    /// Moves NPL's filter of a hook ahead of all other filters, without an interruption of translation: see
    /// [`Hooks::move_to_head`].
    ///
    /// During the move, two filters of NPL run on some packets. The filter that runs later would treat a translated
    /// datagram as a datagram of a direct connection (from a client to a Pod, without a mapping), and remove the
    /// conntrack entry. To prevent this, the device is added to the map of devices whose packets may already be
    /// translated when the TC program runs. The next call of [`Self::retain_xdp`] removes the device from the map.
    ///
    /// # Errors
    ///
    /// If the kernel rejects the filter.
    pub fn move_to_head(
        &mut self,
        device: &Device,
        direction: Direction,
        program: &'static str,
    ) -> Result<(), DatapathError> {
        let mut devices = self.hooks.xdp_devices()?;
        devices.insert(device.ifindex);
        self.write_pre_tc_devices(&devices)?;
        self.hooks.move_to_head(device, direction, program)
    }

    /// Detaches the XDP program from all devices except the devices with these ifindexes. Returns an error for each
    /// device from which the XDP program could not be detached.
    pub fn retain_xdp(&mut self, devices: &BTreeSet<u32>) -> Vec<DatapathError> {
        let mut errors = self.hooks.retain_xdp(devices);
        errors.extend(self.hooks.xdp_devices().and_then(|devices| self.write_pre_tc_devices(&devices)).err());
        errors
    }

    /// Writes the ifindexes of devices whose packets may already be translated when the TC program runs. The XDP
    /// program translates these packets or, while NPL's filter is moved, the temporary filter does. The TC programs of
    /// these devices must not record a translated request as a direct connection. The XDP program records direct
    /// connections itself.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn write_pre_tc_devices(&mut self, devices: &BTreeSet<u32>) -> Result<(), DatapathError> {
        self.pre_tc_devices.write(devices, &mut self.tables)
    }

    /// Creates missing directories and pins of maps and programs again. Restores the elements of arrays that other
    /// software has changed: the configuration, the slow-path programs and the `CRC32c` table.
    ///
    /// # Errors
    ///
    /// If another map is pinned in place of a map that this agent uses: the next agent and `npl-agent status` would
    /// open the pinned map, but the attached programs use the original map. Also if the directory of all pins was
    /// removed: this directory is the lock of the agent, so another agent may have taken over.
    pub fn check_pins(&mut self) -> Result<(), DatapathError> {
        let pins = &self.hooks.pins;
        if !pins.root().is_dir() {
            return Err(DatapathError::PinLost(pins.root().to_owned()));
        }
        pins.create()?;
        self.hooks.programs.restore_pins(&self.repairs)?;
        self.hooks.programs.check_maps()?;
        self.hooks.programs.restore_slow_paths(&self.repairs)?;
        self.tables.repair_config()?;
        self.tables.repair_crc_table(&self.hooks.pins)
    }

    /// The next hop of each Pod whose packets are redirected.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn redirected(&self) -> Result<BTreeMap<IpAddr, PodNextHop>, DatapathError> {
        self.next_hops.pods()
    }

    /// The Pod addresses of all mappings, according to the last call of [`Self::mappings`] and the writes since then.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.writer.pod_addresses()
    }

    /// Reads every mapping from the kernel, and corrects endpoints that do not match the mappings.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn mappings(&mut self) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        self.writer.refresh(&mut self.tables)
    }

    /// Writes mappings. A mapping atomically replaces an existing mapping with the same frontend. Returns an error for
    /// each mapping that could not be written: the kernel rejected it, or its backend is not of the frontend's IP
    /// family.
    pub fn upsert_mappings(&mut self, wanted: &BTreeMap<Frontend, Backend>) -> BTreeMap<Frontend, DatapathError> {
        self.writer.upsert_all(&mut self.tables, wanted)
    }

    /// Writes one mapping, as [`Self::upsert_mappings`] does.
    ///
    /// # Errors
    ///
    /// If the map cannot be written, or if the backend is not of the frontend's IP family.
    pub fn upsert_mapping(&mut self, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        self.upsert_mappings(&BTreeMap::from([(frontend, backend)])).remove(&frontend).map_or(Ok(()), Err)
    }

    /// Makes the kernel programs pass the packets of these connections to the host unchanged, even if a mapping matches
    /// the packets, because other software translates these connections.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn leave_to_host(&self, connections: &[TranslatedConnection]) -> Result<(), DatapathError> {
        host_connections::record(&self.hooks.pins, connections, self.tables.config()?.seed)
    }

    /// Removes a mapping. Removing an absent mapping is not an error.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        self.writer.remove(&mut self.tables, frontend)
    }

    /// The remaining time without packets after which a node port without a mapping counts as unused; `None` if the
    /// port already counts as unused. A packet of any protocol and of either IP family restarts the time. The result is
    /// approximate: at most 1 s too long, and at most 9 s too short.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn time_until_quiet(&self, frontend: Frontend) -> Result<Option<Duration>, DatapathError> {
        self.tables.time_until_quiet(frontend)
    }

    /// For each node port of a range, the time since the last removal of a mapping of the port, or since the last
    /// packet to the port while it had no mapping, whichever is shorter. The times are rounded down. Ports for which
    /// neither is recorded are left out. The recorded times outlive the agent, but not a reboot of the Node.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn unmapped_ages(&self, range: PortRange) -> Result<BTreeMap<NodePort, Duration>, DatapathError> {
        self.tables.unmapped_ages(range)
    }

    /// The allowed sources of every frontend, as read from the kernel. Records the allowed sources that other software
    /// has changed as repairs: the core plans the ops that restore them. A frontend may have allowed sources although its
    /// mapping does not restrict sources.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn sources(&mut self) -> Result<BTreeMap<Frontend, BTreeSet<SourceRange>>, DatapathError> {
        let found = self.tables.sources()?;
        if let Some(known) = self.known_sources.replace(found.clone()) {
            self.repairs.record_changes(&known, &found, |frontend| format!("allowed sources of {frontend}"));
        }
        Ok(found)
    }

    /// Adds allowed sources to a frontend, and keeps the frontend's existing allowed sources.
    ///
    /// # Errors
    ///
    /// If the map is full or cannot be written. Some of the sources may have been added before the error.
    pub fn allow_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        let written = ranges.iter().try_for_each(|range| maps.allow_source(frontend, *range));
        self.known_sources = self.known_sources.take().filter(|_| written.is_ok());
        if let Some(known) = &mut self.known_sources {
            known.entry(frontend).or_default().extend(ranges);
        }
        written
    }

    /// Removes allowed sources of a frontend. Removing an absent source is not an error.
    ///
    /// # Errors
    ///
    /// If the map cannot be written. Some of the sources may have been removed before the error.
    pub fn forget_sources(&mut self, frontend: Frontend, ranges: &BTreeSet<SourceRange>) -> Result<(), DatapathError> {
        let maps = self.tables.family_mut(frontend.family);
        let removed = ranges.iter().try_for_each(|range| maps.remove_source(frontend, *range));
        self.known_sources = self.known_sources.take().filter(|_| removed.is_ok());
        if let Some(known) = &mut self.known_sources {
            if let Some(left) = known.get_mut(&frontend) {
                left.retain(|range| !ranges.contains(range));
            }
            known.retain(|_, left| !left.is_empty());
        }
        removed
    }

    /// Removes the conntrack entries of Pod endpoints that were removed since the last call. Returns the numbers of
    /// removed entries for IPv4 and for IPv6.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn purge_flows(&mut self) -> Result<[usize; 2], DatapathError> {
        self.writer.purge_flows(&mut self.tables)
    }

    /// Writes the port range to the configuration of the programs. The written range is `range`, extended to the ports
    /// of existing mappings outside of `range`, because these mappings may still drain. Calls `seed` only if the
    /// configuration contains no seed of this ABI version.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn configure(&mut self, range: PortRange, seed: impl FnOnce() -> u64) -> Result<(), DatapathError> {
        let old = self.tables.config()?;
        let (mut port_min, mut port_max) = (range.start().0, range.end().0);
        for frontend in self.tables.entries()?.into_keys() {
            port_min = port_min.min(frontend.node_port.0);
            port_max = port_max.max(frontend.node_port.0);
        }
        // An earlier agent whose version has no lookup cache may have changed mappings without invalidating the cached
        // lookups of these mappings.
        self.tables.clear_lookup_cache()?;
        // The seed is part of the hash of half-open entries, so the seed must survive a restart of the agent.
        let seed = if old.abi == ABI_VERSION { old.seed } else { seed() };
        let config = Config { seed, port_min, port_max, abi: ABI_VERSION, ..old };
        self.tables.set_config(config.without_udp_mappings(false))?;
        // If a flag in the configuration is set, the TC programs look up a packet's device in the map
        // `npl_pre_tc_devs`, to find out whether XDP may have translated the packet. The flag and the map must match
        // the XDP links that an earlier agent has left attached.
        self.write_pre_tc_devices(&self.hooks.xdp_devices()?)?;
        // If an earlier agent was killed after it had removed an address or endpoint, but before it had started a new
        // epoch, cached lookups may still contain the address or endpoint.
        self.tables.begin_epoch()
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Typed access to the maps. The agent and commands such as `npl-agent status` open the same pinned maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use npl_common::{
    config::Config,
    crc,
    flow::tcp_flag,
    fragment, names,
    reason::Reason,
    stats::{COUNTED_MAPPINGS, MappingStats, SHARED_V4, SHARED_V6},
    unmapped,
};

use super::{
    error::DatapathError,
    family::{Entry, FamilyMaps, FlowTableFill, Maps, SweptFlows},
    layout::{V4, V6},
    pins::Pins,
    sys,
};
use crate::core::{
    flows::half_open::HalfOpenExpiry,
    model::{
        Backend, Family, Frontend, NodePort, Protocol,
        settings::PortRange,
        sources::{SourceRange, Sources},
    },
    repairs::{RepairJournal, RepairedObject},
    service_traffic::CounterSample,
};

/// The maps with the configuration of the programs, the counters, and, per IP family, mappings, allowed sources,
/// conntrack entries and node addresses.
pub struct Tables {
    config: Array<MapData, Config>,
    v4: Maps<V4>,
    v6: Maps<V6>,
    stats: PerCpuArray<MapData, MappingStats>,
    reason: PerCpuArray<MapData, u64>,
    /// The configuration that this process has written last; `None` before the first write.
    written_config: Option<Config>,
    /// The node addresses and indexes that this process has written or adopted, of IPv4 and IPv6; `None` before the
    /// first write.
    pub(super) written_addresses: [Option<BTreeMap<IpAddr, u32>>; 2],
    pub(super) repairs: RepairJournal,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}

/// A mapping in the kernel, with its counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappingRecord {
    /// Node port, protocol and IP family.
    pub frontend: Frontend,
    /// The Pod address and Pod port to which the programs translate the destination.
    pub backend: Backend,
    /// The sources that may use the mapping.
    pub sources: Sources,
    /// The counters of the mapping, summed over CPUs.
    pub stats: MappingStats,
}

/// An entry of one of NPL's flow tables: a UDP flow, or a connection whose handshake is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowRecord {
    /// The transport protocol of the flow.
    pub protocol: Protocol,
    /// The client's address and port.
    pub client: SocketAddr,
    /// The node address and node port that the client uses.
    pub nat: SocketAddr,
    /// The Pod's address and port.
    pub pod: SocketAddr,
    /// The time at which a packet last refreshed the entry, by the kernel's monotonic clock. This time is at most 256
    /// jiffies before the time of the flow's last packet.
    pub last_seen: Duration,
    /// All TCP flags that the client has sent so far. SCTP chunks count as the TCP flags with the same meaning.
    pub client_tcp_flags: u8,
    /// All TCP flags that the Pod has sent so far. SCTP chunks count as the TCP flags with the same meaning.
    pub pod_tcp_flags: u8,
}

impl FlowRecord {
    /// The frontend of the flow's mapping.
    pub fn frontend(&self) -> Frontend {
        let family = Family::of(self.nat.ip());
        Frontend { family, node_port: NodePort(self.nat.port()), protocol: self.protocol }
    }

    /// The state of the connection, as text for the tables that commands print. A UDP flow is always `established`,
    /// because UDP has no flags that end a flow.
    pub const fn state(&self) -> &'static str {
        let (client, pod) = (self.client_tcp_flags, self.pod_tcp_flags);
        if (client | pod) & tcp_flag::RST != 0 {
            "reset"
        } else if client & pod & tcp_flag::FIN != 0 {
            "closed"
        } else if (client | pod) & tcp_flag::FIN != 0 {
            "closing"
        } else {
            "established"
        }
    }
}

impl Tables {
    /// Opens the pinned maps of mappings, conntrack entries, node addresses and counters.
    ///
    /// # Errors
    ///
    /// If a map is not pinned, or if its type is not the expected type.
    pub fn open(pins: &Pins) -> Result<Self, DatapathError> {
        Ok(Self {
            config: open(pins, names::MAP_CONFIG)?,
            v4: Maps::open(pins)?,
            v6: Maps::open(pins)?,
            stats: open(pins, names::MAP_STATS)?,
            reason: open(pins, names::MAP_REASON)?,
            written_config: None,
            written_addresses: [None, None],
            repairs: RepairJournal::default(),
        })
    }

    /// Records repairs in `repairs` from now on.
    pub(super) fn record_repairs(&mut self, repairs: &RepairJournal) {
        self.repairs = repairs.clone();
    }

    /// Writes the `CRC32c` table, which the programs use to update SCTP checksums.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn write_crc_table(pins: &Pins) -> Result<(), DatapathError> {
        let mut map: Array<MapData, u32> = open(pins, names::MAP_CRC)?;
        let mut elements = (0..).zip(crc::TABLE);
        elements
            .try_for_each(|(index, element)| map.set(index, element, 0))
            .map_err(DatapathError::map("write", names::MAP_CRC))
    }

    /// Restores the elements of the `CRC32c` table that other software has changed.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn repair_crc_table(&self, pins: &Pins) -> Result<(), DatapathError> {
        let mut map: Array<MapData, u32> = open(pins, names::MAP_CRC)?;
        for (index, element) in (0..).zip(crc::TABLE) {
            if map.get(&index, 0).map_err(DatapathError::map("read", names::MAP_CRC))? != element {
                map.set(index, element, 0).map_err(DatapathError::map("write", names::MAP_CRC))?;
                self.repairs.record(RepairedObject::MapEntry, names::MAP_CRC);
            }
        }
        Ok(())
    }

    /// The maps of an IP family.
    pub(super) fn family(&self, family: Family) -> &dyn FamilyMaps {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The maps of an IP family, for operations that write.
    pub(super) fn family_mut(&mut self, family: Family) -> &mut dyn FamilyMaps {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    /// The configuration of the programs; all zero until an agent has written it.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn config(&self) -> Result<Config, DatapathError> {
        self.config.get(&0, 0).map_err(DatapathError::map("read", names::MAP_CONFIG))
    }

    pub(super) fn set_config(&mut self, config: Config) -> Result<(), DatapathError> {
        self.config.set(0, config, 0).map_err(DatapathError::map("write", names::MAP_CONFIG))?;
        self.written_config = Some(config);
        Ok(())
    }

    /// The configuration that the next write changes. If other software has changed the configuration, restores the
    /// configuration that this process has written.
    fn own_config(&mut self) -> Result<Config, DatapathError> {
        let found = self.config()?;
        let Some(own) = self.written_config.filter(|own| *own != found) else { return Ok(found) };
        // The restored configuration has a new epoch, because programs may have cached lookups in the present epoch.
        let epoch = own.epoch.max(found.epoch).wrapping_add(1);
        let restored = Config { epoch, ..own };
        self.set_config(restored)?;
        self.repairs.record(RepairedObject::MapEntry, names::MAP_CONFIG);
        Ok(restored)
    }

    /// Restores the configuration if other software has changed it.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn repair_config(&mut self) -> Result<(), DatapathError> {
        self.own_config().map(drop)
    }

    /// Applies `change` to the configuration, and writes the result unless it equals the present configuration.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn change_config(&mut self, change: impl FnOnce(Config) -> Config) -> Result<(), DatapathError> {
        let old = self.own_config()?;
        let new = change(old);
        if new == old { Ok(()) } else { self.set_config(new) }
    }

    /// Writes whether no program after NPL's egress program masquerades: see
    /// [`FLAG_FINAL_SOURCES`](npl_common::config::FLAG_FINAL_SOURCES).
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn set_final_sources(&mut self, are_final: bool) -> Result<(), DatapathError> {
        self.change_config(|config| config.with_final_sources(are_final))
    }

    /// Writes whether no mapping has the protocol UDP: see
    /// [`FLAG_NO_UDP_MAPPINGS`](npl_common::config::FLAG_NO_UDP_MAPPINGS).
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn set_no_udp_mappings(&mut self, are_absent: bool) -> Result<(), DatapathError> {
        self.change_config(|config| config.without_udp_mappings(are_absent))
    }

    /// Starts a new epoch, which invalidates all lookups that the programs have cached. The agent calls this function
    /// after each change of mappings, endpoints and next hops, and after each removal of node addresses.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn begin_epoch(&mut self) -> Result<(), DatapathError> {
        // The fences ensure that all CPUs see the preceding change before the new epoch, and the new epoch before the
        // next change. System calls alone do not guarantee this order.
        fence(Ordering::SeqCst);
        let old = self.own_config()?;
        let written = self.set_config(Config { epoch: old.epoch.wrapping_add(1), ..old });
        fence(Ordering::SeqCst);
        written
    }

    /// Clears the lookup cache, including entries of the current epoch.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub(super) fn clear_lookup_cache(&mut self) -> Result<(), DatapathError> {
        Family::ALL.into_iter().try_for_each(|family| self.family_mut(family).clear_lookup_cache())
    }

    /// Returns every mapping with its allowed sources and counters, ordered by family, node port and protocol.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn records(&self) -> Result<Vec<MappingRecord>, DatapathError> {
        let mut sources = self.sources()?;
        let record = |(frontend, Entry { backend, stats_index })| {
            let sources = Sources::of(backend, sources.remove(&frontend).unwrap_or_default());
            Ok(MappingRecord { frontend, backend, sources, stats: self.stats_of(stats_index)? })
        };
        self.entries()?.into_iter().map(record).collect()
    }

    /// The allowed sources of every frontend that has allowed sources.
    pub(super) fn sources(&self) -> Result<BTreeMap<Frontend, BTreeSet<SourceRange>>, DatapathError> {
        let mut sources: BTreeMap<Frontend, BTreeSet<SourceRange>> = BTreeMap::new();
        for family in Family::ALL {
            for (frontend, range) in self.family(family).sources()? {
                sources.entry(frontend).or_default().insert(range);
            }
        }
        Ok(sources)
    }

    /// Every mapping in the kernel.
    pub(super) fn entries(&self) -> Result<BTreeMap<Frontend, Entry>, DatapathError> {
        let mut entries = BTreeMap::new();
        for family in Family::ALL {
            entries.extend(self.family(family).mappings()?);
        }
        Ok(entries)
    }

    /// Every entry of NPL's flow tables of both IP families.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn flows(&self) -> Result<Vec<FlowRecord>, DatapathError> {
        Ok([self.family(Family::V4).flows()?, self.family(Family::V6).flows()?].concat())
    }

    /// The maximum number of flows of each flow table of an IP family, in the order of [`Protocol::ALL`].
    pub fn flow_capacities(&self, family: Family) -> [usize; 3] {
        self.family(family).flow_capacities()
    }

    /// The number of socket reverse NAT entries of an IP family, and the maximum number of these entries.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn socket_rnat_fill(&self, family: Family) -> Result<(usize, usize), DatapathError> {
        self.family(family).socket_rnat_fill()
    }

    /// The name and fill level of each flow table of an IP family, in the order of [`Protocol::ALL`].
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn flow_tables(&self, family: Family) -> Result<[FlowTableFill; 3], DatapathError> {
        self.family(family).flow_tables()
    }

    /// The number of entries in NPL's flow tables of both IP families together.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn flow_count(&self) -> Result<usize, DatapathError> {
        let tables = [self.flow_tables(Family::V4)?, self.flow_tables(Family::V6)?];
        Ok(tables.iter().flatten().map(|table| table.used).sum())
    }

    /// Removes the flow tables' entries that have expired at `now`, a time of the kernel's monotonic clock. Returns the
    /// number of removed entries, and passes the result for each family to `report`.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn remove_expired_flows(
        &mut self,
        now: Duration,
        mut report: impl FnMut(Family, SweptFlows),
    ) -> Result<usize, DatapathError> {
        let (mut removed, seed) = (0, self.config()?.seed);
        for family in Family::ALL {
            let swept = self.family_mut(family).remove_expired_flows(now, seed)?;
            report(family, swept);
            removed += swept.removed;
        }
        Ok(removed)
    }

    /// Removes expired half-open entries and returns their number. `expiry` contains the observations of earlier calls,
    /// for IPv4 and IPv6.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn remove_expired_half_open(&mut self, expiry: &mut [HalfOpenExpiry; 2]) -> Result<usize, DatapathError> {
        let families = Family::ALL.into_iter().zip(expiry);
        families.map(|(family, it)| self.family_mut(family).remove_expired_half_open(it)).sum()
    }

    /// Time until a node port without a mapping counts as unused: see [`super::Datapath::time_until_quiet`].
    pub(super) fn time_until_quiet(&self, frontend: Frontend) -> Result<Option<Duration>, DatapathError> {
        let last = self.last_unmapped(frontend.node_port)?;
        Ok(unmapped::silence(last, kernel_time()).map(|silence| Duration::from_secs(1 + unmapped::LIFETIME - silence)))
    }

    /// For each node port of a range, the time since the port last lost a mapping, or received a packet while it had no
    /// mapping: see [`super::Datapath::unmapped_ages`].
    pub(super) fn unmapped_ages(&self, range: PortRange) -> Result<BTreeMap<NodePort, Duration>, DatapathError> {
        let now = kernel_time();
        let mut ages = BTreeMap::new();
        for node_port in (range.start().0..=range.end().0).map(NodePort) {
            let age = unmapped::least_age(self.last_unmapped(node_port)?, now);
            ages.extend(age.map(|nanoseconds| (node_port, Duration::from_nanos(nanoseconds))));
        }
        Ok(ages)
    }

    /// The time of the last packet to the node port while it had no mapping, or of the last removal of a mapping of the
    /// port, whichever is later. Packets of all protocols and of both IP families count.
    fn last_unmapped(&self, node_port: NodePort) -> Result<u64, DatapathError> {
        let mut times = Family::ALL.into_iter().map(|family| self.family(family).last_unmapped(node_port));
        times.try_fold(0, |last, time| Ok(time?.max(last)))
    }

    /// Records the current time as the time of the last packet to the node port while it had no mapping. The agent
    /// calls this function before it removes a mapping, because clients and load balancers may still send packets to
    /// the port. The recorded time outlives a restart of the agent.
    pub(super) fn record_unmapped_traffic(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        self.family_mut(frontend.family).set_last_unmapped(frontend.node_port, kernel_time())
    }

    /// For each [`Reason`], the number of packets that the programs counted, summed over CPUs.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn reasons(&self) -> Result<Vec<(Reason, u64)>, DatapathError> {
        let read = |reason: &Reason| {
            let values =
                self.reason.get(&(*reason as u32), 0).map_err(DatapathError::map("read", names::MAP_REASON))?;
            Ok((*reason, values.iter().copied().fold(0, u64::saturating_add)))
        };
        Reason::ALL.iter().map(read).collect()
    }

    /// The counters of one mapping, summed over CPUs.
    fn stats_of(&self, index: u32) -> Result<MappingStats, DatapathError> {
        let values = self.stats.get(&index, 0).map_err(DatapathError::map("read", names::MAP_STATS))?;
        Ok(values.iter().fold(MappingStats::ZERO, |sum, one| plus(&sum, one)))
    }

    /// The traffic of all mappings of an IP family, including removed mappings.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn totals(&self, family: Family) -> Result<MappingStats, DatapathError> {
        self.read_counters_of(family).map(|sample| sample.total)
    }

    /// Reads the counters of all mappings of both IP families.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn read_counters(&self) -> Result<CounterSample, DatapathError> {
        let [mut both, v6] = [self.read_counters_of(Family::V4)?, self.read_counters_of(Family::V6)?];
        both.mappings.extend(v6.mappings);
        Ok(CounterSample { total: plus(&both.total, &v6.total), ..both })
    }

    /// Reads the counters of all mappings of an IP family. Counters that several mappings share count once in the
    /// total.
    fn read_counters_of(&self, family: Family) -> Result<CounterSample, DatapathError> {
        let mut sample = CounterSample { mappings: BTreeMap::new(), total: self.stats_of(shared_stats(family))? };
        let mut counted = BTreeSet::new();
        for (frontend, Entry { stats_index, .. }) in self.family(family).mappings()? {
            // All other mappings use the shared counters.
            if stats_index < COUNTED_MAPPINGS {
                let stats = self.stats_of(stats_index)?;
                if counted.insert(stats_index) {
                    sample.total = plus(&sample.total, &stats);
                }
                sample.mappings.insert(frontend, stats);
            }
        }
        Ok(sample)
    }

    /// Resets the counters with this index, and adds their values to the counters that the family's mappings share.
    pub(super) fn move_stats_to_shared(&mut self, index: u32, family: Family) -> Result<(), DatapathError> {
        let counts = self.stats_of(index)?;
        if counts == MappingStats::ZERO || index >= COUNTED_MAPPINGS {
            return Ok(());
        }
        let shared = shared_stats(family);
        let sum = plus(&self.stats_of(shared)?, &counts);
        self.set_stats(index, MappingStats::ZERO)?;
        self.set_stats(shared, sum)
    }

    /// Sets the counters of a mapping: to `value` for the first CPU, and to zero for all other CPUs.
    fn set_stats(&mut self, index: u32, value: MappingStats) -> Result<(), DatapathError> {
        let per_cpu = aya::util::nr_cpus().map_err(|(_, source)| source).and_then(|cpus| {
            let mut values = vec![MappingStats::ZERO; cpus];
            if let Some(first) = values.first_mut() {
                *first = value;
            }
            PerCpuValues::try_from(values)
        });
        let result = per_cpu.map_err(MapError::from).and_then(|values| self.stats.set(index, values, 0));
        result.map_err(DatapathError::map("write", names::MAP_STATS))
    }
}

/// The index of the counters to which the counts of a family's removed mappings are added. A mapping for which no
/// counters were free also uses these counters.
pub(super) const fn shared_stats(family: Family) -> u32 {
    match family {
        Family::V4 => SHARED_V4,
        Family::V6 => SHARED_V6,
    }
}

/// The current time in the unit of [`npl_common::fragment::time`], in which the programs store timestamps.
pub(super) fn kernel_time() -> u64 {
    fragment::time(u64::try_from(sys::now().as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the sums of two mappings' counters. A pinned map may contain any number, for example after a fault, so a sum
/// that is too large becomes the largest number, and does not stop the agent.
pub(super) const fn plus(a: &MappingStats, b: &MappingStats) -> MappingStats {
    MappingStats {
        request_packets: a.request_packets.saturating_add(b.request_packets),
        request_bytes: a.request_bytes.saturating_add(b.request_bytes),
        reply_packets: a.reply_packets.saturating_add(b.reply_packets),
        reply_bytes: a.reply_bytes.saturating_add(b.reply_bytes),
        new_flows: a.new_flows.saturating_add(b.new_flows),
        established_flows: a.established_flows.saturating_add(b.established_flows),
    }
}

/// Opens the pinned map `name`.
pub(super) fn open<T: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &'static str) -> Result<T, DatapathError> {
    let map = MapData::from_pin(pins.map(name)).and_then(Map::from_map_data).and_then(T::try_from);
    map.map_err(|source| DatapathError::OpenMap { name, source })
}

/// Returns success if the error means that the element to remove does not exist.
pub(super) fn tolerate_missing(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use npl_common::stats::MappingStats;

    use super::plus;

    #[test]
    fn the_sum_of_counters_that_is_too_large_is_the_largest_number() {
        let most = MappingStats { request_bytes: u64::MAX, new_flows: 7, ..MappingStats::ZERO };
        let one = MappingStats { request_bytes: 1, new_flows: 1, ..MappingStats::ZERO };
        assert_eq!(plus(&most, &one), MappingStats { request_bytes: u64::MAX, new_flows: 8, ..MappingStats::ZERO });
    }
}

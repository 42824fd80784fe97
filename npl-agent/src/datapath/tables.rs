// SPDX-License-Identifier: Apache-2.0
//! The maps, typed. Opened by their pins, so that the agent and the commands that only look see the same thing.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use npl_common::{
    config::Config,
    crc, fragment,
    mapping::MAX_LOCAL_ADDRESSES,
    names,
    reason::Reason,
    stats::{COUNTED_MAPPINGS, MappingStats, SHARED_V4, SHARED_V6},
    unmapped,
};

use super::{
    error::DatapathError,
    family::{Entry, FamilyMaps, Maps},
    layout::{V4, V6},
    pins::Pins,
    sys,
};
use crate::core::{
    flows::half_open::HalfOpenExpiry,
    model::{
        Backend, Family, Frontend, Protocol,
        sources::{SourceRange, Sources},
    },
};

/// All maps of the datapath.
pub struct Tables {
    config: Array<MapData, Config>,
    v4: Maps<V4>,
    v6: Maps<V6>,
    stats: PerCpuArray<MapData, MappingStats>,
    reason: PerCpuArray<MapData, u64>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}

/// A mapping as the kernel holds it, with what it has carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappingRecord {
    /// Where clients send to.
    pub frontend: Frontend,
    /// Where it leads.
    pub backend: Backend,
    /// Who may use it.
    pub sources: Sources,
    /// Summed over processors.
    pub stats: MappingStats,
}

impl Tables {
    /// Opens every map by its pin.
    ///
    /// # Errors
    ///
    /// If one is not there or not of its type.
    pub fn open(pins: &Pins) -> Result<Self, DatapathError> {
        Ok(Self {
            config: open(pins, names::MAP_CONFIG)?,
            v4: Maps::open(pins)?,
            v6: Maps::open(pins)?,
            stats: open(pins, names::MAP_STATS)?,
            reason: open(pins, names::MAP_REASON)?,
        })
    }

    /// Writes what SCTP's checksum is changed by.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn write_crc_table(pins: &Pins) -> Result<(), DatapathError> {
        let mut map: Array<MapData, u32> = open(pins, names::MAP_CRC)?;
        let mut elements = (0..).zip(crc::TABLE);
        elements
            .try_for_each(|(index, element)| map.set(index, element, 0))
            .map_err(DatapathError::map("write", names::MAP_CRC))
    }

    /// The maps of a family.
    pub(super) fn family(&self, family: Family) -> &dyn FamilyMaps {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The maps of a family, to be written.
    pub(super) fn family_mut(&mut self, family: Family) -> &mut dyn FamilyMaps {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    /// The configuration; all zero before the first agent has written it.
    pub fn config(&self) -> Result<Config, DatapathError> {
        self.config.get(&0, 0).map_err(DatapathError::map("read", names::MAP_CONFIG))
    }

    pub(super) fn set_config(&mut self, config: Config) -> Result<(), DatapathError> {
        self.config.set(0, config, 0).map_err(DatapathError::map("write", names::MAP_CONFIG))
    }

    /// Has the programs heed these `FLAG_*` and no others.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn set_flags(&mut self, flags: u32) -> Result<(), DatapathError> {
        let old = self.config()?;
        if old.flags == flags { Ok(()) } else { self.set_config(Config { flags, ..old }) }
    }

    /// From now on, programs look mappings up that they have hints of, since one has changed: not before it has, and before
    /// anything else does.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn begin_epoch(&mut self) -> Result<(), DatapathError> {
        // No other processor sees what two calls write in another order; calls by themselves promise none.
        fence(Ordering::SeqCst);
        let old = self.config()?;
        let begun = self.set_config(Config { epoch: old.epoch.wrapping_add(1), ..old });
        fence(Ordering::SeqCst);
        begun
    }

    /// Takes all hints out, whatever epoch they are of.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn clear_lookup_cache(&mut self) -> Result<(), DatapathError> {
        Family::ALL.into_iter().try_for_each(|family| self.family_mut(family).clear_lookup_cache())
    }

    /// Every mapping with its counters.
    pub fn records(&self) -> Result<Vec<MappingRecord>, DatapathError> {
        let mut sources = self.sources()?;
        let record = |(frontend, Entry { backend, stats_index })| {
            let sources = Sources::of(backend, sources.remove(&frontend).unwrap_or_default());
            Ok(MappingRecord { frontend, backend, sources, stats: self.stats_of(stats_index)? })
        };
        self.entries()?.into_iter().map(record).collect()
    }

    /// The allowed sources of every frontend that has any.
    pub(super) fn sources(&self) -> Result<BTreeMap<Frontend, BTreeSet<SourceRange>>, DatapathError> {
        let mut sources: BTreeMap<Frontend, BTreeSet<SourceRange>> = BTreeMap::new();
        for family in Family::ALL {
            for (frontend, range) in self.family(family).sources()? {
                sources.entry(frontend).or_default().insert(range);
            }
        }
        Ok(sources)
    }

    /// Every mapping as the kernel has it.
    pub(super) fn entries(&self) -> Result<BTreeMap<Frontend, Entry>, DatapathError> {
        let mut entries = BTreeMap::new();
        for family in Family::ALL {
            entries.extend(self.family(family).mappings()?);
        }
        Ok(entries)
    }

    /// Flows that completed an exchange and are remembered now.
    pub fn flow_count(&self) -> Result<usize, DatapathError> {
        Family::ALL.into_iter().map(|family| self.family(family).flow_count()).sum()
    }

    /// Forgets the flows that nothing more is to come of at this time of the kernel's clock, and says how many.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove_expired_flows(&mut self, now: Duration) -> Result<usize, DatapathError> {
        Family::ALL.into_iter().map(|family| self.family_mut(family).remove_expired_flows(now)).sum()
    }

    /// Forgets attempts to open flows that nothing has come of, and says how many; `attempts` of each family are what the looks
    /// before have found.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove_expired_half_open(&mut self, expiry: &mut [HalfOpenExpiry; 2]) -> Result<usize, DatapathError> {
        let families = Family::ALL.into_iter().zip(expiry);
        families.map(|(family, it)| self.family_mut(family).remove_expired_half_open(it)).sum()
    }

    /// As [`super::Datapath::time_until_quiet`].
    pub(super) fn time_until_quiet(&self, frontend: Frontend) -> Result<Option<Duration>, DatapathError> {
        let last = self.family(frontend.family).last_unmapped(frontend.node_port)?;
        Ok(unmapped::silence(last, kernel_time()).map(|silence| Duration::from_secs(1 + unmapped::LIFETIME - silence)))
    }

    /// Takes note that datagrams may come to a node port for a mapping that was there until now.
    pub(super) fn note_unmapped_traffic(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        if frontend.protocol != Protocol::Udp {
            return Ok(());
        }
        self.family_mut(frontend.family).set_last_unmapped(frontend.node_port, kernel_time())
    }

    /// The addresses that count as the Node's.
    pub fn local_addresses(&self) -> Result<BTreeSet<IpAddr>, DatapathError> {
        let mut addresses = BTreeSet::new();
        for family in Family::ALL {
            addresses.extend(self.family(family).local_addresses()?.into_keys());
        }
        Ok(addresses)
    }

    /// Makes exactly these the Node's addresses, the more important first; those that do not fit are returned.
    ///
    /// An address keeps its index for as long as it is there, and a freed index is cleared, so that a half-open flow
    /// never gets another address's reply.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn set_local_addresses(&mut self, wanted: &[IpAddr]) -> Result<Vec<IpAddr>, DatapathError> {
        let mut left_out = Vec::new();
        for family in Family::ALL {
            let mut of_family: Vec<IpAddr> =
                wanted.iter().copied().filter(|addr| Family::of(*addr) == family).collect();
            left_out.extend(of_family.split_off(of_family.len().min(MAX_LOCAL_ADDRESSES as usize)));
            self.set_addresses_of(family, &of_family)?;
        }
        Ok(left_out)
    }

    fn set_addresses_of(&mut self, family: Family, wanted: &[IpAddr]) -> Result<(), DatapathError> {
        let mut present = self.family(family).local_addresses()?;
        let gone: Vec<_> = present.keys().filter(|addr| !wanted.contains(addr)).copied().collect();
        let primary = IpAddr::from(self.config()?.primary_v4);
        if gone.contains(&primary) {
            self.set_primary((Ipv4Addr::UNSPECIFIED, 0))?;
        }
        let has_free_indexes = !gone.is_empty();
        for addr in gone {
            if let Some(index) = present.remove(&addr) {
                self.family_mut(family).remove_local_address(addr, index)?;
            }
        }
        if has_free_indexes {
            // Hints of replies name addresses by what another one may have now.
            self.begin_epoch()?;
        }
        if wanted.iter().any(|addr| !present.contains_key(addr)) {
            // So may flows in the half-open cache, which believe themselves established by it.
            self.family_mut(family).forget_indexes_but(&present.values().copied().collect())?;
        }
        for addr in wanted {
            if !present.contains_key(addr) {
                let used = present.values().copied().collect();
                present.extend(self.family_mut(family).add_local_address(*addr, &used)?.map(|index| (*addr, index)));
            }
        }
        let first = wanted.first().and_then(|addr| Some((*addr, *present.get(addr)?)));
        match first {
            Some((IpAddr::V4(addr), index)) => self.set_primary((addr, index)),
            None if family == Family::V4 => self.set_primary((Ipv4Addr::UNSPECIFIED, 0)),
            _ => Ok(()),
        }
    }

    /// Names the address whose look-up the programs spare themselves.
    fn set_primary(&mut self, (addr, index): (Ipv4Addr, u32)) -> Result<(), DatapathError> {
        let old = self.config()?;
        let new = Config { primary_v4: addr.octets(), primary_v4_index: index, ..old };
        if new == old { Ok(()) } else { self.set_config(new) }
    }

    /// Packets by reason, summed over processors.
    pub fn reasons(&self) -> Result<Vec<(Reason, u64)>, DatapathError> {
        let read = |reason: &Reason| {
            let values =
                self.reason.get(&(*reason as u32), 0).map_err(DatapathError::map("read", names::MAP_REASON))?;
            Ok((*reason, values.iter().sum()))
        };
        Reason::ALL.iter().map(read).collect()
    }

    /// What one element of the per-mapping counters holds, summed over processors.
    fn stats_of(&self, index: u32) -> Result<MappingStats, DatapathError> {
        let values = self.stats.get(&index, 0).map_err(DatapathError::map("read", names::MAP_STATS))?;
        Ok(values.iter().fold(ZERO, |sum, one| plus(&sum, one)))
    }

    /// What all mappings of a family have carried, those included that are no more.
    pub fn totals(&self, family: Family) -> Result<MappingStats, DatapathError> {
        let mappings = self.family(family).mappings()?;
        let mut indexes: BTreeSet<u32> = mappings.iter().map(|(_, entry)| entry.stats_index).collect();
        indexes.insert(shared_stats(family));
        indexes.into_iter().try_fold(ZERO, |sum, index| Ok(plus(&sum, &self.stats_of(index)?)))
    }

    /// Empties an element and adds what it held to that of the family's mappings that are no more.
    pub(super) fn retire_stats(&mut self, index: u32, family: Family) -> Result<(), DatapathError> {
        let carried = self.stats_of(index)?;
        if carried == ZERO || index >= COUNTED_MAPPINGS {
            return Ok(());
        }
        let shared = shared_stats(family);
        let sum = plus(&self.stats_of(shared)?, &carried);
        self.set_stats(index, ZERO)?;
        self.set_stats(shared, sum)
    }

    /// Gives the first processor the value and the others nothing.
    fn set_stats(&mut self, index: u32, value: MappingStats) -> Result<(), DatapathError> {
        let per_cpu = aya::util::nr_cpus().map_err(|(_, source)| source).and_then(|cpus| {
            let mut values = vec![ZERO; cpus];
            if let Some(first) = values.first_mut() {
                *first = value;
            }
            PerCpuValues::try_from(values)
        });
        let result = per_cpu.map_err(MapError::from).and_then(|values| self.stats.set(index, values, 0));
        result.map_err(DatapathError::map("write", names::MAP_STATS))
    }
}

/// The counters of a family's mappings that have none of their own, or are no more.
pub(super) const fn shared_stats(family: Family) -> u32 {
    match family {
        Family::V4 => SHARED_V4,
        Family::V6 => SHARED_V6,
    }
}

/// The time by which programs date their notes.
fn kernel_time() -> u64 {
    fragment::time(u64::try_from(sys::now().as_nanos()).unwrap_or(u64::MAX))
}

fn plus(a: &MappingStats, b: &MappingStats) -> MappingStats {
    MappingStats {
        request_packets: a.request_packets + b.request_packets,
        request_bytes: a.request_bytes + b.request_bytes,
        reply_packets: a.reply_packets + b.reply_packets,
        reply_bytes: a.reply_bytes + b.reply_bytes,
        new_flows: a.new_flows + b.new_flows,
        established_flows: a.established_flows + b.established_flows,
    }
}

/// What a new mapping has carried.
const ZERO: MappingStats = MappingStats {
    request_packets: 0,
    request_bytes: 0,
    reply_packets: 0,
    reply_bytes: 0,
    new_flows: 0,
    established_flows: 0,
};

/// Opens a map by its pin.
pub(super) fn open<T: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &'static str) -> Result<T, DatapathError> {
    let map = MapData::from_pin(pins.map(name)).and_then(Map::from_map_data).and_then(T::try_from);
    map.map_err(|source| DatapathError::OpenMap { name, source })
}

/// Deleting what is not there is as good as deleting it.
pub(super) fn tolerate_missing(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The maps, typed. Opened by their pins, so that the agent and the commands that only look see the same thing.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues};
use npl_common::{
    config::Config,
    flow::{FlowKeyV4, FlowV4},
    mapping::{self, BackendV4, Endpoint, EndpointV4, LocalAddress, LocalAddressV4, MAX_LOCAL_ADDRESSES},
    names,
    reason::Reason,
    stats::{MappingStats, SHARED},
};

use super::{error::DatapathError, pins::Pins};
use crate::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol};

/// All maps of the datapath.
pub struct Tables {
    config: Array<MapData, Config>,
    local: HashMap<MapData, LocalAddressV4, LocalAddress>,
    local_index: Array<MapData, LocalAddressV4>,
    pub(super) mapping: HashMap<MapData, mapping::Frontend, BackendV4>,
    pub(super) endpoint: HashMap<MapData, EndpointV4, Endpoint>,
    pub(super) flow: HashMap<MapData, FlowKeyV4, FlowV4>,
    stats: PerCpuArray<MapData, MappingStats>,
    reason: PerCpuArray<MapData, u64>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}

/// A mapping as the kernel holds it, with what it has carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingRecord {
    /// Where clients send to.
    pub frontend: Frontend,
    /// Where it leads.
    pub backend: Backend,
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
            local: open(pins, names::MAP_LOCAL_V4)?,
            local_index: open(pins, names::MAP_LOCAL_IDX_V4)?,
            mapping: open(pins, names::MAP_MAPPING_V4)?,
            endpoint: open(pins, names::MAP_ENDPOINT_V4)?,
            flow: open(pins, names::MAP_FLOW_V4)?,
            stats: open(pins, names::MAP_STATS)?,
            reason: open(pins, names::MAP_REASON)?,
        })
    }

    /// The configuration; all zero before the first agent has written it.
    pub fn config(&self) -> Result<Config, DatapathError> {
        self.config.get(&0, 0).map_err(DatapathError::map("read", names::MAP_CONFIG))
    }

    pub(super) fn set_config(&mut self, config: Config) -> Result<(), DatapathError> {
        self.config.set(0, config, 0).map_err(DatapathError::map("write", names::MAP_CONFIG))
    }

    /// Every mapping.
    pub fn mappings(&self) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        Ok(self.raw_mappings()?.into_iter().map(|(frontend, raw)| (frontend, backend(&raw))).collect())
    }

    /// Every mapping with its counters.
    pub fn records(&self) -> Result<Vec<MappingRecord>, DatapathError> {
        let mut records = Vec::new();
        for (frontend, raw) in self.raw_mappings()? {
            records.push(MappingRecord { frontend, backend: backend(&raw), stats: self.stats_of(raw.stats_index)? });
        }
        Ok(records)
    }

    /// Every mapping as the kernel has it.
    pub(super) fn raw_mappings(&self) -> Result<BTreeMap<Frontend, BackendV4>, DatapathError> {
        let mut mappings = BTreeMap::new();
        for item in &self.mapping {
            let (key, value) = item.map_err(DatapathError::map("read", names::MAP_MAPPING_V4))?;
            // A protocol that this agent does not know is a later agent's; it is left alone.
            if let Some(protocol) = Protocol::from_number(key.protocol) {
                let frontend = Frontend { family: Family::V4, node_port: NodePort(key.node_port), protocol };
                mappings.insert(frontend, value);
            }
        }
        Ok(mappings)
    }

    /// Flows that completed an exchange and are remembered now.
    pub fn flow_count(&self) -> Result<usize, DatapathError> {
        let mut count = 0;
        for key in self.flow.keys() {
            key.map_err(DatapathError::map("read", names::MAP_FLOW_V4))?;
            count += 1;
        }
        Ok(count)
    }

    /// The addresses that count as the Node's.
    pub fn local_addresses(&self) -> Result<BTreeMap<Ipv4Addr, u32>, DatapathError> {
        let mut addresses = BTreeMap::new();
        for item in &self.local {
            let (key, value) = item.map_err(DatapathError::map("read", names::MAP_LOCAL_V4))?;
            addresses.insert(Ipv4Addr::from(key.addr), value.index);
        }
        Ok(addresses)
    }

    /// Makes exactly these the Node's addresses, the more important first; the rest does not fit and is returned.
    ///
    /// An address keeps its index for as long as it is there, and a freed index is cleared, so that a half-open flow
    /// never gets another address's reply.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn set_local_addresses(&mut self, wanted: &[Ipv4Addr]) -> Result<Vec<Ipv4Addr>, DatapathError> {
        let mut present = self.local_addresses()?;
        let (wanted, rest) = wanted.split_at(wanted.len().min(MAX_LOCAL_ADDRESSES as usize));
        let gone: Vec<_> = present.keys().filter(|addr| !wanted.contains(addr)).copied().collect();
        let primary = self.config()?.primary_v4;
        if gone.iter().any(|addr| addr.octets() == primary) {
            self.set_primary((Ipv4Addr::UNSPECIFIED, 0))?;
        }
        for addr in gone {
            if let Some(index) = present.remove(&addr) {
                tolerate_missing(self.local.remove(&LocalAddressV4 { addr: addr.octets() }))
                    .map_err(DatapathError::map("write", names::MAP_LOCAL_V4))?;
                self.set_local_index(index, Ipv4Addr::UNSPECIFIED)?;
            }
        }
        for addr in wanted {
            if present.contains_key(addr) {
                continue;
            }
            let used: BTreeSet<u32> = present.values().copied().collect();
            let Some(index) = (0..MAX_LOCAL_ADDRESSES).find(|index| !used.contains(index)) else { break };
            self.set_local_index(index, *addr)?;
            self.local
                .insert(LocalAddressV4 { addr: addr.octets() }, LocalAddress { index }, 0)
                .map_err(DatapathError::map("write", names::MAP_LOCAL_V4))?;
            present.insert(*addr, index);
        }
        let primary = wanted.first().and_then(|addr| Some((*addr, *present.get(addr)?)));
        self.set_primary(primary.unwrap_or((Ipv4Addr::UNSPECIFIED, 0)))?;
        Ok(rest.to_vec())
    }

    /// Names the address whose look-up the programs spare themselves.
    fn set_primary(&mut self, (addr, index): (Ipv4Addr, u32)) -> Result<(), DatapathError> {
        let old = self.config()?;
        let new = Config { primary_v4: addr.octets(), primary_v4_index: index, ..old };
        if new == old { Ok(()) } else { self.set_config(new) }
    }

    fn set_local_index(&mut self, index: u32, addr: Ipv4Addr) -> Result<(), DatapathError> {
        self.local_index
            .set(index, LocalAddressV4 { addr: addr.octets() }, 0)
            .map_err(DatapathError::map("write", names::MAP_LOCAL_IDX_V4))
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

    /// What all mappings have carried, those included that are no more.
    pub fn totals(&self) -> Result<MappingStats, DatapathError> {
        let mut indexes: BTreeSet<u32> = self.raw_mappings()?.values().map(|raw| raw.stats_index).collect();
        indexes.insert(SHARED);
        indexes.into_iter().try_fold(ZERO, |sum, index| Ok(plus(&sum, &self.stats_of(index)?)))
    }

    /// Empties an element and adds what it held to that of mappings that are no more.
    pub(super) fn retire_stats(&mut self, index: u32) -> Result<(), DatapathError> {
        let carried = self.stats_of(index)?;
        if carried == ZERO || index == SHARED {
            return Ok(());
        }
        let sum = plus(&self.stats_of(SHARED)?, &carried);
        self.set_stats(index, ZERO)?;
        self.set_stats(SHARED, sum)
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

fn open<T: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &'static str) -> Result<T, DatapathError> {
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

fn backend(raw: &BackendV4) -> Backend {
    Backend {
        pod_ip: IpAddr::V4(Ipv4Addr::from(raw.pod_addr)),
        pod_port: PodPort(raw.pod_port),
        generation: raw.generation,
    }
}

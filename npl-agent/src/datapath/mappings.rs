// SPDX-License-Identifier: Apache-2.0
//! Writes mappings, and keeps what belongs to them in step: the endpoints that replies are recognised by, the counters,
//! and the flows of endpoints that are no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use npl_common::{
    mapping::{self, BackendV4, Endpoint, EndpointV4},
    names,
    stats::{COUNTED_MAPPINGS, SHARED},
};

use super::{
    error::DatapathError,
    tables::{Tables, tolerate_missing},
};
use crate::core::model::{Backend, Family, Frontend, Protocol};

/// What the kernel held when it was last read, so that one change does not cost a look at all mappings.
#[derive(Debug, Default)]
pub struct MappingWriter {
    known: BTreeMap<Frontend, BackendV4>,
    frontends_of: BTreeMap<EndpointV4, BTreeSet<Frontend>>,
    used_stats: BTreeSet<u32>,
    to_purge: BTreeSet<EndpointV4>,
}

impl MappingWriter {
    /// Reads the kernel's mappings, and puts their endpoints right where somebody changed or removed them.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn refresh(&mut self, tables: &mut Tables) -> Result<(), DatapathError> {
        *self = Self { to_purge: std::mem::take(&mut self.to_purge), ..Self::default() };
        for (frontend, raw) in tables.raw_mappings()? {
            self.remember(frontend, raw);
        }
        let mut present = BTreeMap::new();
        for item in &tables.endpoint {
            let (key, value) = item.map_err(DatapathError::map("read", names::MAP_ENDPOINT_V4))?;
            present.insert(key, value);
        }
        for (key, frontends) in &self.frontends_of {
            let right = frontends.iter().filter_map(|frontend| self.known.get(frontend)).map(endpoint_value);
            if !right.clone().any(|value| present.get(key) == Some(&value)) {
                for value in right.take(1) {
                    write_endpoint(tables, *key, value)?;
                }
            }
        }
        for orphan in present.keys().filter(|key| !self.frontends_of.contains_key(key)) {
            remove_endpoint(tables, *orphan)?;
            self.to_purge.insert(*orphan);
        }
        Ok(())
    }

    /// Writes a mapping. The reply side comes first, so that no request arrives whose reply would leave untranslated.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or the backend is not of the frontend's family.
    pub fn upsert(&mut self, tables: &mut Tables, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        let (Family::V4, IpAddr::V4(pod_ip)) = (frontend.family, backend.pod_ip) else {
            return Err(DatapathError::WrongFamily(frontend));
        };
        let old = self.known.get(&frontend).copied();
        let stats_index = match old {
            Some(old) => old.stats_index,
            None => self.fresh_stats(tables)?,
        };
        let new = BackendV4 {
            pod_addr: pod_ip.octets(),
            pod_port: backend.pod_port.0,
            flags: 0,
            generation: backend.generation,
            stats_index,
        };
        let endpoint = endpoint_key(&new, frontend.protocol);
        self.to_purge.remove(&endpoint);
        write_endpoint(tables, endpoint, endpoint_value(&new))?;
        tables
            .mapping
            .insert(frontend_key(frontend), new, 0)
            .map_err(DatapathError::map("write", names::MAP_MAPPING_V4))?;
        if old.is_some_and(|old| endpoint_key(&old, frontend.protocol) != endpoint) {
            self.forget(tables, frontend)?;
        }
        self.remember(frontend, new);
        Ok(())
    }

    /// Removes a mapping, and with the last one of an endpoint all that is remembered of it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        tolerate_missing(tables.mapping.remove(&frontend_key(frontend)))
            .map_err(DatapathError::map("write", names::MAP_MAPPING_V4))?;
        let stats_index = self.known.get(&frontend).map(|old| old.stats_index);
        self.forget(tables, frontend)?;
        if let Some(index) = stats_index {
            tables.retire_stats(index)?;
            self.used_stats.remove(&index);
        }
        Ok(())
    }

    /// Forgets the flows of all endpoints that went since the last call, in one look at the table: the next Pod with
    /// the address of one starts without them. Until then the generation keeps them from being used.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self, tables: &mut Tables) -> Result<(), DatapathError> {
        let gone = std::mem::take(&mut self.to_purge);
        if gone.is_empty() {
            return Ok(());
        }
        let mut stale = Vec::new();
        for key in tables.flow.keys() {
            let key = key.map_err(DatapathError::map("read", names::MAP_FLOW_V4))?;
            let protocol = u8::try_from(key.protocol).unwrap_or_default();
            let sender = EndpointV4 { pod_addr: key.pod_addr, pod_port: key.pod_port, protocol, pad: 0 };
            if gone.contains(&sender) {
                stale.push(key);
            }
        }
        for key in stale {
            tolerate_missing(tables.flow.remove(&key)).map_err(DatapathError::map("write", names::MAP_FLOW_V4))?;
        }
        Ok(())
    }

    fn remember(&mut self, frontend: Frontend, raw: BackendV4) {
        self.used_stats.insert(raw.stats_index);
        self.frontends_of.entry(endpoint_key(&raw, frontend.protocol)).or_default().insert(frontend);
        self.known.insert(frontend, raw);
    }

    /// Drops what is known of a frontend, and its endpoint unless another mapping still leads there.
    fn forget(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        let Some(old) = self.known.remove(&frontend) else { return Ok(()) };
        let key = endpoint_key(&old, frontend.protocol);
        let survivor = self.frontends_of.get_mut(&key).and_then(|frontends| {
            frontends.remove(&frontend);
            frontends.first().copied()
        });
        if let Some(other) = survivor.and_then(|frontend| self.known.get(&frontend)) {
            return write_endpoint(tables, key, endpoint_value(other));
        }
        self.frontends_of.remove(&key);
        self.to_purge.insert(key);
        remove_endpoint(tables, key)
    }

    /// Finds counters that no mapping uses and sets them to zero; beyond their number, mappings share one element.
    fn fresh_stats(&self, tables: &mut Tables) -> Result<u32, DatapathError> {
        // The first gap of an ordered set: its length where there is none.
        let mut used = self.used_stats.iter();
        let Some(index) = (0..COUNTED_MAPPINGS).find(|index| used.next() != Some(index)) else { return Ok(SHARED) };
        // What an agent that was killed in between did not retire.
        tables.retire_stats(index)?;
        Ok(index)
    }
}

fn write_endpoint(tables: &mut Tables, key: EndpointV4, value: Endpoint) -> Result<(), DatapathError> {
    tables.endpoint.insert(key, value, 0).map_err(DatapathError::map("write", names::MAP_ENDPOINT_V4))
}

fn remove_endpoint(tables: &mut Tables, key: EndpointV4) -> Result<(), DatapathError> {
    tolerate_missing(tables.endpoint.remove(&key)).map_err(DatapathError::map("write", names::MAP_ENDPOINT_V4))
}

const fn frontend_key(frontend: Frontend) -> mapping::Frontend {
    mapping::Frontend { node_port: frontend.node_port.0, protocol: frontend.protocol.number(), pad: 0 }
}

const fn endpoint_key(backend: &BackendV4, protocol: Protocol) -> EndpointV4 {
    EndpointV4 { pod_addr: backend.pod_addr, pod_port: backend.pod_port, protocol: protocol.number(), pad: 0 }
}

const fn endpoint_value(backend: &BackendV4) -> Endpoint {
    Endpoint { generation: backend.generation, stats_index: backend.stats_index }
}

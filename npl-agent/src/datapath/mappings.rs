// SPDX-License-Identifier: Apache-2.0
//! Writes mappings together with what depends on them: endpoints, counters, and the connection tracking entries of
//! removed endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use npl_common::{mapping::Endpoint, stats::COUNTED_MAPPINGS};
use tracing::debug;

use super::{
    error::DatapathError,
    family::{Entry, Sender},
    tables::{Tables, shared_stats},
};
use crate::{
    core::model::{Backend, Family, Frontend, Protocol},
    process::error_chain::ErrorChain,
};

/// A cache of the kernel's mappings, replaced by each read, so that a change does not need to scan all mappings.
#[derive(Debug, Default)]
pub struct MappingWriter {
    known: BTreeMap<Frontend, Entry>,
    frontends_of: BTreeMap<Sender, BTreeSet<Frontend>>,
    used_stats: BTreeSet<u32>,
    /// No counters below this index are free, so that a thousand new mappings do not each search from 0.
    free_stats_from: u32,
    to_purge: BTreeSet<Sender>,
    /// Whether leftovers of an earlier agent that was killed have been removed.
    has_looked_back: bool,
}

impl MappingWriter {
    /// Reads the kernel's mappings, and repairs their endpoints.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn refresh(&mut self, tables: &mut Tables) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        let (to_purge, has_looked_back) = (std::mem::take(&mut self.to_purge), self.has_looked_back);
        *self = Self { to_purge, has_looked_back, ..Self::default() };
        for (frontend, entry) in tables.entries()? {
            self.remember(frontend, entry);
        }
        let mut present = BTreeMap::new();
        for family in Family::ALL {
            present.extend(tables.family(family).endpoints()?);
        }
        let mut is_repaired = false;
        for (sender, frontends) in &self.frontends_of {
            let right = frontends.iter().filter_map(|frontend| self.known.get(frontend)).map(endpoint);
            if !right.clone().any(|value| present.get(sender) == Some(&value)) {
                for value in right.take(1) {
                    write_endpoint(tables, *sender, value)?;
                    is_repaired = true;
                }
            }
        }
        for orphan in present.keys().filter(|sender| !self.frontends_of.contains_key(sender)) {
            remove_endpoint(tables, *orphan)?;
            self.to_purge.insert(*orphan);
            is_repaired = true;
        }
        if is_repaired {
            tables.begin_epoch()?;
        }
        if !self.has_looked_back {
            self.remove_stale_socket_rnat(tables)?;
            self.has_looked_back = true;
        }
        Ok(self.known.iter().map(|(frontend, entry)| (*frontend, entry.backend)).collect())
    }

    /// The Pod addresses of all mappings.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.known.values().map(|entry| entry.backend.pod_ip).collect()
    }

    /// Writes mappings, and returns those that the kernel refused, or whose backend is of another family than the
    /// frontend.
    ///
    /// Endpoints are written first, so that the reply of every request is translated.
    pub fn upsert_all(
        &mut self,
        tables: &mut Tables,
        wanted: &BTreeMap<Frontend, Backend>,
    ) -> BTreeMap<Frontend, DatapathError> {
        let added: BTreeSet<Frontend> =
            Family::ALL.into_iter().flat_map(|family| self.add_together(tables, family, wanted)).collect();
        let others = wanted.iter().filter(|(frontend, _)| !added.contains(frontend));
        let refused = others.filter_map(|(frontend, backend)| {
            self.upsert(tables, *frontend, *backend).err().map(|error| (*frontend, error))
        });
        refused.collect()
    }

    /// Writes the new mappings of a family in two calls, and returns them. Returns none if there are fewer than two, or
    /// if a call fails; then each is written by itself.
    fn add_together(
        &mut self,
        tables: &mut Tables,
        family: Family,
        wanted: &BTreeMap<Frontend, Backend>,
    ) -> Vec<Frontend> {
        let is_new = |(frontend, backend): &(&Frontend, &Backend)| {
            frontend.family == family && Family::of(backend.pod_ip) == family && !self.known.contains_key(frontend)
        };
        let new: Vec<_> = wanted.iter().filter(is_new).collect();
        if new.len() < 2 {
            return Vec::new();
        }
        let mut entries = BTreeMap::new();
        for (frontend, backend) in new {
            let Ok(stats_index) = self.allocate_stats(tables, family) else { break };
            self.used_stats.insert(stats_index);
            entries.insert(*frontend, Entry { backend: *backend, stats_index });
        }
        let endpoints: BTreeMap<Sender, Endpoint> = entries
            .iter()
            .map(|(frontend, entry)| (sender(&entry.backend, frontend.protocol), endpoint(entry)))
            .collect();
        let result = self.begin_anew(tables, family, &endpoints.keys().copied().collect());
        let maps = tables.family_mut(family);
        let result = result.and_then(|()| maps.set_endpoints(&endpoints)).and_then(|()| maps.set_mappings(&entries));
        let result = result.and_then(|()| tables.begin_epoch());
        if let Err(error) = result {
            debug!(err = %ErrorChain(&error), mappings = entries.len(), "mappings cannot be written together; the \
                                                                         agent writes them one by one");
            for entry in entries.values() {
                self.free_stats(entry.stats_index);
            }
            return Vec::new();
        }
        for (frontend, entry) in &entries {
            self.remember(*frontend, *entry);
        }
        entries.into_keys().collect()
    }

    fn upsert(&mut self, tables: &mut Tables, frontend: Frontend, backend: Backend) -> Result<(), DatapathError> {
        if Family::of(backend.pod_ip) != frontend.family {
            return Err(DatapathError::WrongFamily(frontend));
        }
        let old = self.known.get(&frontend).copied();
        let stats_index = match old {
            Some(old) => old.stats_index,
            None => self.allocate_stats(tables, frontend.family)?,
        };
        let new = Entry { backend, stats_index };
        let sender = sender(&backend, frontend.protocol);
        self.begin_anew(tables, frontend.family, &BTreeSet::from([sender]))?;
        write_endpoint(tables, sender, endpoint(&new))?;
        tables.family_mut(frontend.family).set_mapping(frontend, &new)?;
        tables.begin_epoch()?;
        if old.is_some_and(|old| self::sender(&old.backend, frontend.protocol) != sender) {
            self.forget(tables, frontend)?;
        }
        self.remember(frontend, new);
        Ok(())
    }

    /// Prepares endpoints that return before their connection tracking entries were removed. Those have a generation
    /// and may stay; socket reverse NAT entries have none.
    fn begin_anew(
        &mut self,
        tables: &mut Tables,
        family: Family,
        endpoints: &BTreeSet<Sender>,
    ) -> Result<(), DatapathError> {
        let again: BTreeSet<Sender> = endpoints.intersection(&self.to_purge).copied().collect();
        self.to_purge.retain(|sender| !again.contains(sender));
        if again.is_empty() {
            return Ok(());
        }
        tables.family_mut(family).remove_socket_rnat(&self.left(&again))
    }

    /// Removes a mapping, and its endpoint if no other mapping leads there.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        // Recorded first, so that the port is never free while its clients may still send to it.
        tables.note_unmapped_traffic(frontend)?;
        tables.family_mut(frontend.family).remove_mapping(frontend)?;
        tables.begin_epoch()?;
        let stats_index = self.known.get(&frontend).map(|old| old.stats_index);
        self.forget(tables, frontend)?;
        if let Some(index) = stats_index {
            tables.retire_stats(index, frontend.family)?;
            self.free_stats(index);
        }
        Ok(())
    }

    /// Removes the connection tracking and socket reverse NAT entries of all endpoints that were removed since the last
    /// call, in one scan of each map, so that the next Pod with such an address starts without them. Until then, the
    /// generation keeps entries from being used.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self, tables: &mut Tables) -> Result<(), DatapathError> {
        let gone = std::mem::take(&mut self.to_purge);
        for family in Family::ALL {
            let of_family = gone.iter().copied().filter(|sender| Family::of(sender.pod_ip) == family).collect();
            if !BTreeSet::is_empty(&of_family) {
                tables.family_mut(family).remove_flows(&of_family)?;
                tables.family_mut(family).remove_socket_rnat(&self.left(&of_family))?;
            }
        }
        Ok(())
    }

    /// Removes socket reverse NAT entries without a mapping, which an earlier agent leaves if it is killed between
    /// removing the mapping and them. A later Pod would seem to be behind the mapping.
    fn remove_stale_socket_rnat(&self, tables: &mut Tables) -> Result<(), DatapathError> {
        for family in Family::ALL {
            let stale = self.left_of(tables.family(family).socket_rnat_pods()?);
            if !stale.is_empty() {
                tables.family_mut(family).remove_socket_rnat(&stale)?;
            }
        }
        Ok(())
    }

    /// Pod addresses and ports that no mapping leads to; socket reverse NAT entries have no protocol.
    fn left(&self, gone: &BTreeSet<Sender>) -> BTreeSet<(IpAddr, u16)> {
        self.left_of(gone.iter().map(|sender| (sender.pod_ip, sender.pod_port)).collect())
    }

    fn left_of(&self, mut pods: BTreeSet<(IpAddr, u16)>) -> BTreeSet<(IpAddr, u16)> {
        for sender in self.frontends_of.keys() {
            pods.remove(&(sender.pod_ip, sender.pod_port));
        }
        pods
    }

    fn remember(&mut self, frontend: Frontend, entry: Entry) {
        self.used_stats.insert(entry.stats_index);
        self.frontends_of.entry(sender(&entry.backend, frontend.protocol)).or_default().insert(frontend);
        self.known.insert(frontend, entry);
    }

    /// Removes a frontend from the cache, and its endpoint unless another mapping leads there. The epoch invalidates
    /// cached endpoints.
    fn forget(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        let Some(old) = self.known.remove(&frontend) else { return Ok(()) };
        let sender = sender(&old.backend, frontend.protocol);
        let survivor = self.frontends_of.get_mut(&sender).and_then(|frontends| {
            frontends.remove(&frontend);
            frontends.first().copied()
        });
        if let Some(other) = survivor.and_then(|frontend| self.known.get(&frontend)) {
            write_endpoint(tables, sender, endpoint(other))?;
        } else {
            self.frontends_of.remove(&sender);
            self.to_purge.insert(sender);
            remove_endpoint(tables, sender)?;
        }
        tables.begin_epoch()
    }

    fn free_stats(&mut self, index: u32) {
        self.used_stats.remove(&index);
        self.free_stats_from = self.free_stats_from.min(index);
    }

    /// Finds unused counters and sets them to zero. Mappings beyond the number of counters share one element.
    fn allocate_stats(&mut self, tables: &mut Tables, family: Family) -> Result<u32, DatapathError> {
        // The first gap of an ordered set.
        let first = self.free_stats_from;
        let mut used = self.used_stats.range(first..);
        let Some(index) = (first..COUNTED_MAPPINGS).find(|index| used.next() != Some(index)) else {
            return Ok(shared_stats(family));
        };
        self.free_stats_from = index;
        // An agent that was killed may not have cleared them.
        tables.retire_stats(index, family)?;
        Ok(index)
    }
}

fn write_endpoint(tables: &mut Tables, sender: Sender, value: Endpoint) -> Result<(), DatapathError> {
    tables.family_mut(Family::of(sender.pod_ip)).set_endpoint(sender, value)
}

fn remove_endpoint(tables: &mut Tables, sender: Sender) -> Result<(), DatapathError> {
    tables.family_mut(Family::of(sender.pod_ip)).remove_endpoint(sender)
}

/// The endpoint that sends the replies of a mapping.
const fn sender(backend: &Backend, protocol: Protocol) -> Sender {
    Sender { pod_ip: backend.pod_ip, pod_port: backend.pod_port.0, protocol: protocol.number() }
}

/// The value of that endpoint's map element.
const fn endpoint(entry: &Entry) -> Endpoint {
    Endpoint { generation: entry.backend.generation, stats_index: entry.stats_index }
}

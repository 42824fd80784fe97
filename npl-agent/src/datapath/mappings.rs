// SPDX-License-Identifier: Apache-2.0
//! Writes mappings and the map entries that depend on mappings: the endpoints that identify replies, and the counters.
//! Also removes the conntrack entries and socket reverse NAT entries of removed endpoints.

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
    core::{
        model::{Backend, Family, Frontend, Protocol},
        repairs::{RepairJournal, RepairedObject},
    },
    process::error_chain::ErrorChain,
};

/// Writes mappings. Keeps a copy of all mappings in memory, so that a change of one mapping does not require a read of
/// all mappings.
#[derive(Debug, Default)]
pub struct MappingWriter {
    known: BTreeMap<Frontend, Entry>,
    frontends_of: BTreeMap<Sender, BTreeSet<Frontend>>,
    /// The number of elements of `known` with the protocol UDP.
    udp_mappings: usize,
    used_stats: BTreeSet<u32>,
    /// The index at which the search for unused counters begins, because all counters with a lower index are in use.
    free_stats_from: u32,
    /// Removed endpoints whose conntrack and socket reverse NAT entries have not been removed yet.
    to_purge: BTreeSet<Sender>,
    /// Whether the kernel has exactly the mappings and endpoints of this writer, unless other software has changed them.
    /// This is false before the first reading, and from a failed write to the next reading.
    is_exact: bool,
    repairs: RepairJournal,
    /// Whether this writer has already removed the socket reverse NAT entries that a killed agent left behind.
    has_removed_stale_rnat: bool,
}

impl MappingWriter {
    /// Creates a writer that records repairs in `repairs`.
    pub fn new(repairs: RepairJournal) -> Self {
        Self { repairs, ..Self::default() }
    }

    /// Reads all mappings from the kernel, and corrects endpoints that do not match the mappings. Records the mappings
    /// and endpoints that other software has changed as repairs: after this function, the core plans the ops that
    /// restore the mappings.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn refresh(&mut self, tables: &mut Tables) -> Result<BTreeMap<Frontend, Backend>, DatapathError> {
        let mut entries = tables.entries()?;
        let mut present = BTreeMap::new();
        for family in Family::ALL {
            present.extend(tables.family(family).endpoints()?);
        }
        let mut is_repaired = false;
        if self.is_exact {
            self.record_foreign_changes(&entries, &present);
            is_repaired = self.restore_counters(tables, &mut entries)?;
        }
        let (to_purge, repairs) = (std::mem::take(&mut self.to_purge), self.repairs.clone());
        let has_removed_stale_rnat = self.has_removed_stale_rnat;
        *self = Self { to_purge, repairs, is_exact: true, has_removed_stale_rnat, ..Self::default() };
        for (frontend, entry) in entries {
            self.insert_known(frontend, entry);
        }
        for (sender, frontends) in &self.frontends_of {
            let valid = frontends.iter().filter_map(|frontend| self.known.get(frontend)).map(endpoint);
            if !valid.clone().any(|value| present.get(sender) == Some(&value)) {
                for value in valid.take(1) {
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
        tables.set_no_udp_mappings(self.udp_mappings == 0)?;
        if !self.has_removed_stale_rnat {
            self.remove_stale_socket_rnat(tables)?;
            self.has_removed_stale_rnat = true;
        }
        Ok(self.known.iter().map(|(frontend, entry)| (*frontend, entry.backend)).collect())
    }

    /// Records each mapping and endpoint that differs from the mapping or endpoint that this writer has written.
    fn record_foreign_changes(&self, entries: &BTreeMap<Frontend, Entry>, endpoints: &BTreeMap<Sender, Endpoint>) {
        self.repairs.record_changes(&self.known, entries, |frontend| format!("mapping {frontend}"));
        let is_intact = |sender: &&Sender| {
            let frontends = self.frontends_of.get(*sender).into_iter().flatten();
            let mut valid = frontends.filter_map(|frontend| self.known.get(frontend)).map(endpoint);
            valid.any(|value| endpoints.get(*sender) == Some(&value))
        };
        let senders: BTreeSet<&Sender> = self.frontends_of.keys().chain(endpoints.keys()).collect();
        for Sender { pod_ip, pod_port, .. } in senders.into_iter().filter(|sender| !is_intact(sender)) {
            self.repairs.record(RepairedObject::MapEntry, format_args!("endpoint {pod_ip} port {pod_port}"));
        }
    }

    /// Restores the index of each mapping's counters. The core does not know these indexes, so no op restores them.
    /// Returns whether an index was restored.
    fn restore_counters(
        &self,
        tables: &mut Tables,
        entries: &mut BTreeMap<Frontend, Entry>,
    ) -> Result<bool, DatapathError> {
        let mut is_restored = false;
        for (frontend, entry) in entries {
            let Some(own) = self.known.get(frontend).filter(|own| own.stats_index != entry.stats_index) else {
                continue;
            };
            entry.stats_index = own.stats_index;
            if own.backend == entry.backend {
                tables.family_mut(frontend.family).set_mapping(*frontend, own)?;
                is_restored = true;
            }
        }
        Ok(is_restored)
    }

    /// The Pod addresses of all mappings.
    pub fn pod_addresses(&self) -> BTreeSet<IpAddr> {
        self.known.values().map(|entry| entry.backend.pod_ip).collect()
    }

    /// Writes mappings. Returns an error for each mapping that could not be written: the kernel rejected it, or its
    /// backend is not of the frontend's IP family.
    ///
    /// The endpoint of a mapping is written before the mapping, so that the programs translate the replies to every
    /// request that they translate.
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
        let refused: BTreeMap<_, _> = refused.collect();
        self.is_exact &= refused.is_empty();
        refused
    }

    /// Writes the new mappings of an IP family together: one system call writes all endpoints, and a second system call
    /// writes all mappings. Returns the written mappings. Returns no mapping if there is at most one new mapping, or if
    /// a call fails; the caller then writes each mapping separately.
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
        let result = self.reuse_endpoints(tables, family, &endpoints.keys().copied().collect());
        let result = result.and_then(|()| self.announce_udp(tables, entries.keys()));
        let maps = tables.family_mut(family);
        let result = result.and_then(|()| maps.set_endpoints(&endpoints)).and_then(|()| maps.set_mappings(&entries));
        let result = result.and_then(|()| tables.begin_epoch());
        if let Err(error) = result {
            debug!(
                err = %ErrorChain(&error),
                mappings = entries.len(),
                "the kernel rejected a batch of mappings; the agent writes each mapping separately"
            );
            for entry in entries.values() {
                self.free_stats(entry.stats_index);
            }
            self.is_exact = false;
            return Vec::new();
        }
        for (frontend, entry) in &entries {
            self.insert_known(*frontend, *entry);
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
        self.reuse_endpoints(tables, frontend.family, &BTreeSet::from([sender]))?;
        self.announce_udp(tables, [&frontend])?;
        write_endpoint(tables, sender, endpoint(&new))?;
        tables.family_mut(frontend.family).set_mapping(frontend, &new)?;
        tables.begin_epoch()?;
        if old.is_some_and(|old| self::sender(&old.backend, frontend.protocol) != sender) {
            self.remove_known(tables, frontend)?;
        }
        self.insert_known(frontend, new);
        Ok(())
    }

    /// Prepares the reuse of endpoints whose former mappings were removed, but whose conntrack and socket reverse NAT
    /// entries still exist. The conntrack entries may stay, because their generation makes them invalid. The socket
    /// reverse NAT entries have no generation, so they are removed now.
    fn reuse_endpoints(
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
        tables.family_mut(family).remove_socket_rnat(&self.unmapped_endpoints(&again))
    }

    /// Removes a mapping. If no other mapping has the mapping's endpoint, also removes the endpoint.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn remove(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        let was_exact = std::mem::replace(&mut self.is_exact, false);
        // The time is recorded before the mapping is removed, so that the port counts as recently used even if the
        // agent is killed between these two steps.
        tables.record_unmapped_traffic(frontend)?;
        tables.family_mut(frontend.family).remove_mapping(frontend)?;
        tables.begin_epoch()?;
        let stats_index = self.known.get(&frontend).map(|old| old.stats_index);
        self.remove_known(tables, frontend)?;
        if frontend.protocol == Protocol::Udp && self.udp_mappings == 0 {
            tables.set_no_udp_mappings(true)?;
        }
        if let Some(index) = stats_index {
            tables.move_stats_to_shared(index, frontend.family)?;
            self.free_stats(index);
        }
        self.is_exact = was_exact;
        Ok(())
    }

    /// Removes the conntrack and socket reverse NAT entries of all endpoints that were removed since the last call,
    /// with one read of each map. Until this call, the generation in conntrack entries prevents the use of a former
    /// Pod's entries for a later Pod with the same address. Returns the numbers of removed conntrack entries for IPv4
    /// and for IPv6.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn purge_flows(&mut self, tables: &mut Tables) -> Result<[usize; 2], DatapathError> {
        let (mut counts, seed) = ([0; 2], tables.config()?.seed);
        let removed = std::mem::take(&mut self.to_purge);
        for (family, count) in Family::ALL.into_iter().zip(&mut counts) {
            let of_family = removed.iter().copied().filter(|sender| Family::of(sender.pod_ip) == family).collect();
            if !BTreeSet::is_empty(&of_family) {
                *count = tables.family_mut(family).remove_flows(&of_family, seed)?;
                tables.family_mut(family).remove_socket_rnat(&self.unmapped_endpoints(&of_family))?;
            }
        }
        Ok(counts)
    }

    /// Removes the socket reverse NAT entries of endpoints without a mapping. An entry outlives its mapping if the
    /// agent is killed between the removal of the mapping and the removal of the entry. If the entry stayed, local
    /// clients of a later Pod with the same address would see the former node port as the address of that Pod.
    /// Conntrack entries need no check, because they contain a generation.
    fn remove_stale_socket_rnat(&self, tables: &mut Tables) -> Result<(), DatapathError> {
        for family in Family::ALL {
            let stale = self.without_mapping(tables.family(family).socket_rnat_pods()?);
            if !stale.is_empty() {
                tables.family_mut(family).remove_socket_rnat(&stale)?;
            }
        }
        Ok(())
    }

    /// Returns those Pod addresses and ports of `senders` that no mapping of any protocol has as its backend. The
    /// protocol is ignored, because socket reverse NAT entries contain no protocol.
    fn unmapped_endpoints(&self, senders: &BTreeSet<Sender>) -> BTreeSet<(IpAddr, u16)> {
        self.without_mapping(senders.iter().map(|sender| (sender.pod_ip, sender.pod_port)).collect())
    }

    fn without_mapping(&self, mut pods: BTreeSet<(IpAddr, u16)>) -> BTreeSet<(IpAddr, u16)> {
        for sender in self.frontends_of.keys() {
            pods.remove(&(sender.pod_ip, sender.pod_port));
        }
        pods
    }

    /// Clears the flag [`FLAG_NO_UDP_MAPPINGS`](npl_common::config::FLAG_NO_UDP_MAPPINGS) if one of `frontends`, which
    /// are about to be written, is the first one with the protocol UDP.
    fn announce_udp<'a, I>(&self, tables: &mut Tables, frontends: I) -> Result<(), DatapathError>
    where
        I: IntoIterator<Item = &'a Frontend>,
    {
        let is_first =
            self.udp_mappings == 0 && frontends.into_iter().any(|frontend| frontend.protocol == Protocol::Udp);
        if is_first { tables.set_no_udp_mappings(false) } else { Ok(()) }
    }

    fn insert_known(&mut self, frontend: Frontend, entry: Entry) {
        self.used_stats.insert(entry.stats_index);
        self.frontends_of.entry(sender(&entry.backend, frontend.protocol)).or_default().insert(frontend);
        let old = self.known.insert(frontend, entry);
        self.udp_mappings += usize::from(old.is_none() && frontend.protocol == Protocol::Udp);
    }

    /// Removes a frontend from the writer's copy of the mappings. If no other mapping has the frontend's endpoint, also
    /// removes the endpoint from the kernel. Starts a new epoch, which invalidates cached lookups of the removed
    /// endpoint.
    fn remove_known(&mut self, tables: &mut Tables, frontend: Frontend) -> Result<(), DatapathError> {
        let Some(old) = self.known.remove(&frontend) else { return Ok(()) };
        self.udp_mappings -= usize::from(frontend.protocol == Protocol::Udp);
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

    /// Allocates unused counters and resets them. If all counters are in use, returns the index of counters that
    /// several mappings of the family share.
    fn allocate_stats(&mut self, tables: &mut Tables, family: Family) -> Result<u32, DatapathError> {
        // Finds the lowest index that is not in the ordered set of used indexes.
        let first = self.free_stats_from;
        let mut used = self.used_stats.range(first..);
        let Some(index) = (first..COUNTED_MAPPINGS).find(|index| used.next() != Some(index)) else {
            return Ok(shared_stats(family));
        };
        self.free_stats_from = index;
        // The counters are reset, because a killed agent may have left counts in them.
        tables.move_stats_to_shared(index, family)?;
        Ok(index)
    }
}

fn write_endpoint(tables: &mut Tables, sender: Sender, value: Endpoint) -> Result<(), DatapathError> {
    tables.family_mut(Family::of(sender.pod_ip)).set_endpoint(sender, value)
}

fn remove_endpoint(tables: &mut Tables, sender: Sender) -> Result<(), DatapathError> {
    tables.family_mut(Family::of(sender.pod_ip)).remove_endpoint(sender)
}

/// The Pod endpoint of a mapping.
const fn sender(backend: &Backend, protocol: Protocol) -> Sender {
    Sender { pod_ip: backend.pod_ip, pod_port: backend.pod_port.0, protocol: protocol.number() }
}

/// The value of the endpoint map for the endpoint of a mapping.
const fn endpoint(entry: &Entry) -> Endpoint {
    Endpoint { generation: entry.backend.generation, stats_index: entry.stats_index }
}

// SPDX-License-Identifier: Apache-2.0
//! Operations on the maps of one IP family. The trait [`FamilyMaps`] hides the family's types of keys and values.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
    sync::atomic::{AtomicU64, Ordering, fence},
    time::Duration,
};

use aya::maps::{
    Array, HashMap, IterableMap as _, MapData, MapError,
    lpm_trie::{Key, LpmTrie},
};
use npl_common::{
    half_open,
    lookup_cache::CACHED_MAPPINGS,
    mapping::{self, ALLOWED, Endpoint, FRONTEND_BITS, LocalAddress, MAX_LOCAL_ADDRESSES},
};

use super::{
    error::DatapathError,
    layout::{Layout, frontend_key},
    machine,
    pins::Pins,
    predecessor::{Entries, Predecessor},
    sys,
    tables::{FlowRecord, open, tolerate_missing},
};
use crate::core::{
    flows,
    flows::half_open::{HalfOpenExpiry, after_removal},
    model::{Backend, Frontend, NodePort, Protocol, sources::SourceRange},
};

/// The number of batches in which the agent clears the lookup cache. The agent needs memory for the elements of only
/// one batch at a time.
const LOOKUP_CACHE_PARTS: u32 = 16;

/// The value of a mapping: its backend, and the index of the mapping's counters in `npl_cnt_mapping`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) backend: Backend,
    pub(super) stats_index: u32,
}

/// The Pod endpoint of a mapping, as the sender of replies: Pod address, Pod port in host byte order, and IP protocol
/// number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sender {
    pub(super) pod_ip: IpAddr,
    pub(super) pod_port: u16,
    pub(super) protocol: u8,
}

/// Operations on the maps of one IP family. An operation that returns a `Result` fails if a BPF system call fails.
/// Writing a mapping or a source also fails if the address is of the other IP family.
pub(super) trait FamilyMaps: Send {
    /// Every mapping in the kernel's map. Mappings of a protocol that this agent does not know are ignored, because an
    /// agent of a later release with the same ABI version wrote them.
    fn mappings(&self) -> Result<Vec<(Frontend, Entry)>, DatapathError>;
    fn set_mapping(&mut self, frontend: Frontend, entry: &Entry) -> Result<(), DatapathError>;
    /// Writes many mappings in one call. After an error, some of the mappings may have been written.
    fn set_mappings(&mut self, entries: &BTreeMap<Frontend, Entry>) -> Result<(), DatapathError>;
    fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError>;
    /// Clears the lookup cache, in which the programs store the results of lookups of mappings.
    fn clear_lookup_cache(&mut self) -> Result<(), DatapathError>;

    /// Every allowed source and its frontend. Allowed sources of a protocol that this agent does not know are ignored.
    fn sources(&self) -> Result<Vec<(Frontend, SourceRange)>, DatapathError>;
    fn allow_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError>;
    fn remove_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError>;

    fn endpoints(&self) -> Result<Vec<(Sender, Endpoint)>, DatapathError>;
    fn set_endpoint(&mut self, sender: Sender, value: Endpoint) -> Result<(), DatapathError>;
    /// Writes many endpoints in one call. After an error, some of the endpoints may have been written.
    fn set_endpoints(&mut self, endpoints: &BTreeMap<Sender, Endpoint>) -> Result<(), DatapathError>;
    fn remove_endpoint(&mut self, sender: Sender) -> Result<(), DatapathError>;

    /// The name and fill level of each flow table of this IP family, in the order of [`Protocol::ALL`].
    fn flow_tables(&self) -> Result<[FlowTableFill; 3], DatapathError>;
    /// The maximum number of flows of each flow table of this IP family, in the order of [`Protocol::ALL`].
    fn flow_capacities(&self) -> [usize; 3];
    /// Every entry in NPL's flow tables of this IP family. Entries of a protocol that this agent does not know are
    /// ignored.
    fn flows(&self) -> Result<Vec<FlowRecord>, DatapathError>;
    /// Removes the flow tables' entries of these Pod endpoints. In the half-open cache, the phase of these flows
    /// changes from "established" to "replied", so that their half-open entries expire, too. `seed` is the seed of the
    /// flows' hashes. Returns the number of removed entries.
    fn remove_flows(&mut self, senders: &BTreeSet<Sender>, seed: u64) -> Result<usize, DatapathError>;
    /// The number of socket reverse NAT entries, and the maximum number of these entries.
    fn socket_rnat_fill(&self) -> Result<(usize, usize), DatapathError>;
    /// The Pod addresses and ports (host byte order) of all socket reverse NAT entries.
    fn socket_rnat_pods(&self) -> Result<BTreeSet<(IpAddr, u16)>, DatapathError>;
    /// Removes the socket reverse NAT entries of these Pod addresses and ports.
    fn remove_socket_rnat(&mut self, pods: &BTreeSet<(IpAddr, u16)>) -> Result<(), DatapathError>;
    /// Removes the flow tables' entries that have expired at `now`, a time of the kernel's monotonic clock. In the
    /// half-open cache, the phase of these flows changes from "established" to "replied", so that their half-open
    /// entries expire, too. `seed` is the seed of the flows' hashes.
    fn remove_expired_flows(&mut self, now: Duration, seed: u64) -> Result<SweptFlows, DatapathError>;

    /// Clears the half-open entries that have expired according to `expiry`. Returns the number of cleared entries.
    fn remove_expired_half_open(&mut self, expiry: &mut HalfOpenExpiry) -> Result<usize, DatapathError>;

    /// Clears the half-open entries whose node address index is not in `used`.
    fn clear_half_open_except(&mut self, used: &BTreeSet<u32>) -> Result<(), DatapathError>;

    /// The time of the last packet to the node port while it had no mapping, or of the last removal of a mapping of the
    /// port, whichever is later. The unit is that of [`npl_common::fragment::time`]. Zero if neither is recorded.
    fn last_unmapped(&self, port: NodePort) -> Result<u64, DatapathError>;
    fn set_last_unmapped(&mut self, port: NodePort, time: u64) -> Result<(), DatapathError>;

    /// The node addresses and their indexes.
    fn local_addresses(&self) -> Result<BTreeMap<IpAddr, u32>, DatapathError>;
    /// Adds a node address under an index that is not in `used`. Returns the index; `None` if all indexes are in use,
    /// or if the address is not of this IP family.
    fn add_local_address(&mut self, addr: IpAddr, used: &BTreeSet<u32>) -> Result<Option<u32>, DatapathError>;
    fn remove_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError>;
    /// Whether both maps have the node address with this index.
    fn has_local_address(&self, addr: IpAddr, index: u32) -> bool;
    /// Writes a node address with an index.
    fn set_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError>;

    /// Copies the entries of an earlier agent's maps, except entries whose keys this agent's maps already contain.
    /// Returns the numbers of copied mappings and conntrack entries.
    fn copy_from(&mut self, from: &Predecessor, entries: Entries) -> Result<[usize; 2], DatapathError>;
}

/// The result of a sweep, which removes the expired entries of the flow tables of an IP family.
#[derive(Debug, Clone, Copy, Default)]
pub struct SweptFlows {
    /// The number of conntrack entries that were removed.
    pub removed: usize,
    /// The number of conntrack entries that remain in each flow table, in the order of [`Protocol::ALL`].
    pub left: [usize; 3],
    /// The number of entries that could still be added, before the removal, to the flow table with the least room.
    pub room: usize,
}

/// The number of entries of a flow table, and the maximum number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowTableFill {
    /// The name of the map.
    pub map: &'static str,
    /// The number of entries.
    pub used: usize,
    /// The number of entries that the map can hold before the kernel evicts entries.
    pub capacity: usize,
}

/// The flow table of one protocol.
pub(super) struct FlowTable<L: Layout> {
    pub(super) map: HashMap<MapData, L::FlowKey, L::Flow>,
    pub(super) name: &'static str,
    capacity: usize,
}

impl<L: Layout> FlowTable<L> {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, DatapathError> {
        let map: HashMap<_, _, _> = open(pins, name)?;
        Ok(Self { capacity: machine::stated_entries(map.map(), name)?, map, name })
    }

    /// Calls `look` with every entry that is in the flow table during the whole call. An entry that is added or removed
    /// during the call may be missed.
    fn read(&self, mut look: impl FnMut(&L::FlowKey, &L::Flow)) -> Result<(), DatapathError> {
        let look_at_all =
            |keys: &[L::FlowKey], flows: &[L::Flow]| keys.iter().zip(flows).for_each(|(key, flow)| look(key, flow));
        let read = sys::read_parts(self.map.map().fd().as_fd(), look_at_all);
        read.map_err(MapError::from).map_err(DatapathError::map("read", self.name))
    }

    fn count(&self) -> Result<usize, DatapathError> {
        let mut count = 0;
        self.read(|_, _| count += 1)?;
        Ok(count)
    }

    /// Removes a conntrack entry if it still exists.
    fn remove(&mut self, key: &L::FlowKey) -> Result<(), DatapathError> {
        tolerate_missing(self.map.remove(key)).map_err(DatapathError::map("write", self.name))
    }

    /// Removes the entries for which `is_expired` returns true. The arguments of `is_expired` are the flow's key, the
    /// flow's entry, and whether the table is crowded ([`flows::is_crowded`]). Adds the keys of the removed entries to
    /// `removed`, even if the result is an error. Returns the number of entries before the removal.
    fn remove_expired(
        &mut self,
        is_expired: impl Fn(&L::FlowKey, &L::Flow, bool) -> bool,
        removed: &mut Vec<L::FlowKey>,
    ) -> Result<usize, DatapathError> {
        let (mut count, mut expired) = (0, Vec::new());
        self.read(|key, flow| {
            count += 1;
            expired.extend(is_expired(key, flow, true).then_some(*key));
        })?;
        let is_crowded = flows::is_crowded(count, self.capacity);
        for key in expired {
            // The entry is read again, because the flow may have become active. If a packet of the flow arrives between
            // this read and the removal, the client's next packet recreates the entry.
            if self.map.get(&key, 0).is_ok_and(|flow| is_expired(&key, &flow, is_crowded)) {
                self.remove(&key)?;
                removed.push(key);
            }
        }
        Ok(count)
    }
}

/// The pinned maps of an IP family.
pub(super) struct Maps<L: Layout> {
    local: HashMap<MapData, L::Local, LocalAddress>,
    local_index: Array<MapData, L::Local>,
    pub(super) mapping: HashMap<MapData, mapping::Frontend, L::Backend>,
    pub(super) allow: LpmTrie<MapData, L::Source, u32>,
    endpoint: HashMap<MapData, L::Endpoint, Endpoint>,
    /// The flow tables, in the order of [`Protocol::ALL`].
    pub(super) flow_tables: [FlowTable<L>; 3],
    lookup_cache: Array<MapData, L::CacheEntry>,
    half_open: Array<MapData, u64>,
    unmapped: Array<MapData, u64>,
    pub(super) socket_rnat: HashMap<MapData, L::SocketRnatKey, L::SocketRnat>,
}

impl<L: Layout> Maps<L> {
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let [tcp, udp, sctp] = L::FLOWS;
        let table = |name| FlowTable::open(pins, name);
        Ok(Self {
            local: open(pins, L::LOCAL)?,
            local_index: open(pins, L::LOCAL_INDEX)?,
            mapping: open(pins, L::MAPPING)?,
            allow: open(pins, L::ALLOW)?,
            endpoint: open(pins, L::ENDPOINT)?,
            flow_tables: [table(tcp)?, table(udp)?, table(sctp)?],
            lookup_cache: open(pins, L::LOOKUP_CACHE)?,
            half_open: open(pins, L::HALF_OPEN)?,
            unmapped: open(pins, L::UNMAPPED)?,
            socket_rnat: open(pins, L::SOCKET_RNAT)?,
        })
    }

    /// Maps the slots of the half-open cache into memory and passes the slots to `work`. Kernel programs may change the
    /// slots while `work` runs, so the slots are atomics.
    fn with_slots<T>(&self, work: impl FnOnce(&[AtomicU64]) -> T) -> Result<T, DatapathError> {
        let done = sys::with_words(self.half_open.map().fd().as_fd(), half_open::WORDS as usize, work);
        done.map_err(MapError::from).map_err(DatapathError::map("read", L::HALF_OPEN))
    }

    /// Makes the half-open entries of these flows expire, after the flows were removed from the flow tables: the phase
    /// "established" becomes "replied" (see [`after_removal`]).
    fn end_words(&self, keys: &[L::FlowKey], seed: u64) -> Result<(), DatapathError> {
        if keys.is_empty() {
            return Ok(());
        }
        self.with_slots(|slots| {
            for hash in keys.iter().map(|key| L::flow_hash(key, seed)) {
                let Some(slot) = slots.get(half_open::slot(hash) as usize) else { continue };
                let after = |word| after_removal(word, hash);
                let _unchanged = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
            }
        })
    }

    /// Calls `look` with the key of every socket reverse NAT entry.
    fn read_socket_rnat(&self, mut look: impl FnMut(&L::SocketRnatKey)) -> Result<(), DatapathError> {
        let read = sys::read_parts(self.socket_rnat.map().fd().as_fd(), |keys, _values: &[L::SocketRnat]| {
            keys.iter().for_each(&mut look);
        });
        read.map_err(MapError::from).map_err(DatapathError::map("read", L::SOCKET_RNAT))
    }
}

impl<L: Layout> FamilyMaps for Maps<L> {
    fn mappings(&self) -> Result<Vec<(Frontend, Entry)>, DatapathError> {
        let mut mappings = Vec::new();
        for item in &self.mapping {
            let (key, raw) = item.map_err(DatapathError::map("read", L::MAPPING))?;
            mappings.extend(frontend::<L>(key).map(|frontend| (frontend, L::entry(&raw))));
        }
        Ok(mappings)
    }

    fn set_mapping(&mut self, frontend: Frontend, entry: &Entry) -> Result<(), DatapathError> {
        let raw = L::raw(entry).ok_or(DatapathError::WrongFamily(frontend))?;
        self.mapping.insert(frontend_key(frontend), raw, 0).map_err(DatapathError::map("write", L::MAPPING))
    }

    fn set_mappings(&mut self, entries: &BTreeMap<Frontend, Entry>) -> Result<(), DatapathError> {
        let raw = |(frontend, entry): (&Frontend, &Entry)| {
            let raw = L::raw(entry).ok_or(DatapathError::WrongFamily(*frontend))?;
            Ok((frontend_key(*frontend), raw))
        };
        let elements = entries.iter().map(raw).collect::<Result<Vec<_>, DatapathError>>()?;
        update_all(&self.mapping, &elements).map_err(DatapathError::map("write", L::MAPPING))
    }

    fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError> {
        tolerate_missing(self.mapping.remove(&frontend_key(frontend))).map_err(DatapathError::map("write", L::MAPPING))
    }

    fn clear_lookup_cache(&mut self) -> Result<(), DatapathError> {
        let fd = self.lookup_cache.map().fd().as_fd();
        // The cache is cleared in batches, so that only the elements of one batch are in the agent's memory at a time.
        (0..LOOKUP_CACHE_PARTS).try_for_each(|part| {
            let elements: Vec<_> = (part..CACHED_MAPPINGS)
                .step_by(LOOKUP_CACHE_PARTS as usize)
                .map(|slot| (slot, L::EMPTY_CACHE_ENTRY))
                .collect();
            sys::update_all(fd, &elements).map_err(MapError::from).map_err(DatapathError::map("write", L::LOOKUP_CACHE))
        })
    }

    fn sources(&self) -> Result<Vec<(Frontend, SourceRange)>, DatapathError> {
        let mut sources = Vec::new();
        for key in self.allow.keys() {
            let key = key.map_err(DatapathError::map("read", L::ALLOW))?;
            sources.extend(allowed_source::<L>(key.prefix_len(), &key.data()));
        }
        Ok(sources)
    }

    fn allow_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError> {
        let key = source_key::<L>(frontend, range)?;
        self.allow.insert(&key, ALLOWED, 0).map_err(DatapathError::map("write", L::ALLOW))
    }

    fn remove_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError> {
        let key = source_key::<L>(frontend, range)?;
        tolerate_missing(self.allow.remove(&key)).map_err(DatapathError::map("write", L::ALLOW))
    }

    fn endpoints(&self) -> Result<Vec<(Sender, Endpoint)>, DatapathError> {
        let read = |item: Result<(L::Endpoint, Endpoint), _>| {
            item.map(|(key, value)| (L::sender(&key), value)).map_err(DatapathError::map("read", L::ENDPOINT))
        };
        self.endpoint.iter().map(read).collect()
    }

    fn set_endpoint(&mut self, sender: Sender, value: Endpoint) -> Result<(), DatapathError> {
        let Some(key) = L::endpoint(&sender) else { return Ok(()) };
        self.endpoint.insert(key, value, 0).map_err(DatapathError::map("write", L::ENDPOINT))
    }

    fn set_endpoints(&mut self, endpoints: &BTreeMap<Sender, Endpoint>) -> Result<(), DatapathError> {
        let raw = |(sender, value): (&Sender, &Endpoint)| L::endpoint(sender).map(|key| (key, *value));
        let elements: Vec<_> = endpoints.iter().filter_map(raw).collect();
        update_all(&self.endpoint, &elements).map_err(DatapathError::map("write", L::ENDPOINT))
    }

    fn remove_endpoint(&mut self, sender: Sender) -> Result<(), DatapathError> {
        let Some(key) = L::endpoint(&sender) else { return Ok(()) };
        tolerate_missing(self.endpoint.remove(&key)).map_err(DatapathError::map("write", L::ENDPOINT))
    }

    fn flow_tables(&self) -> Result<[FlowTableFill; 3], DatapathError> {
        let fill = |table: &FlowTable<L>| {
            Ok(FlowTableFill { map: table.name, used: table.count()?, capacity: table.capacity })
        };
        let [tcp, udp, sctp] = &self.flow_tables;
        Ok([fill(tcp)?, fill(udp)?, fill(sctp)?])
    }

    fn flow_capacities(&self) -> [usize; 3] {
        self.flow_tables.each_ref().map(|table| table.capacity)
    }

    fn flows(&self) -> Result<Vec<FlowRecord>, DatapathError> {
        let mut records = Vec::new();
        for table in &self.flow_tables {
            table.read(|key, flow| records.extend(flow_record::<L>(key, flow)))?;
        }
        Ok(records)
    }

    fn remove_flows(&mut self, senders: &BTreeSet<Sender>, seed: u64) -> Result<usize, DatapathError> {
        let mut all = Vec::new();
        let mut removed = Ok(());
        for table in &mut self.flow_tables {
            let mut stale = Vec::new();
            let read = table.read(|key, _| stale.extend(senders.contains(&L::pod_endpoint(key)).then_some(*key)));
            removed = removed.and(read.and_then(|()| stale.iter().try_for_each(|key| table.remove(key))));
            all.append(&mut stale);
        }
        // The phase of these flows in the half-open cache changes even if reading a table or removing an entry has
        // failed.
        self.end_words(&all, seed)?;
        removed.map(|()| all.len())
    }

    fn socket_rnat_fill(&self) -> Result<(usize, usize), DatapathError> {
        let mut count = 0;
        self.read_socket_rnat(|_| count += 1)?;
        Ok((count, machine::stated_entries(self.socket_rnat.map(), L::SOCKET_RNAT)?))
    }

    fn socket_rnat_pods(&self) -> Result<BTreeSet<(IpAddr, u16)>, DatapathError> {
        let mut pods = BTreeSet::new();
        self.read_socket_rnat(|key| {
            pods.extend(L::socket_rnat_pod(key));
        })?;
        Ok(pods)
    }

    fn remove_socket_rnat(&mut self, pods: &BTreeSet<(IpAddr, u16)>) -> Result<(), DatapathError> {
        let mut stale = Vec::new();
        self.read_socket_rnat(|key| {
            let is_stale = L::socket_rnat_pod(key).is_some_and(|pod| pods.contains(&pod));
            stale.extend(is_stale.then_some(*key));
        })?;
        let mut remove =
            |key| tolerate_missing(self.socket_rnat.remove(key)).map_err(DatapathError::map("write", L::SOCKET_RNAT));
        stale.iter().try_for_each(&mut remove)
    }

    fn remove_expired_flows(&mut self, now: Duration, seed: u64) -> Result<SweptFlows, DatapathError> {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let is_expired = |key: &L::FlowKey, flow: &L::Flow, is_crowded: bool| {
            flows::is_expired(L::pod_endpoint(key).protocol, L::state(flow), now, is_crowded)
        };
        let (mut removed, mut result) = (Vec::new(), Ok(()));
        let mut swept = SweptFlows { removed: 0, left: [0; 3], room: usize::MAX };
        for (table, left) in self.flow_tables.iter_mut().zip(&mut swept.left) {
            let before = removed.len();
            match table.remove_expired(is_expired, &mut removed) {
                Ok(count) => {
                    *left = count - (removed.len() - before);
                    swept.room = swept.room.min(table.capacity.saturating_sub(count));
                }
                Err(error) => result = Err(error),
            }
        }
        // The phase of the removed flows in the half-open cache changes even if a later removal has failed.
        self.end_words(&removed, seed)?;
        result?;
        Ok(SweptFlows { removed: removed.len(), ..swept })
    }

    fn remove_expired_half_open(&mut self, expiry: &mut HalfOpenExpiry) -> Result<usize, DatapathError> {
        self.with_slots(|slots| {
            let expired = expiry.observe((0..).zip(slots).map(|(slot, word)| (slot, word.load(Ordering::Relaxed))));
            // If a program has written the slot in the meantime, for another flow or for a reply, the slot is not
            // cleared.
            let clear = |(slot, word): &(u32, u64)| {
                let slot = slots.get(*slot as usize);
                slot.is_some_and(|it| it.compare_exchange(*word, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok())
            };
            expired.into_iter().filter(clear).count()
        })
    }

    fn clear_half_open_except(&mut self, used: &BTreeSet<u32>) -> Result<(), DatapathError> {
        let has_other_index = |word| word != 0 && !used.contains(&u32::from(half_open::address_index(word)));
        self.with_slots(|slots| {
            for slot in slots {
                // The update is atomic, because a kernel program may change the same slot at the same time.
                let clear = |word| has_other_index(word).then_some(0);
                let _unchanged = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, clear);
            }
            // The fence orders the clearing before the reuse of an index: a CPU that sees an index with another address
            // also sees the cleared slots.
            fence(Ordering::SeqCst);
        })
    }

    fn copy_from(&mut self, from: &Predecessor, entries: Entries) -> Result<[usize; 2], DatapathError> {
        self.copy_entries(from, entries)
    }

    fn last_unmapped(&self, port: NodePort) -> Result<u64, DatapathError> {
        self.unmapped.get(&u32::from(port.0), 0).map_err(DatapathError::map("read", L::UNMAPPED))
    }

    fn set_last_unmapped(&mut self, port: NodePort, time: u64) -> Result<(), DatapathError> {
        self.unmapped.set(u32::from(port.0), time, 0).map_err(DatapathError::map("write", L::UNMAPPED))
    }

    fn local_addresses(&self) -> Result<BTreeMap<IpAddr, u32>, DatapathError> {
        let read = |item: Result<(L::Local, LocalAddress), _>| {
            item.map(|(key, value)| (L::address(&key), value.index)).map_err(DatapathError::map("read", L::LOCAL))
        };
        self.local.iter().map(read).collect()
    }

    fn add_local_address(&mut self, addr: IpAddr, used: &BTreeSet<u32>) -> Result<Option<u32>, DatapathError> {
        let free = (0..MAX_LOCAL_ADDRESSES).find(|index| !used.contains(index));
        let Some(index) = free.filter(|_| L::local(addr).is_some()) else { return Ok(None) };
        self.set_local_address(addr, index).map(|()| Some(index))
    }

    fn remove_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError> {
        let Some(local) = L::local(addr) else { return Ok(()) };
        tolerate_missing(self.local.remove(&local)).map_err(DatapathError::map("write", L::LOCAL))?;
        self.local_index.set(index, L::NO_ADDRESS, 0).map_err(DatapathError::map("write", L::LOCAL_INDEX))
    }

    fn has_local_address(&self, addr: IpAddr, index: u32) -> bool {
        let Some(local) = L::local(addr) else { return false };
        let has_address =
            self.local_index.get(&index, 0).is_ok_and(|present| L::address(&present) == L::address(&local));
        let has_index = self.local.get(&local, 0).is_ok_and(|present| present.index == index);
        has_address && has_index
    }

    /// Writes the map from index to address before the map from address to index, so that the programs use no index
    /// without an address.
    fn set_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError> {
        let Some(local) = L::local(addr) else { return Ok(()) };
        self.local_index.set(index, local, 0).map_err(DatapathError::map("write", L::LOCAL_INDEX))?;
        self.local.insert(local, LocalAddress { index }, 0).map_err(DatapathError::map("write", L::LOCAL))
    }
}

fn update_all<K: aya::Pod, V: aya::Pod>(map: &HashMap<MapData, K, V>, elements: &[(K, V)]) -> Result<(), MapError> {
    Ok(sys::update_all(map.map().fd().as_fd(), elements)?)
}

/// Converts the key of an element of the map of allowed sources; `None` if this agent does not know the protocol in the
/// key, or if the prefix is not a prefix of a frontend and an address.
pub(super) fn allowed_source<L: Layout>(prefix_length: u32, source: &L::Source) -> Option<(Frontend, SourceRange)> {
    let (frontend, first) = L::split_source(source);
    let length = u8::try_from(prefix_length.checked_sub(FRONTEND_BITS)?).ok()?;
    Some((self::frontend::<L>(frontend)?, SourceRange::new(first, length)?))
}

/// Converts an entry of a flow table; `None` if this agent does not know the protocol in the key.
pub(super) fn flow_record<L: Layout>(key: &L::FlowKey, flow: &L::Flow) -> Option<FlowRecord> {
    let Sender { pod_ip, pod_port, protocol } = L::pod_endpoint(key);
    let (client, nat) = L::client_and_nat(key, flow);
    let state = L::state(flow);
    Some(FlowRecord {
        protocol: Protocol::from_number(protocol)?,
        client,
        nat,
        pod: SocketAddr::new(pod_ip, pod_port),
        last_seen: Duration::from_nanos(state.last_seen_ns),
        client_tcp_flags: state.client_tcp_flags,
        pod_tcp_flags: state.pod_tcp_flags,
    })
}

/// Converts the key of a mapping to a [`Frontend`]; `None` if this agent does not know the protocol in the key.
pub(super) fn frontend<L: Layout>(key: mapping::Frontend) -> Option<Frontend> {
    let protocol = Protocol::from_number(key.protocol)?;
    Some(Frontend { family: L::FAMILY, node_port: NodePort(key.node_port), protocol })
}

pub(super) fn source_key<L: Layout>(frontend: Frontend, range: SourceRange) -> Result<Key<L::Source>, DatapathError> {
    let source = L::source(frontend, range.first()).ok_or(DatapathError::WrongFamily(frontend))?;
    Ok(Key::new(FRONTEND_BITS + u32::from(range.length()), source))
}

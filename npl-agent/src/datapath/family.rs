// SPDX-License-Identifier: Apache-2.0
//! The maps that each family of addresses has of its own, behind types that know both.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd as _,
};

use aya::maps::{
    Array, HashMap, IterableMap as _, MapData, MapError,
    lpm_trie::{Key, LpmTrie},
};
use npl_common::{
    flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6},
    hint::{HINTS, HintV4, HintV6},
    mapping::{
        self, ALLOWED, BackendV4, BackendV6, Endpoint, EndpointV4, EndpointV6, FLAG_RESTRICTED, FRONTEND_BITS,
        LocalAddress, LocalAddressV4, LocalAddressV6, MAX_LOCAL_ADDRESSES, SourceV4, SourceV6,
    },
    names,
};

use super::{
    error::DatapathError,
    pins::Pins,
    sys,
    tables::{open, tolerate_missing},
};
use crate::core::{
    model::{Backend, Family, Frontend, NodePort, PodPort, Protocol},
    sources::SourceRange,
};

/// A mapping's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) backend: Backend,
    pub(super) stats_index: u32,
}

/// The sender of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sender {
    pub(super) pod_ip: IpAddr,
    pub(super) pod_port: u16,
    pub(super) protocol: u8,
}

/// The maps of one family.
pub(super) trait FamilyMaps: Send {
    /// Every mapping; one of a protocol that this agent does not know is a later agent's and left alone.
    fn mappings(&self) -> Result<Vec<(Frontend, Entry)>, DatapathError>;
    fn set_mapping(&mut self, frontend: Frontend, entry: &Entry) -> Result<(), DatapathError>;
    /// The same for many at once. After an error, some may be there.
    fn set_mappings(&mut self, entries: &BTreeMap<Frontend, Entry>) -> Result<(), DatapathError>;
    fn remove_mapping(&mut self, frontend: Frontend) -> Result<(), DatapathError>;
    /// Takes all copies of mappings out that programs have left for each other.
    fn discard_hints(&mut self) -> Result<(), DatapathError>;

    /// Every allowed source, with the frontend that it is for; those of an unknown protocol are left alone too.
    fn sources(&self) -> Result<Vec<(Frontend, SourceRange)>, DatapathError>;
    fn allow_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError>;
    fn forget_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError>;

    fn endpoints(&self) -> Result<Vec<(Sender, Endpoint)>, DatapathError>;
    fn set_endpoint(&mut self, sender: Sender, value: Endpoint) -> Result<(), DatapathError>;
    /// The same for many at once. After an error, some may be there.
    fn set_endpoints(&mut self, endpoints: &BTreeMap<Sender, Endpoint>) -> Result<(), DatapathError>;
    fn remove_endpoint(&mut self, sender: Sender) -> Result<(), DatapathError>;

    /// Flows that completed an exchange and are remembered now.
    fn flow_count(&self) -> Result<usize, DatapathError>;
    /// Forgets the flows whose Pod's end is among these.
    fn remove_flows(&mut self, senders: &BTreeSet<Sender>) -> Result<(), DatapathError>;

    /// The addresses that count as the Node's, with their indexes.
    fn local_addresses(&self) -> Result<BTreeMap<IpAddr, u32>, DatapathError>;
    fn add_local_address(&mut self, addr: IpAddr, used: &BTreeSet<u32>) -> Result<Option<u32>, DatapathError>;
    fn remove_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError>;
}

/// How a family's maps are named and what they hold.
pub(super) trait Layout {
    const FAMILY: Family;
    const LOCAL: &'static str;
    const LOCAL_INDEX: &'static str;
    const MAPPING: &'static str;
    const ALLOW: &'static str;
    const ENDPOINT: &'static str;
    const FLOW: &'static str;
    const HINT: &'static str;

    type Local: aya::Pod + Send;
    type Backend: aya::Pod + Send;
    type Source: aya::Pod + Send;
    type Endpoint: aya::Pod + Send;
    type FlowKey: aya::Pod + Send;
    type Flow: aya::Pod + Send;
    type Hint: aya::Pod + Send;

    /// What stands in a map where no address does.
    const NO_ADDRESS: Self::Local;
    /// What stands in a map where no hint does.
    const NO_HINT: Self::Hint;

    fn local(addr: IpAddr) -> Option<Self::Local>;
    fn address(local: &Self::Local) -> IpAddr;
    fn raw(entry: &Entry) -> Option<Self::Backend>;
    fn entry(raw: &Self::Backend) -> Entry;
    fn source(frontend: Frontend, first: IpAddr) -> Option<Self::Source>;
    fn source_end(source: &Self::Source) -> (mapping::Frontend, IpAddr);
    fn endpoint(sender: &Sender) -> Option<Self::Endpoint>;
    fn sender(endpoint: &Self::Endpoint) -> Sender;
    /// The Pod's end of a flow.
    fn pod_end(key: &Self::FlowKey) -> Sender;
}

/// The maps of a family, opened by their pins.
pub(super) struct Maps<L: Layout> {
    local: HashMap<MapData, L::Local, LocalAddress>,
    local_index: Array<MapData, L::Local>,
    mapping: HashMap<MapData, mapping::Frontend, L::Backend>,
    allow: LpmTrie<MapData, L::Source, u32>,
    endpoint: HashMap<MapData, L::Endpoint, Endpoint>,
    flow: HashMap<MapData, L::FlowKey, L::Flow>,
    hint: Array<MapData, L::Hint>,
}

impl<L: Layout> Maps<L> {
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        Ok(Self {
            local: open(pins, L::LOCAL)?,
            local_index: open(pins, L::LOCAL_INDEX)?,
            mapping: open(pins, L::MAPPING)?,
            allow: open(pins, L::ALLOW)?,
            endpoint: open(pins, L::ENDPOINT)?,
            flow: open(pins, L::FLOW)?,
            hint: open(pins, L::HINT)?,
        })
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

    fn discard_hints(&mut self) -> Result<(), DatapathError> {
        let elements: Vec<_> = (0..HINTS).map(|slot| (slot, L::NO_HINT)).collect();
        let fd = self.hint.map().fd().as_fd();
        sys::update_all(fd, &elements).map_err(MapError::from).map_err(DatapathError::map("write", L::HINT))
    }

    fn sources(&self) -> Result<Vec<(Frontend, SourceRange)>, DatapathError> {
        let mut sources = Vec::new();
        for key in self.allow.keys() {
            let key = key.map_err(DatapathError::map("read", L::ALLOW))?;
            let (frontend, first) = L::source_end(&key.data());
            let length = key.prefix_len().checked_sub(FRONTEND_BITS).and_then(|length| u8::try_from(length).ok());
            let range = length.and_then(|length| SourceRange::new(first, length));
            sources.extend(self::frontend::<L>(frontend).zip(range));
        }
        Ok(sources)
    }

    fn allow_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError> {
        let key = source_key::<L>(frontend, range)?;
        self.allow.insert(&key, ALLOWED, 0).map_err(DatapathError::map("write", L::ALLOW))
    }

    fn forget_source(&mut self, frontend: Frontend, range: SourceRange) -> Result<(), DatapathError> {
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

    fn flow_count(&self) -> Result<usize, DatapathError> {
        self.flow.keys().try_fold(0, |count, key| key.map(|_| count + 1)).map_err(DatapathError::map("read", L::FLOW))
    }

    fn remove_flows(&mut self, senders: &BTreeSet<Sender>) -> Result<(), DatapathError> {
        let mut stale = Vec::new();
        for key in self.flow.keys() {
            let key = key.map_err(DatapathError::map("read", L::FLOW))?;
            if senders.contains(&L::pod_end(&key)) {
                stale.push(key);
            }
        }
        for key in stale {
            tolerate_missing(self.flow.remove(&key)).map_err(DatapathError::map("write", L::FLOW))?;
        }
        Ok(())
    }

    fn local_addresses(&self) -> Result<BTreeMap<IpAddr, u32>, DatapathError> {
        let read = |item: Result<(L::Local, LocalAddress), _>| {
            item.map(|(key, value)| (L::address(&key), value.index)).map_err(DatapathError::map("read", L::LOCAL))
        };
        self.local.iter().map(read).collect()
    }

    /// The index comes first, so that no half-open flow names one that leads nowhere.
    fn add_local_address(&mut self, addr: IpAddr, used: &BTreeSet<u32>) -> Result<Option<u32>, DatapathError> {
        let free = (0..MAX_LOCAL_ADDRESSES).find(|index| !used.contains(index));
        let (Some(local), Some(index)) = (L::local(addr), free) else { return Ok(None) };
        self.local_index.set(index, local, 0).map_err(DatapathError::map("write", L::LOCAL_INDEX))?;
        self.local.insert(local, LocalAddress { index }, 0).map_err(DatapathError::map("write", L::LOCAL))?;
        Ok(Some(index))
    }

    fn remove_local_address(&mut self, addr: IpAddr, index: u32) -> Result<(), DatapathError> {
        let Some(local) = L::local(addr) else { return Ok(()) };
        tolerate_missing(self.local.remove(&local)).map_err(DatapathError::map("write", L::LOCAL))?;
        self.local_index.set(index, L::NO_ADDRESS, 0).map_err(DatapathError::map("write", L::LOCAL_INDEX))
    }
}

fn update_all<K: aya::Pod, V: aya::Pod>(map: &HashMap<MapData, K, V>, elements: &[(K, V)]) -> Result<(), MapError> {
    Ok(sys::update_all(map.map().fd().as_fd(), elements)?)
}

/// A frontend as we know it; nothing if it is of a protocol that this agent does not know.
fn frontend<L: Layout>(key: mapping::Frontend) -> Option<Frontend> {
    let protocol = Protocol::from_number(key.protocol)?;
    Some(Frontend { family: L::FAMILY, node_port: NodePort(key.node_port), protocol })
}

fn source_key<L: Layout>(frontend: Frontend, range: SourceRange) -> Result<Key<L::Source>, DatapathError> {
    let source = L::source(frontend, range.first()).ok_or(DatapathError::WrongFamily(frontend))?;
    Ok(Key::new(FRONTEND_BITS + u32::from(range.length()), source))
}

const fn frontend_key(frontend: Frontend) -> mapping::Frontend {
    mapping::Frontend { node_port: frontend.node_port.0, protocol: frontend.protocol.number(), pad: 0 }
}

/// Both families' types have the same fields, of other lengths.
macro_rules! layout {
    (
        $(#[$meta:meta])*
        $layout:ident, $ip:ident, $family:expr,
        [$local:ident, $backend:ident, $source:ident, $endpoint:ident, $flow_key:ident, $flow:ident, $hint:ident],
        [
            $local_map:ident, $index_map:ident, $mapping_map:ident, $allow_map:ident, $endpoint_map:ident, $flow_map:ident,
            $hint_map:ident
        ]
    ) => {
        $(#[$meta])*
        pub(super) struct $layout;

        impl Layout for $layout {
            const FAMILY: Family = $family;
            const LOCAL: &'static str = names::$local_map;
            const LOCAL_INDEX: &'static str = names::$index_map;
            const MAPPING: &'static str = names::$mapping_map;
            const ALLOW: &'static str = names::$allow_map;
            const ENDPOINT: &'static str = names::$endpoint_map;
            const FLOW: &'static str = names::$flow_map;
            const HINT: &'static str = names::$hint_map;

            type Local = $local;
            type Backend = $backend;
            type Source = $source;
            type Endpoint = $endpoint;
            type FlowKey = $flow_key;
            type Flow = $flow;
            type Hint = $hint;

            const NO_ADDRESS: $local = $local { addr: $ip::UNSPECIFIED.octets() };
            const NO_HINT: $hint = $hint::NONE;

            fn local(addr: IpAddr) -> Option<$local> {
                octets::<$ip, _>(addr, $ip::octets).map(|addr| $local { addr })
            }

            fn address(local: &$local) -> IpAddr {
                $ip::from(local.addr).into()
            }

            fn raw(Entry { backend, stats_index }: &Entry) -> Option<$backend> {
                let pod_addr = octets::<$ip, _>(backend.pod_ip, $ip::octets)?;
                let (pod_port, generation) = (backend.pod_port.0, backend.generation);
                let flags = if backend.is_restricted { FLAG_RESTRICTED } else { 0 };
                Some($backend { pod_addr, pod_port, flags, generation, stats_index: *stats_index })
            }

            fn entry(raw: &$backend) -> Entry {
                let (pod_ip, pod_port) = ($ip::from(raw.pod_addr).into(), PodPort(raw.pod_port));
                let is_restricted = raw.flags & FLAG_RESTRICTED != 0;
                let backend = Backend { pod_ip, pod_port, generation: raw.generation, is_restricted };
                Entry { backend, stats_index: raw.stats_index }
            }

            fn source(frontend: Frontend, first: IpAddr) -> Option<$source> {
                let frontend = frontend_key(frontend);
                octets::<$ip, _>(first, $ip::octets).map(|addr| $source { frontend, addr })
            }

            fn source_end(source: &$source) -> (mapping::Frontend, IpAddr) {
                (source.frontend, $ip::from(source.addr).into())
            }

            fn endpoint(sender: &Sender) -> Option<$endpoint> {
                let pod_addr = octets::<$ip, _>(sender.pod_ip, $ip::octets)?;
                Some($endpoint { pod_addr, pod_port: sender.pod_port, protocol: sender.protocol, pad: 0 })
            }

            fn sender(endpoint: &$endpoint) -> Sender {
                let pod_ip = $ip::from(endpoint.pod_addr).into();
                Sender { pod_ip, pod_port: endpoint.pod_port, protocol: endpoint.protocol }
            }

            fn pod_end(key: &$flow_key) -> Sender {
                let protocol = u8::try_from(key.protocol).unwrap_or_default();
                Sender { pod_ip: $ip::from(key.pod_addr).into(), pod_port: key.pod_port, protocol }
            }
        }
    };
}

layout! {
    /// IPv4.
    V4, Ipv4Addr, Family::V4,
    [LocalAddressV4, BackendV4, SourceV4, EndpointV4, FlowKeyV4, FlowV4, HintV4],
    [MAP_LOCAL_V4, MAP_LOCAL_IDX_V4, MAP_MAPPING_V4, MAP_ALLOW_V4, MAP_ENDPOINT_V4, MAP_FLOW_V4, MAP_HINT_V4]
}

layout! {
    /// IPv6.
    V6, Ipv6Addr, Family::V6,
    [LocalAddressV6, BackendV6, SourceV6, EndpointV6, FlowKeyV6, FlowV6, HintV6],
    [MAP_LOCAL_V6, MAP_LOCAL_IDX_V6, MAP_MAPPING_V6, MAP_ALLOW_V6, MAP_ENDPOINT_V6, MAP_FLOW_V6, MAP_HINT_V6]
}

/// An address as maps hold it; nothing if it is of the other family.
fn octets<A, O>(addr: IpAddr, octets: impl Fn(&A) -> O) -> Option<O>
where
    A: OfFamily,
{
    A::of(addr).as_ref().map(octets)
}

/// An address type of one family.
trait OfFamily: Sized {
    fn of(addr: IpAddr) -> Option<Self>;
}

impl OfFamily for Ipv4Addr {
    fn of(addr: IpAddr) -> Option<Self> {
        if let IpAddr::V4(addr) = addr { Some(addr) } else { None }
    }
}

impl OfFamily for Ipv6Addr {
    fn of(addr: IpAddr) -> Option<Self> {
        if let IpAddr::V6(addr) = addr { Some(addr) } else { None }
    }
}

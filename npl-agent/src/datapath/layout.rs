// SPDX-License-Identifier: Apache-2.0
//! Names, keys and values of the maps of each IP family.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use npl_common::{
    flow::{FlowKeyV4, FlowKeyV6, FlowState, FlowV4, FlowV6},
    lookup_cache::{CachedMappingV4, CachedMappingV6},
    mapping::{
        self, BackendV4, BackendV6, EndpointV4, EndpointV6, FLAG_RESTRICTED, NodeAddressV4, NodeAddressV6, SourceV4,
        SourceV6,
    },
    names,
    socket_rnat::{SocketRnatKeyV4, SocketRnatKeyV6, SocketRnatV4, SocketRnatV6},
};

use super::family::{Entry, Sender};
use crate::core::model::{Backend, Family, Frontend, PodPort, Protocol};

/// The map names of an IP family, and conversions between the agent's types and the maps' keys and values. A conversion
/// from an address returns `None` if the address is not of this IP family.
pub(super) trait Layout {
    const FAMILY: Family;
    const LOCAL: &'static str;
    const LOCAL_INDEX: &'static str;
    const MAPPING: &'static str;
    const ALLOW: &'static str;
    const ENDPOINT: &'static str;
    /// The flow tables, in the order of [`Protocol::ALL`].
    const FLOWS: [&'static str; 3];
    const LOOKUP_CACHE: &'static str;
    const HALF_OPEN: &'static str;
    const UNMAPPED: &'static str;
    const SOCKET_RNAT: &'static str;

    type Local: aya::Pod + Send;
    type Backend: aya::Pod + Send;
    type Source: aya::Pod + Send;
    type Endpoint: aya::Pod + Send;
    type FlowKey: aya::Pod + Send;
    type Flow: aya::Pod + Send;
    type CacheEntry: aya::Pod + Send;
    type SocketRnatKey: aya::Pod + Send;
    type SocketRnat: aya::Pod + Send;

    /// The value of the index map for an index without a node address.
    const NO_ADDRESS: Self::Local;
    /// The value of an unused slot of the lookup cache.
    const EMPTY_CACHE_ENTRY: Self::CacheEntry;

    fn local(addr: IpAddr) -> Option<Self::Local>;
    fn address(local: &Self::Local) -> IpAddr;
    fn raw(entry: &Entry) -> Option<Self::Backend>;
    fn entry(raw: &Self::Backend) -> Entry;
    fn source(frontend: Frontend, first: IpAddr) -> Option<Self::Source>;
    /// Splits the key of an allowed source into its frontend and the first address of its range.
    fn split_source(source: &Self::Source) -> (mapping::Frontend, IpAddr);
    fn endpoint(sender: &Sender) -> Option<Self::Endpoint>;
    fn sender(endpoint: &Self::Endpoint) -> Sender;
    /// The Pod endpoint of a conntrack entry.
    fn pod_endpoint(key: &Self::FlowKey) -> Sender;
    fn state(flow: &Self::Flow) -> &FlowState;
    /// Returns a copy of the conntrack entry `flow` whose state is `state`.
    fn with_state(flow: &Self::Flow, state: FlowState) -> Self::Flow;
    /// The key of the flow between a client and a server. The server is a Pod or, for a host connection, the Node.
    fn flow_key(protocol: Protocol, client: SocketAddr, server: SocketAddr) -> Option<Self::FlowKey>;
    /// The hash that chooses the flow's slots in the half-open cache.
    fn flow_hash(key: &Self::FlowKey, seed: u64) -> u64;
    /// The client and the NAT address of a conntrack entry.
    fn client_and_nat(key: &Self::FlowKey, flow: &Self::Flow) -> (SocketAddr, SocketAddr);
    /// The Pod address and port (host byte order) to which a local client is connected; `None` for an entry that
    /// records the last Pod of a socket.
    fn socket_rnat_pod(key: &Self::SocketRnatKey) -> Option<(IpAddr, u16)>;
}

/// Converts a frontend to the key of the map of mappings.
pub(super) const fn frontend_key(frontend: Frontend) -> mapping::Frontend {
    mapping::Frontend { node_port: frontend.node_port.0, protocol: frontend.protocol.number(), pad: 0 }
}

/// Implements [`Layout`] for one IP family. The types of IPv4 and of IPv6 have the same fields; only the length of
/// addresses differs.
macro_rules! layout {
    (
        $(#[$meta:meta])*
        $layout:ident, $ip:ident, $family:expr,
        [$local:ident, $backend:ident, $source:ident, $endpoint:ident, $flow_key:ident, $flow:ident, $cache_entry:ident,
         $socket_rnat_key:ident, $socket_rnat:ident],
        [
            $local_map:ident, $index_map:ident, $mapping_map:ident, $allow_map:ident, $endpoint_map:ident,
            $flow_tables:ident, $lookup_cache_map:ident, $half_open_map:ident, $unmapped_map:ident, $socket_rnat_map:ident
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
            const FLOWS: [&'static str; 3] = names::$flow_tables;
            const LOOKUP_CACHE: &'static str = names::$lookup_cache_map;
            const HALF_OPEN: &'static str = names::$half_open_map;
            const UNMAPPED: &'static str = names::$unmapped_map;
            const SOCKET_RNAT: &'static str = names::$socket_rnat_map;

            type Local = $local;
            type Backend = $backend;
            type Source = $source;
            type Endpoint = $endpoint;
            type FlowKey = $flow_key;
            type Flow = $flow;
            type CacheEntry = $cache_entry;
            type SocketRnatKey = $socket_rnat_key;
            type SocketRnat = $socket_rnat;

            const NO_ADDRESS: $local = $local { addr: $ip::UNSPECIFIED.octets() };
            const EMPTY_CACHE_ENTRY: $cache_entry = $cache_entry::NONE;

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

            fn split_source(source: &$source) -> (mapping::Frontend, IpAddr) {
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

            fn pod_endpoint(key: &$flow_key) -> Sender {
                let protocol = u8::try_from(key.protocol).unwrap_or_default();
                Sender { pod_ip: $ip::from(key.pod_addr).into(), pod_port: key.pod_port, protocol }
            }

            fn state(flow: &$flow) -> &FlowState {
                &flow.state
            }

            fn with_state(flow: &$flow, state: FlowState) -> $flow {
                $flow { state, ..*flow }
            }

            fn flow_key(protocol: Protocol, client: SocketAddr, server: SocketAddr) -> Option<$flow_key> {
                Some($flow_key {
                    client_addr: octets::<$ip, _>(client.ip(), $ip::octets)?,
                    pod_addr: octets::<$ip, _>(server.ip(), $ip::octets)?,
                    client_port: client.port(),
                    pod_port: server.port(),
                    protocol: protocol.number().into(),
                })
            }

            fn flow_hash(key: &$flow_key, seed: u64) -> u64 {
                key.hash(seed)
            }

            fn client_and_nat(key: &$flow_key, flow: &$flow) -> (SocketAddr, SocketAddr) {
                let client = SocketAddr::new($ip::from(key.client_addr).into(), key.client_port);
                (client, SocketAddr::new($ip::from(flow.node_addr).into(), flow.state.node_port))
            }

            fn socket_rnat_pod(key: &$socket_rnat_key) -> Option<(IpAddr, u16)> {
                (key.pod_port != 0).then(|| ($ip::from(key.pod_addr).into(), key.pod_port))
            }
        }
    };
}

layout! {
    /// The layout of the maps for IPv4.
    V4, Ipv4Addr, Family::V4,
    [NodeAddressV4, BackendV4, SourceV4, EndpointV4, FlowKeyV4, FlowV4, CachedMappingV4, SocketRnatKeyV4, SocketRnatV4],
    [
        MAP_NODE_ADDRESS_V4, MAP_NODE_ADDRESS_BY_INDEX_V4, MAP_MAPPING_V4, MAP_ALLOW_V4, MAP_ENDPOINT_V4, FLOW_TABLES_V4,
        MAP_LOOKUP_CACHE_V4, MAP_HALF_OPEN_V4, MAP_UNMAPPED_V4, MAP_SOCKET_RNAT_V4
    ]
}

layout! {
    /// The layout of the maps for IPv6.
    V6, Ipv6Addr, Family::V6,
    [NodeAddressV6, BackendV6, SourceV6, EndpointV6, FlowKeyV6, FlowV6, CachedMappingV6, SocketRnatKeyV6, SocketRnatV6],
    [
        MAP_NODE_ADDRESS_V6, MAP_NODE_ADDRESS_BY_INDEX_V6, MAP_MAPPING_V6, MAP_ALLOW_V6, MAP_ENDPOINT_V6, FLOW_TABLES_V6,
        MAP_LOOKUP_CACHE_V6, MAP_HALF_OPEN_V6, MAP_UNMAPPED_V6, MAP_SOCKET_RNAT_V6
    ]
}

/// The bytes of an address in network byte order; `None` if the address is not of the IP family of `A`.
fn octets<A, O>(addr: IpAddr, octets: impl Fn(&A) -> O) -> Option<O>
where
    A: OfFamily,
{
    A::of(addr).as_ref().map(octets)
}

/// An address type of one IP family.
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

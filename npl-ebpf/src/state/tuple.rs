// SPDX-License-Identifier: GPL-2.0-only
//! Defines flow tuples, NAT addresses, backends of mappings, and sockets of local clients.

use npl_common::{
    hash,
    mapping::{FLAG_RESTRICTED, Frontend},
};

use super::maps::Mappings;
use crate::net::family::{HeaderLayout, SocketAddr};

/// The flow tuple without the protocol: addresses and ports of client and Pod. The ports are in host byte order.
pub struct FlowTuple<F: HeaderLayout> {
    pub client: F::Addr,
    pub client_port: u16,
    pub pod: F::Addr,
    pub pod_port: u16,
}

impl<F: HeaderLayout> FlowTuple<F> {
    /// Returns the seeded hash of the flow. In arrays such as `npl_halfopen_v4`, the low bits of the hash choose the
    /// flow's slots, and the high bits are the flow's tag in its slot.
    #[inline(always)]
    pub fn hash(&self, seed: u64, protocol: u8) -> u64 {
        let ports_and_protocol = hash::ports_and_protocol(self.client_port, self.pod_port, u32::from(protocol));
        F::hash(seed, self.client, self.pod, ports_and_protocol)
    }
}

/// The node address and node port that a client uses.
pub struct NatAddress<F: HeaderLayout> {
    pub addr: F::Addr,
    /// Index of `addr` in `npl_idx2addr_v4` or `npl_idx2addr_v6`.
    pub addr_index: u8,
    /// The port, in host byte order.
    pub port: u16,
}

/// The Pod address and Pod port to which a mapping translates requests, and the properties of the mapping.
pub struct Backend<F: HeaderLayout> {
    pub addr: F::Addr,
    /// The port, in host byte order.
    pub port: u16,
    pub generation: u32,
    pub stats_index: u32,
    /// The mapping's flags: a bit set of `npl_common::mapping::FLAG_*`.
    pub flags: u16,
}

impl<F: Mappings> Backend<F> {
    /// Returns whether the mapping's allow-list excludes this source.
    #[inline(always)]
    pub fn refuses(&self, frontend: Frontend, source: F::Addr) -> bool {
        self.flags & FLAG_RESTRICTED != 0 && !F::is_allowed(frontend, source)
    }
}

/// A local client's socket, and the Pod address and port that the socket is connected to or sends to.
pub struct SocketFlow<F: HeaderLayout> {
    pub socket: u64,
    pub pod: SocketAddr<F>,
}

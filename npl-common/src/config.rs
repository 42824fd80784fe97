// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the configuration of the kernel programs. The agent writes the configuration to the only element of the map
//! `npl_config`.

map_type! {
    /// Configuration that all programs read. A change takes effect with the next packet.
    pub struct Config: 40, align 8 {
        /// Secret random seed of the hash that chooses slots in arrays, so that a sender cannot choose a slot. A
        /// restarted agent keeps the seed.
        pub seed: u64,
        /// The Node's primary IPv4 address, network order; all zero if unset. Programs recognize this address without a
        /// look-up in another map. This address and `primary_v4_index` are in one aligned word, which is written and
        /// read atomically.
        pub primary_v4: [u8; 4],
        /// Index of `primary_v4` in the map `npl_idx2addr_v4`.
        pub primary_v4_index: u32,
        /// First port of the node port range, host order.
        pub port_min: u16,
        /// Last port of the node port range, host order, inclusive.
        pub port_max: u16,
        /// Bit 0 ([`FLAG_PRE_TC_DEVICES`]): the map `npl_pre_tc_devs` is not empty. Bit 1 ([`FLAG_HOST_CLIENTS`]): of the local
        /// clients, only those in the host's network namespace may use node ports. Bit 2 ([`FLAG_FINAL_SOURCES`]): no
        /// program after NPL's egress program masquerades. Bit 3 ([`FLAG_NO_UDP_MAPPINGS`]): no mapping has the protocol
        /// UDP. Bits 8 to 15: index of the Node's primary IPv6 address in the map `npl_idx2addr_v6`. Other bits are 0.
        pub flags: u32,
        /// [`crate::names::ABI_VERSION`], the layout version of all maps.
        pub abi: u32,
        /// Version of the mappings, endpoints, next hops and node addresses. After each change of one of these, the
        /// agent writes a new epoch, which invalidates the lookup caches: see [`crate::lookup_cache`]. Epoch and `abi`
        /// are in one aligned word, which is written and read atomically.
        pub epoch: u32,
        /// The kernel's cookie of the host's network namespace; 0 if unknown. Only in this namespace do loopback
        /// addresses count as node addresses.
        pub netns_cookie: u64,
    }
}

/// Flag: the map `npl_pre_tc_devs` contains at least one device. A device is in this map if it has the XDP program or,
/// before Linux 6.6, NPL's temporary second filter, which exists while the agent moves NPL's filter ahead of all other
/// filters of the device. A request that the XDP program or the second filter has translated arrives at the TC program
/// with the Pod's address as destination. On the devices in the map, the TC program therefore does not treat a datagram
/// to a Pod as a packet of a direct connection.
pub const FLAG_PRE_TC_DEVICES: u32 = 1;

/// Flag: of the local clients, only those in the host's network namespace ([`Config::netns_cookie`]) may use node
/// ports.
pub const FLAG_HOST_CLIENTS: u32 = 2;

/// Flag: no program that runs after NPL's egress program masquerades packets. A packet without a node address as source
/// is then no packet of a host connection. Without this flag, a Pod could use its own packets to forge records of host
/// connections for the clients of other Pods.
pub const FLAG_FINAL_SOURCES: u32 = 4;

/// Flag: no mapping of either IP family has the protocol UDP, so a datagram to a Pod cannot belong to the flow tuple of a
/// translated flow. The agent clears the flag before the first UDP mapping is written, and sets the flag after the last
/// UDP mapping is removed. An agent clears the flag when it loads the programs, because the mappings in the maps may be
/// those of an agent that does not know the flag.
pub const FLAG_NO_UDP_MAPPINGS: u32 = 8;

/// Position of the bits of [`Config::flags`] that contain the index of the primary IPv6 address.
const PRIMARY_V6_SHIFT: u32 = 8;

/// Maximum number of devices in the map `npl_pre_tc_devs`.
pub const MAX_PRE_TC_DEVICES: u32 = 256;

/// The value of each element of `npl_pre_tc_devs`. Only the key has a meaning: the interface index of a device.
pub const PRE_TC_DEVICE_VALUE: u32 = 1;

const _: () =
    assert!(core::mem::offset_of!(Config, primary_v4) == 8, "the address and its index must be in one aligned word");
const _: () = assert!(
    core::mem::offset_of!(Config, primary_v4_index) == 12,
    "the address and its index must be in one aligned word"
);

const _: () = assert!(
    core::mem::offset_of!(Config, abi) == Config::EPOCH_WORD * size_of::<u64>(),
    "`abi` and `epoch` must be in one aligned word"
);
const _: () = assert!(core::mem::offset_of!(Config, epoch) == 28, "`abi` and `epoch` must be in one aligned word");

impl Config {
    /// Index of the 8-byte word of [`Config`] that contains `abi` and `epoch`.
    pub const EPOCH_WORD: usize = 3;

    /// Returns a copy of the configuration with [`FLAG_PRE_TC_DEVICES`] set or cleared.
    #[must_use]
    pub const fn with_pre_tc_devices(self, is_used: bool) -> Self {
        self.with_flag(FLAG_PRE_TC_DEVICES, is_used)
    }

    /// Returns a copy of the configuration with [`FLAG_HOST_CLIENTS`] set or cleared.
    #[must_use]
    pub const fn with_host_clients_only(self, is_restricted: bool) -> Self {
        self.with_flag(FLAG_HOST_CLIENTS, is_restricted)
    }

    /// Returns a copy of the configuration with [`FLAG_FINAL_SOURCES`] set or cleared.
    #[must_use]
    pub const fn with_final_sources(self, are_final: bool) -> Self {
        self.with_flag(FLAG_FINAL_SOURCES, are_final)
    }

    /// Returns whether no mapping has the protocol UDP: see [`FLAG_NO_UDP_MAPPINGS`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
    pub const fn has_no_udp_mappings(&self) -> bool {
        self.flags & FLAG_NO_UDP_MAPPINGS != 0
    }

    /// Returns a copy of the configuration with [`FLAG_NO_UDP_MAPPINGS`] set or cleared.
    #[must_use]
    pub const fn without_udp_mappings(self, are_absent: bool) -> Self {
        self.with_flag(FLAG_NO_UDP_MAPPINGS, are_absent)
    }

    const fn with_flag(self, flag: u32, is_set: bool) -> Self {
        let others = self.flags & !flag;
        Self { flags: if is_set { others | flag } else { others }, ..self }
    }

    /// Returns the index of the Node's primary IPv6 address in the map `npl_idx2addr_v6`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
    #[expect(clippy::cast_possible_truncation, reason = "the index is one byte of the flags")]
    pub const fn primary_v6_index(&self) -> u8 {
        (self.flags >> PRIMARY_V6_SHIFT) as u8
    }

    /// Returns a copy of the configuration with another index of the primary IPv6 address.
    #[must_use]
    pub const fn with_primary_v6_index(self, index: u8) -> Self {
        let others = self.flags & !(0xff << PRIMARY_V6_SHIFT);
        Self { flags: others | (index as u32) << PRIMARY_V6_SHIFT, ..self }
    }

    /// Returns whether a port, in host byte order, is in the node port range.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
    pub const fn contains(&self, port: u16) -> bool {
        port >= self.port_min && port <= self.port_max
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, FLAG_FINAL_SOURCES, FLAG_HOST_CLIENTS, FLAG_NO_UDP_MAPPINGS, FLAG_PRE_TC_DEVICES};

    #[test]
    fn no_flag_changes_another_one_or_the_index_of_the_primary_ipv6_address() {
        let config = Config {
            seed: 0,
            primary_v4: [0; 4],
            primary_v4_index: 0,
            port_min: 0,
            port_max: 0,
            flags: 0,
            abi: 0,
            epoch: 0,
            netns_cookie: 0,
        };
        let both = config.with_primary_v6_index(255).with_pre_tc_devices(true);
        assert_eq!((both.primary_v6_index(), both.flags & FLAG_PRE_TC_DEVICES), (255, FLAG_PRE_TC_DEVICES));
        assert_eq!(both.with_pre_tc_devices(false).primary_v6_index(), 255);
        assert_eq!(both.with_primary_v6_index(0).flags, FLAG_PRE_TC_DEVICES);
        assert_eq!(config.primary_v6_index(), 0, "the index is 0 if the agent has not written it");
        let restricted = both.with_host_clients_only(true);
        assert_eq!(restricted.flags ^ both.flags, FLAG_HOST_CLIENTS);
        assert_eq!(restricted.with_pre_tc_devices(false).flags & FLAG_HOST_CLIENTS, FLAG_HOST_CLIENTS);
        assert_eq!(restricted.with_host_clients_only(false), both);
        let are_final = restricted.with_final_sources(true);
        assert_eq!(are_final.flags ^ restricted.flags, FLAG_FINAL_SOURCES);
        assert_eq!(are_final.with_final_sources(false), restricted);
        let without_udp = are_final.without_udp_mappings(true);
        assert_eq!(without_udp.flags ^ are_final.flags, FLAG_NO_UDP_MAPPINGS);
        assert_eq!(without_udp.without_udp_mappings(false), are_final);
    }
}

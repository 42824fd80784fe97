// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the maps of next hops for `--forwarding redirect` and `offload`. One map contains uplinks by interface
//! index, and one map for each IP family contains the next hops of Pods by address. An uplink or a next hop is in its
//! map only while NPL's programs are attached to the uplink or to the Pod's device.
//!
//! The programs keep the next hops of replies in a cache: see [`CachedNextHop`].

/// Maximum number of uplinks in the map `npl_rd_uplinks`.
pub const MAX_UPLINKS: u32 = 256;
/// Maximum number of Pod addresses of one IP family in the map of next hops.
pub const MAX_NEXT_HOPS: u32 = 4096;

/// The value of each element of `npl_rd_uplinks`. Only the key has a meaning: the interface index of an uplink.
pub const UPLINK: u32 = 1;

/// The kind of device through which a Pod is reached.
pub mod kind {
    /// A veth or netkit pair whose peer is in the Pod's network namespace.
    pub const PEER: u16 = 1;
    /// A bridge; the kernel's neighbor table has the Pod's link-layer address.
    pub const BRIDGE: u16 = 2;
}

map_type! {
    /// The address of a Pod.
    pub struct PodAddressV4: 4, align 4 {
        /// The Pod's address, in network byte order.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// Like [`PodAddressV4`], for IPv6.
    pub struct PodAddressV6: 16, align 4 {
        /// The Pod's address, in network byte order.
        pub addr: [u8; 16],
    }
}

map_type! {
    /// The device through which the Node reaches a Pod: requests to the Pod leave through this device, and the Pod's
    /// replies arrive on it.
    pub struct PodNextHop: 8, align 4 {
        /// The device's index.
        pub ifindex: u32,
        /// The device's MTU in bytes, IP header included.
        pub mtu: u16,
        /// 1 for a veth or netkit pair into the Pod ([`kind::PEER`]), 2 for a bridge ([`kind::BRIDGE`]).
        pub kind: u16,
    }
}

/// Number of cached next hops of each processor, a power of two.
pub const CACHED_NEXT_HOPS: u32 = 512;
/// Lifetime of a cached next hop in jiffies: 16 ms to 160 ms, depending on the kernel's `CONFIG_HZ`. A change of a route
/// or of a neighbor therefore applies to replies of an active flow after at most this time.
pub const NEXT_HOP_LIFETIME_JIFFIES: u32 = 16;

const _: () = assert!(CACHED_NEXT_HOPS.is_power_of_two(), "slots are chosen by a mask");

map_type! {
    /// A cached next hop of a flow's replies: the result of the kernel's route look-up and neighbor look-up.
    ///
    /// The first reply of a flow, and the first reply after the lifetime ([`NEXT_HOP_LIFETIME_JIFFIES`]), leave through
    /// `bpf_redirect_neigh`, so that the kernel also checks whether the neighbor is still reachable.
    pub struct CachedNextHop: 32, align 8 {
        /// Hash of the parameters of the route look-up.
        pub key: u64,
        /// Destination and source address of the Ethernet header.
        pub ethernet: [u8; 12],
        /// The path MTU in bytes or, before Linux 5.12, the length of the packet whose route was looked up. The programs
        /// look up the route of a longer packet.
        pub length: u16,
        /// Always zero.
        pub pad: u16,
        /// Interface index of the uplink.
        pub ifindex: u32,
        /// The low 32 bits of the kernel's `jiffies` at the time of the route look-up.
        pub stored_at: u32,
    }
}

map_type! {
    /// Memory for a route look-up of a program.
    pub struct RouteLookup: 64, align 4 {
        /// The parameters, which the kernel overwrites with the result (`struct bpf_fib_lookup` of the kernel).
        pub words: [u32; 16],
    }
}

impl CachedNextHop {
    /// Returns the slot of a key.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    #[expect(clippy::cast_possible_truncation, reason = "only the low bits choose the slot")]
    pub const fn slot(key: u64) -> u32 {
        key as u32 & (CACHED_NEXT_HOPS - 1)
    }

    /// Returns whether the cached next hop is valid at the time `jiffies` for a packet of `length` bytes, whose route
    /// look-up has the parameters `key`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_valid(&self, key: u64, length: u16, jiffies: u32) -> bool {
        self.key == key && length <= self.length && jiffies.wrapping_sub(self.stored_at) < NEXT_HOP_LIFETIME_JIFFIES
    }
}

impl PodNextHop {
    /// Returns whether the next hop has a device; otherwise the host's stack forwards the packet.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_reachable(&self) -> bool {
        self.ifindex != 0
    }
}

#[cfg(test)]
mod tests {
    use super::{CACHED_NEXT_HOPS, CachedNextHop, NEXT_HOP_LIFETIME_JIFFIES};

    const STORED_AT: u32 = u32::MAX - 3;
    const CACHED: CachedNextHop =
        CachedNextHop { key: 7, ethernet: [2; 12], length: 1500, pad: 0, ifindex: 2, stored_at: STORED_AT };

    #[test]
    fn a_cached_next_hop_is_valid_for_its_key_until_its_lifetime_ends() {
        for age in 0..NEXT_HOP_LIFETIME_JIFFIES {
            assert!(CACHED.is_valid(7, 1500, STORED_AT.wrapping_add(age)), "after {age} jiffies");
        }
        for age in [NEXT_HOP_LIFETIME_JIFFIES, 1 << 16, u32::MAX] {
            assert!(!CACHED.is_valid(7, 1500, STORED_AT.wrapping_add(age)), "after {age} jiffies");
        }
        assert!(!CACHED.is_valid(8, 1500, STORED_AT));
    }

    #[test]
    fn a_cached_next_hop_is_invalid_for_packets_above_the_path_mtu() {
        assert!(CACHED.is_valid(7, 40, STORED_AT));
        assert!(!CACHED.is_valid(7, 1501, STORED_AT));
        let unused = CachedNextHop { key: 0, ethernet: [0; 12], length: 0, pad: 0, ifindex: 0, stored_at: 0 };
        assert!(!unused.is_valid(0, 20, 0), "an element that no program has written");
    }

    #[test]
    fn slots_are_elements_of_the_map() {
        for key in [0, 511, 512, u64::MAX] {
            assert!(CachedNextHop::slot(key) < CACHED_NEXT_HOPS);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the maps of next hops for `--forwarding redirect` and `offload`. One map contains uplinks by interface
//! index, and one map for each IP family contains the next hops of Pods by address. An uplink or a next hop is in its
//! map only while NPL's programs are attached to the uplink or to the Pod's device.

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

impl PodNextHop {
    /// Returns whether the next hop has a device; otherwise the host's stack forwards the packet.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_reachable(&self) -> bool {
        self.ifindex != 0
    }
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! What `--forwarding redirect` leads packets between: uplinks by their kernel index, and Pods by their address. Either is
//! there only while its programs are.

/// Most uplinks at a time.
pub const MAX_UPLINKS: u32 = 256;
/// Most addresses of Pods at a time, per family.
pub const MAX_PODS: u32 = 4096;

/// The value of every uplink.
pub const UPLINK: u32 = 1;

/// How a device leads to a Pod.
pub mod kind {
    /// Its other end is the Pod's, in another network namespace.
    pub const PEER: u16 = 1;
    /// It is a bridge, on which the kernel's neighbours tell the Pod.
    pub const BRIDGE: u16 = 2;
}

map_type! {
    /// A Pod's IPv4 address.
    pub struct PodV4: 4, align 4 {
        /// Network order.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// A Pod's IPv6 address.
    pub struct PodV6: 16, align 4 {
        /// Network order.
        pub addr: [u8; 16],
    }
}

map_type! {
    /// How a Pod is reached, and where its replies come from.
    pub struct PodWay: 8, align 4 {
        /// The device, by the kernel's index.
        pub ifindex: u32,
        /// The largest packet that fits, in bytes with its IP header.
        pub mtu: u16,
        /// [`kind`].
        pub kind: u16,
    }
}

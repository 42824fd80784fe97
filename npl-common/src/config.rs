// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! What the agent tells every program; one array element, written by the agent, read by the kernel.

map_type! {
    /// Configuration that all programs read. Changing it takes effect with the next packet.
    pub struct Config: 24, align 8 {
        /// Secret that keeps an outsider from choosing slots of the half-open cache; drawn once, kept over restarts.
        pub seed: u64,
        /// First node port that any mapping may have, host order.
        pub port_min: u16,
        /// Last node port that any mapping may have, host order, inclusive.
        pub port_max: u16,
        /// Bit set of `FLAG_*`; none is defined yet.
        pub flags: u32,
        /// Layout version of all maps: [`crate::names::ABI_VERSION`].
        pub abi: u32,
        /// Always zero.
        pub pad: u32,
    }
}

impl Config {
    /// Whether a destination port can belong to a mapping at all. Host order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
    pub const fn contains(&self, port: u16) -> bool {
        port >= self.port_min && port <= self.port_max
    }
}

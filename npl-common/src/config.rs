// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! What the agent tells every program; one array element, written by the agent, read by the kernel.

map_type! {
    /// Configuration that all programs read. Changing it takes effect with the next packet.
    pub struct Config: 40, align 8 {
        /// Secret that keeps an outsider from choosing slots of the half-open cache; drawn once, kept over restarts.
        pub seed: u64,
        /// The IPv4 address that most clients use, network order; all zero if there is none. The programs spare themselves
        /// its look-up. It and its index are one aligned word, which is written and read as one.
        pub primary_v4: [u8; 4],
        /// Position of `primary_v4` in the address index map.
        pub primary_v4_index: u32,
        /// First node port that any mapping may have, host order.
        pub port_min: u16,
        /// Last node port that any mapping may have, host order, inclusive.
        pub port_max: u16,
        /// Bit set of `FLAG_*`.
        pub flags: u32,
        /// Layout version of all maps: [`crate::names::ABI_VERSION`].
        pub abi: u32,
        /// Another one whenever a mapping, an endpoint, the way to a Pod or one of the Node's addresses has changed or gone:
        /// see [`crate::hint`]. It and `abi` are one aligned word, which is written and read as one.
        pub epoch: u32,
        /// The kernel's name of the Node's network namespace, in which loopback addresses are the Node's; 0 if unknown.
        pub netns_cookie: u64,
    }
}

/// The program for drivers is with some devices, which have a table. It sees requests first, and what it has translated looks
/// to TC's like a client's own packet to the Pod.
pub const FLAG_XDP: u32 = 1;

/// Most devices with that program at a time.
pub const MAX_XDP_DEVICES: u32 = 256;

/// The value of every such device.
pub const AHEAD: u32 = 1;

const _: () = assert!(core::mem::offset_of!(Config, primary_v4) == 8, "one aligned word");
const _: () = assert!(core::mem::offset_of!(Config, primary_v4_index) == 12, "one aligned word");

const _: () = assert!(core::mem::offset_of!(Config, abi) == Config::EPOCH_WORD * size_of::<u64>(), "one aligned word");
const _: () = assert!(core::mem::offset_of!(Config, epoch) == 28, "one aligned word");

impl Config {
    /// Position of the word with `abi` and `epoch`, in words of eight bytes.
    pub const EPOCH_WORD: usize = 3;

    /// Whether a destination port can belong to a mapping at all. Host order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
    pub const fn contains(&self, port: u16) -> bool {
        port >= self.port_min && port <= self.port_max
    }
}

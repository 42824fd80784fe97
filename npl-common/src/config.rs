// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Configuration of the kernel programs: one array element, which the agent writes.

map_type! {
    /// Configuration that all programs read. A change takes effect with the next packet.
    pub struct Config: 40, align 8 {
        /// Secret random seed of the hash that chooses slots, so that a sender cannot choose a slot; kept over agent
        /// restarts.
        pub seed: u64,
        /// The Node's primary IPv4 address, network order, which the programs recognize without a map look-up; all zero
        /// if unset. Address and index are in one aligned word, which is written and read atomically.
        pub primary_v4: [u8; 4],
        /// Position of `primary_v4` in the address index map.
        pub primary_v4_index: u32,
        /// First node port that any mapping may have, host order.
        pub port_min: u16,
        /// Last node port that any mapping may have, host order, inclusive.
        pub port_max: u16,
        /// [`FLAG_XDP`] (1) if a device runs the XDP program, else 0.
        pub flags: u32,
        /// [`crate::names::ABI_VERSION`], the layout version of all maps.
        pub abi: u32,
        /// Changes whenever a mapping, an endpoint, a next hop or a node address changes, and invalidates the lookup
        /// caches: see [`crate::lookup_cache`]. Epoch and `abi` are in one aligned word, which is written and read
        /// atomically.
        pub epoch: u32,
        /// Cookie of the host's network namespace, the only one whose loopback addresses are the Node's; 0 if unknown.
        pub netns_cookie: u64,
    }
}

/// At least one device runs the XDP program; `npl_xdp_dev` has the indexes of these devices. On these devices, TC sees
/// a request that XDP has translated as if the client had sent it to the Pod directly, so TC must not treat it as a
/// direct connection.
pub const FLAG_XDP: u32 = 1;

/// Maximum number of devices that run the XDP program at the same time.
pub const MAX_XDP_DEVICES: u32 = 256;

/// The value of every device in `npl_xdp_dev`.
pub const XDP_ATTACHED: u32 = 1;

const _: () = assert!(core::mem::offset_of!(Config, primary_v4) == 8, "one aligned word");
const _: () = assert!(core::mem::offset_of!(Config, primary_v4_index) == 12, "one aligned word");

const _: () = assert!(core::mem::offset_of!(Config, abi) == Config::EPOCH_WORD * size_of::<u64>(), "one aligned word");
const _: () = assert!(core::mem::offset_of!(Config, epoch) == 28, "one aligned word");

impl Config {
    /// Index of the 8-byte word with `abi` and `epoch`.
    pub const EPOCH_WORD: usize = 3;

    /// Whether a port is in the node port range. Host order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and depth of calls in kernel programs")]
    pub const fn contains(&self, port: u16) -> bool {
        port >= self.port_min && port <= self.port_max
    }
}

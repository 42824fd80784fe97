// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Packet tracing: the filter that `npl-agent trace` writes, and the records that programs write to the ring buffer.
//!
//! A record has the packet before and after a program, and the program's verdict. Records are written only while a
//! filter is armed.

/// Bytes of a packet that a record contains, from the IP header on.
pub const SNAP_LENGTH: u32 = 128;
/// Bytes of the ring buffer: some 600 records.
pub const RING_BYTES: u32 = 256 * 1024;
/// Number of endpoints on the Node's side that a filter can select.
pub const MAX_ENDPOINTS: usize = 8;

/// Value of [`EndpointFilter::unused`] in an element that no packet matches.
pub const UNUSED: u64 = 1;
/// Flag in a port: the address is an IPv6 address.
pub const IPV6: u32 = 1 << 16;
/// Bits of a port, without [`IPV6`].
pub const PORT_MASK: u32 = 0xffff;
/// Flag in [`PacketCopy::protocol`]: the packet is an ICMP error, which every filter selects, because the command compares
/// the packet that the error quotes.
pub const ICMP_ERROR: u32 = 1 << 8;

/// Hooks of programs, for [`TraceRecord::hook`].
pub mod hook {
    /// TC ingress.
    pub const INGRESS: u8 = 0;
    /// TC egress.
    pub const EGRESS: u8 = 1;
    /// XDP.
    pub const XDP: u8 = 2;
}

/// Verdicts, for [`TraceRecord::verdict`].
pub mod verdict {
    /// No mapping can match the packet; passed unchanged and not counted.
    pub const UNRELATED: u8 = 0;
    /// The program tail-calls its slow path, which has a record of its own.
    pub const SLOW_PATH: u8 = 1;
    /// Passed unchanged, and counted under [`super::TraceRecord::reason`].
    pub const PASSED: u8 = 2;
    /// Rewritten, and passed to the host's stack.
    pub const TRANSLATED: u8 = 3;
    /// Rewritten, and redirected to another device.
    pub const REDIRECTED: u8 = 4;
    /// Dropped, and counted under [`super::TraceRecord::reason`].
    pub const DROPPED: u8 = 5;
    /// The program has not decided yet. No record in the ring buffer has this verdict.
    pub const PENDING: u8 = 255;
}

map_type! {
    /// Selects packets with an address and port at one of their ends.
    pub struct EndpointFilter: 48, align 8 {
        /// The address; an IPv4 address is in the first four bytes, followed by zeros.
        pub addr: [u64; 2],
        /// The bits of `addr` that must be equal; 0 selects any address.
        pub addr_mask: [u64; 2],
        /// The port, plus [`IPV6`] (65 536) for an IPv6 address.
        pub port: u32,
        /// The bits of `port` that must be equal; 0 selects any port and family. A packet whose ports are not found, such as a
        /// later fragment, matches every port; a packet of a protocol without ports has port 0.
        pub port_mask: u32,
        /// 0, or 1 if the element selects no packet.
        pub unused: u64,
    }
}

map_type! {
    /// The filter of packet tracing. A packet is recorded if one of its ends matches `client`, and one of its ends, before
    /// or after translation, matches one of `endpoints`.
    pub struct TraceFilter: 456, align 8 {
        /// `CLOCK_MONOTONIC` time in nanoseconds at which tracing ends, unless the command extends it; 0 if tracing is
        /// off.
        pub until: u64,
        /// The greatest number of records per second and CPU.
        pub rate: u64,
        /// The transport protocol; 0 selects every protocol.
        pub protocol: u64,
        /// The client.
        pub client: EndpointFilter,
        /// Node ports and Pod endpoints; the packet has to match one of them.
        pub endpoints: [EndpointFilter; MAX_ENDPOINTS],
    }
}

map_type! {
    /// One end of a packet.
    pub struct PacketEnd: 24, align 8 {
        /// The address, as in [`EndpointFilter::addr`].
        pub addr: [u64; 2],
        /// The port, plus [`IPV6`] (65 536) for an IPv6 address.
        pub port: u32,
        /// 131 071, or 65 536 if the packet may have ports that the program has not found.
        pub port_mask: u32,
    }
}

map_type! {
    /// A packet before or after a program.
    pub struct PacketCopy: 184, align 8 {
        /// Source and destination.
        pub ends: [PacketEnd; 2],
        /// The transport protocol, plus [`ICMP_ERROR`] (256) for an ICMP error; 0 if no transport header was found.
        pub protocol: u32,
        /// Number of valid bytes.
        pub captured: u32,
        /// The first bytes of the packet, from the IP header on.
        pub bytes: [u8; SNAP_LENGTH as usize],
    }
}

map_type! {
    /// One run of a program on one packet.
    pub struct TraceRecord: 392, align 8 {
        /// `CLOCK_MONOTONIC` time in nanoseconds.
        pub time: u64,
        /// Bytes of the packet from the IP header on, before translation.
        pub length: u32,
        /// Index of the program's device.
        pub ifindex: u32,
        /// A [`hook`].
        pub hook: u8,
        /// 1 if the program translates replies, 0 for requests.
        pub is_reply: u8,
        /// 1 for a program of the slow path.
        pub is_slow_path: u8,
        /// A [`verdict`].
        pub verdict: u8,
        /// A [`crate::reason::Reason`]; 0 if the verdict has none.
        pub reason: u32,
        /// The packet before and after the program.
        pub packets: [PacketCopy; 2],
    }
}

map_type! {
    /// The record that a CPU is writing, and what this CPU did not record.
    pub struct TraceCpu: 424, align 8 {
        /// The record of the program that is running.
        pub record: TraceRecord,
        /// `CLOCK_MONOTONIC` time in nanoseconds at which the current second of the rate limit began.
        pub second_began: u64,
        /// Records of the current second.
        pub in_second: u64,
        /// Records that exceeded the rate limit.
        pub rate_limited: u64,
        /// Records for which the ring buffer had no room.
        pub lost: u64,
    }
}

impl EndpointFilter {
    /// Matches every packet.
    pub const ANY: Self = Self { addr: [0; 2], addr_mask: [0; 2], port: 0, port_mask: 0, unused: 0 };
    /// Matches no packet.
    pub const NONE: Self = Self { unused: UNUSED, ..Self::ANY };

    /// 0 if the end matches; any other value otherwise.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and depth of calls in kernel programs")]
    pub const fn difference(&self, end: &PacketEnd) -> u64 {
        let addr = (self.addr[0] ^ end.addr[0]) & self.addr_mask[0] | (self.addr[1] ^ end.addr[1]) & self.addr_mask[1];
        let port = (self.port ^ end.port) & self.port_mask & end.port_mask;
        addr | port as u64 | self.unused
    }
}

impl TraceFilter {
    /// No tracing.
    pub const OFF: Self = Self {
        until: 0,
        rate: 0,
        protocol: 0,
        client: EndpointFilter::ANY,
        endpoints: [EndpointFilter::NONE; MAX_ENDPOINTS],
    };
}

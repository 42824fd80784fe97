// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the filter of packet tracing, which `npl-agent trace` writes, and the records that the programs write to a
//! ring buffer.
//!
//! A record contains a packet before and after a program, and the program's verdict. The programs write records only
//! while `npl-agent trace` runs.

/// Largest number of bytes of a packet that a record contains, starting at the packet's IP header.
pub const SNAP_LENGTH: u32 = 128;
/// Size of the ring buffer in bytes. The ring buffer has room for about 650 records.
pub const RING_BYTES: u32 = 256 * 1024;
/// Largest number of endpoints in a filter. Node ports and Pod endpoints count together.
pub const MAX_ENDPOINTS: usize = 8;

/// Value of [`EndpointFilter::unused`] in an unused [`EndpointFilter`], which no packet matches.
pub const UNUSED: u64 = 1;
/// Flag in [`EndpointFilter::port`] and [`PacketEnd::port`]: the address in the same struct is an IPv6 address.
pub const IPV6: u32 = 1 << 16;
/// Mask of the port number in [`EndpointFilter::port`] and [`PacketEnd::port`], without the flag [`IPV6`].
pub const PORT_MASK: u32 = 0xffff;
/// Flag in [`PacketCopy::protocol`]: the packet is an ICMP error. The programs record every ICMP error, and `npl-agent
/// trace` compares the packet that the error quotes with the filter.
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
    /// The packet was passed unchanged and not counted: no mapping can match the packet, or another program of NPL
    /// handles the packet.
    pub const UNRELATED: u8 = 0;
    /// The program tail-calls its slow path, which writes a separate record.
    pub const SLOW_PATH: u8 = 1;
    /// The packet was passed unchanged, and counted under [`super::TraceRecord::reason`].
    pub const PASSED: u8 = 2;
    /// The packet was rewritten, and passed to the host's stack.
    pub const TRANSLATED: u8 = 3;
    /// The packet was rewritten, and redirected to another device.
    pub const REDIRECTED: u8 = 4;
    /// The packet was dropped, and counted under [`super::TraceRecord::reason`].
    pub const DROPPED: u8 = 5;
    /// The program has not reached a verdict yet. No record in the ring buffer has this value.
    pub const PENDING: u8 = 255;
}

map_type! {
    /// Selects packets by the address and port of their source or destination.
    pub struct EndpointFilter: 48, align 8 {
        /// The address; an IPv4 address is in the first four bytes, followed by zeros.
        pub addr: [u64; 2],
        /// Mask: the bits in which the packet's address must be equal to `addr`. 0 selects every address.
        pub addr_mask: [u64; 2],
        /// The port, plus [`IPV6`] (65 536) for an IPv6 address.
        pub port: u32,
        /// Mask: the bits in which the packet's port must be equal to `port`. 0 selects every port and IP family. A
        /// packet whose ports are unknown, such as a later fragment, matches every port. A packet of a protocol without
        /// ports has port 0.
        pub port_mask: u32,
        /// 1 if the element is unused and selects no packet; otherwise 0.
        pub unused: u64,
    }
}

map_type! {
    /// The filter of packet tracing. A packet has up to four addresses with ports: source and destination, before and
    /// after translation. The packet is recorded if one of the four matches `client`, one of the four matches an
    /// element of `endpoints`, and the packet has the protocol `protocol` or no readable transport header. Every ICMP
    /// error is recorded.
    pub struct TraceFilter: 456, align 8 {
        /// `CLOCK_MONOTONIC` time in nanoseconds at which tracing ends, unless `npl-agent trace` sets a later time; 0
        /// if tracing is off.
        pub until: u64,
        /// The greatest number of records per second and CPU.
        pub rate: u64,
        /// The transport protocol; 0 selects every protocol.
        pub protocol: u64,
        /// The client's address and port.
        pub client: EndpointFilter,
        /// The node ports and Pod endpoints, of which a packet must match one.
        pub endpoints: [EndpointFilter; MAX_ENDPOINTS],
    }
}

map_type! {
    /// The source or the destination of a packet: an address and a port.
    pub struct PacketEnd: 24, align 8 {
        /// The address, as in [`EndpointFilter::addr`].
        pub addr: [u64; 2],
        /// The port, plus [`IPV6`] (65 536) for an IPv6 address.
        pub port: u32,
        /// The bits of `port` that the program knows: 131 071 (port and IP family) or, if the packet may have ports
        /// that the program does not know, 65 536 (only the IP family).
        pub port_mask: u32,
    }
}

map_type! {
    /// Copy of a packet before or after a program.
    pub struct PacketCopy: 184, align 8 {
        /// Source and destination.
        pub ends: [PacketEnd; 2],
        /// The transport protocol, plus [`ICMP_ERROR`] (256) for an ICMP error; 0 if no transport header was found.
        pub protocol: u32,
        /// Number of bytes of the packet in `bytes`.
        pub captured: u32,
        /// The first bytes of the packet, starting at the IP header.
        pub bytes: [u8; SNAP_LENGTH as usize],
    }
}

map_type! {
    /// The record of one run of a program on one packet.
    pub struct TraceRecord: 392, align 8 {
        /// `CLOCK_MONOTONIC` time of the run, in nanoseconds.
        pub time: u64,
        /// Length of the packet in bytes, starting at the IP header, before translation.
        pub length: u32,
        /// Interface index of the device at whose hook the program ran.
        pub ifindex: u32,
        /// The program's hook: 0 TC ingress, 1 TC egress, 2 XDP ([`hook`]).
        pub hook: u8,
        /// 1 if the program translates replies, 0 for requests.
        pub is_reply: u8,
        /// 1 for a program of the slow path.
        pub is_slow_path: u8,
        /// The program's verdict ([`verdict`]): 0 unrelated, 1 slow path, 2 passed, 3 translated, 4 redirected, 5
        /// dropped.
        pub verdict: u8,
        /// Number of the verdict's [`crate::reason::Reason`]; 0 if the verdict has no reason.
        pub reason: u32,
        /// The packet before and after the program.
        pub packets: [PacketCopy; 2],
    }
}

map_type! {
    /// The record that a CPU is writing, and the counts of records that this CPU did not write.
    pub struct TraceCpu: 424, align 8 {
        /// The record of the program that is running.
        pub record: TraceRecord,
        /// `CLOCK_MONOTONIC` time in nanoseconds at which the current second of the rate limit began.
        pub second_began: u64,
        /// Number of records in the current second.
        pub in_second: u64,
        /// Number of records that were not written because of the rate limit.
        pub rate_limited: u64,
        /// Number of records for which the ring buffer had no room.
        pub lost: u64,
    }
}

impl EndpointFilter {
    /// A filter that matches every address and port.
    pub const ANY: Self = Self { addr: [0; 2], addr_mask: [0; 2], port: 0, port_mask: 0, unused: 0 };
    /// A filter that matches no packet.
    pub const NONE: Self = Self { unused: UNUSED, ..Self::ANY };

    /// Returns 0 if the filter matches the address and port, and a nonzero value if it does not.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
    pub const fn difference(&self, end: &PacketEnd) -> u64 {
        let addr = (self.addr[0] ^ end.addr[0]) & self.addr_mask[0] | (self.addr[1] ^ end.addr[1]) & self.addr_mask[1];
        let port = (self.port ^ end.port) & self.port_mask & end.port_mask;
        addr | port as u64 | self.unused
    }
}

impl TraceFilter {
    /// The filter while tracing is off.
    pub const OFF: Self = Self {
        until: 0,
        rate: 0,
        protocol: 0,
        client: EndpointFilter::ANY,
        endpoints: [EndpointFilter::NONE; MAX_ENDPOINTS],
    };
}

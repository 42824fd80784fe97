// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the reasons under which the programs count packets. Most counted packets are dropped or passed unchanged,
//! although they may be requests, replies or ICMP errors of a mapping. The other counted packets are translated,
//! although they belong to a tuple conflict, or although the kernel has rejected their conntrack entry.

macro_rules! reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $value:literal, $name:literal; )+) => {
        /// The reasons; the number of a reason is its index in the map of reason counters. A packet to a port of the
        /// node port range on a node address, or from a mapped Pod port, is translated or counted under one of these
        /// reasons. Most other packets are passed unchanged and not counted.
        #[repr(u32)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $( $(#[doc = $doc])+ $variant = $value, )+
        }

        impl Reason {
            /// Every reason, in the order of the counters.
            pub const ALL: &[Self] = &[ $( Self::$variant, )+ ];

            /// Returns the reason's name in metrics and in the output of commands.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// Returns the meaning of the reason, for operators.
            pub const fn help(self) -> &'static str {
                match self { $( Self::$variant => concat!($($doc,)+).trim_ascii(), )+ }
            }
        }
    };
}

reasons! {
    /// The packet's destination is a node port without a mapping for the packet's protocol, or the packet is an ICMP
    /// error about a packet from such a port; the packet is passed to the host unchanged.
    NoMapping = 0, "no_mapping";
    /// The packet is a fragment that arrived before the first fragment of its datagram; a copy is saved until the first
    /// fragment arrives, and the packet itself is passed to the host unchanged.
    EarlyFragment = 1, "early_fragment";
    /// The packet ends before its transport header is complete; the packet is passed to the host unchanged.
    Truncated = 2, "truncated";
    /// The packet comes from a mapped Pod port but has no conntrack entry, for example because the packet belongs to a
    /// direct connection (from the client to the Pod's address); the packet is passed unchanged.
    UntrackedReply = 3, "untracked_reply";
    /// Two connections have the same client and Pod endpoints: the client uses two NAT addresses (node address and node
    /// port), or a NAT address and the Pod's own address. UDP replies follow the newer connection; TCP and SCTP replies
    /// follow the connection that the Pod accepted last.
    TupleConflict = 4, "tuple_conflict";
    /// The kernel did not add the flow's conntrack entry to the flow table; the packet is translated, and the flow
    /// stays in the half-open cache.
    FlowTableFull = 5, "flow_table_full";
    /// The program could not write the packet, or could not overwrite the packet with a saved fragment, usually because
    /// the kernel had no free memory; the packet may already be partly rewritten, and is dropped.
    RewriteFailed = 6, "rewrite_failed";
    /// The packet is an ICMP error whose quoted packet is truncated or does not match the error's destination; the
    /// error is passed unchanged.
    BadQuote = 7, "bad_quote";
    /// The packet is a first SCTP fragment that cannot wait in the SCTP reassembly buffer (slot occupied, or frame
    /// above 2024 bytes), and no chunk shows the datagram's length; the packet is passed unchanged.
    SctpFragment = 8, "sctp_fragment";
    /// The mapping's allow-list does not contain the source of the packet, or the client in the packet that an ICMP
    /// error quotes; the packet is dropped.
    SourceRefused = 9, "source_refused";
    /// The packet belongs to a connection of the Node itself, or to a masqueraded connection, that uses a port of the
    /// node port range, or to a connection to a node port that rules of other software translate; the packet is passed
    /// to the host unchanged.
    HostConnection = 10, "host_connection";
    /// The packet's destination is a node address, and the packet has more than six IPv6 extension headers, an
    /// extension header that is cut off, or a routing header with segments left; the packet is passed to the host
    /// unchanged.
    Ipv6ExtensionHeaders = 11, "ipv6_extension_headers";
    /// The packet is an ICMP error whose quoted packet belongs to no known flow: the quoted packet is the Node's own
    /// traffic, the flow has ended, or the quote is forged; the error is passed to the host unchanged.
    UntrackedError = 12, "untracked_error";
}

impl Reason {
    /// Returns the action of the programs on a counted packet, for the reference page.
    pub const fn packet(self) -> &'static str {
        match self {
            Self::SourceRefused | Self::RewriteFailed => "dropped",
            Self::FlowTableFull => "translated",
            Self::TupleConflict => "translated; passed unchanged if the newer connection is direct",
            Self::EarlyFragment => "passed unchanged; a copy is saved and translated later",
            Self::NoMapping
            | Self::Truncated
            | Self::UntrackedReply
            | Self::BadQuote
            | Self::SctpFragment
            | Self::HostConnection
            | Self::Ipv6ExtensionHeaders
            | Self::UntrackedError => "passed unchanged",
        }
    }
}

/// Number of elements of the map of reason counters. The map has room for more reasons than exist, so that a new reason
/// does not change the size of the map.
pub const MAX_REASONS: u32 = 64;

const _: () = assert!(Reason::ALL.len() <= MAX_REASONS as usize, "each reason is an index into the counters");

#[cfg(test)]
mod tests {
    use super::Reason;

    #[test]
    fn reasons_are_numbered_without_a_gap() {
        for (index, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index, "{}", reason.name());
        }
    }
}

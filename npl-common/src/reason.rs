// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Reasons for which a packet to or from a mapped port was passed unchanged or dropped, or was translated with a
//! conflict.

macro_rules! reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $value:literal, $name:literal; )+) => {
        /// Index into the reason counters. Every packet to or from a mapping's port is translated or counted under one
        /// of these reasons; packets that no mapping can match are passed unchanged and not counted.
        #[repr(u32)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $( $(#[doc = $doc])+ $variant = $value, )+
        }

        impl Reason {
            /// Every reason, in the order of the counters.
            pub const ALL: &[Self] = &[ $( Self::$variant, )+ ];

            /// The name in metrics and tables.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// One sentence for an operator.
            pub const fn help(self) -> &'static str {
                match self { $( Self::$variant => concat!($($doc,)+).trim_ascii(), )+ }
            }
        }
    };
}

reasons! {
    /// No mapping has this node port and protocol; passed to the host unchanged.
    NoMapping = 0, "no_mapping";
    /// A fragment that arrived before the first fragment of its datagram; a copy is saved until the first one arrives,
    /// and the fragment itself is passed to the host unchanged.
    EarlyFragment = 1, "early_fragment";
    /// The packet is too short for its transport header; passed to the host unchanged.
    Truncated = 2, "truncated";
    /// A Pod's packet without a conntrack entry, such as one of a direct connection; passed unchanged.
    UntrackedReply = 3, "untracked_reply";
    /// Two connections have the same client and Pod endpoints, through two NAT addresses or one of them direct; replies
    /// follow the newer connection, for TCP once the Pod accepts it.
    TupleConflict = 4, "tuple_conflict";
    /// The flow table has no room for a conntrack entry; the packet is translated, and the flow stays in the half-open
    /// cache.
    FlowTableFull = 5, "flow_table_full";
    /// The kernel lacked memory to make the packet writable after its rewrite had begun; dropped.
    RewriteFailed = 6, "rewrite_failed";
    /// An ICMP error whose quoted packet is truncated or does not match the error's destination; passed unchanged.
    BadQuote = 7, "bad_quote";
    /// A first SCTP fragment whose datagram length is unknown, because its slot of the SCTP reassembly buffer is
    /// occupied or its frame exceeds 2024 bytes, and no cut-off chunk shows the length; passed unchanged.
    SctpFragment = 8, "sctp_fragment";
    /// A packet, or an ICMP error about one, from a source that the mapping's allow-list does not contain; dropped.
    SourceRefused = 9, "source_refused";
    /// A packet of the Node's own connection from a port of the range, such as a masqueraded one; passed to the host
    /// unchanged.
    HostConnection = 10, "host_connection";
    /// A packet for the Node with too many or cut-off IPv6 extension headers, or a source route with segments left;
    /// passed to the host unchanged.
    Ipv6ExtensionHeaders = 11, "ipv6_extension_headers";
    /// An ICMP error about a packet that belongs to no known flow: of the Node's own traffic, of a flow that has ended,
    /// or forged; passed to the host unchanged.
    UntrackedError = 12, "untracked_error";
}

impl Reason {
    /// The action of the programs on a counted packet, for the reference page.
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

/// Number of elements of the map of reason counters. It exceeds the number of reasons, so that a new reason does
/// not change the map.
pub const MAX_REASONS: u32 = 64;

const _: () = assert!(Reason::ALL.len() <= MAX_REASONS as usize, "a reason is an index into the counters");

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

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Why a packet that looked like ours was not translated, or what was unusual about one that was.

macro_rules! reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident = $value:literal, $name:literal; )+) => {
        /// Index into the reason counters. Closed: a packet that comes near a mapping gets one of these or is
        /// translated; one that cannot be ours (another port, another protocol) is passed on without being counted.
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
    /// No mapping has this node port and protocol; the packet is left to the host.
    NoMapping = 0, "no_mapping";
    /// A fragment for the Node that came before the first of its datagram, which has the ports; passed on untranslated,
    /// and a copy of it is kept.
    Fragment = 1, "fragment";
    /// The packet ends before its transport header does; passed on untranslated.
    Truncated = 2, "truncated";
    /// A Pod's packet that belongs to no flow of ours, as direct traffic does; passed on untranslated.
    UntrackedReply = 3, "untracked_reply";
    /// Two flows of one client meet at one Pod port, by two node ends, or by one and directly; the newer one has the replies,
    /// of TCP once the Pod accepts it.
    Collision = 4, "collision";
    /// The flow table refused an entry; the half-open cache goes on carrying the flow.
    FlowTableFull = 5, "flow_table_full";
    /// The kernel could not make the packet writable after its rewrite had begun; dropped.
    RewriteFailed = 6, "rewrite_failed";
    /// An ICMP error whose quote ends too early, or names another address than it went to; passed on untranslated.
    BadQuote = 7, "bad_quote";
    /// A first fragment of SCTP for a mapping or of a reply, that cannot wait for the last one and does not tell the length of
    /// the whole itself, which the checksum depends on; passed on untranslated.
    SctpFragment = 8, "sctp_fragment";
    /// A packet for a mapping from a source that its Services do not allow, or an error about such a client; dropped.
    SourceRefused = 9, "source_refused";
    /// A packet or an ICMP error for what the Node itself has under way by a node port, as masquerading gives them; left to the
    /// host.
    OfHost = 10, "of_host";
    /// A packet for the Node behind more IPv6 extension headers than any sender needs, one that is cut off, or a source route
    /// that has not ended; passed on untranslated.
    HeaderChain = 11, "header_chain";
}

/// Elements of the reason counters; more than there are, so that a new reason does not change the map.
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

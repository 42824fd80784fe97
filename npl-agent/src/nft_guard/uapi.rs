// SPDX-License-Identifier: Apache-2.0
//! Constants of `linux/netfilter/nf_tables.h`, `linux/netfilter.h` and `linux/netfilter/nfnetlink_conntrack.h`.

/// `NFNL_SUBSYS_NFTABLES`: the upper byte of the type of each netlink message to nftables.
pub(super) const SUBSYSTEM: u16 = 10;
pub(super) const BATCH_BEGIN: u16 = 16;
pub(super) const BATCH_END: u16 = 17;

pub(super) const NFPROTO_UNSPEC: u8 = 0;
pub(super) const NFPROTO_INET: u8 = 1;
pub(super) const NFPROTO_IPV4: u8 = 2;
pub(super) const NFPROTO_IPV6: u8 = 10;
pub(super) const PRE_ROUTING: u32 = 0;
pub(super) const FORWARD: u32 = 2;
pub(super) const POST_ROUTING: u32 = 4;
pub(super) const DROP: u32 = 0;
pub(super) const ACCEPT: u32 = 1;

pub(super) mod message {
    pub(in super::super) const NEW_TABLE: u16 = 0;
    pub(in super::super) const GET_TABLE: u16 = 1;
    pub(in super::super) const DEL_TABLE: u16 = 2;
    pub(in super::super) const NEW_CHAIN: u16 = 3;
    pub(in super::super) const GET_CHAIN: u16 = 4;
    pub(in super::super) const NEW_RULE: u16 = 6;
    pub(in super::super) const GET_RULE: u16 = 7;
    pub(in super::super) const NEW_SET: u16 = 9;
    pub(in super::super) const NEW_ELEMENT: u16 = 12;
    pub(in super::super) const GET_ELEMENT: u16 = 13;
    pub(in super::super) const DEL_ELEMENT: u16 = 14;
}

/// Attributes of tables, chains, rules, sets and set elements. In every message about these objects, attribute 1 is the
/// name of the table.
pub(super) mod attribute {
    pub(in super::super) const TABLE: u16 = 1;
    pub(in super::super) const CHAIN_NAME: u16 = 3;
    pub(in super::super) const CHAIN_HOOK: u16 = 4;
    pub(in super::super) const CHAIN_POLICY: u16 = 5;
    pub(in super::super) const CHAIN_TYPE: u16 = 7;
    pub(in super::super) const HOOK_NUMBER: u16 = 1;
    pub(in super::super) const HOOK_PRIORITY: u16 = 2;
    pub(in super::super) const RULE_CHAIN: u16 = 2;
    pub(in super::super) const RULE_EXPRESSIONS: u16 = 4;
    pub(in super::super) const SET_NAME: u16 = 2;
    pub(in super::super) const SET_FLAGS: u16 = 3;
    pub(in super::super) const SET_KEY_TYPE: u16 = 4;
    pub(in super::super) const SET_KEY_LENGTH: u16 = 5;
    pub(in super::super) const SET_ID: u16 = 10;
    pub(in super::super) const ELEMENTS_SET: u16 = 2;
    pub(in super::super) const ELEMENTS: u16 = 3;
    pub(in super::super) const ELEMENT_KEY: u16 = 1;
    pub(in super::super) const ELEMENT_DATA: u16 = 2;
    pub(in super::super) const ELEMENT_FLAGS: u16 = 3;
    pub(in super::super) const ELEMENT_KEY_END: u16 = 10;
    pub(in super::super) const IN_LIST: u16 = 1;
    pub(in super::super) const DATA_VALUE: u16 = 1;
    pub(in super::super) const DATA_VERDICT: u16 = 2;
    pub(in super::super) const VERDICT_CODE: u16 = 1;
    pub(in super::super) const VERDICT_CHAIN: u16 = 2;
}

/// Attributes of expressions.
pub(super) mod expression {
    pub(in super::super) const NAME: u16 = 1;
    pub(in super::super) const DATA: u16 = 2;
    pub(in super::super) const META_TO: u16 = 1;
    pub(in super::super) const META_KEY: u16 = 2;
    pub(in super::super) const META_FROM: u16 = 3;
    pub(in super::super) const COMPARED: u16 = 1;
    pub(in super::super) const COMPARED_HOW: u16 = 2;
    pub(in super::super) const COMPARED_WITH: u16 = 3;
    pub(in super::super) const PAYLOAD_TO: u16 = 1;
    pub(in super::super) const PAYLOAD_BASE: u16 = 2;
    pub(in super::super) const PAYLOAD_OFFSET: u16 = 3;
    pub(in super::super) const PAYLOAD_LENGTH: u16 = 4;
    pub(in super::super) const PAYLOAD_FROM: u16 = 5;
    pub(in super::super) const IMMEDIATE_TO: u16 = 1;
    pub(in super::super) const IMMEDIATE_DATA: u16 = 2;
    pub(in super::super) const XTABLES_NAME: u16 = 1;
    pub(in super::super) const XTABLES_INFO: u16 = 3;
    pub(in super::super) const LOOKUP_SET: u16 = 1;
    pub(in super::super) const LOOKUP_KEY: u16 = 2;
    pub(in super::super) const LOOKUP_TO: u16 = 3;
    pub(in super::super) const LOOKUP_FLAGS: u16 = 5;
    pub(in super::super) const BITWISE_FROM: u16 = 1;
    pub(in super::super) const BITWISE_TO: u16 = 2;
    pub(in super::super) const BITWISE_LENGTH: u16 = 3;
    pub(in super::super) const BITWISE_MASK: u16 = 4;
    pub(in super::super) const BITWISE_XOR: u16 = 5;
    pub(in super::super) const CT_TO: u16 = 1;
    pub(in super::super) const CT_KEY: u16 = 2;
    pub(in super::super) const CT_FROM: u16 = 4;
    pub(in super::super) const NAT_TYPE: u16 = 1;
    pub(in super::super) const NAT_FAMILY: u16 = 2;
    pub(in super::super) const NAT_ADDRESS: u16 = 3;
}

/// Values of the attributes of expressions.
pub(super) mod value {
    /// `NFT_REG32_00`, the first register of four bytes.
    pub(in super::super) const REGISTER: u32 = 8;
    /// `NFT_REG_VERDICT`, the register of the verdict.
    pub(in super::super) const VERDICT: u32 = 0;
    pub(in super::super) const META_MARK: u32 = 3;
    pub(in super::super) const META_IIF: u32 = 4;
    pub(in super::super) const META_OIF: u32 = 5;
    pub(in super::super) const META_IIFNAME: u32 = 6;
    pub(in super::super) const META_OIFNAME: u32 = 7;
    pub(in super::super) const META_NFPROTO: u32 = 15;
    pub(in super::super) const META_L4PROTO: u32 = 16;
    pub(in super::super) const CT_STATE: u32 = 0;
    pub(in super::super) const CT_STATUS: u32 = 2;
    pub(in super::super) const CT_MARK: u32 = 3;
    pub(in super::super) const JUMP: i32 = -3;
    pub(in super::super) const GOTO: i32 = -4;
    pub(in super::super) const RETURN: i32 = -5;
    pub(in super::super) const EQUAL: u32 = 0;
    pub(in super::super) const NOT_EQUAL: u32 = 1;
    pub(in super::super) const LESS_OR_EQUAL: u32 = 3;
    pub(in super::super) const GREATER_OR_EQUAL: u32 = 5;
    pub(in super::super) const NETWORK_HEADER: u32 = 1;
    pub(in super::super) const TRANSPORT_HEADER: u32 = 2;
    pub(in super::super) const SOURCE_NAT: u32 = 0;
}

/// Messages of kernel conntrack, and their attributes.
pub(super) mod conntrack {
    /// `NFNL_SUBSYS_CTNETLINK`: the upper byte of the type of each netlink message to kernel conntrack.
    pub(in super::super) const SUBSYSTEM: u16 = 1;
    pub(in super::super) const GET: u16 = 1;
    pub(in super::super) const ORIGINAL: u16 = 1;
    pub(in super::super) const STATUS: u16 = 3;
    pub(in super::super) const PROTOCOL_STATE: u16 = 4;
    /// The time in seconds until kernel conntrack removes the entry.
    pub(in super::super) const TIMEOUT: u16 = 7;
    pub(in super::super) const COUNTERS_OF_ORIGINAL: u16 = 9;
    pub(in super::super) const COUNTERS_OF_REPLY: u16 = 10;
    /// `CTA_COUNTERS_PACKETS` and `CTA_COUNTERS_BYTES`: 64 bits each.
    pub(in super::super) const PACKETS: u16 = 1;
    pub(in super::super) const BYTES: u16 = 2;
    pub(in super::super) const ADDRESSES: u16 = 1;
    pub(in super::super) const PROTOCOL: u16 = 2;
    pub(in super::super) const SOURCE_V4: u16 = 1;
    pub(in super::super) const DESTINATION_V4: u16 = 2;
    pub(in super::super) const SOURCE_V6: u16 = 3;
    pub(in super::super) const DESTINATION_V6: u16 = 4;
    pub(in super::super) const PROTOCOL_NUMBER: u16 = 1;
    pub(in super::super) const SOURCE_PORT: u16 = 2;
    pub(in super::super) const DESTINATION_PORT: u16 = 3;
    pub(in super::super) const TCP: u16 = 1;
    pub(in super::super) const TCP_STATE: u16 = 1;
    /// The states of TCP connections that have ended: `TCP_CONNTRACK_TIME_WAIT` and `TCP_CONNTRACK_CLOSE`.
    pub(in super::super) const ENDED: [u8; 2] = [7, 8];
    /// `IPS_ASSURED`: a UDP flow with this status is a stream. Kernels before Linux 5.16, except 5.10.80 and later 5.10
    /// releases, set this status already at the first packet after the first reply.
    pub(in super::super) const ASSURED: u32 = 1 << 2;
    /// `IPS_DST_NAT`: the connection's destination is translated.
    pub(in super::super) const DESTINATION_NAT: u32 = 1 << 5;
}

/// The data types of the fields in a set's key. The kernel ignores these types, but `nft` needs the types to show the
/// set's elements.
pub(super) mod key_type {
    pub(in super::super) const IPV4_ADDRESS: u32 = 7;
    pub(in super::super) const IPV6_ADDRESS: u32 = 8;
    pub(in super::super) const PROTOCOL: u32 = 12;
    pub(in super::super) const PORT: u32 = 13;
    /// The number of bits that each field occupies in the key type.
    pub(in super::super) const BITS: u32 = 6;
}

// SPDX-License-Identifier: GPL-2.0-only
//! Fills in the parameters of the helper `bpf_fib_lookup`, the kernel's route look-up, from a packet's headers.

use aya_ebpf::{
    bindings::{
        bpf_fib_lookup as FibLookup, bpf_fib_lookup__bindgen_ty_1, bpf_fib_lookup__bindgen_ty_2,
        bpf_fib_lookup__bindgen_ty_3, bpf_fib_lookup__bindgen_ty_4, bpf_fib_lookup__bindgen_ty_5, bpf_redir_neigh,
    },
    programs::TcContext,
};

use super::family::HeaderLayout;

/// Parameters of a route look-up, which the kernel overwrites with the result.
pub type RouteLookup = FibLookup;

/// A route look-up whose parameters are all zero.
pub const EMPTY: RouteLookup = FibLookup {
    family: 0,
    l4_protocol: 0,
    sport: 0,
    dport: 0,
    __bindgen_anon_1: bpf_fib_lookup__bindgen_ty_1 { tot_len: 0 },
    ifindex: 0,
    __bindgen_anon_2: bpf_fib_lookup__bindgen_ty_2 { flowinfo: 0 },
    __bindgen_anon_3: bpf_fib_lookup__bindgen_ty_3 { ipv6_src: [0; 4] },
    __bindgen_anon_4: bpf_fib_lookup__bindgen_ty_4 { ipv6_dst: [0; 4] },
    __bindgen_anon_5: bpf_fib_lookup__bindgen_ty_5 { tbid: 0 },
    smac: [0; 6],
    dmac: [0; 6],
};

/// The properties of a packet, apart from addresses and ports, that decide whether and how a packet is redirected.
#[derive(Clone, Copy)]
pub struct ClassAndLength {
    /// The fields of the IP header that a route may depend on: the type of service in IPv4, traffic class and flow label
    /// in IPv6. The value is as the kernel's helper expects it.
    pub class: u32,
    /// The length in bytes of the packet, including its IP header.
    pub length: u16,
}

/// Route look-ups of one IP family.
pub trait Routing: HeaderLayout {
    /// Returns class and length of a packet whose IP header starts at offset `L2`. If `WITH_CLASS` is false, the class is
    /// unspecified: in IPv6, only the class has to be read from the packet.
    fn class_and_length<const L2: usize, const WITH_CLASS: bool>(
        ctx: &TcContext,
        ttl_fields: Self::TtlFields,
    ) -> Option<ClassAndLength>;
    /// Returns the parameters of a route look-up for a packet from `source` to `destination`, with a class from
    /// [`Self::class_and_length`].
    fn route_lookup(class: u32, source: Self::Addr, destination: Self::Addr) -> RouteLookup;
    /// Returns the next hop's address in the result of a route look-up; `None` if the next hop has an address of the
    /// other IP family.
    fn neighbor_of(answer: &RouteLookup) -> Option<Self::Addr>;
    /// Returns a neighbor, as the argument of `bpf_redirect_neigh`.
    fn redirect_neighbor(addr: Self::Addr) -> bpf_redir_neigh;
}

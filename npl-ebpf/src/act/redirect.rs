// SPDX-License-Identifier: GPL-2.0-only
//! Redirects translated packets past the host's stack: requests from the uplink directly to the Pod's device, and
//! replies from the Pod's device directly to the uplink.
//!
//! With `--forwarding redirect`, the programs redirect both directions of a Pod's traffic or none, because kernel
//! conntrack cannot track a connection if only one direction passes through the stack. The Pod's entry in
//! `npl_pod_dev_v4` or `npl_pod_dev_v6`, which the agent writes, enables redirect for both directions. The kernel's
//! routes and neighbor table determine the next hop of a reply; the programs cache the next hop for a few milliseconds
//! ([`CachedNextHop`]). The stack forwards packets whose TTL expires at this Node, packets above the MTU, and replies
//! whose route leaves through a device that is not an uplink.

use aya_ebpf::{
    bindings::{BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup__bindgen_ty_1, bpf_redir_neigh},
    helpers::generated::{
        bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer, bpf_skb_store_bytes, bpf_skb_vlan_pop,
    },
    programs::TcContext,
};
use npl_common::{
    config::Config,
    mapping::protocol,
    next_hop::{self, CachedNextHop, PodNextHop, kind},
};

use crate::{
    base::{
        clock::jiffies,
        context::{self, Access as _, ETHERNET, gso_size, skb},
        error::RewriteError,
        maps::{CACHED_NEXT_HOP, CONFIG, ROUTE_LOOKUP, UPLINK},
        mode::needs_next_hop,
        verdict::Verdict,
    },
    net::{
        family::Headers,
        headers::{Ports, TcpHeader, UdpHeader},
        route::{ClassAndLength, RouteLookup},
    },
    state::maps::Family,
};

/// The kind of receiver of a redirected packet, by which [`forward`] selects the kernel's helper.
#[derive(Clone, Copy)]
enum Receiver {
    /// The other end of a veth or netkit pair, in the Pod's network namespace.
    Peer,
    /// A neighbor with an address of the packet's IP family.
    Neighbor,
    /// The gateway of the kernel's route, if the gateway's address is of the other IP family.
    Routed,
    /// The destination in the packet's Ethernet header, which [`to_client`] has written.
    Addressed,
}

/// The device and neighbor to which a translated packet is forwarded.
///
/// All fields are always initialized, because the compiler may read a field ahead of the branch that uses the field.
/// Without `CAP_PERFMON`, the verifier rejects a read of uninitialized stack.
pub struct NextHop<F: Family> {
    /// Interface index of the egress device; 0 if the host's stack forwards the packet.
    ifindex: u32,
    receiver: Receiver,
    /// The neighbor's address if the receiver is [`Receiver::Neighbor`]; otherwise unused.
    neighbor: F::Addr,
    /// The packet's TTL fields after the rewrite. The TTL is decremented only if the packet is redirected.
    pub ttl_fields: F::TtlFields,
}

impl<F: Family> NextHop<F> {
    /// Returns the next hop of a packet that the host's stack forwards.
    #[inline(always)]
    pub fn stack(headers: &Headers<F>) -> Self {
        Self { ifindex: 0, receiver: Receiver::Routed, neighbor: headers.destination, ttl_fields: headers.ttl_fields }
    }

    #[inline(always)]
    pub const fn is_stack(&self) -> bool {
        self.ifindex == 0
    }
}

/// Returns the next hop of a packet to a Pod. `lookup` returns the Pod's entry in `npl_pod_dev_v4` or `npl_pod_dev_v6`,
/// and is called only in redirect and offload mode.
#[inline(always)]
pub fn to_pod<F: Family, const MODE: u8, const L2: usize>(
    ctx: &TcContext,
    headers: &Headers<F>,
    pod: F::Addr,
    lookup: impl FnOnce() -> PodNextHop,
) -> NextHop<F> {
    // The neighbor is the Pod's address for every receiver, so that no second address takes stack space;
    // [`Receiver::Peer`] ignores the neighbor.
    let stack = NextHop { neighbor: pod, ..NextHop::stack(headers) };
    if !needs_next_hop::<MODE>() {
        return stack;
    }
    // The result of each look-up is checked before the next look-up: if the program saves a value on the stack during a
    // function call, the verifier forgets the value's bounds.
    let Some(ttl_fields) = F::decrement_ttl(headers.ttl_fields) else { return stack };
    let next_hop = lookup();
    if !next_hop.is_reachable() || is_sctp_gso(ctx, headers.protocol) {
        return stack;
    }
    if class_and_length::<F, L2, false>(ctx, headers, ttl_fields).is_none_or(|packet| packet.length > next_hop.mtu) {
        return stack;
    }
    let receiver = if next_hop.kind == kind::PEER { Receiver::Peer } else { Receiver::Neighbor };
    NextHop { ifindex: next_hop.ifindex, receiver, neighbor: pod, ttl_fields }
}

/// Returns whether a packet arrived on the device to which the programs redirect requests for the packet's sender.
#[inline(always)]
pub fn is_from_pod<F: Family>(ctx: &TcContext, headers: &Headers<F>) -> bool {
    F::next_hop(headers.source).ifindex == ctx.ifindex()
}

/// Returns the next hop of a packet to a client, from a look-up in the kernel's routing table with source address
/// `node`. `ports` are the packet's ports after the translation; both are zero for a packet without ports.
///
/// If `flow_hash` is not `None`, the function may use a cached next hop, and then also writes the packet's Ethernet
/// header.
#[inline(always)]
pub fn to_client<F: Family, const L2: usize>(
    ctx: &TcContext,
    headers: &Headers<F>,
    node: F::Addr,
    ports: Ports,
    flow_hash: Option<u64>,
) -> NextHop<F> {
    let stack = NextHop::stack(headers);
    if is_sctp_gso(ctx, headers.protocol) {
        return stack;
    }
    let Some(ttl_fields) = F::decrement_ttl(headers.ttl_fields) else { return stack };
    let Some(ClassAndLength { class, length }) = class_and_length::<F, L2, true>(ctx, headers, ttl_fields) else {
        return stack;
    };
    // The pointer to an element must not be null after this point. If the loader lacks `CAP_PERFMON`, the verifier also
    // checks the path on which the processor mispredicts a test for null, and would reject the program.
    let cached = match flow_hash {
        Some(hash) if L2 == ETHERNET => match CachedRoute::of::<F>(hash, node, ports.source, class) {
            Some(cached) => Some(cached),
            None => return stack,
        },
        _ => None,
    };
    if let Some(ifindex) = cached.as_ref().and_then(|cached| cached.apply(ctx, length)) {
        return NextHop { ifindex, receiver: Receiver::Addressed, neighbor: stack.neighbor, ttl_fields };
    }
    let Some(lookup) = ROUTE_LOOKUP.get_ptr_mut(0) else { return stack };
    // SAFETY: only this processor accesses the element, and only while the program runs.
    let lookup = unsafe { &mut *lookup.cast::<RouteLookup>() };
    *lookup = F::route_lookup(class, node, headers.destination);
    lookup.l4_protocol = headers.protocol;
    (lookup.sport, lookup.dport) = (ports.source, ports.destination);
    lookup.ifindex = ctx.ifindex();
    lookup.__bindgen_anon_1 = bpf_fib_lookup__bindgen_ty_1 { tot_len: length };
    let (parameters, size) = (core::ptr::from_mut(lookup), size_of::<RouteLookup>() as i32);
    // SAFETY: the context is valid, and the helper reads and writes only `lookup`, whose size is an argument.
    let status = unsafe { bpf_fib_lookup(skb(ctx).cast(), parameters, size, 0) };
    let is_resolved = status == i64::from(BPF_FIB_LKUP_RET_SUCCESS);
    let is_found = is_resolved || status == i64::from(BPF_FIB_LKUP_RET_NO_NEIGH);
    // SAFETY: only the agent writes this map, and the program does not read the value.
    if !is_found || unsafe { UPLINK.get(&lookup.ifindex) }.is_none() {
        return stack;
    }
    if is_resolved && let Some(cached) = cached {
        cached.complete(lookup);
    }
    match F::neighbor_of(lookup) {
        Some(neighbor) => NextHop { ifindex: lookup.ifindex, receiver: Receiver::Neighbor, neighbor, ttl_fields },
        None => NextHop { ifindex: lookup.ifindex, receiver: Receiver::Routed, neighbor: stack.neighbor, ttl_fields },
    }
}

const _: () = assert!(size_of::<RouteLookup>() == size_of::<next_hop::RouteLookup>());

/// The element of the next-hop cache for a flow's replies. Only this processor accesses the element.
struct CachedRoute {
    element: *mut CachedNextHop,
    key: u64,
}

impl CachedRoute {
    /// Returns the element of a flow. `class` is the class of the packet ([`ClassAndLength`]), and `port` is the node
    /// port, in network byte order. `None` only if the map has no element, which cannot happen.
    #[inline(always)]
    fn of<F: Family>(flow_hash: u64, node: F::Addr, port: u16, class: u32) -> Option<Self> {
        // A route may depend on addresses, ports, protocol and class. The flow's hash covers the client's address and
        // port, the Pod's address and port, and the protocol.
        let key = F::hash(flow_hash, node, node, u64::from(class) << 16 | u64::from(port));
        Some(Self { element: CACHED_NEXT_HOP.get_ptr_mut(CachedNextHop::slot(key))?, key })
    }

    /// If the cached next hop is valid, writes its Ethernet header into the packet, and returns the uplink's index.
    /// Otherwise, prepares the element for [`Self::complete`].
    #[inline(always)]
    fn apply(&self, ctx: &TcContext, length: u16) -> Option<u32> {
        // SAFETY: only this processor accesses the element, and only while the program runs.
        let element = unsafe { &mut *self.element };
        if !element.is_valid(self.key, length, jiffies()) {
            // The key is written before the look-up, so that the program need not keep it on its stack. An element with
            // length 0 is invalid.
            (element.key, element.length) = (self.key, 0);
            return None;
        }
        let (from, size) = (element.ethernet.as_ptr().cast(), size_of_val(&element.ethernet) as u32);
        // SAFETY: the context is valid, `from` points to `size` bytes, and the program holds no pointer into the packet,
        // which the helper may move.
        let status = unsafe { bpf_skb_store_bytes(skb(ctx), 0, from, size, 0) };
        if status == 0 { Some(element.ifindex) } else { None }
    }

    /// Stores the result of a route look-up. `tot_len` of the result is the path MTU or, before Linux 5.12, still the
    /// length of the packet.
    #[inline(always)]
    fn complete(&self, result: &RouteLookup) {
        // SAFETY: only this processor accesses the element, and only while the program runs.
        let element = unsafe { &mut *self.element };
        for index in 0..result.dmac.len() {
            element.ethernet[index] = result.dmac[index];
            element.ethernet[result.dmac.len() + index] = result.smac[index];
        }
        // SAFETY: every member of this union consists of integers.
        element.length = unsafe { result.__bindgen_anon_1.tot_len };
        element.ifindex = result.ifindex;
        element.stored_at = jiffies();
    }
}

/// Marks a reply that was translated at the Pod's device. The program on the uplink passes a marked packet without
/// parsing it. If another program overwrites the mark, the program on the uplink parses the packet, and also passes it:
/// the packet's source is no longer an endpoint of a mapping.
#[inline(always)]
pub fn mark_translated(ctx: &TcContext, config: &Config) {
    // SAFETY: the context is valid, and the kernel preserves `skb->cb` between the programs of two hooks.
    unsafe { (*skb(ctx)).cb[MARK] = config.seed as u32 };
}

/// Returns whether a packet has the mark of [`mark_translated`]. The value 0 does not count as the mark: the field is 0
/// in most packets, and the seed is 0 until the agent has written the configuration.
#[inline(always)]
pub fn is_marked(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid, and the verifier allows a program to read `skb->cb`.
    let mark = unsafe { (*skb(ctx)).cb[MARK] };
    mark != 0 && CONFIG.get(0).is_some_and(|config| config.seed as u32 == mark)
}

/// Index of the word of `skb->cb` that contains the mark. This is the last word that programs may use, and the stack
/// does not overwrite this word.
const MARK: usize = 4;

/// Redirects a rewritten packet to its next hop. Drops the packet if the rewrite failed. Passes the packet to the stack
/// if `next_hop` is [`NextHop::stack`].
#[inline(always)]
pub fn forward<F: Family>(ctx: &TcContext, rewritten: Result<(), RewriteError>, next_hop: NextHop<F>) -> Verdict {
    if rewritten.is_err() || next_hop.is_stack() {
        return rewritten.into();
    }
    // If the packet has a VLAN tag that contains only a priority, the program removes the tag, as routing by the stack
    // does: the priority is valid only on the link on which the packet arrived. SAFETY: the context is valid, the
    // verifier allows access to this field, and the program holds no pointer into the packet.
    unsafe {
        if (*skb(ctx)).vlan_present != 0 {
            let _status = bpf_skb_vlan_pop(skb(ctx));
        }
    }
    let (ifindex, size) = (next_hop.ifindex, size_of::<bpf_redir_neigh>() as i32);
    // SAFETY: the redirect helpers only record the egress device, and `bpf_redirect_neigh` reads only `neighbor`, whose
    // size is an argument.
    let action = unsafe {
        match next_hop.receiver {
            Receiver::Peer => bpf_redirect_peer(ifindex, 0),
            Receiver::Neighbor => {
                let mut neighbor = F::redirect_neighbor(next_hop.neighbor);
                bpf_redirect_neigh(ifindex, &raw mut neighbor, size, 0)
            }
            Receiver::Routed => bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0),
            Receiver::Addressed => bpf_redirect(ifindex, 0),
        }
    };
    Verdict::redirected(action as i32)
}

/// Returns whether the packet is a GSO packet of SCTP. Programs cannot read the segment lengths of a GSO packet of
/// SCTP, and therefore cannot compare the segments with an MTU.
#[inline(always)]
fn is_sctp_gso(ctx: &TcContext, protocol: u8) -> bool {
    protocol == protocol::SCTP && gso_size(ctx) != 0
}

/// Returns the class and the length of a packet. For a GSO packet, the length is that of each packet into which the
/// kernel will segment the GSO packet. If `WITH_CLASS` is false, the class is unspecified.
#[inline(always)]
fn class_and_length<F: Family, const L2: usize, const WITH_CLASS: bool>(
    ctx: &TcContext,
    headers: &Headers<F>,
    ttl_fields: F::TtlFields,
) -> Option<ClassAndLength> {
    let whole = F::class_and_length::<L2, WITH_CLASS>(ctx, ttl_fields)?;
    Some(ClassAndLength { length: segment_length::<F, L2>(ctx, headers).unwrap_or(whole.length), ..whole })
}

/// Returns the length in bytes of each IP packet into which the kernel will segment a GSO packet; `None` if the packet
/// is not a GSO packet. Each segment repeats the IP options or extension headers of the packet.
///
/// A sender with a packet socket may choose any payload length of the segments. If the computed length exceeds
/// `u16::MAX`, the function returns `u16::MAX`, so that the length does not wrap around to a small value.
#[inline(always)]
fn segment_length<F: Family, const L2: usize>(ctx: &TcContext, headers: &Headers<F>) -> Option<u16> {
    let payload = gso_size(ctx);
    if payload == 0 {
        return None;
    }
    let is_tcp = headers.protocol == protocol::TCP;
    let tcp = if is_tcp { context::load::<TcpHeader>(ctx, headers.l4) } else { None };
    let transport = tcp.map_or(size_of::<UdpHeader>(), |header| header.length());
    Some((payload as usize + (headers.l4 - L2) + transport).min(u16::MAX as usize) as u16)
}

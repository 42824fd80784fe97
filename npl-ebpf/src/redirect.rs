// SPDX-License-Identifier: GPL-2.0-only
//! The short way, `--forwarding redirect`: what was translated goes from the uplink to the Pod, and from the Pod to the
//! uplink, past the host's stack.
//!
//! Both directions go the short way or neither, since netfilter would not know what to make of half a conversation: one entry
//! of the agent's says for both which device a Pod is behind. The way out is asked of the kernel's routes, and its
//! neighbours send. Whatever the stack would do more than forward takes the stack: the last hop of a packet, one that is
//! too large, a route that leads elsewhere.

use aya_ebpf::{
    bindings::{
        BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as Lookup, bpf_fib_lookup__bindgen_ty_1,
        bpf_fib_lookup__bindgen_ty_2, bpf_fib_lookup__bindgen_ty_3, bpf_fib_lookup__bindgen_ty_4,
        bpf_fib_lookup__bindgen_ty_5, bpf_redir_neigh,
    },
    helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh, bpf_redirect_peer, bpf_skb_vlan_pop},
    programs::TcContext,
};
use npl_common::{
    config::Config,
    direct::{PodWay, kind},
    mapping::protocol,
};

use crate::{
    family::{Family, Location},
    hint::asks_for_way,
    maps::UPLINK,
    packet::{self, Access as _, Ports, TcpHeader, UdpHeader, skb},
    rewrite::Refused,
    verdict::Verdict,
};

/// A question to the kernel's routes, and its answer.
pub type Routing = Lookup;

/// A question in which nothing was asked yet.
pub const NOWHERE: Routing = Lookup {
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

/// Who gets a packet on a device.
#[derive(Clone, Copy)]
enum Receiver {
    /// The Pod at its other end; nobody is between.
    Peer,
    /// A neighbour of the packet's family.
    Neighbour,
    /// Whom the kernel finds: a neighbour of the other family.
    Routed,
}

/// Where a packet goes when it is translated.
///
/// All of it is written in every case: the verifier lets a program without `CAP_PERFMON` read nothing else, and the compiler
/// reads what it does not need yet.
pub struct Way<F: Family> {
    /// The device that it leaves by; 0 if that is for the host's stack to say.
    ifindex: u32,
    /// Who gets it there.
    to: Receiver,
    /// The neighbour, if that is who gets it.
    next_hop: F::Addr,
    /// The packet's header as it leaves.
    pub rest: F::Rest,
}

impl<F: Family> Way<F> {
    /// By the host's stack.
    #[inline(always)]
    pub fn stack(location: &Location<F>) -> Self {
        Self { ifindex: 0, to: Receiver::Routed, next_hop: location.destination, rest: location.rest }
    }

    /// Whether it is the host's stack's.
    #[inline(always)]
    pub const fn is_stack(&self) -> bool {
        self.ifindex == 0
    }
}

/// The way of a packet to a Pod: the host's stack's unless it may be another, which is asked then.
#[inline(always)]
pub fn to_pod<F: Family, const WAY: u8, const L2: usize>(
    ctx: &TcContext,
    location: &Location<F>,
    pod: F::Addr,
    way: impl FnOnce() -> Option<PodWay>,
) -> Way<F> {
    // Nobody asks for the next hop there; so it is the same in every case, and takes no room beside the Pod's address.
    let stack = Way { next_hop: pod, ..Way::stack(location) };
    if !asks_for_way::<WAY>() {
        return stack;
    }
    // One after the other: what is asked for again behind a call, the verifier takes for something else.
    let Some(rest) = F::one_hop_less(location.rest) else { return stack };
    let Some(way) = way() else { return stack };
    if is_cut_by_its_sender(ctx, location.protocol) {
        return stack;
    }
    let length = segment_length::<F>(ctx, location).or_else(|| F::length::<L2>(ctx, rest));
    if length.is_none_or(|length| length > way.mtu) {
        return stack;
    }
    let to = if way.kind == kind::PEER { Receiver::Peer } else { Receiver::Neighbour };
    Way { ifindex: way.ifindex, to, next_hop: pod, rest }
}

/// Whether a packet comes from where requests to its sender are redirected to.
#[inline(always)]
pub fn is_from_pod<F: Family>(ctx: &TcContext, location: &Location<F>) -> bool {
    F::pod_way(location.source).is_some_and(|way| way.ifindex == ctx.ifindex())
}

/// The way of a packet to a client, which goes where the Node's own packets do. `ports` as it will have them, if it has any.
#[inline(always)]
pub fn to_client<F: Family, const L2: usize>(
    ctx: &TcContext,
    location: &Location<F>,
    node: F::Addr,
    ports: Ports,
) -> Way<F> {
    let stack = Way::stack(location);
    if is_cut_by_its_sender(ctx, location.protocol) {
        return stack;
    }
    let Some(rest) = F::one_hop_less(location.rest) else { return stack };
    let Some(mut routing) = F::routing::<L2>(ctx, node, location.destination) else { return stack };
    routing.l4_protocol = location.protocol;
    (routing.sport, routing.dport) = (ports.source, ports.destination);
    routing.ifindex = ctx.ifindex();
    if let Some(tot_len) = segment_length::<F>(ctx, location) {
        routing.__bindgen_anon_1 = bpf_fib_lookup__bindgen_ty_1 { tot_len };
    }
    // SAFETY: the context is valid, and the kernel reads and writes exactly this structure.
    let answer = unsafe { bpf_fib_lookup(skb(ctx).cast(), &raw mut routing, size_of::<Routing>() as i32, 0) };
    let is_known = answer == i64::from(BPF_FIB_LKUP_RET_SUCCESS) || answer == i64::from(BPF_FIB_LKUP_RET_NO_NEIGH);
    // SAFETY: the agent alone writes this map.
    if !is_known || unsafe { UPLINK.get(&routing.ifindex) }.is_none() {
        return stack;
    }
    match F::next_hop(&routing) {
        Some(next_hop) => Way { ifindex: routing.ifindex, to: Receiver::Neighbour, next_hop, rest },
        None => Way { ifindex: routing.ifindex, to: Receiver::Routed, next_hop: stack.next_hop, rest },
    }
}

/// Tells the program on the uplink that a reply which goes past the stack is translated. Where somebody else has written there
/// since, it finds out.
#[inline(always)]
pub fn mark_translated(ctx: &TcContext, config: &Config) {
    // SAFETY: the context is valid; the kernel keeps this field for programs, from one hook to the next.
    unsafe { (*skb(ctx)).cb[MARK] = config.seed as u32 };
}

/// Whether a packet has that mark.
#[inline(always)]
pub fn is_marked(ctx: &TcContext, config: &Config) -> bool {
    // SAFETY: as above.
    unsafe { (*skb(ctx)).cb[MARK] == config.seed as u32 }
}

/// The last of the words for programs, which the stack's own notes do not reach.
const MARK: usize = 4;

/// What becomes of a packet that was rewritten: it goes on its way.
#[inline(always)]
pub fn send<F: Family>(ctx: &TcContext, rewritten: Result<(), Refused>, way: Way<F>) -> Verdict {
    if rewritten.is_err() || way.is_stack() {
        return rewritten.into();
    }
    // A priority tag, which is of the link that the packet came by: routing leaves it behind too.
    // SAFETY: the context is valid, the verifier allows this field, and no pointer into the packet is held.
    unsafe {
        if (*skb(ctx)).vlan_present != 0 {
            let _status = bpf_skb_vlan_pop(skb(ctx));
        }
    }
    let (ifindex, size) = (way.ifindex, size_of::<bpf_redir_neigh>() as i32);
    // SAFETY: helpers that note where the packet goes; the kernel reads exactly this structure.
    let action = unsafe {
        match way.to {
            Receiver::Peer => bpf_redirect_peer(ifindex, 0),
            Receiver::Neighbour => {
                bpf_redirect_neigh(ifindex, core::ptr::from_mut(&mut F::neighbour(way.next_hop)), size, 0)
            }
            Receiver::Routed => bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0),
        }
    };
    Verdict::redirected(action as i32)
}

/// Whether a large packet will be cut where its sender says, as SCTP's are: the kernel tells programs no length then.
#[inline(always)]
fn is_cut_by_its_sender(ctx: &TcContext, protocol: u8) -> bool {
    // SAFETY: the context is valid for the program's run; the verifier allows this field.
    protocol == protocol::SCTP && unsafe { (*skb(ctx)).gso_size } != 0
}

/// The length of each packet that a large one will be cut into, if it will be.
#[inline(always)]
fn segment_length<F: Family>(ctx: &TcContext, location: &Location<F>) -> Option<u16> {
    // SAFETY: the context is valid for the program's run; the verifier allows this field.
    let payload = unsafe { (*skb(ctx)).gso_size };
    if payload == 0 {
        return None;
    }
    let is_tcp = location.protocol == protocol::TCP;
    let tcp = if is_tcp { packet::load::<TcpHeader>(ctx, location.l4) } else { None };
    let transport = tcp.map_or(size_of::<UdpHeader>(), |header| header.length());
    Some(payload as u16 + (F::LENGTH + transport) as u16)
}

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
        bpf_fib_lookup__bindgen_ty_5, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1,
    },
    helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh, bpf_redirect_peer},
    programs::TcContext,
};
use npl_common::{direct::kind, mapping::protocol};

use crate::{
    family::{Family, Location},
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

/// Where a packet goes when it is translated.
pub struct Way<F: Family> {
    ifindex: u32,
    /// Who gets it on that device; nothing where a Pod is at its other end, and nobody between.
    neighbour: Option<bpf_redir_neigh>,
    /// The packet's header after this hop.
    rest: F::Rest,
}

/// The way of a packet to a Pod, if that is a short one.
#[inline(always)]
pub fn to_pod<F: Family, const L2: usize>(ctx: &TcContext, location: &Location<F>, pod: F::Addr) -> Option<Way<F>> {
    let rest = F::one_hop_less(location.rest)?;
    let way = F::pod_way(pod)?;
    let length = match segment_length::<F>(ctx, location) {
        Some(length) => length,
        None => F::length::<L2>(ctx, rest)?,
    };
    if length > way.mtu {
        return None;
    }
    let neighbour = if way.kind == kind::PEER { None } else { Some(F::neighbour(pod)) };
    Some(Way { ifindex: way.ifindex, neighbour, rest })
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
) -> Option<Way<F>> {
    let rest = F::one_hop_less(location.rest)?;
    let mut routing = F::routing::<L2>(ctx, node, location.destination)?;
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
        return None;
    }
    // SAFETY: all of this union is integers, and the kernel has filled in the next hop's address.
    let ipv6_nh = unsafe { routing.__bindgen_anon_4.ipv6_dst };
    let nh_family = u32::from(routing.family);
    let neighbour = bpf_redir_neigh { nh_family, __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh } };
    Some(Way { ifindex: routing.ifindex, neighbour: Some(neighbour), rest })
}

/// What becomes of a packet that was rewritten: it goes on its way; without one, the host's stack will take it.
#[inline(always)]
pub fn send<F: Family>(rewritten: Result<(), Refused>, way: Option<Way<F>>) -> Verdict {
    match way {
        Some(way) if rewritten.is_ok() => Verdict::Redirected(way.send()),
        _ => rewritten.into(),
    }
}

/// The rest of a packet's header, as it is to be written for the way that the packet goes.
#[inline(always)]
pub fn rest<F: Family>(location: &Location<F>, way: Option<&Way<F>>) -> F::Rest {
    way.map_or(location.rest, |way| way.rest)
}

impl<F: Family> Way<F> {
    /// Has the kernel send the packet once the program has ended, and says by which action.
    #[inline(always)]
    fn send(mut self) -> i32 {
        // SAFETY: helpers that note where the packet goes; the kernel reads exactly this structure.
        let action = unsafe {
            match &mut self.neighbour {
                None => bpf_redirect_peer(self.ifindex, 0),
                Some(neighbour) => {
                    let size = size_of::<bpf_redir_neigh>() as i32;
                    bpf_redirect_neigh(self.ifindex, core::ptr::from_mut(neighbour), size, 0)
                }
            }
        };
        action as i32
    }
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

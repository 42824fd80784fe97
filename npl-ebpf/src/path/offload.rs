// SPDX-License-Identifier: GPL-2.0-only
//! Makes stack observations of requests, for `--forwarding offload`. The program records that the host's stack
//! forwarded a request. The program runs at TC egress of a Pod-facing device, after the host's stack, and changes no
//! packet.

use aya_ebpf::programs::TcContext;

use crate::{
    base::{context, maps::CONFIG},
    net::{
        V4, V6,
        family::{HeaderLayout as _, SocketAddr},
        packet::Packet,
    },
    state::{maps::Family, stack_seen, tuple::FlowTuple},
};

/// Records that the host's stack forwards this request to a Pod. The packet's IP header starts at offset `L2`.
/// Slow-path packets are not recorded, because slow-path packets are never offloaded.
#[inline(always)]
pub fn observe_request<const L2: usize>(ctx: &TcContext) {
    let _recorded = match context::ether_type(ctx) {
        Some(V4::ETHER_TYPE) => observe_family::<V4, L2>(ctx),
        Some(V6::ETHER_TYPE) => observe_family::<V6, L2>(ctx),
        _ => None,
    };
}

#[inline(always)]
fn observe_family<F: Family, const L2: usize>(ctx: &TcContext) -> Option<()> {
    let packet = Packet::<F>::parse::<L2>(ctx).ok()?;
    let (pod, pod_port) = (packet.headers.destination, u16::from_be(packet.ports.destination));
    let protocol = packet.headers.protocol;
    let endpoint = F::endpoint(&SocketAddr { addr: pod, port: pod_port }, protocol, 0)?;
    let client_port = u16::from_be(packet.ports.source);
    let tuple = FlowTuple::<F> { client: packet.headers.source, client_port, pod, pod_port };
    let hash = tuple.hash(CONFIG.get(0)?.seed, protocol);
    stack_seen::record::<F, false>(hash, endpoint.generation, packet.segment(ctx).ok()?.flags);
    Some(())
}

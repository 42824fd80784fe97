// SPDX-License-Identifier: GPL-2.0-only
//! Stack observations of requests, for `--forwarding offload`: the program at egress of a Pod-facing device, behind the
//! host's stack, which changes no packet.

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

/// Records a request that leaves for a Pod, whose IP header starts `L2` bytes in. Packets of the slow path are not
/// recorded, because they always take the stack.
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

// SPDX-License-Identifier: GPL-2.0-only
//! What the host's stack has let through to Pods, for `--forwarding offload`. Nothing is rewritten here.

use aya_ebpf::programs::TcContext;

use crate::{
    family::{End, Ends, Family, V4, V6},
    flow,
    maps::CONFIG,
    offload,
    packet::{self, Packet},
};

/// Notes a request that leaves for a Pod, behind the host's stack, `L2` bytes in. Plain ones alone: others always take the
/// stack.
#[inline(always)]
pub fn note_request<const L2: usize>(ctx: &TcContext) {
    let _noted = match packet::ether_type(ctx) {
        Some(V4::ETHER_TYPE) => note_family::<V4, L2>(ctx),
        Some(V6::ETHER_TYPE) => note_family::<V6, L2>(ctx),
        _ => None,
    };
}

#[inline(always)]
fn note_family<F: Family, const L2: usize>(ctx: &TcContext) -> Option<()> {
    let packet = Packet::<F>::read::<L2>(ctx).ok()?;
    let (pod, pod_port) = (packet.location.destination, u16::from_be(packet.ports.destination));
    let protocol = packet.location.protocol;
    let endpoint = F::endpoint(&End { addr: pod, port: pod_port }, protocol, 0)?;
    let client_port = u16::from_be(packet.ports.source);
    let ends = Ends::<F> { client: packet.location.source, client_port, pod, pod_port };
    let hash = flow::hash(CONFIG.get(0)?.seed, &ends, protocol);
    offload::note_passed::<F, false>(hash, endpoint.generation, packet.tcp_flags::<L2>(ctx).ok()?);
    Some(())
}

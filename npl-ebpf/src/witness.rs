// SPDX-License-Identifier: GPL-2.0-only
//! What the host's stack has let through to Pods, for `--forwarding offload`. Nothing is rewritten here.

use aya_ebpf::programs::TcContext;

use crate::{
    family::{Ends, Family, Walk},
    flow::{self, NodeEnd},
    hook::Hook,
    maps::CONFIG,
    offload,
    packet::{IcmpHeader, Packet},
    rewrite::DESTINATION,
    verdict::Verdict,
};

/// Requests as they leave for Pods, behind the host's stack. Plain ones alone: others always take the stack.
pub struct Arrivals;

impl Hook for Arrivals {
    const END: bool = DESTINATION;
    const HOLDS_FRAGMENTS: bool = false;

    #[inline(always)]
    fn packet<F: Family, const L2: usize>(
        ctx: &TcContext,
        packet: &Packet<F>,
        _note: impl FnOnce(&NodeEnd<F>),
    ) -> Verdict {
        let (pod, pod_port) = (packet.location.destination, u16::from_be(packet.ports.destination));
        let protocol = packet.location.protocol;
        let Some(endpoint) = F::endpoint(pod, pod_port, protocol) else { return Verdict::NotOurs };
        let client_port = u16::from_be(packet.ports.source);
        let ends = Ends::<F> { client: packet.location.source, client_port, pod, pod_port };
        let Some(config) = CONFIG.get(0) else { return Verdict::NotOurs };
        let hash = flow::hash(config.seed, &ends, protocol);
        if let Ok(tcp_flags) = packet.tcp_flags::<L2>(ctx) {
            offload::note_passed::<F, false>(hash, endpoint.generation, tcp_flags);
        }
        Verdict::NotOurs
    }

    #[inline(always)]
    fn later_fragment<F: Family, const L2: usize>(_ctx: &TcContext, _walk: Walk<F>) -> Verdict {
        Verdict::NotOurs
    }

    #[inline(always)]
    fn error<F: Family, const L2: usize>(_ctx: &TcContext, _outer: Walk<F>, _header: IcmpHeader) -> Verdict {
        Verdict::NotOurs
    }
}

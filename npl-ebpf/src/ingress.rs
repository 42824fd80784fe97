// SPDX-License-Identifier: GPL-2.0-only
//! Requests: node port to Pod. The destination follows from the mapping alone, packet by packet.

use aya_ebpf::programs::TcContext;
use npl_common::{mapping::Frontend, reason::Reason};

use crate::{
    family::{Ends, Family},
    flow::{Flow, NodeEnd, Progress, Request},
    maps::CONFIG,
    packet::{Packet, skb},
    rewrite::{self, DESTINATION},
    stats,
    verdict::Verdict,
};

/// Judges and rewrites one packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<F: Family, const L2: usize>(ctx: &TcContext) -> Verdict {
    let Some(packet) = Packet::<F>::read::<L2>(ctx) else { return Verdict::NotOurs };
    let node_port = u16::from_be(packet.ports.destination);
    let Some(config) = CONFIG.get(0) else { return Verdict::NotOurs };
    if !config.contains(node_port) {
        return Verdict::NotOurs;
    }
    let Some(addr_index) = F::local_index(config, packet.location.destination) else { return Verdict::NotOurs };
    let protocol = packet.location.protocol;
    let Some(backend) = F::backend(Frontend { node_port, protocol, pad: 0 }) else {
        return Verdict::Pass(Reason::NoMapping);
    };
    if packet.location.is_fragment {
        return Verdict::Pass(Reason::Fragment);
    }
    let Some(tcp_flags) = packet.tcp_flags::<L2>(ctx) else { return Verdict::Pass(Reason::Truncated) };

    let request = Request {
        node: NodeEnd { addr: packet.location.destination, addr_index, port: node_port },
        generation: backend.generation,
        ifindex: ifindex(ctx),
        tcp_flags,
    };
    let client_port = u16::from_be(packet.ports.source);
    let ends = Ends::<F> { client: packet.location.source, client_port, pod: backend.addr, pod_port: backend.port };
    let key = F::flow_key(&ends, protocol);
    let progress = Flow::<F>::new(config.seed, &ends, protocol, &key).map(|flow| flow.note_request(&request));
    stats::of_mapping(backend.stats_index, |stats| {
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.len());
        stats.new_flows += u64::from(progress == Some(Progress::New));
        stats.established_flows += u64::from(progress == Some(Progress::Established));
    });
    match rewrite::apply::<F, DESTINATION, L2>(ctx, &packet, backend.addr, backend.port.to_be()) {
        Ok(()) => Verdict::Translated,
        Err(rewrite::Refused) => Verdict::Drop(Reason::RewriteFailed),
    }
}

/// The device that the packet came in by.
#[inline(always)]
fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run; the verifier allows this field.
    unsafe { (*skb(ctx)).ifindex }
}

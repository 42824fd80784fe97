// SPDX-License-Identifier: GPL-2.0-only
//! Requests: node port to Pod. The destination follows from the mapping alone, packet by packet.

use aya_ebpf::programs::TcContext;
use npl_common::{
    config::Config,
    direct::PodWay,
    mapping::{Frontend, protocol},
    reason::Reason,
};

use crate::{
    attempt,
    family::{Backend, Ends, Family, Walk},
    first,
    flow::{self, Flow, NodeEnd, Progress, Request},
    fragment,
    hook::{Hook, OFFLOAD},
    host,
    icmp::{self, Error},
    maps::CONFIG,
    offload,
    packet::{Access, IcmpHeader, Packet},
    redirect::{self, Way},
    rewrite::{self, DESTINATION},
    stats, stray,
    verdict::Verdict,
    xdp,
};

/// What is done with requests, that go on by this `WAY`: see [`crate::hook`].
pub struct Requests<const WAY: u8>;

impl<const WAY: u8> Hook for Requests<WAY> {
    const END: bool = DESTINATION;
    const ON_ARRIVAL: bool = true;

    #[inline(always)]
    fn packet<F: Family, const L2: usize, const IS_PLAIN: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        note: impl FnOnce(&NodeEnd<F>),
    ) -> Verdict {
        let (backend, pod_way, is_offloaded) = match backend_of::<F, WAY, L2>(ctx, packet, note) {
            Ok(judged) => judged,
            Err(verdict) => {
                note_direct(packet, |config| IS_PLAIN && xdp::is_ahead(config, ctx));
                return verdict;
            }
        };
        let way = if WAY == OFFLOAD && !is_offloaded {
            Way::stack(&packet.location)
        } else {
            redirect::to_pod::<F, WAY, L2>(ctx, &packet.location, backend.addr, || pod_way)
        };
        let packet = packet.with(way.rest);
        redirect::send(
            ctx,
            rewrite::apply::<F, DESTINATION, L2, IS_PLAIN>(ctx, &packet, backend.addr, backend.port.to_be()),
            way,
        )
    }

    #[inline(always)]
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, walk: Walk<F>) -> Verdict {
        fragment::request::<F, WAY, L2>(ctx, walk)
    }

    /// An error about a reply, which names the Node where the Pod knows itself. The mapping alone tells the Pod. Anybody on
    /// the way may send it, so that its source is that of the request which was answered.
    #[inline(always)]
    fn error<F: Family, const L2: usize>(ctx: &TcContext, mut outer: Walk<F>, header: IcmpHeader) -> Verdict {
        let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS };
        if F::local_index(config, outer.location.destination).is_none() {
            return Verdict::NOT_OURS;
        }
        let quote = match icmp::quote(ctx, &outer) {
            Ok(quote) => quote,
            Err(verdict) => return verdict,
        };
        let node_port = u16::from_be(quote.ports.source);
        if !config.contains(node_port) {
            return Verdict::NOT_OURS;
        }
        if quote.location.source != outer.location.destination {
            return Verdict::pass(Reason::BadQuote);
        }
        let protocol = quote.location.protocol;
        let frontend = Frontend { node_port, protocol, pad: 0 };
        let Some(backend) = F::backend(frontend) else { return Verdict::pass(Reason::NoMapping) };
        let (far_end, far_port) = (quote.location.destination, u16::from_be(quote.ports.destination));
        let mut ends =
            Ends::<F> { client: far_end, client_port: far_port, pod: quote.location.source, pod_port: node_port };
        if host::is_under_way(config, &ends, protocol) {
            // One place for both: there is no stack for another.
            (ends.pod, ends.pod_port) = (backend.addr, backend.port);
            if !flow::is_known(config, &ends, protocol) {
                return Verdict::pass(Reason::OfHost);
            }
        }
        if backend.refuses(frontend, quote.location.destination) {
            return Verdict::drop(Reason::SourceRefused);
        }
        stats::of_mapping(backend.stats_index, |stats| {
            stats.request_packets += 1;
            stats.request_bytes += u64::from(ctx.len());
        });
        let way = redirect::to_pod::<F, WAY, L2>(ctx, &outer.location, backend.addr, || F::pod_way(backend.addr));
        outer.location.rest = way.rest;
        let error = Error { outer, header, quote };
        redirect::send(
            ctx,
            rewrite::apply_error::<F, DESTINATION>(ctx, &error, backend.addr, backend.port.to_be()),
            way,
        )
    }
}

/// Judges a packet with ports, and notes and counts it if it is a request: the Pod that it goes to, how that is reached past
/// the host's stack if `WAY` may do so, and whether its flow is offloaded; or what else is to be done with it.
#[inline(always)]
pub fn backend_of<F: Family, const WAY: u8, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    note: impl FnOnce(&NodeEnd<F>),
) -> Result<(Backend<F>, Option<PodWay>, bool), Verdict> {
    let node_port = u16::from_be(packet.ports.destination);
    let config = CONFIG.get(0).ok_or(Verdict::NOT_OURS)?;
    if !config.contains(node_port) {
        return Err(Verdict::NOT_OURS);
    }
    let addr_index = F::local_index(config, packet.location.destination).ok_or(Verdict::NOT_OURS)?;
    let protocol = packet.location.protocol;
    let frontend = Frontend { node_port, protocol, pad: 0 };
    let Some((backend, way)) = F::backend_by_hint::<WAY>(config, frontend) else {
        stray::note::<F>(frontend);
        return Err(Verdict::pass(Reason::NoMapping));
    };
    let node = NodeEnd { addr: packet.location.destination, addr_index, port: node_port };
    if backend.refuses(frontend, packet.location.source) {
        // For the rest of a fragmented datagram, which is refused by its mapping too.
        note(&node);
        return Err(Verdict::drop(Reason::SourceRefused));
    }
    let tcp_flags = packet.tcp_flags::<L2>(ctx).map_err(Verdict::pass)?;

    let request = Request { node, generation: backend.generation, ifindex: ctx.ifindex(), tcp_flags };
    let client_port = u16::from_be(packet.ports.source);
    let ends = Ends::<F> { client: packet.location.source, client_port, pod: backend.addr, pod_port: backend.port };
    let key = F::flow_key(&ends, protocol);
    let hash = flow::hash(config.seed, &ends, protocol);
    let is_of_host = || {
        let ends = Ends::<F> { pod: request.node.addr, pod_port: node_port, ..ends };
        host::is_under_way(config, &ends, protocol)
    };
    let progress = if attempt::asks(tcp_flags) {
        attempt::open(hash, &request)
    } else {
        let flow = Flow::<F>::of_hash(hash, protocol, &key).ok_or(Verdict::NOT_OURS)?;
        flow.note_request(&request, is_of_host)
    };
    if progress == Progress::OfHost {
        return Err(Verdict::pass(Reason::OfHost));
    }
    stats::of_mapping(backend.stats_index, |stats| {
        if first::is_again(&packet.location) {
            return;
        }
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.length());
        stats.new_flows += u64::from(progress == Progress::New);
        stats.established_flows += u64::from(progress == Progress::Established);
    });
    note(&request.node);
    let is_offloaded = WAY == OFFLOAD && offload::is_offloaded::<F, false>(hash, backend.generation, tcp_flags);
    Ok((backend, way, is_offloaded))
}

/// Takes note of what is not ours and may be a client's datagram to a Pod itself, unless others have done so already. Of a
/// connection, the Pod's answer tells.
#[inline(always)]
pub fn note_direct<F: Family>(packet: &Packet<F>, is_noted: impl FnOnce(&Config) -> bool) {
    let (location, protocol) = (&packet.location, packet.location.protocol);
    let Some(config) = CONFIG.get(0) else { return };
    // What is for the Node itself carries others' packets, on many Nodes.
    if protocol != protocol::UDP || F::is_primary(config, location.destination) || is_noted(config) {
        return;
    }
    let (client_port, pod_port) = (u16::from_be(packet.ports.source), u16::from_be(packet.ports.destination));
    let ends = Ends::<F> { client: location.source, client_port, pod: location.destination, pod_port };
    let key = F::flow_key(&ends, protocol);
    if let Some(flow) = Flow::<F>::new(config.seed, &ends, protocol, &key) {
        flow.note_direct();
    }
}

// SPDX-License-Identifier: GPL-2.0-only
//! Translates requests from a node port to a Pod. The mapping alone determines each request's new destination, so a
//! request needs no conntrack entry.

use aya_ebpf::programs::TcContext;
use npl_common::{
    config::Config,
    mapping::{Frontend, protocol},
    next_hop::PodNextHop,
    reason::Reason,
};

use super::{fragment, hook::Hook, xdp};
use crate::{
    act::{
        redirect::{self, NextHop},
        rewrite::{self, DESTINATION},
    },
    base::{
        context::Access,
        maps::CONFIG,
        mode::{OFFLOAD, STACK},
        stats,
        verdict::Verdict,
    },
    net::{
        family::HeaderChain,
        headers::IcmpHeader,
        icmp::{self, IcmpError},
        packet::Packet,
    },
    state::{
        conntrack::{self, Flow, Request, Transition},
        host_connection, lookup_cache,
        maps::Family,
        sctp_reassembly, stack_seen,
        tuple::{Backend, FlowTuple, NatAddress},
        unmapped,
    },
};

/// The translation of requests by a program of the forwarding mode `MODE`: see [`crate::base::mode`].
pub struct Requests<const MODE: u8>;

/// A request that matches a mapping, and whose source the mapping's allow-list admits.
pub struct Accepted<F: Family> {
    pub backend: Backend<F>,
    /// The next hop to the Pod, which only programs of redirect and offload mode use.
    next_hop: PodNextHop,
    is_offloaded: bool,
}

impl<const MODE: u8> Hook for Requests<MODE> {
    const SIDE: bool = DESTINATION;
    const ON_ARRIVAL: bool = true;

    #[inline(always)]
    fn packet<F: Family, const L2: usize, const FAST_PATH: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        on_nat: impl FnOnce(&NatAddress<F>),
    ) -> Verdict {
        // The slow path has no stack space for the next hop during `accept`, so the slow path looks up the next hop
        // after `accept`.
        let accepted = if FAST_PATH {
            accept::<F, MODE, L2>(ctx, packet, on_nat)
        } else {
            accept::<F, STACK, L2>(ctx, packet, on_nat)
        };
        let Accepted { backend, next_hop, is_offloaded } = match accepted {
            Ok(accepted) => accepted,
            Err(verdict) => {
                // The slow path does not check the exemptions, which saves instructions.
                track_direct(packet, |config| {
                    FAST_PATH && (config.has_no_udp_mappings() || xdp::translates_before(config, ctx))
                });
                return verdict;
            }
        };
        let next_hop = if MODE == OFFLOAD && !is_offloaded {
            NextHop::stack(&packet.headers)
        } else {
            let lookup = || if FAST_PATH { next_hop } else { F::next_hop(backend.addr) };
            redirect::to_pod::<F, MODE, L2>(ctx, &packet.headers, backend.addr, lookup)
        };
        let packet = packet.with(next_hop.ttl_fields);
        redirect::forward(
            ctx,
            rewrite::apply::<F, DESTINATION, L2, FAST_PATH>(ctx, &packet, backend.addr, backend.port.to_be()),
            next_hop,
        )
    }

    #[inline(always)]
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, chain: HeaderChain<F>) -> Verdict {
        fragment::request::<F, MODE, L2>(ctx, chain)
    }

    /// Translates an ICMP error about a reply. The quoted reply has a node address and node port as its source; the Pod
    /// does not know this address, so the Pod's address replaces it. The mapping of the quoted source port determines
    /// the Pod. The sender of the error may be a router, so the program compares the allow-list with the client's
    /// address in the quote, not with the sender's address.
    #[inline(always)]
    fn error<F: Family, const L2: usize>(ctx: &TcContext, mut outer: HeaderChain<F>, header: IcmpHeader) -> Verdict {
        let Some(config) = CONFIG.get(0) else { return Verdict::UNRELATED };
        if F::node_address_index(config, outer.headers.destination).is_none() {
            return Verdict::UNRELATED;
        }
        let quote = match icmp::parse_quote(ctx, &outer, sctp_reassembly::datagram_end) {
            Ok(quote) => quote,
            Err(verdict) => return verdict,
        };
        let node_port = u16::from_be(quote.ports.source);
        if !config.contains(node_port) {
            return Verdict::UNRELATED;
        }
        if quote.headers.source != outer.headers.destination {
            return Verdict::pass(Reason::BadQuote);
        }
        let protocol = quote.headers.protocol;
        let frontend = Frontend { node_port, protocol, pad: 0 };
        let Some(backend) = F::mapping(frontend).map(F::backend) else { return Verdict::pass(Reason::NoMapping) };
        let (client, client_port) = (quote.headers.destination, u16::from_be(quote.ports.destination));
        let tuple = FlowTuple::<F> { client, client_port, pod: backend.addr, pod_port: backend.port };
        if !conntrack::has_flow(config.seed, &tuple, protocol, icmp::quoted_numbers(ctx, &quote)) {
            return Verdict::pass(Reason::UntrackedError);
        }
        if backend.refuses(frontend, quote.headers.destination) {
            return Verdict::drop(Reason::SourceRefused);
        }
        stats::update_mapping(backend.stats_index, |stats| {
            stats.request_packets += 1;
            stats.request_bytes += u64::from(ctx.len());
        });
        let lookup = || F::next_hop(tuple.pod);
        let next_hop = redirect::to_pod::<F, MODE, L2>(ctx, &outer.headers, tuple.pod, lookup);
        outer.headers.ttl_fields = next_hop.ttl_fields;
        let error = IcmpError { outer, header, quote };
        redirect::forward(
            ctx,
            rewrite::apply_error::<F, DESTINATION>(ctx, &error, tuple.pod, tuple.pod_port.to_be()),
            next_hop,
        )
    }
}

/// Looks up the mapping of a packet, and tracks and counts the request. `Err` is the verdict on a packet that is not
/// translated, for example because no mapping matches, or because the allow-list excludes the source.
#[inline(always)]
pub fn accept<F: Family, const MODE: u8, const L2: usize>(
    ctx: &impl Access,
    packet: &Packet<F>,
    on_nat: impl FnOnce(&NatAddress<F>),
) -> Result<Accepted<F>, Verdict> {
    let node_port = u16::from_be(packet.ports.destination);
    let config = CONFIG.get(0).ok_or(Verdict::UNRELATED)?;
    if !config.contains(node_port) {
        return Err(Verdict::UNRELATED);
    }
    let addr_index = F::node_address_index(config, packet.headers.destination).ok_or(Verdict::UNRELATED)?;
    let protocol = packet.headers.protocol;
    let frontend = Frontend { node_port, protocol, pad: 0 };
    let Some((backend, next_hop)) = lookup_cache::backend::<F, MODE>(config, frontend) else {
        unmapped::record::<F>(frontend);
        return Err(Verdict::pass(Reason::NoMapping));
    };
    let nat = NatAddress { addr: packet.headers.destination, addr_index, port: node_port };
    if backend.refuses(frontend, packet.headers.source) {
        // If the packet is a first fragment, `on_nat` stores the fragment record. The record leads later fragments to
        // the same mapping, so that the program checks the mapping's allow-list for later fragments, too.
        on_nat(&nat);
        return Err(Verdict::drop(Reason::SourceRefused));
    }
    let segment = packet.segment(ctx).map_err(Verdict::pass)?;

    let request = Request { nat, generation: backend.generation, segment };
    let client_port = u16::from_be(packet.ports.source);
    let tuple =
        FlowTuple::<F> { client: packet.headers.source, client_port, pod: backend.addr, pod_port: backend.port };
    let key = F::flow_key(&tuple, protocol);
    let hash = tuple.hash(config.seed, protocol);
    let is_host_connection = || {
        let tuple = FlowTuple::<F> { pod: request.nat.addr, pod_port: node_port, ..tuple };
        host_connection::is_host_connection(config, &tuple, protocol)
    };
    let transition = if segment.is_syn() {
        conntrack::open_handshake(hash, &request, packet.syn_payload::<L2>(ctx))
    } else {
        let flow = Flow::<F>::with_hash(hash, protocol, &key).ok_or(Verdict::UNRELATED)?;
        flow.track_request(&request, is_host_connection, || packet.sctp_numbers(ctx))
    };
    if transition == Transition::HostConnection {
        return Err(Verdict::pass(Reason::HostConnection));
    }
    stats::update_mapping(backend.stats_index, |stats| {
        if sctp_reassembly::is_reinjected(&packet.headers) {
            return;
        }
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.length());
        stats.new_flows += u64::from(transition == Transition::New);
        stats.established_flows += u64::from(transition == Transition::Established);
    });
    on_nat(&request.nat);
    let is_offloaded =
        MODE == OFFLOAD && stack_seen::decide_offload::<F, false>(hash, backend.generation, segment.flags);
    Ok(Accepted { backend, next_hop, is_offloaded })
}

/// Tracks a packet that matches no mapping. If a client sends the packet as a datagram to a Pod directly, the function
/// removes the entries of the translated UDP flow with the same flow tuple. `is_exempt` returns whether the packet
/// needs no look-up: either no UDP flow is translated, or another program of NPL has already tracked the packet on this
/// device ([`xdp::translates_before`]). NPL detects a direct TCP connection or SCTP association later, by the Pod's
/// SYN-ACK or INIT ACK.
#[inline(always)]
pub fn track_direct<F: Family>(packet: &Packet<F>, is_exempt: impl FnOnce(&Config) -> bool) {
    let (headers, protocol) = (&packet.headers, packet.headers.protocol);
    let Some(config) = CONFIG.get(0) else { return };
    // Skips datagrams to the Node's primary address: on Nodes with tunnels, this is the destination of most datagrams.
    if protocol != protocol::UDP || F::is_primary(config, headers.destination) || is_exempt(config) {
        return;
    }
    let (client_port, pod_port) = (u16::from_be(packet.ports.source), u16::from_be(packet.ports.destination));
    let tuple = FlowTuple::<F> { client: headers.source, client_port, pod: headers.destination, pod_port };
    let key = F::flow_key(&tuple, protocol);
    if let Some(flow) = Flow::<F>::new(config.seed, &tuple, protocol, &key) {
        flow.remove_if_direct();
    }
}

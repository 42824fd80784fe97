// SPDX-License-Identifier: GPL-2.0-only
//! Translates replies from Pods to clients. The program rewrites only packets whose flow has a conntrack entry. Packets
//! without a conntrack entry pass unchanged.

use aya_ebpf::programs::TcContext;
use npl_common::{
    conntrack::{Numbers, Segment},
    fragment_buffer::{SAVED, SavedFrame},
    half_open,
    mapping::Endpoint,
    reason::Reason,
};

use super::{fragment, hook::Hook};
use crate::{
    act::{
        redirect::{self, NextHop},
        rewrite::{self, SOURCE},
    },
    base::{
        cell::Cell,
        maps::{CONFIG, FRAGMENT_BUFFER},
        mode::{OBSERVE, OFFLOAD, REDIRECT},
        stats,
        verdict::Verdict,
    },
    net::{
        family::{HeaderChain, SocketAddr},
        headers::{IcmpHeader, Ports, tcp_flag},
        icmp::{self, IcmpError},
        packet::Packet,
    },
    state::{
        conntrack::{Flow, Transition},
        flow_entry, half_open_slots,
        lookup_cache::Epoch,
        maps::Family,
        sctp_reassembly, stack_seen,
        tuple::{FlowTuple, NatAddress},
    },
};

/// A packet from the Pod address and port of a mapping. The packet is a reply if its flow has a conntrack entry.
struct Reply<'k, F: Family> {
    flow: Flow<'k, F>,
    tuple: FlowTuple<F>,
    segment: Segment,
}

/// The translation of replies by a program of the forwarding mode `MODE`: see [`crate::base::mode`].
pub struct Replies<const MODE: u8>;

impl<const MODE: u8> Replies<MODE> {
    /// Whether the program runs at the Pod's device, before the host's stack.
    const AT_POD: bool = MODE == REDIRECT || MODE == OFFLOAD;
}

impl<const MODE: u8> Hook for Replies<MODE> {
    const SIDE: bool = SOURCE;
    const ON_ARRIVAL: bool = Self::AT_POD;

    #[inline(always)]
    fn packet<F: Family, const L2: usize, const FAST_PATH: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        on_nat: impl FnOnce(&NatAddress<F>),
    ) -> Verdict {
        let (pod_port, protocol) = (u16::from_be(packet.ports.source), packet.headers.protocol);
        let client_port = u16::from_be(packet.ports.destination);
        let Some(config) = CONFIG.get(0) else { return Verdict::UNRELATED };
        let no_reply = if !Self::AT_POD && config.contains(pod_port) { Verdict::SLOW_PATH } else { Verdict::UNRELATED };
        // No Pod with a mapping has a node address. On Nodes with tunnels, most packets have the Node's primary address,
        // so these packets take no look-up.
        if F::is_primary(config, packet.headers.source) {
            return no_reply;
        }
        let tuple =
            FlowTuple::<F> { client: packet.headers.destination, client_port, pod: packet.headers.source, pod_port };
        let key = F::flow_key(&tuple, protocol);
        let Some(flow) = Flow::new(config.seed, &tuple, protocol, &key) else { return Verdict::UNRELATED };
        let epoch = Epoch::now(config);
        let Some(sender) = Sender::of::<F, FAST_PATH>(&flow, &tuple, protocol, epoch) else {
            return no_reply;
        };
        let endpoint = &sender.endpoint;
        // If a packet did not arrive on the device of the Pod that sent it, the program passes the packet to the stack.
        // The program on the uplink then translates and counts the packet.
        if Self::AT_POD && !redirect::is_from_pod(ctx, &packet.headers) {
            return Verdict::UNRELATED;
        }
        let segment = match packet.segment(ctx) {
            Ok(segment) => segment,
            Err(_) if Self::AT_POD => return Verdict::UNRELATED,
            Err(reason) => return Verdict::pass(reason),
        };
        let reply = Reply { flow, tuple, segment };
        let is_offloaded =
            || stack_seen::decide_offload::<F, true>(reply.flow.hash, endpoint.generation, segment.flags);
        if MODE == OFFLOAD && !is_offloaded() {
            return Verdict::UNRELATED;
        }
        let Some(resolved) = ResolvedFlow::of(&reply, &sender, || packet.sctp_numbers(ctx)) else {
            return if Self::AT_POD { Verdict::UNRELATED } else { Verdict::pass(Reason::UntrackedReply) };
        };
        let nat = &resolved.nat;
        let ports = Ports { source: nat.port.to_be(), ..packet.ports };
        let flow_hash = if FAST_PATH { Some(reply.flow.hash) } else { None };
        let to_client = || redirect::to_client::<F, L2>(ctx, &packet.headers, nat.addr, ports, flow_hash);
        let next_hop = if Self::AT_POD { to_client() } else { NextHop::stack(&packet.headers) };
        if Self::AT_POD && next_hop.is_stack() {
            return Verdict::UNRELATED;
        }
        let transition = resolved.track::<MODE, FAST_PATH>(&reply, endpoint, epoch);
        stats::update_mapping(endpoint.stats_index, |stats| {
            if sctp_reassembly::is_reinjected(&packet.headers) {
                return;
            }
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
            stats.established_flows += u64::from(transition == Transition::Established);
        });
        on_nat(nat);
        if Self::AT_POD && FAST_PATH {
            redirect::mark_translated(ctx, config);
        }
        let packet = packet.with(next_hop.ttl_fields);
        let rewritten = rewrite::apply::<F, SOURCE, L2, FAST_PATH>(ctx, &packet, nat.addr, nat.port.to_be());
        redirect::forward(ctx, rewritten, next_hop)
    }

    #[inline(always)]
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, chain: HeaderChain<F>) -> Verdict {
        fragment::reply::<F, MODE, L2>(ctx, chain)
    }

    /// Translates an ICMP error about a request. The client does not know the Pod's address, so the node address
    /// replaces the Pod's address in the quote. The node address also replaces the source address of the error, whether
    /// the Pod or a router sent the error.
    #[inline(always)]
    fn error<F: Family, const L2: usize>(ctx: &TcContext, mut outer: HeaderChain<F>, header: IcmpHeader) -> Verdict {
        if MODE == REDIRECT && !redirect::is_from_pod(ctx, &outer.headers) {
            return Verdict::UNRELATED;
        }
        let quote = match icmp::parse_quote(ctx, &outer, sctp_reassembly::datagram_end) {
            Ok(quote) => quote,
            Err(verdict) => return verdict,
        };
        let (pod_port, protocol) = (u16::from_be(quote.ports.destination), quote.headers.protocol);
        let pod = SocketAddr { addr: quote.headers.destination, port: pod_port };
        let Some(sender) = Sender::look_up::<F>(&pod, protocol, 0) else { return Verdict::UNRELATED };
        if quote.headers.source != outer.headers.destination {
            return Verdict::pass(Reason::BadQuote);
        }
        let client_port = u16::from_be(quote.ports.source);
        let tuple =
            FlowTuple::<F> { client: quote.headers.source, client_port, pod: quote.headers.destination, pod_port };
        let Some(config) = CONFIG.get(0) else { return Verdict::UNRELATED };
        let key = F::flow_key(&tuple, protocol);
        let Some(flow) = Flow::new(config.seed, &tuple, protocol, &key) else { return Verdict::UNRELATED };
        // The look-up of a flow needs the numbers of a reply, so `segment` is the segment with which the Pod would
        // answer the quoted segment. The look-up must not change a conntrack entry, because any host can send an ICMP
        // error. The SCTP numbers are therefore 0, which answer no packet, and an SCTP flow is looked up by the quoted
        // verification tag.
        let quoted = icmp::quoted_numbers(ctx, &quote);
        let segment = Segment::new(quoted.acknowledgement(), quoted.sequence().wrapping_add(1), tcp_flag::ACK);
        let Some(ResolvedFlow { nat, .. }) =
            ResolvedFlow::of(&Reply { flow, tuple, segment }, &sender, || Some(Numbers(0)))
        else {
            return if MODE == REDIRECT { Verdict::UNRELATED } else { Verdict::pass(Reason::UntrackedReply) };
        };
        let to_client = || redirect::to_client::<F, L2>(ctx, &outer.headers, nat.addr, Ports::NONE, None);
        let next_hop = if MODE == REDIRECT { to_client() } else { NextHop::stack(&outer.headers) };
        if MODE == REDIRECT && next_hop.is_stack() {
            return Verdict::UNRELATED;
        }
        stats::update_mapping(sender.endpoint.stats_index, |stats| {
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
        });
        outer.headers.ttl_fields = next_hop.ttl_fields;
        let error = IcmpError { outer, header, quote };
        let rewritten = rewrite::apply_error::<F, SOURCE>(ctx, &error, nat.addr, nat.port.to_be());
        redirect::forward(ctx, rewritten, next_hop)
    }
}

/// The endpoint (Pod address, port and protocol) that sent a packet.
struct Sender {
    endpoint: Endpoint,
    /// The flow's entry in the half-open cache, if the endpoint is from the reply cache; otherwise 0. The reply cache
    /// has a valid copy of the endpoint only if the flow is established.
    entry: u64,
}

impl Sender {
    #[inline(always)]
    fn of<F: Family, const CACHED: bool>(
        flow: &Flow<'_, F>,
        tuple: &FlowTuple<F>,
        protocol: u8,
        epoch: Epoch,
    ) -> Option<Self> {
        match if CACHED { flow.cached_reply(epoch) } else { None } {
            Some((entry, endpoint)) => Some(Self { endpoint, entry }),
            None => Self::look_up::<F>(&SocketAddr { addr: tuple.pod, port: tuple.pod_port }, protocol, epoch.zero),
        }
    }

    #[inline(always)]
    fn look_up<F: Family>(pod: &SocketAddr<F>, protocol: u8, zero: u8) -> Option<Self> {
        let Endpoint { generation, stats_index } = *F::endpoint(pod, protocol, zero)?;
        Some(Self { endpoint: Endpoint { generation, stats_index }, entry: 0 })
    }
}

/// The table or cache in which the flow of a reply was found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlowSource {
    ReplyCache,
    FlowTable,
    HalfOpenCache,
}

/// The conntrack entry of a reply's flow, and where the entry was found.
///
/// All fields are always initialized. If the loader lacks `CAP_PERFMON`, the verifier also checks the branches that a
/// processor may execute speculatively for another [`FlowSource`], and rejects an uninitialized pointer in these
/// branches.
struct ResolvedFlow<F: Family> {
    source: FlowSource,
    /// The flow table's entry if the entry was found in the flow table ([`FlowSource::FlowTable`]); otherwise a pointer
    /// to other memory that is at least as large, which the program does not read.
    table_entry: *mut F::FlowEntry,
    /// If the entry was found in the half-open cache ([`FlowSource::HalfOpenCache`]), the slot that contains the entry;
    /// otherwise the flow's own slot of the half-open cache.
    half_open: Cell<u64>,
    nat: NatAddress<F>,
}

impl<F: Family> ResolvedFlow<F> {
    #[inline(always)]
    fn of(
        reply: &Reply<'_, F>,
        Sender { endpoint, entry }: &Sender,
        sctp_numbers: impl FnOnce() -> Option<Numbers>,
    ) -> Option<Self> {
        let own_slot = reply.flow.own_slot();
        if *entry != 0
            && reply.segment.flags & tcp_flag::OPENS_OR_ENDS == 0
            && let Some(addr) = F::node_address(half_open::address_index(*entry))
        {
            let nat = NatAddress { addr, addr_index: 0, port: half_open::node_port(*entry) };
            return Some(Self {
                source: FlowSource::ReplyCache,
                table_entry: Self::unused()?,
                half_open: own_slot,
                nat,
            });
        }
        let opening = reply.flow.opening_of_reply(reply.segment);
        if opening.is_none() {
            if let Some(table_entry) = reply.flow.entry_of_reply(reply.segment, endpoint.generation) {
                let nat = flow_entry::established_nat::<F>(table_entry);
                return Some(Self { source: FlowSource::FlowTable, table_entry, half_open: own_slot, nat });
            }
            if reply.segment.flags & tcp_flag::SYN != 0 {
                // With this packet, the Pod accepts or opens a direct connection with the same flow tuple as a
                // translated connection. The translated connection has therefore ended, and its entries are removed.
                reply.flow.remove();
                return None;
            }
        }
        let half_open = opening.or_else(|| reply.flow.half_open_of_reply(reply.segment, sctp_numbers))?;
        let nat = half_open_slots::half_open_nat(half_open.load(), &reply.tuple, reply.flow.protocol, endpoint)?;
        Some(Self { source: FlowSource::HalfOpenCache, table_entry: Self::unused()?, half_open, nat })
    }

    #[inline(always)]
    fn unused() -> Option<*mut F::FlowEntry> {
        const {
            assert!(size_of::<F::FlowEntry>() <= size_of::<SavedFrame>());
            assert!(align_of::<F::FlowEntry>() <= align_of::<SavedFrame>());
        };
        FRAGMENT_BUFFER.get_ptr_mut(SAVED).map(<*mut SavedFrame>::cast)
    }

    /// Updates the conntrack entry and the reply cache for a reply that will be translated. In the mode [`OBSERVE`],
    /// also records that the stack forwarded a reply of an established flow.
    #[inline(always)]
    fn track<const MODE: u8, const CACHES_REPLY: bool>(
        &self,
        reply: &Reply<'_, F>,
        endpoint: &Endpoint,
        epoch: Epoch,
    ) -> Transition {
        let Reply { flow, segment, .. } = reply;
        if self.source == FlowSource::HalfOpenCache {
            return flow.track_half_open_reply(*segment, self.half_open, &self.nat, *endpoint);
        }
        if MODE == OBSERVE {
            stack_seen::record::<F, true>(flow.hash, endpoint.generation, segment.flags);
        }
        if self.source == FlowSource::FlowTable
            && flow.track_established_reply(self.table_entry, *segment)
            && CACHES_REPLY
            && segment.flags & tcp_flag::OPENS_OR_ENDS == 0
        {
            flow.cache_reply(epoch, *endpoint, &self.nat);
        }
        Transition::Unchanged
    }
}

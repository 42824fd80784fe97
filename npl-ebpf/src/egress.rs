// SPDX-License-Identifier: GPL-2.0-only
//! Replies: Pod to client, behind netfilter. Only packets of a flow that a client opened through a mapping are
//! rewritten; what a Pod sends on its own account leaves as it is.

use aya_ebpf::programs::TcContext;
use npl_common::{
    hold::{Held, SAVED},
    mapping::{Endpoint, Frontend, protocol},
    reason::Reason,
    syn::{self, state},
};

use crate::{
    attempt,
    family::{End, Ends, Family, Walk},
    first,
    flow::{self, Flow, NodeEnd, Progress, Request},
    fragment,
    hint::Epoch,
    hook::{DIRECT, Hook, OFFLOAD, WITNESS},
    icmp::{self, Error},
    maps::{CONFIG, HOLD},
    offload,
    packet::{IcmpHeader, Packet, Ports, tcp_flag},
    redirect::{self, Way},
    rewrite::{self, SOURCE},
    stats,
    verdict::Verdict,
};

/// A packet of an endpoint.
struct Reply<'k, F: Family> {
    flow: Flow<'k, F>,
    ends: Ends<F>,
    protocol: u8,
    tcp_flags: u8,
}

/// What is done with replies, that go on by this `WAY`: see [`crate::hook`].
pub struct Replies<const WAY: u8>;

impl<const WAY: u8> Replies<WAY> {
    /// Whether they come from the Pod, and not from the host's stack.
    const AT_POD: bool = WAY == DIRECT || WAY == OFFLOAD;
}

impl<const WAY: u8> Hook for Replies<WAY> {
    const END: bool = SOURCE;
    const ON_ARRIVAL: bool = Self::AT_POD;

    #[inline(always)]
    fn packet<F: Family, const L2: usize, const IS_PLAIN: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        note: impl FnOnce(&NodeEnd<F>),
    ) -> Verdict {
        let (pod_port, protocol) = (u16::from_be(packet.ports.source), packet.location.protocol);
        let client_port = u16::from_be(packet.ports.destination);
        let ends =
            Ends::<F> { client: packet.location.destination, client_port, pod: packet.location.source, pod_port };
        let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS };
        let key = F::flow_key(&ends, protocol);
        let Some(flow) = Flow::new(config.seed, &ends, protocol, &key) else { return Verdict::NOT_OURS };
        let epoch = Epoch::now(config);
        let Some(sender) = Sender::of::<F, IS_PLAIN>(&flow, &ends, protocol, epoch) else {
            let is_of_node = !Self::AT_POD && config.contains(pod_port) && F::local_index(config, ends.pod).is_some();
            return if is_of_node && !redirect::is_marked(ctx, config) { Verdict::UNUSUAL } else { Verdict::NOT_OURS };
        };
        let endpoint = &sender.endpoint;
        // What takes the stack is for the program on the uplink, which counts it.
        if Self::AT_POD && !redirect::is_from_pod(ctx, &packet.location) {
            return Verdict::NOT_OURS;
        }
        let tcp_flags = match packet.tcp_flags::<L2>(ctx) {
            Ok(flags) => flags,
            Err(_) if Self::AT_POD => return Verdict::NOT_OURS,
            Err(reason) => return Verdict::pass(reason),
        };
        let reply = Reply { flow, ends, protocol, tcp_flags };
        let is_offloaded = || offload::is_offloaded::<F, true>(reply.flow.hash, endpoint.generation, tcp_flags);
        if WAY == OFFLOAD && !is_offloaded() {
            return Verdict::NOT_OURS;
        }
        let Some(known) = Known::of(&reply, &sender) else {
            return if Self::AT_POD { Verdict::NOT_OURS } else { Verdict::pass(Reason::UntrackedReply) };
        };
        let node = &known.node;
        // As the Node's own packets go to the client.
        let ports = Ports { source: node.port.to_be(), ..packet.ports };
        let to_client = || redirect::to_client::<F, L2>(ctx, &packet.location, node.addr, ports);
        let way = if Self::AT_POD { to_client() } else { Way::stack(&packet.location) };
        if Self::AT_POD && way.is_stack() {
            return Verdict::NOT_OURS;
        }
        let progress = known.note::<WAY, IS_PLAIN>(&reply, endpoint, epoch);
        stats::of_mapping(endpoint.stats_index, |stats| {
            if first::is_again(&packet.location) {
                return;
            }
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
            stats.established_flows += u64::from(progress == Progress::Established);
        });
        note(node);
        if Self::AT_POD && IS_PLAIN {
            redirect::mark_translated(ctx, config);
        }
        let packet = packet.with(way.rest);
        redirect::send(ctx, rewrite::apply::<F, SOURCE, L2, IS_PLAIN>(ctx, &packet, node.addr, node.port.to_be()), way)
    }

    #[inline(always)]
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, walk: Walk<F>) -> Verdict {
        fragment::reply::<F, WAY, L2>(ctx, walk)
    }

    /// An error about a request, of the Pod, of the Node or of a router behind it, which names the Pod where the client
    /// knows the Node. Whoever sent it, it comes from the Node afterwards: nobody else is known to the client.
    #[inline(always)]
    fn error<F: Family, const L2: usize>(ctx: &TcContext, mut outer: Walk<F>, header: IcmpHeader) -> Verdict {
        if WAY == DIRECT && !redirect::is_from_pod(ctx, &outer.location) {
            return Verdict::NOT_OURS;
        }
        let quote = match icmp::quote(ctx, &outer) {
            Ok(quote) => quote,
            Err(verdict) => return verdict,
        };
        let (pod_port, protocol) = (u16::from_be(quote.ports.destination), quote.location.protocol);
        let pod = End { addr: quote.location.destination, port: pod_port };
        let Some(sender) = Sender::looked_up::<F>(&pod, protocol, 0) else { return Verdict::NOT_OURS };
        if quote.location.source != outer.location.destination {
            return Verdict::pass(Reason::BadQuote);
        }
        let client_port = u16::from_be(quote.ports.source);
        let ends = Ends::<F> { client: quote.location.source, client_port, pod: quote.location.destination, pod_port };
        let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS };
        let key = F::flow_key(&ends, protocol);
        let Some(flow) = Flow::new(config.seed, &ends, protocol, &key) else { return Verdict::NOT_OURS };
        // Nothing is noted of it: nobody has to be who an ICMP error seems to come from.
        let Some(Known { node, .. }) = Known::of(&Reply { flow, ends, protocol, tcp_flags: 0 }, &sender) else {
            return if WAY == DIRECT { Verdict::NOT_OURS } else { Verdict::pass(Reason::UntrackedReply) };
        };
        let to_client = || redirect::to_client::<F, L2>(ctx, &outer.location, node.addr, Ports::NONE);
        let way = if WAY == DIRECT { to_client() } else { Way::stack(&outer.location) };
        if WAY == DIRECT && way.is_stack() {
            return Verdict::NOT_OURS;
        }
        stats::of_mapping(sender.endpoint.stats_index, |stats| {
            stats.reply_packets += 1;
            stats.reply_bytes += u64::from(ctx.len());
        });
        outer.location.rest = way.rest;
        let error = Error { outer, header, quote };
        redirect::send(ctx, rewrite::apply_error::<F, SOURCE>(ctx, &error, node.addr, node.port.to_be()), way)
    }
}

/// An endpoint that a packet is from.
struct Sender {
    endpoint: Endpoint,
    /// The flow's word in the half-open cache, if a hint says that the flow is established as that has it; else zero.
    word: u64,
}

impl Sender {
    #[inline(always)]
    fn of<F: Family, const BY_HINT: bool>(
        flow: &Flow<'_, F>,
        ends: &Ends<F>,
        protocol: u8,
        epoch: Epoch,
    ) -> Option<Self> {
        match if BY_HINT { flow.hint(epoch) } else { None } {
            Some((word, endpoint)) => Some(Self { endpoint, word }),
            None => Self::looked_up::<F>(&End { addr: ends.pod, port: ends.pod_port }, protocol, epoch.zero),
        }
    }

    #[inline(always)]
    fn looked_up<F: Family>(pod: &End<F>, protocol: u8, zero: u8) -> Option<Self> {
        let Endpoint { generation, stats_index } = *F::endpoint(pod, protocol, zero)?;
        Some(Self { endpoint: Endpoint { generation, stats_index }, word: 0 })
    }
}

/// Who knows a reply's flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Hint,
    FlowTable,
    HalfOpenCache,
}

/// What is known of a reply's flow.
///
/// All of it is there in every case. A processor may guess wrongly which it is, and the verifier of a program without
/// `CAP_PERFMON` goes on from there: it finds a pointer to a flow, or refuses the program.
struct Known<F: Family> {
    by: By,
    /// In the flow table; else memory of that size which nobody uses.
    entry: *mut F::Flow,
    /// In the half-open cache; else zero.
    word: u64,
    /// What its client believes it talks to.
    node: NodeEnd<F>,
}

impl<F: Family> Known<F> {
    #[inline(always)]
    fn of(reply: &Reply<'_, F>, Sender { endpoint, word }: &Sender) -> Option<Self> {
        if *word != 0
            && reply.tcp_flags & tcp_flag::OPENS_OR_ENDS == 0
            && let Some(addr) = F::local_address(syn::address_index(*word))
        {
            let node = NodeEnd { addr, addr_index: 0, port: syn::node_port(*word) };
            return Some(Self { by: By::Hint, entry: Self::unused()?, word: 0, node });
        }
        let is_opened_otherwise = reply.flow.is_opened_otherwise(reply.tcp_flags);
        if let Some(entry) = entry(reply, endpoint, is_opened_otherwise) {
            return Some(Self { by: By::FlowTable, entry, word: 0, node: entry_node::<F>(entry) });
        }
        if is_opened_otherwise {
            reply.flow.forget();
            return None;
        }
        let word = reply.flow.asked(reply.tcp_flags)?;
        let node = half_open_node(word, reply, endpoint)?;
        Some(Self { by: By::HalfOpenCache, entry: Self::unused()?, word, node })
    }

    #[inline(always)]
    fn unused() -> Option<*mut F::Flow> {
        const { assert!(size_of::<F::Flow>() <= size_of::<Held>() && align_of::<F::Flow>() <= align_of::<Held>()) };
        HOLD.get_ptr_mut(SAVED).map(<*mut Held>::cast)
    }

    /// Notes the reply, which goes on translated.
    #[inline(always)]
    fn note<const WAY: u8, const LEAVES_HINT: bool>(
        &self,
        reply: &Reply<'_, F>,
        endpoint: &Endpoint,
        epoch: Epoch,
    ) -> Progress {
        if self.by == By::HalfOpenCache {
            return note_reply(reply, self.word, &self.node, endpoint);
        }
        if WAY == WITNESS {
            offload::note_passed::<F, true>(reply.flow.hash, endpoint.generation, reply.tcp_flags);
        }
        if self.by == By::FlowTable {
            // SAFETY: see `entry`.
            let state = F::state(unsafe { &mut *self.entry });
            if reply.tcp_flags & tcp_flag::RST != 0 && !flow::has_spoken(state) {
                reply.flow.was_refused();
                return Progress::Known;
            }
            flow::note_pod(state, reply.tcp_flags);
            if LEAVES_HINT && reply.tcp_flags & tcp_flag::OPENS_OR_ENDS == 0 {
                reply.flow.leave_hint(epoch, endpoint, &self.node);
            }
        }
        Progress::Known
    }
}

/// The flow's entry, if it is of the Pod that has the address now: one of another generation was an earlier Pod's. What
/// accepts or refuses a connection is not about the last one of the same ends, which the entry is of; unless the Pod repeats
/// it, nothing having been said since, nor broken off.
///
/// As in `Flow::note_by_table`, it is memory of its type for as long as the program runs, with the races that `FlowState`
/// allows.
#[inline(always)]
fn entry<F: Family>(reply: &Reply<'_, F>, endpoint: &Endpoint, is_opened_otherwise: bool) -> Option<*mut F::Flow> {
    if attempt::settles(reply.tcp_flags) && reply.flow.is_opening() {
        return None;
    }
    let entry = reply.flow.entry()?;
    // SAFETY: see above.
    let state = F::state(unsafe { &mut *entry });
    let is_of_this =
        state.generation == endpoint.generation && (!is_opened_otherwise || flow::may_be_accepted_again(state));
    if is_of_this { Some(entry) } else { None }
}

#[inline(always)]
fn entry_node<F: Family>(entry: *mut F::Flow) -> NodeEnd<F> {
    // SAFETY: see `entry`.
    let entry = unsafe { &mut *entry };
    NodeEnd { addr: F::node_address(entry), addr_index: 0, port: F::state(entry).node_port }
}

/// The node end that a slot's word names, if the mapping that it names still leads to this sender.
#[inline(always)]
fn half_open_node<F: Family>(word: u64, reply: &Reply<'_, F>, endpoint: &Endpoint) -> Option<NodeEnd<F>> {
    let port = syn::node_port(word);
    let backend = F::backend(Frontend { node_port: port, protocol: reply.protocol, pad: 0 })?;
    if backend.addr != reply.ends.pod
        || backend.port != reply.ends.pod_port
        || backend.generation != endpoint.generation
    {
        return None;
    }
    let addr_index = syn::address_index(word);
    Some(NodeEnd { addr: F::local_address(addr_index)?, addr_index, port })
}

/// Notes that the Pod has answered a half-open flow.
#[inline(always)]
fn note_reply<F: Family>(reply: &Reply<'_, F>, word: u64, node: &NodeEnd<F>, endpoint: &Endpoint) -> Progress {
    let is_refused = reply.tcp_flags & tcp_flag::RST != 0;
    if !is_refused && reply.protocol == protocol::UDP && state(word) == state::REPLIED {
        // A second reply without a second request: a stream that the client may never write to again.
        let node = NodeEnd { ..*node };
        let request = Request { node, generation: endpoint.generation, ifindex: 0, tcp_flags: 0 };
        return reply.flow.establish(&request);
    }
    // A refused connection never becomes a flow, nor does the next one, if that is direct.
    let next = if is_refused || state(word) == state::CLOSED { state::CLOSED } else { state::REPLIED };
    if next != state(word) {
        reply.flow.set_asked(reply.tcp_flags, syn::with_state(word, next));
    }
    Progress::Known
}

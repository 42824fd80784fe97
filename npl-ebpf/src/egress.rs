// SPDX-License-Identifier: GPL-2.0-only
//! Replies: Pod to client, behind netfilter. Only packets of a flow that a client opened through a mapping are
//! rewritten; what a Pod sends on its own account leaves as it is.

use aya_ebpf::programs::TcContext;
use npl_common::{
    mapping::{Endpoint, Frontend, protocol},
    reason::Reason,
    syn::{self, state},
};

use crate::{
    family::{Ends, Family},
    flow::{self, Flow, NodeEnd, Progress, Request},
    maps::CONFIG,
    packet::{Packet, tcp_flag},
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

/// Judges and rewrites one packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<F: Family, const L2: usize>(ctx: &TcContext) -> Verdict {
    let Some(packet) = Packet::<F>::read::<L2>(ctx) else { return Verdict::NotOurs };
    let (pod_port, protocol) = (u16::from_be(packet.ports.source), packet.location.protocol);
    let Some(endpoint) = F::endpoint(packet.location.source, pod_port, protocol) else { return Verdict::NotOurs };
    if packet.location.is_fragment {
        return Verdict::Pass(Reason::Fragment);
    }
    let Some(tcp_flags) = packet.tcp_flags::<L2>(ctx) else { return Verdict::Pass(Reason::Truncated) };
    let client_port = u16::from_be(packet.ports.destination);
    let ends = Ends::<F> { client: packet.location.destination, client_port, pod: packet.location.source, pod_port };
    let Some(config) = CONFIG.get(0) else { return Verdict::NotOurs };
    let key = F::flow_key(&ends, protocol);
    let Some(flow) = Flow::new(config.seed, &ends, protocol, &key) else { return Verdict::NotOurs };
    let reply = Reply { flow, ends, protocol, tcp_flags };
    let Some((node, progress)) = node_end(&reply, endpoint) else {
        return Verdict::Pass(Reason::UntrackedReply);
    };
    stats::of_mapping(endpoint.stats_index, |stats| {
        stats.reply_packets += 1;
        stats.reply_bytes += u64::from(ctx.len());
        stats.established_flows += u64::from(progress == Progress::Established);
    });
    match rewrite::apply::<F, SOURCE, L2>(ctx, &packet, node.addr, node.port.to_be()) {
        Ok(()) => Verdict::Translated,
        Err(rewrite::Refused) => Verdict::Drop(Reason::RewriteFailed),
    }
}

/// What the client of a reply believes it talks to: from the flow table, or from the half-open cache.
#[inline(always)]
fn node_end<F: Family>(reply: &Reply<'_, F>, endpoint: &Endpoint) -> Option<(NodeEnd<F>, Progress)> {
    if let Some(entry) = reply.flow.entry() {
        // SAFETY: see `Flow::note_request`: memory of its type, with the races that `FlowState` allows.
        let entry = unsafe { &mut *entry };
        // An entry of another generation was an earlier Pod's with the same address.
        if F::state(entry).generation == endpoint.generation {
            flow::note_pod(F::state(entry), reply.tcp_flags);
            let (addr, port) = (F::node_address(entry), F::state(entry).node_port);
            return Some((NodeEnd { addr, addr_index: 0, port }, Progress::Known));
        }
    }
    let word = reply.flow.half_open()?;
    let node = half_open_node(word, reply, endpoint)?;
    let progress = note_reply(reply, word, &node, endpoint);
    Some((node, progress))
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
    if reply.tcp_flags & tcp_flag::RST != 0 {
        // A refused connection never becomes a flow.
        return Progress::Known;
    }
    if reply.protocol != protocol::TCP && state(word) == state::REPLIED {
        // A second reply without a second request: a stream that the client may never write to again.
        let node = NodeEnd { ..*node };
        let request = Request { node, generation: endpoint.generation, ifindex: 0, tcp_flags: 0 };
        return reply.flow.establish(&request);
    }
    if state(word) != state::REPLIED {
        reply.flow.set_slot(syn::with_state(word, state::REPLIED));
    }
    Progress::Known
}

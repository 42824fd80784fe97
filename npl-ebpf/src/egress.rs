// SPDX-License-Identifier: GPL-2.0-only
//! Replies: Pod to client, behind netfilter. Only packets of a flow that a client opened through a mapping are
//! rewritten; what a Pod sends on its own account leaves as it is.

use aya_ebpf::programs::TcContext;
use npl_common::{
    mapping::{Endpoint, EndpointV4, Frontend, protocol},
    reason::Reason,
    syn::{self, state},
};

use crate::{
    flow::{self, Flow, NodeEnd, Progress, Request},
    maps::{CONFIG, ENDPOINT_V4, LOCAL_ADDRESS_V4, MAPPING_V4},
    packet::{PacketV4, tcp_flag},
    rewrite::{self, Rewrite},
    stats,
    verdict::Verdict,
};

/// Judges and rewrites one packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<const L2: usize>(ctx: &TcContext) -> Verdict {
    let Some(packet) = PacketV4::read::<L2>(ctx) else { return Verdict::NotOurs };
    let sender = EndpointV4 {
        pod_addr: packet.ip.source.to_ne_bytes(),
        pod_port: u16::from_be(packet.ports.source),
        protocol: packet.ip.protocol,
        pad: 0,
    };
    // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
    let Some(endpoint) = (unsafe { ENDPOINT_V4.get(&sender) }) else { return Verdict::NotOurs };
    if packet.is_fragment() {
        return Verdict::Pass(Reason::Fragment);
    }
    let Some(transport) = packet.transport::<L2>(ctx) else { return Verdict::Pass(Reason::Truncated) };
    let client_port = u16::from_be(packet.ports.destination);
    let Some(config) = CONFIG.get(0) else { return Verdict::NotOurs };
    let ends = (packet.ip.destination, client_port, packet.ip.source, sender.pod_port);
    let Some(flow) = Flow::new(config.seed, ends, packet.ip.protocol) else { return Verdict::NotOurs };
    let Some((node, progress)) = node_end(&flow, &sender, endpoint, transport.tcp_flags()) else {
        return Verdict::Pass(Reason::UntrackedReply);
    };
    stats::of_mapping(endpoint.stats_index, |stats| {
        stats.reply_packets += 1;
        stats.reply_bytes += u64::from(ctx.len());
        stats.established_flows += u64::from(progress == Progress::Established);
    });
    let rewrite = Rewrite::Source { addr: u32::from_ne_bytes(node.addr), port: node.port.to_be() };
    match rewrite::apply::<L2>(ctx, &packet, transport, rewrite) {
        Ok(()) => Verdict::Translated,
        Err(rewrite::Refused) => Verdict::Drop(Reason::RewriteFailed),
    }
}

/// What the client of a reply believes it talks to: from the flow table, or from the half-open cache.
#[inline(always)]
fn node_end(
    flow: &Flow,
    sender: &EndpointV4,
    endpoint: &Endpoint,
    tcp_flags: u8,
) -> Option<(NodeEnd, Progress)> {
    if let Some(entry) = flow.entry() {
        // SAFETY: see `Flow::note_request`: memory of its type, with the races that `FlowV4` allows.
        let entry = unsafe { &mut *entry };
        // An entry of another generation was an earlier Pod's with the same address.
        if entry.generation == endpoint.generation {
            flow::note_pod(entry, tcp_flags);
            return Some((NodeEnd { addr: entry.node_addr, addr_index: 0, port: entry.node_port }, Progress::Known));
        }
    }
    let word = flow.half_open()?;
    let node = half_open_node(word, sender, endpoint)?;
    Some((node, note_reply(flow, word, node, endpoint, tcp_flags)))
}

/// The node end that a slot's word names, if the mapping that it names still leads to this sender.
#[inline(always)]
fn half_open_node(word: u64, sender: &EndpointV4, endpoint: &Endpoint) -> Option<NodeEnd> {
    let port = syn::node_port(word);
    let frontend = Frontend { node_port: port, protocol: sender.protocol, pad: 0 };
    // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
    let backend = unsafe { MAPPING_V4.get(&frontend) }?;
    if backend.pod_addr != sender.pod_addr
        || backend.pod_port != sender.pod_port
        || backend.generation != endpoint.generation
    {
        return None;
    }
    let addr_index = syn::address_index(word);
    let addr = LOCAL_ADDRESS_V4.get(u32::from(addr_index))?.addr;
    if addr == [0; 4] { None } else { Some(NodeEnd { addr, addr_index, port }) }
}

/// Notes that the Pod has answered a half-open flow.
#[inline(always)]
fn note_reply(flow: &Flow, word: u64, node: NodeEnd, endpoint: &Endpoint, tcp_flags: u8) -> Progress {
    if tcp_flags & tcp_flag::RST != 0 {
        // A refused connection never becomes a flow.
        return Progress::Known;
    }
    if flow.key.protocol != u32::from(protocol::TCP) && state(word) == state::REPLIED {
        // A second reply without a second request: a stream that the client may never write to again.
        let request = Request { node, generation: endpoint.generation, ifindex: 0, tcp_flags: 0 };
        return flow.establish(&request);
    }
    if state(word) != state::REPLIED {
        flow.set_slot(syn::with_state(word, state::REPLIED));
    }
    Progress::Known
}

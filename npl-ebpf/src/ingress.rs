// SPDX-License-Identifier: GPL-2.0-only
//! Requests: node port to Pod. The destination follows from the mapping alone, packet by packet.

use aya_ebpf::programs::TcContext;
use npl_common::{
    config::Config,
    mapping::{Frontend, LocalAddressV4},
    reason::Reason,
};

use crate::{
    flow::{Flow, NodeEnd, Progress, Request},
    maps::{CONFIG, LOCAL_V4, MAPPING_V4},
    packet::{PacketV4, skb},
    rewrite::{self, Rewrite},
    stats,
    verdict::Verdict,
};

/// Judges and rewrites one packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<const L2: usize>(ctx: &TcContext) -> Verdict {
    let Some(packet) = PacketV4::read::<L2>(ctx) else { return Verdict::NotOurs };
    let node_port = u16::from_be(packet.ports.destination);
    let Some(config) = CONFIG.get(0) else { return Verdict::NotOurs };
    if !config.contains(node_port) {
        return Verdict::NotOurs;
    }
    let Some(addr_index) = local_index(config, packet.ip.destination) else { return Verdict::NotOurs };
    let frontend = Frontend { node_port, protocol: packet.ip.protocol, pad: 0 };
    // SAFETY: the agent alone writes this map; the kernel replaces an element as a whole.
    let Some(backend) = (unsafe { MAPPING_V4.get(&frontend) }) else { return Verdict::Pass(Reason::NoMapping) };
    if packet.is_fragment() {
        return Verdict::Pass(Reason::Fragment);
    }
    let Some(transport) = packet.transport::<L2>(ctx) else { return Verdict::Pass(Reason::Truncated) };

    let pod_addr = u32::from_ne_bytes(backend.pod_addr);
    let node = NodeEnd { addr: packet.ip.destination.to_ne_bytes(), addr_index, port: node_port };
    let request =
        Request { node, generation: backend.generation, ifindex: ifindex(ctx), tcp_flags: transport.tcp_flags() };
    let client_port = u16::from_be(packet.ports.source);
    let ends = (packet.ip.source, client_port, pod_addr, backend.pod_port);
    let progress = Flow::new(config.seed, ends, packet.ip.protocol).map(|flow| flow.note_request(&request));
    stats::of_mapping(backend.stats_index, |stats| {
        stats.request_packets += 1;
        stats.request_bytes += u64::from(ctx.len());
        stats.new_flows += u64::from(progress == Some(Progress::New));
        stats.established_flows += u64::from(progress == Some(Progress::Established));
    });
    let rewrite = Rewrite::Destination { addr: pod_addr, port: backend.pod_port.to_be() };
    match rewrite::apply::<L2>(ctx, &packet, transport, rewrite) {
        Ok(()) => Verdict::Translated,
        Err(rewrite::Refused) => Verdict::Drop(Reason::RewriteFailed),
    }
}

/// Which 64-bit word of the configuration holds the primary address and its index.
const PRIMARY_WORD: usize = core::mem::offset_of!(Config, primary_v4) / size_of::<u64>();

/// The position of an address among the Node's; nothing if it is not one of them.
#[inline(always)]
fn local_index(config: &Config, addr: u32) -> Option<u8> {
    // SAFETY: in the map's element, aligned; address and index are read as the one little-endian word that they are
    // written as.
    let primary = unsafe { core::ptr::from_ref(config).cast::<u64>().add(PRIMARY_WORD).read_volatile() };
    if primary as u32 == addr && addr != 0 {
        return Some((primary >> u32::BITS) as u8);
    }
    // SAFETY: the agent alone writes this map, and never changes an element in place.
    let local = unsafe { LOCAL_V4.get(&LocalAddressV4 { addr: addr.to_ne_bytes() }) }?;
    Some(local.index as u8)
}

/// The device that the packet came in by.
#[inline(always)]
fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run; the verifier allows this field.
    unsafe { (*skb(ctx)).ifindex }
}

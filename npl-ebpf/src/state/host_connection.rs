// SPDX-License-Identifier: GPL-2.0-only
//! Records host connections, see [`npl_common::host_connection`]. The flow tuple of a host connection has the remote
//! host in place of the client, and the Node in place of the Pod.

use npl_common::{
    config::{Config, FLAG_FINAL_SOURCES},
    conntrack::{Numbers, Segment},
    host_connection,
    mapping::Frontend,
};

use super::{conntrack, lookup_cache, maps::Family, tuple::FlowTuple};
use crate::{
    base::{cell::Cell, clock::coarse_seconds, maps::CONFIG, mode::STACK},
    net::{headers::tcp_flag, packet::Packet},
};

/// Records an outgoing packet whose source port is in the node port range. If the packet's source is a node address,
/// the packet is recorded under this address. Any other packet is recorded under the Node's primary address, but only
/// if a later program may masquerade the packet. A reply that NPL has already translated is not recorded. NPL may
/// translate a reply on an earlier device: on the Pod's device in redirect mode, or on an upper device such as a VLAN.
///
/// A RST is not recorded: the host refuses a client of an unmapped port with a RST, and this refusal opens no host
/// connection.
#[inline(always)]
pub fn record_leaving<F: Family>(packet: &Packet<F>, segment: Segment) {
    let Some(config) = CONFIG.get(0) else { return };
    let Packet { ports, headers, .. } = packet;
    let (client_port, pod_port) = (u16::from_be(ports.destination), u16::from_be(ports.source));
    // A later program on this hook, such as Cilium's, may masquerade the packet. The masqueraded packet has the Node's
    // primary address and, if possible, the same source port, so the packet is recorded under the primary address.
    let is_of_node = F::node_address_index(config, headers.source).is_some();
    if !is_of_node && config.flags & FLAG_FINAL_SOURCES != 0 {
        return;
    }
    let node = if is_of_node { Some(headers.source) } else { F::primary(config) };
    let Some(node) = node else { return };
    let tuple = &FlowTuple::<F> { client: headers.destination, client_port, pod: node, pod_port };
    let protocol = headers.protocol;
    if segment.flags & tcp_flag::RST != 0 || is_translated_reply(config, tuple, protocol, segment.numbers) {
        return;
    }
    let hash = tuple.hash(config.seed, protocol);
    let now = coarse_seconds();
    if let Some(slot) = slot::<F>(hash, now) {
        let word = slot.load();
        // Cilium's masquerading keeps a UDP connection for 60 s, so the record of a masqueraded packet gets the
        // lifetime of a stream.
        let entry = if is_of_node {
            host_connection::renewed(word, hash, protocol, now)
        } else {
            host_connection::entry(hash, host_connection::STREAM, now)
        };
        // The slot is written at most once per 1.07 s, because each write invalidates the cache line on other
        // processors.
        if word != entry {
            slot.store(entry);
        }
    }
}

/// Returns whether a packet without a conntrack entry belongs to a recorded host connection. Updates the duration of
/// the record.
#[inline(never)]
pub fn is_host_connection<F: Family>(config: &Config, tuple: &FlowTuple<F>, protocol: u8) -> bool {
    let hash = tuple.hash(config.seed, protocol);
    let (first, second, now) = (host_connection::slot(hash), host_connection::second_slot(hash), coarse_seconds());
    let is_at = |index| {
        let Some(slot) = F::host_connection(index) else { return false };
        let word = slot.load();
        if !host_connection::is_alive(word, hash, protocol, now) {
            return false;
        }
        let answered = host_connection::answered(word, now);
        if answered != word {
            slot.store(answered);
        }
        true
    };
    is_at(first) || is_at(second)
}

/// Returns the slot that contains the record of a host connection or, if the connection has no record, the slot for a
/// new record.
#[inline(always)]
fn slot<F: Family>(hash: u64, now: u64) -> Option<Cell<u64>> {
    let first = F::host_connection(host_connection::slot(hash))?;
    let second = F::host_connection(host_connection::second_slot(hash))?;
    Some(if host_connection::is_second(first.load(), second.load(), hash, now) { second } else { first })
}

/// Returns whether a packet that leaves from a node port is a reply of the mapped Pod. A SYN-ACK belongs to a flow only
/// if the SYN-ACK acknowledges the SYN of a handshake.
#[inline(always)]
fn is_translated_reply<F: Family>(config: &Config, tuple: &FlowTuple<F>, protocol: u8, numbers: Numbers) -> bool {
    let frontend = Frontend { node_port: tuple.pod_port, protocol, pad: 0 };
    let Some((backend, _)) = lookup_cache::backend::<F, STACK>(config, frontend) else { return false };
    let tuple = FlowTuple::<F> {
        client: tuple.client,
        client_port: tuple.client_port,
        pod: backend.addr,
        pod_port: backend.port,
    };
    conntrack::has_flow(config.seed, &tuple, protocol, numbers)
}

// SPDX-License-Identifier: GPL-2.0-only
//! What the host itself has under way by node ports, see [`npl_common::host`]. Its ends are named as a flow's: who is far away
//! in the client's place, and the Node in the Pod's.

use npl_common::{
    config::Config,
    host::{self, counts},
    mapping::Frontend,
};

use crate::{
    family::{Ends, Family},
    flow::{self, Flow},
    fragment::now,
    hook::STACK,
    maps::CONFIG,
    packet::{Packet, tcp_flag},
    word,
};

/// Takes note of a packet that leaves from a node port, unless it is a reply of ours, which was translated already: past the
/// stack, or by a device above this one. What refuses or breaks off has nothing under way: so the host answers whoever comes to
/// a port that leads nowhere, which may be the client's next Pod's.
///
/// Once there is a note, it is not written on each packet: other processors read it.
#[inline(always)]
pub fn note_leaving<F: Family>(packet: &Packet<F>, tcp_flags: u8) {
    let Some(config) = CONFIG.get(0) else { return };
    let Packet { ports, location, .. } = packet;
    let (client_port, pod_port) = (u16::from_be(ports.destination), u16::from_be(ports.source));
    let ends = &Ends::<F> { client: location.destination, client_port, pod: location.source, pod_port };
    let protocol = location.protocol;
    if tcp_flags & tcp_flag::RST != 0 || is_reply(config, ends, protocol) {
        return;
    }
    let hash = flow::hash(config.seed, ends, protocol);
    if let Some(slot) = F::host_slot(host::slot(hash)) {
        let note = host::word(hash, now());
        if word::load(slot) != note {
            word::store(slot, note);
        }
    }
}

/// Whether a packet of no flow that is known belongs to what the host has under way.
#[inline(never)]
pub fn is_under_way<F: Family>(config: &Config, ends: &Ends<F>, protocol: u8) -> bool {
    let hash = flow::hash(config.seed, ends, protocol);
    F::host_slot(host::slot(hash)).is_some_and(|slot| counts(word::load(slot), hash, protocol, now()))
}

#[inline(always)]
fn is_reply<F: Family>(config: &Config, ends: &Ends<F>, protocol: u8) -> bool {
    let frontend = Frontend { node_port: ends.pod_port, protocol, pad: 0 };
    let Some((backend, _)) = F::backend_by_hint::<STACK>(config, frontend) else { return false };
    let ends =
        Ends::<F> { client: ends.client, client_port: ends.client_port, pod: backend.addr, pod_port: backend.port };
    let key = F::flow_key(&ends, protocol);
    Flow::<F>::new(config.seed, &ends, protocol, &key).is_some_and(|flow| flow.is_remembered())
}

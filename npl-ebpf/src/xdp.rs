// SPDX-License-Identifier: GPL-2.0-only
//! Requests ahead of the stack, where a device's driver runs programs: plain ones alone, as nearly all are.
//!
//! Everything else goes on untouched, to the program at TC ingress behind. What was translated here has the Pod's
//! address, and is nothing of that program's.

use aya_ebpf::programs::{TcContext, XdpContext};
use npl_common::config::{Config, FLAG_XDP};

use crate::{
    family::{Family, V4, V6},
    hook::STACK,
    ingress,
    maps::XDP_DEVICE,
    packet::{Access, ETHERNET, Frame, Packet},
    rewrite,
    verdict::Verdict,
};

/// Whether the driver of a packet's device runs this program.
#[inline(always)]
pub fn is_ahead(config: &Config, ctx: &TcContext) -> bool {
    // SAFETY: the agent alone writes this map, and no more than one value.
    config.flags & FLAG_XDP != 0 && unsafe { XDP_DEVICE.get(&ctx.ifindex()) }.is_some()
}

/// Judges and rewrites one frame, of which `IN_PARTS` see [`Frame`].
#[inline(always)]
pub fn translate<const IN_PARTS: bool>(ctx: XdpContext) -> u32 {
    let frame = Frame::<IN_PARTS>(ctx);
    let verdict = match frame.ether_type() {
        Some(V4::ETHER_TYPE) => translate_family::<V4, IN_PARTS>(&frame),
        Some(V6::ETHER_TYPE) => translate_family::<V6, IN_PARTS>(&frame),
        // A tag says what VLAN a frame belongs to; one that a device took off is its to keep (docs/datapath.md).
        _ => Verdict::NOT_OURS,
    };
    verdict.into_frame_action()
}

#[inline(always)]
fn translate_family<F: Family, const IN_PARTS: bool>(frame: &Frame<IN_PARTS>) -> Verdict {
    let packet = match Packet::<F>::read::<ETHERNET>(frame) {
        Ok(packet) => packet,
        Err(other) => return other.into(),
    };
    match ingress::backend_of::<F, STACK, ETHERNET>(frame, &packet, |_| ()) {
        Ok((pod, _, _)) => rewrite::apply_to_frame::<F, ETHERNET>(frame, &packet, pod.addr, pod.port.to_be()).into(),
        Err(verdict) => {
            ingress::note_direct(&packet, |_| false);
            verdict
        }
    }
}

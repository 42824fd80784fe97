// SPDX-License-Identifier: GPL-2.0-only
//! Requests ahead of the stack, where a device's driver runs programs: plain ones alone, as nearly all are.
//!
//! Everything else goes on untouched, to the program at TC ingress behind. What was translated here has the Pod's
//! address, and is nothing of that program's.

use aya_ebpf::programs::XdpContext;

use crate::{
    family::{Family, V4, V6},
    hook::{DIRECT, STACK},
    ingress,
    packet::{ETHERNET, Frame, Packet},
    redirect, rewrite,
    verdict::Verdict,
};

/// Judges and rewrites one frame, of which `IN_PARTS` see [`Frame`]. It goes on by this `WAY`, see [`crate::hook`]: by the
/// host's stack, or to a Pod that takes frames, and then all that are not for such a Pod are the programs' behind.
#[inline(always)]
pub fn translate<const WAY: u8, const IN_PARTS: bool>(ctx: XdpContext) -> u32 {
    let frame = Frame::<IN_PARTS>(ctx);
    let verdict = match frame.ether_type() {
        Some(V4::ETHER_TYPE) => translate_family::<V4, WAY, IN_PARTS>(&frame),
        Some(V6::ETHER_TYPE) => translate_family::<V6, WAY, IN_PARTS>(&frame),
        // A tag says what VLAN a frame belongs to; one that a device took off is its to keep (docs/datapath.md).
        _ => Verdict::NotOurs,
    };
    verdict.into_frame_action()
}

#[inline(always)]
fn translate_family<F: Family, const WAY: u8, const IN_PARTS: bool>(frame: &Frame<IN_PARTS>) -> Verdict {
    let packet = match Packet::<F>::read::<ETHERNET>(frame) {
        Ok(packet) => packet,
        Err(other) => return other.into(),
    };
    let sent = if WAY == DIRECT { send(frame, packet) } else { pass_on(frame, &packet) };
    sent.unwrap_or_else(|verdict| verdict)
}

/// By the host's stack.
#[inline(always)]
fn pass_on<F: Family, const IN_PARTS: bool>(frame: &Frame<IN_PARTS>, packet: &Packet<F>) -> Result<Verdict, Verdict> {
    let (pod, (), _) = ingress::backend_of::<F, STACK, ETHERNET, _>(frame, packet, |_| Ok(()), |_| ())?;
    Ok(rewrite::apply_to_frame::<F, ETHERNET>(frame, packet, pod.addr, pod.port.to_be()).into())
}

/// To the Pod.
#[inline(always)]
fn send<F: Family, const IN_PARTS: bool>(frame: &Frame<IN_PARTS>, packet: Packet<F>) -> Result<Verdict, Verdict> {
    let (pod, (way, rest), _) = ingress::backend_of::<F, DIRECT, ETHERNET, _>(
        frame,
        &packet,
        |pod| redirect::frame_to_pod(frame, &packet.location, pod.addr).ok_or(Verdict::NotOurs),
        |_| (),
    )?;
    let packet = packet.with(rest);
    let rewritten = rewrite::apply_to_frame::<F, ETHERNET>(frame, &packet, pod.addr, pod.port.to_be());
    Ok(redirect::send_frame(rewritten.and_then(|()| rewrite::apply_ethernet(frame, way.addresses)), &way))
}

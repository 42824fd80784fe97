// SPDX-License-Identifier: GPL-2.0-only
//! Translates or drops fast-path requests at the XDP hook, before the kernel allocates an skb. All other frames pass
//! unchanged to the program at TC ingress. A translated frame also reaches the program at TC ingress. This program
//! passes the frame unchanged, like a direct packet to the Pod, because the destination is the Pod's address.

use aya_ebpf::programs::{TcContext, XdpContext};
use npl_common::config::{Config, FLAG_PRE_TC_DEVICES};

use super::{
    request::{self, Accepted},
    trace,
};
use crate::{
    act::rewrite,
    base::{
        context::{Access, ETHERNET, Frame},
        maps::PRE_TC_DEVICE,
        mode::STACK,
        verdict::Verdict,
    },
    net::{V4, V6, family::HeaderLayout as _, packet::Packet},
    state::maps::Family,
};

/// Returns whether another program of NPL may have translated this packet before this TC program. The other program is
/// the XDP program or, before Linux 6.6, NPL's temporary second filter, which exists while the agent moves NPL's filter
/// ahead of all other filters.
#[inline(always)]
pub fn translates_before(config: &Config, ctx: &TcContext) -> bool {
    // SAFETY: only the agent writes this map, and the program does not read the value.
    config.flags & FLAG_PRE_TC_DEVICES != 0 && unsafe { PRE_TC_DEVICE.get(&ctx.ifindex()) }.is_some()
}

/// Translates, passes or drops one frame.
#[inline(always)]
pub fn translate<const MULTI_BUFFER: bool>(ctx: XdpContext) -> u32 {
    let frame = Frame::<MULTI_BUFFER>(ctx);
    let verdict = match frame.ether_type() {
        Some(V4::ETHER_TYPE) => judge::<V4, MULTI_BUFFER>(&frame),
        Some(V6::ETHER_TYPE) => judge::<V6, MULTI_BUFFER>(&frame),
        // The program on the VLAN device translates a frame with a VLAN tag. The XDP program does not see a tag that
        // the network card has removed (docs/datapath.md).
        _ => Verdict::UNRELATED,
    };
    verdict.into_frame_action()
}

#[inline(always)]
fn judge<F: Family, const MULTI_BUFFER: bool>(frame: &Frame<MULTI_BUFFER>) -> Verdict {
    trace::frame::<F, MULTI_BUFFER>(frame, translate_family::<F, MULTI_BUFFER>)
}

#[inline(always)]
fn translate_family<F: Family, const MULTI_BUFFER: bool>(frame: &Frame<MULTI_BUFFER>) -> Verdict {
    let packet = match Packet::<F>::parse::<ETHERNET>(frame) {
        Ok(packet) => packet,
        Err(unparsed) => return unparsed.into(),
    };
    match request::accept::<F, STACK, ETHERNET>(frame, &packet, |_| ()) {
        Ok(Accepted { backend, .. }) => {
            rewrite::apply_to_frame::<F, ETHERNET>(frame, &packet, backend.addr, backend.port.to_be()).into()
        }
        Err(verdict) => {
            request::track_direct(&packet, Config::has_no_udp_mappings);
            verdict
        }
    }
}

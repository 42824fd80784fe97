// SPDX-License-Identifier: GPL-2.0-only
//! NPL's kernel programs: entries only. Each is one expression over a direction's module.
//!
//! `ingress` rewrites what clients send to a node port to the Pod, ahead of netfilter; `egress` rewrites the Pod's
//! replies back, behind netfilter. In between, the host and its CNI see one ordinary flow from the client to the Pod.
//! `rest` is both for packets that few are like: ICMP errors, fragments, options, SCTP.
//! `redirect` is the way past the host's stack, `offload` says when it is open, and `witness` sees what the stack lets through.
//! `xdp` is `ingress` for plain packets, ahead of the stack.
//! `local` does without packets: it leads the sockets of clients on the Node itself and in its Pods to the Pod.
//!
//! Whatever is not ours goes on untouched: the verdict is always "next", so that other programs on the hook see it too.

#![no_std]
#![no_main]
#![expect(unreachable_pub, reason = "a module says what it offers; a binary has no other crate to offer it to")]
#![expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets, indexes and packed words are bounded where they are made"
)]
#![expect(clippy::cast_possible_wrap, reason = "the kernel takes sizes of structures as signed numbers")]
#![expect(clippy::needless_pass_by_value, reason = "the program macro hands the context over")]
#![expect(clippy::needless_borrows_for_generic_args, reason = "aya's next version takes references only")]
#![expect(unsafe_code, reason = "packets and map values are raw memory that the kernel's verifier checks")]

mod attempt;
mod egress;
mod family;
mod first;
mod flow;
mod fragment;
mod hint;
mod hold;
mod hook;
mod host;
mod icmp;
mod ingress;
mod local;
mod maps;
mod offload;
mod packet;
mod redirect;
mod rest;
mod rewrite;
mod sctp;
mod stats;
mod stray;
mod verdict;
mod witness;
mod word;
mod xdp;

use aya_ebpf::{
    macros::{cgroup_sock_addr, classifier, xdp},
    programs::{SockAddrContext, TcContext, XdpContext},
};
use npl_common::names::{REST_EGRESS, REST_EGRESS_L3, REST_INGRESS, REST_INGRESS_DIRECT, REST_INGRESS_L3, REST_PODS};

use crate::{
    egress::Replies,
    hook::{DIRECT, Hook, OFFLOAD, STACK, WITNESS},
    ingress::Requests,
    local::{Call, Inet},
    maps::REST,
    packet::ETHERNET,
    verdict::Verdict,
};

/// Bytes in front of the IP header on a device without link-layer header.
const NONE: usize = 0;
/// The system call goes on; it is never ours to refuse.
const ALLOW: i32 = 1;

/// Requests on a device with Ethernet headers.
#[classifier]
pub fn npl_ingress(ctx: TcContext) -> i32 {
    plain::<Requests<STACK>, ETHERNET>(&ctx, REST_INGRESS)
}

/// Replies on a device with Ethernet headers.
#[classifier]
pub fn npl_egress(ctx: TcContext) -> i32 {
    plain::<Replies<STACK>, ETHERNET>(&ctx, REST_EGRESS)
}

/// Requests on a device without link-layer header.
#[classifier]
pub fn npl_ingress_l3(ctx: TcContext) -> i32 {
    plain::<Requests<STACK>, NONE>(&ctx, REST_INGRESS_L3)
}

/// Replies on a device without link-layer header.
#[classifier]
pub fn npl_egress_l3(ctx: TcContext) -> i32 {
    plain::<Replies<STACK>, NONE>(&ctx, REST_EGRESS_L3)
}

/// As [`npl_ingress`], with `--forwarding redirect`.
#[classifier]
pub fn npl_in_direct(ctx: TcContext) -> i32 {
    plain::<Requests<DIRECT>, ETHERNET>(&ctx, REST_INGRESS_DIRECT)
}

/// Replies on a device that leads to Pods, with `--forwarding redirect`.
#[classifier]
pub fn npl_pods(ctx: TcContext) -> i32 {
    plain::<Replies<DIRECT>, ETHERNET>(&ctx, REST_PODS)
}

/// As [`npl_ingress`], with `--forwarding offload`.
#[classifier]
pub fn npl_off_ingress(ctx: TcContext) -> i32 {
    plain::<Requests<OFFLOAD>, ETHERNET>(&ctx, REST_INGRESS)
}

/// As [`npl_egress`], with `--forwarding offload`.
#[classifier]
pub fn npl_off_egress(ctx: TcContext) -> i32 {
    plain::<Replies<WITNESS>, ETHERNET>(&ctx, REST_EGRESS)
}

/// Replies on a device that leads to Pods, with `--forwarding offload`. What is unusual takes the stack.
#[classifier]
pub fn npl_off_pods(ctx: TcContext) -> i32 {
    hook::translate::<Replies<OFFLOAD>, ETHERNET>(&ctx).into_action()
}

/// Requests that leave for Pods, with `--forwarding offload`.
#[classifier]
pub fn npl_off_to_pods(ctx: TcContext) -> i32 {
    witness::note_request::<ETHERNET>(&ctx);
    Verdict::NOT_OURS.into_action()
}

/// Requests ahead of the stack, by the driver of a device with Ethernet headers.
#[xdp]
pub fn npl_xdp(ctx: XdpContext) -> u32 {
    xdp::translate::<false>(ctx)
}

/// As [`npl_xdp`], where a frame may be in parts.
#[xdp(frags)]
pub fn npl_xdp_frags(ctx: XdpContext) -> u32 {
    xdp::translate::<true>(ctx)
}

/// Where [`npl_ingress`] leaves what is unusual.
#[classifier]
pub fn npl_in_rest(ctx: TcContext) -> i32 {
    rest::translate::<Requests<STACK>, ETHERNET>(&ctx)
}

/// Where [`npl_egress`] leaves what is unusual.
#[classifier]
pub fn npl_out_rest(ctx: TcContext) -> i32 {
    rest::translate::<Replies<STACK>, ETHERNET>(&ctx)
}

/// Where [`npl_ingress_l3`] leaves what is unusual.
#[classifier]
pub fn npl_in_l3_rest(ctx: TcContext) -> i32 {
    rest::translate::<Requests<STACK>, NONE>(&ctx)
}

/// Where [`npl_egress_l3`] leaves what is unusual.
#[classifier]
pub fn npl_out_l3_rest(ctx: TcContext) -> i32 {
    rest::translate::<Replies<STACK>, NONE>(&ctx)
}

/// Where [`npl_in_direct`] leaves what is unusual.
#[classifier]
pub fn npl_in_d_rest(ctx: TcContext) -> i32 {
    rest::translate::<Requests<DIRECT>, ETHERNET>(&ctx)
}

/// Where [`npl_pods`] leaves what is unusual.
#[classifier]
pub fn npl_pods_rest(ctx: TcContext) -> i32 {
    rest::translate::<Replies<DIRECT>, ETHERNET>(&ctx)
}

/// What local clients connect to.
#[cgroup_sock_addr(connect4)]
pub fn npl_connect4(ctx: SockAddrContext) -> i32 {
    local::request::<Inet>(&ctx, Call::Connect);
    ALLOW
}

/// As [`npl_connect4`], by a socket of IPv6.
#[cgroup_sock_addr(connect6)]
pub fn npl_connect6(ctx: SockAddrContext) -> i32 {
    local::request6(&ctx, Call::Connect);
    ALLOW
}

/// What local clients send datagrams to.
#[cgroup_sock_addr(sendmsg4)]
pub fn npl_sendmsg4(ctx: SockAddrContext) -> i32 {
    local::request::<Inet>(&ctx, Call::Send);
    ALLOW
}

/// As [`npl_sendmsg4`], by a socket of IPv6.
#[cgroup_sock_addr(sendmsg6)]
pub fn npl_sendmsg6(ctx: SockAddrContext) -> i32 {
    local::request6(&ctx, Call::Send);
    ALLOW
}

/// Whom local clients are shown as a datagram's sender.
#[cgroup_sock_addr(recvmsg4)]
pub fn npl_recvmsg4(ctx: SockAddrContext) -> i32 {
    local::answer::<Inet>(&ctx);
    ALLOW
}

/// As [`npl_recvmsg4`], by a socket of IPv6.
#[cgroup_sock_addr(recvmsg6)]
pub fn npl_recvmsg6(ctx: SockAddrContext) -> i32 {
    local::answer6(&ctx);
    ALLOW
}

/// Whom local clients are connected to, when they ask.
#[cgroup_sock_addr(getpeername4)]
pub fn npl_getpeer4(ctx: SockAddrContext) -> i32 {
    local::answer::<Inet>(&ctx);
    ALLOW
}

/// As [`npl_getpeer4`], by a socket of IPv6.
#[cgroup_sock_addr(getpeername6)]
pub fn npl_getpeer6(ctx: SockAddrContext) -> i32 {
    local::answer6(&ctx);
    ALLOW
}

/// What nearly all packets take; the others are left to the program that looks closer.
#[inline(always)]
fn plain<H: Hook, const L2: usize>(ctx: &TcContext, rest: u32) -> i32 {
    let verdict = hook::translate::<H, L2>(ctx);
    if verdict.is_unusual() {
        // SAFETY: nothing here waits to be dropped. Without that program the packet goes on as it is.
        unsafe { REST.tail_call(ctx, rest) };
    }
    verdict.into_action()
}

/// The kernel lets programs use the helpers that this licence permits.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// Never reached: no code of this crate can panic, and the verifier would refuse a loop that it could reach.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

// SPDX-License-Identifier: GPL-2.0-only
//! Defines the entry points of NPL's kernel programs. ARCHITECTURE.md describes the modules that implement the
//! programs.
//!
//! At TC ingress, before netfilter, a program rewrites the destination of requests from node address and node port to
//! Pod address and Pod port. At TC egress, after netfilter, a program rewrites the source of replies from Pod address
//! and Pod port back to node address and node port. Between the two hooks, the host and the CNI see one flow between
//! the client and the Pod's address. Packets that match no mapping continue unchanged to the next program of the hook.

#![no_std]
#![no_main]
#![expect(unreachable_pub, reason = "`pub` marks a module's interface; a binary exports nothing")]
#![expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets, indexes and packed words are checked where they are computed"
)]
#![expect(clippy::cast_possible_wrap, reason = "the kernel takes sizes of structures as signed numbers")]
#![expect(clippy::needless_pass_by_value, reason = "the program macro passes the context by value")]
#![expect(clippy::needless_borrows_for_generic_args, reason = "the next version of aya accepts only references")]
#![expect(unsafe_code, reason = "packets and map values are raw memory that the kernel's verifier checks")]

mod act;
mod base;
mod net;
mod path;
mod state;

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr, classifier, xdp},
    programs::{SockAddrContext, SockContext, TcContext, XdpContext},
};
use npl_common::names::SlowPath;

use crate::{
    base::{
        context::{self, ETHERNET},
        maps::SLOW_PATH,
        mode::{OBSERVE, OFFLOAD, REDIRECT, STACK},
        verdict::Verdict,
    },
    net::{V4, V6, family::HeaderLayout as _},
    path::{
        hook::{self, Hook},
        offload,
        reply::Replies,
        request::Requests,
        slow_path,
        socket::{self, Call, Inet, ReplyCall},
        xdp,
    },
};

/// The value of the parameter `L2` for a device without link-layer headers: the IP header starts at offset 0.
const NONE: usize = 0;
/// The return value of every cgroup program: the kernel continues the system call with the address and port that the
/// program has left in the call's context.
const ALLOW: i32 = 1;

/// Translates requests at TC ingress of a device with Ethernet headers.
#[classifier]
pub fn npl_ingress(ctx: TcContext) -> i32 {
    fast_path::<Requests<STACK>, ETHERNET>(&ctx, SlowPath::Ingress)
}

/// Translates replies at TC egress of a device with Ethernet headers.
#[classifier]
pub fn npl_egress(ctx: TcContext) -> i32 {
    fast_path::<Replies<STACK>, ETHERNET>(&ctx, SlowPath::Egress)
}

/// Translates requests at TC ingress of a device without link-layer header.
#[classifier]
pub fn npl_ingress_l3(ctx: TcContext) -> i32 {
    fast_path::<Requests<STACK>, NONE>(&ctx, SlowPath::IngressL3)
}

/// Translates replies at TC egress of a device without link-layer header.
#[classifier]
pub fn npl_egress_l3(ctx: TcContext) -> i32 {
    fast_path::<Replies<STACK>, NONE>(&ctx, SlowPath::EgressL3)
}

/// Like [`npl_ingress`], but for `--forwarding redirect`: the program redirects the translated request to the Pod's
/// device.
#[classifier]
pub fn npl_rd_ingress(ctx: TcContext) -> i32 {
    fast_path::<Requests<REDIRECT>, ETHERNET>(&ctx, SlowPath::IngressRedirect)
}

/// Translates replies at TC ingress of a Pod-facing device, for `--forwarding redirect`.
#[classifier]
pub fn npl_rd_pods(ctx: TcContext) -> i32 {
    fast_path::<Replies<REDIRECT>, ETHERNET>(&ctx, SlowPath::PodsRedirect)
}

/// Like [`npl_ingress`], but for `--forwarding offload`: the program redirects requests of offloaded flows to the Pod's
/// device.
#[classifier]
pub fn npl_off_ingress(ctx: TcContext) -> i32 {
    fast_path::<Requests<OFFLOAD>, ETHERNET>(&ctx, SlowPath::Ingress)
}

/// Like [`npl_egress`], but for `--forwarding offload`. The program also records in `npl_stkseen_v4` or
/// `npl_stkseen_v6` that the host's stack has forwarded a reply of the flow.
#[classifier]
pub fn npl_off_egress(ctx: TcContext) -> i32 {
    fast_path::<Replies<OBSERVE>, ETHERNET>(&ctx, SlowPath::Egress)
}

/// Translates replies of offloaded flows at TC ingress of a Pod-facing device, for `--forwarding offload`. This program
/// has no slow path. The program passes slow-path packets, such as fragments and ICMP errors, to the host's stack, and
/// the program at TC egress of the uplink translates these packets.
#[classifier]
pub fn npl_off_pods(ctx: TcContext) -> i32 {
    hook::translate::<Replies<OFFLOAD>, ETHERNET>(&ctx).into_action()
}

/// Records in `npl_stkseen_v4` or `npl_stkseen_v6` that the host's stack has forwarded a request. Runs at TC egress of
/// a Pod-facing device, for `--forwarding offload`.
#[classifier]
pub fn npl_off_to_pods(ctx: TcContext) -> i32 {
    offload::observe_request::<ETHERNET>(&ctx);
    Verdict::UNRELATED.into_action()
}

/// Translates fast-path requests at the XDP hook of a device with Ethernet headers.
#[xdp]
pub fn npl_xdp(ctx: XdpContext) -> u32 {
    xdp::translate::<false>(ctx)
}

/// Like [`npl_xdp`], but also for frames that consist of several buffers (since Linux 5.18).
#[xdp(frags)]
pub fn npl_xdp_frags(ctx: XdpContext) -> u32 {
    xdp::translate::<true>(ctx)
}

/// Slow path of [`npl_ingress`] and [`npl_off_ingress`] for IPv4 packets.
#[classifier]
pub fn npl_in_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Requests<STACK>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_ingress`] and [`npl_off_ingress`] for IPv6 packets.
#[classifier]
pub fn npl_in_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Requests<STACK>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_egress`] and [`npl_off_egress`] for IPv4 packets.
#[classifier]
pub fn npl_out_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Replies<STACK>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_egress`] and [`npl_off_egress`] for IPv6 packets.
#[classifier]
pub fn npl_out_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Replies<STACK>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_ingress_l3`] for IPv4 packets.
#[classifier]
pub fn npl_inl3_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Requests<STACK>, NONE>(&ctx)
}

/// Slow path of [`npl_ingress_l3`] for IPv6 packets.
#[classifier]
pub fn npl_inl3_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Requests<STACK>, NONE>(&ctx)
}

/// Slow path of [`npl_egress_l3`] for IPv4 packets.
#[classifier]
pub fn npl_outl3_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Replies<STACK>, NONE>(&ctx)
}

/// Slow path of [`npl_egress_l3`] for IPv6 packets.
#[classifier]
pub fn npl_outl3_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Replies<STACK>, NONE>(&ctx)
}

/// Slow path of [`npl_rd_ingress`] for IPv4 packets.
#[classifier]
pub fn npl_rdin_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Requests<REDIRECT>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_rd_ingress`] for IPv6 packets.
#[classifier]
pub fn npl_rdin_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Requests<REDIRECT>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_rd_pods`] for IPv4 packets.
#[classifier]
pub fn npl_rdpod_slow4(ctx: TcContext) -> i32 {
    slow_path::translate::<V4, Replies<REDIRECT>, ETHERNET>(&ctx)
}

/// Slow path of [`npl_rd_pods`] for IPv6 packets.
#[classifier]
pub fn npl_rdpod_slow6(ctx: TcContext) -> i32 {
    slow_path::translate::<V6, Replies<REDIRECT>, ETHERNET>(&ctx)
}

/// When a socket is closed, removes the socket reverse NAT entries of the socket's peers, and the list of these peers:
/// see [`npl_common::socket_rnat`].
#[cgroup_sock(sock_release)]
pub fn npl_release(ctx: SockContext) -> i32 {
    socket::release(&ctx);
    ALLOW
}

/// Translates the destination of `connect` calls of local clients.
#[cgroup_sock_addr(connect4)]
pub fn npl_connect4(ctx: SockAddrContext) -> i32 {
    socket::request::<Inet>(&ctx, Call::Connect);
    ALLOW
}

/// Like [`npl_connect4`], but for calls of IPv6 sockets.
#[cgroup_sock_addr(connect6)]
pub fn npl_connect6(ctx: SockAddrContext) -> i32 {
    socket::request6(&ctx, Call::Connect);
    ALLOW
}

/// Translates the destination of `sendmsg` calls of local clients.
#[cgroup_sock_addr(sendmsg4)]
pub fn npl_sendmsg4(ctx: SockAddrContext) -> i32 {
    socket::request::<Inet>(&ctx, Call::Send);
    ALLOW
}

/// Like [`npl_sendmsg4`], but for calls of IPv6 sockets.
#[cgroup_sock_addr(sendmsg6)]
pub fn npl_sendmsg6(ctx: SockAddrContext) -> i32 {
    socket::request6(&ctx, Call::Send);
    ALLOW
}

/// Socket reverse NAT: replaces the Pod's address by the NAT address in the sender's address that `recvmsg` returns.
#[cgroup_sock_addr(recvmsg4)]
pub fn npl_recvmsg4(ctx: SockAddrContext) -> i32 {
    socket::reply::<Inet>(&ctx, ReplyCall::Receive);
    ALLOW
}

/// Like [`npl_recvmsg4`], but for calls of IPv6 sockets.
#[cgroup_sock_addr(recvmsg6)]
pub fn npl_recvmsg6(ctx: SockAddrContext) -> i32 {
    socket::reply6(&ctx, ReplyCall::Receive);
    ALLOW
}

/// Socket reverse NAT: replaces the Pod's address by the NAT address in the peer's address that `getpeername` returns.
#[cgroup_sock_addr(getpeername4)]
pub fn npl_getpeer4(ctx: SockAddrContext) -> i32 {
    socket::reply::<Inet>(&ctx, ReplyCall::PeerName);
    ALLOW
}

/// Like [`npl_getpeer4`], but for calls of IPv6 sockets.
#[cgroup_sock_addr(getpeername6)]
pub fn npl_getpeer6(ctx: SockAddrContext) -> i32 {
    socket::reply6(&ctx, ReplyCall::PeerName);
    ALLOW
}

/// Translates a fast-path packet. If the packet needs the slow path, tail-calls the program of `slow_path` for the
/// packet's address family.
#[inline(always)]
fn fast_path<H: Hook, const L2: usize>(ctx: &TcContext, slow_path: SlowPath) -> i32 {
    let verdict = hook::translate::<H, L2>(ctx);
    if verdict.is_slow_path() {
        let is_ipv6 = context::ether_type(ctx) == Some(V6::ETHER_TYPE);
        // SAFETY: a successful tail call does not return, and no value in this function needs to be dropped. If the
        // tail call fails, the packet passes unchanged.
        unsafe { SLOW_PATH.tail_call(ctx, slow_path.index(is_ipv6)) };
    }
    verdict.into_action()
}

/// The license that the kernel requires for GPL-only helpers.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// The panic handler that Rust requires. The panic handler is never reached: no code of this crate panics, and the
/// verifier rejects a reachable endless loop.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

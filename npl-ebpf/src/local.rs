// SPDX-License-Identifier: GPL-2.0-only
//! Clients on the Node itself and in its Pods. No packet of theirs passes an uplink, so the address is exchanged where
//! they name it: the socket is connected to the Pod from the start, and is told afterwards what it asked for.

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use npl_common::{config::Config, mapping::Frontend};

use crate::{
    family::{Backend, End, Family, Peer, Tables, V4, V6},
    maps::CONFIG,
    stats, stray,
};

/// Where the kernel keeps the address that a call names.
pub trait Place {
    type Family: Family;

    fn addr(call: *const bpf_sock_addr) -> <Self::Family as Tables>::Addr;
    fn set_addr(call: *mut bpf_sock_addr, addr: <Self::Family as Tables>::Addr);
}

/// An IPv4 address.
pub struct Inet;

/// An IPv6 address.
pub struct Inet6;

/// An IPv4 address in IPv6 form, as sockets that serve both families name it.
pub struct Mapped;

/// What a client asks the kernel for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Connect,
    Send,
}

/// `TCP_ESTABLISHED`, which is also the state of a datagram socket that is connected.
const CONNECTED: u32 = 1;

/// The words of an IPv4-mapped address that are the same in each.
const MAPPED_PREFIX: [u32; 3] = [0, 0, 0xffff_u32.to_be()];

/// Leads a client that names a mapping to its Pod: `connect` and `sendmsg`.
#[inline(always)]
pub fn request<P: Place>(ctx: &SockAddrContext, kind: Call) {
    let call = ctx.sock_addr;
    let asked = End::<P::Family> { addr: P::Family::named(P::addr(call)), port: port(call) };
    let Some(protocol) = protocol(call) else { return };
    let Some(backend) = backend(ctx, &asked, protocol) else { return forget_direct(ctx, kind, asked) };
    let pod = End { addr: backend.addr, port: backend.port };
    let peer = Peer::<P::Family> { socket: socket(ctx), pod };
    let known = P::Family::asked(&peer);
    if known.is_none() {
        stats::count_local_flow(backend.stats_index);
    }
    if known.is_none_or(|known| known.addr != asked.addr || known.port != asked.port) {
        P::Family::remember_asked(&peer, &asked);
    }
    P::set_addr(call, backend.addr);
    set_port(call, backend.port);
}

/// As [`request`], for a call that names an IPv6 address or an IPv4 one in IPv6 form.
#[inline(always)]
pub fn request6(ctx: &SockAddrContext, kind: Call) {
    if is_mapped(ctx.sock_addr) {
        request::<Mapped>(ctx, kind);
    } else {
        request::<Inet6>(ctx, kind);
    }
}

/// Shows a client what it asked for in the Pod's place: `recvmsg` and `getpeername`.
#[inline(always)]
pub fn answer<P: Place>(ctx: &SockAddrContext) {
    let call = ctx.sock_addr;
    let pod = End { addr: P::addr(call), port: port(call) };
    let Some(asked) = P::Family::asked(&Peer { socket: socket(ctx), pod }) else { return };
    P::set_addr(call, asked.addr);
    set_port(call, asked.port);
}

/// As [`answer`], for a call that shows an IPv6 address or an IPv4 one in IPv6 form.
#[inline(always)]
pub fn answer6(ctx: &SockAddrContext) {
    if is_mapped(ctx.sock_addr) {
        answer::<Mapped>(ctx);
    } else {
        answer::<Inet6>(ctx);
    }
}

/// The Pod behind what a client asks for, if that is a mapping of this Node which it may use.
#[inline(always)]
fn backend<F: Family>(ctx: &SockAddrContext, asked: &End<F>, protocol: u8) -> Option<Backend<F>> {
    let config = CONFIG.get(0)?;
    if !config.contains(asked.port) {
        return None;
    }
    let is_of_node = if F::is_loopback(asked.addr) {
        is_in_node_namespace(ctx, config)
    } else {
        F::local_index(config, asked.addr).is_some()
    };
    if !is_of_node {
        return None;
    }
    let frontend = Frontend { node_port: asked.port, protocol, pad: 0 };
    let Some(backend) = F::backend(frontend) else {
        stray::note::<F>(frontend);
        return None;
    };
    // To the Node's own address the kernel connects from that same address.
    if backend.refuses(frontend, asked.addr) { None } else { Some(backend) }
}

/// A socket that talks to a Pod through a mapping, and then to the Pod itself, is shown the Pod's own address.
///
/// Not one that is connected: each time that an IPv6 socket sends to an IPv4 Pod which it is connected to, the kernel
/// names the Pod to the IPv4 program.
#[inline(always)]
fn forget_direct<F: Family>(ctx: &SockAddrContext, kind: Call, named: End<F>) {
    let peer = Peer { socket: socket(ctx), pod: named };
    if F::asked(&peer).is_some() && (kind == Call::Connect || !is_connected(ctx)) {
        F::forget_asked(&peer);
    }
}

#[inline(always)]
fn is_connected(ctx: &SockAddrContext) -> bool {
    // SAFETY: a field of the kernel's context that all these programs may read.
    let socket = unsafe { (&raw const (*ctx.sock_addr).__bindgen_anon_1.sk).read_volatile() };
    // SAFETY: the socket that the call is about, which is there for as long as the call is.
    let state = unsafe { (&raw const (*socket).state).read_volatile() };
    state == CONNECTED
}

/// Each network namespace has loopback addresses of its own: a Pod's are not the Node's.
#[inline(always)]
fn is_in_node_namespace(ctx: &SockAddrContext, config: &Config) -> bool {
    // SAFETY: the kernel's own context.
    config.netns_cookie != 0 && config.netns_cookie == unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// The kernel's name of the socket.
#[inline(always)]
fn socket(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the kernel's own context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// The socket's protocol; nothing if it has a number that no packet can carry.
#[inline(always)]
fn protocol(call: *const bpf_sock_addr) -> Option<u8> {
    // SAFETY: a field of the kernel's context that all these programs may read.
    let protocol = unsafe { (&raw const (*call).protocol).read_volatile() };
    u8::try_from(protocol).ok()
}

/// Host order.
#[inline(always)]
fn port(call: *const bpf_sock_addr) -> u16 {
    // SAFETY: a field of the kernel's context that all these programs may read.
    let port = unsafe { (&raw const (*call).user_port).read_volatile() };
    u16::from_be(port as u16)
}

/// Host order.
#[inline(always)]
fn set_port(call: *mut bpf_sock_addr, port: u16) {
    // SAFETY: a field of the kernel's context that all these programs may write, as a whole.
    unsafe { (&raw mut (*call).user_port).write_volatile(u32::from(port.to_be())) };
}

#[inline(always)]
fn is_mapped(call: *const bpf_sock_addr) -> bool {
    let addr = Inet6::addr(call);
    addr[0] == MAPPED_PREFIX[0] && addr[1] == MAPPED_PREFIX[1] && addr[2] == MAPPED_PREFIX[2]
}

// The verifier lets programs reach a field of the context by a load or store of that field alone, which is what
// volatile accesses are compiled to.
impl Place for Inet {
    type Family = V4;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> u32 {
        // SAFETY: a field of the kernel's context that IPv4 programs may read.
        unsafe { (&raw const (*call).user_ip4).read_volatile() }
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: u32) {
        // SAFETY: a field of the kernel's context that IPv4 programs may write.
        unsafe { (&raw mut (*call).user_ip4).write_volatile(addr) };
    }
}

impl Place for Inet6 {
    type Family = V6;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> [u32; 4] {
        [word(call, 0), word(call, 1), word(call, 2), word(call, 3)]
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: [u32; 4]) {
        set_word(call, 0, addr[0]);
        set_word(call, 1, addr[1]);
        set_word(call, 2, addr[2]);
        set_word(call, 3, addr[3]);
    }
}

impl Place for Mapped {
    type Family = V4;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> u32 {
        word(call, 3)
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: u32) {
        set_word(call, 3, addr);
    }
}

#[inline(always)]
fn word(call: *const bpf_sock_addr, index: usize) -> u32 {
    // SAFETY: a field of the kernel's context that IPv6 programs may read; the index is a constant below its length.
    unsafe { (&raw const (*call).user_ip6).cast::<u32>().add(index).read_volatile() }
}

#[inline(always)]
fn set_word(call: *mut bpf_sock_addr, index: usize, word: u32) {
    // SAFETY: a field of the kernel's context that IPv6 programs may write; the index is a constant below its length.
    unsafe { (&raw mut (*call).user_ip6).cast::<u32>().add(index).write_volatile(word) };
}

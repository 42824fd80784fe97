// SPDX-License-Identifier: GPL-2.0-only
//! Translates addresses for local clients, which run on the Node itself or in its Pods. Packets of local clients to
//! local Pods pass through no uplink, so cgroup programs translate the address in the system call. The socket connects
//! to the Pod directly, and socket reverse NAT shows the client the address that the client connected to.

use aya_ebpf::{
    EbpfContext,
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::{SockAddrContext, SockContext},
};
use npl_common::{
    config::{Config, FLAG_HOST_CLIENTS},
    mapping::Frontend,
};

use crate::{
    base::{maps::CONFIG, stats},
    net::{
        V4, V6,
        family::{Addressing, SocketAddr},
    },
    state::{
        maps::{Family, SocketReverseNat as _},
        socket_peers,
        tuple::{Backend, SocketFlow},
        unmapped,
    },
};

/// Access to the address in the context (`bpf_sock_addr`) that the kernel passes to a cgroup program, for each kind of
/// address.
pub trait AddressField {
    type Family: Family;

    fn addr(call: *const bpf_sock_addr) -> <Self::Family as Addressing>::Addr;
    fn set_addr(call: *mut bpf_sock_addr, addr: <Self::Family as Addressing>::Addr);
}

/// An IPv4 address.
pub struct Inet;

/// An IPv6 address.
pub struct Inet6;

/// An IPv4-mapped IPv6 address, of a dual-stack socket.
pub struct Ipv4Mapped;

/// The client's system call that contains a destination address: `connect` or `sendmsg`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Connect,
    Send,
}

/// The client's system call that returns a peer's address: `recvmsg` or `getpeername`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReplyCall {
    Receive,
    PeerName,
}

/// `TCP_ESTABLISHED`, which is also the state of a connected datagram socket.
const CONNECTED: u32 = 1;

/// The kernel's number of the IPv6 address family.
const AF_INET6: u32 = 10;

/// The first three words of an IPv4-mapped IPv6 address.
const MAPPED_PREFIX: [u32; 3] = [0, 0, 0xffff_u32.to_be()];

/// Translates the destination of a `connect` or `sendmsg` call, if the destination is a node address with a mapped node
/// port.
#[inline(always)]
pub fn request<A: AddressField>(ctx: &SockAddrContext, kind: Call) {
    let call = ctx.sock_addr;
    let nat = SocketAddr::<A::Family> { addr: A::Family::unspecified_as_loopback(A::addr(call)), port: port(call) };
    let Some(protocol) = protocol(call) else { return };
    let direct = SocketFlow { socket: socket(ctx), pod: nat };
    let known = A::Family::socket_rnat(&direct);
    let nat = &direct.pod;
    // If [`reply`] has recorded that this socket received a datagram from the destination of this call, the socket now
    // answers that datagram. The destination is then a client that the Node masquerades, such as a client of a
    // Service's `nodePort`. The answer must reach this client, not the Pod whose mapping has the same node port.
    if kind == Call::Send && known.as_ref().is_some_and(|sender| sender.is_same(nat)) {
        return;
    }
    let Some(backend) = backend(ctx, nat, protocol) else {
        if known.is_some() {
            remove_if_direct(ctx, kind, &direct);
        }
        return;
    };
    let pod = SocketAddr { addr: backend.addr, port: backend.port };
    let flow = SocketFlow::<A::Family> { socket: direct.socket, pod };
    let known = A::Family::socket_rnat(&flow);
    if known.is_none() {
        stats::count_local_flow(backend.stats_index);
    }
    if known.is_none_or(|known| !known.is_same(nat)) {
        A::Family::insert_socket_rnat(&flow, nat);
        socket_peers::set_last_pod(&flow);
    }
    A::set_addr(call, backend.addr);
    set_port(call, backend.port);
}

/// Like [`request`], but for a call with an IPv6 address or an IPv4-mapped IPv6 address.
#[inline(always)]
pub fn request6(ctx: &SockAddrContext, kind: Call) {
    if is_mapped(ctx.sock_addr) {
        request::<Ipv4Mapped>(ctx, kind);
    } else {
        request::<Inet6>(ctx, kind);
    }
}

/// For a closed socket, removes the socket's socket reverse NAT entries.
#[inline(always)]
pub fn release(ctx: &SockContext) {
    let socket = socket(ctx);
    socket_peers::release::<V4>(socket);
    // SAFETY: the verifier allows a program at this hook to read this field of the kernel's context.
    if unsafe { (&raw const (*ctx.sock).family).read_volatile() } == AF_INET6 {
        socket_peers::release::<V6>(socket);
    }
}

/// Replaces the Pod's address by the address that the client connected to. At `recvmsg`, the sender may also be a
/// masqueraded client, with a node address and a port of the node port range. The program records this sender, so that
/// the socket's answers to the sender are not translated. If the socket has sent through a mapping, the program does
/// not record the sender.
#[inline(always)]
pub fn reply<A: AddressField>(ctx: &SockAddrContext, kind: ReplyCall) {
    let call = ctx.sock_addr;
    let flow = SocketFlow { socket: socket(ctx), pod: SocketAddr { addr: A::addr(call), port: port(call) } };
    if let Some(nat) = A::Family::socket_rnat(&flow) {
        A::set_addr(call, nat.addr);
        set_port(call, nat.port);
    } else if kind == ReplyCall::Receive
        && is_nat_address(&flow.pod)
        && socket_peers::last_pod::<A::Family>(flow.socket).is_none()
    {
        A::Family::insert_socket_rnat(&flow, &flow.pod);
        socket_peers::add(&flow);
    }
}

/// Like [`reply`], but for a call with an IPv6 address or an IPv4-mapped IPv6 address.
#[inline(always)]
pub fn reply6(ctx: &SockAddrContext, kind: ReplyCall) {
    if is_mapped(ctx.sock_addr) {
        reply::<Ipv4Mapped>(ctx, kind);
    } else {
        reply::<Inet6>(ctx, kind);
    }
}

/// Returns whether `address` is a node address with a port of the node port range.
#[inline(always)]
fn is_nat_address<F: Family>(address: &SocketAddr<F>) -> bool {
    CONFIG
        .get(0)
        .is_some_and(|config| config.contains(address.port) && F::node_address_index(config, address.addr).is_some())
}

/// Returns the Pod behind the mapping of this node address and port, unless the mapping has an allow-list that does not
/// contain this address.
#[inline(always)]
fn backend<F: Family>(ctx: &SockAddrContext, nat: &SocketAddr<F>, protocol: u8) -> Option<Backend<F>> {
    let config = CONFIG.get(0)?;
    let serves_host_only = config.flags & FLAG_HOST_CLIENTS != 0;
    if !config.contains(nat.port) || (serves_host_only && !is_in_node_namespace(ctx, config)) {
        return None;
    }
    let is_of_node = if F::is_loopback(nat.addr) {
        is_in_node_namespace(ctx, config)
    } else {
        F::node_address_index(config, nat.addr).is_some()
    };
    if !is_of_node {
        return None;
    }
    let frontend = Frontend { node_port: nat.port, protocol, pad: 0 };
    let Some(backend) = F::mapping(frontend).map(F::backend) else {
        unmapped::record::<F>(frontend);
        return None;
    };
    // The program compares the allow-list with the address that the client connects to, not with the client's own
    // address (docs/operate.md). For a connection from the Node to a node address, the two addresses are equal, because
    // the kernel chooses the node address as the source.
    if backend.refuses(frontend, nat.addr) { None } else { Some(backend) }
}

/// Removes the entry of a Pod that a socket has reached through a mapping, because the socket now connects or sends to
/// the Pod directly.
///
/// At `sendmsg`, the program keeps the entry of a connected socket: the Pod's address in the call does not show whether
/// the client connected through a mapping. For an IPv6 UDP socket that is connected to an IPv4 Pod, the kernel runs the
/// IPv4 program with the Pod's address at each send, also if the client connected through a mapping.
#[inline(always)]
fn remove_if_direct<F: Family>(ctx: &SockAddrContext, kind: Call, flow: &SocketFlow<F>) {
    if kind == Call::Connect || !is_connected(ctx) {
        F::remove_socket_rnat(flow);
    }
}

#[inline(always)]
fn is_connected(ctx: &SockAddrContext) -> bool {
    // SAFETY: the verifier allows each cgroup program of this module to read this field of the kernel's context.
    let socket = unsafe { (&raw const (*ctx.sock_addr).__bindgen_anon_1.sk).read_volatile() };
    // SAFETY: the pointer points to the socket of the system call, which exists as long as the call runs.
    let state = unsafe { (&raw const (*socket).state).read_volatile() };
    state == CONNECTED
}

/// Returns whether the caller's socket is in the host's network namespace. Each network namespace has its own loopback
/// addresses.
#[inline(always)]
fn is_in_node_namespace(ctx: &SockAddrContext, config: &Config) -> bool {
    // SAFETY: the kernel passed this context to the program.
    config.netns_cookie != 0 && config.netns_cookie == unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Returns the cookie by which the kernel identifies the socket.
#[inline(always)]
fn socket(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the kernel passed this context to the program.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// Returns the socket's protocol; `None` for a number above 255, such as MPTCP's.
#[inline(always)]
fn protocol(call: *const bpf_sock_addr) -> Option<u8> {
    // SAFETY: the verifier allows each cgroup program of this module to read this field of the kernel's context.
    let protocol = unsafe { (&raw const (*call).protocol).read_volatile() };
    u8::try_from(protocol).ok()
}

/// Returns the port in the address of a system call, in host byte order.
#[inline(always)]
fn port(call: *const bpf_sock_addr) -> u16 {
    // SAFETY: the verifier allows each cgroup program of this module to read this field of the kernel's context.
    let port = unsafe { (&raw const (*call).user_port).read_volatile() };
    u16::from_be(port as u16)
}

/// Sets the port in the address of a system call. `port` is in host byte order.
#[inline(always)]
fn set_port(call: *mut bpf_sock_addr, port: u16) {
    // SAFETY: the verifier allows each cgroup program that sets a port to write this field of the kernel's context as
    // one word.
    unsafe { (&raw mut (*call).user_port).write_volatile(u32::from(port.to_be())) };
}

#[inline(always)]
fn is_mapped(call: *const bpf_sock_addr) -> bool {
    let addr = Inet6::addr(call);
    addr[0] == MAPPED_PREFIX[0] && addr[1] == MAPPED_PREFIX[1] && addr[2] == MAPPED_PREFIX[2]
}

// The verifier permits access to a context field only by one load or store of the whole field. A volatile access
// compiles to a single load or store of the field.
impl AddressField for Inet {
    type Family = V4;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> u32 {
        // SAFETY: the verifier allows IPv4 programs to read this field of the kernel's context.
        unsafe { (&raw const (*call).user_ip4).read_volatile() }
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: u32) {
        // SAFETY: the verifier allows IPv4 programs to write this field of the kernel's context.
        unsafe { (&raw mut (*call).user_ip4).write_volatile(addr) };
    }
}

impl AddressField for Inet6 {
    type Family = V6;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> [u32; 4] {
        [ipv6_word(call, 0), ipv6_word(call, 1), ipv6_word(call, 2), ipv6_word(call, 3)]
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: [u32; 4]) {
        set_ipv6_word(call, 0, addr[0]);
        set_ipv6_word(call, 1, addr[1]);
        set_ipv6_word(call, 2, addr[2]);
        set_ipv6_word(call, 3, addr[3]);
    }
}

impl AddressField for Ipv4Mapped {
    type Family = V4;

    #[inline(always)]
    fn addr(call: *const bpf_sock_addr) -> u32 {
        ipv6_word(call, 3)
    }

    #[inline(always)]
    fn set_addr(call: *mut bpf_sock_addr, addr: u32) {
        set_ipv6_word(call, 3, addr);
    }
}

#[inline(always)]
fn ipv6_word(call: *const bpf_sock_addr, index: usize) -> u32 {
    // SAFETY: the verifier allows IPv6 programs to read this field of the kernel's context; the index is a constant
    // below the field's length.
    unsafe { (&raw const (*call).user_ip6).cast::<u32>().add(index).read_volatile() }
}

#[inline(always)]
fn set_ipv6_word(call: *mut bpf_sock_addr, index: usize, word: u32) {
    // SAFETY: the verifier allows IPv6 programs to write this field of the kernel's context; the index is a constant
    // below the field's length.
    unsafe { (&raw mut (*call).user_ip6).cast::<u32>().add(index).write_volatile(word) };
}

// SPDX-License-Identifier: GPL-2.0-only
//! Contains the kernel programs of `npl-bench`: an XDP program generates packets, and a TC program counts the packets
//! that arrive at the Pod's device.
//!
//! Sending a packet from a socket in user space takes more CPU time than the whole measured path. `BPF_PROG_TEST_RUN`
//! with live frames runs an XDP program in a loop on frames in memory, and executes the program's verdict. With
//! `XDP_PASS`, the stack gets the frames in bulk, as if the driver of the Node's uplink had received them. With
//! `XDP_TX`, the client's device sends the frames, so that the uplink's driver receives the frames and runs the
//! uplink's XDP program. With `XDP_REDIRECT`, the Pod's device gets the frames.

#![no_std]
#![no_main]
#![expect(unreachable_pub, reason = "the compiler exports only public programs and maps")]
#![expect(clippy::inline_always, reason = "a function call costs more than the function's body")]
#![expect(clippy::cast_possible_truncation, reason = "numbers of clients and ports may wrap")]
#![expect(clippy::cast_ptr_alignment, reason = "a frame starts at a page, and the template is aligned to four bytes")]
#![expect(clippy::needless_pass_by_value, reason = "the program macro passes the context by value")]
#![expect(unsafe_code, reason = "packets and map values are raw memory that the kernel's verifier checks")]

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
    btf_maps::{Array, PerCpuArray},
    helpers::generated::{bpf_redirect, bpf_redirect_peer},
    macros::{btf_map, classifier, xdp},
    programs::{TcContext, XdpContext},
};
use npl_common::{
    csum,
    mapping::protocol,
    traffic::{FRAME_BYTES, Target, Traffic, fate, random_client},
};

/// The parameters of the generated traffic, and the number of the next packet. The bench writes this map; the generator
/// increments the packet number.
#[btf_map(name = "npl_traffic")]
pub static TRAFFIC: Array<Traffic, 1> = Array::new();

/// The destination at which arriving packets are counted. The bench writes this map.
#[btf_map(name = "npl_target")]
pub static TARGET: Array<Target, 1> = Array::new();

/// The number of packets that arrived at the expected destination. The program `npl_count` increments this number.
#[btf_map(name = "npl_arrived")]
pub static ARRIVED: PerCpuArray<u64, 1> = PerCpuArray::new();

/// `ETH_P_IP` in network byte order, as a load from the frame returns it.
const ETH_P_IP: u16 = 0x0800_u16.to_be();

/// The headers of a frame from the Ethernet header up to the ports, without IP options. All fields are in network byte
/// order.
#[repr(C)]
struct Headers {
    link_addresses: [u16; 6],
    ether_type: u16,
    version_and_tos: u16,
    total_length: u16,
    id: u16,
    fragment: u16,
    ttl: u8,
    protocol: u8,
    check: u16,
    source: [u8; 4],
    destination: [u8; 4],
    source_port: u16,
    destination_port: u16,
}

/// A generated frame.
#[repr(C)]
struct Frame {
    headers: Headers,
    transport: [u16; 11],
}

const _: () = assert!(size_of::<Frame>() == FRAME_BYTES, "the frame must have the size of the template");

/// Positions of the TCP checksum and of the UDP checksum, in 16-bit words after the ports.
const TCP_CHECK: usize = 6;
const UDP_CHECK: usize = 1;

/// Generates the next packet. [`Traffic::fate`] selects whether the uplink receives the packet, the client's device
/// sends the packet, or the packet is redirected to the Pod's device.
#[xdp]
pub fn npl_generate(ctx: XdpContext) -> u32 {
    generate(&ctx).unwrap_or(xdp_action::XDP_ABORTED)
}

/// Counts and drops packets that arrived at the intended Pod port; passes packets with another destination or source to
/// the Pod.
#[classifier]
pub fn npl_count(ctx: TcContext) -> i32 {
    if arrived(&ctx).is_some() { TC_ACT_SHOT } else { TC_ACT_UNSPEC }
}

/// Passes every packet unchanged, at the TC hook.
#[classifier]
pub fn npl_idle(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// Redirects every packet to the Pod's device, without any other work.
#[classifier]
pub fn npl_shortcut(_ctx: TcContext) -> i32 {
    let Some(target) = TARGET.get(0) else { return TC_ACT_SHOT };
    // SAFETY: the helper takes only integers, and records the target device of the packet.
    unsafe { bpf_redirect_peer(target.ifindex, 0) as i32 }
}

/// Passes every frame unchanged, at the XDP hook.
#[xdp]
pub fn npl_idle_xdp(_ctx: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

#[inline(always)]
fn generate(ctx: &XdpContext) -> Option<u32> {
    let traffic = TRAFFIC.get_ptr_mut(0)?;
    // SAFETY: only one processor generates packets, so no other processor writes the element.
    let traffic = unsafe { &mut *traffic };
    let frame = pointer::<Frame>(ctx.data(), ctx.data_end())?;
    write(frame, &traffic.frame);
    let number = traffic.next;
    traffic.next = number.wrapping_add(1);
    let action = match traffic.fate {
        fate::RECEIVED => xdp_action::XDP_PASS,
        fate::SENT => xdp_action::XDP_TX,
        // SAFETY: the helper takes only integers, and records the target device of the frame.
        _ => unsafe { bpf_redirect(TARGET.get(0)?.ifindex, 0) }.cast_unsigned() as u32,
    };
    let client = if traffic.random != 0 {
        random_client(number)
    } else if traffic.ports != 0 {
        let ports = u64::from(traffic.ports);
        (number.checked_div(ports)? as u32, number.checked_rem(ports)? as u16)
    } else {
        return Some(action);
    };
    let mapping = number.checked_rem(u64::from(traffic.mappings))? as u16;
    // SAFETY: `pointer` has checked that the packet contains all bytes of this structure.
    vary(unsafe { &mut *frame }, client, mapping);
    Some(action)
}

/// Writes the complete frame in each run, because the kernel reuses frames in which the Node has rewritten the
/// addresses.
///
/// The writes are volatile words, because the compiler would turn a single assignment into a call that copies byte by
/// byte.
#[inline(always)]
fn write(frame: *mut Frame, template: &[u8; FRAME_BYTES]) {
    let (to, from) = (frame.cast::<u32>(), template.as_ptr().cast::<u32>());
    for word in 0..FRAME_BYTES / size_of::<u32>() {
        // SAFETY: the frame and the template both have `FRAME_BYTES` bytes, and both are aligned to four bytes.
        unsafe { to.add(word).write_volatile(*from.add(word)) };
    }
}

/// Turns the template frame into a packet of another flow: adds offsets to the client's address and port, and to the
/// node port.
#[inline(always)]
fn vary(frame: &mut Frame, (client, client_port): (u32, u16), mapping: u16) {
    let Frame { headers, transport } = frame;
    let source = u32::from_be_bytes(headers.source).wrapping_add(client).to_be_bytes();
    let source_port = plus(headers.source_port, client_port);
    let destination_port = plus(headers.destination_port, mapping);
    let id = plus(headers.id, mapping);

    let (old_source, new_source) = (u32::from_ne_bytes(headers.source), u32::from_ne_bytes(source));
    headers.check = csum::replace16(csum::replace32(headers.check, old_source, new_source), headers.id, id);
    let at = if headers.protocol == protocol::TCP { TCP_CHECK } else { UDP_CHECK };
    let check = csum::replace32(transport[at], old_source, new_source);
    let check = csum::replace16(check, headers.source_port, source_port);
    transport[at] = csum::replace16(check, headers.destination_port, destination_port);
    headers.source = source;
    headers.source_port = source_port;
    headers.destination_port = destination_port;
    headers.id = id;
}

/// Adds `summand` to a 16-bit word in network byte order.
#[inline(always)]
const fn plus(word: u16, summand: u16) -> u16 {
    u16::from_be(word).wrapping_add(summand).to_be()
}

/// Counts a packet that has reached the expected address and port and, if a source is set, comes from this source.
#[inline(always)]
fn arrived(ctx: &TcContext) -> Option<()> {
    // The arrived frame may be shorter than the generated frame, because the Node has removed the padding.
    let headers = pointer::<Headers>(ctx.data(), ctx.data_end())?;
    // SAFETY: `pointer` has checked that the packet contains all bytes of this structure.
    let headers = unsafe { &*headers };
    let target = TARGET.get(0)?;
    let port = u16::from_be(headers.destination_port);
    let is_there = headers.ether_type == ETH_P_IP
        && headers.destination == target.addr
        && port >= target.port_min
        && port <= target.port_max
        && headers.id == headers.destination_port;
    let is_from_source = target.source_port == 0
        || headers.source == target.source_addr && u16::from_be(headers.source_port) == target.source_port;
    if !is_there || !is_from_source {
        return None;
    }
    let counter = ARRIVED.get_ptr_mut(0)?;
    // SAFETY: the pointer points to this processor's element of the map, and no other program on this processor runs
    // during the update.
    unsafe { *counter = (*counter).wrapping_add(1) };
    Some(())
}

/// Returns a pointer to a `T` at the beginning of a packet, if the packet is long enough.
#[inline(always)]
fn pointer<T>(start: usize, end: usize) -> Option<*mut T> {
    if start + size_of::<T>() > end { None } else { Some(start as *mut T) }
}

/// The license that the kernel requires for GPL-only helpers.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// The panic handler that Rust requires. The panic handler is never reached: no code of this crate can panic, and the
/// verifier would reject a reachable endless loop.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

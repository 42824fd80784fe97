// SPDX-License-Identifier: GPL-2.0-only
//! Reads program contexts, and checks the bounds of each access to packet bytes. In the datapath programs, only this
//! module creates pointers into packets. Other modules read packets through [`Access`] or [`load`]; of these modules,
//! only `act::rewrite` changes packet headers, and only `state::fragment_buffer` replaces whole frames.

use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::generated::{bpf_skb_load_bytes, bpf_skb_pull_data, bpf_xdp_get_buff_len},
    programs::{TcContext, XdpContext},
};

/// Length in bytes of an Ethernet header.
pub const ETHERNET: usize = 14;

/// `PACKET_OTHERHOST`: the packet's link-layer address is that of another machine.
const PACKET_OTHERHOST: u32 = 3;
/// The bits of a VLAN tag's control information that contain the VLAN identifier.
const VLAN_ID: u32 = 0x0fff;

/// Returns the packet's `EtherType` in network byte order. `None` if the packet's link-layer destination is another
/// machine, or if the packet has a VLAN tag: the program on the VLAN device translates tagged packets. A tag with VLAN
/// 0 contains only a priority, so a packet with such a tag counts as untagged.
#[inline(always)]
pub fn ether_type(ctx: &TcContext) -> Option<u32> {
    let skb = skb(ctx);
    // SAFETY: the context is valid for the program's run, and the verifier allows a program to read these three fields.
    let (protocol, is_tagged, kind) = unsafe { ((*skb).protocol, (*skb).vlan_present, (*skb).pkt_type) };
    // SAFETY: the verifier allows a program to read `vlan_tci`. The field is read only if the packet has a tag, because
    // its value is undefined in packets without a tag.
    let in_vlan = is_tagged != 0 && unsafe { (*skb).vlan_tci } & VLAN_ID != 0;
    if in_vlan || kind == PACKET_OTHERHOST { None } else { Some(protocol) }
}

/// Returns the pointer to the packet's context that the kernel's helpers take as their first argument.
#[inline(always)]
pub fn skb(ctx: &TcContext) -> *mut __sk_buff {
    ctx.as_ptr().cast()
}

/// Returns the number of payload bytes of each segment into which the kernel will segment a GSO packet; 0 for any other
/// packet.
#[inline(always)]
pub fn gso_size(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run, and the verifier allows a program to read this field of the
    // context.
    unsafe { (*skb(ctx)).gso_size }
}

/// Returns a pointer to `T` at `OFFSET`, if the packet's linear part contains all bytes of `T`.
#[inline(always)]
fn pointer<T, const OFFSET: usize>(data: usize, data_end: usize) -> Option<*const T> {
    let start = data + OFFSET;
    if start + size_of::<T>() > data_end { None } else { Some(start as *const T) }
}

/// Whether programs read packets through pointers: the constant
/// [`GLOBAL_DIRECT_READS`](npl_common::names::GLOBAL_DIRECT_READS), which the loader sets before it loads the programs.
/// The verifier knows the constant's value, and removes the branches that cannot run with this value.
#[unsafe(no_mangle)]
static NPL_DIRECT_READS: u8 = 1;

#[inline(always)]
fn has_direct_access() -> bool {
    // SAFETY: the pointer points to a static of this kernel object. The read is volatile, so that the compiler does not
    // assume the initial value.
    unsafe { core::ptr::read_volatile(&raw const NPL_DIRECT_READS) != 0 }
}

/// Packet access that TC and XDP programs have in common.
pub trait Access {
    /// Copies a header at a constant offset.
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T>;
    /// Overwrites a header at a constant offset. Returns `false` if the program has no direct packet access, or if the
    /// header is not in the packet's linear part.
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool;
    /// Copies a header at a variable offset.
    fn load<T: Copy>(&self, offset: usize) -> Option<T>;
    /// Returns the length of the packet in bytes, including its link-layer header.
    fn length(&self) -> u32;
    /// Returns the packet's skb; a packet in XDP has none.
    fn skb(&self) -> Option<*mut __sk_buff>;
    /// Returns the interface index of the device at whose hook the program runs.
    fn ifindex(&self) -> u32;
}

impl Access for TcContext {
    /// If the header is in a page fragment of the skb, the program first lets the kernel's helper copy the header into
    /// the skb's linear part.
    #[inline(always)]
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T> {
        if !has_direct_access() {
            return load(self, OFFSET);
        }
        let header = if let Some(header) = pointer::<T, OFFSET>(self.data(), self.data_end()) {
            header
        } else {
            // SAFETY: the context is valid, and the program recomputes all pointers into the packet after the call of
            // the helper.
            let pulled = unsafe { bpf_skb_pull_data(skb(self), (OFFSET + size_of::<T>()) as u32) };
            if pulled != 0 {
                return None;
            }
            pointer::<T, OFFSET>(self.data(), self.data_end())?
        };
        // SAFETY: `pointer` has checked that the packet contains the whole header. IP headers are aligned to at least
        // two bytes, and on every supported processor, programs may load unaligned words.
        Some(unsafe { *header })
    }

    #[inline(always)]
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool {
        if !has_direct_access() {
            return false;
        }
        let Some(header) = pointer::<T, OFFSET>(self.data(), self.data_end()) else { return false };
        // SAFETY: `pointer` has checked that the packet contains the whole header. On every supported processor,
        // programs may access unaligned words. Before a program with direct writes runs, the kernel unshares the skb's
        // header.
        unsafe { header.cast_mut().write(value) };
        true
    }

    #[inline(always)]
    fn load<T: Copy>(&self, offset: usize) -> Option<T> {
        load(self, offset)
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        self.len()
    }

    #[inline(always)]
    fn skb(&self) -> Option<*mut __sk_buff> {
        Some(skb(self))
    }

    #[inline(always)]
    fn ifindex(&self) -> u32 {
        // SAFETY: the context is valid for the program's run, and the verifier allows a program to read this field of
        // the context.
        unsafe { (*skb(self)).ifindex }
    }
}

/// An XDP frame. `MULTI_BUFFER` is true in the program that also accepts frames that consist of several buffers (since
/// Linux 5.18). Pointers reach only the first buffer of a frame with several buffers.
pub struct Frame<const MULTI_BUFFER: bool>(pub XdpContext);

impl<const MULTI_BUFFER: bool> Frame<MULTI_BUFFER> {
    /// Returns the frame's `EtherType`; for a frame with a VLAN tag, the `EtherType` of the tag.
    #[inline(always)]
    pub fn ether_type(&self) -> Option<u32> {
        self.read::<u16, { ETHERNET - size_of::<u16>() }>().map(u32::from)
    }

    /// Copies up to `WORDS` whole words, starting at offset `OFFSET`, and returns the number of copied words.
    #[cfg(not(feature = "trace"))]
    #[inline(always)]
    pub fn copy_words<const OFFSET: usize, const WORDS: usize>(&self, to: *mut u64) -> u32 {
        let mut copied = 0;
        while copied < WORDS {
            let start = self.0.data() + OFFSET + copied * size_of::<u64>();
            if start + size_of::<u64>() > self.0.data_end() {
                break;
            }
            // SAFETY: the program has checked that the frame contains these bytes, and `to` has room for `WORDS` words.
            // On every supported processor, programs may load unaligned words.
            unsafe { to.add(copied).write((start as *const u64).read_unaligned()) };
            copied += 1;
        }
        copied as u32
    }
}

impl<const MULTI_BUFFER: bool> Access for Frame<MULTI_BUFFER> {
    #[inline(always)]
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T> {
        let header = pointer::<T, OFFSET>(self.0.data(), self.0.data_end())?;
        // SAFETY: `pointer` has checked that the frame contains the whole header. On every supported processor,
        // programs may load unaligned words.
        Some(unsafe { *header })
    }

    #[inline(always)]
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool {
        let Some(header) = pointer::<T, OFFSET>(self.0.data(), self.0.data_end()) else { return false };
        // SAFETY: `pointer` has checked that the frame contains the whole header. On every supported processor,
        // programs may access unaligned words. While the program runs, only the program writes the frame.
        unsafe { header.cast_mut().write(value) };
        true
    }

    /// Always returns `None`: the XDP program does not parse headers at variable offsets, so the TC program translates
    /// packets whose headers are at variable offsets.
    #[inline(always)]
    fn load<T: Copy>(&self, _offset: usize) -> Option<T> {
        None
    }

    #[inline(always)]
    fn skb(&self) -> Option<*mut __sk_buff> {
        None
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        if MULTI_BUFFER {
            // SAFETY: the context is valid, and the helper only reads it.
            (unsafe { bpf_xdp_get_buff_len(self.0.ctx) }) as u32
        } else {
            (self.0.data_end() - self.0.data()) as u32
        }
    }

    #[inline(always)]
    fn ifindex(&self) -> u32 {
        self.0.ingress_ifindex() as u32
    }
}

/// Copies a header at a variable offset with the helper `bpf_skb_load_bytes`.
#[inline(always)]
pub fn load<T: Copy>(ctx: &TcContext, offset: usize) -> Option<T> {
    let mut header = core::mem::MaybeUninit::<T>::uninit();
    let to = header.as_mut_ptr().cast();
    // SAFETY: the context is valid, and the helper writes exactly the size of `T` or fails.
    let status = unsafe { bpf_skb_load_bytes(skb(ctx).cast(), offset as u32, to, size_of::<T>() as u32) };
    if status != 0 {
        return None;
    }
    // SAFETY: the helper has initialized the value; header structs are integers, for which all bytes are valid.
    Some(unsafe { header.assume_init() })
}

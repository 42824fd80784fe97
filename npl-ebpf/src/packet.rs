// SPDX-License-Identifier: GPL-2.0-only
//! Bounds-checked access to packets: the only place that makes pointers into them. All read, only `rewrite` writes.

use core::num::NonZeroUsize;

use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::generated::{bpf_skb_load_bytes, bpf_skb_pull_data, bpf_xdp_get_buff_len},
    programs::{TcContext, XdpContext},
};
use npl_common::{mapping::protocol, reason::Reason};

use crate::{
    family::{Family, Location, Walk},
    first,
    sctp::{self, Chunk},
    verdict::Verdict,
};

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;

pub use npl_common::flow::tcp_flag;

/// The ports, which TCP, UDP and SCTP have at the same place. Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ports {
    pub source: u16,
    pub destination: u16,
}

impl Ports {
    /// Of a packet that has none.
    pub const NONE: Self = Self { source: 0, destination: 0 };

    /// Both as one word, as loaded.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        self.source as u32 | (self.destination as u32) << u16::BITS
    }
}

/// A TCP header without options (RFC 9293). Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TcpHeader {
    pub ports: Ports,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub offset: u8,
    pub flags: u8,
    pub window: u16,
    pub check: u16,
    pub urgent: u16,
}

impl TcpHeader {
    /// Bytes of the header with its options.
    #[inline(always)]
    pub const fn length(&self) -> usize {
        (self.offset >> 4) as usize * 4
    }
}

/// A UDP header (RFC 768). Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UdpHeader {
    pub ports: Ports,
    pub length: u16,
    pub check: u16,
}

/// An ICMP or `ICMPv6` header (RFC 792, RFC 4443). Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IcmpHeader {
    pub kind: u8,
    pub code: u8,
    pub check: u16,
    pub rest: u32,
}

/// A packet with ports: where its headers are, and what they said when it was read.
pub struct Packet<F: Family> {
    /// Offset of the IP header.
    pub l3: usize,
    pub location: Location<F>,
    pub ports: Ports,
    /// Where it ends that has this transport header, as the IP header says; of a first fragment of SCTP, as another one or that
    /// says, or nothing. Nothing of one that ends within TCP's header, nor of a plain packet, of which nobody asks.
    pub end: Option<NonZeroUsize>,
}

/// What a packet is that is not a plain one with ports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Other {
    /// It has options or extension headers, is a fragment, an ICMP message, or SCTP: a program of its own looks closer.
    Unusual,
    /// Nothing that could be ours.
    Foreign,
}

impl From<Other> for Verdict {
    #[inline(always)]
    fn from(other: Other) -> Self {
        match other {
            Other::Unusual => Self::UNUSUAL,
            Other::Foreign => Self::NOT_OURS,
        }
    }
}

impl<F: Family> Packet<F> {
    /// Reads a packet whose TCP or UDP header follows its IP header at once, as nearly every packet's does.
    #[inline(always)]
    pub fn read<const L2: usize>(ctx: &impl Access) -> Result<Self, Other> {
        let location = F::locate::<L2>(ctx)?;
        let ports = read_at::<F, Ports, L2>(ctx, &location).ok_or(Other::Foreign)?;
        Ok(Self { l3: L2, location, ports, end: None })
    }

    /// Reads the ports of a packet that was walked through.
    #[inline(always)]
    pub fn of(ctx: &TcContext, walk: Walk<F>) -> Option<Self> {
        if !has_ports(walk.location.protocol) {
            return None;
        }
        let ports = load::<Ports>(ctx, walk.location.l4)?;
        let end = match (walk.fragment.is_first, walk.location.protocol) {
            (false, _) => NonZeroUsize::new(walk.end),
            (true, protocol::SCTP) => first::end_of_whole(ctx, &walk),
            // One that ends within its transport header has the checksum elsewhere, whatever the frame has behind it.
            (true, protocol::TCP) if walk.location.l4 + size_of::<TcpHeader>() > walk.end => None,
            (true, _) => NonZeroUsize::new(walk.end),
        };
        Some(Self { l3: walk.l3, location: walk.location, ports, end })
    }

    /// The same with another rest of the IP header.
    #[inline(always)]
    pub fn with(&self, rest: F::Rest) -> Self {
        Self { location: Location { rest, ..self.location }, ..*self }
    }

    /// TCP flags, or those that would say the same, and 0 of a datagram. Or why the packet cannot be translated: it ends
    /// before its transport header does, or is a part of what only the whole of could be.
    #[inline(always)]
    pub fn tcp_flags<const L2: usize>(&self, ctx: &impl Access) -> Result<u8, Reason> {
        let flags = match self.location.protocol {
            protocol::TCP if !self.location.is_plain && self.end.is_none() => None,
            protocol::TCP => self.read_transport::<TcpHeader, L2>(ctx).map(|header| header.flags),
            protocol::SCTP if !self.location.is_plain => {
                let end = self.end.ok_or(Reason::SctpFragment)?;
                sctp::first_chunk(ctx, self.location.l4, end.get()).map(Chunk::tcp_flags)
            }
            _ => self.read_transport::<UdpHeader, L2>(ctx).map(|_| 0),
        };
        flags.ok_or(Reason::Truncated)
    }

    /// Copies the beginning of the transport header.
    #[inline(always)]
    pub fn read_transport<T: Copy, const L2: usize>(&self, ctx: &impl Access) -> Option<T> {
        read_at::<F, T, L2>(ctx, &self.location)
    }
}

/// Copies the beginning of the transport header.
///
/// A plain packet has it at a constant offset. Behind options it is not, and a program without `CAP_PERFMON` may
/// move a packet pointer by constants only; the kernel's helper takes any offset, for the price of a call.
#[inline(always)]
fn read_at<F: Family, T: Copy, const L2: usize>(ctx: &impl Access, location: &Location<F>) -> Option<T> {
    if location.is_plain { F::read_behind::<T, L2>(ctx) } else { ctx.load(location.l4) }
}

/// Whether a protocol is one of those that nearly every packet of mappings has.
#[inline(always)]
pub const fn is_common(protocol: u8) -> bool {
    matches!(protocol, protocol::TCP | protocol::UDP)
}

/// Whether a protocol is one that mappings can have.
#[inline(always)]
pub const fn has_ports(protocol: u8) -> bool {
    is_common(protocol) || protocol == protocol::SCTP
}

/// The `EtherType` of a packet that is for this machine and in no VLAN: one in a VLAN belongs to the device that owns the
/// address there. A tag of VLAN 0 says how urgent a packet is, and no more.
#[inline(always)]
pub fn ether_type(ctx: &TcContext) -> Option<u32> {
    let skb = skb(ctx);
    // SAFETY: the context is valid for the program's run; the verifier allows these fields.
    let (protocol, is_tagged, kind) = unsafe { ((*skb).protocol, (*skb).vlan_present, (*skb).pkt_type) };
    // SAFETY: as above. What the field holds without a tag is no tag.
    let in_vlan = is_tagged != 0 && unsafe { (*skb).vlan_tci } & VLAN_ID != 0;
    if in_vlan || kind == PACKET_OTHERHOST { None } else { Some(protocol) }
}

/// `PACKET_OTHERHOST`: seen on the wire, addressed to another machine.
const PACKET_OTHERHOST: u32 = 3;
/// The VLAN's number in a tag; the rest is its priority.
const VLAN_ID: u32 = 0x0fff;

/// The raw context, for helpers.
#[inline(always)]
pub fn skb(ctx: &TcContext) -> *mut __sk_buff {
    ctx.as_ptr().cast()
}

/// A pointer to `T` at `OFFSET`, if that much of the packet is linear.
#[inline(always)]
fn pointer<T, const OFFSET: usize>(data: usize, data_end: usize) -> Option<*const T> {
    let start = data + OFFSET;
    if start + size_of::<T>() > data_end { None } else { Some(start as *const T) }
}

/// `names::GLOBAL_DIRECT_READS`: set by the loader; the verifier takes it for a constant and drops what it excludes.
#[unsafe(no_mangle)]
static NPL_DIRECT_READS: u8 = 1;

/// A packet, as the program at hand may touch it.
pub trait Access {
    /// Copies a header out of the packet.
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T>;
    /// Writes over what was read of the packet, if it is where it was.
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool;
    /// Copies a header out of the packet, from an offset that is not a constant.
    fn load<T: Copy>(&self, offset: usize) -> Option<T>;
    /// Bytes of the packet, from its link-layer header on.
    fn length(&self) -> u32;
    /// The device that the packet came in by.
    fn ifindex(&self) -> u32;
}

impl Access for TcContext {
    /// Makes the packet linear first if only its beginning is (as drivers do with large ones).
    #[inline(always)]
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T> {
        // SAFETY: a static of this object; volatile, so that the compiler does not know what the loader decides.
        if unsafe { core::ptr::read_volatile(&raw const NPL_DIRECT_READS) } == 0 {
            return load(self, OFFSET);
        }
        let header = if let Some(header) = pointer::<T, OFFSET>(self.data(), self.data_end()) {
            header
        } else {
            // SAFETY: the context is valid; all pointers into the packet are made anew afterwards.
            let pulled = unsafe { bpf_skb_pull_data(skb(self), (OFFSET + size_of::<T>()) as u32) };
            if pulled != 0 {
                return None;
            }
            pointer::<T, OFFSET>(self.data(), self.data_end())?
        };
        // SAFETY: in bounds as checked. IP headers are aligned to two bytes at least, and the kernel lets programs load
        // unaligned words on every processor that it builds this object for.
        Some(unsafe { *header })
    }

    #[inline(always)]
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool {
        // SAFETY: see `read`.
        if unsafe { core::ptr::read_volatile(&raw const NPL_DIRECT_READS) } == 0 {
            return false;
        }
        let Some(header) = pointer::<T, OFFSET>(self.data(), self.data_end()) else { return false };
        // SAFETY: in bounds and aligned as in `read`, and nobody else's: the kernel gives programs that write a copy of
        // their own.
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
    fn ifindex(&self) -> u32 {
        // SAFETY: the context is valid for the program's run; the verifier allows this field.
        unsafe { (*skb(self)).ifindex }
    }
}

/// A frame ahead of the stack. With `IN_PARTS`, only a part of it may lie where programs read, which 5.18 brought.
pub struct Frame<const IN_PARTS: bool>(pub XdpContext);

impl<const IN_PARTS: bool> Frame<IN_PARTS> {
    /// The `EtherType` as it stands in the frame, which may be that of a VLAN's tag.
    #[inline(always)]
    pub fn ether_type(&self) -> Option<u32> {
        self.read::<u16, { ETHERNET - size_of::<u16>() }>().map(u32::from)
    }
}

impl<const IN_PARTS: bool> Access for Frame<IN_PARTS> {
    #[inline(always)]
    fn read<T: Copy, const OFFSET: usize>(&self) -> Option<T> {
        let header = pointer::<T, OFFSET>(self.0.data(), self.0.data_end())?;
        // SAFETY: in bounds as checked; of its alignment, the same is true as of a packet's in the stack.
        Some(unsafe { *header })
    }

    #[inline(always)]
    fn write<T: Copy, const OFFSET: usize>(&self, value: T) -> bool {
        let Some(header) = pointer::<T, OFFSET>(self.0.data(), self.0.data_end()) else { return false };
        // SAFETY: in bounds and aligned as in `read`, and nobody else's yet.
        unsafe { header.cast_mut().write(value) };
        true
    }

    /// Nothing: what is not at a constant offset is left to the stack.
    #[inline(always)]
    fn load<T: Copy>(&self, _offset: usize) -> Option<T> {
        None
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        if IN_PARTS {
            // SAFETY: the context is valid.
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

/// Copies a header out of the packet by the kernel's helper, from an offset that is not a constant.
#[inline(always)]
pub fn load<T: Copy>(ctx: &TcContext, offset: usize) -> Option<T> {
    let mut header = core::mem::MaybeUninit::<T>::uninit();
    let to = header.as_mut_ptr().cast();
    // SAFETY: the context is valid, and the helper writes exactly the size of `T` or fails.
    let status = unsafe { bpf_skb_load_bytes(skb(ctx).cast(), offset as u32, to, size_of::<T>() as u32) };
    if status != 0 {
        return None;
    }
    // SAFETY: written by the helper; header structs are integers, for which any bytes are a value.
    Some(unsafe { header.assume_init() })
}

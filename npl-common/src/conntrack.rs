// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The connection tracking state machine: one pure function, [`step`]. The kernel programs call `step` for each packet
//! that may change a conntrack entry. The agent's sweeper also calls `step` for each conntrack entry, with the time for
//! which the entry was idle ([`Event::Silence`]).
//!
//! Only a client's packet opens the first conntrack entry of a flow; a Pod's packet has an effect only if the flow has
//! an entry. If an entry is lost, the client's next packet recreates the entry. Entries in the phase
//! [`Phase::ESTABLISHED`] are elements of the flow table ([`crate::flow`]). Entries in all other phases are words of
//! the half-open cache ([`crate::half_open`]).
//!
//! | phase | event | next phase | action |
//! |---|---|---|---|
//! | absent, refused | client: SYN, an acknowledging segment, or a datagram | requested | open |
//! | absent, refused | client: any other segment | unchanged | keep |
//! | requested, replied | client: proven RST | refused | store |
//! | requested | client: any other packet | requested | keep |
//! | requested, replied | Pod: any segment that is not proven | unchanged | ignore |
//! | requested, replied | Pod: proven RST | refused | store |
//! | requested | Pod: any other packet | replied | store |
//! | requested | silence of [`REQUESTED_NS`] | absent | remove |
//! | replied | client: any other proven segment except a SYN, or a datagram | established | establish |
//! | replied | client: SYN, or segment that is not proven | replied | keep |
//! | replied | Pod: datagram | established | establish |
//! | replied | Pod: any other proven segment | replied | keep |
//! | replied | silence of [`REPLIED_NS`] | absent | remove |
//! | refused | Pod: any packet | refused | keep |
//! | established | client: any packet | established; flags added, FIN and RST only if proven | refresh |
//! | established | Pod: RST, if the Pod has sent only its SYN-ACK | absent | remove |
//! | established | Pod: any other packet | established; flags added | refresh |
//! | established | silence of [`established_timeout_ns`] | absent | remove |
//! | established | client: packet for another generation of the Pod, or datagram to another NAT address | established; no flags | replace |
//! | established | client: segment to another NAT address | established | keep |
//! | established | eviction of the flow table's entry | requested | open |
//! | established | removal of the flow table's entry by the agent | replied | store |
//! | any but absent | direct connection with the same flow tuple | absent | remove |
//! | absent | Pod: any packet | absent | ignore |
//!
//! A client's SYN never changes an established entry, because each handshake has its own entry.
//!
//! # Proof
//!
//! Any host can send a packet with a client's source address, but an off-path sender has to guess 32-bit sequence and
//! acknowledgement numbers. A packet of the client or of the Pod is therefore *proven* only if its numbers match the
//! connection:
//!
//! * A Pod's segment belongs to a handshake if it acknowledges that handshake's SYN exactly: the key of the handshake's
//!   entry is a hash of the flow and this acknowledgement number ([`handshake_key`]).
//! * A client's segment completes a handshake if it acknowledges the Pod's SYN-ACK exactly: the SYN-ACK has created an
//!   entry whose key is a hash of the flow and this acknowledgement number ([`reply_key`]).
//! * A client's segment in the middle of a TCP connection opens a mid-stream entry. A Pod's segment belongs to this
//!   entry if the numbers of both segments are near each other: [`Numbers::admit`].
//! * A client's packet in the middle of an SCTP association also opens a mid-stream entry. If a Pod's packet answers
//!   the client's packet ([`Numbers::are_answered_by`]), both verification tags of the association are known. The
//!   mid-stream entry then becomes the two entries of a handshake ([`handshake_key`], [`reply_key`]).
//! * A FIN or RST of the client shortens the idle timeout of an established connection only if its sequence number is
//!   near the Pod's last acknowledgement number: [`is_near_acknowledgement`]. In SCTP, an ABORT, SHUTDOWN or SHUTDOWN
//!   ACK does so only if the packet's verification tag is near the recorded tag.

use crate::{
    flow::tcp_flag::{ACK, FIN, RST, SYN},
    hash::absorb,
    mapping::protocol,
};

const SECOND: u64 = 1_000_000_000;

/// Idle timeout, in nanoseconds, of a flow whose Pod has not answered: the default of kernel conntrack's
/// `nf_conntrack_udp_timeout`.
pub const REQUESTED_NS: u64 = 30 * SECOND;
/// Idle timeout, in nanoseconds, of a half-open flow whose Pod has answered. The timeout is long, because a Pod may
/// send further datagrams minutes after the request.
pub const REPLIED_NS: u64 = 300 * SECOND;
/// Idle timeout, in nanoseconds, of a connection after a RST of one side, or after a FIN of each side: the default of
/// `nf_conntrack_tcp_timeout_last_ack`.
pub const CLOSED_NS: u64 = 30 * SECOND;
/// Idle timeout, in nanoseconds, of a connection in which only one side has sent a FIN: the default of
/// `nf_conntrack_tcp_timeout_fin_wait`.
pub const HALF_CLOSED_NS: u64 = 120 * SECOND;
/// Idle timeout, in nanoseconds, of a TCP connection whose Pod has sent only its SYN-ACK: the default of
/// `nf_conntrack_tcp_timeout_syn_recv`.
pub const UNANSWERED_NS: u64 = 60 * SECOND;
/// Idle timeout, in nanoseconds, of an established TCP connection: the default of
/// `nf_conntrack_tcp_timeout_established`.
pub const TCP_NS: u64 = 5 * 24 * 3600 * SECOND;
/// Idle timeout, in nanoseconds, of an established UDP flow: the recommendation of RFC 4787, section 4.3.
pub const UDP_NS: u64 = 300 * SECOND;
/// Idle timeout, in nanoseconds, of an established UDP flow while more than half of UDP's flow table is in use. If the
/// table is that full, most of its flows consist of one query and one response, as in DNS. For such a flow, 30 s are
/// long enough.
pub const UDP_CROWDED_NS: u64 = 30 * SECOND;
/// Idle timeout, in nanoseconds, of an SCTP association: many times the heartbeat interval of 30 s (RFC 9260).
pub const SCTP_NS: u64 = 3600 * SECOND;

/// The phase of a conntrack entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Phase(u8);

impl Phase {
    /// The client has sent a packet, and the Pod has not replied.
    pub const REQUESTED: Self = Self(0);
    /// The Pod has replied. The client's next datagram or proven segment, or the Pod's next datagram, establishes the
    /// flow.
    pub const REPLIED: Self = Self(1);
    /// The handshake or the first exchange of datagrams is complete; the entry is in the flow table.
    pub const ESTABLISHED: Self = Self(2);
    /// A RST has ended the handshake. Late packets of the refused handshake are still translated, but do not establish
    /// a flow.
    pub const REFUSED: Self = Self(3);
    /// No entry exists.
    pub const ABSENT: Self = Self(4);

    /// The phase that two bits of an entry in the half-open cache encode.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    #[expect(clippy::cast_possible_truncation, reason = "the phase has two bits")]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits as u8 & 0b11)
    }

    /// The two bits that encode a phase in the half-open cache. [`Self::ABSENT`] has no encoding in the half-open
    /// cache.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn bits(self) -> u64 {
        self.0 as u64 & 0b11
    }

    /// Whether two phases are equal; a constant function cannot use `==`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Whether the flow is half-open: requested or replied.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_opening(self) -> bool {
        self.0 <= Self::REPLIED.0
    }

    /// The phase's name in the output of commands and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::REQUESTED => "requested",
            Self::REPLIED => "replied",
            Self::ESTABLISHED => "established",
            Self::REFUSED => "refused",
            _ => "absent",
        }
    }
}

/// The state of one conntrack entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// The phase of the entry.
    pub phase: Phase,
    /// All TCP flags that the client has sent since the flow was established.
    pub client_flags: u8,
    /// All TCP flags that the Pod has sent since the flow was established. The ACK flag of a retransmitted SYN-ACK is
    /// left out, because [`State::has_pod_spoken`] tests for ACK.
    pub pod_flags: u8,
}

impl State {
    /// No entry exists.
    pub const ABSENT: Self = Self::half_open(Phase::ABSENT);

    /// The state of an entry of the half-open cache, which contains only the phase.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn half_open(phase: Phase) -> Self {
        Self { phase, client_flags: 0, pod_flags: 0 }
    }

    /// The state of an entry of the flow table.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn established(client_flags: u8, pod_flags: u8) -> Self {
        Self { phase: Phase::ESTABLISHED, client_flags, pod_flags }
    }

    /// Whether the Pod has sent a segment other than its SYN-ACK. After another segment, the Pod no longer retransmits
    /// the SYN-ACK.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn has_pod_spoken(self) -> bool {
        self.pod_flags & ACK != 0
    }

    /// Whether the Pod may still retransmit its SYN-ACK: the Pod has sent no other segment, and the client has sent no
    /// RST. The Pod retransmits the SYN-ACK if the client's acknowledgement is lost between Node and Pod.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn may_repeat_syn_ack(self) -> bool {
        !self.has_pod_spoken() && self.client_flags & RST == 0
    }

    /// Whether one side has ended the connection or has begun to end it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_ending(self) -> bool {
        (self.client_flags | self.pod_flags) & (FIN | RST) != 0
    }
}

/// The fields of a TCP segment that connection tracking needs: flags ([`crate::flow::tcp_flag`]), sequence number and
/// acknowledgement number. An SCTP packet is represented by the equivalent values.
///
/// For SCTP, the acknowledgement number is the packet's verification tag. The sequence number of an INIT or INIT ACK is
/// the initiate tag minus one; the sequence number of any other packet is the verification tag. An INIT ACK therefore
/// acknowledges an INIT as a SYN-ACK acknowledges a SYN: by the sequence number plus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Sequence and acknowledgement number in one word, because a kernel program has little stack space.
    pub numbers: Numbers,
    /// TCP flags.
    pub flags: u8,
}

impl Segment {
    /// The value for a datagram, which has neither flags nor numbers.
    pub const DATAGRAM: Self = Self::new(0, 0, 0);

    /// Creates a segment. `sequence` and `acknowledgement` are in host byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn new(sequence: u32, acknowledgement: u32, flags: u8) -> Self {
        Self { numbers: Numbers((sequence as u64) << u32::BITS | acknowledgement as u64), flags }
    }

    /// The sequence number, in host byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn sequence(self) -> u32 {
        self.numbers.sequence()
    }

    /// The acknowledgement number, in host byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn acknowledgement(self) -> u32 {
        self.numbers.acknowledgement()
    }

    /// Whether the segment opens a handshake: a SYN without ACK, or an SCTP INIT.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_syn(self) -> bool {
        is_syn(self.flags)
    }

    /// Whether the segment has the ACK flag, and neither the SYN nor the RST flag.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_mid_stream(self) -> bool {
        is_mid_stream(self.flags)
    }
}

/// The key of a handshake's first entry, which the client's SYN opens: a hash of the flow's hash and of the
/// acknowledgement number that the Pod's SYN-ACK must have.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn handshake_key(flow: u64, acknowledgement: u32) -> u64 {
    absorb(flow, 1 << 32 | acknowledgement as u64)
}

/// The key of a handshake's second entry, which the Pod's SYN-ACK creates: a hash of the flow's hash and of the
/// acknowledgement number with which the client must complete the handshake.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn reply_key(flow: u64, acknowledgement: u32) -> u64 {
    absorb(flow, 2 << 32 | acknowledgement as u64)
}

/// The key of a mid-stream entry, which a client's segment in the middle of a connection opens. The key is a hash of
/// the flow's hash alone, because the numbers of a reply are only near the numbers of the client's segment.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn mid_stream_key(flow: u64) -> u64 {
    absorb(flow, 3 << 32)
}

/// The sequence number and the acknowledgement number of a segment, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Numbers(pub u64);

impl Numbers {
    /// The largest accepted distance, in bytes, between the sequence number of one side and the acknowledgement number
    /// of the other side. The distance is at least as large as the receive window of common hosts.
    pub const WINDOW: u32 = 1 << 25;

    /// The sequence number, in host byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn sequence(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }

    /// The acknowledgement number, in host byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    #[expect(clippy::cast_possible_truncation, reason = "only the low half is used")]
    pub const fn acknowledgement(self) -> u32 {
        self.0 as u32
    }

    /// Whether the Pod's segment `reply` belongs to the same connection as the client's segment with these numbers.
    /// Each side's sequence number must be within [`Self::WINDOW`] of the other side's acknowledgement number. A RST
    /// without ACK has no acknowledgement number, so its sequence number must equal the client's acknowledgement
    /// number. Any other segment of another connection is admitted with a probability of 1 in 4096.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn admit(self, reply: Segment) -> bool {
        let (sequence, acknowledgement) = (self.sequence(), self.acknowledgement());
        if reply.flags & (RST | ACK) == RST {
            return reply.sequence() == acknowledgement;
        }
        is_near(reply.acknowledgement(), sequence, Self::WINDOW)
            && is_near(reply.sequence(), acknowledgement, Self::WINDOW)
    }

    /// Whether `later`, the numbers of a later segment of the client, belong to the same connection as these numbers.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn is_near(self, later: Self) -> bool {
        self.admit(Segment { numbers: Self(later.0.rotate_left(u32::BITS)), flags: ACK })
    }

    /// Returns the checksum that the reply cache stores beside these numbers. A program uses stored numbers only if
    /// this checksum shows that the numbers belong to the half-open `entry` with the key `key`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn checksum(self, key: u64, entry: u64) -> u64 {
        absorb(absorb(key, entry), self.0)
    }
}

/// A client's FIN or RST counts only if its sequence number is at most this number of bytes before or after the Pod's
/// last recorded acknowledgement number. For SCTP, the limit applies to the difference between the packet's
/// verification tag and the recorded tag. A random guess of an off-path sender is within the limit with a probability
/// of 1 in 4096.
pub const CLOSING_WINDOW: u32 = 1 << 19;

/// Whether a client's sequence number is within [`CLOSING_WINDOW`] of the Pod's last recorded acknowledgement number:
/// [`crate::flow::FlowState::pod_acknowledgement`]. Otherwise, the entry does not record a FIN or RST of the segment.
/// For SCTP, both arguments are verification tags. Equal tags would be the stricter condition, but the comparison does
/// not depend on the protocol: on Linux 5.10, programs that are loaded without `CAP_PERFMON` have no room for a further
/// branch.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_near_acknowledgement(sequence: u32, pod_acknowledgement: u32) -> bool {
    is_near(sequence, pod_acknowledgement, CLOSING_WINDOW)
}

/// Returns whether `a` is less than `window` ahead of `b`, or at most `window` behind `b`, modulo 2^32.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub(crate) const fn is_near(a: u32, b: u32, window: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(window) < 2 * window
}

/// An event that may change the state of a conntrack entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The client's TCP segment or SCTP packet.
    ClientSegment {
        /// The segment's flags: [`crate::flow::tcp_flag`].
        flags: u8,
        /// Whether the segment's sequence or acknowledgement number matches the connection.
        is_proven: bool,
    },
    /// The client's datagram.
    ClientDatagram,
    /// The Pod's TCP segment or SCTP packet.
    PodSegment {
        /// The segment's flags: [`crate::flow::tcp_flag`].
        flags: u8,
        /// Whether the segment's sequence or acknowledgement number matches the connection.
        is_proven: bool,
    },
    /// The Pod's datagram.
    PodDatagram,
    /// The agent's sweeper has found that the entry was idle for the time `ns`.
    Silence {
        /// The idle time, in nanoseconds. For an entry of the flow table: the time since a packet last refreshed the
        /// entry. For an entry of the half-open cache, which has no time stamp: the time for which the sweeper has
        /// found the entry unchanged.
        ns: u64,
        /// The flow's protocol: [`protocol`].
        protocol: u8,
        /// Whether more than half of the flow table that contains the entry is in use.
        is_crowded: bool,
    },
    /// A client's packet has the flow tuple of the entry, but another NAT address than the entry, or the packet's
    /// mapping points to another generation of the Pod.
    ClientMismatch {
        /// The flow's protocol: [`protocol`].
        protocol: u8,
        /// Whether the packet's NAT address is the entry's NAT address.
        is_same_nat: bool,
    },
    /// The kernel has evicted the flow's entry from the flow table, but the copy in the half-open cache remains.
    Eviction,
    /// The agent has removed an entry from the flow table, because the flow has timed out or its endpoint was removed.
    /// The copy in the half-open cache remains.
    TableRemoval,
    /// A direct connection between client and Pod has the same flow tuple.
    DirectConnection,
}

impl Event {
    /// The event of a client's packet of this protocol.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn from_client(protocol: u8, flags: u8, is_proven: bool) -> Self {
        if protocol == protocol::UDP { Self::ClientDatagram } else { Self::ClientSegment { flags, is_proven } }
    }

    /// The event of a Pod's packet of this protocol.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn from_pod(protocol: u8, flags: u8, is_proven: bool) -> Self {
        if protocol == protocol::UDP { Self::PodDatagram } else { Self::PodSegment { flags, is_proven } }
    }
}

/// The action that the caller of [`step`] executes on the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The Pod's packet does not belong to the entry. Leave the entry unchanged, create no entry, and do not use this
    /// entry to translate the packet.
    Ignore,
    /// Leave the entry unchanged.
    Keep,
    /// Write a new entry to the half-open cache.
    Open,
    /// Write the new phase to the entry in the half-open cache.
    Store,
    /// Write the flags and the time to the entry in the flow table.
    Refresh,
    /// Write an entry to the flow table, and a copy with the phase "established" to the flow's slot of the half-open
    /// cache.
    Establish,
    /// Replace the entry in the flow table by a new one.
    Replace,
    /// Remove the entry from the half-open cache or the flow table.
    Remove,
}

/// Returns the next state of an entry after an event, and the action that the caller executes on the entry: see the
/// table at the top of this module.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn step(state: State, event: Event) -> (State, Action) {
    match event {
        Event::ClientDatagram => client_datagram(state),
        Event::ClientSegment { flags, is_proven } => client_segment(state, flags, is_proven),
        Event::PodDatagram if state.phase.is(Phase::REPLIED) => (State::established(0, 0), Action::Establish),
        Event::PodDatagram => pod_packet(state, 0, true),
        Event::PodSegment { flags, is_proven } => pod_packet(state, flags, is_proven),
        Event::Silence { ns, protocol, is_crowded } => {
            let is_over = match state.phase {
                Phase::REQUESTED => ns >= REQUESTED_NS,
                Phase::REPLIED => ns >= REPLIED_NS,
                Phase::ESTABLISHED => ns >= established_timeout_ns(state, protocol, is_crowded),
                _ => false,
            };
            if is_over { (State::ABSENT, Action::Remove) } else { (state, Action::Keep) }
        }
        Event::ClientMismatch { protocol, is_same_nat }
            if state.phase.is(Phase::ESTABLISHED) && (is_same_nat || protocol == protocol::UDP) =>
        {
            (State::established(0, 0), Action::Replace)
        }
        Event::Eviction if state.phase.is(Phase::ESTABLISHED) => (State::half_open(Phase::REQUESTED), Action::Open),
        Event::TableRemoval if state.phase.is(Phase::ESTABLISHED) => (State::half_open(Phase::REPLIED), Action::Store),
        Event::DirectConnection if !state.phase.is(Phase::ABSENT) => (State::ABSENT, Action::Remove),
        Event::ClientMismatch { .. } | Event::Eviction | Event::TableRemoval | Event::DirectConnection => {
            (state, Action::Keep)
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see `step`")]
const fn client_datagram(state: State) -> (State, Action) {
    match state.phase {
        Phase::REQUESTED => (state, Action::Keep),
        Phase::REPLIED => (State::established(0, 0), Action::Establish),
        Phase::ESTABLISHED => (state, Action::Refresh),
        _ => (State::half_open(Phase::REQUESTED), Action::Open),
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see `step`")]
const fn client_segment(state: State, flags: u8, is_proven: bool) -> (State, Action) {
    match state.phase {
        Phase::REQUESTED | Phase::REPLIED if flags & RST != 0 && is_proven => {
            (State::half_open(Phase::REFUSED), Action::Store)
        }
        Phase::REQUESTED => (state, Action::Keep),
        Phase::REPLIED if is_syn(flags) || !is_proven => (state, Action::Keep),
        Phase::REPLIED => (State::established(flags, 0), Action::Establish),
        Phase::ESTABLISHED => {
            let flags = if is_proven { flags } else { flags & !(FIN | RST) };
            (State { client_flags: state.client_flags | flags, ..state }, Action::Refresh)
        }
        _ if is_syn(flags) || is_mid_stream(flags) => (State::half_open(Phase::REQUESTED), Action::Open),
        _ => (state, Action::Keep),
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see `step`")]
const fn pod_packet(state: State, flags: u8, is_proven: bool) -> (State, Action) {
    match state.phase {
        Phase::REQUESTED | Phase::REPLIED if !is_proven => (state, Action::Ignore),
        Phase::REQUESTED | Phase::REPLIED if flags & RST != 0 => (State::half_open(Phase::REFUSED), Action::Store),
        Phase::REQUESTED => (State::half_open(Phase::REPLIED), Action::Store),
        Phase::ESTABLISHED if flags & RST != 0 && !state.has_pod_spoken() => (State::ABSENT, Action::Remove),
        Phase::ESTABLISHED => {
            let flags = if flags & SYN != 0 { flags & !ACK } else { flags };
            (State { pod_flags: state.pod_flags | flags, ..state }, Action::Refresh)
        }
        Phase::REPLIED | Phase::REFUSED => (state, Action::Keep),
        _ => (state, Action::Ignore),
    }
}

/// The idle timeout, in nanoseconds, of an established entry with this state.
pub const fn established_timeout_ns(state: State, protocol: u8, is_crowded: bool) -> u64 {
    let (client, pod) = (state.client_flags, state.pod_flags);
    let is_closed = client & pod & FIN != 0 || (client | pod) & RST != 0;
    match protocol {
        protocol::UDP if is_crowded => UDP_CROWDED_NS,
        protocol::UDP => UDP_NS,
        _ if is_closed => CLOSED_NS,
        _ if state.is_ending() => HALF_CLOSED_NS,
        protocol::SCTP => SCTP_NS,
        _ if !state.has_pod_spoken() => UNANSWERED_NS,
        _ => TCP_NS,
    }
}

/// Whether a segment opens a handshake: a SYN without ACK, or an SCTP INIT.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_syn(flags: u8) -> bool {
    flags & (SYN | ACK) == SYN
}

/// Whether the flags of a segment contain ACK, and neither SYN nor RST.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn is_mid_stream(flags: u8) -> bool {
    flags & (SYN | RST | ACK) == ACK
}

/// Whether a Pod's segment accepts or rejects a handshake.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_handshake_reply(flags: u8) -> bool {
    flags & (SYN | RST) != 0
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    const SYN_ACK: u8 = SYN | ACK;
    const PSH: u8 = 0x08;

    fn half_open(phase: Phase) -> State {
        State::half_open(phase)
    }

    /// A proven segment of the client: its numbers match the connection.
    fn client(flags: u8) -> Event {
        Event::ClientSegment { flags, is_proven: true }
    }

    /// A segment with the client's address whose sequence and acknowledgement numbers do not match the connection.
    fn forged(flags: u8) -> Event {
        Event::ClientSegment { flags, is_proven: false }
    }

    fn pod(flags: u8) -> Event {
        Event::PodSegment { flags, is_proven: true }
    }

    /// The Pod's segment of another connection with the same flow tuple.
    fn pod_elsewhere(flags: u8) -> Event {
        Event::PodSegment { flags, is_proven: false }
    }

    #[track_caller]
    fn becomes(state: State, event: Event, next: State, action: Action) {
        assert_eq!(step(state, event), (next, action), "{state:?} {event:?}");
    }

    fn after(state: State, events: &[Event]) -> State {
        events.iter().fold(state, |state, event| step(state, *event).0)
    }

    #[test]
    fn a_syn_an_acknowledging_segment_or_a_datagram_opens_an_absent_or_refused_flow() {
        for phase in [Phase::ABSENT, Phase::REFUSED] {
            for event in [SYN, ACK, ACK | PSH, FIN | ACK].map(forged) {
                becomes(half_open(phase), event, half_open(Phase::REQUESTED), Action::Open);
            }
            becomes(half_open(phase), Event::ClientDatagram, half_open(Phase::REQUESTED), Action::Open);
            for event in [SYN_ACK, RST, RST | ACK, FIN, 0].map(forged) {
                becomes(half_open(phase), event, half_open(phase), Action::Keep);
            }
        }
    }

    #[test]
    fn a_pods_packet_opens_no_entry() {
        for event in (0..=u8::MAX).map(pod) {
            becomes(State::ABSENT, event, State::ABSENT, Action::Ignore);
        }
        becomes(State::ABSENT, Event::PodDatagram, State::ABSENT, Action::Ignore);
    }

    #[test]
    fn a_repeated_request_changes_nothing() {
        let requested = half_open(Phase::REQUESTED);
        for event in [forged(SYN), forged(ACK), Event::ClientDatagram] {
            becomes(requested, event, requested, Action::Keep);
        }
        let replied = half_open(Phase::REPLIED);
        becomes(replied, forged(SYN), replied, Action::Keep);
    }

    #[test]
    fn the_pods_reply_is_stored_once() {
        let (requested, replied) = (half_open(Phase::REQUESTED), half_open(Phase::REPLIED));
        for event in [pod(SYN_ACK), pod(ACK), Event::PodDatagram] {
            becomes(requested, event, replied, Action::Store);
        }
        becomes(replied, pod(SYN_ACK), replied, Action::Keep);
    }

    #[test]
    fn a_pods_segment_of_another_connection_is_ignored() {
        for phase in [Phase::REQUESTED, Phase::REPLIED] {
            for event in (0..=u8::MAX).map(pod_elsewhere) {
                becomes(half_open(phase), event, half_open(phase), Action::Ignore);
            }
        }
    }

    #[test]
    fn a_reset_of_either_side_ends_the_handshake() {
        let refused = half_open(Phase::REFUSED);
        for phase in [Phase::REQUESTED, Phase::REPLIED] {
            becomes(half_open(phase), pod(RST | ACK), refused, Action::Store);
            becomes(half_open(phase), client(RST), refused, Action::Store);
            becomes(half_open(phase), forged(RST), half_open(phase), Action::Keep);
        }
        becomes(refused, pod(SYN_ACK), refused, Action::Keep);
        becomes(refused, Event::PodDatagram, refused, Action::Keep);
    }

    #[test]
    fn only_an_acknowledgement_of_the_pods_reply_establishes_the_flow() {
        let replied = half_open(Phase::REPLIED);
        for flags in [ACK, ACK | PSH, ACK | FIN] {
            becomes(replied, client(flags), State::established(flags, 0), Action::Establish);
            becomes(replied, forged(flags), replied, Action::Keep);
        }
        becomes(replied, Event::ClientDatagram, State::established(0, 0), Action::Establish);
    }

    #[test]
    fn the_pods_second_datagram_establishes_the_flow() {
        becomes(half_open(Phase::REPLIED), Event::PodDatagram, State::established(0, 0), Action::Establish);
    }

    #[test]
    fn a_reset_directly_after_the_pods_syn_ack_removes_the_entry() {
        becomes(State::established(ACK, 0), pod(RST), State::ABSENT, Action::Remove);
        becomes(State::established(ACK, SYN), pod(RST | ACK), State::ABSENT, Action::Remove);
        let spoken = State::established(ACK, ACK);
        becomes(spoken, pod(RST), State::established(ACK, ACK | RST), Action::Refresh);
    }

    #[test]
    fn a_retransmitted_syn_ack_is_not_a_further_segment_of_the_pod() {
        let repeated = State::established(ACK, SYN);
        becomes(State::established(ACK, 0), pod(SYN_ACK), repeated, Action::Refresh);
        assert!(repeated.may_repeat_syn_ack());
        assert!(!State::established(ACK | RST, SYN).may_repeat_syn_ack());
        assert!(!after(repeated, &[pod(ACK)]).may_repeat_syn_ack());
    }

    #[test]
    fn a_forged_fin_or_reset_does_not_shorten_a_connection() {
        let open = State::established(ACK, ACK);
        for flags in [FIN | ACK, RST, RST | ACK, FIN] {
            let (next, action) = step(open, forged(flags));
            assert_eq!(action, Action::Refresh);
            assert_eq!(established_timeout_ns(next, TCP, false), TCP_NS, "{flags:#x}");
            assert!(established_timeout_ns(step(open, client(flags)).0, TCP, false) < TCP_NS, "{flags:#x}");
        }
    }

    #[test]
    fn an_entry_times_out_after_the_silence_that_its_state_allows() {
        let established = |client, pod| State::established(client, pod);
        let cases = [
            (TCP, half_open(Phase::REQUESTED), REQUESTED_NS),
            (TCP, half_open(Phase::REPLIED), REPLIED_NS),
            (TCP, established(ACK, 0), UNANSWERED_NS),
            (TCP, established(ACK, SYN), UNANSWERED_NS),
            (TCP, established(ACK, ACK), TCP_NS),
            (TCP, established(ACK | FIN, ACK), HALF_CLOSED_NS),
            (TCP, established(ACK, ACK | FIN), HALF_CLOSED_NS),
            (TCP, established(ACK | FIN, ACK | FIN), CLOSED_NS),
            (TCP, established(ACK | RST, ACK), CLOSED_NS),
            (TCP, established(ACK, RST), CLOSED_NS),
            (UDP, established(0, 0), UDP_NS),
            (SCTP, established(0, 0), SCTP_NS),
            (SCTP, established(FIN, FIN), CLOSED_NS),
        ];
        for (protocol, state, limit) in cases {
            for is_crowded in [false, true] {
                let is_shorter = is_crowded && protocol == UDP && state.phase == Phase::ESTABLISHED;
                let limit = if is_shorter { UDP_CROWDED_NS } else { limit };
                let silence = |ns| Event::Silence { ns, protocol, is_crowded };
                becomes(state, silence(limit - 1), state, Action::Keep);
                becomes(state, silence(limit), State::ABSENT, Action::Remove);
            }
        }
    }

    #[test]
    fn an_absent_or_refused_entry_never_times_out() {
        for phase in [Phase::ABSENT, Phase::REFUSED] {
            let silence = Event::Silence { ns: u64::MAX, protocol: TCP, is_crowded: true };
            becomes(half_open(phase), silence, half_open(phase), Action::Keep);
        }
    }

    #[test]
    fn a_segment_to_another_nat_address_keeps_the_entry_and_a_datagram_replaces_it() {
        let state = State::established(ACK, ACK | FIN);
        let mismatch = |protocol, is_same_nat| Event::ClientMismatch { protocol, is_same_nat };
        for protocol in [TCP, SCTP] {
            becomes(state, mismatch(protocol, false), state, Action::Keep);
        }
        becomes(state, mismatch(UDP, false), State::established(0, 0), Action::Replace);
    }

    #[test]
    fn a_packet_for_another_generation_replaces_the_entry() {
        for protocol in [TCP, UDP, SCTP] {
            let event = Event::ClientMismatch { protocol, is_same_nat: true };
            becomes(State::established(ACK, ACK), event, State::established(0, 0), Action::Replace);
        }
    }

    #[test]
    fn the_pods_next_packet_after_an_eviction_counts_as_a_reply() {
        let state = State::established(ACK, ACK);
        becomes(state, Event::Eviction, half_open(Phase::REQUESTED), Action::Open);
        assert_eq!(after(state, &[Event::Eviction, pod(ACK)]), half_open(Phase::REPLIED));
        for phase in [Phase::ABSENT, Phase::REQUESTED, Phase::REPLIED, Phase::REFUSED] {
            becomes(half_open(phase), Event::Eviction, half_open(phase), Action::Keep);
        }
    }

    #[test]
    fn the_half_open_entry_of_a_removed_flow_becomes_replied() {
        becomes(State::established(ACK, ACK), Event::TableRemoval, half_open(Phase::REPLIED), Action::Store);
        for phase in [Phase::ABSENT, Phase::REQUESTED, Phase::REPLIED, Phase::REFUSED] {
            becomes(half_open(phase), Event::TableRemoval, half_open(phase), Action::Keep);
        }
    }

    #[test]
    fn a_direct_connection_removes_the_entry_of_its_flow_tuple() {
        for phase in [Phase::REQUESTED, Phase::REPLIED, Phase::ESTABLISHED, Phase::REFUSED] {
            becomes(half_open(phase), Event::DirectConnection, State::ABSENT, Action::Remove);
        }
        becomes(State::ABSENT, Event::DirectConnection, State::ABSENT, Action::Keep);
    }

    #[test]
    fn phases_of_the_cache_have_two_bits_and_names() {
        for phase in [Phase::REQUESTED, Phase::REPLIED, Phase::ESTABLISHED, Phase::REFUSED] {
            assert_eq!(Phase::from_bits(phase.bits()), phase);
            assert_ne!(phase.name(), Phase::ABSENT.name());
        }
    }

    #[test]
    fn a_reset_in_the_middle_of_a_connection_has_exactly_the_acknowledged_number() {
        let numbers = Segment::new(7, 9_000, ACK).numbers;
        let reset = |sequence| Segment::new(sequence, 0, RST);
        assert!(numbers.admit(reset(9_000)));
        assert!(!numbers.admit(reset(9_001)) && !numbers.admit(reset(8_999)));
    }

    fn events() -> impl Strategy<Value = Event> {
        let flags = any::<u8>;
        prop_oneof![
            (flags(), any::<bool>()).prop_map(|(flags, is_proven)| Event::ClientSegment { flags, is_proven }),
            (flags(), any::<bool>()).prop_map(|(flags, is_proven)| Event::PodSegment { flags, is_proven }),
            Just(Event::ClientDatagram),
            Just(Event::PodDatagram),
            (any::<u64>(), select(vec![TCP, UDP, SCTP]), any::<bool>())
                .prop_map(|(ns, protocol, is_crowded)| Event::Silence { ns, protocol, is_crowded }),
            (select(vec![TCP, UDP, SCTP]), any::<bool>())
                .prop_map(|(protocol, is_same_nat)| Event::ClientMismatch { protocol, is_same_nat }),
            Just(Event::Eviction),
            Just(Event::TableRemoval),
            Just(Event::DirectConnection),
        ]
    }

    fn is_of_pod(event: Event) -> bool {
        matches!(event, Event::PodSegment { .. } | Event::PodDatagram)
    }

    proptest! {
        /// A Pod's packets alone never create an entry.
        #[test]
        fn no_sequence_of_a_pods_packets_opens_a_flow(events in vec(events().prop_filter("Pod", |e| is_of_pod(*e)), 0..20)) {
            prop_assert_eq!(after(State::ABSENT, &events), State::ABSENT);
        }

        /// Events other than packets of the Pod never establish an entry: a flow needs a reply.
        #[test]
        fn no_sequence_of_a_clients_packets_establishes_a_flow(
            events in vec(events().prop_filter("client", |e| !is_of_pod(*e)), 0..20),
        ) {
            let state = after(State::ABSENT, &events);
            prop_assert_ne!(state.phase, Phase::ESTABLISHED, "{:?}", state);
        }

        /// A client's segments whose sequence and acknowledgement numbers do not match the connection change neither
        /// the Pod's flags in the entry of an established TCP connection nor the connection's idle timeout.
        #[test]
        fn no_sequence_of_forged_segments_changes_an_established_connection(
            flags in vec(any::<u8>(), 1..20), client: bool, pod: bool,
        ) {
            let fin = |is_closed| if is_closed { ACK | FIN } else { ACK };
            let before = State::established(fin(client), fin(pod));
            let forged: Vec<_> = flags.into_iter().map(forged).collect();
            let after = after(before, &forged);
            prop_assert_eq!(after.pod_flags, before.pod_flags);
            prop_assert_eq!(established_timeout_ns(after, TCP, false), established_timeout_ns(before, TCP, false));
        }

        /// A sender who guesses neither number correctly can at most open an entry. A reply of another connection does
        /// not match this entry.
        #[test]
        fn no_sequence_of_forged_segments_matches_a_reply_of_another_connection(
            flags in vec(any::<(u8, bool)>(), 1..20),
        ) {
            let mut state = State::ABSENT;
            for (flags, is_of_pod) in flags {
                let event = if is_of_pod { pod_elsewhere(flags) } else { forged(flags) };
                let (next, action) = step(state, event);
                if is_of_pod {
                    prop_assert_eq!((next, action), (state, Action::Ignore));
                }
                prop_assert!(matches!(next.phase, Phase::ABSENT | Phase::REQUESTED));
                state = next;
            }
        }

        #[test]
        fn an_action_corresponds_to_the_change_of_the_state(events in vec(events(), 0..30)) {
            let mut state = State::ABSENT;
            for event in events {
                let (next, action) = step(state, event);
                match action {
                    Action::Ignore | Action::Keep => prop_assert_eq!(state, next),
                    Action::Open => prop_assert_eq!(next, State::half_open(Phase::REQUESTED)),
                    Action::Store => prop_assert!(next.phase != state.phase && next.phase != Phase::ESTABLISHED),
                    Action::Refresh => {
                        prop_assert_eq!((state.phase, next.phase), (Phase::ESTABLISHED, Phase::ESTABLISHED));
                        prop_assert_eq!(state.client_flags & !next.client_flags, 0);
                        prop_assert_eq!(state.pod_flags & !next.pod_flags, 0);
                    }
                    Action::Establish => {
                        prop_assert_eq!((state.phase, next.phase), (Phase::REPLIED, Phase::ESTABLISHED));
                    }
                    Action::Replace => {
                        prop_assert_eq!((state.phase, next), (Phase::ESTABLISHED, State::established(0, 0)));
                    }
                    Action::Remove => prop_assert_eq!(next, State::ABSENT),
                }
                state = next;
            }
        }

        /// [`Numbers::admit`] accepts a Pod's segment with the flag ACK if and only if each side's sequence number is
        /// within [`Numbers::WINDOW`] of the other side's acknowledgement number.
        #[test]
        fn replies_within_the_window_are_admitted_and_no_others(
            sequence: u32, acknowledgement: u32, ahead in 0..Numbers::WINDOW, behind in 1..=Numbers::WINDOW, far in Numbers::WINDOW..u32::MAX - Numbers::WINDOW,
        ) {
            let numbers = Segment::new(sequence, acknowledgement, ACK).numbers;
            let reply = |acknowledged: u32, sent: u32| Segment::new(acknowledgement.wrapping_add(sent), sequence.wrapping_add(acknowledged), ACK);
            prop_assert!(numbers.admit(reply(ahead, behind.wrapping_neg())));
            prop_assert!(numbers.admit(reply(behind.wrapping_neg(), ahead)));
            prop_assert!(!numbers.admit(reply(far, ahead)) && !numbers.admit(reply(ahead, far)));
            let later = |sent: u32, acknowledged: u32| {
                Segment::new(sequence.wrapping_add(sent), acknowledgement.wrapping_add(acknowledged), ACK).numbers
            };
            prop_assert!(numbers.is_near(later(ahead, behind.wrapping_neg())) && numbers.is_near(numbers));
            prop_assert!(!numbers.is_near(later(far, ahead)) && !numbers.is_near(later(ahead, far)));
        }

        #[test]
        fn keys_of_one_flow_differ_by_kind_and_number(flow: u64, a: u32, b: u32) {
            prop_assert_ne!(handshake_key(flow, a), reply_key(flow, b));
            prop_assert_ne!(handshake_key(flow, a), mid_stream_key(flow));
            prop_assert_eq!(handshake_key(flow, a) == handshake_key(flow, b), a == b);
            prop_assert_eq!(is_near_acknowledgement(a.wrapping_add(b), a), b < CLOSING_WINDOW || b >= CLOSING_WINDOW.wrapping_neg());
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The connection tracking state machine: one pure [`step`], which the kernel programs run for each packet, the agent's sweeper
//! for each silence, and readers in user space to name a state.
//!
//! An entry is created by the client's packet, never by the Pod's. A lost entry is recreated by the client's next packet.
//! Entries before [`Phase::ESTABLISHED`] are words of the half-open cache ([`crate::half_open`]), later ones elements of the flow
//! table ([`crate::flow`]).
//!
//! | phase | event | next phase | action |
//! |---|---|---|---|
//! | absent, refused | client: any packet | requested | open |
//! | requested | client: any packet | requested | keep |
//! | requested | Pod: any but RST | replied | store |
//! | requested, replied | Pod: RST | refused | store |
//! | requested | silence of [`REQUESTED_NS`] | absent | remove |
//! | replied | client: SYN | replied | keep |
//! | replied | client: RST | refused | store |
//! | replied | client: any other | established | establish |
//! | replied | Pod: datagram | established | establish |
//! | replied | Pod: segment | replied | keep |
//! | replied | silence of [`REPLIED_NS`] | absent | remove |
//! | refused | Pod: any packet | refused | keep |
//! | established | client: any packet | established, flags added | refresh |
//! | established | Pod: RST before any data or acknowledgement | absent | remove |
//! | established | Pod: any other | established, flags added | refresh |
//! | established | silence of [`established_timeout_ns`] | absent | remove |
//! | absent | Pod: any packet | absent | ignore |
//!
//! A client's SYN never changes an established entry: it opens a handshake beside it. Which of the two a Pod's packet belongs to
//! says [`belongs_to_handshake`].

use crate::{
    flow::tcp_flag::{ACK, FIN, RST, SYN},
    mapping::protocol,
};

const SECOND: u64 = 1_000_000_000;

/// Silence after which an unanswered request times out, nanoseconds: as kernel conntrack's `nf_conntrack_udp_timeout`.
pub const REQUESTED_NS: u64 = 30 * SECOND;
/// Silence after which an answered request times out, nanoseconds: a Pod may push datagrams minutes after the request.
pub const REPLIED_NS: u64 = 300 * SECOND;
/// Silence after a RST or a FIN of either side, nanoseconds: as `nf_conntrack_tcp_timeout_last_ack`.
pub const CLOSED_NS: u64 = 30 * SECOND;
/// Silence after a FIN of one side, nanoseconds: as `nf_conntrack_tcp_timeout_fin_wait`.
pub const HALF_CLOSED_NS: u64 = 120 * SECOND;
/// Silence of an established TCP connection, nanoseconds: as `nf_conntrack_tcp_timeout_established`.
pub const TCP_NS: u64 = 5 * 24 * 3600 * SECOND;
/// Silence of a UDP flow, nanoseconds: RFC 4787, section 4.3.
pub const UDP_NS: u64 = 300 * SECOND;
/// The same while the flow table is crowded: most of such flows are one question and its answer.
pub const UDP_CROWDED_NS: u64 = 30 * SECOND;
/// Silence of an SCTP association, whose heartbeats come every 30 s (RFC 9260), nanoseconds.
pub const SCTP_NS: u64 = 3600 * SECOND;

/// How far a flow has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Phase(u8);

impl Phase {
    /// The client has sent, the Pod has not.
    pub const REQUESTED: Self = Self(0);
    /// The Pod has replied: the client's next packet establishes the flow.
    pub const REPLIED: Self = Self(1);
    /// The exchange is complete; the entry is in the flow table.
    pub const ESTABLISHED: Self = Self(2);
    /// A RST ended the handshake. Late packets are translated, and the entry is never established.
    pub const REFUSED: Self = Self(3);
    /// There is no entry.
    pub const ABSENT: Self = Self(4);

    /// The phase of the two bits that an entry of the half-open cache has for it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    #[expect(clippy::cast_possible_truncation, reason = "two bits")]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits as u8 & 0b11)
    }

    /// The two bits of a phase that the half-open cache can have.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn bits(self) -> u64 {
        self.0 as u64 & 0b11
    }

    /// Whether both are the same phase, where `==` is not available.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn is(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Whether the client is opening the flow.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn is_opening(self) -> bool {
        self.0 <= Self::REPLIED.0
    }

    /// The name that views and tables show.
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

/// The state of one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// How far the flow has come.
    pub phase: Phase,
    /// TCP flags that the client has sent since the flow was established, or-ed together.
    pub client_flags: u8,
    /// TCP flags that the Pod has sent since, or-ed together, without the ACK of a SYN-ACK: see [`State::has_pod_spoken`].
    pub pod_flags: u8,
}

impl State {
    /// There is no entry.
    pub const ABSENT: Self = Self::half_open(Phase::ABSENT);

    /// The state of an entry of the half-open cache.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn half_open(phase: Phase) -> Self {
        Self { phase, client_flags: 0, pod_flags: 0 }
    }

    /// The state of an entry of the flow table.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn established(client_flags: u8, pod_flags: u8) -> Self {
        Self { phase: Phase::ESTABLISHED, client_flags, pod_flags }
    }

    /// Whether the Pod has sent more than its SYN-ACK. It does not repeat the SYN-ACK afterwards.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn has_pod_spoken(self) -> bool {
        self.pod_flags & ACK != 0
    }

    /// Whether the Pod may repeat its SYN-ACK, because the client's acknowledgement was lost behind the Node.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn may_repeat_syn_ack(self) -> bool {
        !self.has_pod_spoken() && self.client_flags & RST == 0
    }
}

/// What happens to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The client's TCP segment or SCTP packet, as flags ([`crate::flow::tcp_flag`]).
    ClientSegment(u8),
    /// The client's datagram.
    ClientDatagram,
    /// The Pod's TCP segment or SCTP packet.
    PodSegment(u8),
    /// The Pod's datagram.
    PodDatagram,
    /// No packet was seen for some time.
    Silence {
        /// For how long, nanoseconds.
        ns: u64,
        /// The flow's protocol: [`protocol`].
        protocol: u8,
        /// Whether the flow table is crowded.
        is_crowded: bool,
    },
}

impl Event {
    /// The client's packet of a protocol; `flags` are 0 for UDP.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn from_client(protocol: u8, flags: u8) -> Self {
        if protocol == protocol::UDP { Self::ClientDatagram } else { Self::ClientSegment(flags) }
    }

    /// The Pod's packet of a protocol; `flags` are 0 for UDP.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
    pub const fn from_pod(protocol: u8, flags: u8) -> Self {
        if protocol == protocol::UDP { Self::PodDatagram } else { Self::PodSegment(flags) }
    }
}

/// What the caller of [`step`] does with the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// There is no entry, and none is made: the packet is not translated.
    Ignore,
    /// The entry stays as it is.
    Keep,
    /// Write a new entry to the half-open cache.
    Open,
    /// Write the new phase to the entry in the half-open cache.
    Store,
    /// Write the flags and the time to the entry in the flow table.
    Refresh,
    /// Move the entry from the half-open cache to the flow table.
    Establish,
    /// Remove the entry.
    Remove,
}

/// The next state of an entry, and the action that brings it about. See the table of the module.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn step(state: State, event: Event) -> (State, Action) {
    match event {
        Event::ClientDatagram => client_packet(state, 0),
        Event::ClientSegment(flags) => client_packet(state, flags),
        Event::PodDatagram if state.phase.is(Phase::REPLIED) => (State::established(0, 0), Action::Establish),
        Event::PodDatagram => pod_packet(state, 0),
        Event::PodSegment(flags) => pod_packet(state, flags),
        Event::Silence { ns, protocol, is_crowded } => {
            let is_over = match state.phase {
                Phase::REQUESTED => ns >= REQUESTED_NS,
                Phase::REPLIED => ns >= REPLIED_NS,
                Phase::ESTABLISHED => ns >= established_timeout_ns(state, protocol, is_crowded),
                _ => false,
            };
            if is_over { (State::ABSENT, Action::Remove) } else { (state, Action::Keep) }
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see `step`")]
const fn client_packet(state: State, flags: u8) -> (State, Action) {
    match state.phase {
        Phase::REQUESTED => (state, Action::Keep),
        Phase::REPLIED if is_syn(flags) => (state, Action::Keep),
        Phase::REPLIED if flags & RST != 0 => (State::half_open(Phase::REFUSED), Action::Store),
        Phase::REPLIED => (State::established(flags, 0), Action::Establish),
        Phase::ESTABLISHED => (State { client_flags: state.client_flags | flags, ..state }, Action::Refresh),
        _ => (State::half_open(Phase::REQUESTED), Action::Open),
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see `step`")]
const fn pod_packet(state: State, flags: u8) -> (State, Action) {
    match state.phase {
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

/// Silence after which an established entry times out, nanoseconds.
pub const fn established_timeout_ns(state: State, protocol: u8, is_crowded: bool) -> u64 {
    let (client, pod) = (state.client_flags, state.pod_flags);
    let is_closed = client & pod & FIN != 0 || (client | pod) & RST != 0;
    match protocol {
        protocol::UDP if is_crowded => UDP_CROWDED_NS,
        protocol::UDP => UDP_NS,
        _ if is_closed => CLOSED_NS,
        _ if (client | pod) & FIN != 0 => HALF_CLOSED_NS,
        protocol::SCTP => SCTP_NS,
        _ => TCP_NS,
    }
}

/// Whether a segment opens a handshake: a SYN without ACK, or an SCTP INIT.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn is_syn(flags: u8) -> bool {
    flags & (SYN | ACK) == SYN
}

/// Whether a Pod's segment accepts or refuses a handshake.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn is_handshake_reply(flags: u8) -> bool {
    flags & (SYN | RST) != 0
}

/// Whether a Pod's segment belongs to the handshake in progress and not to an older entry with the same flow tuple. `is_opening` is
/// called only where it matters.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub fn belongs_to_handshake(flags: u8, is_opening: impl FnOnce() -> bool) -> bool {
    is_handshake_reply(flags) && is_opening()
}

/// Whether a Pod's segment belongs to a direct connection: it accepts or opens one, and no client is opening a flow through a
/// mapping. `is_opening` is called only where it matters.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub fn is_direct_handshake(flags: u8, is_opening: impl FnOnce() -> bool) -> bool {
    flags & SYN != 0 && !is_opening()
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

    #[track_caller]
    fn becomes(state: State, event: Event, next: State, action: Action) {
        assert_eq!(step(state, event), (next, action), "{state:?} {event:?}");
    }

    fn after(state: State, events: &[Event]) -> State {
        events.iter().fold(state, |state, event| step(state, *event).0)
    }

    #[test]
    fn any_packet_of_a_client_opens_an_absent_or_refused_flow() {
        for phase in [Phase::ABSENT, Phase::REFUSED] {
            for event in [SYN, SYN_ACK, ACK, FIN | ACK, RST, 0].map(Event::ClientSegment) {
                becomes(half_open(phase), event, half_open(Phase::REQUESTED), Action::Open);
            }
            becomes(half_open(phase), Event::ClientDatagram, half_open(Phase::REQUESTED), Action::Open);
        }
    }

    #[test]
    fn a_pods_packet_opens_nothing() {
        for event in [SYN, SYN_ACK, ACK, FIN | ACK, RST, 0].map(Event::PodSegment) {
            becomes(State::ABSENT, event, State::ABSENT, Action::Ignore);
        }
        becomes(State::ABSENT, Event::PodDatagram, State::ABSENT, Action::Ignore);
    }

    #[test]
    fn a_repeated_request_changes_nothing() {
        let requested = half_open(Phase::REQUESTED);
        for event in [Event::ClientSegment(SYN), Event::ClientSegment(ACK), Event::ClientDatagram] {
            becomes(requested, event, requested, Action::Keep);
        }
        let replied = half_open(Phase::REPLIED);
        becomes(replied, Event::ClientSegment(SYN), replied, Action::Keep);
    }

    #[test]
    fn the_pods_reply_is_stored_once() {
        let (requested, replied) = (half_open(Phase::REQUESTED), half_open(Phase::REPLIED));
        for event in [Event::PodSegment(SYN_ACK), Event::PodSegment(ACK), Event::PodDatagram] {
            becomes(requested, event, replied, Action::Store);
        }
        becomes(replied, Event::PodSegment(SYN_ACK), replied, Action::Keep);
    }

    #[test]
    fn a_reset_of_either_side_ends_the_handshake() {
        let refused = half_open(Phase::REFUSED);
        becomes(half_open(Phase::REQUESTED), Event::PodSegment(RST | ACK), refused, Action::Store);
        becomes(half_open(Phase::REPLIED), Event::PodSegment(RST), refused, Action::Store);
        becomes(half_open(Phase::REPLIED), Event::ClientSegment(RST), refused, Action::Store);
        becomes(refused, Event::PodSegment(SYN_ACK), refused, Action::Keep);
        becomes(refused, Event::PodDatagram, refused, Action::Keep);
    }

    #[test]
    fn a_client_cannot_reset_a_request_that_the_pod_has_not_answered() {
        let requested = half_open(Phase::REQUESTED);
        becomes(requested, Event::ClientSegment(RST), requested, Action::Keep);
    }

    #[test]
    fn the_clients_packet_after_the_reply_establishes_the_flow() {
        let replied = half_open(Phase::REPLIED);
        for flags in [ACK, ACK | PSH, ACK | FIN] {
            becomes(replied, Event::ClientSegment(flags), State::established(flags, 0), Action::Establish);
        }
        becomes(replied, Event::ClientDatagram, State::established(0, 0), Action::Establish);
    }

    #[test]
    fn the_pods_second_datagram_establishes_a_stream() {
        becomes(half_open(Phase::REPLIED), Event::PodDatagram, State::established(0, 0), Action::Establish);
    }

    #[test]
    fn a_reset_before_the_pod_has_spoken_removes_the_entry() {
        becomes(State::established(ACK, 0), Event::PodSegment(RST), State::ABSENT, Action::Remove);
        becomes(State::established(ACK, SYN), Event::PodSegment(RST | ACK), State::ABSENT, Action::Remove);
        let spoken = State::established(ACK, ACK);
        becomes(spoken, Event::PodSegment(RST), State::established(ACK, ACK | RST), Action::Refresh);
    }

    #[test]
    fn a_syn_ack_does_not_count_as_speaking() {
        let repeated = State::established(ACK, SYN);
        becomes(State::established(ACK, 0), Event::PodSegment(SYN_ACK), repeated, Action::Refresh);
        assert!(repeated.may_repeat_syn_ack());
        assert!(!State::established(ACK | RST, SYN).may_repeat_syn_ack());
        assert!(!after(repeated, &[Event::PodSegment(ACK)]).may_repeat_syn_ack());
    }

    #[test]
    fn an_entry_times_out_after_the_silence_that_its_state_allows() {
        let established = |client, pod| State::established(client, pod);
        let cases = [
            (TCP, half_open(Phase::REQUESTED), REQUESTED_NS),
            (TCP, half_open(Phase::REPLIED), REPLIED_NS),
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
    fn only_the_reply_to_a_handshake_in_progress_belongs_to_it() {
        for flags in [SYN_ACK, RST, RST | ACK, SYN] {
            assert!(belongs_to_handshake(flags, || true) && !belongs_to_handshake(flags, || false));
        }
        for flags in [ACK, FIN | ACK, 0] {
            assert!(!belongs_to_handshake(flags, || true));
        }
        assert!(is_direct_handshake(SYN_ACK, || false) && is_direct_handshake(SYN, || false));
        assert!(!is_direct_handshake(SYN_ACK, || true) && !is_direct_handshake(RST, || false));
    }

    #[test]
    fn phases_of_the_cache_have_two_bits_and_names() {
        for phase in [Phase::REQUESTED, Phase::REPLIED, Phase::ESTABLISHED, Phase::REFUSED] {
            assert_eq!(Phase::from_bits(phase.bits()), phase);
            assert_ne!(phase.name(), Phase::ABSENT.name());
        }
    }

    fn events() -> impl Strategy<Value = Event> {
        let flags = || select(vec![SYN, SYN_ACK, ACK, ACK | PSH, FIN | ACK, RST, RST | ACK, 0]);
        prop_oneof![
            flags().prop_map(Event::ClientSegment),
            flags().prop_map(Event::PodSegment),
            Just(Event::ClientDatagram),
            Just(Event::PodDatagram),
            (any::<u64>(), select(vec![TCP, UDP, SCTP]), any::<bool>())
                .prop_map(|(ns, protocol, is_crowded)| Event::Silence { ns, protocol, is_crowded }),
        ]
    }

    fn is_of_pod(event: Event) -> bool {
        matches!(event, Event::PodSegment(_) | Event::PodDatagram)
    }

    proptest! {
        /// The Pod alone never gets an entry, whatever it sends.
        #[test]
        fn no_sequence_of_a_pods_packets_opens_a_flow(events in vec(events().prop_filter("Pod", |e| is_of_pod(*e)), 0..20)) {
            prop_assert_eq!(after(State::ABSENT, &events), State::ABSENT);
        }

        /// A sender whom the Pod does not answer never gets an established entry.
        #[test]
        fn no_sequence_of_a_clients_packets_establishes_a_flow(
            events in vec(events().prop_filter("client", |e| !is_of_pod(*e)), 0..20),
        ) {
            let state = after(State::ABSENT, &events);
            prop_assert!(matches!(state.phase, Phase::ABSENT | Phase::REQUESTED), "{:?}", state);
        }

        #[test]
        fn an_action_says_what_changed(events in vec(events(), 0..30)) {
            let mut state = State::ABSENT;
            for event in events {
                let (next, action) = step(state, event);
                match action {
                    Action::Ignore => prop_assert_eq!((state, next), (State::ABSENT, State::ABSENT)),
                    Action::Keep => prop_assert_eq!(state, next),
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
                    Action::Remove => prop_assert_eq!(next, State::ABSENT),
                }
                state = next;
            }
        }
    }
}

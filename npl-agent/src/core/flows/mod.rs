// SPDX-License-Identifier: Apache-2.0
//! Timeouts of connection tracking entries.
//!
//! The kernel evicts the least recently used entry of a full map. Ended connections would have it evict idle ones, so
//! they are removed earlier, and so are short exchanges of datagrams.

pub mod half_open;

use npl_common::flow::{
    FlowState, MAX_FLOWS,
    tcp_flag::{FIN, RST},
};

use super::model::Protocol;

/// One second in nanoseconds.
const SECOND: u64 = 1_000_000_000;
/// After RST, or FIN of both sides: the kernel's conntrack waits as long for the last acknowledgement.
const ENDED: u64 = 30 * SECOND;
/// After FIN of one side, as in the kernel's conntrack.
const HALF_CLOSED: u64 = 120 * SECOND;
/// An established TCP connection, as in the kernel's conntrack.
const OPEN: u64 = 5 * 24 * 3600 * SECOND;
/// UDP, as RFC 4787 requires.
const DATAGRAMS: u64 = 300 * SECOND;
/// UDP while the table is crowded, as in the kernel's conntrack for an exchange of few datagrams.
const DATAGRAMS_CROWDED: u64 = 30 * SECOND;
/// An established SCTP association, which sends heartbeats every 30 s (RFC 9260).
const ASSOCIATION: u64 = 3600 * SECOND;

/// Whether the table is crowded: idle connections would soon be evicted.
pub const fn is_crowded(flows: usize) -> bool {
    flows > MAX_FLOWS as usize / 2
}

/// Whether an entry has been idle for its timeout. `now` is in nanoseconds of the clock of [`FlowState::last_seen_ns`].
pub fn is_expired(protocol: Protocol, flow: &FlowState, now: u64, is_crowded: bool) -> bool {
    let silent = now.saturating_sub(flow.last_seen_ns);
    let (client, pod) = (flow.client_tcp_flags, flow.pod_tcp_flags);
    let has_ended = client & pod & FIN != 0 || (client | pod) & RST != 0;
    let limit = match protocol {
        Protocol::Udp if is_crowded => DATAGRAMS_CROWDED,
        Protocol::Udp => DATAGRAMS,
        Protocol::Tcp | Protocol::Sctp if has_ended => ENDED,
        Protocol::Tcp | Protocol::Sctp if (client | pod) & FIN != 0 => HALF_CLOSED,
        Protocol::Tcp => OPEN,
        Protocol::Sctp => ASSOCIATION,
    };
    silent >= limit
}

#[cfg(test)]
mod tests {
    use npl_common::flow::tcp_flag::ACK;

    use super::*;

    const SEEN: u64 = 1_000_000 * SECOND;

    fn flow(client_tcp_flags: u8, pod_tcp_flags: u8) -> FlowState {
        FlowState {
            last_seen_ns: SEEN,
            generation: 1,
            touched: 0,
            ifindex: 2,
            node_port: 61_000,
            client_tcp_flags,
            pod_tcp_flags,
        }
    }

    #[test]
    fn a_flow_is_over_when_it_was_silent_for_as_long_as_its_state_allows() {
        let states = [
            (Protocol::Tcp, flow(ACK, ACK), OPEN),
            (Protocol::Tcp, flow(ACK | FIN, ACK), HALF_CLOSED),
            (Protocol::Tcp, flow(ACK, ACK | FIN), HALF_CLOSED),
            (Protocol::Tcp, flow(ACK | FIN, ACK | FIN), ENDED),
            (Protocol::Tcp, flow(ACK | RST, ACK), ENDED),
            (Protocol::Tcp, flow(ACK, RST), ENDED),
            (Protocol::Udp, flow(0, 0), DATAGRAMS),
            (Protocol::Sctp, flow(0, 0), ASSOCIATION),
            (Protocol::Sctp, flow(FIN, FIN), ENDED),
        ];
        for (protocol, state, limit) in states {
            for is_crowded in [false, true] {
                let is_shorter = is_crowded && protocol == Protocol::Udp;
                let limit = if is_shorter { DATAGRAMS_CROWDED } else { limit };
                assert!(!is_expired(protocol, &state, SEEN + limit - 1, is_crowded), "{protocol} {state:?}");
                assert!(is_expired(protocol, &state, SEEN + limit, is_crowded), "{protocol} {state:?}");
            }
        }
    }

    #[test]
    fn a_flow_that_was_seen_since_the_clock_was_read_is_not_over() {
        assert!(!is_expired(Protocol::Tcp, &flow(FIN, FIN), 0, true));
    }
}

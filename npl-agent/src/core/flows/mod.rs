// SPDX-License-Identifier: Apache-2.0
//! How long a flow is remembered that says nothing.
//!
//! The kernel takes the flow that was not asked for the longest out of a full table. Connections that ended would have it
//! take open ones that are silent, so they are taken out before, and so are short conversations of datagrams.

pub mod half_open;

use npl_common::flow::{
    FlowState, MAX_FLOWS,
    tcp_flag::{FIN, RST},
};

use super::model::Protocol;

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;
/// As connection tracking waits for the last acknowledgement, or what is repeated for want of it.
const ENDED: u64 = 30 * SECOND;
/// One side has nothing more to say; as connection tracking.
const HALF_CLOSED: u64 = 120 * SECOND;
/// Of TCP that is open, as connection tracking.
const OPEN: u64 = 5 * 24 * 3600 * SECOND;
/// As RFC 4787 asks of who translates datagrams.
const DATAGRAMS: u64 = 300 * SECOND;
/// The same where flows are many: as connection tracking, of those that may be a question and its answers.
const DATAGRAMS_CROWDED: u64 = 30 * SECOND;
/// Of SCTP that is open, which says something every thirty seconds (RFC 9260).
const ASSOCIATION: u64 = 3600 * SECOND;

/// Whether so many flows are a crowd. Where the table is full, questions and answers would have the kernel take open
/// connections out that are silent.
pub const fn is_crowded(flows: usize) -> bool {
    flows > MAX_FLOWS as usize / 2
}

/// Whether a flow has been silent for so long that nothing more is to come of it, or of what it stands for in a crowd. `now`
/// is nanoseconds of the clock of [`FlowState::last_seen_ns`].
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

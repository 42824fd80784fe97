// SPDX-License-Identifier: Apache-2.0
//! Decides which conntrack entries the sweeper removes, by the state machine of [`npl_common::conntrack`].
//!
//! If a flow table is full, the kernel evicts the least recently used entry, which may belong to an idle open
//! connection. The sweeper removes closed connections and short UDP exchanges before the table is full.

pub mod evictions;
pub mod half_open;

use npl_common::{
    conntrack::{Action, Event, State, step},
    flow::FlowState,
};

/// Whether a flow table with room for `capacity` flows is crowded, that is, more than half full. UDP flows of a crowded
/// table have a shorter timeout.
pub const fn is_crowded(flows: usize, capacity: usize) -> bool {
    flows > capacity / 2
}

/// Whether an entry of the flow table has timed out. `protocol` is a number of [`npl_common::mapping::protocol`].
/// `now` is the time in nanoseconds, by the same clock as [`FlowState::last_seen_ns`].
pub fn is_expired(protocol: u8, flow: &FlowState, now: u64, is_crowded: bool) -> bool {
    let silence = Event::Silence { ns: now.saturating_sub(flow.last_seen_ns), protocol, is_crowded };
    step(State::established(flow.client_tcp_flags, flow.pod_tcp_flags), silence).1 == Action::Remove
}

#[cfg(test)]
mod tests {
    use npl_common::{
        conntrack::{CLOSED_NS, HALF_CLOSED_NS, TCP_NS, UDP_CROWDED_NS, UDP_NS},
        flow::tcp_flag::{ACK, FIN},
        mapping::protocol::{TCP, UDP},
    };

    use super::*;

    const SEEN: u64 = 1_000_000_000_000_000;

    fn flow(client_tcp_flags: u8, pod_tcp_flags: u8) -> FlowState {
        FlowState {
            last_seen_ns: SEEN,
            generation: 1,
            refreshed: 0,
            pod_acknowledgement: 0,
            node_port: 61_000,
            client_tcp_flags,
            pod_tcp_flags,
        }
    }

    #[test]
    fn an_entry_expires_by_the_time_since_its_last_refresh() {
        let cases = [
            (TCP, flow(ACK, ACK), false, TCP_NS),
            (TCP, flow(ACK | FIN, ACK), false, HALF_CLOSED_NS),
            (TCP, flow(ACK | FIN, ACK | FIN), true, CLOSED_NS),
            (UDP, flow(0, 0), false, UDP_NS),
            (UDP, flow(0, 0), true, UDP_CROWDED_NS),
        ];
        for (protocol, state, is_crowded, limit) in cases {
            assert!(!is_expired(protocol, &state, SEEN + limit - 1, is_crowded), "{protocol} {state:?}");
            assert!(is_expired(protocol, &state, SEEN + limit, is_crowded), "{protocol} {state:?}");
        }
    }

    #[test]
    fn an_entry_refreshed_after_the_clock_was_read_does_not_expire() {
        assert!(!is_expired(TCP, &flow(FIN, FIN), 0, true));
    }

    #[test]
    fn a_table_is_crowded_above_half_of_its_size() {
        assert!(!is_crowded(50, 100) && is_crowded(51, 100));
    }
}

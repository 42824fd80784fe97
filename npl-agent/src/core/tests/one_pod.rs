// SPDX-License-Identifier: Apache-2.0
//! A node port number belongs to one Pod. AKO and F5 CIS ignore the protocol of an entry, so a TCP pool also has the
//! number of a Pod's UDP entry, and both send to a withdrawn entry for a while.

use proptest::{collection::vec, prelude::*};

use super::properties::{Event, cluster_event, fates, frontend, happen, start};

/// Events of a cluster in which only the agent writes annotations and mappings. Without `hostPort`, whose numbers users
/// choose.
fn event() -> impl Strategy<Value = Event> {
    let cluster_event = cluster_event().prop_map(|mut event| {
        if let Event::Pod(pod) = &mut event {
            pod.ports.iter_mut().for_each(|port| port.host_port = None);
        }
        event
    });
    prop_oneof![
        16 => cluster_event,
        1 => frontend().prop_map(Event::Steal),
        1 => frontend().prop_map(Event::Return),
        1 => frontend().prop_map(Event::Send),
        1 => frontend().prop_map(Event::Cease),
        6 => (0..4_usize).prop_map(Event::Deliver),
        10 => fates().prop_map(Event::Pass),
        6 => (0..3_usize, fates()).prop_map(|(count, fates)| Event::Serve(count, fates)),
        4 => (0..3_usize).prop_map(Event::Answer),
        2 => (0..50_u64).prop_map(|seconds| Event::Idle(seconds * 1_000)),
        2 => (0..50_u64).prop_map(|seconds| Event::Wait(seconds * 1_000)),
        4 => Just(Event::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// No number that a published or recently withdrawn entry of one Pod names leads to another Pod, by any protocol.
    #[test]
    fn a_number_that_one_pod_has_or_had_recently_never_leads_to_another(events in vec(event(), 0..60)) {
        let mut chaos = start();
        chaos.world.is_undisturbed = true;
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
    }
}

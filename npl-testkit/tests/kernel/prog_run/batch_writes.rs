// SPDX-License-Identifier: Apache-2.0
//! Tests mappings that are written in one batch.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use npl_agent::core::model::{Backend, Family, Frontend};
use npl_agent::datapath::DatapathError;
use npl_common::mapping::MAX_MAPPINGS;
use npl_common::names::MAP_MAPPING_V4;

use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, SECOND_NODE_PORT, Tcp, Udp, client, family, from, length, node, node_ip,
    other_pod_ip, pod, pod_ip, to, udp, with_family, with_mappings,
};
use crate::counters::{first_request, reply};
use crate::lab::{Lab, mapping};

/// Asserts that a request to a node port reaches the Pod, and that the Pod's reply comes from the node port.
#[track_caller]
fn is_served(lab: &mut Lab, node_port: u16, pod: SocketAddr) {
    let nat_address = SocketAddr::from((node_ip(), node_port));
    let (question, answer) = (udp(client(), nat_address, b"hello"), udp(pod, client(), b"hello yourself"));
    let counted = format!("{node_port}/udp");
    lab.ingress(&question).is(&to(&question, pod), first_request(&counted, length(&question)));
    lab.egress(&answer).is(&from(&answer, nat_address), reply(&counted, length(&answer)));
}

#[test]
fn mappings_of_one_batch_translate_and_count_independently() {
    for family in Family::ALL {
        with_family(family, |lab| {
            lab.set_addresses(&[node_ip()]);
            let pod_at = |number: u16| SocketAddr::from((pod_ip(), POD_PORT + number));
            let wanted = (0..40).map(|number| mapping(Udp, NODE_PORT + number, pod_at(number), GENERATION)).collect();
            assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
            assert_eq!(lab.datapath.mappings().unwrap(), wanted, "the kernel must have exactly these mappings");
            (0..40).for_each(|number| is_served(lab, NODE_PORT + number, pod_at(number)));
        });
    }
}

/// In one batch, a UDP mapping moves to another Pod, a new UDP mapping takes over the endpoint that the moved mapping
/// has left, and a new TCP mapping uses the TCP endpoint of the same Pod port. The new UDP mapping must be served,
/// although the move alone would remove its endpoint.
#[test]
fn new_mappings_take_over_an_endpoint_that_moves_in_the_same_batch() {
    with_mappings(|lab| {
        let other_pod = (other_pod_ip(), POD_PORT).into();
        let third = SECOND_NODE_PORT + 1;
        let wanted = BTreeMap::from([
            mapping(Udp, NODE_PORT, other_pod, GENERATION + 1),
            mapping(Udp, SECOND_NODE_PORT, pod(), GENERATION),
            mapping(Tcp, third, pod(), GENERATION),
        ]);
        assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
        is_served(lab, NODE_PORT, other_pod);
        is_served(lab, SECOND_NODE_PORT, pod());
    });
}

#[test]
fn invalid_mapping_of_a_batch_is_refused_alone() {
    with_mappings(|lab| {
        let other_family = if family() == Family::V4 { "fd00::a:5" } else { "10.0.0.5" };
        let (wrong, backend) = mapping(Udp, SECOND_NODE_PORT, pod(), GENERATION);
        let mut wanted: BTreeMap<Frontend, Backend> =
            (2..5).map(|number| mapping(Udp, NODE_PORT + number, pod(), GENERATION)).collect();
        wanted.insert(wrong, Backend { pod_ip: other_family.parse().unwrap(), ..backend });
        let refused = lab.datapath.upsert_mappings(&wanted);
        assert!(matches!(refused.get(&wrong), Some(DatapathError::WrongFamily(_))), "{refused:?}");
        assert_eq!(refused.len(), 1, "{refused:?}");
        // All accepted mappings have the same Pod port, whose replies are counted for the mapping that was written
        // last.
        is_served(lab, NODE_PORT + 4, pod());
    });
}

/// The kernel aborts a batch at the first element that it rejects, but the agent must write all other mappings.
#[test]
fn mappings_beyond_the_map_size_are_refused_and_all_others_written() {
    with_family(Family::V4, |lab| {
        lab.set_addresses(&[node_ip()]);
        let ports = 1..=u16::try_from(MAX_MAPPINGS / 2 + 1).unwrap();
        let both = |port| [Tcp, Udp].map(|protocol| mapping(protocol, port, pod(), GENERATION));
        let wanted: BTreeMap<Frontend, Backend> = ports.flat_map(both).collect();
        let refused = lab.datapath.upsert_mappings(&wanted);
        assert_eq!(refused.len(), 2, "{refused:?}");
        let has_no_room = |error: &DatapathError| matches!(error, DatapathError::Map { name: MAP_MAPPING_V4, .. });
        assert!(refused.values().all(has_no_room), "{refused:?}");
        let there = lab.datapath.mappings().unwrap();
        assert!(wanted.keys().all(|frontend| there.contains_key(frontend) != refused.contains_key(frontend)));
    });
}

/// A new mapping must not inherit the counters of a removed one.
#[test]
fn counters_of_a_new_batch_start_at_zero() {
    with_mappings(|lab| {
        let (gone, _) = mapping(Udp, NODE_PORT, pod(), GENERATION);
        lab.ingress(&udp(client(), node(), b"hello"));
        lab.datapath.remove_mapping(gone).unwrap();
        let wanted = (1..4).map(|number| mapping(Udp, NODE_PORT + number, pod(), GENERATION)).collect();
        assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
        let records = lab.datapath.tables.records().unwrap();
        let of_new = records.iter().filter(|record| wanted.contains_key(&record.frontend));
        let counted: Vec<u64> = of_new.map(|record| record.stats.request_packets).collect();
        assert_eq!(counted, [0, 0, 0]);
    });
}

#[test]
fn shared_endpoint_stays_until_its_last_mapping_is_removed() {
    with_mappings(|lab| {
        let wanted: BTreeMap<Frontend, Backend> =
            (1..4).map(|number| mapping(Udp, NODE_PORT + number, pod(), GENERATION)).collect();
        assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
        (0..3).for_each(|number| lab.remove(family(), Udp, NODE_PORT + number));
        is_served(lab, NODE_PORT + 3, pod());
    });
}

// SPDX-License-Identifier: Apache-2.0
//! Mappings that are written together.

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

/// The client asks by a node port, and the Pod answers.
#[track_caller]
fn talk(lab: &mut Lab, node_port: u16, pod: SocketAddr) {
    let asked = SocketAddr::from((node_ip(), node_port));
    let (question, answer) = (udp(client(), asked, b"hello"), udp(pod, client(), b"hello yourself"));
    let counted = format!("{node_port}/udp");
    lab.ingress(&question).is(&to(&question, pod), first_request(&counted, length(&question)));
    lab.egress(&answer).is(&from(&answer, asked), reply(&counted, length(&answer)));
}

#[test]
fn each_of_many_new_mappings_translates_and_counts_by_itself() {
    for family in Family::ALL {
        with_family(family, |lab| {
            lab.set_addresses(&[node_ip()]);
            let pod_at = |number: u16| SocketAddr::from((pod_ip(), POD_PORT + number));
            let wanted = (0..40).map(|number| mapping(Udp, NODE_PORT + number, pod_at(number), GENERATION)).collect();
            assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
            assert_eq!(lab.datapath.mappings().unwrap(), wanted, "the kernel holds what was wanted");
            (0..40).for_each(|number| talk(lab, NODE_PORT + number, pod_at(number)));
        });
    }
}

/// One moves to another Pod, and two new ones lead where it led: to a sender that is forgotten and known again.
#[test]
fn new_mappings_take_over_the_endpoint_that_another_leaves_at_the_same_time() {
    with_mappings(|lab| {
        let other_pod = (other_pod_ip(), POD_PORT).into();
        let third = SECOND_NODE_PORT + 1;
        let wanted = BTreeMap::from([
            mapping(Udp, NODE_PORT, other_pod, GENERATION + 1),
            mapping(Udp, SECOND_NODE_PORT, pod(), GENERATION),
            mapping(Tcp, third, pod(), GENERATION),
        ]);
        assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
        talk(lab, NODE_PORT, other_pod);
        talk(lab, SECOND_NODE_PORT, pod());
    });
}

#[test]
fn one_that_cannot_be_is_refused_alone() {
    with_mappings(|lab| {
        let strange = if family() == Family::V4 { "fd00::a:5" } else { "10.0.0.5" };
        let (wrong, backend) = mapping(Udp, SECOND_NODE_PORT, pod(), GENERATION);
        let mut wanted: BTreeMap<Frontend, Backend> =
            (2..5).map(|number| mapping(Udp, NODE_PORT + number, pod(), GENERATION)).collect();
        wanted.insert(wrong, Backend { pod_ip: strange.parse().unwrap(), ..backend });
        let refused = lab.datapath.upsert_mappings(&wanted);
        assert!(matches!(refused.get(&wrong), Some(DatapathError::WrongFamily(_))), "{refused:?}");
        assert_eq!(refused.len(), 1, "{refused:?}");
        // The one that was written last is what the Pod's replies are counted for.
        talk(lab, NODE_PORT + 4, pod());
    });
}

/// The kernel ends a batch at the first element that it refuses.
#[test]
fn what_has_no_room_is_refused_and_the_rest_is_there() {
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

/// What was counted for a mapping that is no more is nobody else's.
#[test]
fn counters_of_one_that_went_start_at_zero_for_those_that_come_together() {
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
fn an_endpoint_that_is_shared_stays_while_one_mapping_of_it_goes() {
    with_mappings(|lab| {
        let wanted: BTreeMap<Frontend, Backend> =
            (1..4).map(|number| mapping(Udp, NODE_PORT + number, pod(), GENERATION)).collect();
        assert!(lab.datapath.upsert_mappings(&wanted).is_empty());
        (0..3).for_each(|number| lab.remove(family(), Udp, NODE_PORT + number));
        talk(lab, NODE_PORT + 3, pod());
    });
}

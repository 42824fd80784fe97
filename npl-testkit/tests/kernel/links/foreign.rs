// SPDX-License-Identifier: Apache-2.0
//! Tests TC programs of other software that run before or after NPL's, and that end the chain of programs or continue
//! it.

use std::io::{self, ErrorKind};

use aya::programs::TcAttachType;
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::pins::Direction;
use npl_testkit::foreign::{BOTH, ENDS_THE_CHAIN, Foreign, HANDS_ON, Place};
use npl_testkit::topology::Options;
use npl_testkit::traffic::{UdpOptions, tcp_connect, udp_ask, udp_request, udp_socket};

use crate::world::World;

/// Attaches a third-party program to the uplink.
fn attach(world: &World, name: &str, verdict: i32, place: Place, hooks: &[TcAttachType]) -> Foreign {
    Foreign::attach(&world.run, name, &world.topology.client().uplink, verdict, place, hooks).unwrap()
}

/// Returns numbers of requests and replies that the mappings have counted.
fn counted(world: &World) -> (u64, u64) {
    let records = world.datapath.as_ref().unwrap().tables.records().unwrap();
    let sum = |of: fn(&npl_common::stats::MappingStats) -> u64| records.iter().map(|it| of(&it.stats)).sum();
    (sum(|stats| stats.request_packets), sum(|stats| stats.reply_packets))
}

/// Asserts that `npl-agent status` finds NPL's links on both hooks, whatever third-party programs are attached.
#[track_caller]
fn assert_reported_as_attached(world: &World) {
    let links = Inspection::read(world.bpffs.path()).unwrap().links;
    let mut directions: Vec<_> = links.into_values().flatten().map(Direction::as_str).collect();
    directions.sort_unstable();
    assert_eq!(directions, ["egress", "ingress"]);
}

#[track_caller]
fn error_kind<T: std::fmt::Debug>(result: anyhow::Result<T>) -> Option<ErrorKind> {
    result.unwrap_err().downcast_ref::<io::Error>().map(io::Error::kind)
}

#[test]
fn third_party_programs_after_npls_may_end_the_chain_or_not() {
    for verdict in [ENDS_THE_CHAIN, HANDS_ON] {
        let mut world = World::bare(1, Options::default());
        let _before_us = attach(&world, "before", verdict, Place::Behind, &BOTH);
        world.install();
        world.assert_answers();
        let _after_us = attach(&world, "after", verdict, Place::Behind, &BOTH);
        world.assert_answers();
    }
}

#[test]
fn third_party_programs_before_npls_that_continue_the_chain_change_nothing() {
    let world = World::new(1);
    let _ahead = attach(&world, "ahead", HANDS_ON, Place::Ahead, &BOTH);
    world.assert_answers();
}

/// A program that runs before NPL's at ingress ends the chain, so NPL's program does not run, and the host answers
/// instead of the Pod. The mappings' request counters stay at zero, although NPL's programs are still attached.
#[test]
fn third_party_program_that_ends_the_chain_before_npls_bypasses_request_translation() {
    let world = World::new(1);
    let ahead = attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Ingress]);
    for frontend in world.frontends() {
        assert_eq!(error_kind(tcp_connect(world.client(), frontend)), Some(ErrorKind::ConnectionRefused));
        let socket = udp_socket(world.client(), frontend, true).unwrap();
        assert_eq!(error_kind(udp_ask(&socket, "hello")), Some(ErrorKind::ConnectionRefused));
    }
    assert_eq!(counted(&world), (0, 0));
    assert_reported_as_attached(&world);
    drop(ahead);
    world.assert_answers();
}

/// A program that runs before NPL's at egress ends the chain. Requests reach the Pod, but the Pod's replies leave
/// untranslated, and clients drop them. The mappings count requests, but no replies.
#[test]
fn third_party_program_that_ends_the_chain_before_npls_bypasses_reply_translation() {
    let world = World::new(1);
    let ahead = attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Egress]);
    for frontend in world.frontends() {
        assert_eq!(error_kind(tcp_connect(world.client(), frontend)), Some(ErrorKind::TimedOut));
        let few = UdpOptions { attempts: 3, ..UdpOptions::default() };
        udp_request(world.client(), frontend, b"hello", few).unwrap_err();
    }
    let (requests, replies) = counted(&world);
    assert!(requests >= 8 && replies == 0, "{requests} requests, {replies} replies");
    assert_reported_as_attached(&world);
    drop(ahead);
    world.assert_answers();
}

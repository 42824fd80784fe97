// SPDX-License-Identifier: Apache-2.0
//! Programs of others that end the chain of their hook, or hand packets on, ahead of ours and behind.

use std::io::{self, ErrorKind};

use aya::programs::TcAttachType;
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::pins::Direction;
use npl_testkit::foreign::{BOTH, ENDS_THE_CHAIN, Foreign, HANDS_ON, Place};
use npl_testkit::topology::Options;
use npl_testkit::traffic::{UdpOptions, tcp_connect, udp_ask, udp_request, udp_socket};

use crate::world::World;

/// On the uplink.
fn attach(world: &World, name: &str, verdict: i32, place: Place, hooks: &[TcAttachType]) -> Foreign {
    Foreign::attach(&world.run, name, &world.topology.client().uplink, verdict, place, hooks).unwrap()
}

/// Requests and replies that the mappings have counted.
fn counted(world: &World) -> (u64, u64) {
    let records = world.datapath.as_ref().unwrap().tables.records().unwrap();
    let sum = |of: fn(&npl_common::stats::MappingStats) -> u64| records.iter().map(|it| of(&it.stats)).sum();
    (sum(|stats| stats.request_packets), sum(|stats| stats.reply_packets))
}

/// What `npl-agent status` goes by: our programs are where they belong, whatever others have done.
#[track_caller]
fn assert_seems_attached(world: &World) {
    let links = Inspection::read(world.bpffs.path()).unwrap().links;
    let mut sides: Vec<_> = links.into_values().flatten().map(Direction::as_str).collect();
    sides.sort_unstable();
    assert_eq!(sides, ["egress", "ingress"]);
}

#[track_caller]
fn kind_of<T: std::fmt::Debug>(result: anyhow::Result<T>) -> Option<ErrorKind> {
    result.unwrap_err().downcast_ref::<io::Error>().map(io::Error::kind)
}

#[test]
fn programs_behind_ours_may_end_the_chain_or_not() {
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
fn programs_ahead_of_ours_that_hand_on_change_nothing() {
    let world = World::new(1);
    let _ahead = attach(&world, "ahead", HANDS_ON, Place::Ahead, &BOTH);
    world.assert_answers();
}

/// Our programs are not reached, and the host answers as it would without us. Neither `status` nor the log tells: our own
/// programs are where they were, and the kernel lets nobody ask whether a program has run. Mappings that count no requests
/// do.
#[test]
fn program_ahead_of_ours_that_ends_the_chain_keeps_requests_from_us() {
    let world = World::new(1);
    let ahead = attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Ingress]);
    for frontend in world.frontends() {
        assert_eq!(kind_of(tcp_connect(world.client(), frontend)), Some(ErrorKind::ConnectionRefused));
        let socket = udp_socket(world.client(), frontend, true).unwrap();
        assert_eq!(kind_of(udp_ask(&socket, "anybody?")), Some(ErrorKind::ConnectionRefused));
    }
    assert_eq!(counted(&world), (0, 0));
    assert_seems_attached(&world);
    drop(ahead);
    world.assert_answers();
}

/// Requests reach the Pod, and its replies are its own, which no client takes. Mappings that count requests and no replies
/// tell.
#[test]
fn program_ahead_of_ours_that_ends_the_chain_keeps_replies_from_us() {
    let world = World::new(1);
    let ahead = attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Egress]);
    for frontend in world.frontends() {
        assert_eq!(kind_of(tcp_connect(world.client(), frontend)), Some(ErrorKind::TimedOut));
        let few = UdpOptions { attempts: 3, ..UdpOptions::default() };
        udp_request(world.client(), frontend, b"anybody?", few).unwrap_err();
    }
    let (requests, replies) = counted(&world);
    assert!(requests >= 8 && replies == 0, "{requests} requests, {replies} replies");
    assert_seems_attached(&world);
    drop(ahead);
    world.assert_answers();
}

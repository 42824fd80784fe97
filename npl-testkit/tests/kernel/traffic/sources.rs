// SPDX-License-Identifier: Apache-2.0
//! Tests allow-lists with real connections: allowed clients are served, and other clients are not.

use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use npl_common::reason::Reason;
use npl_testkit::poll;
use npl_testkit::traffic::{self, UdpOptions};

use crate::world::World;

/// Time limit of an answer to a dropped request, which the client retransmits.
const LIMIT: Duration = Duration::from_secs(20);

fn refused(world: &mut World) -> u64 {
    let reasons = world.datapath().tables.reasons().unwrap();
    reasons.iter().find(|(reason, _)| *reason == Reason::SourceRefused).unwrap().1
}

fn client_list(world: &World) -> String {
    world.client_ips().map(|ip| ip.to_string()).join(",")
}

#[test]
fn allowed_client_is_served_and_another_is_not() {
    let mut world = World::new(1);
    let list = client_list(&world);
    world.restrict(&list);
    world.assert_answers();
    assert_eq!(refused(&mut world), 0);
    world.restrict("203.0.113.0/24,2001:db8:ffff::/48");
    for frontend in world.frontends() {
        let before = refused(&mut world);
        assert!(traffic::tcp_connect(world.client(), frontend).is_err(), "{frontend} by TCP");
        assert!(refused(&mut world) > before, "the dropped SYN to {frontend} must be counted");
        let before = refused(&mut world);
        let udp = traffic::udp_request(world.client(), frontend, b"and by UDP?", UdpOptions::default());
        assert!(udp.is_err(), "{frontend} by UDP");
        assert!(refused(&mut world) > before, "the dropped request to {frontend} must be counted");
    }
    world.restrict(&list);
    world.assert_answers();
}

#[test]
fn live_connection_stops_when_its_source_is_removed_and_continues_when_it_is_added_again() {
    let mut world = World::new(1);
    let list = client_list(&world);
    world.restrict(&list);
    let connections = world.frontends().map(|frontend| traffic::tcp_connect(world.client(), frontend).unwrap());
    for connection in &connections {
        assert_eq!(traffic::tcp_ask(connection, "first?").unwrap().pod, "web-0");
    }
    world.restrict("");
    for connection in &connections {
        assert!(traffic::tcp_ask(connection, "second?").is_err(), "the request must be dropped");
    }
    assert!(refused(&mut world) > 0);
    world.restrict(&list);
    for connection in &connections {
        // The dropped request is answered after all, because the client's kernel retransmits it and the Pod still has
        // the connection.
        let mut answer = String::new();
        connection.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
        BufReader::new(connection).read_line(&mut answer).unwrap();
        assert!(answer.contains("web-0"), "{answer}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The first agent on a Node is killed at steps of its start.

use std::time::Duration;

use npl_agent::datapath::cleanup::remove_everything;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::node_state::{State, assert_same};
use npl_testkit::poll;
use npl_testkit::topology::Offload;
use npl_testkit::traffic::{self, Direction, Load, Request, Transfer};

use super::start::{Mechanism, Start};
use super::{
    LIMIT, QDISCS, assert_complete, fault_points, from_attachment, kill_at_fault_points, number_of_points,
    perform_in_process, state,
};
use crate::world::{POD_PORT, World, is_emulated, load_rate};

const MIB: u64 = 1024 * 1024;
/// The ports of a server on the Node: one outside of the range of node ports, and one inside of the range that no
/// mapping uses.
const HOST_PORTS: [u16; 2] = [9000, 61_050];

#[test]
fn the_next_agent_completes_a_first_start_that_was_killed_at_any_step() {
    kill_first_starts(Mechanism::Links);
}

#[test]
fn the_next_agent_completes_a_first_start_with_filters_that_was_killed_at_any_step() {
    kill_first_starts(Mechanism::Filters);
}

#[test]
fn the_next_agent_completes_a_first_start_with_xdp_that_was_killed_at_any_step() {
    kill_first_starts(Mechanism::LinksAndXdp);
}

/// Requests that match no mapping: to the Node itself, and directly to the Pods.
fn requests_of_others(world: &World) -> Vec<Request> {
    let to_host = world.node_ips().into_iter().zip(world.client_ips());
    let to_host = to_host.flat_map(|(ip, client)| HOST_PORTS.map(|port| ((ip, port).into(), "host", client)));
    let to_pods = world.pods.iter().flat_map(|(pod, _)| {
        let addresses = pod.ips().into_iter().zip(world.client_ips());
        addresses.map(|(ip, client)| ((ip, POD_PORT).into(), pod.name.as_str(), client))
    });
    let both = |(server, pod, client): (_, &str, _)| {
        [Protocol::Tcp, Protocol::Udp].map(|protocol| Request { protocol, server, pod: pod.to_owned(), client })
    };
    to_host.chain(to_pods).flat_map(both).collect()
}

/// Time limit for the kernel to detach programs, far above the usual duration.
const DETACH_LIMIT: Duration = Duration::from_secs(10);

/// Removes all of NPL's state, and waits until the kernel has detached the programs.
fn clean_up(world: &World, before: &State, stage: &str) {
    let (_, errors) = world.node().block_on(remove_everything(world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{stage}: {errors:?}");
    let mut found = State::new();
    let waited = poll::until("the kernel to detach the programs", DETACH_LIMIT, || {
        found = state(world);
        (found == *before).then_some(())
    });
    if waited.is_err() {
        assert_same(before, &found, stage);
    }
}

fn kill_first_starts(mechanism: Mechanism) {
    if is_emulated() {
        // The initial RAM disk of emulated kernels has no strace.
        return;
    }
    let world = World::without_state(2);
    if mechanism == Mechanism::LinksAndXdp {
        world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    }
    let _host = EchoServer::start_in(world.node(), "host", &HOST_PORTS).unwrap();
    let start = Start::new(&world, mechanism);
    let before = state(&world);
    let (_, trace) = perform_in_process(&world, &start, None, &|| {});
    let points = fault_points(&trace);
    let expected = state(&world);
    world.assert_answers();
    clean_up(&world, &before, "after a complete start");

    let load = Load::start(world.client(), load_rate(), requests_of_others(&world));
    let direct = (world.pods[0].0.ips()[0], POD_PORT).into();
    let bytes = number_of_points() as u64 * 16 * MIB;
    let transfer = Transfer::start(world.client(), direct, Direction::Download, bytes, MIB / 4).unwrap();
    let others_are_served = |stage: &str| {
        load.replace(requests_of_others(&world));
        load.wait_for_answers(16, LIMIT).unwrap();
        assert_eq!(load.report().failures, [], "{stage}");
        assert!(!transfer.is_interrupted(), "{stage}: the transfer was interrupted");
        if mechanism == Mechanism::Filters {
            // While a clsact qdisc is added to a device or removed, the kernel itself drops packets that leave through
            // the device. The transfer retransmits such packets, but a lost datagram would be a failure of the load.
            load.replace(Vec::new());
        }
    };
    others_are_served("without an agent");
    let points = if mechanism == Mechanism::Links { &points } else { from_attachment(&points) };
    kill_at_fault_points(&world, &start, points, &|| {}, |point| {
        let stage = format!("killed at {point}");
        others_are_served(&stage);
        // The programs of the killed process translate to the right Pod, or not at all.
        if let Ok(answer) = traffic::tcp_request(world.client(), world.frontend(), "who are you?") {
            assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", world.client_ip()), "{stage}");
        }
        assert_complete(&world, &start, &expected, &stage, &|| {});
        others_are_served(&stage);
        clean_up(&world, &before, &stage);
    });
    assert_eq!(load.stop().failures, []);
    transfer.remove_rate_limit();
    assert_eq!(transfer.join().unwrap().bytes, bytes);
}

/// A qdisc that no record attributes to NPL would stay on the device after a cleanup.
#[test]
fn cleanup_removes_the_clsact_qdisc_of_a_start_that_was_killed_after_the_addition() {
    if is_emulated() {
        // The initial RAM disk of emulated kernels has no strace.
        return;
    }
    let world = World::without_state(1);
    let start = Start::new(&world, Mechanism::Filters);
    let before = state(&world);
    let (_, trace) = perform_in_process(&world, &start, None, &|| {});
    clean_up(&world, &before, "after a complete start");
    let points = fault_points(&trace);
    for point in &from_attachment(&points)[1..3] {
        let (is_killed, _) = perform_in_process(&world, &start, Some(point), &|| {});
        assert!(is_killed && state(&world)[QDISCS].contains("clsact"), "{point}");
        clean_up(&world, &before, &format!("killed at {point}"));
    }
}

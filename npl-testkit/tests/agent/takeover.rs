// SPDX-License-Identifier: Apache-2.0
//! Kills agents while they take over from ABI 1. The kernel tests `links::fault_points` kill at more steps, but do not
//! run the whole agent.

use npl_testkit::abi::{pretend_to_be, version};
use npl_testkit::agent::Agent;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{Direction, Load, Transfer};

use crate::fault_points::{mappings, number_of_points, points_of, spread, traced};
use crate::restart::writes;
use crate::world::{LIMIT, World};

const MIB: u64 = 1024 * 1024;
const PODS: [&str; 2] = ["web-0", "web-1"];

#[test]
fn agents_killed_at_any_step_of_a_takeover_from_abi_1_lose_no_traffic_and_the_next_agent_completes_it() {
    let mut world = World::new();
    world.create_node();
    // The first start lists the system calls.
    let trace = world.run.file("strace");
    world.agent = Some(Agent::start(traced(world.agent_options(&[]), &trace, &[])).unwrap());
    let calls = points_of(&trace);
    world.serve(&PODS);
    let (written, mapped) = (writes(&world, &PODS), mappings(&world));
    let client = world.topology.client().netns.clone();
    let load = Load::start(&client, 100, world.load_requests(&PODS));
    let server = world.address("web-0", Protocol::Tcp);
    let (bytes, rate) = (64 * MIB, MIB / 4);
    let transfers = [Direction::Upload, Direction::Download]
        .map(|direction| Transfer::start(&client, server, direction, bytes, rate).unwrap());
    let answered = |stage: &str| {
        load.wait_for_answers(50, LIMIT).unwrap();
        assert_eq!(load.report().failures, [], "{stage}");
    };

    world.agent().kill().unwrap();
    pretend_to_be(world.bpffs.path(), 1).unwrap();
    for point in spread(&calls, number_of_points()) {
        let mut victim = Agent::launch(traced(world.agent_options(&[]), &trace, &point.injection())).unwrap();
        // A call that another thread makes this time may not be reached; the agent is then killed when it is ready.
        if victim.wait_until_ready().is_ok() {
            victim.kill().unwrap();
        }
        answered(&format!("killed at {point:?}"));
    }
    world.start_agent(&[]);
    world.wait_for_log("detached the programs of other ABI versions that translate requests");
    world.agent().kill().unwrap();
    answered("killed while the programs of ABI 1 translated replies");
    assert!(version(world.bpffs.path(), 1).exists());

    world.start_agent(&[]);
    let is_alone = || (!version(world.bpffs.path(), 1).exists()).then_some(());
    poll::until("the removal of the pins of ABI 1", LIMIT, is_alone).unwrap();
    answered("after the takeover");
    assert_eq!(mappings(&world), mapped);
    assert_eq!(writes(&world, &PODS), written, "annotations were written");
    for transfer in transfers {
        assert!(!transfer.is_interrupted(), "a transfer was interrupted");
        transfer.remove_rate_limit();
        assert_eq!(transfer.join().unwrap().bytes, bytes);
    }
    assert_eq!(load.stop().failures, []);
}

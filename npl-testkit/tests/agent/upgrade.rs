// SPDX-License-Identifier: Apache-2.0
//! Tests upgrades from an agent of another ABI version, and rollbacks to that version, under load.
//!
//! `cargo xtask test --former-agent FILE` runs these tests, and passes the binary of the other agent in
//! `NPL_FORMER_AGENT`. The tests do not build this binary, because a build takes minutes.

use std::env;
use std::path::PathBuf;

use npl_common::names::{ABI_VERSION, PIN_ROOT};
use npl_testkit::agent::{Agent, Options};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{Direction, Load, Transfer};

use crate::restart::writes;
use crate::world::{LIMIT, World};

const MIB: u64 = 1024 * 1024;
/// The number of upgrades in one test. A rollback follows each upgrade except the last.
const ROUNDS: usize = 5;
const PODS: [&str; 2] = ["web-0", "web-1"];

fn former_agent(world: &World, flags: &[&str]) -> Options {
    let binary = env::var_os("NPL_FORMER_AGENT").map(PathBuf::from);
    let binary = binary.ok_or("NPL_FORMER_AGENT is not set").unwrap();
    Options { binary, ..world.agent_options(flags) }
}

/// Whether pins of an ABI version other than [`ABI_VERSION`] exist.
fn has_other_version(world: &World) -> bool {
    let versions = std::fs::read_dir(world.bpffs.path().join(PIN_ROOT)).unwrap();
    let own = format!("v{ABI_VERSION}");
    versions.map(|entry| entry.unwrap().file_name()).any(|name| name != own.as_str())
}

/// Kills the running agent with SIGKILL, and then starts the next agent.
fn replace(world: &mut World, next: Options) {
    world.agent().kill().unwrap();
    world.agent = None;
    world.agent = Some(Agent::start(next).unwrap());
}

/// Upgrades the agent `rounds` times, and rolls back after each upgrade except the last.
fn upgrade(flags: &[&str], rounds: usize) {
    let mut world = World::new();
    world.create_node();
    world.agent = Some(Agent::start(former_agent(&world, flags)).unwrap());
    world.serve(&PODS);
    let written = writes(&world, &PODS);
    let client = world.topology.client().netns.clone();
    let load = Load::start(&client, 200, world.load_requests(&PODS));
    let server = world.address("web-0", Protocol::Tcp);
    let transfers = [Direction::Upload, Direction::Download]
        .map(|direction| Transfer::start(&client, server, direction, 256 * MIB, 8 * MIB).unwrap());
    for round in 1..=rounds {
        let answered = |load: &Load| {
            load.wait_for_answers(100, LIMIT).unwrap();
            assert_eq!(load.report().failures, [], "round {round}");
        };
        let options = world.agent_options(flags);
        replace(&mut world, options);
        let is_alone = || (!has_other_version(&world)).then_some(());
        poll::until("the removal of the former version's pins", LIMIT, is_alone).unwrap();
        answered(&load);
        if round < rounds {
            let former = former_agent(&world, flags);
            replace(&mut world, former);
            answered(&load);
        }
    }
    for transfer in transfers {
        transfer.join().unwrap();
    }
    assert_eq!(load.stop().failures, []);
    assert_eq!(writes(&world, &PODS), written, "annotations were written");
}

#[test]
#[ignore = "needs an agent of another ABI version: cargo xtask test --former-agent FILE"]
fn upgrades_and_rollbacks_between_abi_versions_lose_nothing() {
    upgrade(&[], ROUNDS);
}

#[test]
#[ignore = "needs an agent of another ABI version: cargo xtask test --former-agent FILE"]
fn upgrades_and_rollbacks_with_offload_lose_nothing() {
    upgrade(&["--forwarding=offload"], ROUNDS);
}

#[test]
#[ignore = "needs an agent of another ABI version: cargo xtask test --former-agent FILE"]
fn an_upgrade_with_redirect_loses_nothing() {
    upgrade(&["--forwarding=redirect"], 1);
}

#[test]
#[ignore = "needs an agent of another ABI version: cargo xtask test --former-agent FILE"]
fn an_upgrade_with_xdp_loses_nothing() {
    upgrade(&["--attach=xdp"], 1);
}

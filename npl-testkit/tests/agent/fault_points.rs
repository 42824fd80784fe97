// SPDX-License-Identifier: Apache-2.0
//! Kills agents at system calls of their start: between any two steps of loading, pinning, attaching, moving state and
//! detaching. The datapath translates in every state that a killed agent leaves behind, and the next agent completes
//! the start.

use std::fs;
use std::path::{Path, PathBuf};

use npl_common::names::PROGRAM_DIR;
use npl_testkit::agent::{Agent, Options};
use npl_testkit::echo::Protocol;
use npl_testkit::strace::{self, Call};
use npl_testkit::traffic::{Direction, Load, Transfer};

use crate::restart::writes;
use crate::world::{LIMIT, World};

const MIB: u64 = 1024 * 1024;
const PODS: [&str; 2] = ["web-0", "web-1"];

/// The number of processes that a test kills, if `NPL_FAULT_POINTS` does not give another number.
const POINTS: usize = 3;

/// The number of points at which a test kills processes.
pub(crate) fn number_of_points() -> usize {
    strace::number_of_kills(POINTS).unwrap()
}

/// The forwarding modes of successive starts, so that each start also changes the programs of devices.
pub(crate) const MODES: [&str; 3] = ["stack", "redirect", "offload"];

/// Options of an agent that runs under strace. The tracer is a grandchild (`-D`), so that the process is the agent.
pub(crate) fn traced(mut options: Options, trace: &Path, further: &[String]) -> Options {
    options.wrapper = [&["strace", "-D"].map(str::to_owned)[..], &strace::arguments(trace, further)].concat();
    options
}

/// Returns the system calls of a start, from strace's output.
pub(crate) fn points_of(trace: &Path) -> Vec<Call> {
    strace::calls(&fs::read_to_string(trace).unwrap())
}

/// Returns `count` system calls at equal distances.
pub(crate) fn spread(calls: &[Call], count: usize) -> Vec<Call> {
    (0..count).map(|index| calls[calls.len() * (2 * index + 1) / (2 * count)].clone()).collect()
}

/// Lets the next agent find programs of another build, so that it loads, pins and attaches programs again.
fn rename_build(pins: &Path) {
    let folder = pins.join(PROGRAM_DIR);
    let mut builds: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    builds.sort();
    for (index, build) in builds.iter().enumerate() {
        fs::rename(build, folder.join(format!("another{index}"))).unwrap();
    }
}

/// Returns node port, protocol, and Pod address of each mapping in the kernel.
pub(crate) fn mappings(world: &World) -> Vec<String> {
    let of =
        |mapping: &serde_json::Value| ["nodePort", "protocol", "podIp"].map(|key| mapping[key].to_string()).join(" ");
    world.kernel_mappings().iter().map(of).collect()
}

#[test]
fn an_agent_killed_at_any_step_of_its_start_loses_no_traffic_and_the_next_agent_completes_the_start() {
    let points = number_of_points();
    let mut world = World::with_agent(&[]);
    world.serve(&PODS);
    let written = writes(&world, &PODS);
    let mapped = mappings(&world);
    assert_eq!(mapped.len(), 2 * PODS.len());
    let client = world.topology.client().netns.clone();
    let load = Load::start(&client, 100, world.load_requests(&PODS));
    let server = world.address("web-0", Protocol::Tcp);
    // The transfers are still running after the last start.
    let bytes = points as u64 * 16 * MIB;
    let transfers = [Direction::Upload, Direction::Download]
        .map(|direction| Transfer::start(&client, server, direction, bytes, MIB / 4).unwrap());

    // A start that is not interrupted lists the system calls.
    let trace = world.run.file("strace");
    world.agent().kill().unwrap();
    rename_build(&world.pins());
    let complete = traced(world.agent_options(&["--forwarding", MODES[0]]), &trace, &[]);
    world.agent = Some(Agent::start(complete).unwrap());
    let calls = points_of(&trace);
    assert!(calls.len() > 100, "strace shows only {} system calls", calls.len());

    let mut killed = 0;
    for point in spread(&calls, points) {
        let mode = MODES[(killed + 1) % MODES.len()];
        world.agent().kill().unwrap();
        rename_build(&world.pins());
        let options = world.agent_options(&["--forwarding", mode]);
        let mut victim = Agent::launch(traced(options.clone(), &trace, &point.injection())).unwrap();
        // A call that another thread makes this time may not be reached; the agent is then killed when it is ready.
        if victim.wait_until_ready().is_ok() {
            victim.kill().unwrap();
        } else {
            killed += 1;
        }
        let answered = |stage: &str| {
            load.wait_for_answers(50, LIMIT).unwrap();
            assert_eq!(load.report().failures, [], "{stage} {mode}, killed at {point:?}");
        };
        answered("without an agent, before");
        world.agent = Some(Agent::start(options).unwrap());
        answered("with the next agent,");
        assert_eq!(mappings(&world), mapped, "{mode}, killed at {point:?}");
        let folder = world.pins().join(PROGRAM_DIR);
        let builds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(builds.len(), 1, "{mode}, killed at {point:?}: {builds:?}");
    }
    assert!(killed * 2 > points, "only {killed} of {points} agents were killed during their start");
    assert_eq!(writes(&world, &PODS), written, "annotations were written");
    for transfer in transfers {
        assert!(!transfer.is_interrupted(), "a transfer was interrupted");
        transfer.remove_rate_limit();
        assert_eq!(transfer.join().unwrap().bytes, bytes);
    }
    assert_eq!(load.stop().failures, []);
}

// SPDX-License-Identifier: Apache-2.0
//! Kills agents and cleanups at steps of their work, and tests that the cleanup restores the Node's kernel state of
//! before the first agent, byte for byte, and that its dry run changes nothing.

use std::fs;
use std::path::Path;
use std::process::Command;

use aya::maps::{HashMap, MapData};
use npl_testkit::agent::{Agent, Options};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::node_state::{self, State, add_tree, assert_same};
use npl_testkit::strace::{self, Call};
use npl_testkit::tools;
use npl_testkit::topology::MASQUERADE;

use crate::fault_points::{MODES, number_of_points, points_of, spread, traced};
use crate::world::World;

/// A rule by which packets with a mark use the table `main`, so that the agent marks connections (see the tests
/// `guard`).
const RULE_OF_MARK: &str = "rule add fwmark 0x80/0x80 lookup main priority 1024";

/// Sysctls whose values change by themselves.
const COUNTERS: [&str; 1] = ["/proc/sys/net/netfilter/nf_conntrack_count"];

/// Returns all state of the Node's kernel that an agent could change.
fn state(world: &World, cgroup: &ClientCgroup) -> State {
    let node = world.topology.node();
    let further = [
        "nft list ruleset",
        "tc filter show dev eth0 ingress",
        "tc filter show dev eth0 egress",
        "tc filter show dev npl1 ingress",
        "tc filter show dev npl1 egress",
        "bpftool net show",
        "ip -details link show",
    ];
    let mut state = node_state::of_network(node, &further.map(str::to_owned)).unwrap();
    let mut show = Command::new("bpftool");
    let attached = tools::output(show.args(["cgroup", "show"]).arg(cgroup.path())).unwrap();
    state.insert("programs of the cgroup".to_owned(), attached);
    add_tree(world.bpffs.path(), &mut state).unwrap();
    node.run(|| add_sysctls(Path::new("/proc/sys/net"), &mut state)).unwrap();
    state
}

/// Adds the readable sysctls below a folder.
fn add_sysctls(folder: &Path, state: &mut State) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_sysctls(&path, state);
        } else if let Ok(value) = fs::read(&path)
            && !COUNTERS.iter().any(|counter| path == Path::new(counter))
        {
            state.insert(path.display().to_string(), String::from_utf8_lossy(&value).into_owned());
        }
    }
}

/// Runs the dry run, which must change nothing, and then the cleanup.
#[track_caller]
fn clean_up(world: &World, cgroup: &ClientCgroup, stage: &str) {
    let options = world.agent_options(&[]);
    let dirty = state(world, cgroup);
    let planned = options.command(&["cleanup", "--dry-run"]).unwrap();
    assert_same(&dirty, &state(world, cgroup), &format!("{stage}: the dry run has changed state"));
    let removed = options.command(&["cleanup"]).unwrap();
    let planned = planned.replace("WOULD REMOVE", "REMOVED");
    assert!(planned.split_whitespace().eq(removed.split_whitespace()), "{stage}: {planned}\n{removed}");
    assert_eq!(options.command(&["cleanup", "--dry-run"]).unwrap(), "nothing to remove\n", "{stage}");
}

/// Starts an agent that is killed at a system call. Returns whether the agent was killed before it was ready.
fn is_killed_at(point: &Call, options: Options, trace: &Path) -> bool {
    let mut victim = Agent::launch(traced(options, trace, &point.injection())).unwrap();
    let is_killed = victim.wait_until_ready().is_err();
    if !is_killed {
        victim.kill().unwrap();
    }
    is_killed
}

/// Returns a cleanup that runs under strace.
fn traced_cleanup(world: &World, trace: &Path, further: &[String]) -> Command {
    let options = world.agent_options(&[]);
    let mut command = options.netns.command("strace").unwrap();
    command
        .args(strace::arguments(trace, further))
        .arg(&options.binary)
        .args(["cleanup", "--bpffs"])
        .arg(&options.bpffs);
    command
}

/// Creates a Node with Pods, masquerading rules, policy rules, and objects of other software.
fn world_with_others() -> (World, ClientCgroup, String) {
    let mut world = World::new();
    world.create_node();
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    let (node, pod) = (world.topology.node(), &world.topology.pods()[0]);
    node.nft(MASQUERADE).unwrap();
    node.ip(&format!("{RULE_OF_MARK}\nrule add from {} lookup 100 priority 1536", pod.ip())).unwrap();
    node.tc(&format!("qdisc add dev {} clsact", pod.host_device.name())).unwrap();
    node.tc(&format!(
        "filter add dev {} ingress pref 10 protocol ip u32 match u32 0 0 flowid 1:1",
        pod.host_device.name()
    ))
    .unwrap();
    HashMap::<MapData, u32, u32>::create(1, 0).unwrap().pin(world.bpffs.path().join("foreign")).unwrap();
    let (cgroup, shown) = world.client_cgroup();
    (world, cgroup, shown)
}

#[test]
fn cleanup_after_a_crash_at_any_step_restores_the_state_of_before_the_first_agent() {
    let (mut world, cgroup, shown) = world_with_others();
    let before = state(&world, &cgroup);
    let trace = world.run.file("strace");
    let flags = |mode| ["--resync", "1s", "--cgroup", shown.as_str(), "--forwarding", mode];

    // A start and a cleanup that are not interrupted list the system calls.
    let complete = traced(world.agent_options(&flags(MODES[1])), &trace, &[]);
    world.agent = Some(Agent::start(complete).unwrap());
    world.assert_served("web-0");
    let starting = points_of(&trace);
    world.agent().kill().unwrap();
    let dirty = state(&world, &cgroup);
    assert_ne!(dirty["programs of the cgroup"], before["programs of the cgroup"]);
    assert_ne!(dirty["nft list ruleset"], before["nft list ruleset"]);
    tools::output(&mut traced_cleanup(&world, &trace, &[])).unwrap();
    let cleaning = points_of(&trace);
    assert_same(&before, &state(&world, &cgroup), "after a complete start");

    let (points, mut killed) = (number_of_points(), 0);
    for (index, point) in spread(&starting, points).iter().enumerate() {
        let stage = format!("{}, killed at {point:?}", MODES[index % MODES.len()]);
        killed += usize::from(is_killed_at(point, world.agent_options(&flags(MODES[index % MODES.len()])), &trace));
        clean_up(&world, &cgroup, &stage);
        assert_same(&before, &state(&world, &cgroup), &stage);
    }
    for point in spread(&cleaning, points) {
        world.start_agent(&flags(MODES[1]));
        world.assert_served("web-0");
        world.agent().kill().unwrap();
        killed += usize::from(tools::output(&mut traced_cleanup(&world, &trace, &point.injection())).is_err());
        clean_up(&world, &cgroup, &format!("the cleanup was killed at {point:?}"));
        assert_same(&before, &state(&world, &cgroup), &format!("the cleanup was killed at {point:?}"));
    }
    assert!(killed > points, "only {killed} of {} processes were killed", 2 * points);

    world.start_agent(&flags(MODES[1]));
    world.assert_served("web-0");
}

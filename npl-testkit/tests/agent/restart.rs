// SPDX-License-Identifier: Apache-2.0
//! Tests that the agent can be killed at any time: the datapath continues to translate, and the next agent changes no
//! kernel state.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use aya::programs::ProgramInfo;
use npl_common::names::{ABI_VERSION, PIN_ROOT, PROGRAM_DIR, PROGRAMS, SLOW_PATH_PROGRAMS, SOCKET_PROGRAMS};
use npl_testkit::agent::{Agent, Options};
use npl_testkit::cluster::Entry;
use npl_testkit::consumers::{Ako, Consumer, PoolPort, Pools};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::tools;
use npl_testkit::traffic::{self, Direction, Load, Transfer};

use crate::world::{LIMIT, POD_PORT, World};

const MIB: u64 = 1024 * 1024;

/// Returns all values that the Pods' annotations have had.
pub(crate) fn writes(world: &World, pods: &[&str]) -> Vec<Vec<Option<String>>> {
    pods.iter().map(|pod| world.annotations.history(pod).into_iter().map(|seen| seen.value).collect()).collect()
}

#[test]
fn killing_and_restarting_the_agent_loses_no_traffic_and_causes_no_write() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    world.enable_service();
    let pods = ["web-0", "web-1"];
    for pod in pods {
        world.create_pod(pod);
        world.assert_served(pod);
    }
    let (annotated, mapped) = (writes(&world, &pods), world.kernel_mappings().len());
    let load = Load::start(&world.topology.client().netns, 200, world.load_requests(&pods));
    let server = world.address("web-0", Protocol::Tcp);
    let transfer =
        Transfer::start(&world.topology.client().netns, server, Direction::Upload, 64 * MIB, 32 * MIB).unwrap();
    transfer.wait_for_share(0.1, LIMIT).unwrap();
    for _ in 0..3 {
        world.agent().kill().unwrap();
        world.agent().restart().unwrap();
    }
    transfer.wait_for_share(1.0, LIMIT).unwrap();
    transfer.join().unwrap();
    let report = load.stop();
    assert_eq!(report.failures, []);
    assert!(report.total() > 100, "the load sent too few requests: {report:?}");
    assert_eq!(writes(&world, &pods), annotated, "annotations were rewritten");
    assert_eq!(world.kernel_mappings().len(), mapped);
}

/// Returns the directories of pinned programs, one per build.
fn builds(world: &World) -> Vec<PathBuf> {
    let folder = world.bpffs.path().join(PIN_ROOT).join(format!("v{ABI_VERSION}")).join(PROGRAM_DIR);
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Returns the IDs of the pinned programs by name.
fn programs(world: &World) -> BTreeMap<String, u32> {
    let pins = builds(world).into_iter().flat_map(|build| fs::read_dir(build).unwrap());
    let named = pins.map(|entry| entry.unwrap().path()).filter_map(|pin| {
        let name = pin.file_name()?.to_str()?.to_owned();
        name.starts_with("npl_").then(|| (name, ProgramInfo::from_pin(&pin).unwrap().id()))
    });
    named.collect()
}

#[test]
fn a_restarted_agent_loads_no_program() {
    let (mut world, _cgroup) = World::with_local_clients(&[]);
    let before = programs(&world);
    assert_eq!(before.len(), 6 + SOCKET_PROGRAMS.len(), "device programs and socket programs: {before:?}");
    world.agent().kill().unwrap();
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    assert_eq!(programs(&world), before);
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    let build = builds(&world).pop().unwrap();
    let expected = format!("{} of {}", before.len(), build.file_name().unwrap().to_str().unwrap());
    assert!(status.contains(&expected), "{expected} is not in {status}");
}

/// Returns the number of speculation barriers in a pinned program.
fn barriers(world: &World, name: &str) -> usize {
    let pin = builds(world).pop().unwrap().join(name);
    let dump = tools::output(Command::new("bpftool").args(["prog", "dump", "xlated", "pinned"]).arg(pin)).unwrap();
    assert!(dump.lines().count() > 1000, "bpftool shows no instructions: {dump}");
    dump.matches("nospec").count()
}

#[test]
fn an_agent_uses_programs_that_were_loaded_with_more_privileges() {
    let mut world = World::new();
    world.create_node();
    let flags = ["--forwarding", "offload"];
    let options = Options { has_perfmon: false, ..world.agent_options(&flags) };
    let said = options.command(&["load"]).unwrap();
    let loaded = programs(&world);
    let named = PROGRAMS.len() + SOCKET_PROGRAMS.len() + 1;
    assert_eq!(said, format!("loaded {named} programs, without the kernel's barriers against speculation\n"));
    assert_eq!(loaded.len(), named + SLOW_PATH_PROGRAMS.len(), "{loaded:?}");
    assert_eq!(options.command(&["load"]).unwrap(), said);
    assert_eq!(programs(&world), loaded, "`load` must not replace existing programs");

    world.agent = Some(Agent::start(options.clone()).unwrap());
    world.serve(&["web-0"]);
    assert_eq!(programs(&world), loaded, "the agent must not load programs");
    assert_eq!(["npl_off_ingress", "npl_off_egress", "npl_off_pods"].map(|name| barriers(&world, name)), [0; 3]);
    let refused = options.command(&["load"]).unwrap_err();
    assert!(format!("{refused:#}").contains("an npl-agent runs on this Node"), "{refused:#}");
    world.agent().kill().unwrap();
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    assert_eq!(programs(&world), loaded);

    // Without the init container, the agent loads programs with speculation barriers. After the init container has
    // loaded programs without barriers, a restarted agent must use the programs without barriers.
    world.agent().kill().unwrap();
    options.command(&["cleanup"]).unwrap();
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    assert!(barriers(&world, "npl_off_ingress") > 100, "{:?}", builds(&world));
    world.agent().kill().unwrap();
    options.command(&["load"]).unwrap();
    assert_eq!(builds(&world).len(), 2, "the other build must stay pinned while attached links use its programs");
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    assert_eq!(barriers(&world, "npl_off_ingress"), 0, "{:?}", builds(&world));
    assert_eq!(builds(&world).len(), 1, "{:?}", builds(&world));
}

#[test]
fn an_agent_of_another_build_replaces_the_programs() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let before = programs(&world);
    let build = builds(&world).pop().unwrap();
    world.agent().kill().unwrap();
    fs::rename(&build, build.with_file_name("another")).unwrap();
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    assert_eq!(builds(&world), [build]);
    let now = programs(&world);
    assert!(now.len() == before.len() && now.iter().all(|(name, id)| before[name] != *id), "{before:?} {now:?}");
}

#[test]
fn changes_while_no_agent_runs_are_applied_at_the_next_start() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0", "web-1"]);
    let kept = world.wait_for_entries("web-1", 2);
    world.agent().kill().unwrap();
    world.delete_pod("web-0");
    world.create_pod("web-2");
    world.agent().restart().unwrap();
    world.assert_served("web-2");
    assert_eq!(world.wait_for_entries("web-1", 2), kept);
    world.wait_for_kernel_mappings(4);
}

/// While the agents of all Nodes are replaced, the load balancer keeps a removed member, as AKO does for up to 21 s.
/// Requests to this member must not reach another Pod.
#[test]
fn a_member_that_a_load_balancer_keeps_across_a_restart_leads_to_no_other_pod() {
    let mut world = World::with_agent(&["--quarantine", "10m", "--port-range", "61000-61005"]);
    world.create_service();
    world.enable_service();
    let started = Instant::now();
    let pool = |protocol| PoolPort { service: "web".to_owned(), target: POD_PORT, protocol };
    let ports = [Protocol::Tcp, Protocol::Udp].map(pool).to_vec();
    let mut pools = Pools::new(Consumer::Ako(Ako::Current), Duration::from_mins(5), ports);
    world.create_pod("web-0");
    world.assert_served("web-0");
    let annotation = |world: &World, pod: &str| world.annotations.history(pod).pop().and_then(|seen| seen.value);
    pools.observe("web-0", &["web"], annotation(&world, "web-0").as_deref(), started.elapsed());
    world.delete_pod("web-0");
    world.wait_for_kernel_mappings(0);
    pools.observe("web-0", &["web"], None, started.elapsed());
    world.agent().kill().unwrap();
    world.agent().restart().unwrap();
    world.create_pod("web-1");
    world.assert_served("web-1");
    pools.observe("web-1", &["web"], annotation(&world, "web-1").as_deref(), started.elapsed());
    let now = started.elapsed();
    assert_eq!(
        pools.members(now).filter(|member| member.pod == "web-0").count(),
        4,
        "the load balancer must keep the two members of web-0 in each pool"
    );
    let client = &world.topology.client().netns;
    let answers = |server, protocol| traffic::request(client, protocol, server, "who?").ok().map(|answer| answer.pod);
    assert_eq!(pools.misdirected(now, answers), []);
}

#[test]
fn mappings_removed_from_the_kernel_are_restored_without_a_write() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let annotated = writes(&world, &["web-0"]);
    world.agent().kill().unwrap();
    world.agent_options(&[]).command(&["cleanup"]).unwrap();
    assert!(world.kernel_mappings().is_empty());
    world.agent().restart().unwrap();
    world.wait_for_kernel_mappings(2);
    world.assert_served("web-0");
    assert_eq!(writes(&world, &["web-0"]), annotated, "the annotation was rewritten");
}

#[test]
fn a_changed_port_range_moves_only_node_ports_outside_it() {
    let mut world = World::with_agent(&["--port-range", "61000-61100"]);
    world.serve(&["web-0"]);
    world.agent().kill().unwrap();
    world.agent = None;
    world.start_agent(&["--port-range", "61500-61600"]);
    let moved = |value: Option<&str>| {
        value.and_then(|text| Entry::parse(text).ok()).is_some_and(|it| it.iter().all(|entry| entry.node_port >= 61500))
    };
    world.annotations.wait_for("web-0", LIMIT, moved).unwrap();
    world.assert_served("web-0");
}

/// If the agent continued without its pins, it would use other maps than the next agent and `npl-agent status`.
#[test]
fn an_agent_whose_pins_are_removed_exits_and_the_next_one_recreates_them() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let port = world.address("web-0", Protocol::Tcp);
    fs::remove_dir_all(world.bpffs.path().join(PIN_ROOT)).unwrap();
    let agent = world.agent();
    let status = poll::until("the agent to exit", LIMIT, || agent.process().exit_status()).unwrap();
    assert_eq!(status.0.code(), Some(1));
    let log = world.agent_log();
    assert!(log.contains("was removed or replaced while this agent was running"), "{log}");
    world.agent().restart().unwrap();
    world.wait_for_kernel_mappings(2);
    world.assert_answers(Protocol::Tcp, port, "web-0");
}

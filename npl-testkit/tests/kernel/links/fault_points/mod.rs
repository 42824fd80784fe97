// SPDX-License-Identifier: Apache-2.0
//! Kills a process that performs an agent's start, between any two steps of loading, pinning, attaching, copying and
//! detaching. Whatever the killed process leaves behind, the next start completes, and no packet goes wrong meanwhile.
//!
//! The process runs under strace, which kills the process at the entry of a system call. Only system calls that change
//! state of the kernel are fault points: a process that is killed at another call leaves the same state.

mod first_start;
mod start;
mod takeover;

use std::collections::BTreeSet;
use std::env;
use std::fmt;
use std::fs;
use std::mem;
use std::time::Duration;

use npl_testkit::node_state::{State, add_tree, assert_same};
use npl_testkit::process::Process;
use npl_testkit::strace::{self, Call};
use npl_testkit::{poll, tools};

use self::start::{PROCESS, START, Start};
use crate::world::World;

/// Time limit for the end of a process that performs a start.
const LIMIT: Duration = Duration::from_mins(1);

/// The number of processes that a test kills, if `NPL_FAULT_POINTS` does not give another number.
const POINTS: usize = 5;

/// The commands of the system call `bpf` that change state which outlives the process.
const COMMANDS: [&str; 8] = [
    "BPF_LINK_CREATE",
    "BPF_LINK_UPDATE",
    "BPF_MAP_DELETE_ELEM",
    "BPF_MAP_UPDATE_BATCH",
    "BPF_MAP_UPDATE_ELEM",
    "BPF_OBJ_PIN",
    "BPF_PROG_ATTACH",
    "BPF_PROG_DETACH",
];

/// A system call at which a process is killed.
#[derive(Clone, Debug)]
struct FaultPoint {
    call: Call,
    /// The name of the system call or, for `bpf`, the command.
    kind: String,
}

impl fmt::Display for FaultPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { name, position, text } = &self.call;
        write!(f, "call {position} of {name}, `{text}`")
    }
}

/// Returns the fault points in the output of strace: the calls that succeeded and changed state.
fn fault_points(trace: &str) -> Vec<FaultPoint> {
    let point = |call: Call| {
        let (_, arguments) = call.text.split_once('(')?;
        let command = arguments.split(',').next().unwrap_or_default();
        let kind = if call.name == "bpf" { command } else { &call.name }.to_owned();
        let is_change = call.name != "bpf" || COMMANDS.contains(&command);
        (is_change && !call.text.contains(") = -1 ")).then_some(FaultPoint { call, kind })
    };
    strace::calls(trace).into_iter().filter_map(point).collect()
}

/// Returns the indexes of fault points between distinct steps: the first and the middle call of each sequence of calls
/// of one kind. Such a sequence is one step, for example the pinning of maps, or the writes to maps.
fn steps(points: &[FaultPoint]) -> Vec<usize> {
    let mut steps = Vec::new();
    let mut first = 0;
    for run in points.chunk_by(|a, b| a.kind == b.kind) {
        steps.extend(BTreeSet::from([first, first + run.len() / 2]));
        first += run.len();
    }
    steps
}

/// Chooses `count` fault points at equal distances from [`steps`] or, if `count` is greater, from all fault points. The
/// first and the last step are always chosen.
fn chosen(points: &[FaultPoint], count: usize) -> Vec<&FaultPoint> {
    let steps = steps(points);
    report(&format!("{count} of {} steps, {} fault points", steps.len(), points.len()));
    let from = if count <= steps.len() { steps } else { (0..points.len()).collect() };
    let count = count.min(from.len());
    let last = (count - 1).max(1);
    (0..count).map(|index| &points[from[index * (from.len() - 1) / last]]).collect()
}

/// Returns the fault points from the attachment of the first program on. The earlier fault points are the same for all
/// mechanisms.
fn from_attachment(points: &[FaultPoint]) -> &[FaultPoint] {
    let is_attachment = |point: &FaultPoint| ["sendto", "BPF_LINK_CREATE"].contains(&point.kind.as_str());
    &points[points.iter().position(is_attachment).unwrap()..]
}

/// Performs a start in a process of its own, which is killed at a fault point. Without a fault point, the start is
/// complete. `await_replies` waits for the answers to all requests of before a takeover. Returns whether the process was
/// killed, and the output of strace.
fn perform_in_process(
    world: &World,
    start: &Start,
    point: Option<&FaultPoint>,
    await_replies: &dyn Fn(),
) -> (bool, String) {
    let trace = world.run.file("strace");
    let mut command = world.node().command("strace").unwrap();
    let injection = point.map(|point| point.call.injection());
    command.args(strace::arguments(&trace, injection.as_ref().map_or(&[], |arguments| arguments)));
    command.arg(env::current_exe().unwrap()).args(["--exact", PROCESS, "--ignored", "--test-threads=1", "--nocapture"]);
    command.env(START, serde_json::to_string(start).unwrap());
    let log = world.run.file("start.log");
    for file in [&start.waits, &start.continues].into_iter().filter(|file| file.exists()) {
        fs::remove_file(file).unwrap();
    }
    let mut process = Process::spawn("an agent's start", command, &log).unwrap();
    let ended = poll::until("the end of a start", LIMIT, || {
        if start.waits.exists() && !start.continues.exists() {
            await_replies();
            fs::write(&start.continues, "").unwrap();
        }
        process.exit_status()
    });
    let (status, _) = ended.unwrap();
    let is_complete = status.success();
    assert!(is_complete || point.is_some(), "{status}: {}", process.log_tail(15));
    (!is_complete, fs::read_to_string(&trace).unwrap())
}

/// The number of processes that a test kills.
fn number_of_points() -> usize {
    strace::number_of_kills(POINTS).unwrap()
}

/// Prints a line, which the test harness shows if the test fails.
#[expect(clippy::print_stdout, reason = "a developer needs the fault points of a failed test")]
fn report(text: &str) {
    println!("{text}");
}

/// Kills a start at each chosen fault point. `check` is called after each kill.
fn kill_at_fault_points(
    world: &World,
    start: &Start,
    points: &[FaultPoint],
    await_replies: &dyn Fn(),
    mut check: impl FnMut(&FaultPoint),
) {
    let chosen = chosen(points, number_of_points());
    for point in chosen {
        report(&format!("killed at {point}"));
        let (is_killed, _) = perform_in_process(world, start, Some(point), await_replies);
        assert!(is_killed, "the start was not killed at {point}");
        check(point);
    }
}

/// The command of tc whose output is the part of [`state`] with the uplink's qdiscs.
const QDISCS: &str = "qdisc show dev eth0";

/// Returns the state that an agent's start creates. Ids of programs and links are left out.
fn state(world: &World) -> State {
    let mut state = State::new();
    add_tree(world.bpffs.path(), &mut state).unwrap();
    let shown = [QDISCS, "filter show dev eth0 ingress", "filter show dev eth0 egress"];
    state.extend(shown.map(|line| (line.to_owned(), without_ids(&world.node().tc(line).unwrap()))));
    state.insert("ip link show".to_owned(), without_ids(&world.node().ip("link show dev eth0").unwrap()));
    let mut net = world.node().command("bpftool").unwrap();
    let net = tools::output(net.args(["net", "show"])).unwrap();
    state.insert("bpftool net show".to_owned(), without_ids(&net));
    state
}

/// Replaces the number after each word that ends in `id`, because the kernel gives each object a new id.
fn without_ids(text: &str) -> String {
    let mut words = Vec::new();
    let mut is_id = false;
    for word in text.split_whitespace() {
        let has_id = word.ends_with("id");
        words.push(if mem::replace(&mut is_id, has_id) { "*" } else { word });
    }
    words.join(" ")
}

/// Performs the start of the next agent. The state, the maps and the configuration must be those of a start that was not
/// killed, and every mapping must answer.
#[track_caller]
fn assert_complete(world: &World, start: &Start, expected: &State, stage: &str, await_replies: &(dyn Fn() + Sync)) {
    let mut next = world.node().run(|| start.perform(await_replies)).unwrap();
    assert_same(expected, &state(world), stage);
    next.check_pins().unwrap();
    assert_eq!(next.repairs.take(), [], "{stage}");
    // Each Pod has a mapping for each protocol in each family.
    assert_eq!(next.mappings().unwrap().len(), 4 * world.pods.len(), "{stage}");
    assert_eq!(next.tables.local_addresses().unwrap(), world.node_ips().into(), "{stage}");
    world.assert_answers();
}

#[test]
fn fault_points_are_the_calls_that_change_state() {
    let trace = "7 bpf(BPF_OBJ_GET, {pathname=\"/a\"}, 12) = 3\n7 bpf(BPF_OBJ_PIN, {pathname=\"/a\"}, 12) = 0\n\
                 7 mkdir(\"/b\", 0777) = 0\n7 write(1, \"\", 0) = 0\n7 bpf(BPF_OBJ_PIN, 0x7f, 12) = 0\n";
    let points = fault_points(trace);
    let shown: Vec<_> = points.iter().map(|point| (point.kind.as_str(), point.call.position)).collect();
    assert_eq!(shown, [("BPF_OBJ_PIN", 2), ("mkdir", 1), ("BPF_OBJ_PIN", 3)]);
    let chosen: Vec<_> = chosen(&points, 2).iter().map(|point| point.call.position).collect();
    assert_eq!(chosen, [2, 3]);
}

// SPDX-License-Identifier: Apache-2.0
//! Tests kernel conntrack with `--forwarding offload`. The stack sees a packet of each direction periodically, so that
//! live connections keep their conntrack entries, and the entries of ended connections time out.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use npl_agent::core::model::Family;
use npl_testkit::echo::Protocol;
use npl_testkit::traffic::{self, Direction, Transfer, udp_socket};
use npl_testkit::{poll, tools};

use super::firewall::counted;
use super::flow_offload::{LIMIT, offloading};
use crate::world::{World, is_emulated};

/// Counts packets that kernel conntrack treats as the start of a connection.
const COUNT_NEW: &str = "
table inet npl_begun {
  counter begun { }
  chain forward {
    type filter hook forward priority filter - 1; policy accept;
    ct state new counter name begun
  }
}";

/// Timeout in seconds that is longer than any test, even on a slow machine.
const LONG: u32 = 3600;

/// The number of UDP requests of a series, during which the test does nothing else. Without offload, the stack forwards
/// two packets for each request, so a series with fewer forwarded packets than requests is offloaded.
const QUESTIONS: u64 = 10;

/// The number of times that packets must renew an entry's remaining time during the test, and the number of series of
/// UDP requests in each family that must be offloaded.
const RENEWALS: u32 = 4;

/// The duration of a transfer at its rate, in seconds. The entries are observed for a few seconds, and the transfer
/// then continues without a rate limit.
const SECONDS: u64 = 128;

/// The sysctls with the timeouts of an open connection. Without acknowledgments or after retransmissions, kernel conntrack
/// applies shorter timeouts than that of an established connection.
const LIVE_TIMEOUTS: [&str; 3] = ["tcp_timeout_established", "tcp_timeout_unacknowledged", "tcp_timeout_max_retrans"];

/// The sysctls with the timeouts of a closing connection: one for each state from the first FIN to the entry's removal.
const CLOSING_TIMEOUTS: [&str; 5] = [
    "tcp_timeout_fin_wait",
    "tcp_timeout_close_wait",
    "tcp_timeout_last_ack",
    "tcp_timeout_time_wait",
    "tcp_timeout_close",
];

fn set_timeouts(world: &World, names: &[&str], seconds: u32) {
    for name in names {
        world.node().sysctl(&format!("net/netfilter/nf_conntrack_{name}"), &seconds.to_string()).unwrap();
    }
}

/// Kernel conntrack's entries of a protocol in the family of `server`, one line for each.
fn tracked(world: &World, protocol: Protocol, server: SocketAddr) -> Vec<String> {
    let family = if server.is_ipv4() { "ipv4" } else { "ipv6" };
    let protocol = protocol.to_string().to_lowercase();
    let arguments = ["-L", "-f", family, "-p", &protocol, "-o", "id"];
    let listed = tools::output(world.node().command("conntrack").unwrap().args(arguments)).unwrap();
    listed.lines().map(str::to_owned).collect()
}

/// Number of established TCP entries of kernel conntrack in each family.
fn established(world: &World) -> [usize; 2] {
    let is_established = |line: &&String| line.contains("ESTABLISHED");
    world.frontends().map(|server| tracked(world, Protocol::Tcp, server).iter().filter(is_established).count())
}

/// Waits for this number of established entries in each family.
#[track_caller]
fn wait_for_established(world: &World, count: usize) {
    let are_established = || (established(world) == [count; 2]).then_some(());
    poll::until(&format!("{count} established connections of each family"), LIMIT, are_established).unwrap();
}

/// Waits until kernel conntrack has no entry of a protocol in either family.
#[track_caller]
fn wait_until_timed_out(world: &World, protocol: Protocol) {
    let nothing = || world.frontends().iter().all(|server| tracked(world, protocol, *server).is_empty()).then_some(());
    let waited = poll::until("the timeout of all entries", LIMIT, nothing);
    let remaining = world.frontends().map(|server| tracked(world, protocol, server));
    assert!(waited.is_ok(), "{waited:?}: {remaining:?}");
}

/// The observed entries of one protocol, by address family and by the entry's ID.
///
/// The observation does not depend on the speed of the machine: the timeout is too long for an entry to time out, and
/// two readings of the remaining time, together with the clock, prove each renewal.
#[derive(Default)]
struct Observation {
    entries: BTreeMap<(bool, String), Renewals>,
}

/// How often packets have renewed the remaining time of an entry.
#[derive(Debug)]
struct Renewals {
    count: u32,
    /// The latest time since the start of the observation at which the entry times out unless a packet renews its
    /// remaining time.
    timeout_before: Duration,
}

impl Observation {
    /// Reads the entries of `protocol`, which must always be the same, `count` in each family.
    #[track_caller]
    fn read(&mut self, world: &World, protocol: Protocol, count: usize, start: Instant) {
        for server in world.frontends() {
            let before = start.elapsed();
            let lines = tracked(world, protocol, server);
            let after = start.elapsed();
            assert_eq!(lines.len(), count, "entries for {server}: {lines:?}");
            for line in lines {
                let id = line.split_whitespace().find(|field| field.starts_with("id=")).unwrap().to_owned();
                let remaining = remaining(&line);
                assert!(remaining > LONG / 2, "{line}");
                let remaining = Duration::from_secs(remaining.into());
                // The kernel rounds the remaining time down to seconds.
                let (earliest, latest) = (before + remaining, after + remaining + Duration::from_secs(1));
                let new = Renewals { count: 0, timeout_before: latest };
                let entry = self.entries.entry((server.is_ipv4(), id)).or_insert(new);
                if earliest > entry.timeout_before {
                    *entry = Renewals { count: entry.count + 1, timeout_before: latest };
                } else {
                    entry.timeout_before = entry.timeout_before.min(latest);
                }
            }
        }
        // A new entry has a new ID, so the number of observed entries would increase if an entry had timed out or had
        // been removed.
        assert_eq!(self.entries.len(), 2 * count, "{:?}", self.entries);
    }

    fn are_renewed(&self) -> bool {
        self.entries.values().all(|entry| entry.count >= RENEWALS)
    }
}

/// The number of seconds after which an entry times out, from its line of `conntrack -L`.
fn remaining(line: &str) -> u32 {
    line.split_whitespace().nth(2).unwrap().parse().unwrap()
}

/// Waits until packets have renewed each TCP entry, `count` in each family, several times.
#[track_caller]
fn wait_for_renewals(world: &World, count: usize) {
    let (start, mut observation) = (Instant::now(), Observation::default());
    let are_renewed = || {
        observation.read(world, Protocol::Tcp, count, start);
        assert_eq!(established(world), [count; 2]);
        observation.are_renewed().then_some(())
    };
    let renewed = poll::until("renewals of every entry", LIMIT, are_renewed);
    assert!(renewed.is_ok(), "{renewed:?}: {:?}", observation.entries);
}

/// Starts transfers in these directions in each family.
fn start(world: &World, directions: &[Direction]) -> Vec<Transfer> {
    let rate = if is_emulated() { 1 << 16 } else { 1 << 19 };
    let each =
        world.frontends().into_iter().flat_map(|server| directions.iter().map(move |direction| (server, *direction)));
    let start = |(server, direction)| Transfer::start(world.client(), server, direction, rate * SECONDS, rate).unwrap();
    each.map(start).collect()
}

/// Number of packets that NPL has translated, of requests and replies together.
fn translated(world: &mut World) -> u64 {
    let totals = Family::ALL.map(|family| world.datapath().tables.totals(family).unwrap());
    totals.iter().map(|total| total.request_packets + total.reply_packets).sum()
}

/// Ends the transfers, all of whose data must arrive. Without a rate limit, most of their packets must bypass the stack:
/// if the stack forwarded every packet, the entries would prove nothing about offloaded connections.
#[track_caller]
fn finish(world: &mut World, running: Vec<Transfer>) {
    assert!(running.iter().all(Transfer::is_running), "a transfer has ended before its entry was observed");
    let (forwarded_before, translated_before) = (counted(world, "forwarded"), translated(world));
    running.iter().for_each(Transfer::remove_rate_limit);
    for transfer in running {
        transfer.join().unwrap();
    }
    let forwarded = counted(world, "forwarded") - forwarded_before;
    let translated = translated(world) - translated_before;
    assert!(forwarded * 2 < translated, "the stack has forwarded {forwarded} of {translated} packets");
}

/// If the stack saw no packets of offloaded connections, no packet would renew the remaining time of their entries. The
/// entries would time out, and later packets of the connections would be invalid.
#[test]
fn kernel_conntrack_keeps_offloaded_connections() {
    let mut world = offloading();
    set_timeouts(&world, &LIVE_TIMEOUTS, LONG);
    let running = start(&world, &[Direction::Upload, Direction::Download]);
    wait_for_established(&world, 2);
    wait_for_renewals(&world, 2);
    finish(&mut world, running);
    assert_eq!(counted(&world, "invalid"), 0);
}

/// If kernel conntrack did not see the end of a connection, the connection's entry would stay for the timeout that the
/// test sets: an hour. The test also sets `nf_conntrack_tcp_timeout_unacknowledged` to an hour (by default five
/// minutes): the stack does not forward every acknowledgment, so kernel conntrack applies this timeout to live
/// connections.
#[test]
fn kernel_conntrack_keeps_one_way_offloaded_connections_with_longer_timeouts_and_sees_their_end() {
    let mut world = offloading();
    set_timeouts(&world, &LIVE_TIMEOUTS, LONG);
    set_timeouts(&world, &CLOSING_TIMEOUTS, 1);
    for direction in [Direction::Upload, Direction::Download] {
        let running = start(&world, &[direction]);
        wait_for_established(&world, 1);
        wait_for_renewals(&world, 1);
        finish(&mut world, running);
        wait_until_timed_out(&world, Protocol::Tcp);
    }
    assert_eq!(counted(&world, "invalid"), 0);
}

/// The IDs of kernel conntrack's entries show whether the entries are kept: after a timeout, the next datagram would
/// create an entry with another ID, as a new connection does.
#[test]
fn kernel_conntrack_keeps_offloaded_udp_flows_and_times_them_out_afterwards() {
    let timeouts = ["udp_timeout", "udp_timeout_stream"];
    let world = offloading();
    set_timeouts(&world, &timeouts, LONG);
    world.node().nft(COUNT_NEW).unwrap();
    let sockets = world.frontends().map(|server| udp_socket(world.client(), server, true).unwrap());
    let ask = |socket| assert_eq!(traffic::udp_ask(socket, "who?").unwrap().pod, "web-0");
    let (start, mut observation, mut offloaded) = (Instant::now(), Observation::default(), [0; 2]);
    let are_kept = || {
        for (socket, offloaded) in sockets.iter().zip(&mut offloaded) {
            let before = counted(&world, "forwarded");
            (0..QUESTIONS).for_each(|_| ask(socket));
            *offloaded += u32::from(counted(&world, "forwarded") - before < QUESTIONS);
        }
        observation.read(&world, Protocol::Udp, 1, start);
        (observation.are_renewed() && offloaded.iter().all(|count| *count >= RENEWALS)).then_some(())
    };
    let kept = poll::until("renewals of the entries of offloaded flows", LIMIT, are_kept);
    assert!(kept.is_ok(), "{kept:?}: {:?}, {offloaded:?} series of requests were offloaded", observation.entries);
    for server in world.frontends() {
        let lines = tracked(&world, Protocol::Udp, server);
        assert!(lines.iter().all(|line| line.contains("[ASSURED]") && !line.contains("[UNREPLIED]")), "{lines:?}");
    }
    assert_eq!(world.node().packets_counted("inet npl_begun begun").unwrap(), 2, "one new flow in each family");
    assert_eq!(counted(&world, "invalid"), 0);
    // The next packets that the stack forwards shorten the remaining time of the entries.
    set_timeouts(&world, &timeouts, 1);
    let are_shortened = || {
        sockets.iter().for_each(ask);
        let lines = world.frontends().map(|server| tracked(&world, Protocol::Udp, server)).concat();
        lines.iter().all(|line| remaining(line) <= 1).then_some(())
    };
    poll::until("the shorter timeout", LIMIT, are_shortened).unwrap();
    wait_until_timed_out(&world, Protocol::Udp);
}

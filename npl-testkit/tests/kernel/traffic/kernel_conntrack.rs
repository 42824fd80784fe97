// SPDX-License-Identifier: Apache-2.0
//! Tests kernel conntrack with `--forwarding offload`. The stack sees a packet of each direction periodically, so that
//! live connections keep their conntrack entries, and the entries of ended connections time out.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use npl_testkit::echo::Protocol;
use npl_testkit::traffic::{self, Direction, Transfer, udp_socket};
use npl_testkit::{poll, tools};

use super::flow_offload::{LIMIT, counted, offloading};
use crate::world::World;

/// Counts packets that kernel conntrack treats as the start of a connection.
const COUNT_NEW: &str = "
table inet npl_begun {
  counter begun { }
  chain forward {
    type filter hook forward priority filter - 1; policy accept;
    ct state new counter name begun
  }
}";

/// Timeout in seconds: half of [`LIVE`]. With any kernel configuration, the timeout is longer than the 256 jiffies
/// after which an offloaded flow returns to the stack.
const SHORT: u32 = 4;
/// Timeout in seconds that is longer than any test.
const LONG: u32 = 3600;

/// The number of questions that a UDP socket sends before the other socket's turn. Both turns must end within
/// [`SHORT`], also on an emulated processor.
const QUESTIONS: usize = 10;

/// The duration of a flow. An entry without packets would time out within half of this duration.
const LIVE: Duration = Duration::from_secs(8);

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

/// Starts transfers in these directions in each family, at a rate.
fn start(world: &World, directions: &[Direction], bytes: u64, rate: u64) -> Vec<Transfer> {
    let each =
        world.frontends().into_iter().flat_map(|server| directions.iter().map(move |direction| (server, *direction)));
    each.map(|(server, direction)| Transfer::start(world.client(), server, direction, bytes, rate).unwrap()).collect()
}

/// Kernel conntrack's timeouts are four seconds. If the stack saw no packets of offloaded connections, their entries
/// would time out, and their later packets would be invalid.
#[test]
fn kernel_conntrack_keeps_offloaded_connections() {
    let world = offloading();
    set_timeouts(&world, &["tcp_timeout_established", "tcp_timeout_unacknowledged"], SHORT);
    let rate = 1 << 20;
    let bytes = rate * LIVE.as_secs();
    let running = start(&world, &[Direction::Upload, Direction::Download], bytes, rate);
    wait_for_established(&world, 2);
    let are_running = || running.iter().all(|transfer| transfer.moved() < bytes / 4 * 3);
    while are_running() {
        let established = established(&world);
        // If a transfer has ended after the loop's check, kernel conntrack has no established entry for it.
        assert!(established == [2; 2] || !are_running(), "{established:?}");
    }
    for transfer in running {
        assert_eq!(transfer.join().unwrap().bytes, bytes);
    }
    assert_eq!(counted(&world, "invalid"), 0);
}

/// If kernel conntrack did not see the end of a connection, the connection's entry would stay for the timeout that the
/// test sets: an hour. The test also sets `nf_conntrack_tcp_timeout_unacknowledged` to an hour (by default five
/// minutes): the stack does not forward every acknowledgment, so kernel conntrack applies this timeout to live
/// connections.
#[test]
fn kernel_conntrack_keeps_one_way_offloaded_connections_with_longer_timeouts_and_sees_their_end() {
    let world = offloading();
    set_timeouts(&world, &["tcp_timeout_established", "tcp_timeout_unacknowledged"], LONG);
    set_timeouts(&world, &CLOSING_TIMEOUTS, 1);
    let rate = 4 << 20;
    for direction in [Direction::Upload, Direction::Download] {
        let running = start(&world, &[direction], rate * 4, rate);
        wait_for_established(&world, 1);
        let are_running = || running.iter().all(|transfer| transfer.moved() < rate * 2);
        while are_running() {
            for server in world.frontends() {
                let lines = tracked(&world, Protocol::Tcp, server);
                if !are_running() {
                    break;
                }
                let [line] = &lines[..] else { panic!("there is not exactly one entry: {lines:?}") };
                let remaining: u32 = line.split_whitespace().nth(2).unwrap().parse().unwrap();
                assert!(remaining > LONG / 2, "{line}");
            }
        }
        for transfer in running {
            assert_eq!(transfer.join().unwrap().bytes, rate * 4);
        }
        wait_until_timed_out(&world, Protocol::Tcp);
    }
    assert_eq!(counted(&world, "invalid"), 0);
}

/// Sends requests from each socket in turn for the duration of the flows. Returns the number of requests, the ids of
/// all conntrack entries, and each family's last entry as text.
fn send_requests(world: &World, sockets: &[UdpSocket; 2]) -> (u64, [BTreeSet<String>; 2], [String; 2]) {
    let (since, mut questions) = (Instant::now(), 0);
    let (mut ids, mut last) = ([const { BTreeSet::new() }; 2], [const { String::new() }; 2]);
    while since.elapsed() < LIVE {
        for (family, (socket, server)) in sockets.iter().zip(world.frontends()).enumerate() {
            for _ in 0..QUESTIONS {
                assert_eq!(traffic::udp_ask(socket, &format!("question {questions}")).unwrap().pod, "web-0");
                questions += 1;
            }
            let [line] = &tracked(world, Protocol::Udp, server)[..] else {
                panic!("there is not exactly one entry for {server}")
            };
            ids[family].extend(line.split_whitespace().find(|field| field.starts_with("id=")).map(str::to_owned));
            last[family].clone_from(line);
        }
    }
    (questions, ids, last)
}

/// The ids of kernel conntrack's entries show whether the entries are kept: after a timeout, the next datagram would
/// create an entry with another id, as a new connection.
#[test]
fn kernel_conntrack_keeps_offloaded_udp_flows_and_times_them_out_afterwards() {
    let world = offloading();
    set_timeouts(&world, &["udp_timeout", "udp_timeout_stream"], SHORT);
    world.node().nft(COUNT_NEW).unwrap();
    let sockets = world.frontends().map(|server| udp_socket(world.client(), server, true).unwrap());
    let before = counted(&world, "forwarded");
    let (questions, ids, last) = send_requests(&world, &sockets);
    let forwarded = counted(&world, "forwarded") - before;
    assert!(forwarded > 0 && forwarded * 3 < questions * 2, "{forwarded} forwarded packets for {questions} requests");
    for (ids, last) in ids.iter().zip(&last) {
        assert_eq!(ids.len(), 1, "entries of one UDP flow: {ids:?}");
        assert!(last.contains("[ASSURED]") && !last.contains("[UNREPLIED]"), "{last}");
    }
    assert_eq!(world.node().packets_counted("inet npl_begun begun").unwrap(), 2, "one new flow in each family");
    assert_eq!(counted(&world, "invalid"), 0);
    wait_until_timed_out(&world, Protocol::Udp);
}

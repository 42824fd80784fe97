// SPDX-License-Identifier: Apache-2.0
//! Connection tracking beside `--forwarding offload`, which shows it a packet of each direction now and then: it keeps what
//! is alive, and nothing else.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use npl_testkit::echo::Protocol;
use npl_testkit::traffic::{self, Direction, Transfer, udp_socket};
use npl_testkit::{poll, tools};

use super::past_the_stack::{LIMIT, counted, offloading};
use crate::world::World;

/// Packets that open a connection of their own, as connection tracking sees it.
const BEGINNINGS_ARE_COUNTED: &str = "
table inet npl_begun {
  counter begun { }
  chain forward {
    type filter hook forward priority filter - 1; policy accept;
    ct state new counter name begun
  }
}";

/// More than 256 jiffies as any kernel was built, and far less than [`LIVE`].
const SHORT: u32 = 4;
/// Longer than any test.
const LONG: u32 = 3600;

/// How long a flow goes on: an entry of which nothing is seen would be gone by half of it.
const LIVE: Duration = Duration::from_secs(8);

/// Of a connection that ends: every state between its first FIN and nothing.
const ENDING: [&str; 5] = [
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

/// What connection tracking has of a protocol in the family of `server`, a line for each connection.
fn tracked(world: &World, protocol: Protocol, server: SocketAddr) -> Vec<String> {
    let family = if server.is_ipv4() { "ipv4" } else { "ipv6" };
    let protocol = protocol.to_string().to_lowercase();
    let arguments = ["-L", "-f", family, "-p", &protocol, "-o", "id"];
    let listed = tools::output(world.node().command("conntrack").unwrap().args(arguments)).unwrap();
    listed.lines().map(str::to_owned).collect()
}

/// The connections of each family that connection tracking calls established.
fn established(world: &World) -> [usize; 2] {
    let is_established = |line: &&String| line.contains("ESTABLISHED");
    world.frontends().map(|server| tracked(world, Protocol::Tcp, server).iter().filter(is_established).count())
}

/// Waits until there are so many, in each family.
#[track_caller]
fn wait_for_established(world: &World, count: usize) {
    let are_established = || (established(world) == [count; 2]).then_some(());
    poll::until(&format!("{count} established connections of each family"), LIMIT, are_established).unwrap();
}

/// Waits until connection tracking has nothing of a protocol, in either family.
#[track_caller]
fn wait_until_forgotten(world: &World, protocol: Protocol) {
    let nothing = || world.frontends().iter().all(|server| tracked(world, protocol, *server).is_empty()).then_some(());
    let waited = poll::until("the end of what is tracked", LIMIT, nothing);
    let left = world.frontends().map(|server| tracked(world, protocol, server));
    assert!(waited.is_ok(), "{waited:?}: {left:?}");
}

/// Transfers in these directions by each family, at a rate.
fn start(world: &World, directions: &[Direction], bytes: u64, rate: u64) -> Vec<Transfer> {
    let each = world.frontends().into_iter().flat_map(|server| directions.iter().map(move |it| (server, *it)));
    each.map(|(server, direction)| Transfer::start(world.client(), server, direction, bytes, rate).unwrap()).collect()
}

/// Their entries would be gone after four seconds if connection tracking saw nothing of them, and what comes then belongs to
/// no connection that it knows.
#[test]
fn connection_tracking_keeps_live_connections() {
    let world = offloading();
    set_timeouts(&world, &["tcp_timeout_established", "tcp_timeout_unacknowledged"], SHORT);
    let rate = 1 << 20;
    let bytes = rate * LIVE.as_secs();
    let running = start(&world, &[Direction::Upload, Direction::Download], bytes, rate);
    wait_for_established(&world, 2);
    while running.iter().all(|it| it.moved() < bytes / 8 * 7) {
        assert_eq!(established(&world), [2; 2]);
    }
    for transfer in running {
        assert_eq!(transfer.join().unwrap().bytes, bytes);
    }
    assert_eq!(counted(&world, "invalid"), 0);
}

/// What it does not see end would stay for an hour. Not every acknowledgement takes the stack, so that connections are
/// forgotten sooner by default.
#[test]
fn connection_tracking_can_be_told_to_keep_silent_flows_as_long_as_others_and_sees_their_end() {
    let world = offloading();
    set_timeouts(&world, &["tcp_timeout_established", "tcp_timeout_unacknowledged"], LONG);
    set_timeouts(&world, &ENDING, 1);
    let rate = 4 << 20;
    for direction in [Direction::Upload, Direction::Download] {
        let running = start(&world, &[direction], rate * 4, rate);
        wait_for_established(&world, 1);
        while running.iter().all(|it| it.moved() < rate * 3) {
            for server in world.frontends() {
                let [line] = &tracked(&world, Protocol::Tcp, server)[..] else { panic!("one connection is tracked") };
                let left: u32 = line.split_whitespace().nth(2).unwrap().parse().unwrap();
                assert!(left > LONG / 2, "{line}");
            }
        }
        for transfer in running {
            assert_eq!(transfer.join().unwrap().bytes, rate * 4);
        }
        wait_until_forgotten(&world, Protocol::Tcp);
    }
    assert_eq!(counted(&world, "invalid"), 0);
}

/// Asks by each socket in turn for as long as flows are to live; questions, and the numbers and lines of all entries seen.
fn converse(world: &World, sockets: &[UdpSocket; 2]) -> (u64, [BTreeSet<String>; 2], [String; 2]) {
    let (since, mut questions) = (Instant::now(), 0);
    let (mut numbers, mut last) = ([const { BTreeSet::new() }; 2], [const { String::new() }; 2]);
    while since.elapsed() < LIVE {
        for (family, (socket, server)) in sockets.iter().zip(world.frontends()).enumerate() {
            for _ in 0..50 {
                assert_eq!(traffic::udp_ask(socket, &format!("question {questions}")).unwrap().pod, "web-0");
                questions += 1;
            }
            let [line] = &tracked(world, Protocol::Udp, server)[..] else { panic!("one conversation by {server}") };
            numbers[family].extend(line.split_whitespace().find(|word| word.starts_with("id=")).map(str::to_owned));
            last[family].clone_from(line);
        }
    }
    (questions, numbers, last)
}

/// An entry that were gone would come again with the next datagram: as another one, by a packet that is new.
#[test]
fn connection_tracking_keeps_live_conversations_of_datagrams_and_forgets_them_afterwards() {
    let world = offloading();
    set_timeouts(&world, &["udp_timeout", "udp_timeout_stream"], SHORT);
    world.node().nft(BEGINNINGS_ARE_COUNTED).unwrap();
    let sockets = world.frontends().map(|server| udp_socket(world.client(), server, true).unwrap());
    let before = counted(&world, "forwarded");
    let (questions, numbers, last) = converse(&world, &sockets);
    let forwarded = counted(&world, "forwarded") - before;
    assert!(forwarded > 0 && forwarded * 4 < questions * 2, "{forwarded} packets of {questions} questions");
    for (numbers, last) in numbers.iter().zip(&last) {
        assert_eq!(numbers.len(), 1, "entries of one conversation: {numbers:?}");
        assert!(last.contains("[ASSURED]") && !last.contains("[UNREPLIED]"), "{last}");
    }
    assert_eq!(world.node().packets_counted("inet npl_begun begun").unwrap(), 2, "a conversation by each family");
    assert_eq!(counted(&world, "invalid"), 0);
    wait_until_forgotten(&world, Protocol::Udp);
}

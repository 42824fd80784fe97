// SPDX-License-Identifier: Apache-2.0
//! Tests the cached next hops of redirected replies: replies follow a changed neighbor, a changed route and a changed
//! path MTU although the programs look up the next hop of a flow only every 16 jiffies.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use aya::maps::{Map, MapData, PerCpuArray};
use npl_agent::datapath::Pins;
use npl_common::names::MAP_CACHED_NEXT_HOP;
use npl_common::next_hop::{CACHED_NEXT_HOPS, CachedNextHop};
use npl_testkit::poll;
use npl_testkit::traffic::{Direction, Transfer, transfer};

use super::redirect::{DROP_FORWARDED, redirected};
use crate::world::{World, is_emulated};

/// The time limit of each wait, above several retransmission timeouts of TCP.
const LIMIT: Duration = Duration::from_mins(1);

/// A locally administered MAC address that no device has.
const NEW_ADDRESS: &str = "02:00:5e:00:53:07";

/// Counts the packets that the stack forwards through the device `away0`.
const COUNT_AWAY: &str = "
table inet npl_test {
  counter away {}
  chain away {
    type filter hook postrouting priority filter; policy accept;
    oifname away0 counter name away
  }
}";

fn bytes() -> u64 {
    if is_emulated() { 1 << 20 } else { 16 << 20 }
}

/// Reads the elements of the cache that programs have written, of all processors.
fn cached(bpffs: &Path) -> Vec<CachedNextHop> {
    let map = MapData::from_pin(Pins::new(bpffs).map(MAP_CACHED_NEXT_HOP)).and_then(Map::from_map_data);
    let map: PerCpuArray<MapData, CachedNextHop> = map.and_then(PerCpuArray::try_from).unwrap();
    let elements = (0..CACHED_NEXT_HOPS).flat_map(|slot| map.get(&slot, 0).unwrap().to_vec());
    elements.filter(|element| element.ifindex != 0).collect()
}

fn download(world: &World, server: SocketAddr, rate: u64) -> Transfer {
    Transfer::start(world.client(), server, Direction::Download, bytes(), rate).unwrap()
}

/// The rate in bytes per second with which a transfer is still running when the test makes its change.
const RATE: u64 = 1 << 20;

#[test]
fn programs_cache_the_uplink_and_the_ethernet_header_of_replies() {
    let world = redirected();
    world.node().nft(DROP_FORWARDED).unwrap();
    let client = world.topology.client();
    let expected = [client.device.link_address().unwrap(), client.uplink.link_address().unwrap()].concat();
    for server in world.frontends() {
        let before = cached(world.bpffs.path()).len();
        assert_eq!(transfer(world.client(), server, Direction::Download, bytes()).unwrap().bytes, bytes());
        let elements = cached(world.bpffs.path());
        assert!(elements.len() > before, "a transfer from {server} must leave a new element");
        for element in elements {
            assert_eq!((element.ifindex, &element.ethernet[..]), (client.uplink.ifindex().unwrap(), &expected[..]));
        }
    }
}

/// The receiver's device discards frames with its former MAC address, so the transfers are complete only if the
/// programs use the new one.
#[test]
fn redirected_replies_follow_a_changed_link_layer_address() {
    let world = redirected();
    world.node().nft(DROP_FORWARDED).unwrap();
    let running = world.frontends().map(|server| download(&world, server, RATE));
    for transfer in &running {
        transfer.wait_for_share(0.01, LIMIT).unwrap();
    }
    world.client().ip(&format!("link set eth0 address {NEW_ADDRESS}")).unwrap();
    let neighbors = world.node().ip("neigh show dev eth0").unwrap();
    let addresses = neighbors.lines().filter_map(|line| line.split_whitespace().next());
    let lines: Vec<String> =
        addresses.map(|addr| format!("neigh replace {addr} lladdr {NEW_ADDRESS} dev eth0 nud reachable")).collect();
    assert!(!lines.is_empty(), "the Node has resolved its gateways");
    world.node().ip(&lines.join("\n")).unwrap();
    for transfer in running {
        transfer.remove_rate_limit();
        assert_eq!(transfer.join().unwrap().bytes, bytes());
    }
    let has_new = |element: &CachedNextHop| element.ethernet[..6] == [0x02, 0x00, 0x5e, 0x00, 0x53, 0x07];
    assert!(cached(world.bpffs.path()).iter().any(has_new), "no cached next hop has the new address");
}

/// The new route leads through a device that is not an uplink, so the stack forwards the replies, and counts them.
#[test]
fn redirected_replies_follow_a_changed_route() {
    let world = redirected();
    world.node().ip("link add away0 type veth peer name away1\nlink set away0 up\nlink set away1 up").unwrap();
    world.node().nft(COUNT_AWAY).unwrap();
    let counted = || world.node().packets_counted("inet npl_test away").unwrap();
    for (server, client) in world.frontends().into_iter().zip(world.client_ips()) {
        let running = download(&world, server, RATE);
        running.wait_for_share(0.01, LIMIT).unwrap();
        let before = counted();
        let line = format!("{client} dev away0");
        world.node().ip(&format!("route add {line}")).unwrap();
        poll::until("a reply by the new route", LIMIT, || (counted() > before).then_some(())).unwrap();
        world.node().ip(&format!("route del {line}")).unwrap();
        running.remove_rate_limit();
        assert_eq!(running.join().unwrap().bytes, bytes());
    }
}

/// The first segment above the path MTU follows small packets of the same flow, whose next hop is cached. The segment
/// must nevertheless reach the stack, which sends the Pod a path MTU error. The kernel uses the MTU of an IPv4 route for
/// forwarded packets only if the MTU is locked.
#[test]
fn pod_discovers_the_path_mtu_of_its_redirected_replies() {
    let world = redirected();
    for (server, client) in world.frontends().into_iter().zip(world.client_ips()) {
        let route = world.node().ip(&format!("route get {client}")).unwrap();
        let via = route.split_once(" via ").and_then(|(_, after)| after.split_whitespace().next()).unwrap();
        world.node().ip(&format!("route add {client} via {via} dev eth0 mtu lock 1300")).unwrap();
        assert_eq!(transfer(world.client(), server, Direction::Download, bytes()).unwrap().bytes, bytes());
        let learned = world.pod().netns.ip(&format!("route get {client}")).unwrap();
        assert!(learned.contains("mtu 1300"), "the Pod's route to {client}: {learned}");
    }
}

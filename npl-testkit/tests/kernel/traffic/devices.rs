// SPDX-License-Identifier: Apache-2.0
//! What a Node's addresses are on, and by what its replies leave: the agent itself chooses which devices carry the
//! programs. A kernel that was built without a kind of device cannot be asked about it; the emulated ones have all.

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use npl_agent::core::devices::{self, Device, DeviceSelection, Reason};
use npl_agent::netlink;
use npl_testkit::netns::Netns;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{Direction, UdpOptions, tcp_request, transfer, udp_request};
use npl_testkit::{poll, tools};

use crate::world::{NODE_PORT, World, is_emulated};

/// Kinds that every kernel has which this project is tested on.
const EVERYWHERE: [&str; 2] = ["bridge", "vxlan"];

/// Far longer than a bond needs to see its member's carrier.
const CARRIER_LIMIT: Duration = Duration::from_secs(10);

/// Whether the kernel has a kind of device; the emulated ones must, and so must every one have the usual kinds.
fn has(kind: &str, netns: &Netns, line: &str) -> bool {
    let made = netns.ip(line);
    let is_required = is_emulated() || EVERYWHERE.contains(&kind);
    assert!(made.is_ok() || !is_required, "{kind}: {made:?}");
    made.is_ok()
}

/// The devices that the agent would choose, and why.
fn chosen(world: &World) -> Vec<(Device, Reason)> {
    let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap().into_iter();
    let choose = |device: &Device| devices::choose(device, &DeviceSelection::Auto, &world.node_ips(), false).ok();
    let mut chosen: Vec<_> = all.filter_map(|device| choose(&device).map(|reason| (device, reason))).collect();
    chosen.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    chosen
}

/// The chosen ones but those that come unasked with a kind's first device, which nothing goes through.
fn names(chosen: &[(Device, Reason)]) -> Vec<(&str, Reason)> {
    let made = chosen.iter().filter(|(device, _)| ["eth0", "up0", "tun0"].contains(&device.name.as_str()));
    made.map(|(device, reason)| (device.name.as_str(), *reason)).collect()
}

fn install(world: &mut World, chosen: &[(Device, Reason)]) {
    let devices: Vec<Device> = chosen.iter().map(|(device, _)| device.clone()).collect();
    world.install_on(&devices);
}

/// Moves the Node's addresses to `up0`, which the agent chooses then, and by which everything is served: requests of both
/// families and protocols, and transfers by segments as large as devices make them.
#[track_caller]
fn assert_served_by_up0(mut world: World) {
    world.topology.move_node_to("up0").unwrap();
    let chosen = chosen(&world);
    assert_eq!(names(&chosen), [("up0", Reason::HasNodeAddress)]);
    install(&mut world, &chosen);
    world.assert_answers();
    let size = if is_emulated() { 1 << 17 } else { 4 << 20 };
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, size).unwrap().bytes, size);
        }
    }
}

#[test]
fn bridge_that_has_the_nodes_addresses_carries_the_programs() {
    let world = World::bare(1, Options::default());
    assert!(has("bridge", world.node(), "link add up0 type bridge forward_delay 0"));
    world.node().ip("link set eth0 master up0\nlink set up0 up").unwrap();
    assert_served_by_up0(world);
}

#[test]
fn vlan_that_has_the_nodes_addresses_carries_the_programs() {
    let world = World::bare(1, Options::default());
    if !has("vlan", world.node(), "link add link eth0 name up0 type vlan id 100") {
        return;
    }
    world.client().ip("link add link eth0 name up0 type vlan id 100").unwrap();
    for end in [world.node(), world.client()] {
        end.ip("link set up0 up").unwrap();
    }
    world.topology.move_client_to("up0").unwrap();
    assert_served_by_up0(world);
}

#[test]
fn bond_that_has_the_nodes_addresses_carries_the_programs() {
    let world = World::bare(1, Options::default());
    if !has("bond", world.node(), "link add up0 type bond mode active-backup miimon 50") {
        return;
    }
    world.node().ip("link set eth0 down\nlink set eth0 master up0\nlink set up0 up").unwrap();
    let is_up = || world.node().ip("link show dev up0").is_ok_and(|shown| shown.contains("state UP")).then_some(());
    poll::until("the bond's carrier", CARRIER_LIMIT, is_up).unwrap();
    assert_served_by_up0(world);
}

/// A Pod of another Node, whose packets come by the Nodes' own network, and to which the way back is a tunnel.
const FAR_POD: [&str; 2] = ["10.244.9.1", "fd00:10:244:9::1"];

/// The tunnel's own two ends, so that what is inside takes another way than the tunnel itself.
const NODE_END: &str = "192.0.2.20";
const FAR_END: &str = "198.51.100.2";

/// Requests come by the uplink, replies leave by a tunnel of this kind, and are the Node's there too. Without Ethernet in
/// it, the tunnel is asked for IPv4 only.
#[track_caller]
fn replies_leave_by(kind: &str, settings: impl Fn(&str, &str) -> String, has_ethernet: bool) {
    let mut world = World::bare(1, Options::default());
    if !has(kind, world.node(), &format!("link add tun0 type {kind} {}", settings(NODE_END, FAR_END))) {
        return;
    }
    let client = world.client();
    let far = settings(FAR_END, NODE_END);
    client.ip(&format!("link add tun0 type {kind} {far}\nlink set tun0 up\nlink set lo up")).unwrap();
    client.ip(&format!("route add {NODE_END}/32 dev eth0 src {FAR_END}")).unwrap();
    let own = format!("addr add {NODE_END}/24 dev eth0\nroute add {FAR_END}/32 via 192.0.2.1 dev eth0 src {NODE_END}");
    world.node().ip(&own).unwrap();
    let [v4, v6] = FAR_POD;
    client.ip(&format!("addr add {v4}/32 dev lo\nroute replace 192.0.2.0/24 dev eth0 src {v4}")).unwrap();
    world.node().ip("link set tun0 up\naddr add 10.244.0.200/32 dev tun0").unwrap();
    let way = if has_ethernet { "via 10.244.9.0 dev tun0 onlink" } else { "dev tun0" };
    world.node().ip(&format!("route add {v4}/32 {way}")).unwrap();
    if has_ethernet {
        let at_tunnel = "addr add 10.244.9.0/32 dev tun0\naddr add fd00:10:244:9::/128 dev tun0 nodad";
        let own = format!("addr add {v6}/128 dev lo nodad\nroute replace 2001:db8:0:1::/64 dev eth0 src {v6}");
        client.ip(&format!("{at_tunnel}\n{own}")).unwrap();
        world.node().ip(&format!("route add {v6}/128 via fd00:10:244:9:: dev tun0 onlink")).unwrap();
    }
    let chosen = chosen(&world);
    assert_eq!(names(&chosen), [("eth0", Reason::HasNodeAddress), ("tun0", Reason::IsTunnel)]);
    install(&mut world, &chosen);

    let before = received(world.client(), "tun0");
    let families = if has_ethernet { 2 } else { 1 };
    for (node_ip, far) in world.node_ips().into_iter().zip(FAR_POD).take(families) {
        let (server, far): (_, IpAddr) = ((node_ip, NODE_PORT).into(), far.parse().unwrap());
        let tcp = tcp_request(world.client(), server, "who are you?").unwrap();
        assert_eq!((tcp.pod.as_str(), tcp.client.ip()), ("web-0", far));
        let udp = udp_request(world.client(), server, b"and you?", UdpOptions::default()).unwrap().answer;
        assert_eq!((udp.pod.as_str(), udp.client.ip()), ("web-0", far));
        assert_eq!(transfer(world.client(), server, Direction::Download, 1 << 17).unwrap().bytes, 1 << 17);
    }
    assert!(received(world.client(), "tun0") > before, "replies have left by another way");
}

/// Packets that a device has received.
fn received(netns: &Netns, device: &str) -> u64 {
    let mut command = Command::new("ip");
    command.args(["-n", netns.name(), "-s", "-j", "link", "show", "dev", device]);
    let shown: serde_json::Value = serde_json::from_str(&tools::output(&mut command).unwrap()).unwrap();
    shown[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
}

#[test]
fn replies_that_leave_by_vxlan_are_the_nodes() {
    replies_leave_by("vxlan", |local, remote| format!("id 7 dstport 4789 local {local} remote {remote}"), true);
}

#[test]
fn replies_that_leave_by_geneve_are_the_nodes() {
    replies_leave_by("geneve", |_local, remote| format!("id 7 remote {remote}"), true);
}

#[test]
fn replies_that_leave_by_ipip_are_the_nodes() {
    replies_leave_by("ipip", |local, remote| format!("local {local} remote {remote}"), false);
}

#[test]
fn replies_that_leave_by_gre_are_the_nodes() {
    replies_leave_by("gre", |local, remote| format!("local {local} remote {remote}"), false);
}

// SPDX-License-Identifier: Apache-2.0
//! Tests devices that have the Node's addresses. The agent selects the devices to which the programs are attached. If
//! the host's kernel lacks a device type, the test of this type reports the lack and passes; emulated kernels have all
//! types.

use std::time::Duration;

use npl_agent::core::devices::{self, Device, DeviceSelection, UplinkReason};
use npl_agent::netlink;
use npl_testkit::kernel;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{Direction, transfer};

use crate::world::{World, is_emulated};

/// Device types that every tested kernel has.
const EVERYWHERE: [&str; 2] = ["bridge", "vxlan"];

/// Time limit for a bond to detect its member's carrier, far above the usual duration.
const CARRIER_LIMIT: Duration = Duration::from_secs(10);

/// Whether the kernel supports a device type. An emulated kernel must support every type, and every kernel must support
/// the types of [`EVERYWHERE`].
pub(super) fn has(kind: &str, netns: &Netns, line: &str) -> bool {
    kernel::make_device(netns, kind, line, EVERYWHERE.contains(&kind)).unwrap()
}

/// Returns the devices that the agent selects, with the reason for each choice.
pub(super) fn chosen(world: &World) -> Vec<(Device, UplinkReason)> {
    let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap().into_iter();
    let choose = |device: &Device| devices::choose(device, &DeviceSelection::Auto, &world.node_ips(), false).ok();
    let mut chosen: Vec<_> = all.filter_map(|device| choose(&device).map(|reason| (device, reason))).collect();
    chosen.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    chosen
}

/// Returns the agent's decision on one device.
pub(super) fn decided(world: &World, name: &str) -> Result<UplinkReason, UplinkReason> {
    let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
    let device = all.iter().find(|device| device.name == name).unwrap();
    devices::choose(device, &DeviceSelection::Auto, &world.node_ips(), false)
}

/// Returns the selected devices without those that the kernel creates automatically with the first device of a type.
pub(super) fn names(chosen: &[(Device, UplinkReason)]) -> Vec<(&str, UplinkReason)> {
    let made = chosen.iter().filter(|(device, _)| ["eth0", "up0", "tun0"].contains(&device.name.as_str()));
    made.map(|(device, reason)| (device.name.as_str(), *reason)).collect()
}

pub(super) fn install(world: &mut World, chosen: &[(Device, UplinkReason)]) {
    let devices: Vec<Device> = chosen.iter().map(|(device, _)| device.clone()).collect();
    world.install_on(&devices);
}

/// Moves the Node's addresses to `up0` and asserts that the agent selects this device. Asserts that requests over both
/// protocols and families, and transfers with the largest segments, are served there.
#[track_caller]
fn assert_served_by_up0(world: World) {
    world.topology.move_node_to("up0").unwrap();
    assert_served_by(world, "up0");
}

#[track_caller]
fn assert_served_by(mut world: World, device: &str) {
    let chosen = chosen(&world);
    assert_eq!(names(&chosen), [(device, UplinkReason::HasNodeAddress)]);
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
fn bridge_with_the_nodes_addresses_gets_the_programs() {
    let world = World::bare(1, Options::default());
    assert!(has("bridge", world.node(), "link add up0 type bridge forward_delay 0"));
    world.node().ip("link set eth0 master up0\nlink set up0 up").unwrap();
    assert_served_by_up0(world);
}

/// Creates a Node whose client is in a VLAN. The Node's VLAN device is `up0`, with these settings. `None` if the kernel
/// lacks VLAN devices.
fn with_vlan(settings: &str) -> Option<World> {
    let world = World::bare(1, Options::default());
    let add = "link add link eth0 name up0 type vlan id 100";
    if !has("vlan", world.node(), format!("{add} {settings}").trim_end()) {
        return None;
    }
    world.client().ip(add).unwrap();
    for netns in [world.node(), world.client()] {
        netns.ip("link set up0 up").unwrap();
    }
    world.topology.move_client_to("up0").unwrap();
    Some(world)
}

#[test]
fn vlan_with_the_nodes_addresses_gets_the_programs() {
    let Some(world) = with_vlan("") else { return };
    assert_served_by_up0(world);
}

#[test]
fn bond_with_the_nodes_addresses_gets_the_programs() {
    let world = World::bare(1, Options::default());
    if !has("bond", world.node(), "link add up0 type bond mode active-backup miimon 50") {
        return;
    }
    world.node().ip("link set eth0 down\nlink set eth0 master up0\nlink set up0 up").unwrap();
    let is_up = || world.node().ip("link show dev up0").is_ok_and(|shown| shown.contains("state UP")).then_some(());
    poll::until("the bond's carrier", CARRIER_LIMIT, is_up).unwrap();
    assert_served_by_up0(world);
}

#[test]
fn vlan_with_reorder_hdr_off_is_refused_until_it_is_on() {
    let Some(world) = with_vlan("reorder_hdr off") else { return };
    world.topology.move_node_to("up0").unwrap();
    assert_eq!(decided(&world, "up0"), Err(UplinkReason::LeavesTags));
    world.node().ip("link set up0 type vlan reorder_hdr on").unwrap();
    assert_served_by(world, "up0");
}

#[test]
fn gre_without_a_fixed_remote_address_is_refused() {
    let world = World::bare(0, Options::default());
    let refused = Err(UplinkReason::ShowsOuterHeaders);
    for (kind, settings, expected) in [
        ("gre", "local 192.0.2.10", refused),
        ("gre", "external", Ok(UplinkReason::IsTunnel)),
        ("ip6gre", "local 2001:db8:0:1::10", refused),
        ("ip6gre", "external", Ok(UplinkReason::IsTunnel)),
    ] {
        if !has(kind, world.node(), &format!("link add tun0 type {kind} {settings}")) {
            continue;
        }
        let without_address = expected.or(Err(UplinkReason::HasNoAddress));
        assert_eq!(decided(&world, "tun0"), without_address, "{kind} {settings}");
        world.node().ip("addr add 10.244.0.200/32 dev tun0").unwrap();
        assert_eq!(decided(&world, "tun0"), expected, "{kind} {settings}");
        world.node().ip("link del tun0").unwrap();
    }
}

/// The programs are attached to the member device of a VRF and not to the VRF, because a packet passes the hooks of the
/// member device before the VRF receives it. The VRF routes by its own table.
#[test]
fn vrf_member_with_the_nodes_addresses_gets_the_programs() {
    let world = World::bare(1, Options::default());
    if !has("vrf", world.node(), "link add vrf0 type vrf table 10") {
        return;
    }
    world.node().ip("link set vrf0 up\nlink set eth0 master vrf0").unwrap();
    world.topology.move_node_to("eth0").unwrap();
    let (pod, device) = (world.pod().addresses, world.pod().host_device.name());
    // These are the usual routes of a VRF, and routes to the Pods, which are outside of the VRF.
    let lines = format!(
        "route add unreachable default metric 4278198272 table 10\n\
         route add {} dev {device} scope link table 10\n\
         route add unreachable ::/0 metric 4278198272 table 10\n\
         route add {} dev {device} table 10",
        pod.v4, pod.v6
    );
    world.node().ip(&lines).unwrap();
    assert_eq!(decided(&world, "vrf0"), Err(UplinkReason::IsVrf));
    assert_served_by(world, "eth0");
}

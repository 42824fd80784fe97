// SPDX-License-Identifier: Apache-2.0
//! Tests that packets are translated without interruption while agents stop and start, and while devices change.

use std::io::ErrorKind;
use std::process::Command;
use std::time::Duration;

use aya::programs::tc;
use npl_agent::core::devices::Device;
use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::model::Family;
use npl_agent::devices::apply::apply;
use npl_testkit::tools;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{self, Direction, Load, Transfer};

use super::programs::rename_build;
use crate::world::{World, is_emulated, load_rate, replacements};

/// Time limit for a few requests, long enough for an emulated processor.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn traffic_continues_without_an_agent_and_the_next_one_adopts_it() {
    let mut world = World::fresh(2);
    world.assert_answers();
    let mappings = world.datapath().mappings().unwrap();
    let carried = world.datapath().tables.totals(Family::V4).unwrap();
    world.datapath = None;
    world.assert_answers();
    let large = traffic::udp_exchange(world.client(), world.frontend(), 4000, 4000).unwrap();
    assert_eq!((large.pod.as_str(), large.client.ip()), ("web-0", world.client_ip()));
    let mut adopted = world.open();
    assert_eq!(adopted.mappings().unwrap(), mappings);
    let now = adopted.tables.totals(Family::V4).unwrap();
    assert!(now.request_packets > carried.request_packets, "packets must be counted while no agent runs: {now:?}");
    world.attach(&mut adopted);
    world.assert_answers();
    assert_eq!(adopted.tables.local_addresses().unwrap(), world.node_ips().into());
}

#[test]
fn no_packet_is_lost_while_programs_are_replaced() {
    let mut world = World::fresh(1);
    world.datapath = None;
    let load = Load::start(world.client(), load_rate(), world.load_requests());
    let bytes = if is_emulated() { 1 << 20 } else { 8 << 20 };
    let upload = Transfer::start(world.client(), world.frontend(), Direction::Upload, bytes, bytes / 2).unwrap();
    for _ in 0..replacements() {
        rename_build(world.bpffs.path());
        let mut next = world.open();
        world.attach(&mut next);
        drop(next);
        load.wait_for_answers(10, LIMIT).unwrap();
    }
    assert_eq!(upload.join().unwrap().bytes, bytes);
    assert_eq!(load.stop().failures, []);
}

/// Creates the deleted uplink again, with the interface index that the uplink had.
fn recreate_uplink(world: &World, ifindex: u32) {
    let client = world.client().name().to_owned();
    world
        .node()
        .ip(&format!(
            "link add eth0 index {ifindex} type veth peer name eth0 netns {client}\n\
             addr add 192.0.2.10/24 dev eth0\n\
             addr add 2001:db8:0:1::10/64 dev eth0 nodad\n\
             link set eth0 up"
        ))
        .unwrap();
    world
        .client()
        .ip("addr add 192.0.2.1/24 dev eth0\n\
             addr add 198.51.100.2/32 dev eth0\n\
             addr add 2001:db8:0:1::1/64 dev eth0 nodad noprefixroute\n\
             addr add 2001:db8:0:2::2/128 dev eth0 nodad\n\
             link set eth0 up\n\
             route replace 192.0.2.0/24 dev eth0 src 198.51.100.2\n\
             route replace 2001:db8:0:1::/64 dev eth0 src 2001:db8:0:2::2")
        .unwrap();
    world
        .node()
        .ip("route add default via 192.0.2.1 dev eth0\n\
             route add default via 2001:db8:0:1::1 dev eth0")
        .unwrap();
}

#[track_caller]
fn assert_attached_again(world: &mut World) {
    let error = traffic::tcp_connect(world.client(), world.frontend()).unwrap_err();
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "without the programs, the host must refuse the connection");
    let mut datapath = world.datapath.take().unwrap();
    world.attach(&mut datapath);
    world.assert_answers();
}

#[test]
fn recreated_device_with_the_same_index_is_attached_again() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let ifindex = world.topology.client().uplink.ifindex().unwrap();
    world.node().ip("link del eth0").unwrap();
    recreate_uplink(&world, ifindex);
    assert_attached_again(&mut world);
}

/// A network card is moved to a Pod, and another card with the same index returns from a Pod. The agent lists devices
/// only after both changes, and must attach the programs to the new card.
#[test]
fn device_with_the_index_of_a_moved_one_is_attached_again() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let ifindex = world.topology.client().uplink.ifindex().unwrap();
    let elsewhere = world.run.netns("elsewhere").unwrap();
    world.node().ip(&format!("link set eth0 name gone netns {}", elsewhere.name())).unwrap();
    // The test sets the device down first, because a device that is up cannot be renamed before Linux 6.2.
    world.client().ip("link set eth0 down\nlink set eth0 name old").unwrap();
    recreate_uplink(&world, ifindex);
    assert_attached_again(&mut world);
}

/// The agent has listed the uplink under the name of another device, as if the two devices had exchanged their names
/// after the listing. TCX links must be attached to the device with the listed index.
#[test]
fn device_is_attached_by_its_index_when_names_change() {
    let mut world = World::bare(1, Options::default());
    world.node().ip("link add other type veth peer name other-end").unwrap();
    let uplinks: Vec<_> =
        world.uplinks().into_iter().map(|device| Device { name: "other".to_owned(), ..device }).collect();
    world.install_on(&uplinks);
    if world.datapath().hooks.mechanism() == "tcx" {
        world.assert_answers();
    }
}

#[test]
fn device_that_is_no_longer_selected_is_detached() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let mut datapath = world.datapath.take().unwrap();
    let devices = world.uplinks();
    let attached = datapath.hooks.attached_hooks().unwrap();
    let plan = DevicePlan::default();
    let errors = world.node().run(|| apply(&mut datapath, &devices, &attached, &plan)).unwrap().errors;
    assert!(errors.is_empty(), "{errors:?}");
    world.wait_until_refused();
    world.attach(&mut datapath);
    world.assert_answers();
}

/// Deleting a qdisc also removes its filters, which the agent must attach again. TCX links do not depend on the qdisc.
#[test]
fn programs_are_attached_again_after_their_qdisc_was_deleted() {
    let mut world = World::new(1);
    let mut datapath = world.datapath.take().unwrap();
    let delete = || {
        // An error means that the qdisc already exists, because NPL's programs are filters.
        drop(tc::qdisc_add_clsact("eth0"));
        tools::output(Command::new("tc").args(["qdisc", "del", "dev", "eth0", "clsact"])).unwrap();
    };
    world.node().run(delete).unwrap();
    if datapath.hooks.mechanism() == "tcx" {
        world.assert_answers();
    }
    world.attach(&mut datapath);
    world.assert_answers();
}

// SPDX-License-Identifier: Apache-2.0
//! Tests changes of devices and addresses while the agent runs, and devices to which programs cannot be attached.

use std::net::SocketAddr;

use std::fs;
use std::path::PathBuf;

use npl_agent::datapath::preflight;
use npl_common::names;
use npl_testkit::echo::Protocol;
use npl_testkit::rtnl::{self, RtnlLock};
use npl_testkit::topology::Offload;
use npl_testkit::tun::{self, Tun};
use npl_testkit::{poll, traffic};

use crate::world::{LIMIT, World};

/// Returns the path at which the agent pins the link of a device's ingress program. A directory at this path makes
/// attaching fail.
fn obstacle(world: &World, device: &str) -> PathBuf {
    let shown = world.topology.node().ip(&format!("link show dev {device}")).unwrap();
    let ifindex = shown.split(':').next().unwrap().trim();
    world.pins().join(names::LINK_DIR).join(format!("{ifindex}_in"))
}

#[test]
fn a_device_that_cannot_be_attached_is_logged_counted_and_retried_while_others_serve() {
    let mut world = World::new();
    world.create_node();
    world.topology.node().ip("link add second type veth peer name second-end").unwrap();
    let obstacle = obstacle(&world, "second");
    fs::create_dir_all(&obstacle).unwrap();
    let devices = format!("{},second", world.topology.client().uplink.name());
    world.start_agent(&["--devices", &devices, "--resync", "1s"]);
    world.serve(&["web-0"]);
    let log = fs::read_to_string(world.agent().process().log()).unwrap();
    assert!(log.contains("programs cannot be attached to a device") && log.contains("second"), "{log}");
    world.wait_for_metric(r#"npl_devices{state="attached"} 1"#);
    world.wait_for_metric(r#"npl_devices{state="failed"} 1"#);
    fs::remove_dir(&obstacle).unwrap();
    world.wait_for_metric(r#"npl_devices{state="attached"} 2"#);
    world.wait_for_metric(r#"npl_devices{state="failed"} 0"#);
    world.assert_served("web-0");
}

#[test]
fn a_device_with_an_unsupported_link_layer_is_logged_counted_and_shown_while_others_serve() {
    let mut world = World::new();
    let _device = Tun::create(world.topology.node(), "ib0", tun::INFINIBAND).unwrap();
    world.topology.node().ip("addr add 203.0.113.77/24 dev ib0\nlink set ib0 up").unwrap();
    world.create_node();
    world.start_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    world.wait_for_metric(r#"npl_devices{state="attached"} 1"#);
    world.wait_for_metric(r#"npl_devices{state="failed"} 1"#);
    let status = world.agent_options(&[]).command_json("status").unwrap();
    assert_eq!(status["devices"].as_array().unwrap().len(), 1);
    let reason = "its packets begin with neither an Ethernet nor an IP header";
    assert_eq!(status["unsupportedDevices"][0]["name"], "ib0");
    assert_eq!(status["unsupportedDevices"][0]["reason"], reason);
    assert!(world.agent_options(&[]).command(&["status"]).unwrap().contains(reason));
    let log = world.agent_log();
    assert_eq!(log.matches("the programs do not support the device").count(), 1, "{log}");
}

#[test]
fn an_added_node_address_serves_until_it_is_removed() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let uplink = world.topology.client().uplink.name().to_owned();
    let second = SocketAddr::new("192.0.2.77".parse().unwrap(), world.address("web-0", Protocol::Tcp).port());
    let client = world.topology.client().netns.clone();
    world.topology.node().ip(&format!("addr add 192.0.2.77/32 dev {uplink}")).unwrap();
    let (answer, _) =
        poll::until("a response from the new address", LIMIT, || traffic::tcp_request(&client, second, "hello").ok())
            .unwrap();
    assert_eq!(answer.pod, "web-0");
    world.topology.node().ip(&format!("addr del 192.0.2.77/32 dev {uplink}")).unwrap();
    let status = || world.agent_options(&[]).command(&["status"]).unwrap();
    poll::until("the agent to notice the removal of the address", LIMIT, || {
        (!status().contains("192.0.2.77")).then_some(())
    })
    .unwrap();
    world.assert_served("web-0");
}

#[test]
fn programs_are_on_the_uplink_and_not_on_the_pods_devices() {
    let mut world = World::with_agent(&[]);
    world.create_pod("web-0");
    let status = world.agent_options(&[]).command_json("status").unwrap();
    let devices = status.get("devices").unwrap().as_array().unwrap();
    let names: Vec<&str> = devices.iter().map(|device| device.get("name").unwrap().as_str().unwrap()).collect();
    assert_eq!(names, [world.topology.client().uplink.name()]);
    assert_eq!(devices[0].get("attached").unwrap(), &serde_json::json!(["ingress", "egress"]));
}

/// If the Node has more addresses than the programs can serve, the addresses of the Node object have priority. The log
/// and `doctor` report the addresses that are not served.
#[test]
fn addresses_beyond_the_limit_are_logged_once_and_published_ones_are_served() {
    let mut world = World::new();
    let lines: Vec<String> =
        (0..300).map(|number| format!("addr add 203.0.{}.{}/32 dev lo", number / 200, number % 200 + 1)).collect();
    world.topology.node().ip(&lines.join("\n")).unwrap();
    world.create_node();
    world.start_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let before = world.passes();
    poll::until("two more surveys of the Node", LIMIT, || (world.passes() > before + 4).then_some(())).unwrap();
    assert_eq!(world.agent_log().matches("more addresses than the maps hold").count(), 1, "{}", world.agent_log());
    let table = world.agent_options(&[]).command(&["doctor"]).unwrap();
    assert!(table.contains("addresses: clients that connect to these addresses are not served"), "{table}");
}

#[test]
fn a_configured_device_that_is_absent_or_disappears_is_logged() {
    let mut world = World::new();
    world.create_node();
    let devices = format!("{},later", world.topology.client().uplink.name());
    world.start_agent(&["--devices", &devices]);
    let told = "--devices names a device that does not exist";
    world.wait_for_log(told);
    world.topology.node().ip("link add later type veth peer name later-end").unwrap();
    world.wait_for_metric(r#"npl_devices{state="attached"} 2"#);
    let kind = if preflight::has_tcx() { "tcx" } else { "clsact" };
    world.wait_for_metric(&format!(r#"npl_device_info{{device="later",kind="{kind}"}} 1"#));
    world.topology.node().ip("link del later").unwrap();
    world.wait_for_metric(r#"npl_devices{state="attached"} 1"#);
    let metrics = world.agent().metrics().unwrap();
    assert!(!metrics.contains(r#"npl_device_info{device="later""#), "{metrics}");
    assert_eq!(world.agent_log().matches(told).count(), 2, "{}", world.agent_log());
}

/// Returns what `status` reports for the uplink: the hook at which requests are translated, and the reason for the
/// choice of this hook.
pub(crate) fn place(world: &World) -> [String; 2] {
    let status = world.agent_options(&[]).command_json("status").unwrap();
    ["requests", "reason"].map(|field| status["devices"][0][field].as_str().unwrap_or_default().to_owned())
}

#[test]
fn the_attach_option_moves_requests_to_xdp_and_back_and_status_shows_why() {
    let mut world = World::new();
    // XDP programs require complete checksums, so checksum offload is disabled at the client.
    world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    world.create_node();
    world.create_service();
    world.enable_service();
    world.create_pod("web-0");
    for (attach, expected) in [
        ("tc", ["tc", "--attach tc"]),
        ("auto", ["tc", "virtual: checksums may be incomplete"]),
        ("xdp", ["xdp", "--attach xdp"]),
        ("tc", ["tc", "--attach tc"]),
    ] {
        world.start_agent(&["--attach", attach]);
        world.assert_served("web-0");
        poll::until("the new hook", LIMIT, || (place(&world) == expected).then_some(())).unwrap();
        let shown = world.topology.node().ip("link show dev eth0").unwrap();
        assert_eq!(shown.contains("prog/xdp"), attach == "xdp", "{shown}");
        let table = world.agent_options(&[]).command(&["status"]).unwrap();
        assert!(table.contains(expected[1]), "{table}");
        world.agent().kill().unwrap();
        assert_eq!(place(&world), expected, "the attachment must survive the agent");
        world.assert_served("web-0");
    }
}

/// For example, the removal of the devices of hundreds of Pods holds the kernel's RTNL lock for seconds.
#[test]
fn pods_are_published_while_the_agent_waits_for_the_rtnl_lock() {
    // The agent surveys the devices every second, so that a survey begins while the test holds the lock.
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.create_service();
    world.create_pod("web-0");
    let agent = world.agent().process().id();
    let lock = RtnlLock::hold().unwrap();
    let waiting = || rtnl::waiting_threads(agent).unwrap();
    let waits = || Some(waiting()).filter(|threads| !threads.is_empty());
    let (before, _) = poll::until("the agent to wait for the RTNL lock", LIMIT, waits).unwrap();
    world.enable_service();
    world.wait_for_entries("web-0", 2);
    let after = waiting();
    assert!(before.iter().all(|thread| after.contains(thread)), "{before:?} must still wait for the lock: {after:?}");
    drop(lock);
    world.assert_served("web-0");
}

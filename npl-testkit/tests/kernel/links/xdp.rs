// SPDX-License-Identifier: Apache-2.0
//! Tests the XDP program in the uplink's driver, with real traffic, and the life cycle of the program's link.
//!
//! The devices are veth pairs, whose packets may have partial checksums. On such devices, the agent attaches XDP only
//! with `--attach xdp`, and these tests disable the clients' checksum offload.

use std::fs;
use std::path::Path;
use std::process::Command;

use aya::util::KernelVersion;
use npl_agent::core::cleanup::RemovalKind;
use npl_agent::core::devices::Device;
use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::devices::xdp::{Attach, XdpReason, plan};
use npl_agent::datapath::cleanup::remove_everything;
use npl_agent::datapath::pins::Direction;
use npl_agent::datapath::{Datapath, DatapathError, Pins, preflight};
use npl_agent::netlink;
use npl_testkit::topology::{Offload, Options};
use npl_testkit::traffic::{self, Direction as TransferDirection, Load, UdpOptions, transfer};
use npl_testkit::{poll, tools};

use super::other_programs::OtherProgram;
use super::programs::rename_build;
use super::restart::LIMIT;
use crate::world::{World, is_emulated, load_rate};

/// Number of agent replacements under load.
const REPLACEMENTS: u64 = 3;

impl World {
    /// Does the same as [`Self::with_options`], with XDP on the uplink and a client without checksum offload.
    pub(crate) fn with_xdp(options: Options) -> Self {
        let mut world = Self::with_options(1, options);
        let uplink = world.uplink();
        world.add_xdp(&uplink);
        world
    }

    /// Attaches the XDP program to one uplink, and disables checksum offload on the client of this uplink.
    pub(crate) fn add_xdp(&mut self, uplink: &Device) {
        let client = self.topology.clients().iter().find(|client| client.uplink.name() == uplink.name).unwrap();
        client.device.set_offloads(&[Offload::TxChecksum], false).unwrap();
        let mut datapath = self.datapath.take().unwrap();
        self.node().run(|| datapath.attach_xdp(uplink)).unwrap().unwrap();
        self.datapath = Some(datapath);
    }

    fn uplink(&self) -> Device {
        self.uplinks().remove(0)
    }

    fn attach_xdp(&self, datapath: &mut Datapath) -> Result<(), DatapathError> {
        let uplink = self.uplink();
        self.node().run(|| datapath.attach_xdp(&uplink)).unwrap()
    }

    /// Returns the kernel's ID of the XDP program in a device's driver.
    pub(crate) fn xdp_program(&self, device: &str) -> Option<String> {
        let shown = self.node().ip(&format!("link show dev {device}")).unwrap();
        Some(shown.split_once("prog/xdp id ")?.1.split_whitespace().next()?.to_owned())
    }
}

#[test]
fn xdp_translates_requests_without_a_tc_ingress_program() {
    let mut world = World::with_xdp(Options::default());
    if world.datapath.as_ref().unwrap().hooks.mechanism() != "tcx" {
        // The test needs TCX links, because a filter stays attached when its pin is removed.
        return;
    }
    fs::remove_file(Pins::new(world.bpffs.path()).link(world.uplink().ifindex, Direction::Ingress)).unwrap();
    world.assert_answers();
    let errors = world.datapath().retain_xdp(&[].into());
    assert!(errors.is_empty(), "{errors:?}");
    world.wait_until_refused();
}

#[test]
fn transfers_datagrams_and_fragments_arrive_with_xdp() {
    let world = World::with_xdp(Options::default());
    world.assert_answers();
    let bytes = if is_emulated() { 1 << 18 } else { 16 << 20 };
    for frontend in world.frontends() {
        for direction in [TransferDirection::Upload, TransferDirection::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, bytes).unwrap().bytes, bytes);
        }
        // Datagrams of this size are fragmented, and the TC program translates the fragments.
        assert_eq!(traffic::udp_exchange(world.client(), frontend, 4000, 4000).unwrap().pod, "web-0");
    }
    let options = UdpOptions { checksum: false, ..UdpOptions::default() };
    let answer = traffic::udp_request(world.client(), world.frontend(), b"no checksum", options).unwrap().answer;
    assert_eq!((answer.received, answer.client.ip()), (11, world.client_ip()));
}

#[test]
fn multi_buffer_frames_arrive_with_xdp() {
    if !preflight::has_xdp_frags() {
        return;
    }
    let world = World::with_xdp(Options { mtu: 9000, ..Options::default() });
    world.assert_answers();
    for frontend in world.frontends() {
        assert_eq!(transfer(world.client(), frontend, TransferDirection::Upload, 8 << 20).unwrap().bytes, 8 << 20);
        assert_eq!(traffic::udp_exchange(world.client(), frontend, 8000, 8000).unwrap().pod, "web-0");
    }
}

#[test]
fn no_packet_is_lost_while_xdp_is_replaced() {
    let mut world = World::with_xdp(Options::default());
    let mut known = world.xdp_program("eth0").unwrap();
    world.datapath = None;
    let load = Load::start(world.client(), load_rate(), world.load_requests());
    for _ in 0..REPLACEMENTS {
        rename_build(world.bpffs.path());
        let mut next = world.open();
        world.attach(&mut next);
        world.attach_xdp(&mut next).unwrap();
        drop(next);
        let now = world.xdp_program("eth0").unwrap();
        assert_ne!(std::mem::replace(&mut known, now.clone()), now);
        load.wait_for_answers(10, LIMIT).unwrap();
    }
    assert_eq!(load.stop().failures, []);
}

#[test]
fn next_agent_does_not_reattach_xdp() {
    let mut world = World::with_xdp(Options::default());
    let before = world.xdp_program("eth0");
    world.datapath = None;
    assert_eq!(world.xdp_program("eth0"), before, "the program must outlive the agent");
    let mut next = world.open();
    world.attach(&mut next);
    world.attach_xdp(&mut next).unwrap();
    assert!(before.is_some() && world.xdp_program("eth0") == before, "{before:?}");
    world.assert_answers();
}

#[test]
fn third_party_xdp_program_is_kept_and_tc_translates() {
    let mut world = World::new(1);
    let mut other = OtherProgram::load(&world, "192.0.2.250".parse().unwrap(), "61000-61100");
    world.attach_xdp(&mut other.datapath).unwrap();
    let foreign = world.xdp_program("eth0");
    let mut datapath = world.datapath.take().unwrap();
    let error = world.attach_xdp(&mut datapath).unwrap_err();
    assert_eq!(error.xdp_reason(), XdpReason::Occupied, "{error:?}");
    assert!(foreign.is_some() && world.xdp_program("eth0") == foreign, "{foreign:?}");
    assert!(!Pins::new(world.bpffs.path()).xdp_link(world.uplink().ifindex).exists());
    world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    world.assert_answers();
}

#[test]
fn device_without_native_xdp_is_reported() {
    let mut world = World::new(1);
    world.node().ip("link add up0 type bridge").unwrap();
    let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
    let bridge = all.iter().find(|device| device.name == "up0").unwrap();
    let mut datapath = world.datapath.take().unwrap();
    let error = world.node().run(|| datapath.attach_xdp(bridge)).unwrap().unwrap_err();
    assert_eq!(error.xdp_reason(), XdpReason::DriverRefuses, "{error:?}");
    assert_eq!(world.xdp_program("up0"), None, "the kernel must not run the program as generic XDP instead");
}

#[test]
fn recreated_device_with_the_same_index_gets_xdp_again() {
    let mut world = World::new(1);
    let mut datapath = world.datapath.take().unwrap();
    for _ in 0..2 {
        world.node().ip("link add up0 index 300 type veth peer name up1").unwrap();
        let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
        let device = all.iter().find(|device| device.name == "up0").unwrap();
        for _ in 0..2 {
            world.node().run(|| datapath.attach_xdp(device)).unwrap().unwrap();
            assert!(world.xdp_program("up0").is_some());
        }
        world.node().ip("link del up0").unwrap();
    }
}

#[test]
fn cleanup_detaches_xdp() {
    let mut world = World::with_xdp(Options::default());
    world.datapath = None;
    let (removed, errors) = world.node().block_on(remove_everything(world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    let link = Pins::new(world.bpffs.path()).xdp_link(world.uplink().ifindex);
    assert_eq!(removed.iter().filter(|removal| removal.name == link.to_str().unwrap()).count(), 1, "{removed:?}");
    let first = removed.first().unwrap();
    assert_eq!(
        (first.kind, first.device.as_deref(), first.hook.as_deref()),
        (RemovalKind::XdpLink, Some("eth0"), Some("xdp"))
    );
    poll::until("the detachment of the program", LIMIT, || world.xdp_program("eth0").is_none().then_some(())).unwrap();
}

/// The host's network cards with the virtio driver.
fn cards() -> Vec<String> {
    let all = fs::read_dir("/sys/class/net").unwrap().map(|entry| entry.unwrap());
    let is_card =
        |path: &Path| fs::read_link(path.join("device/driver")).is_ok_and(|driver| driver.ends_with("virtio_net"));
    all.filter(|entry| is_card(&entry.path())).map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[test]
fn network_card_translates_as_the_agent_plans() {
    if !is_emulated() {
        return;
    }
    let mut world = World::bare(1, Options::default());
    let cards = cards();
    assert_eq!(cards.len(), 2, "there must be two network cards, the ends of one wire: {cards:?}");
    for (card, netns) in cards.iter().zip([world.node(), world.client()]) {
        let words = ["link", "set", card, "netns", netns.name(), "name", "up0"];
        tools::output(Command::new("ip").args(words)).unwrap();
        netns.ip("link set up0 up").unwrap();
    }
    world.topology.move_node_to("up0").unwrap();
    world.topology.move_client_to("up0").unwrap();
    let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
    let card = all.into_iter().find(|device| device.name == "up0").unwrap();
    assert_eq!(
        plan(&card, Attach::Auto, Forwarding::Stack, preflight::has_xdp_frags()),
        Ok(XdpReason::SafeDriver),
        "{card:?}"
    );
    world.install_on(std::slice::from_ref(&card));
    let mut datapath = world.datapath.take().unwrap();
    match world.node().run(|| datapath.attach_xdp(&card)).unwrap() {
        Ok(()) => assert!(world.xdp_program("up0").is_some()),
        // Before Linux 5.13, attaching may fail, because the driver needs an additional transmit queue for each
        // processor.
        Err(error) => {
            assert!(KernelVersion::current().unwrap() < KernelVersion::new(5, 13, 0), "{error:?}");
            assert_eq!(error.xdp_reason(), XdpReason::DriverRefuses, "{error:?}");
        }
    }
    world.assert_answers();
    for frontend in world.frontends() {
        for direction in [TransferDirection::Upload, TransferDirection::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, 1 << 18).unwrap().bytes, 1 << 18);
        }
    }
}

#[test]
fn device_list_contains_link_facts() {
    let world = World::bare(1, Options::default());
    let facts = |name: &str| {
        let all = world.node().block_on(netlink::interfaces()).unwrap().unwrap();
        all.into_iter().find(|device| device.name == name).unwrap().link
    };
    let eth0 = facts("eth0");
    assert_eq!((eth0.mtu, eth0.has_upper_devices, eth0.driver), (1500, false, None));
    // This part needs VLAN devices, which every emulated kernel supports.
    if world.node().ip("link add link eth0 name up0 type vlan id 100").is_ok() {
        assert_eq!((facts("eth0").has_upper_devices, facts("up0").has_upper_devices), (true, false));
    } else {
        assert!(!is_emulated());
    }
}

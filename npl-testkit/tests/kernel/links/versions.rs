// SPDX-License-Identifier: Apache-2.0
//! Tests upgrades from an earlier ABI version, changes of the size or the name of a map, and rollbacks from a later ABI
//! version. The agent that takes over copies the entries of maps that have an earlier ABI version or another size, and
//! renames the pins of maps that had another name in an earlier build. The agent copies no entries from maps of a later
//! ABI version.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use aya_obj::generated::bpf_map_type;
use npl_agent::core::devices::attachments::filter_handle;
use npl_agent::core::model::{Family, Protocol};
use npl_agent::datapath::{Datapath, Pins, Takeover};
use npl_common::flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6, MAX_FLOWS};
use npl_common::former_names;
use npl_common::names::{
    ABI_VERSION, MAP_FLOW_V4, MAP_FLOW_V6, MAP_PRE_TC_DEVICE, MAP_SCTP_FLOW_V4, MAP_SCTP_FLOW_V6, MAP_UDP_FLOW_V4,
    MAP_UDP_FLOW_V6, PROG_EGRESS, PROG_INGRESS,
};
use npl_testkit::abi::{pretend_to_be, version};
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, Load, Transfer};

use crate::lab::mapping;
use crate::world::{World, is_emulated, load_rate};

/// Time limit for a few requests, long enough for an emulated processor.
const LIMIT: Duration = Duration::from_secs(20);

/// How programs are attached: as TCX links if the kernel has TCX (Linux 6.6), or always as filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mechanism {
    Preferred,
    Filters,
}

/// Creates a Node whose programs are attached by `mechanism`. Filters have the handle of ABI `abi`.
fn world(mechanism: Mechanism, abi: u32) -> World {
    let mut world = World::fresh(1);
    if mechanism == Mechanism::Filters {
        world.use_filters();
    }
    if world.datapath().hooks.are_filters() {
        change_handles(&world, abi);
    }
    world
}

/// Replaces each of NPL's TC filters on the uplinks by the same program under the handle of ABI `abi`, as if an agent
/// of that ABI had attached it.
pub(super) fn change_handles(world: &World, abi: u32) {
    let pins = Pins::new(world.bpffs.path());
    let build = pins.builds().unwrap().remove(0);
    for device in world.uplinks() {
        for (side, program) in [("ingress", PROG_INGRESS), ("egress", PROG_EGRESS)] {
            let (own, other) = (handle(ABI_VERSION), handle(abi));
            let hook = format!("dev {} {side} protocol all prio 1", device.name);
            let pin = pins.program(&build, program);
            let tc = |line: String| world.node().tc(&line).unwrap();
            tc(format!("filter del {hook} handle {own} bpf"));
            tc(format!("filter add {hook} handle {other} bpf da object-pinned {}", pin.display()));
        }
    }
}

/// Returns the handle of a filter of ABI `abi`, as tc prints it.
fn handle(abi: u32) -> String {
    let (major, minor) = filter_handle(abi);
    format!("{:#x}", u32::from(major) << 16 | u32::from(minor))
}

/// Opens the datapath of the next agent, which attaches its programs by the same mechanism.
fn open_next(world: &World, mechanism: Mechanism) -> Datapath {
    let mut next = world.open_configured();
    if mechanism == Mechanism::Filters {
        next.hooks.use_filters();
    }
    next
}

/// Returns all distinct handles of NPL's filters at the uplinks.
fn filter_handles(world: &World) -> BTreeSet<String> {
    let listed = |device: &str, side| world.node().tc(&format!("filter show dev {device} {side}")).unwrap();
    let of = |device: &str| ["ingress", "egress"].map(|side| listed(device, side));
    let all: String = world.uplinks().iter().flat_map(|device| of(&device.name)).collect();
    all.split_whitespace().filter(|word| word.starts_with("0x4e504c")).map(str::to_owned).collect()
}

/// Asserts that NPL's filters on the uplinks are only those of this ABI version, or none if the agent attaches TCX
/// links.
fn assert_no_other_filters(world: &World, agent: &Datapath) {
    let expected = if agent.hooks.are_filters() { BTreeSet::from([handle(ABI_VERSION)]) } else { BTreeSet::new() };
    assert_eq!(filter_handles(world), expected);
}

/// Starts requests of both protocols, and a long upload.
fn load(world: &World) -> (Load, Transfer) {
    let load = Load::start(world.client(), load_rate(), world.load_requests());
    let bytes = if is_emulated() { 1 << 20 } else { 8 << 20 };
    let upload = Transfer::start(world.client(), world.frontend(), Direction::Upload, bytes, bytes / 2).unwrap();
    (load, upload)
}

fn answered(load: &Load) {
    load.wait_for_answers(20, LIMIT).unwrap();
}

/// Takes over from agents of other ABI versions: detaches their programs for requests, waits until all requests of the
/// load are answered, and removes the other programs and the pins. Returns the removed versions.
fn remove_others(world: &World, agent: &mut Datapath, load: &Load) -> Vec<u32> {
    let now = Instant::now();
    let mut remove = |at| world.node().run(|| agent.remove_predecessors(at)).unwrap().unwrap();
    match remove(now) {
        Takeover::Complete(versions) => versions,
        Takeover::AwaitsReplies { until } => {
            assert_eq!(remove(now), Takeover::AwaitsReplies { until });
            load.replace(world.load_requests());
            let Takeover::Complete(versions) = remove(until) else { panic!("the takeover is not complete") };
            versions
        }
    }
}

fn flows(datapath: &Datapath) -> usize {
    datapath.tables.flow_count().unwrap()
}

#[test]
fn no_packet_is_lost_when_an_agent_takes_over_from_abi_1() {
    take_over_from_abi_1(Mechanism::Preferred);
}

#[test]
fn no_packet_is_lost_when_filters_take_over_from_abi_1() {
    take_over_from_abi_1(Mechanism::Filters);
}

fn take_over_from_abi_1(mechanism: Mechanism) {
    let mut world = world(mechanism, 1);
    world.restrict("192.0.2.0/24,198.51.100.0/24,2001:db8::/32");
    world.assert_answers();
    let (requests, upload) = load(&world);
    let mappings = world.datapath().mappings().unwrap();
    world.datapath = None;
    pretend_to_be(world.bpffs.path(), 1).unwrap();
    answered(&requests);

    let mut next = open_next(&world, mechanism);
    assert_eq!(next.mappings().unwrap(), mappings, "the copied mappings differ from those of ABI 1");
    let copied = flows(&next);
    assert!(copied > 0, "no conntrack entry of ABI 1 was copied");
    world.attach(&mut next);
    answered(&requests);
    assert_eq!(remove_others(&world, &mut next, &requests), [1]);
    assert!(!version(world.bpffs.path(), 1).exists(), "the pins of ABI 1 are left");
    assert_eq!(remove_others(&world, &mut next, &requests), [0_u32; 0]);
    answered(&requests);
    assert_eq!(requests.stop().failures, []);
    upload.join().unwrap();
    assert_no_other_filters(&world, &next);
    let ingress = next.hooks.own_programs().programs_on(world.uplinks()[0].ifindex);
    assert!(ingress.is_none_or(|on| on.ingress.len() <= 1), "programs of ABI 1 are left");
    let totals = next.tables.totals(Family::V4).unwrap();
    assert!(totals.request_packets > 0, "the next agent's programs must translate");
    world.datapath = Some(next);
    world.assert_answers();
}

/// Protocol, node port and Pod port of a server whose answers the test itself sends.
const SLOW: (Protocol, u16, u16) = (Protocol::Udp, 61_005, 9090);

/// A server may answer a request after the takeover. Only the programs of ABI 1 have an entry of the request.
fn answer_after_takeover(mechanism: Mechanism) {
    let mut world = world(mechanism, 1);
    let ((protocol, node_port, port), pod) = (SLOW, world.pod().addresses.v4);
    let (frontend, backend) = mapping(protocol, node_port, (pod, port).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world.datapath = None;
    pretend_to_be(world.bpffs.path(), 1).unwrap();
    let server = world.pod().netns.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))).unwrap().unwrap();
    let client = traffic::udp_socket(world.client(), (world.node_ip(), node_port).into(), true).unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
    }
    let mut buffer = [0; 16];
    client.send(b"question").unwrap();
    let (_, source) = poll::uninterrupted(|| server.recv_from(&mut buffer)).unwrap();

    let mut next = open_next(&world, mechanism);
    // Writes the endpoints of the copied mappings.
    next.mappings().unwrap();
    world.attach(&mut next);
    let now = Instant::now();
    let mut remove = |at| world.node().run(|| next.remove_predecessors(at)).unwrap().unwrap();
    let Takeover::AwaitsReplies { until } = remove(now) else { panic!("the programs for replies were removed") };
    assert_eq!(remove(now), Takeover::AwaitsReplies { until });
    server.send_to(b"answer", source).unwrap();
    let length = poll::uninterrupted(|| client.recv(&mut buffer)).unwrap();
    assert_eq!(&buffer[..length], b"answer");
    assert_eq!(remove(until), Takeover::Complete(vec![1]));
    assert_no_other_filters(&world, &next);
    world.assert_answers();
}

#[test]
fn answer_to_a_request_of_before_the_takeover_is_translated() {
    answer_after_takeover(Mechanism::Preferred);
}

#[test]
fn answer_to_a_request_of_before_the_takeover_by_filters_is_translated() {
    answer_after_takeover(Mechanism::Filters);
}

/// The maps of a later version may have another layout, so the agent copies no entries from them. The later version's
/// programs translate until this agent has written its own mappings.
fn roll_back_from_a_later_abi(mechanism: Mechanism) {
    let mut world = world(mechanism, ABI_VERSION + 1);
    world.assert_answers();
    let (requests, upload) = load(&world);
    let mappings = world.datapath().mappings().unwrap();
    world.datapath = None;
    pretend_to_be(world.bpffs.path(), ABI_VERSION + 1).unwrap();

    let mut next = open_next(&world, mechanism);
    assert!(next.mappings().unwrap().is_empty() && flows(&next) == 0, "entries of an unknown layout were copied");
    world.attach(&mut next);
    answered(&requests);
    assert!(next.upsert_mappings(&mappings).is_empty());
    answered(&requests);
    assert_eq!(remove_others(&world, &mut next, &requests), [ABI_VERSION + 1]);
    answered(&requests);
    assert_eq!(requests.stop().failures, []);
    upload.join().unwrap();
    assert_no_other_filters(&world, &next);
}

#[test]
fn no_packet_is_lost_when_an_agent_is_rolled_back_from_a_later_abi() {
    roll_back_from_a_later_abi(Mechanism::Preferred);
}

#[test]
fn no_packet_is_lost_when_filters_are_rolled_back_from_a_later_abi() {
    roll_back_from_a_later_abi(Mechanism::Filters);
}

/// Replaces the pinned flow table of IPv4 by one with the same entries and half the capacity.
fn replace_by_smaller(pin: &Path) {
    type FlowTable = HashMap<MapData, [u8; size_of::<FlowKeyV4>()], [u8; size_of::<FlowV4>()]>;
    let table = |data| FlowTable::try_from(Map::from_map_data(data).unwrap()).unwrap();
    let old = MapData::from_pin(pin).unwrap();
    let flags = old.info().unwrap().map_flags();
    let (key, value) = (size_of::<FlowKeyV4>().try_into().unwrap(), size_of::<FlowV4>().try_into().unwrap());
    let kind = bpf_map_type::BPF_MAP_TYPE_LRU_HASH as u32;
    let data = MapData::create(aya_obj::Map::new_from_params(kind, key, value, MAX_FLOWS / 2, flags), "half", None);
    let (old, mut new) = (table(old), table(data.unwrap()));
    for item in &old {
        let (key, value) = item.unwrap();
        new.insert(key, value, 0).unwrap();
    }
    fs::remove_file(pin).unwrap();
    new.pin(pin).unwrap();
}

/// The flow table of another build may have another number of elements, so the agent must copy its entries to a new
/// map.
#[test]
fn conntrack_entries_move_to_a_map_of_another_size() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let (mappings, before) = (world.datapath().mappings().unwrap(), flows(world.datapath()));
    world.datapath = None;
    let pins = Pins::new(world.bpffs.path());
    replace_by_smaller(&pins.map(MAP_FLOW_V4));

    let next = world.open();
    assert_eq!(flows(&next), before, "the new map must contain all conntrack entries of the map with another size");
    world.datapath = Some(next);
    assert_eq!(world.datapath().mappings().unwrap(), mappings);
    assert_eq!(world.datapath().remove_predecessors(Instant::now()).unwrap(), Takeover::Complete(Vec::new()));
    assert!(!pins.version().join("replaced").exists(), "the former map is left");
}

/// Moves all entries of a flow table to another one, and removes the first table's pin.
fn merge<const KEY: usize, const ENTRY: usize>(pins: &Pins, from: &str, into: &str) {
    let open = |name| {
        let map = MapData::from_pin(pins.map(name)).and_then(Map::from_map_data).unwrap();
        HashMap::<MapData, [u8; KEY], [u8; ENTRY]>::try_from(map).unwrap()
    };
    let mut table = open(into);
    for entry in &open(from) {
        let (key, entry) = entry.unwrap();
        table.insert(key, entry, 0).unwrap();
    }
    fs::remove_file(pins.map(from)).unwrap();
}

/// Creates the pins of an earlier build of this ABI version, which has one flow table for all protocols.
fn use_one_flow_table(pins: &Pins) {
    for name in [MAP_UDP_FLOW_V4, MAP_SCTP_FLOW_V4] {
        merge::<{ size_of::<FlowKeyV4>() }, { size_of::<FlowV4>() }>(pins, name, MAP_FLOW_V4);
    }
    for name in [MAP_UDP_FLOW_V6, MAP_SCTP_FLOW_V6] {
        merge::<{ size_of::<FlowKeyV6>() }, { size_of::<FlowV6>() }>(pins, name, MAP_FLOW_V6);
    }
}

#[test]
fn conntrack_entries_of_a_table_for_all_protocols_are_copied() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let before = flows(world.datapath());
    world.datapath = None;
    use_one_flow_table(&Pins::new(world.bpffs.path()));
    world.datapath = Some(world.open());
    assert_eq!(flows(world.datapath()), before);
    world.assert_answers();
}

#[test]
fn conntrack_entries_of_a_table_for_all_protocols_are_copied_after_an_agent_was_killed() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let before = flows(world.datapath());
    world.datapath = None;
    let pins = Pins::new(world.bpffs.path());
    use_one_flow_table(&pins);
    let tables = [MAP_FLOW_V4, MAP_FLOW_V6];
    let aside = tables.map(|name| world.bpffs.path().join(name));
    for (name, aside) in tables.iter().zip(&aside) {
        fs::rename(pins.map(name), aside).unwrap();
    }
    // The killed agent has created and pinned its own tables for TCP, but not for the other protocols.
    drop(world.open());
    use_one_flow_table(&pins);
    let replaced = pins.version().join("replaced");
    fs::create_dir_all(&replaced).unwrap();
    for (name, aside) in tables.iter().zip(&aside) {
        fs::rename(aside, replaced.join(name)).unwrap();
    }
    world.datapath = Some(world.open());
    assert_eq!(flows(world.datapath()), before);
    world.assert_answers();
}

/// Renames the pins of maps and programs as if an earlier build of this ABI version had created them.
fn pretend_to_be_earlier_build(pins: &Pins) {
    let mut renamed = BTreeSet::new();
    // A map may have several former names. The earlier build uses the newest former name, which is the last one in the
    // list.
    for (name, former) in former_names::ABI_2.into_iter().rev().filter(|(name, _)| renamed.insert(*name)) {
        fs::rename(pins.map(name), pins.map(former)).unwrap();
    }
    for build in pins.builds().unwrap() {
        fs::rename(pins.programs_of(&build), pins.programs_of("earlier")).unwrap();
    }
}

#[test]
fn no_packet_is_lost_when_an_agent_renames_the_maps_of_an_earlier_build() {
    let mut world = World::fresh(1);
    world.assert_answers();
    let (requests, upload) = load(&world);
    let pins = Pins::new(world.bpffs.path());
    let map_id = |name| MapData::from_pin(pins.map(name)).unwrap().info().unwrap().id();
    let map_ids = || former_names::ABI_2.map(|(name, _)| map_id(name));
    let (builds, before) = (pins.builds().unwrap(), map_ids());
    world.datapath = None;
    pretend_to_be_earlier_build(&pins);
    // After a rollback from a later build, a map of that build may still be pinned under a name that this build uses
    // for a map of another type.
    HashMap::<MapData, u32, u32>::create(1, 0).unwrap().pin(pins.map(MAP_PRE_TC_DEVICE)).unwrap();

    let mut next = world.open_configured();
    world.attach(&mut next);
    answered(&requests);
    assert_eq!(map_ids(), before, "the agent must keep the maps and their elements");
    let left: Vec<_> = former_names::ABI_2.iter().filter(|(_, former)| pins.map(former).exists()).collect();
    assert!(left.is_empty(), "pins of former names are left: {left:?}");
    assert_eq!(pins.builds().unwrap(), builds, "programs of the earlier build are left");
    assert_eq!(requests.stop().failures, []);
    upload.join().unwrap();
    world.datapath = Some(next);
    world.assert_answers();
}

// SPDX-License-Identifier: Apache-2.0
//! Packets larger than IP has a length for, as hosts handle them between their devices.

use std::io;
use std::time::Duration;

use aya::util::KernelVersion;
use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::Family;
use npl_testkit::poll;
use npl_testkit::topology::{Device, Offload};
use npl_testkit::traffic::{Direction, transfer};
use rtnetlink::packet_route::link::LinkAttribute;
use rtnetlink::{LinkUnspec, new_connection};
use socket2::{Domain, SockFilter, Socket, Type};

use super::offload::bytes;
use super::redirect::NOTHING_IS_FORWARDED;
use crate::wire::{ETH_P_ALL, link_address};
use crate::world::{World, is_emulated};

/// Three times what IP has a length for.
const LARGEST: u32 = 196_608;

/// What a length of sixteen bits says at most.
const LONGEST: u32 = 65_535;
const ETHERNET_HEADER: u32 = 14;

/// The first kernels whose pairs of devices take larger packets, in each family.
const SINCE_V6: KernelVersion = KernelVersion::new(5, 19, 0);
const SINCE_V4: KernelVersion = KernelVersion::new(6, 3, 0);

/// A packet that was seen has been queued.
const QUEUED: Duration = Duration::from_millis(10);

/// Far longer than it takes until a sender has so much to send at once, which depends on who is waiting for whom.
const LIMIT: Duration = Duration::from_mins(1);

/// Which way packets pass a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Comes,
    Leaves,
}

/// Notices packets at a device that are longer than [`LONGEST`]: those that come before any program has them, those that leave
/// behind all of them.
struct Lookout(Socket);

impl Lookout {
    fn new(device: &Device, side: Side) -> Self {
        let socket = device.netns().run(|| Socket::new(Domain::PACKET, Type::RAW, None)).unwrap().unwrap();
        socket.attach_filter(&longer_ones(side)).unwrap();
        // Nothing is received before this.
        socket.bind(&link_address(device.ifindex().unwrap(), ETH_P_ALL)).unwrap();
        socket.set_read_timeout(Some(QUEUED)).unwrap();
        Self(socket)
    }

    fn has_seen(&self) -> bool {
        poll::uninterrupted(|| self.0.recv(&mut [])).is_ok()
    }
}

/// As classic BPF: the packet's kind, its length, and how much of it is received.
fn longer_ones(side: Side) -> [SockFilter; 6] {
    const LOAD: u16 = 0x20;
    const LOAD_LENGTH: u16 = 0x80;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const JUMP_IF_GREATER: u16 = 0x25;
    const RETURN: u16 = 0x06;
    /// `SKF_AD_OFF + SKF_AD_PKTTYPE`
    const KIND: u32 = 0xffff_f004;
    let outgoing = u32::from(libc::PACKET_OUTGOING);
    let (if_leaves, otherwise) = if side == Side::Leaves { (0, 3) } else { (3, 0) };
    [
        SockFilter::new(LOAD, 0, 0, KIND),
        SockFilter::new(JUMP_IF_EQUAL, if_leaves, otherwise, outgoing),
        SockFilter::new(LOAD_LENGTH, 0, 0, 0),
        SockFilter::new(JUMP_IF_GREATER, 0, 1, LONGEST + ETHERNET_HEADER),
        SockFilter::new(RETURN, 0, 0, ETHERNET_HEADER),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}

/// Has a device make, take and merge packets of up to [`LARGEST`] bytes in a family, if the kernel has that.
#[track_caller]
fn allow_large(device: &Device, family: Family) {
    let limits = if family == Family::V4 {
        [LinkAttribute::GsoIpv4MaxSize(LARGEST), LinkAttribute::GroIpv4MaxSize(LARGEST)]
    } else {
        [LinkAttribute::GsoMaxSize(LARGEST), LinkAttribute::GroMaxSize(LARGEST)]
    };
    let mut message = LinkUnspec::new_with_index(device.ifindex().unwrap());
    for limit in limits {
        message = message.append_extra_attribute(limit);
    }
    let set = async move {
        let (connection, handle, _unsolicited) = new_connection()?;
        let driver = tokio::spawn(connection);
        let result = handle.link().set(message.build()).execute().await.map_err(io::Error::other);
        driver.abort();
        result
    };
    device.netns().block_on(set).unwrap().unwrap();
}

/// Whether a family's packets may be that large on this kernel.
fn is_possible(family: Family) -> bool {
    KernelVersion::current().unwrap() >= if family == Family::V4 { SINCE_V4 } else { SINCE_V6 }
}

/// Where a transfer's packets are looked out for: as they come to the Node, and as they leave it.
fn lookouts(world: &World, forwarding: Forwarding, direction: Direction) -> Vec<Lookout> {
    let [_, uplink, pod, host_device] = world.path_devices();
    let [comes, leaves] = [Side::Comes, Side::Leaves].map(|side| move |device: &Device| Lookout::new(device, side));
    match (direction, forwarding) {
        (Direction::Upload, Forwarding::Stack) => vec![comes(&uplink), leaves(&host_device)],
        // The Node's end of the pair is left out.
        (Direction::Upload, _) => vec![comes(&uplink), comes(&pod)],
        (Direction::Download, _) => vec![comes(&host_device), leaves(&uplink)],
    }
}

/// By the host's stack, and past it.
fn transfer_in_large_packets(mut world: World) {
    for forwarding in [Forwarding::Stack, Forwarding::Redirect] {
        world.follow(forwarding);
        if forwarding == Forwarding::Redirect {
            world.node().nft(NOTHING_IS_FORWARDED).unwrap();
        }
        for frontend in world.frontends() {
            for direction in [Direction::Upload, Direction::Download] {
                let mut lookouts = lookouts(&world, forwarding, direction);
                // An emulated processor is too slow for windows that hold such packets.
                if is_emulated() || !is_possible(Family::of(frontend.ip())) {
                    lookouts.clear();
                }
                let what =
                    format!("packets longer than {LONGEST} bytes, {direction:?} at {frontend} by {forwarding:?}");
                let all_are_seen = || {
                    assert_eq!(transfer(world.client(), frontend, direction, bytes()).unwrap().bytes, bytes());
                    lookouts.retain(|lookout| !lookout.has_seen());
                    lookouts.is_empty().then_some(())
                };
                poll::until(&what, LIMIT, all_are_seen).unwrap();
            }
        }
    }
}

/// IPv6 has a hop-by-hop header for the length then, ahead of TCP's; in IPv4 it is zero.
#[test]
fn transfer_is_whole_in_packets_larger_than_ip_has_a_length_for() {
    let world = World::new(1);
    for device in world.path_devices() {
        device.set_offloads(&Offload::ALL, true).unwrap();
        for family in [Family::V4, Family::V6].into_iter().filter(|family| is_possible(*family)) {
            allow_large(&device, family);
        }
    }
    // The kernel counts that header where it forwards, though no segment has it.
    let [_, uplink, _, host_device] = world.path_devices();
    for device in [uplink, host_device] {
        device.set_mtu(1600).unwrap();
    }
    transfer_in_large_packets(world);
}

// SPDX-License-Identifier: Apache-2.0
//! Tests BIG TCP: packets between virtual devices whose length exceeds the 16-bit length field of IP.

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

use super::device_offloads::bytes;
use super::redirect::DROP_FORWARDED;
use crate::wire::{ETH_P_ALL, link_address};
use crate::world::{World, is_emulated};

/// The GSO and GRO maximum size that the test sets: three times 64 KiB, far above the maximum of a 16-bit length field.
const BIG_TCP_BYTES: u32 = 196_608;

/// The maximum of a 16-bit length field.
const MAX_IP_BYTES: u32 = 65_535;
const ETHERNET_HEADER: u32 = 14;

/// The first kernel whose veth devices accept packets of this size, for each family.
const SINCE_V6: KernelVersion = KernelVersion::new(5, 19, 0);
const SINCE_V4: KernelVersion = KernelVersion::new(6, 3, 0);

/// Time limit for a packet that the socket has already queued.
const QUEUED: Duration = Duration::from_millis(10);

/// Time limit until a large packet is observed. The limit is long, because only some of a sender's packets are large.
const LIMIT: Duration = Duration::from_mins(1);

/// The side of a device where packets are observed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Arriving,
    Leaving,
}

/// Detects packets at a device that are longer than [`MAX_IP_BYTES`]. The socket gets received packets before any
/// program runs, and sent packets after all programs.
struct LargePacketSocket(Socket);

impl LargePacketSocket {
    fn new(device: &Device, side: Side) -> Self {
        let socket = device.netns().run(|| Socket::new(Domain::PACKET, Type::RAW, None)).unwrap().unwrap();
        socket.attach_filter(&large_packet_filter(side)).unwrap();
        // Bind the socket after the filter is set, because an unbound socket receives no packet.
        socket.bind(&link_address(device.ifindex().unwrap(), ETH_P_ALL)).unwrap();
        socket.set_read_timeout(Some(QUEUED)).unwrap();
        Self(socket)
    }

    fn has_seen(&self) -> bool {
        poll::uninterrupted(|| self.0.recv(&mut [])).is_ok()
    }
}

/// Returns a classic BPF filter that selects packets by direction and length, and passes only their Ethernet headers.
fn large_packet_filter(side: Side) -> [SockFilter; 6] {
    const LOAD: u16 = 0x20;
    const LOAD_LENGTH: u16 = 0x80;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const JUMP_IF_GREATER: u16 = 0x25;
    const RETURN: u16 = 0x06;
    /// `SKF_AD_OFF + SKF_AD_PKTTYPE`
    const KIND: u32 = 0xffff_f004;
    let outgoing = u32::from(libc::PACKET_OUTGOING);
    let (if_leaving, otherwise) = if side == Side::Leaving { (0, 3) } else { (3, 0) };
    [
        SockFilter::new(LOAD, 0, 0, KIND),
        SockFilter::new(JUMP_IF_EQUAL, if_leaving, otherwise, outgoing),
        SockFilter::new(LOAD_LENGTH, 0, 0, 0),
        SockFilter::new(JUMP_IF_GREATER, 0, 1, MAX_IP_BYTES + ETHERNET_HEADER),
        SockFilter::new(RETURN, 0, 0, ETHERNET_HEADER),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}

/// Makes a device send, accept and merge packets of up to [`BIG_TCP_BYTES`] bytes in a family. The kernel must support
/// BIG TCP in this family.
#[track_caller]
fn allow_large(device: &Device, family: Family) {
    let limits = if family == Family::V4 {
        [LinkAttribute::GsoIpv4MaxSize(BIG_TCP_BYTES), LinkAttribute::GroIpv4MaxSize(BIG_TCP_BYTES)]
    } else {
        [LinkAttribute::GsoMaxSize(BIG_TCP_BYTES), LinkAttribute::GroMaxSize(BIG_TCP_BYTES)]
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

/// Whether the kernel supports BIG TCP in a family.
fn is_supported(family: Family) -> bool {
    KernelVersion::current().unwrap() >= if family == Family::V4 { SINCE_V4 } else { SINCE_V6 }
}

/// Sockets that observe a transfer's packets at two places: where the packets arrive at the Node, and where they leave
/// the Node or, in a redirected upload, arrive at the Pod.
fn sockets(world: &World, forwarding: Forwarding, direction: Direction) -> Vec<LargePacketSocket> {
    let [_, uplink, pod, host_device] = world.path_devices();
    let [arriving, leaving] =
        [Side::Arriving, Side::Leaving].map(|side| move |device: &Device| LargePacketSocket::new(device, side));
    match (direction, forwarding) {
        (Direction::Upload, Forwarding::Stack) => vec![arriving(&uplink), leaving(&host_device)],
        // There is no socket at the Node's end of the Pod's veth pair, because redirect bypasses this device.
        (Direction::Upload, _) => vec![arriving(&uplink), arriving(&pod)],
        (Direction::Download, _) => vec![arriving(&host_device), leaving(&uplink)],
    }
}

/// Transfers data through the kernel stack and with redirect, in both directions and families, until all sockets along
/// the path have observed a large packet.
fn transfer_in_large_packets(mut world: World) {
    for forwarding in [Forwarding::Stack, Forwarding::Redirect] {
        world.follow(forwarding);
        if forwarding == Forwarding::Redirect {
            world.node().nft(DROP_FORWARDED).unwrap();
        }
        for frontend in world.frontends() {
            for direction in [Direction::Upload, Direction::Download] {
                let mut sockets = sockets(&world, forwarding, direction);
                // No large packet is required on an emulated processor, which is too slow for the TCP windows that such
                // packets need.
                if is_emulated() || !is_supported(Family::of(frontend.ip())) {
                    sockets.clear();
                }
                let what = format!(
                    "packets longer than {MAX_IP_BYTES} bytes, {direction:?} at {frontend} with {forwarding:?}"
                );
                let are_all_seen = || {
                    assert_eq!(transfer(world.client(), frontend, direction, bytes()).unwrap().bytes, bytes());
                    sockets.retain(|socket| !socket.has_seen());
                    sockets.is_empty().then_some(())
                };
                poll::until(&what, LIMIT, are_all_seen).unwrap();
            }
        }
    }
}

/// NPL must translate packets without a valid length field. A BIG TCP packet of IPv6 has its length in a hop-by-hop
/// header before the TCP header. In IPv4, the length field is zero.
#[test]
fn big_tcp_transfers_are_complete() {
    let world = World::new(1);
    for device in world.path_devices() {
        device.set_offloads(&Offload::ALL, true).unwrap();
        for family in [Family::V4, Family::V6].into_iter().filter(|family| is_supported(*family)) {
            allow_large(&device, family);
        }
    }
    // The Node's devices get a larger MTU than the client and the Pod, because the kernel's forwarding code includes
    // the hop-by-hop header in its MTU check, although no segment on the wire has this header.
    let [_, uplink, _, host_device] = world.path_devices();
    for device in [uplink, host_device] {
        device.set_mtu(1600).unwrap();
    }
    transfer_in_large_packets(world);
}

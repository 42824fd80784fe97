// SPDX-License-Identifier: Apache-2.0
//! What drivers do with frames that no packet of the stack's was made of yet: by generic netlink's family `netdev`, which
//! Linux 6.3 brought, and for the other ends of pairs by `RTM_GETLINK` into their network namespace.

use std::{collections::BTreeMap, io, ops::ControlFlow};

use futures::{Stream, TryStreamExt as _, stream};
use rtnetlink::{
    Handle,
    packet_route::link::{LinkAttribute, LinkMessage},
    sys::{AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_GENERIC},
};

use super::{
    NetlinkError,
    raw::{self, Connection, Message, attributes, find},
};
use crate::core::devices::{Device, FrameFacts, FrameTaker};

/// `linux/genetlink.h`: the family that knows the others.
mod control {
    pub(super) const FAMILY: u16 = 16;
    pub(super) const GET_FAMILY: u8 = 3;
    pub(super) const FAMILY_ID: u16 = 1;
    pub(super) const FAMILY_NAME: u16 = 2;
    pub(super) const GROUPS: u16 = 7;
    pub(super) const GROUP_NAME: u16 = 1;
    pub(super) const GROUP_ID: u16 = 2;
}

/// `linux/netdev.h`.
mod netdev {
    pub(super) const FAMILY: &str = "netdev";
    /// Told of devices that come, go and change.
    pub(super) const GROUP: &str = "mgmt";
    pub(super) const GET_DEVICE: u8 = 1;
    pub(super) const IFINDEX: u16 = 1;
    pub(super) const XDP_FEATURES: u16 = 3;
    /// A program may send a frame to another device.
    pub(super) const REDIRECTS: u64 = 1 << 1;
    /// Frames of others are taken, and also those in parts.
    pub(super) const TAKES: u64 = 1 << 2 | 1 << 6;
}

/// The version of each family's messages, which nobody asks for.
const VERSION: u8 = 1;

/// A family as this kernel numbers it.
struct Family {
    id: u16,
    /// Where changes are told.
    group: Option<u32>,
}

const fn to(family: u16, command: u8, attributes: Vec<rtnetlink::packet_core::DefaultNla>) -> Message {
    Message { kind: family, header: [command, VERSION, 0, 0], attributes }
}

/// The family that knows drivers; nothing on a kernel without it.
fn family(connection: &Connection) -> io::Result<Option<Family>> {
    let name = vec![raw::text(control::FAMILY_NAME, netdev::FAMILY)];
    let mut found = None;
    let asked = connection.ask(to(control::FAMILY, control::GET_FAMILY, name), |answer| {
        let id = find(answer, control::FAMILY_ID).and_then(|value| value.try_into().ok()).map(u16::from_ne_bytes);
        let groups = find(answer, control::GROUPS).unwrap_or_default();
        let is_group = |group: &&[u8]| {
            find(group, control::GROUP_NAME)
                .is_some_and(|name| name.strip_suffix(&[0]) == Some(netdev::GROUP.as_bytes()))
        };
        let group = attributes(groups).map(|(_, group)| group).find(is_group);
        let group = group.and_then(|group| find(group, control::GROUP_ID)?.try_into().ok()).map(u32::from_ne_bytes);
        found = id.map(|id| Family { id, group });
    });
    match asked {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        asked => asked.map(|()| found),
    }
}

/// What drivers can do for XDP programs, by the index of their device.
fn features() -> io::Result<BTreeMap<u32, u64>> {
    let connection = Connection::open(NETLINK_GENERIC)?;
    let mut features = BTreeMap::new();
    let Some(family) = family(&connection)? else { return Ok(features) };
    connection.list(to(family.id, netdev::GET_DEVICE, Vec::new()), |device| {
        let ifindex = find(device, netdev::IFINDEX).and_then(|value| value.try_into().ok()).map(u32::from_ne_bytes);
        let of_device =
            find(device, netdev::XDP_FEATURES).and_then(|value| value.try_into().ok()).map(u64::from_ne_bytes);
        features.extend(ifindex.zip(of_device));
        ControlFlow::Continue(())
    })?;
    Ok(features)
}

/// Completes what is known of devices by what their drivers do with frames.
///
/// # Errors
///
/// If the kernel refuses to list that. Where it does not tell of a pair's other end, that takes none.
pub(super) async fn complete(handle: &Handle, devices: &mut [Device]) -> Result<(), NetlinkError> {
    let features = features().map_err(|source| NetlinkError::Frames { source })?;
    for device in devices {
        let has = |wanted| features.get(&device.ifindex).is_some_and(|features| features & wanted == wanted);
        let may_take = device.peer_is_elsewhere && has(netdev::TAKES);
        let taker = if may_take { taker(handle, device.ifindex).await } else { None };
        device.frames = FrameFacts { hands_on: has(netdev::REDIRECTS), taker };
    }
    Ok(())
}

/// Who takes the frames that a device is handed: the other end of its pair.
async fn taker(handle: &Handle, ifindex: u32) -> Option<FrameTaker> {
    let near = handle.link().get().match_index(ifindex).execute().try_next().await.ok()??;
    let of_near = |pick: fn(&LinkAttribute) -> Option<i32>| near.attributes.iter().find_map(pick);
    let netns = of_near(|it| if let LinkAttribute::LinkNetNsId(id) = it { Some(*id) } else { None })?;
    let index = of_near(|it| if let LinkAttribute::Link(index) = it { i32::try_from(*index).ok() } else { None })?;
    let mut question = handle.link().get().match_index(u32::try_from(index).ok()?);
    question.message_mut().attributes.push(LinkAttribute::IfNetnsId(netns));
    let far = question.execute().try_next().await.ok()??;
    let mtu = far.attributes.iter().find_map(|it| if let LinkAttribute::Mtu(mtu) = it { Some(*mtu) } else { None })?;
    Some(FrameTaker { device: hardware_address(&near)?, other_end: hardware_address(&far)?, mtu })
}

fn hardware_address(link: &LinkMessage) -> Option<[u8; 6]> {
    let of_link =
        |it: &LinkAttribute| if let LinkAttribute::Address(addr) = it { addr.as_slice().try_into().ok() } else { None };
    link.attributes.iter().find_map(of_link)
}

/// Yields once for whatever changes what drivers do with frames; never on a kernel that does not tell.
///
/// # Errors
///
/// If the kernel gives no socket.
pub(super) fn changes() -> Result<impl Stream<Item = ()>, NetlinkError> {
    let socket = subscribe().map_err(|source| NetlinkError::Frames { source })?;
    Ok(stream::unfold(socket, async |socket| {
        let socket = socket?;
        // What is lost when there is too much of it counts as a change too.
        let _received = socket.recv_from_full().await;
        Some(((), Some(socket)))
    }))
}

fn subscribe() -> io::Result<Option<TokioSocket>> {
    let Some(group) = family(&Connection::open(NETLINK_GENERIC)?)?.and_then(|family| family.group) else {
        return Ok(None);
    };
    let mut socket = TokioSocket::new(NETLINK_GENERIC)?;
    socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
    socket.socket_ref().add_membership(group)?;
    Ok(Some(socket))
}

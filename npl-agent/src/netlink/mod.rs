// SPDX-License-Identifier: Apache-2.0
//! The Node's devices, addresses and routes, by netlink.

mod driver;
mod fittings;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use futures::{Stream, StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, new_connection, new_multicast_connection,
    packet_core::NetlinkPayload,
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressScope},
        link::{
            InfoData, InfoKind, InfoNetkit, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
            NetkitPolicy,
        },
        route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};
use tokio::task::JoinHandle;

pub use self::fittings::{Onlooker, remove_unused_clsact};
use crate::core::{
    devices::{Device, DeviceKind, LinkFacts},
    fittings::Fittings,
    redirect::Route,
};

/// An operation that the kernel's netlink refused.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket.
    #[error("open a netlink socket")]
    Open(#[source] std::io::Error),
    /// A request failed.
    #[error("{operation} by netlink")]
    Request {
        /// The verb and its object.
        operation: &'static str,
        /// The kernel's answer.
        #[source]
        source: rtnetlink::Error,
    },
}

fn request(operation: &'static str) -> impl FnOnce(rtnetlink::Error) -> NetlinkError {
    move |source| NetlinkError::Request { operation, source }
}

/// What the kernel tells of a network at one time.
#[derive(Debug)]
pub struct Survey {
    /// The Pods whose routes were asked for.
    pub pods: BTreeSet<IpAddr>,
    /// The routes to those of them that there is one to.
    pub routes: BTreeMap<IpAddr, Route>,
    /// Every device, by index.
    pub devices: Vec<Device>,
    /// Addresses whose own packets a rule has routed by a table of their own.
    pub routed_apart: BTreeSet<IpAddr>,
    /// What packets meet on the devices that matter, by their index; nothing unless it was asked for.
    pub fittings: BTreeMap<u32, Fittings>,
}

/// A look at the network that is under way.
pub type Surveying = JoinHandle<Result<Survey, NetlinkError>>;

/// Looks at devices, and the routes to Pods, on a thread of its own: while Pods come and go, the kernel has whoever asks
/// wait for seconds (for `rtnl`), and nothing else may wait with it. What packets meet on devices is looked at only if
/// there is an onlooker.
pub fn survey(pods: BTreeSet<IpAddr>, onlooker: Option<Onlooker>) -> Surveying {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    tokio::task::spawn_blocking(move || {
        runtime.map_err(NetlinkError::Open)?.block_on(async {
            let routes = routes_to(&pods).await?;
            let devices = interfaces().await?;
            let routed_apart = routed_apart().await?;
            let lead_to_pods = routes.values().map(|route| route.ifindex).collect();
            let fittings = match onlooker {
                Some(onlooker) => fittings::fittings(&devices, &lead_to_pods, &onlooker).await?,
                None => BTreeMap::new(),
            };
            Ok(Survey { pods, routes, devices, routed_apart, fittings })
        })
    })
}

/// What has been found, once it has. A panic goes on as if it had happened here.
///
/// # Errors
///
/// If the kernel refuses.
pub async fn surveyed(under_way: &mut Surveying) -> Result<Survey, NetlinkError> {
    under_way.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(error) => Err(NetlinkError::Open(std::io::Error::other(error))),
    })
}

/// Every device of this network namespace, by index.
///
/// # Errors
///
/// If the kernel refuses one of the three dumps.
pub async fn interfaces() -> Result<Vec<Device>, NetlinkError> {
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let result = read_interfaces(&handle).await;
    driver.abort();
    result
}

async fn read_interfaces(handle: &Handle) -> Result<Vec<Device>, NetlinkError> {
    let links: Vec<LinkMessage> = handle.link().get().execute().try_collect().await.map_err(request("list devices"))?;
    let mut addresses = read_addresses(handle).await?;
    let routed = devices_with_default_route(handle).await?;
    let carriers: BTreeSet<u32> = links.iter().filter_map(carrier).collect();
    let mut devices: Vec<Device> = links.iter().filter_map(device).collect();
    for device in &mut devices {
        device.link.carries_others = carriers.contains(&device.ifindex);
        device.addresses = addresses.remove(&device.ifindex).unwrap_or_default();
        device.has_default_route = routed.contains(&device.ifindex);
    }
    devices.sort_by_key(|device| device.ifindex);
    Ok(devices)
}

/// The route to each address; addresses without one are left out.
///
/// # Errors
///
/// If there is no socket.
async fn routes_to(addresses: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, Route>, NetlinkError> {
    if addresses.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let mut routes = BTreeMap::new();
    for addr in addresses {
        routes.extend(route_to(&handle, *addr).await.map(|route| (*addr, route)));
    }
    driver.abort();
    Ok(routes)
}

async fn route_to(handle: &Handle, addr: IpAddr) -> Option<Route> {
    let mut message = RouteMessage::default();
    let (family, length, destination) = match addr {
        IpAddr::V4(addr) => (AddressFamily::Inet, 32, RouteAddress::Inet(addr)),
        IpAddr::V6(addr) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(addr)),
    };
    message.header.address_family = family;
    message.header.destination_prefix_length = length;
    message.attributes.push(RouteAttribute::Destination(destination));
    // An error says that there is no route.
    let found = handle.route().get(message).execute().try_next().await.ok()??;
    let metrics =
        found.attributes.iter().filter_map(|it| if let RouteAttribute::Metrics(all) = it { Some(all) } else { None });
    Some(Route {
        ifindex: found.attributes.iter().flat_map(outgoing_devices).next()?,
        has_gateway: found
            .attributes
            .iter()
            .any(|it| matches!(it, RouteAttribute::Gateway(_) | RouteAttribute::Via(_))),
        mtu: metrics.flatten().find_map(|metric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None }),
    })
}

/// Single addresses whose packets a rule has routed by another table than the Node's.
async fn routed_apart() -> Result<BTreeSet<IpAddr>, NetlinkError> {
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let mut addresses = BTreeSet::new();
    for family in [rtnetlink::IpVersion::V4, rtnetlink::IpVersion::V6] {
        // A kernel without such rules says so by an error.
        let rules: Vec<RuleMessage> = handle.rule().get(family).execute().try_collect().await.unwrap_or_default();
        addresses.extend(rules.iter().filter_map(sender_routed_apart));
    }
    driver.abort();
    Ok(addresses)
}

fn sender_routed_apart(rule: &RuleMessage) -> Option<IpAddr> {
    let of_table = |it: &RuleAttribute| if let RuleAttribute::Table(table) = it { Some(*table) } else { None };
    let of_source = |it: &RuleAttribute| if let RuleAttribute::Source(addr) = it { Some(*addr) } else { None };
    let table = rule.attributes.iter().find_map(of_table).unwrap_or_else(|| rule.header.table.into());
    let addr = rule.attributes.iter().find_map(of_source)?;
    let is_single = rule.header.src_len == if addr.is_ipv4() { 32 } else { 128 };
    let is_apart = rule.header.action == RuleAction::ToTable && table != u32::from(RouteHeader::RT_TABLE_MAIN);
    (is_single && is_apart).then_some(addr)
}

/// Addresses of global scope by device; others cannot be a client's destination from outside.
async fn read_addresses(handle: &Handle) -> Result<BTreeMap<u32, Vec<IpAddr>>, NetlinkError> {
    let mut dump = handle.address().get().execute();
    let mut addresses: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
    while let Some(message) = dump.try_next().await.map_err(request("list addresses"))? {
        if message.header.scope != AddressScope::Universe {
            continue;
        }
        // On a point-to-point device `Address` is the peer's and `Local` is ours.
        let of = |pick: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(pick);
        let local = of(|attribute| if let AddressAttribute::Local(ip) = attribute { Some(*ip) } else { None });
        let address = of(|attribute| if let AddressAttribute::Address(ip) = attribute { Some(*ip) } else { None });
        if let Some(ip) = local.or(address) {
            addresses.entry(message.header.index).or_default().push(ip);
        }
    }
    Ok(addresses)
}

async fn devices_with_default_route(handle: &Handle) -> Result<BTreeSet<u32>, NetlinkError> {
    let mut devices = BTreeSet::new();
    for family in [rtnetlink::IpVersion::V4, rtnetlink::IpVersion::V6] {
        let mut message = RouteMessage::default();
        message.header.address_family = match family {
            rtnetlink::IpVersion::V4 => AddressFamily::Inet,
            rtnetlink::IpVersion::V6 => AddressFamily::Inet6,
        };
        let mut dump = handle.route().get(message).execute();
        while let Some(route) = dump.try_next().await.map_err(request("list routes"))? {
            let in_main = route.header.table == RouteHeader::RT_TABLE_MAIN;
            if in_main && route.header.destination_prefix_length == 0 {
                devices.extend(route.attributes.iter().flat_map(outgoing_devices));
            }
        }
    }
    Ok(devices)
}

fn outgoing_devices(attribute: &RouteAttribute) -> Vec<u32> {
    if let RouteAttribute::Oif(index) = attribute {
        vec![*index]
    } else if let RouteAttribute::MultiPath(hops) = attribute {
        hops.iter().map(|hop| hop.interface_index).collect()
    } else {
        Vec::new()
    }
}

fn device(link: &LinkMessage) -> Option<Device> {
    let name = link
        .attributes
        .iter()
        .find_map(|attribute| if let LinkAttribute::IfName(name) = attribute { Some(name.clone()) } else { None })?;
    let is_enslaved =
        link.attributes.iter().any(|attribute| matches!(attribute, LinkAttribute::Controller(index) if *index != 0));
    let kind = kind(link);
    let driver = if kind == DeviceKind::Physical { driver::driver(&name) } else { None };
    let of_mtu = |attribute: &LinkAttribute| if let LinkAttribute::Mtu(mtu) = attribute { Some(*mtu) } else { None };
    let mtu = link.attributes.iter().find_map(of_mtu).unwrap_or_default();
    Some(Device {
        ifindex: link.header.index,
        name,
        kind,
        has_ethernet: link.header.link_layer_type == LinkLayerType::Ether,
        is_enslaved,
        peer_is_elsewhere: link.attributes.iter().any(|it| matches!(it, LinkAttribute::LinkNetNsId(_))),
        has_default_route: false,
        addresses: Vec::new(),
        link: LinkFacts { driver, mtu, carries_others: false, is_closed: is_closed(link) },
    })
}

/// The device that this one takes its frames from.
fn carrier(link: &LinkMessage) -> Option<u32> {
    let takes_frames = matches!(
        info_kind(link)?,
        InfoKind::Vlan | InfoKind::MacVlan | InfoKind::MacVtap | InfoKind::IpVlan | InfoKind::IpVtap
    );
    let of_link =
        |attribute: &LinkAttribute| if let LinkAttribute::Link(index) = attribute { Some(*index) } else { None };
    link.attributes.iter().find_map(of_link).filter(|_| takes_frames)
}

/// Whether it is a pair of netkit's that drops what no program lets pass.
fn is_closed(link: &LinkMessage) -> bool {
    let data = link_infos(link)
        .find_map(|info| if let LinkInfo::Data(InfoData::Netkit(data)) = info { Some(data) } else { None });
    data.into_iter().flatten().any(|it| matches!(it, InfoNetkit::Policy(policy) if *policy != NetkitPolicy::Pass))
}

fn kind(link: &LinkMessage) -> DeviceKind {
    if link.header.flags.contains(LinkFlags::Loopback) {
        return DeviceKind::Loopback;
    }
    info_kind(link).map_or(DeviceKind::Physical, kind_of)
}

/// What made it, of a device that is no hardware.
fn info_kind(link: &LinkMessage) -> Option<&InfoKind> {
    link_infos(link).find_map(|info| if let LinkInfo::Kind(kind) = info { Some(kind) } else { None })
}

fn link_infos(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    let infos = link
        .attributes
        .iter()
        .find_map(|attribute| if let LinkAttribute::LinkInfo(infos) = attribute { Some(infos) } else { None });
    infos.into_iter().flatten()
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the kernel adds kinds; an unknown one is treated as an uplink")]
fn kind_of(kind: &InfoKind) -> DeviceKind {
    match kind {
        InfoKind::Veth | InfoKind::Netkit => DeviceKind::Veth,
        InfoKind::Bridge => DeviceKind::Bridge,
        InfoKind::Dummy | InfoKind::Ifb | InfoKind::Nlmon => DeviceKind::Dummy,
        InfoKind::Vxlan
        | InfoKind::Geneve
        | InfoKind::IpIp
        | InfoKind::Ip6Tnl
        | InfoKind::SitTun
        | InfoKind::GreTun
        | InfoKind::GreTap
        | InfoKind::GreTun6
        | InfoKind::GreTap6
        | InfoKind::Wireguard
        | InfoKind::Xfrm
        | InfoKind::Vti
        | InfoKind::Vti6
        | InfoKind::Tun => DeviceKind::Tunnel,
        _ => DeviceKind::Other,
    }
}

/// Yields once for every message that may have changed devices, addresses or routes, and, `with_fittings`, what others have
/// on devices; an overrun counts as one.
///
/// # Errors
///
/// If the kernel gives no socket.
pub fn changes(with_fittings: bool) -> Result<impl Stream<Item = ()> + Unpin, NetlinkError> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Tc,
    ];
    let (connection, _handle, messages) = new_multicast_connection(&groups).map_err(NetlinkError::Open)?;
    tokio::spawn(connection);
    Ok(Box::pin(messages.filter_map(move |(message, _from)| {
        std::future::ready(is_change(&message.payload, with_fittings).then_some(()))
    })))
}

/// Of routes those to everything and to single addresses matter, and of filters that one went, or that one of others came:
/// our own attaching would else wake us again.
fn is_change(payload: &NetlinkPayload<RouteNetlinkMessage>, with_fittings: bool) -> bool {
    let NetlinkPayload::InnerMessage(message) = payload else {
        return matches!(payload, NetlinkPayload::Overrun(_));
    };
    if let RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) = message {
        return matches!(route.header.destination_prefix_length, 0 | 32 | 128);
    }
    if let RouteNetlinkMessage::NewTrafficFilter(filter) = message {
        return with_fittings && fittings::is_others_filter(filter);
    }
    if let RouteNetlinkMessage::NewQueueDiscipline(queue) = message {
        return with_fittings && fittings::is_queue(queue);
    }
    matches!(
        message,
        RouteNetlinkMessage::NewLink(_)
            | RouteNetlinkMessage::DelLink(_)
            | RouteNetlinkMessage::NewAddress(_)
            | RouteNetlinkMessage::DelAddress(_)
            | RouteNetlinkMessage::DelTrafficFilter(_)
            | RouteNetlinkMessage::DelQueueDiscipline(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_of_netkits_is_closed_by_its_own_policy() {
        for (policy, closed) in [(NetkitPolicy::Pass, false), (NetkitPolicy::Drop, true)] {
            let data = InfoData::Netkit(vec![InfoNetkit::PeerPolicy(NetkitPolicy::Drop), InfoNetkit::Policy(policy)]);
            let mut link = LinkMessage::default();
            link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Netkit), LinkInfo::Data(data)]));
            assert_eq!(is_closed(&link), closed, "{policy:?}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The Node's devices, addresses and routes, by netlink.

mod driver;
mod link;
mod queue;

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
        link::LinkMessage,
        route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};
use tokio::task::JoinHandle;

pub use self::queue::remove_unused_clsact;
use crate::core::{devices::Device, redirect::Route};

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
}

/// A look at the network that is under way.
pub type Surveying = JoinHandle<Result<Survey, NetlinkError>>;

/// Looks at devices, and the routes to Pods, on a thread of its own: while Pods come and go, the kernel has whoever asks
/// wait for seconds (for `rtnl`), and nothing else may wait with it.
pub fn survey(pods: BTreeSet<IpAddr>) -> Surveying {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    tokio::task::spawn_blocking(move || {
        runtime.map_err(NetlinkError::Open)?.block_on(async {
            let routes = routes_to(&pods).await?;
            let devices = interfaces().await?;
            let routed_apart = routed_apart().await?;
            Ok(Survey { pods, routes, devices, routed_apart })
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
    let ingress_queues = queue::ingress_queues(handle).await;
    let carriers: BTreeSet<u32> = links.iter().filter_map(link::carrier).collect();
    let mut devices: Vec<Device> = links.iter().filter_map(link::device).collect();
    for device in &mut devices {
        device.link.carries_others = carriers.contains(&device.ifindex);
        device.link.has_ingress_queue = ingress_queues.contains(&device.ifindex);
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

/// Yields once for every message that may have changed devices, addresses or routes; an overrun counts as one.
///
/// # Errors
///
/// If the kernel gives no socket.
pub fn changes() -> Result<impl Stream<Item = ()> + Unpin, NetlinkError> {
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
    Ok(Box::pin(messages.filter_map(async |(message, _from)| is_change(&message.payload).then_some(()))))
}

/// Of routes those to everything and to single addresses matter, and of filters only that one went: our own attaching would else wake us again.
fn is_change(payload: &NetlinkPayload<RouteNetlinkMessage>) -> bool {
    let NetlinkPayload::InnerMessage(message) = payload else {
        return matches!(payload, NetlinkPayload::Overrun(_));
    };
    if let RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) = message {
        return matches!(route.header.destination_prefix_length, 0 | 32 | 128);
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

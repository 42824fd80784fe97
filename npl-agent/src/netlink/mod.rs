// SPDX-License-Identifier: Apache-2.0
//! Reads the Node's devices, addresses, routes and policy rules by rtnetlink, and reports their changes.

mod driver;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod link;
mod list;
mod receive_offload;
mod rules;
mod tc_inspection;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use rtnetlink::{
    Handle, MulticastGroup, new_connection, new_multicast_connection,
    packet_core::NetlinkPayload,
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage, AddressScope},
        link::LinkMessage,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric},
    },
};
use tokio::task::JoinHandle;
use tracing::warn;

use self::{
    link::{carrier, device, master_of_physical_port},
    list::Lists,
    tc_inspection::Queues,
};
pub use self::{
    receive_offload::devices_with_fraglists,
    tc_inspection::{TcInspection, TcState, read_filters, remove_unused_clsact},
};
use crate::core::{
    devices::{
        Device,
        attachments::DeviceAttachments,
        redirect::Route,
        reply_routing::{MAIN_TABLE, Routing},
    },
    model::Family,
    networks::RuleNames,
    pages,
};

const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

/// A failed netlink operation.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The netlink socket could not be opened.
    #[error("open a netlink socket")]
    Open(#[source] std::io::Error),
    /// The kernel returned an error for the request `operation`.
    #[error("{operation} by netlink")]
    Request {
        /// The request as verb and object, such as `list devices`.
        operation: &'static str,
        /// The kernel's error.
        #[source]
        source: rtnetlink::Error,
    },
    /// The kernel returned an error for the request to list the offload features of devices.
    #[error("read the features of devices by netlink")]
    Features {
        /// The kernel's error.
        #[source]
        source: Box<ethtool::EthtoolError>,
    },
    /// The dumped list changed during every attempt, so no dump is complete. A later attempt may succeed.
    #[error("{operation} by netlink: the list changed during each of several dumps; the agent tries again later")]
    Changing {
        /// The request as verb and object, such as `list devices`.
        operation: &'static str,
    },
}

impl NetlinkError {
    /// The error number that the kernel returned for a request; `None` for other errors.
    fn code(&self) -> Option<i32> {
        let Self::Request { source: rtnetlink::Error::NetlinkError(message), .. } = self else { return None };
        message.to_io().raw_os_error()
    }

    /// Whether the kernel was built without the subsystem of the request.
    fn is_unsupported(&self) -> bool {
        self.code() == Some(libc::EOPNOTSUPP)
    }

    /// Whether the device of the request no longer exists.
    fn is_of_gone_device(&self) -> bool {
        matches!(self.code(), Some(libc::ENODEV | libc::ENXIO))
    }
}

fn request(operation: &'static str) -> impl FnOnce(rtnetlink::Error) -> NetlinkError {
    move |source| NetlinkError::Request { operation, source }
}

/// The devices, routes and policy rules from which the agent decides where to attach programs and how to reach Pods.
#[derive(Debug)]
pub struct Survey {
    /// The Pod addresses whose routes were looked up.
    pub pods: BTreeSet<IpAddr>,
    /// The route to each Pod address in `pods`; an address without a route is absent.
    pub routes: BTreeMap<IpAddr, Route>,
    /// Every device of this network namespace, sorted by ifindex.
    pub devices: Vec<Device>,
    /// Policy rules and default routes.
    pub routing: Routing,
    /// Qdiscs, filters and programs on the devices that the [`TcInspection`] selects, by ifindex; empty if the caller
    /// gave no [`TcInspection`].
    pub attachments: BTreeMap<u32, DeviceAttachments>,
    /// The names of netfilter's tables and chains, or why the names cannot be read; `None` if the caller did not
    /// request the names.
    pub rule_names: Option<Result<RuleNames, String>>,
}

/// A running survey of the network.
pub type SurveyTask = JoinHandle<Result<Survey, NetlinkError>>;

/// Starts a separate thread that reads devices, routing, and the routes to Pods. A separate thread is needed, because a
/// request can wait seconds for the kernel's `rtnl` lock while Pods are created and deleted. Qdiscs, filters and
/// programs are read only if `inspection` is given.
pub fn survey(pods: BTreeSet<IpAddr>, inspection: Option<TcInspection>) -> SurveyTask {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    tokio::task::spawn_blocking(move || {
        runtime.map_err(NetlinkError::Open)?.block_on(async {
            let routes = routes_to(&pods).await?;
            let NetworkState { devices, queues, routing } = read_network().await?;
            let read_names = inspection.as_ref().and_then(|inspection| inspection.rule_names);
            let rule_names = read_names.map(|read| read().map_err(|error| error.to_string()));
            let attachments = match inspection {
                Some(inspection) => {
                    let routes = routes.values().filter(|_| inspection.with_pods);
                    let lead_to_pods = routes.map(|route| route.ifindex).collect();
                    tc_inspection::inspect(&devices, queues?, &lead_to_pods, &inspection).await?
                }
                None => BTreeMap::new(),
            };
            Ok(Survey { pods, routes, devices, routing, attachments, rule_names })
        })
    })
}

/// Waits for a survey and returns its result. If the thread of the survey has panicked, the caller also panics.
///
/// # Errors
///
/// If the kernel returned an error for a request, or changes interrupted every dump of a list.
pub async fn join_survey(in_flight: &mut SurveyTask) -> Result<Survey, NetlinkError> {
    in_flight.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(error) => Err(NetlinkError::Open(std::io::Error::other(error))),
    })
}

/// Returns every device of this network namespace, sorted by ifindex.
///
/// # Errors
///
/// If the kernel returns an error for a request, or changes interrupt every dump of a list.
pub async fn interfaces() -> Result<Vec<Device>, NetlinkError> {
    read_network().await.map(|state| state.devices)
}

/// Reads every device, the policy rules and the default routes.
///
/// # Errors
///
/// The errors of [`interfaces`].
pub async fn interfaces_and_routing() -> Result<(Vec<Device>, Routing), NetlinkError> {
    read_network().await.map(|state| (state.devices, state.routing))
}

/// Reads the qdiscs, filters and programs of the devices that `inspection` selects, by ifindex.
///
/// # Errors
///
/// The errors of [`interfaces`].
pub async fn attachments(inspection: &TcInspection) -> Result<BTreeMap<u32, DeviceAttachments>, NetlinkError> {
    let NetworkState { devices, queues, .. } = read_network().await?;
    tc_inspection::inspect(&devices, queues?, &BTreeSet::new(), inspection).await
}

/// Devices, qdiscs and routing of this network namespace, as the kernel has reported them.
struct NetworkState {
    devices: Vec<Device>,
    /// The qdiscs by device, or the error of the dump, for example because the kernel has no traffic control. Only
    /// callers that need qdiscs return this error.
    queues: Result<Queues, NetlinkError>,
    routing: Routing,
}

async fn read_network() -> Result<NetworkState, NetlinkError> {
    let lists = Lists::open()?;
    let links = links(&lists).await?;
    let mut addresses = read_addresses(&lists).await?;
    let (routing, with_gateway) = rules::read_routing(&lists).await?;
    let of_main = routing.default_routes.iter().filter(|route| route.table == MAIN_TABLE);
    let routed: BTreeSet<u32> = of_main.map(|route| route.ifindex).collect();
    let queues = tc_inspection::read_queues(&lists).await;
    if let Err(error @ NetlinkError::Changing { .. }) = queues {
        return Err(error);
    }
    let has_queue = |ifindex, kind| queues.as_ref().is_ok_and(|all| tc_inspection::has_queue(all, ifindex, kind));
    let carriers: BTreeSet<u32> = links.iter().filter_map(carrier).collect();
    let with_physical_port: BTreeSet<u32> = links.iter().filter_map(master_of_physical_port).collect();
    let mut devices: Vec<Device> = links.iter().filter_map(device).collect();
    for device in &mut devices {
        device.link.has_upper_devices = carriers.contains(&device.ifindex);
        // A device with an `ingress` qdisc cannot also have a `clsact` qdisc, because both use the same handle.
        device.link.has_ingress_queue = has_queue(device.ifindex, "ingress");
        device.link.has_clsact = has_queue(device.ifindex, "clsact");
        device.addresses = addresses.remove(&device.ifindex).unwrap_or_default();
        device.has_default_route = routed.contains(&device.ifindex);
        device.has_gateway_route = with_gateway.contains(&device.ifindex);
        device.link.has_physical_port = with_physical_port.contains(&device.ifindex);
    }
    devices.sort_by_key(|device| device.ifindex);
    Ok(NetworkState { devices, queues, routing })
}

async fn links(lists: &Lists) -> Result<Vec<LinkMessage>, NetlinkError> {
    let pick = |message| if let RouteNetlinkMessage::NewLink(link) = message { Some(link) } else { None };
    lists.dump("list devices", RouteNetlinkMessage::GetLink(LinkMessage::default()), pick).await
}

/// Looks up the route to each address; addresses without a route are absent from the result.
///
/// # Errors
///
/// If the netlink socket cannot be opened.
pub async fn routes_to(addresses: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, Route>, NetlinkError> {
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
    // If the kernel returns an error, the address has no route.
    let found = handle.route().get(message).execute().try_next().await.ok()??;
    let metrics =
        found.attributes.iter().filter_map(|it| if let RouteAttribute::Metrics(all) = it { Some(all) } else { None });
    Some(Route {
        ifindex: found.attributes.iter().flat_map(outgoing_devices).next()?,
        has_gateway: found.attributes.iter().any(is_gateway),
        mtu: metrics.flatten().find_map(|metric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None }),
    })
}

/// Reads the addresses of global scope, by ifindex. Addresses with a narrower scope, such as host and link, are
/// ignored, because remote clients cannot reach these addresses.
async fn read_addresses(lists: &Lists) -> Result<BTreeMap<u32, Vec<IpAddr>>, NetlinkError> {
    let mut addresses: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
    // Each IP family needs a separate dump. In one dump of both families, the kernel does not always set
    // `NLM_F_DUMP_INTR` if addresses of the first family change during the dump.
    for family in FAMILIES {
        let mut wanted = AddressMessage::default();
        wanted.header.family = family;
        let pick = |message| if let RouteNetlinkMessage::NewAddress(it) = message { Some(it) } else { None };
        let all = lists.dump("list addresses", RouteNetlinkMessage::GetAddress(wanted), pick).await?;
        // A kernel without IPv6 answers the request for IPv6 addresses with the IPv4 addresses, which this filter
        // removes.
        for message in all.iter().filter(|message| message.header.family == family) {
            if let Some(ip) = global_address(message) {
                addresses.entry(message.header.index).or_default().push(ip);
            }
        }
    }
    Ok(addresses)
}

/// Returns the address of a message if the address has global scope; `None` if the address is not of the family that the
/// message names.
fn global_address(message: &AddressMessage) -> Option<IpAddr> {
    // `Local` takes precedence: on a point-to-point device, `Local` is the Node's address, and `Address` is the peer's
    // address.
    let of = |pick: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(pick);
    let local = of(|attribute| if let AddressAttribute::Local(ip) = attribute { Some(*ip) } else { None });
    let address = of(|attribute| if let AddressAttribute::Address(ip) = attribute { Some(*ip) } else { None });
    let is_of_family = |ip: &IpAddr| rules::family_of(message.header.family) == Some(Family::of(*ip));
    local.or(address).filter(is_of_family).filter(|_| message.header.scope == AddressScope::Universe)
}

const fn is_gateway(attribute: &RouteAttribute) -> bool {
    matches!(attribute, RouteAttribute::Gateway(_) | RouteAttribute::Via(_))
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

/// Yields an item for each change of a device, an address, a default route, a host route or a policy rule, and for each
/// removed qdisc or filter. With `with_attachments`, also yields an item for each added qdisc that queues packets, and
/// for each added filter of other software. An overrun of the receive buffer also yields an item, because messages
/// about changes may have been lost.
///
/// # Errors
///
/// If the netlink socket cannot be opened.
pub fn changes(with_attachments: bool) -> Result<impl Stream<Item = ()> + Unpin, NetlinkError> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Ipv4Rule,
        MulticastGroup::Ipv6Rule,
        MulticastGroup::Tc,
    ];
    let (connection, _handle, messages) = new_multicast_connection(&groups).map_err(NetlinkError::Open)?;
    tokio::spawn(connection);
    let changes = messages.filter_map(move |(message, _from)| {
        std::future::ready(is_change(&message.payload, with_attachments).then_some(()))
    });
    let end = async {
        warn!(
            see = pages::url(&pages::of_check("devices")),
            "the netlink socket for changes of devices, addresses and routes has closed: the agent notices changes \
             only at each resync (--resync); restart the agent"
        );
    };
    Ok(Box::pin(changes.chain(stream::once(end))))
}

/// Returns whether a message reports a change that needs a survey. A change of a route counts only if the route is a
/// default route or a host route. A new filter counts only if it belongs to other software; otherwise, each filter that
/// the agent attaches would cause another survey.
fn is_change(payload: &NetlinkPayload<RouteNetlinkMessage>, with_attachments: bool) -> bool {
    let NetlinkPayload::InnerMessage(message) = payload else {
        return matches!(payload, NetlinkPayload::Overrun(_));
    };
    if let RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) = message {
        return matches!(route.header.destination_prefix_length, 0 | 32 | 128);
    }
    if let RouteNetlinkMessage::NewTrafficFilter(filter) = message {
        return with_attachments && tc_inspection::is_foreign_filter(filter);
    }
    if let RouteNetlinkMessage::NewQueueDiscipline(queue) = message {
        return with_attachments && tc_inspection::is_queue(queue);
    }
    matches!(
        message,
        RouteNetlinkMessage::NewLink(_)
            | RouteNetlinkMessage::DelLink(_)
            | RouteNetlinkMessage::NewAddress(_)
            | RouteNetlinkMessage::DelAddress(_)
            | RouteNetlinkMessage::NewRule(_)
            | RouteNetlinkMessage::DelRule(_)
            | RouteNetlinkMessage::DelTrafficFilter(_)
            | RouteNetlinkMessage::DelQueueDiscipline(_)
    )
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rtnetlink::packet_route::{
        AddressFamily,
        address::{AddressAttribute, AddressMessage, AddressScope},
    };

    use super::global_address;

    #[test]
    fn an_address_of_another_family_than_its_message_names_is_ignored() {
        let address: IpAddr = "2001:db8::1".parse().unwrap();
        let read = |family| {
            let mut message = AddressMessage::default();
            (message.header.family, message.header.scope) = (family, AddressScope::Universe);
            message.attributes.push(AddressAttribute::Address(address));
            global_address(&message)
        };
        assert_eq!(read(AddressFamily::Inet6), Some(address));
        assert_eq!(read(AddressFamily::Inet), None);
    }
}

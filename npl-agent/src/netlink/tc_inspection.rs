// SPDX-License-Identifier: Apache-2.0
//! Reads the qdiscs and filters of devices, and determines whether each filter belongs to NPL. Also removes a clsact
//! qdisc that has no filters.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use futures::TryStreamExt as _;
use rtnetlink::{
    Handle, new_connection,
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
    },
};

use super::{NetlinkError, device, interfaces, links, list::Lists, request};
use crate::core::{
    cleanup::TcFilter,
    devices::{
        Device, DeviceSelection,
        attachments::{AttachmentOwner, DeviceAttachments, Side, is_hook, matters, owner_of_filter},
    },
    networks::RuleNames,
};

/// Selects the devices whose qdiscs, filters and programs are read.
#[expect(missing_debug_implementations, reason = "closures do not implement Debug")]
pub struct TcInspection {
    /// The devices that may be uplinks. These devices are always inspected.
    pub uplinks: DeviceSelection,
    /// Whether the egress devices of the routes to Pods are also inspected.
    pub with_pods: bool,
    /// Returns the programs of BPF links on the device with this ifindex; `None` if the kernel does not report BPF
    /// links. Programs of BPF links run before the device's filters.
    pub programs_on: Box<dyn Fn(u32) -> Option<DeviceAttachments> + Send + Sync>,
    /// Reads the names of netfilter's tables and chains; `None` if no decision depends on these names.
    pub rule_names: Option<fn() -> io::Result<RuleNames>>,
}

/// The kinds of the qdiscs of each device, such as `clsact`, by ifindex.
pub(super) type Queues = BTreeMap<u32, BTreeSet<String>>;

/// Reads the qdiscs, filters and programs of the selected devices, by ifindex. A device that cannot be inspected is
/// absent from the result.
///
/// # Errors
///
/// If the netlink socket cannot be opened.
pub(super) async fn inspect(
    devices: &[Device],
    mut queues: Queues,
    lead_to_pods: &BTreeSet<u32>,
    inspection: &TcInspection,
) -> Result<BTreeMap<u32, DeviceAttachments>, NetlinkError> {
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let mut all = BTreeMap::new();
    for ifindex in
        devices.iter().filter(|device| matters(device, lead_to_pods, &inspection.uplinks)).map(|device| device.ifindex)
    {
        let Some(mut attachments) = (inspection.programs_on)(ifindex) else { continue };
        attachments.queues = queues.remove(&ifindex).unwrap_or_default();
        if add_filters(&handle, ifindex, &mut attachments).await.is_some() {
            all.insert(ifindex, attachments);
        }
    }
    driver.abort();
    Ok(all)
}

/// Reads the qdisc kinds of all devices in a single dump.
pub(super) async fn read_queues(lists: &Lists) -> Result<Queues, NetlinkError> {
    let pick = |message| if let RouteNetlinkMessage::NewQueueDiscipline(queue) = message { Some(queue) } else { None };
    let wanted = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let mut queues = Queues::new();
    for queue in lists.dump("list qdiscs", wanted, pick).await? {
        queues.entry(queue.header.index.cast_unsigned()).or_default().insert(kind(&queue).to_owned());
    }
    Ok(queues)
}

/// Returns whether a device has a qdisc of this kind.
pub(super) fn has_queue(queues: &Queues, ifindex: u32, kind: &str) -> bool {
    queues.get(&ifindex).is_some_and(|kinds| kinds.contains(kind))
}

async fn add_filters(handle: &Handle, ifindex: u32, attachments: &mut DeviceAttachments) -> Option<()> {
    let index = i32::try_from(ifindex).ok()?;
    for side in attachments.filtered_sides() {
        let filters: Vec<TcMessage> = dump_filters(handle, index, *side).await.ok()?;
        attachments.add(*side, filters.iter().filter_map(owner));
    }
    Some(())
}

async fn dump_filters(handle: &Handle, index: i32, side: Side) -> Result<Vec<TcMessage>, NetlinkError> {
    let filters = handle.traffic_filter(index).get();
    let query = match side {
        Side::Ingress => filters.ingress(),
        Side::Egress => filters.egress(),
    };
    query.execute().try_collect().await.map_err(request("list filters"))
}

pub(super) fn owner(filter: &TcMessage) -> Option<AttachmentOwner> {
    let handle = (filter.header.handle.major, filter.header.handle.minor);
    owner_of_filter(kind(filter), priority(filter), handle, program_name(filter))
}

fn priority(filter: &TcMessage) -> u16 {
    u16::try_from(filter.header.info >> u16::BITS).unwrap_or_default()
}

/// Returns the name of a BPF filter's program; `None` for a filter of another kind, or if the kernel reports no name.
fn program_name(filter: &TcMessage) -> Option<&str> {
    let options = filter
        .attributes
        .iter()
        .filter_map(|it| if let TcAttribute::Options(options) = it { Some(options) } else { None });
    options.flatten().find_map(|option| {
        let TcOption::Bpf(TcFilterBpfOption::ProgName(name)) = option else { return None };
        Some(name.trim_end_matches('\0'))
    })
}

fn kind(message: &TcMessage) -> &str {
    let kind = message
        .attributes
        .iter()
        .find_map(|it| if let TcAttribute::Kind(kind) = it { Some(kind.as_str()) } else { None });
    kind.unwrap_or_default()
}

/// Returns whether a filter belongs to software other than NPL.
pub(super) fn is_foreign_filter(filter: &TcMessage) -> bool {
    owner(filter).is_some_and(|owner| owner.is_other())
}

/// Returns whether a qdisc queues packets, unlike `clsact` and `ingress`.
pub(super) fn is_queue(queue: &TcMessage) -> bool {
    !is_hook(kind(queue))
}

/// The names, clsact qdiscs and filters of all devices.
#[derive(Debug, Default)]
pub struct TcState {
    /// Names of all devices, by ifindex.
    pub devices: BTreeMap<u32, String>,
    /// The ifindex of every device with a clsact qdisc.
    pub with_clsact: BTreeSet<u32>,
    /// The filters of all devices whose filters could be read.
    pub filters: Vec<TcFilter>,
    /// The errors of devices whose filters could not be read, by ifindex.
    pub unread: BTreeMap<u32, NetlinkError>,
}

/// Reads the filters of all devices. If the kernel has no traffic control, no device has filters.
///
/// # Errors
///
/// If the devices or their qdiscs cannot be listed.
pub async fn read_filters() -> Result<TcState, NetlinkError> {
    let lists = Lists::open()?;
    let links = links(&lists).await?;
    let mut queues = match read_queues(&lists).await {
        Err(error) if error.is_unsupported() => Queues::new(),
        queues => queues?,
    };
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let mut state = TcState::default();
    for device in links.iter().filter_map(device) {
        let queues = queues.remove(&device.ifindex).unwrap_or_default();
        let attachments = DeviceAttachments { queues, ..DeviceAttachments::default() };
        let sides = attachments.filtered_sides();
        if sides.contains(&Side::Egress) {
            state.with_clsact.insert(device.ifindex);
        }
        if let Ok(index) = i32::try_from(device.ifindex) {
            for side in sides {
                match dump_filters(&handle, index, *side).await {
                    Ok(filters) => {
                        state.filters.extend(filters.iter().map(|filter| facts_of(device.ifindex, *side, filter)));
                    }
                    Err(error) if error.is_of_gone_device() => {}
                    Err(error) => drop(state.unread.insert(device.ifindex, error)),
                }
            }
        }
        state.devices.insert(device.ifindex, device.name);
    }
    driver.abort();
    Ok(state)
}

pub(super) fn facts_of(ifindex: u32, side: Side, filter: &TcMessage) -> TcFilter {
    TcFilter {
        ifindex,
        side,
        kind: kind(filter).to_owned(),
        priority: priority(filter),
        handle: (filter.header.handle.major, filter.header.handle.minor),
        program: program_name(filter).map(str::to_owned),
    }
}

/// If the clsact qdisc of the device with this ifindex has no filter, removes the qdisc. Returns the device's name if
/// the qdisc was removed.
///
/// # Errors
///
/// If a request fails, for example because this process lacks `CAP_NET_ADMIN`.
pub async fn remove_unused_clsact(ifindex: u32) -> Result<Option<String>, NetlinkError> {
    let (connection, handle, _unsolicited) = new_connection().map_err(NetlinkError::Open)?;
    let driver = tokio::spawn(connection);
    let result = remove_clsact(&handle, ifindex).await;
    driver.abort();
    result
}

async fn remove_clsact(handle: &Handle, ifindex: u32) -> Result<Option<String>, NetlinkError> {
    let devices = interfaces().await?;
    let Some(device) = devices.into_iter().find(|device| device.ifindex == ifindex) else { return Ok(None) };
    let Ok(index) = i32::try_from(ifindex) else { return Ok(None) };
    for side in [Side::Ingress, Side::Egress] {
        if !dump_filters(handle, index, side).await?.is_empty() {
            return Ok(None);
        }
    }
    let mut delete = handle.qdisc().del(index);
    let message = delete.message_mut();
    message.header.parent = TcHandle::CLSACT;
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.attributes.push(TcAttribute::Kind("clsact".to_owned()));
    match delete.execute().await.map_err(request("remove the clsact qdisc")) {
        Err(error) if error.is_of_gone_device() => Ok(None),
        deleted => deleted.map(|()| Some(device.name)),
    }
}

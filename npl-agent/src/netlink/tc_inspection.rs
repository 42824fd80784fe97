// SPDX-License-Identifier: Apache-2.0
//! Inspects the qdiscs and filters of devices, and removes NPL's clsact qdiscs that are no longer needed.

use std::collections::{BTreeMap, BTreeSet};

use futures::TryStreamExt as _;
use rtnetlink::{
    Handle, new_connection,
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};

use super::{NetlinkError, interfaces, list::Lists, request};
use crate::core::devices::{
    Device, DeviceSelection,
    attachments::{AttachmentOwner, DeviceAttachments, Side, is_hook, matters, owner_of_filter},
};

/// What an inspection needs besides the devices.
#[expect(missing_debug_implementations, reason = "a function has nothing to show")]
pub struct TcInspection {
    /// Which devices may be uplinks.
    pub uplinks: DeviceSelection,
    /// The programs on a device's TCX and netkit hooks, which run ahead of all filters; `None` if they cannot be
    /// listed.
    pub programs_on: Box<dyn Fn(u32) -> Option<DeviceAttachments> + Send + Sync>,
}

/// The kinds of each device's qdiscs, by its index.
pub(super) type Queues = BTreeMap<u32, BTreeSet<String>>;

/// The attachments of devices that matter, by their index. Devices that cannot be inspected are left out.
///
/// # Errors
///
/// If the socket cannot be opened.
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

/// The kinds of every device's qdiscs, in one dump.
pub(super) async fn read_queues(lists: &Lists) -> Result<Queues, NetlinkError> {
    let pick = |message| if let RouteNetlinkMessage::NewQueueDiscipline(queue) = message { Some(queue) } else { None };
    let wanted = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let mut queues = Queues::new();
    for queue in lists.of("list queues", wanted, pick).await? {
        queues.entry(queue.header.index.cast_unsigned()).or_default().insert(kind(&queue).to_owned());
    }
    Ok(queues)
}

/// Whether a device has an `ingress` qdisc.
pub(super) fn has_ingress_queue(queues: &Queues, ifindex: u32) -> bool {
    queues.get(&ifindex).is_some_and(|kinds| kinds.contains("ingress"))
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

fn owner(filter: &TcMessage) -> Option<AttachmentOwner> {
    let priority = u16::try_from(filter.header.info >> u16::BITS).unwrap_or_default();
    owner_of_filter(kind(filter), priority, (filter.header.handle.major, filter.header.handle.minor))
}

fn kind(message: &TcMessage) -> &str {
    let kind = message
        .attributes
        .iter()
        .find_map(|it| if let TcAttribute::Kind(kind) = it { Some(kind.as_str()) } else { None });
    kind.unwrap_or_default()
}

/// Whether a filter belongs to other software.
pub(super) fn is_others_filter(filter: &TcMessage) -> bool {
    owner(filter) == Some(AttachmentOwner::Other)
}

/// Whether a qdisc queues packets.
pub(super) fn is_queue(queue: &TcMessage) -> bool {
    !is_hook(kind(queue))
}

/// Removes a device's clsact qdisc if it holds no filter, and returns the device's name if it did.
///
/// # Errors
///
/// If the kernel refuses.
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
    delete.execute().await.map_err(request("remove the clsact qdisc"))?;
    Ok(Some(device.name))
}

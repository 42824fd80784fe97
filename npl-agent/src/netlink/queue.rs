// SPDX-License-Identifier: Apache-2.0
//! What stands at a device's TC hooks.

use std::collections::BTreeSet;

use futures::TryStreamExt as _;
use rtnetlink::{
    Handle, new_connection,
    packet_route::tc::{TcAttribute, TcHandle, TcMessage},
};

use super::{NetlinkError, read_interfaces, request};

/// Devices with an `ingress` queue, by their index. A kernel without queues says so by an error.
pub(super) async fn ingress_queues(handle: &Handle) -> BTreeSet<u32> {
    let queues: Vec<TcMessage> = handle.qdisc().get().execute().try_collect().await.unwrap_or_default();
    let is_ingress = |it: &TcAttribute| matches!(it, TcAttribute::Kind(kind) if kind == "ingress");
    let found = queues.iter().filter(|queue| queue.attributes.iter().any(is_ingress));
    found.filter_map(|queue| u32::try_from(queue.header.index).ok()).collect()
}

/// Removes a device's clsact qdisc if no filter is left on it; its device's name if it was removed.
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
    let devices = read_interfaces(handle).await?;
    let Some(device) = devices.into_iter().find(|device| device.ifindex == ifindex) else { return Ok(None) };
    let Ok(index) = i32::try_from(ifindex) else { return Ok(None) };
    if has_filters(handle, index).await? {
        return Ok(None);
    }
    let mut delete = handle.qdisc().del(index);
    let message = delete.message_mut();
    message.header.parent = TcHandle::CLSACT;
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.attributes.push(TcAttribute::Kind("clsact".to_owned()));
    delete.execute().await.map_err(request("remove the clsact qdisc"))?;
    Ok(Some(device.name))
}

async fn has_filters(handle: &Handle, index: i32) -> Result<bool, NetlinkError> {
    let filters = || handle.traffic_filter(index).get();
    for query in [filters().ingress(), filters().egress()] {
        let mut dump = query.execute();
        if dump.try_next().await.map_err(request("list filters"))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

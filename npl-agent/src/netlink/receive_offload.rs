// SPDX-License-Identifier: Apache-2.0
//! Reads, by ethtool's netlink family, on which devices GRO joins received datagrams into one packet with a fragment
//! list (fraglist).

use std::collections::BTreeSet;

use ethtool::{EthtoolAttr, EthtoolError, EthtoolFeatureAttr, EthtoolHeader, EthtoolMessage};
use futures::TryStreamExt as _;

use super::NetlinkError;

/// The kernel's name of the feature GRO fraglist, which is also an argument of `ethtool -K`.
const FRAGLIST: &str = "rx-gro-list";

/// Returns the names of all devices of this network namespace on which GRO joins datagrams into a fraglist.
///
/// # Errors
///
/// If the kernel has no netlink family `ethtool`, or returns an error.
pub async fn devices_with_fraglists() -> Result<BTreeSet<String>, NetlinkError> {
    let (connection, mut handle, _unsolicited) = ethtool::new_connection().map_err(NetlinkError::Open)?;
    let connection = tokio::spawn(connection);
    let features = async {
        let messages = handle.feature().get(None).execute().await?;
        messages
            .try_filter_map(|message| async move { Ok(device_with_fraglists(&message.payload)) })
            .try_collect()
            .await
    };
    let found = features.await.map_err(|source: EthtoolError| NetlinkError::Features { source: Box::new(source) });
    connection.abort();
    found
}

/// Returns the name of the device in a message if the feature `rx-gro-list` is active on the device.
pub(super) fn device_with_fraglists(message: &EthtoolMessage) -> Option<String> {
    let attributes = message
        .nlas
        .iter()
        .filter_map(|attribute| if let EthtoolAttr::Feature(attribute) = attribute { Some(attribute) } else { None });
    let (mut name, mut is_active) = (None, false);
    for attribute in attributes {
        match attribute {
            EthtoolFeatureAttr::Header(header) => name = header.iter().find_map(device_name),
            EthtoolFeatureAttr::Active(bits) => is_active = bits.iter().any(|bit| bit.value && bit.name == FRAGLIST),
            EthtoolFeatureAttr::Hw(_)
            | EthtoolFeatureAttr::Wanted(_)
            | EthtoolFeatureAttr::NoChange(_)
            | EthtoolFeatureAttr::Other(_) => {}
        }
    }
    name.filter(|_| is_active)
}

fn device_name(header: &EthtoolHeader) -> Option<String> {
    if let EthtoolHeader::DevName(name) = header { Some(name.clone()) } else { None }
}

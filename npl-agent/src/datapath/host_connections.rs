// SPDX-License-Identifier: Apache-2.0
//! Records connections that other software translates as host connections: see [`npl_common::host_connection`]. The
//! kernel programs pass the packets of these connections to the host, where kernel conntrack continues to translate
//! them.

use std::net::IpAddr;

use aya::maps::{Array, MapData};
use npl_common::{
    flow::{FlowKeyV4, FlowKeyV6},
    host_connection,
    names::{MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6},
};

use super::{
    error::DatapathError,
    pins::Pins,
    tables::{kernel_time, open},
};
use crate::core::model::TranslatedConnection;

/// Records the connections, unless their slots already contain their records. `seed` is the seed of the flows' hashes.
pub(super) fn record(pins: &Pins, connections: &[TranslatedConnection], seed: u64) -> Result<(), DatapathError> {
    let mut v4 = Records::open(pins, MAP_HOST_CONNECTION_V4)?;
    let mut v6 = Records::open(pins, MAP_HOST_CONNECTION_V6)?;
    for connection in connections {
        let records = if connection.client.is_ipv4() { &mut v4 } else { &mut v6 };
        if let Some(hash) = hash(connection, seed) {
            records.write(hash)?;
        }
    }
    Ok(())
}

/// The hash of a host connection, as the kernel programs compute it: the remote host is in place of the client, and the
/// Node in place of the Pod. `None` if the addresses are of different IP families.
fn hash(connection: &TranslatedConnection, seed: u64) -> Option<u64> {
    let TranslatedConnection { protocol, client, nat } = connection;
    let (client_port, pod_port, protocol) = (client.port(), nat.port(), u32::from(protocol.number()));
    match (client.ip(), nat.ip()) {
        (IpAddr::V4(client), IpAddr::V4(node)) => {
            let [client_addr, pod_addr] = [client, node].map(|addr| addr.octets());
            Some(FlowKeyV4 { client_addr, pod_addr, client_port, pod_port, protocol }.hash(seed))
        }
        (IpAddr::V6(client), IpAddr::V6(node)) => {
            let [client_addr, pod_addr] = [client, node].map(|addr| addr.octets());
            Some(FlowKeyV6 { client_addr, pod_addr, client_port, pod_port, protocol }.hash(seed))
        }
        _ => None,
    }
}

/// The map of the records of one IP family.
struct Records {
    name: &'static str,
    map: Array<MapData, u64>,
    now: u64,
}

impl Records {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, DatapathError> {
        Ok(Self { name, map: open(pins, name)?, now: kernel_time() })
    }

    fn write(&mut self, hash: u64) -> Result<(), DatapathError> {
        let slots = [host_connection::slot(hash), host_connection::second_slot(hash)];
        let read = |slot: u32| self.map.get(&slot, 0).map_err(DatapathError::map("read", self.name));
        let [first, second] = [read(slots[0])?, read(slots[1])?];
        let slot = slots[usize::from(host_connection::is_second(first, second, hash, self.now))];
        let entry = host_connection::entry(hash, self.now);
        self.map.set(slot, entry, 0).map_err(DatapathError::map("write", self.name))
    }
}

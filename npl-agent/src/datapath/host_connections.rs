// SPDX-License-Identifier: Apache-2.0
//! Records, in the maps of host connections ([`npl_common::host_connection`]), the connections that other software
//! translates. The kernel programs pass the packets of recorded connections to the host, where kernel conntrack
//! continues to translate the packets.

use aya::maps::{Array, MapData};
use npl_common::{
    fragment, host_connection,
    names::{MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6},
};

use super::{
    error::DatapathError,
    layout::{Layout, V4, V6},
    pins::Pins,
    tables::{kernel_time, open},
};
use crate::core::model::TranslatedConnection;

/// Writes an entry for each connection, unless the connection already has an entry that expires later. `seed` is the
/// seed of the flow hash.
pub(super) fn record(pins: &Pins, connections: &[TranslatedConnection], seed: u64) -> Result<(), DatapathError> {
    Records::open(pins, MAP_HOST_CONNECTION_V4)?.write_all::<V4>(connections, seed)?;
    Records::open(pins, MAP_HOST_CONNECTION_V6)?.write_all::<V6>(connections, seed)
}

/// The map of host connections of one IP family.
struct Records {
    name: &'static str,
    map: Array<MapData, u64>,
}

impl Records {
    fn open(pins: &Pins, name: &'static str) -> Result<Self, DatapathError> {
        Ok(Self { name, map: open(pins, name)? })
    }

    /// Writes the entries of the connections that are of the IP family of `L`.
    fn write_all<L: Layout>(&mut self, connections: &[TranslatedConnection], seed: u64) -> Result<(), DatapathError> {
        connections.iter().try_for_each(|connection| {
            let Some(key) = L::flow_key(connection.protocol, connection.client, connection.nat) else { return Ok(()) };
            self.write(L::flow_hash(&key, seed), connection)
        })
    }

    fn write(&mut self, hash: u64, connection: &TranslatedConnection) -> Result<(), DatapathError> {
        // The time is read for each connection, because writing the entries of many connections may take longer than
        // one unit of this time (1.07 s).
        let now = kernel_time();
        let slots = [host_connection::slot(hash), host_connection::second_slot(hash)];
        let read = |slot: u32| self.map.get(&slot, 0).map_err(DatapathError::map("read", self.name));
        let [first, second] = [read(slots[0])?, read(slots[1])?];
        let index = usize::from(host_connection::is_second(first, second, hash, now));
        let (slot, present) = (slots[index], [first, second][index]);
        let remaining = fragment::time(u64::from(connection.remaining_seconds) * 1_000_000_000);
        let entry = host_connection::expiring(hash, connection.is_stream, now, remaining);
        // A kernel program may have renewed the entry after the agent read kernel conntrack.
        let is_newer = host_connection::remaining(present, now) > host_connection::remaining(entry, now);
        if host_connection::matches(present, hash) && is_newer {
            return Ok(());
        }
        self.map.set(slot, entry, 0).map_err(DatapathError::map("write", self.name))
    }
}

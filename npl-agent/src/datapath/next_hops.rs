// SPDX-License-Identifier: Apache-2.0
//! The maps for redirecting packets from device to device: the uplinks, and the next hop of each Pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use aya::{
    Pod,
    maps::{HashMap, MapData},
};
use npl_common::{
    names::{MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6, MAP_UPLINK},
    next_hop::{PodAddressV4, PodAddressV6, PodNextHop as Value, UPLINK, kind},
};

use super::{
    error::DatapathError,
    pins::Pins,
    tables::{open, tolerate_missing},
};
use crate::core::{
    devices::redirect::{HopKind, PodNextHop, ProgramSet},
    repairs::{RepairJournal, RepairedObject},
};

/// The maps of the uplinks (`npl_rd_uplinks`) and of the next hop of each Pod (`npl_pod_dev_v4` and `npl_pod_dev_v6`).
#[derive(Debug)]
pub(super) struct NextHops {
    uplinks: Table<u32, u32>,
    v4: Table<PodAddressV4, Value>,
    v6: Table<PodAddressV6, Value>,
}

impl NextHops {
    pub(super) fn open(pins: &Pins, repairs: &RepairJournal) -> Result<Self, DatapathError> {
        Ok(Self {
            uplinks: Table::open(pins, MAP_UPLINK, repairs)?,
            v4: Table::open(pins, MAP_NEXT_HOP_V4, repairs)?,
            v6: Table::open(pins, MAP_NEXT_HOP_V6, repairs)?,
        })
    }

    /// Reads the next hop of each Pod from the maps; the key of the result is the Pod's address.
    pub(super) fn pods(&self) -> Result<BTreeMap<IpAddr, PodNextHop>, DatapathError> {
        let v4 = self.v4.read()?.into_iter().map(|(pod, value)| (IpAddr::from(pod.addr), value));
        let v6 = self.v6.read()?.into_iter().map(|(pod, value)| (IpAddr::from(pod.addr), value));
        Ok(v4.chain(v6).filter_map(|(addr, value)| Some((addr, next_hop(value)?))).collect())
    }

    /// Removes the uplinks that `devices` does not contain, and the next hops that `pods` does not contain with the
    /// same value. Next hops are removed before uplinks, so that the kernel stack begins to forward both directions of
    /// a Pod's traffic at the same time.
    pub(super) fn retain(
        &mut self,
        devices: &BTreeMap<u32, ProgramSet>,
        pods: &BTreeMap<IpAddr, PodNextHop>,
    ) -> Result<(), DatapathError> {
        let value_of = |addr: IpAddr| pods.get(&addr).map(|hop| value(*hop));
        self.v4.retain(|pod, value| value_of(pod.addr.into()) == Some(*value))?;
        self.v6.retain(|pod, value| value_of(pod.addr.into()) == Some(*value))?;
        self.uplinks
            .retain(|ifindex, _| devices.get(ifindex).is_some_and(|program_set| program_set.is_redirect_uplink()))
    }

    /// Adds the uplinks of `devices` and the next hops of `pods`. Next hops are added after uplinks, so that the
    /// programs begin to redirect both directions of a Pod's traffic at the same time. If an uplink cannot be added,
    /// the next hops of all Pods are removed. If the next hops stayed, requests would be redirected, but the kernel
    /// stack would forward the replies through that uplink. If the map of one IP family is full, next hops of the other
    /// IP family are still added.
    pub(super) fn add(
        &mut self,
        devices: &BTreeMap<u32, ProgramSet>,
        pods: &BTreeMap<IpAddr, PodNextHop>,
    ) -> Vec<DatapathError> {
        let mut uplinks = devices.iter().filter(|(_, program_set)| program_set.is_redirect_uplink());
        if let Err(error) = uplinks.try_for_each(|(ifindex, _)| self.uplinks.set(*ifindex, UPLINK)) {
            return [Some(error), self.retain(devices, &BTreeMap::new()).err()].into_iter().flatten().collect();
        }
        let (mut v4, mut v6) = (Ok(()), Ok(()));
        for (addr, hop) in pods {
            match addr {
                IpAddr::V4(addr) => {
                    v4 = v4.and_then(|()| self.v4.set(PodAddressV4 { addr: addr.octets() }, value(*hop)));
                }
                IpAddr::V6(addr) => {
                    v6 = v6.and_then(|()| self.v6.set(PodAddressV6 { addr: addr.octets() }, value(*hop)));
                }
            }
        }
        [v4, v6].into_iter().filter_map(Result::err).collect()
    }
}

/// A BPF hash map that only the agent writes. Differences from the entries that the agent has written are changes by
/// other software.
#[derive(Debug)]
pub(super) struct Table<K: Pod, V: Pod> {
    map: HashMap<MapData, K, V>,
    /// The map's name, for the log and for error messages.
    name: &'static str,
    /// The entries that this process has written or adopted; `None` until the first call of [`Self::retain`].
    written: Option<BTreeMap<K, V>>,
    repairs: RepairJournal,
}

impl<K: Pod + Ord, V: Pod + PartialEq> Table<K, V> {
    pub(super) fn open(pins: &Pins, name: &'static str, repairs: &RepairJournal) -> Result<Self, DatapathError> {
        Ok(Self { map: open(pins, name)?, name, written: None, repairs: repairs.clone() })
    }

    fn read(&self) -> Result<BTreeMap<K, V>, DatapathError> {
        self.map.iter().collect::<Result<_, _>>().map_err(DatapathError::map("read", self.name))
    }

    pub(super) fn retain(&mut self, is_wanted: impl Fn(&K, &V) -> bool) -> Result<(), DatapathError> {
        let mut present = self.read()?;
        if let Some(written) = &self.written {
            self.repairs.record_changes(written, &present, |_key| self.name.to_owned());
        }
        let others: BTreeSet<K> =
            present.iter().filter(|(key, value)| !is_wanted(key, value)).map(|(key, _)| *key).collect();
        let removed = others.iter().try_for_each(|key| tolerate_missing(self.map.remove(key)));
        removed.map_err(DatapathError::map("write", self.name))?;
        present.retain(|key, _| !others.contains(key));
        self.written = Some(present);
        Ok(())
    }

    /// Writes an entry, unless the map has the entry.
    pub(super) fn set(&mut self, key: K, value: V) -> Result<(), DatapathError> {
        if self.map.get(&key, 0).is_ok_and(|present| present == value) {
            return Ok(());
        }
        self.map.insert(key, value, 0).map_err(DatapathError::map("write", self.name))?;
        if let Some(former) = self.written.as_mut().and_then(|written| written.insert(key, value))
            && former == value
        {
            self.repairs.record(RepairedObject::MapEntry, self.name);
        }
        Ok(())
    }
}

pub(super) const fn value(hop: PodNextHop) -> Value {
    let kind = match hop.kind {
        HopKind::Peer => kind::PEER,
        HopKind::Bridge => kind::BRIDGE,
    };
    Value { ifindex: hop.ifindex, mtu: hop.mtu, kind }
}

pub(super) const fn next_hop(value: Value) -> Option<PodNextHop> {
    let kind = match value.kind {
        kind::PEER => HopKind::Peer,
        kind::BRIDGE => HopKind::Bridge,
        _ => return None,
    };
    Some(PodNextHop { ifindex: value.ifindex, kind, mtu: value.mtu })
}

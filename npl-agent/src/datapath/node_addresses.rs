// SPDX-License-Identifier: Apache-2.0
//! The maps of the Node's addresses, on which the programs translate node ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use npl_common::{config::Config, mapping::MAX_LOCAL_ADDRESSES};

use super::{error::DatapathError, tables::Tables};
use crate::core::{model::Family, repairs::RepairedObject};

impl Tables {
    /// The node addresses whose node ports the programs translate.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn local_addresses(&self) -> Result<BTreeSet<IpAddr>, DatapathError> {
        let mut addresses = BTreeSet::new();
        for family in Family::ALL {
            addresses.extend(self.family(family).local_addresses()?.into_keys());
        }
        Ok(addresses)
    }

    /// Sets the node addresses whose ports the programs translate. `wanted` is in descending order of importance.
    /// Returns the addresses that do not fit into the maps.
    ///
    /// An address keeps its index for as long as it is in the map. Before a freed index is reused, half-open entries
    /// with this index are cleared, so that no reply gets a wrong node address as its source.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn set_local_addresses(&mut self, wanted: &[IpAddr]) -> Result<Vec<IpAddr>, DatapathError> {
        let mut left_out = Vec::new();
        for family in Family::ALL {
            let mut of_family: Vec<IpAddr> =
                wanted.iter().copied().filter(|addr| Family::of(*addr) == family).collect();
            left_out.extend(of_family.split_off(of_family.len().min(MAX_LOCAL_ADDRESSES as usize)));
            self.set_addresses_of(family, &of_family)?;
        }
        Ok(left_out)
    }

    fn set_addresses_of(&mut self, family: Family, wanted: &[IpAddr]) -> Result<(), DatapathError> {
        let mut present = self.repaired_addresses(family)?;
        let gone: Vec<_> = present.keys().filter(|addr| !wanted.contains(addr)).copied().collect();
        let primary = IpAddr::from(self.config()?.primary_v4);
        if gone.contains(&primary) {
            self.set_primary_v4(Ipv4Addr::UNSPECIFIED, 0)?;
        }
        let has_free_indexes = !gone.is_empty();
        for addr in gone {
            if let Some(index) = present.remove(&addr) {
                self.family_mut(family).remove_local_address(addr, index)?;
            }
        }
        if has_free_indexes {
            // Cached lookups of replies contain the index of an address, and another address may reuse this index.
            self.begin_epoch()?;
        }
        if wanted.iter().any(|addr| !present.contains_key(addr)) {
            // Half-open entries also contain the index of an address. If the index were reused, these entries would
            // establish flows with the wrong node address.
            self.family_mut(family).clear_half_open_except(&present.values().copied().collect())?;
        }
        for addr in wanted {
            if !present.contains_key(addr) {
                let used = present.values().copied().collect();
                present.extend(self.family_mut(family).add_local_address(*addr, &used)?.map(|index| (*addr, index)));
            }
        }
        self.written_addresses[family as usize] = Some(present.clone());
        let first = wanted.first().and_then(|addr| Some((*addr, *present.get(addr)?)));
        match first {
            Some((IpAddr::V4(addr), index)) => self.set_primary_v4(addr, index),
            Some((IpAddr::V6(_), index)) => {
                self.change_config(|config| config.with_primary_v6_index(u8::try_from(index).unwrap_or_default()))
            }
            None if family == Family::V4 => self.set_primary_v4(Ipv4Addr::UNSPECIFIED, 0),
            None => Ok(()),
        }
    }

    /// The node addresses of an IP family and their indexes. Restores the entries that other software has changed.
    fn repaired_addresses(&mut self, family: Family) -> Result<BTreeMap<IpAddr, u32>, DatapathError> {
        let present = self.family(family).local_addresses()?;
        let Some(own) = self.written_addresses[family as usize].take() else { return Ok(present) };
        let damaged = own.iter().filter(|(addr, index)| !self.family(family).has_local_address(**addr, **index));
        let mut repaired: Vec<IpAddr> = damaged.map(|(addr, _)| *addr).collect();
        // Added entries are removed first, because the removal clears the entry of the index, which may belong to another
        // address.
        for (addr, index) in present.iter().filter(|(addr, _)| !own.contains_key(addr)) {
            self.family_mut(family).remove_local_address(*addr, *index)?;
            repaired.push(*addr);
        }
        for (addr, index) in own.iter().filter(|_| !repaired.is_empty()) {
            self.family_mut(family).set_local_address(*addr, *index)?;
        }
        if !repaired.is_empty() {
            self.begin_epoch()?;
        }
        for addr in repaired {
            self.repairs.record(RepairedObject::MapEntry, format_args!("node address {addr}"));
        }
        Ok(own)
    }

    /// Sets the primary IPv4 address of the Node. The programs compare a destination with this address first, which
    /// saves the lookup of the address.
    fn set_primary_v4(&mut self, addr: Ipv4Addr, index: u32) -> Result<(), DatapathError> {
        self.change_config(|config| Config { primary_v4: addr.octets(), primary_v4_index: index, ..config })
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Keeps the programs on the right devices and the local addresses in the maps, as devices and addresses come and go.

use std::{collections::BTreeMap, net::IpAddr};

use tracing::{info, warn};

use crate::{
    core::devices::{Device, DeviceSelection, Reason, choose, local_addresses},
    datapath::{Datapath, DatapathError},
};

/// What was last decided, so that only changes are told.
#[derive(Debug)]
pub struct Uplinks {
    selection: DeviceSelection,
    decided: BTreeMap<String, Result<Reason, Reason>>,
    told_errors: Vec<String>,
}

/// On how many of the chosen devices the programs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Devices that carry them.
    pub carrying: usize,
    /// Devices that were chosen and refuse; they are tried again each time.
    pub refusing: usize,
}

impl Uplinks {
    /// Nothing decided yet.
    pub const fn new(selection: DeviceSelection) -> Self {
        Self { selection, decided: BTreeMap::new(), told_errors: Vec::new() }
    }

    /// Makes the datapath fit the devices, and says how many of the chosen ones it could be put on.
    ///
    /// # Errors
    ///
    /// If the maps refuse; a device that refuses is told in the log, and the others are served.
    pub fn apply(
        &mut self,
        datapath: &mut Datapath,
        devices: &[Device],
        node_ips: &[IpAddr],
    ) -> Result<Coverage, DatapathError> {
        set_local_addresses(datapath, devices, node_ips)?;
        let decide = |device: &Device| {
            let is_carrying = datapath.hooks.has_link(device.ifindex);
            (device.name.clone(), choose(device, &self.selection, node_ips, is_carrying))
        };
        let decided: BTreeMap<_, _> = devices.iter().map(decide).collect();
        self.tell_decisions(&decided);
        self.decided = decided;
        let is_chosen = |device: &Device| matches!(self.decided.get(&device.name), Some(Ok(_)));
        let chosen = devices.iter().filter(|device| is_chosen(device)).count();
        let errors = datapath.hooks.attach(devices, is_chosen);
        self.tell_errors(&errors);
        let carrying = datapath.hooks.attached().len();
        Ok(Coverage { carrying, refusing: chosen.saturating_sub(carrying) })
    }

    fn tell_decisions(&self, new: &BTreeMap<String, Result<Reason, Reason>>) {
        for (iface, decision) in new {
            if self.decided.get(iface) == Some(decision) {
                continue;
            }
            match decision {
                Ok(reason) => info!(iface, reason = reason.as_str(), "device carries the programs"),
                Err(reason) => tracing::debug!(iface, reason = reason.as_str(), "device is left alone"),
            }
        }
        if let DeviceSelection::Named(names) = &self.selection {
            for iface in names.iter().filter(|name| !new.contains_key(*name)) {
                if self.decided.is_empty() {
                    warn!(iface, "--devices names a device that is not there; it is used as soon as it comes");
                }
            }
        }
        if !new.values().any(Result::is_ok) && self.decided.values().any(Result::is_ok) | self.decided.is_empty() {
            warn!("no device carries the programs: name the uplinks with --devices");
        }
    }

    fn tell_errors(&mut self, errors: &[DatapathError]) {
        let texts: Vec<String> = errors.iter().map(|error| format!("{:#}", ErrorChain(error))).collect();
        for text in texts.iter().filter(|text| !self.told_errors.contains(text)) {
            warn!(err = text, "a device does not carry the programs; the others do");
        }
        self.told_errors = texts;
    }
}

fn set_local_addresses(datapath: &mut Datapath, devices: &[Device], node_ips: &[IpAddr]) -> Result<(), DatapathError> {
    let left_out = datapath.tables.set_local_addresses(&local_addresses(devices, node_ips))?;
    if let Some(first) = left_out.first() {
        warn!(count = left_out.len(), %first, "the Node has more addresses than fit; mappings do not answer on the last ones");
    }
    Ok(())
}

/// Shows an error with its causes on one line.
#[derive(Debug)]
pub struct ErrorChain<'a>(pub &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Keeps the programs on the right devices and the local addresses in the maps, as devices and addresses come and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use tracing::{debug, info, warn};

use crate::{
    core::{
        devices::{Device, DeviceSelection, Reason, choose, local_addresses},
        redirect::{Carries, Forwarding, Placement, PodWay, Refusal, Route, ways_to_pods},
    },
    datapath::{Datapath, DatapathError},
    netlink::{self, NetlinkError},
};

/// What was last decided, so that only changes are told.
#[derive(Debug)]
pub struct Uplinks {
    selection: DeviceSelection,
    forwarding: Forwarding,
    decided: BTreeMap<String, Result<Reason, Reason>>,
    ways: BTreeMap<IpAddr, Result<PodWay, Refusal>>,
    pods: BTreeSet<IpAddr>,
    told_errors: Vec<String>,
}

/// Why the devices could not be followed.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// They cannot be listed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// A map refuses.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
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
    pub const fn new(selection: DeviceSelection, forwarding: Forwarding) -> Self {
        Self {
            selection,
            forwarding,
            decided: BTreeMap::new(),
            ways: BTreeMap::new(),
            pods: BTreeSet::new(),
            told_errors: Vec::new(),
        }
    }

    /// Whether mappings lead to other Pods than when the devices were last looked at, and that makes a difference.
    pub fn are_out_of_date(&self, datapath: &Datapath) -> bool {
        self.forwarding == Forwarding::Redirect && datapath.pod_addresses() != self.pods
    }

    /// Makes the datapath fit the Node's devices, and says how many of the chosen ones it could be put on.
    ///
    /// # Errors
    ///
    /// If the maps refuse, or devices cannot be listed; a device that refuses is told in the log, and the others are served.
    pub async fn follow(&mut self, datapath: &mut Datapath, node_ips: &[IpAddr]) -> Result<Coverage, FollowError> {
        if self.forwarding == Forwarding::Redirect {
            self.pods = datapath.pod_addresses();
        }
        let routes = netlink::routes_to(&self.pods).await?;
        let devices = netlink::interfaces().await?;
        Ok(self.apply(datapath, &devices, &routes, node_ips)?)
    }

    fn apply(
        &mut self,
        datapath: &mut Datapath,
        devices: &[Device],
        routes: &BTreeMap<IpAddr, Route>,
        node_ips: &[IpAddr],
    ) -> Result<Coverage, DatapathError> {
        set_local_addresses(datapath, devices, node_ips)?;
        let decide = |device: &Device| {
            let is_carrying = datapath.hooks.is_uplink(device.ifindex);
            (device.name.clone(), choose(device, &self.selection, node_ips, is_carrying))
        };
        let decided: BTreeMap<_, _> = devices.iter().map(decide).collect();
        self.tell_decisions(&decided);
        self.decided = decided;
        let uplinks: Vec<_> =
            devices.iter().filter(|device| matches!(self.decided.get(&device.name), Some(Ok(_)))).collect();
        let chosen: BTreeSet<u32> = uplinks.iter().map(|device| device.ifindex).collect();
        let ways = ways_to_pods(devices, &chosen, routes);
        self.tell_ways(&ways);
        self.ways = ways;
        let pods: BTreeMap<_, _> = self.ways.iter().filter_map(|(addr, way)| Some((*addr, way.ok()?))).collect();
        let of_pods = pods.values().map(|way| (way.ifindex, Carries::Pods));
        let of_uplinks = uplinks.iter().map(|device| (device.ifindex, self.carries(device)));
        let placement = Placement { devices: of_uplinks.chain(of_pods).collect(), pods };
        let errors = datapath.attach(devices, &placement);
        self.tell_errors(&errors);
        let carrying = chosen.iter().filter(|ifindex| datapath.hooks.attached().contains_key(ifindex)).count();
        Ok(Coverage { carrying, refusing: chosen.len() - carrying })
    }

    /// What an uplink carries. Frames without Ethernet headers have to get some on the way to a Pod, which the host does.
    fn carries(&self, uplink: &Device) -> Carries {
        match self.forwarding {
            Forwarding::Redirect if uplink.has_ethernet => Carries::DirectUplink,
            Forwarding::Redirect | Forwarding::Stack => Carries::Uplink,
        }
    }

    fn tell_ways(&self, new: &BTreeMap<IpAddr, Result<PodWay, Refusal>>) {
        for (pod_ip, way) in new.iter().filter(|(addr, way)| self.ways.get(addr) != Some(way)) {
            match way {
                Ok(way) => debug!(%pod_ip, way = way.way.as_str(), mtu = way.mtu, "packets are redirected to this Pod"),
                Err(reason) => info!(%pod_ip, reason = reason.as_str(), "packets take the host's stack to this Pod"),
            }
        }
    }

    fn tell_decisions(&self, new: &BTreeMap<String, Result<Reason, Reason>>) {
        for (iface, decision) in new {
            if self.decided.get(iface) == Some(decision) {
                continue;
            }
            match decision {
                Ok(reason) => info!(iface, reason = reason.as_str(), "device carries the programs"),
                Err(reason) => debug!(iface, reason = reason.as_str(), "device is left alone"),
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

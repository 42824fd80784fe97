// SPDX-License-Identifier: Apache-2.0
//! Keeps the programs on the right devices and the local addresses in the maps, as devices and addresses come and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use tracing::{debug, info, warn};

use crate::{
    core::{
        devices::{
            Device, DeviceSelection, LinkFacts, UplinkReason,
            attachments::DeviceAttachments,
            choose,
            grace_periods::GracePeriods,
            local_addresses,
            redirect::{Forwarding, Placement, PodNextHop, ProgramSet, RedirectRefusal, Route, next_hops},
            reply_routing::Marking,
            xdp::{self, Attach},
        },
        model::Moment,
    },
    datapath::{Datapath, DatapathError, preflight},
    devices::reply_routing::ReplyRouting,
    netlink::{self, NetlinkError, Survey, SurveyTask, TcInspection},
    nft_guard::GuardMode,
};

/// Whether requests are translated by XDP, and why.
type XdpDecision = Result<xdp::XdpReason, xdp::XdpReason>;

/// What was last decided, so that only changes are told.
#[derive(Debug)]
pub struct Uplinks {
    selection: DeviceSelection,
    forwarding: Forwarding,
    decided: BTreeMap<String, Result<UplinkReason, UplinkReason>>,
    ways: BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>,
    pods: BTreeSet<IpAddr>,
    /// Whether connection tracking keeps flows from being offloaded.
    is_strict: bool,
    /// Whether it forgets offloaded ones too soon.
    is_forgetful: bool,
    /// By which interfaces replies leave.
    returns: ReplyRouting,
    told_errors: Vec<String>,
    /// How many of the Node's addresses found no room.
    left_out: usize,
    attach: Attach,
    /// By device index.
    places: BTreeMap<u32, XdpDecision>,
    /// The Node's addresses that are away for a moment.
    address_grace: GracePeriods<IpAddr>,
    /// Devices, by index, that were uplinks a moment ago.
    device_grace: GracePeriods<u32>,
    /// Devices whose driver does not run the program, by their index, as they were then.
    refused: BTreeMap<u32, (LinkFacts, xdp::XdpReason)>,
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

impl FollowError {
    /// Whether it is only that the network changes all the time.
    pub const fn is_change(&self) -> bool {
        matches!(self, Self::Netlink(NetlinkError::Changing { .. }))
    }
}

/// On how many of the chosen devices the programs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Devices that carry them.
    pub attached: usize,
    /// Devices that were chosen and refuse, or show programs no headers that they know; they are tried again each time.
    pub failed: usize,
}

impl Uplinks {
    /// Nothing decided yet.
    pub fn new(selection: DeviceSelection, forwarding: Forwarding, attach: Attach, guard: GuardMode) -> Self {
        Self {
            selection,
            forwarding,
            decided: BTreeMap::new(),
            ways: BTreeMap::new(),
            pods: BTreeSet::new(),
            is_strict: false,
            is_forgetful: false,
            returns: ReplyRouting::new(forwarding, guard),
            told_errors: Vec::new(),
            left_out: 0,
            attach,
            places: BTreeMap::new(),
            address_grace: GracePeriods::default(),
            device_grace: GracePeriods::default(),
            refused: BTreeMap::new(),
        }
    }

    /// Which connections are to be marked, so that replies leave where requests came in.
    pub const fn markings(&self) -> &BTreeSet<Marking> {
        self.returns.markings()
    }

    /// Whether mappings lead to other Pods than when the devices were last looked at, and that makes a difference.
    pub fn are_out_of_date(&self, datapath: &Datapath) -> bool {
        self.forwarding != Forwarding::Stack && datapath.pod_addresses() != self.pods
    }

    /// Begins to look at the Node's devices, and, if packets may pass the host's stack by, at the routes to Pods that mappings
    /// lead to and at what others have on the way.
    pub fn survey(&self, datapath: &Datapath) -> SurveyTask {
        if self.forwarding == Forwarding::Stack {
            return netlink::survey(BTreeSet::new(), None);
        }
        let own = datapath.hooks.own_programs();
        let inspection = TcInspection {
            uplinks: self.selection.clone(),
            programs_on: Box::new(move |ifindex| own.programs_on(ifindex)),
        };
        netlink::survey(datapath.pod_addresses(), Some(inspection))
    }

    /// Looks at the Node's devices and makes the datapath fit them.
    ///
    /// # Errors
    ///
    /// If devices cannot be listed, and as [`Self::apply`].
    pub async fn follow(&mut self, datapath: &mut Datapath, node_ips: &[IpAddr]) -> Result<Coverage, FollowError> {
        let survey = netlink::join_survey(&mut self.survey(datapath)).await?;
        Ok(self.apply(datapath, survey, node_ips, Moment::default())?)
    }

    /// When what is away counts as gone, if it does not come back before.
    pub fn next_deadline(&self) -> Option<Moment> {
        let deadlines = [self.address_grace.next_deadline(), self.device_grace.next_deadline()];
        deadlines.into_iter().flatten().min()
    }

    /// Makes the datapath fit the Node's devices, and says how many of the chosen ones it could be put on.
    ///
    /// # Errors
    ///
    /// If the maps refuse; a device that refuses is told in the log, and the others are served.
    pub fn apply(
        &mut self,
        datapath: &mut Datapath,
        Survey { pods, routes, devices, routing, attachments }: Survey,
        node_ips: &[IpAddr],
        now: Moment,
    ) -> Result<Coverage, DatapathError> {
        self.pods = pods;
        let devices = devices.as_slice();
        self.set_local_addresses(datapath, devices, node_ips, now)?;
        let decided = self.decide(datapath, devices, node_ips, now);
        self.tell_decisions(&decided);
        self.decided = decided;
        let is_chosen = |device: &Device| matches!(self.decided.get(&device.name), Some(Ok(_)));
        let chosen: Vec<&Device> = devices.iter().filter(|device| is_chosen(device)).collect();
        let uplinks = chosen.iter().map(|device| device.ifindex).collect();
        self.returns.take_in(routing.reply_routes(devices, &uplinks), &datapath.pod_addresses());
        let placement = self.placement(devices, &chosen, &routes, &attachments);
        let mut places: BTreeMap<u32, XdpDecision> =
            chosen.iter().map(|device| (device.ifindex, self.place_of(device))).collect();
        // XDP goes first and comes last: a request is never translated where its reply is not.
        let mut errors = datapath.detach_xdp(|ifindex| matches!(places.get(&ifindex), Some(Ok(_))));
        errors.extend(datapath.attach(devices, &placement));
        places.retain(|ifindex, _| datapath.hooks.attached().contains_key(ifindex));
        errors.extend(datapath.detach_xdp(|ifindex| places.contains_key(&ifindex)));
        let attached = places.len();
        for device in &chosen {
            if let Some(place) = places.get_mut(&device.ifindex) {
                *place = place.and_then(|reason| self.attach_xdp(datapath, device, reason));
            }
        }
        let refused = self.decided.values().filter(|it| it.is_err_and(UplinkReason::is_unsupported)).count();
        let coverage = Coverage { attached, failed: chosen.len().saturating_sub(attached) + refused };
        let reasons = places.iter().map(|(ifindex, place)| (*ifindex, place.unwrap_or_else(|reason| reason)));
        errors.extend(datapath.hooks.note_reasons(&reasons.collect()).err());
        self.tell_errors(&errors);
        self.tell_places(&chosen, &places);
        self.refused.retain(|ifindex, _| places.contains_key(ifindex));
        self.places = places;
        Ok(coverage)
    }

    /// Makes these the Node's addresses, and those of a moment ago.
    fn set_local_addresses(
        &mut self,
        datapath: &mut Datapath,
        devices: &[Device],
        node_ips: &[IpAddr],
        now: Moment,
    ) -> Result<(), DatapathError> {
        let mut wanted = local_addresses(devices, node_ips);
        let (held, present) = (datapath.tables.local_addresses()?, wanted.iter().copied().collect());
        wanted.extend(self.address_grace.update(&held, &present, now));
        let left_out = datapath.tables.set_local_addresses(&wanted)?;
        if let Some(first) = left_out.first().filter(|_| self.left_out != left_out.len()) {
            warn!(count = left_out.len(), %first, "the Node has more addresses than fit; mappings do not answer on the last ones");
        }
        self.left_out = left_out.len();
        Ok(())
    }

    /// Which devices carry the programs, and why.
    fn decide(
        &mut self,
        datapath: &Datapath,
        devices: &[Device],
        node_ips: &[IpAddr],
        now: Moment,
    ) -> BTreeMap<String, Result<UplinkReason, UplinkReason>> {
        let is_attached = |device: &Device| datapath.hooks.is_uplink(device.ifindex);
        let chosen: Vec<_> = devices
            .iter()
            .map(|device| (device, choose(device, &self.selection, node_ips, is_attached(device))))
            .collect();
        let lacks = |(device, decision): &(&Device, Result<UplinkReason, UplinkReason>)| {
            (decision.is_err_and(UplinkReason::has_grace_period) && is_attached(device)).then_some(device.ifindex)
        };
        let held = chosen.iter().filter_map(lacks).collect();
        let in_grace = self.device_grace.update(&held, &BTreeSet::new(), now);
        let decide = |(device, decision): (&Device, Result<UplinkReason, UplinkReason>)| {
            let is_awaited = in_grace.contains(&device.ifindex);
            (device.name.clone(), if is_awaited { Ok(UplinkReason::InGracePeriod) } else { decision })
        };
        chosen.into_iter().map(decide).collect()
    }

    /// What is to stand where; says what has changed of it.
    fn placement(
        &mut self,
        devices: &[Device],
        uplinks: &[&Device],
        routes: &BTreeMap<IpAddr, Route>,
        attachments: &BTreeMap<u32, DeviceAttachments>,
    ) -> Placement {
        let chosen = uplinks.iter().map(|device| device.ifindex).collect();
        let is_strict = self.forwarding == Forwarding::Offload && preflight::tracks_strictly();
        self.tell_tracking(is_strict);
        let ways = if is_strict { BTreeMap::new() } else { next_hops(devices, &chosen, routes, attachments) };
        self.tell_ways(&ways);
        self.ways = ways;
        let pods: BTreeMap<_, _> = self.ways.iter().filter_map(|(addr, way)| Some((*addr, way.ok()?))).collect();
        let of_pods = pods.values().map(|way| (way.ifindex, ProgramSet::pods(self.forwarding)));
        let of_uplinks = uplinks.iter().map(|it| (it.ifindex, ProgramSet::of_uplink(it, self.forwarding)));
        Placement { devices: of_uplinks.chain(of_pods).collect(), pods }
    }

    fn tell_tracking(&mut self, is_strict: bool) {
        if is_strict && !self.is_strict {
            warn!(
                "connection tracking would find packets of offloaded flows invalid, so all take the host's stack: set \
                 net.netfilter.nf_conntrack_tcp_be_liberal=1 on this Node"
            );
        } else if self.is_strict && !is_strict {
            info!("connection tracking is liberal now; flows are offloaded");
        }
        self.is_strict = is_strict;
        let is_forgetful = self.forwarding == Forwarding::Offload && preflight::forgets_silent_connections();
        if is_forgetful && !self.is_forgetful {
            warn!(
                "connection tracking forgets offloaded connections that are silent for some minutes, as it sees not every \
                 acknowledgement: set net.netfilter.nf_conntrack_tcp_timeout_unacknowledged as high as \
                 nf_conntrack_tcp_timeout_established on this Node"
            );
        }
        self.is_forgetful = is_forgetful;
    }

    fn tell_ways(&self, new: &BTreeMap<IpAddr, Result<PodNextHop, RedirectRefusal>>) {
        for (pod_ip, way) in new.iter().filter(|(addr, way)| self.ways.get(addr) != Some(way)) {
            match way {
                Ok(way) => debug!(%pod_ip, by = way.kind.as_str(), mtu = way.mtu, "packets are redirected to this Pod"),
                Err(reason) => info!(%pod_ip, reason = reason.as_str(), "packets take the host's stack to this Pod"),
            }
        }
    }

    fn place_of(&self, device: &Device) -> XdpDecision {
        let planned = xdp::plan(device, self.attach, self.forwarding, preflight::has_xdp_frags());
        match self.refused.get(&device.ifindex) {
            Some((link, reason)) if *link == device.link && !reason.is_temporary() => planned.and(Err(*reason)),
            _ => planned,
        }
    }

    fn attach_xdp(&mut self, datapath: &mut Datapath, device: &Device, reason: xdp::XdpReason) -> XdpDecision {
        let Err(error) = datapath.attach_xdp(device) else {
            self.refused.remove(&device.ifindex);
            return Ok(reason);
        };
        let (iface, err, reason) = (&device.name, ErrorChain(&error), error.xdp_reason());
        if self.refused.insert(device.ifindex, (device.link.clone(), reason)).is_none_or(|(_, old)| old != reason) {
            warn!(iface, %err, "no XDP program on a device; TC does its work");
        }
        Err(reason)
    }

    fn tell_places(&self, devices: &[&Device], new: &BTreeMap<u32, XdpDecision>) {
        for device in devices {
            let (iface, place) = (&device.name, new.get(&device.ifindex));
            if place == self.places.get(&device.ifindex) {
                continue;
            }
            match place {
                Some(Ok(xdp::XdpReason::Forced)) => {
                    warn!(
                        iface,
                        "XDP translates requests as --attach xdp demands; it breaks packets with unfinished checksums"
                    );
                }
                Some(Ok(reason)) => info!(iface, reason = reason.as_str(), "XDP translates requests"),
                Some(Err(xdp::XdpReason::NotRequested)) | None => {}
                Some(Err(reason)) => info!(iface, reason = reason.as_str(), "TC translates requests"),
            }
        }
    }

    fn tell_decisions(&self, new: &BTreeMap<String, Result<UplinkReason, UplinkReason>>) {
        for (iface, decision) in new {
            if self.decided.get(iface) == Some(decision) {
                continue;
            }
            match decision {
                Ok(reason) => info!(iface, reason = reason.as_str(), "device carries the programs"),
                Err(reason) if reason.is_unsupported() => {
                    warn!(
                        iface,
                        reason = reason.as_str(),
                        "device cannot carry the programs; clients behind it are not served"
                    );
                }
                Err(reason) => debug!(iface, reason = reason.as_str(), "device is left alone"),
            }
        }
        if let DeviceSelection::Named(names) = &self.selection {
            let is_news = |name: &&String| self.decided.is_empty() || self.decided.contains_key(*name);
            for iface in names.iter().filter(|name| !new.contains_key(*name)).filter(is_news) {
                warn!(iface, "--devices names a device that is not there; it is used as soon as it comes");
            }
        }
        if !new.values().any(Result::is_ok) && self.decided.values().any(Result::is_ok) | self.decided.is_empty() {
            warn!("no device carries the programs: name the uplinks with --devices");
        }
    }

    fn tell_errors(&mut self, errors: &[DatapathError]) {
        let mut told = Vec::new();
        for error in errors {
            let err = ErrorChain(error).to_string();
            if error.is_of_gone_device() {
                debug!(err, "a device went while programs were put on it");
                continue;
            }
            if !self.told_errors.contains(&err) {
                warn!(err, "{}", error.meaning());
            }
            told.push(err);
        }
        self.told_errors = told;
    }
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

// SPDX-License-Identifier: Apache-2.0
//! Decides what a program may do with a packet. The oracle knows the mappings, and remembers what the programs have
//! done with earlier packets. Where the result depends on conntrack entries, several results are allowed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Protocol;
use npl_common::reason::Reason;
use npl_testkit::packet::protocol_number::{SCTP, TCP};
use npl_testkit::test_run::SkbContext;

use super::headers::{self, Chain, Incomplete, Parsed, Part, bytes};
use super::scene::{Forwarding, Mapping, Program, RANGE, Role, Scene, UPLINK_MTU};
use crate::lab::SEED;
use crate::prog_run::scene::node_ip;

/// Which address and port a translation replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Source,
    Destination,
}

/// The headers that a translation changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The IP header and the transport header.
    Packet,
    /// The IP header of a fragment without ports.
    Fragment,
    /// The headers of an ICMP error and of the packet that it quotes.
    Error { quote: Chain },
}

/// Whether the packet is redirected, and its TTL decremented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    Never,
    May,
    Must,
}

/// An allowed translation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) side: Side,
    pub(super) change: Change,
    /// The address and port after the translation.
    pub(super) to: SocketAddr,
    /// Indexes of the elements of which one counts the packet; empty if any mapping or none may count the packet.
    pub(super) counted_by: Vec<u32>,
    pub(super) redirect: Redirect,
}

/// The results that are allowed for a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Allowed {
    /// The packet is passed unchanged, and is counted under this reason.
    pub(super) passed: Vec<Option<Reason>>,
    /// The packet is dropped, because its source is not allowed.
    pub(super) refused: bool,
    pub(super) targets: Vec<Target>,
    /// A tuple conflict may be counted in addition.
    pub(super) may_conflict: bool,
}

impl Allowed {
    fn pass() -> Self {
        Self { passed: vec![None], ..Self::default() }
    }

    fn counted(reason: Reason) -> Self {
        Self { passed: vec![Some(reason)], ..Self::default() }
    }

    fn refuse() -> Self {
        Self { refused: true, ..Self::default() }
    }
}

/// The endpoints of a flow, as the Pod sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tuple {
    pub(super) protocol: Protocol,
    pub(super) client: SocketAddr,
    pub(super) pod: SocketAddr,
}

/// The identity of a fragmented datagram.
type Datagram = (Side, IpAddr, IpAddr, u32, u8);

/// What the programs did with first fragments of a datagram.
#[derive(Debug, Default)]
struct Firsts {
    were_passed: bool,
    were_translated: Vec<(Mapping, SocketAddr)>,
}

/// What the programs have done so far.
#[derive(Default)]
pub(super) struct History {
    /// The NAT addresses by which requests of a flow arrived.
    flows: HashMap<Tuple, BTreeSet<SocketAddr>>,
    datagrams: HashMap<Datagram, Firsts>,
    /// Endpoints from which packets left the Node, with the packet's destination.
    left: HashSet<(Protocol, SocketAddr, SocketAddr)>,
}

/// A run of a program.
pub(super) struct Run<'a> {
    pub(super) program: &'a Program,
    pub(super) frame: &'a [u8],
    pub(super) skb: SkbContext,
    /// The flow is known, because a request of the flow has just been translated.
    pub(super) is_known: bool,
}

impl Run<'_> {
    /// Parses the frame as the kernel and the program see it.
    pub(super) fn parsed(&self) -> Parsed {
        let mac = &self.frame[..6];
        // Without a device's own address, the kernel takes unicast frames as addressed to another machine, unless the
        // destination is the address of the loopback device, which is zero. XDP programs run before this check.
        let is_for_other = mac[0] & 1 == 0 && self.mac_of_device() != mac;
        if is_for_other && self.program.role != Role::Frames {
            return Parsed::Foreign;
        }
        headers::parse(self.frame, headers::word(self.frame, 12).unwrap_or_default(), self.program.l3)
    }

    fn mac_of_device(&self) -> [u8; 6] {
        if self.skb.ifindex > 1 { super::scene::UPLINK_MAC } else { [0; 6] }
    }

    fn is_gso(&self) -> bool {
        self.skb.gso_size != 0
    }

    /// The length of the longest IP packet on the wire: the packet itself, or each segment of a GSO packet.
    fn wire_length(&self, chain: &Chain) -> u32 {
        if !self.is_gso() {
            return chain.length(self.frame);
        }
        let header = bytes::<20>(self.frame, chain.l4).filter(|_| chain.protocol == TCP);
        let transport = header.map_or(8, |header| u32::from(header[12] >> 4) * 4);
        self.skb.gso_size + u32::try_from(chain.l4 - chain.l3).unwrap() + transport
    }

    fn may_be_redirected(&self, chain: &Chain, mtu: u32) -> bool {
        let is_sctp_gso = chain.protocol == SCTP && self.is_gso();
        self.frame[chain.ttl_at()] > 1 && !is_sctp_gso && self.wire_length(chain) <= mtu
    }
}

fn datagram(side: Side, chain: &Chain) -> Datagram {
    let protocol = if chain.is_v4() { chain.protocol } else { 0 };
    (side, chain.source, chain.destination, chain.id, protocol)
}

/// Returns what the program may do with the packet.
pub(super) fn allowed(scene: &Scene, history: &History, run: &Run<'_>) -> Allowed {
    match run.program.role {
        Role::Observer => Allowed::pass(),
        Role::Requests(forwarding) => requests(scene, history, run, forwarding),
        Role::Frames => frames(scene, history, run),
        Role::RepliesAtUplink if u64::from(run.skb.cb[4]) == SEED & 0xffff_ffff => Allowed::pass(),
        Role::RepliesAtUplink => replies(scene, history, run, false),
        Role::RepliesAtPod { has_slow_path } => match run.parsed() {
            Parsed::Located(chain) if !has_slow_path && !chain.is_plain => Allowed::pass(),
            Parsed::Unreadable { destination } if has_slow_path => unreadable(scene, destination),
            Parsed::Foreign | Parsed::Unreadable { .. } | Parsed::Located(_) => {
                at_pod(run, replies(scene, history, run, true))
            }
        },
    }
}

/// The XDP program translates or drops only plain packets, and counts no other packet.
fn frames(scene: &Scene, history: &History, run: &Run<'_>) -> Allowed {
    match run.parsed() {
        // The program at TC ingress refuses or counts a packet that ends within its transport header.
        Parsed::Located(chain) if chain.is_plain && headers::completeness(run.frame, &chain).is_ok() => {
            let mut allowed = requests(scene, history, run, Forwarding::Stack);
            for passed in &mut allowed.passed {
                *passed = None;
            }
            allowed
        }
        Parsed::Foreign | Parsed::Unreadable { .. } | Parsed::Located(_) => Allowed::pass(),
    }
}

/// A packet on its arrival is counted if it has unreadable IPv6 headers, and is for the Node.
fn unreadable(scene: &Scene, destination: Option<IpAddr>) -> Allowed {
    let is_for_node = destination.is_some_and(|destination| scene.is_node(destination));
    if is_for_node { Allowed::counted(Reason::Ipv6ExtensionHeaders) } else { Allowed::pass() }
}

fn requests(scene: &Scene, history: &History, run: &Run<'_>, forwarding: Forwarding) -> Allowed {
    let chain = match run.parsed() {
        Parsed::Foreign => return Allowed::pass(),
        Parsed::Unreadable { destination } => return unreadable(scene, destination),
        Parsed::Located(chain) => chain,
    };
    if chain.is_icmp() {
        return error_about_reply(scene, history, run, &chain, forwarding);
    }
    if chain.part == Part::Later {
        return later_request(scene, history, run, &chain, forwarding);
    }
    let (Some(protocol), Some((client_port, node_port))) = (chain.transport(), chain.ports(run.frame)) else {
        return Allowed::pass();
    };
    let node = SocketAddr::new(chain.destination, node_port);
    if !RANGE.contains(&node_port) || !scene.is_node(chain.destination) {
        let is_direct = !scene.mappings_of(protocol, node).is_empty();
        return Allowed { may_conflict: is_direct, ..Allowed::pass() };
    }
    let Some(mapping) = scene.mapping(protocol, node_port) else {
        // A datagram to a node address may also be a direct datagram to an endpoint, if a Pod has this address.
        return Allowed::counted(Reason::NoMapping);
    };
    if mapping.only.is_some_and(|only| only != chain.source) {
        return Allowed::refuse();
    }
    let mut passed = Vec::new();
    match headers::completeness(run.frame, &chain) {
        Err(Incomplete::Truncated) => return Allowed::counted(Reason::Truncated),
        Err(Incomplete::UnknownLength) => passed.extend([Some(Reason::SctpFragment), Some(Reason::Truncated)]),
        Ok(()) => {}
    }
    let client = SocketAddr::new(chain.source, client_port);
    if history.left.contains(&(protocol, client, node)) {
        passed.push(Some(Reason::HostConnection));
    }
    let target = Target {
        side: Side::Destination,
        change: Change::Packet,
        to: mapping.pod,
        counted_by: vec![mapping.counters],
        redirect: redirect_of_request(run, &chain, forwarding, mapping.pod.ip()),
    };
    Allowed { passed, targets: vec![target], may_conflict: true, ..Allowed::default() }
}

fn redirect_of_request(run: &Run<'_>, chain: &Chain, forwarding: Forwarding, pod: IpAddr) -> Redirect {
    let is_possible = Scene::pod_mtu(pod).is_some_and(|mtu| run.may_be_redirected(chain, mtu));
    match forwarding {
        _ if !is_possible => Redirect::Never,
        Forwarding::Stack => Redirect::Never,
        Forwarding::Redirect => Redirect::Must,
        Forwarding::Offload if chain.is_plain => Redirect::May,
        Forwarding::Offload => Redirect::Never,
    }
}

fn later_request(scene: &Scene, history: &History, run: &Run<'_>, chain: &Chain, forwarding: Forwarding) -> Allowed {
    if !scene.is_node(chain.destination) {
        return Allowed::pass();
    }
    let mut allowed = Allowed::counted(Reason::EarlyFragment);
    let Some(firsts) = history.datagrams.get(&datagram(Side::Destination, chain)) else { return allowed };
    if firsts.were_passed {
        allowed.passed.push(None);
    }
    for (mapping, _) in &firsts.were_translated {
        if mapping.only.is_some_and(|only| only != chain.source) {
            allowed.refused = true;
            continue;
        }
        let redirect = redirect_of_request(run, chain, forwarding, mapping.pod.ip());
        allowed.targets.push(Target {
            side: Side::Destination,
            change: Change::Fragment,
            to: mapping.pod,
            counted_by: vec![mapping.counters],
            // If the stack has forwarded the first fragment, the stack also forwards this fragment.
            redirect: if redirect == Redirect::Must { Redirect::May } else { redirect },
        });
    }
    allowed
}

fn error_about_reply(
    scene: &Scene,
    history: &History,
    run: &Run<'_>,
    outer: &Chain,
    forwarding: Forwarding,
) -> Allowed {
    let is_whole_error = outer.part == Part::Whole && headers::is_error(run.frame, outer);
    if !is_whole_error || !scene.is_node(outer.destination) {
        return Allowed::pass();
    }
    let (quote, ports) = match quoted(run.frame, outer) {
        Ok(quoted) => quoted,
        Err(allowed) => return allowed,
    };
    let (Some(protocol), (node_port, client_port)) = (quote.transport(), ports) else { return Allowed::pass() };
    if !RANGE.contains(&node_port) {
        return Allowed::pass();
    }
    if quote.source != outer.destination {
        return Allowed::counted(Reason::BadQuote);
    }
    let Some(mapping) = scene.mapping(protocol, node_port) else { return Allowed::counted(Reason::NoMapping) };
    let tuple = Tuple { protocol, client: SocketAddr::new(quote.destination, client_port), pod: mapping.pod };
    let mut allowed = Allowed::counted(Reason::UntrackedError);
    if !history.flows.contains_key(&tuple) {
        return allowed;
    }
    if run.is_known {
        allowed.passed.clear();
    }
    if mapping.only.is_some_and(|only| only != quote.destination) {
        return Allowed { refused: true, ..allowed };
    }
    allowed.targets.push(Target {
        side: Side::Destination,
        change: Change::Error { quote },
        to: mapping.pod,
        counted_by: vec![mapping.counters],
        redirect: redirect_of_request(run, outer, forwarding, mapping.pod.ip()),
    });
    allowed
}

/// Returns the quoted packet and its ports, or what is allowed for an error without a readable quote.
fn quoted(frame: &[u8], outer: &Chain) -> Result<(Chain, (u16, u16)), Allowed> {
    let bad = || Allowed::counted(Reason::BadQuote);
    let quote = headers::quote(frame, outer).ok_or_else(bad)?;
    if quote.transport().is_none() {
        return Err(Allowed::pass());
    }
    let ports = quote.ports(frame).filter(|_| quote.part != Part::Later && quote.l4 + 4 <= outer.end);
    Ok((quote, ports.ok_or_else(bad)?))
}

fn replies(scene: &Scene, history: &History, run: &Run<'_>, is_at_pod: bool) -> Allowed {
    let Parsed::Located(chain) = run.parsed() else { return Allowed::pass() };
    if chain.is_icmp() {
        return error_about_request(scene, history, run, &chain);
    }
    if chain.part == Part::Later {
        return later_reply(scene, history, &chain, is_at_pod);
    }
    let (Some(protocol), Some((pod_port, client_port))) = (chain.transport(), chain.ports(run.frame)) else {
        return Allowed::pass();
    };
    let pod = SocketAddr::new(chain.source, pod_port);
    let mappings = scene.mappings_of(protocol, pod);
    if mappings.is_empty() {
        return Allowed::pass();
    }
    let tuple = Tuple { protocol, client: SocketAddr::new(chain.destination, client_port), pod };
    let mut allowed = Allowed { may_conflict: true, ..Allowed::counted(Reason::UntrackedReply) };
    match headers::completeness(run.frame, &chain) {
        Err(Incomplete::Truncated) => return Allowed::counted(Reason::Truncated),
        Err(Incomplete::UnknownLength) => {
            allowed.passed.extend([Some(Reason::SctpFragment), Some(Reason::Truncated)]);
        }
        // A datagram's flow cannot be confused with another one, so the reply must be translated.
        Ok(()) if run.is_known && protocol == Protocol::Udp => allowed.passed.clear(),
        Ok(()) => {}
    }
    allowed.targets = targets_of_reply(history, &tuple, &mappings, &Change::Packet);
    if allowed.targets.is_empty() && allowed.passed.is_empty() {
        allowed.passed.push(Some(Reason::UntrackedReply));
    }
    allowed
}

/// Returns a translation for each NAT address that the client may use.
fn targets_of_reply(history: &History, tuple: &Tuple, mappings: &[&Mapping], change: &Change) -> Vec<Target> {
    let nats = history.flows.get(tuple).into_iter().flatten();
    let counted_by: Vec<u32> = mappings.iter().map(|mapping| mapping.counters).collect();
    let target = |nat: &SocketAddr| Target {
        side: Side::Source,
        change: change.clone(),
        to: *nat,
        counted_by: counted_by.clone(),
        redirect: Redirect::Never,
    };
    nats.map(target).collect()
}

fn later_reply(scene: &Scene, history: &History, chain: &Chain, is_at_pod: bool) -> Allowed {
    let mut allowed = Allowed::counted(Reason::EarlyFragment);
    if is_at_pod {
        allowed = Allowed::pass();
    }
    let Some(firsts) = history.datagrams.get(&datagram(Side::Source, chain)) else { return allowed };
    if firsts.were_passed {
        allowed.passed.push(None);
    }
    for (mapping, nat) in &firsts.were_translated {
        // The record of the first fragment names the mapping of the NAT address, which counts the later fragments.
        let counted_by = scene.mapping(mapping.protocol, nat.port()).map(|mapping| mapping.counters);
        allowed.targets.push(Target {
            side: Side::Source,
            change: Change::Fragment,
            to: *nat,
            counted_by: counted_by.into_iter().collect(),
            redirect: Redirect::Never,
        });
    }
    allowed
}

fn error_about_request(scene: &Scene, history: &History, run: &Run<'_>, outer: &Chain) -> Allowed {
    if outer.part != Part::Whole || !headers::is_error(run.frame, outer) {
        return Allowed::pass();
    }
    let (quote, ports) = match quoted(run.frame, outer) {
        Ok(quoted) => quoted,
        Err(allowed) => return allowed,
    };
    let (Some(protocol), (client_port, pod_port)) = (quote.transport(), ports) else { return Allowed::pass() };
    let pod = SocketAddr::new(quote.destination, pod_port);
    let mappings = scene.mappings_of(protocol, pod);
    if mappings.is_empty() {
        return Allowed::pass();
    }
    if quote.source != outer.destination {
        return Allowed::counted(Reason::BadQuote);
    }
    let tuple = Tuple { protocol, client: SocketAddr::new(quote.source, client_port), pod };
    let targets = targets_of_reply(history, &tuple, &mappings, &Change::Error { quote });
    Allowed { targets, ..Allowed::counted(Reason::UntrackedReply) }
}

/// Returns what a program at a Pod's device may do. The program redirects translated packets, and leaves all other
/// packets to the program at the uplink, which counts them.
fn at_pod(run: &Run<'_>, at_uplink: Allowed) -> Allowed {
    let Parsed::Located(chain) = run.parsed() else { return Allowed::pass() };
    let is_from_pod = run.skb.ifindex <= 1 && Scene::pod_mtu(chain.source).is_some();
    if !is_from_pod {
        return Allowed { may_conflict: false, ..Allowed::pass() };
    }
    let is_bad_quote = at_uplink.passed == [Some(Reason::BadQuote)];
    let passed = vec![if is_bad_quote { Some(Reason::BadQuote) } else { None }];
    let mut targets = at_uplink.targets;
    if !run.may_be_redirected(&chain, UPLINK_MTU) {
        targets.clear();
    }
    for target in &mut targets {
        target.redirect = Redirect::Must;
    }
    Allowed { passed, targets, ..at_uplink }
}

impl History {
    /// Remembers the result of a run. `taken` is the translation that the program has chosen; `None` if the packet was
    /// passed unchanged or dropped.
    pub(super) fn learn(&mut self, scene: &Scene, run: &Run<'_>, taken: Option<&Target>, is_dropped: bool) {
        let Parsed::Located(chain) = run.parsed() else { return };
        let side = match run.program.role {
            Role::Requests(_) | Role::Frames => Side::Destination,
            Role::RepliesAtUplink | Role::RepliesAtPod { .. } => Side::Source,
            Role::Observer => return,
        };
        let (protocol, ports) = (chain.transport(), chain.ports(run.frame));
        let at = |address, port| SocketAddr::new(address, port);
        if chain.part == Part::First && !chain.is_icmp() {
            let firsts = self.datagrams.entry(datagram(side, &chain)).or_default();
            let mapping = match (side, protocol, ports) {
                (Side::Destination, Some(protocol), Some((_, port))) => scene.mapping(protocol, port),
                (Side::Source, Some(protocol), Some((port, _))) => {
                    scene.mappings_of(protocol, at(chain.source, port)).first().copied()
                }
                _ => None,
            };
            match (taken, mapping) {
                (Some(target), Some(mapping)) => firsts.were_translated.push((mapping.clone(), target.to)),
                (None, Some(mapping)) if is_dropped => firsts.were_translated.push((mapping.clone(), mapping.pod)),
                _ => firsts.were_passed = true,
            }
        }
        let (Some(protocol), Some((source, destination)), true) = (protocol, ports, chain.part != Part::Later) else {
            return;
        };
        let (source, destination) = (at(chain.source, source), at(chain.destination, destination));
        match (side, taken) {
            (Side::Destination, Some(Target { to: pod, change: Change::Packet, .. })) => {
                self.flows.entry(Tuple { protocol, client: source, pod: *pod }).or_default().insert(destination);
            }
            (Side::Source, None) => {
                // The egress program records a packet from any other address under the Node's primary address.
                let recorded = if scene.is_node(source.ip()) { source.ip() } else { node_ip() };
                self.left.insert((protocol, destination, at(recorded, source.port())));
            }
            _ => {}
        }
    }
}

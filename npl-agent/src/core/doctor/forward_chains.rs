// SPDX-License-Identifier: Apache-2.0
//! Checks whether nftables chains of the forward hook drop or reject requests that NPL has translated, or the replies.
//!
//! To kernel conntrack, a translated request is a new connection from the client to the Pod, without the status `dnat`.
//! The reply is a packet of an established connection from the Pod to the client. The check evaluates the rules for
//! requests and replies, as far as the fields of these packets are known. The check warns about a chain only if the
//! chain certainly drops or rejects such a packet. If a chain may drop or reject the packet, depending on conditions
//! that the check does not evaluate, the finding names the chain, but is no warning.

use std::{collections::BTreeMap, net::IpAddr};

use super::{
    Facts, Finding,
    forwarding::{Need, client_uplinks, devices_of_pods, need},
    kernel::ASK_AS_ROOT,
};
use crate::core::{
    devices::{Device, DeviceKind},
    model::{Family, PodPort, Protocol},
};

/// The base chains of the forward hook, and all chains to which their rules jump.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardChains {
    /// The base chains, in the order in which the kernel lists them.
    pub base: Vec<BaseChain>,
    /// The rules of each chain, by table and chain name. A chain that was not read is absent.
    pub rules: BTreeMap<(Table, String), Vec<Rule>>,
    /// Whether legacy iptables has a table `filter`, whose rules nftables does not list.
    pub has_legacy_filter: bool,
}

/// The family and name of an nftables table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Table {
    /// The family of the table: `inet`, `ip` or `ip6`.
    pub family: &'static str,
    /// The name of the nftables table.
    pub name: String,
}

/// A base chain of type `filter` at the forward hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// The table of the chain.
    pub table: Table,
    /// The name of the base chain.
    pub name: String,
    /// Whether the chain's policy is `drop`.
    pub drops_by_default: bool,
}

/// A rule with a verdict, and its conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The conditions, all of which must match.
    pub conditions: Vec<Condition>,
    /// The verdict; rules without a verdict are omitted.
    pub verdict: Verdict,
}

/// The verdict of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The packet is accepted. The next base chain of the hook, if any, evaluates the packet.
    Accept,
    /// The packet is dropped, or rejected with a RST or an ICMP error.
    Refuse,
    /// Evaluation continues in the named chain of the same table. If no rule there decides, evaluation continues at the
    /// rule after this one.
    Jump(String),
    /// Evaluation continues in the named chain of the same table, and does not return to the chain of this rule.
    Goto(String),
    /// Evaluation returns to the calling chain.
    Return,
}

/// A condition on a packet field: the field has one of the values, or, if negated, none of the values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The packet field that is compared.
    pub field: Field,
    /// The mask of the bits that are compared; empty if all bits are compared.
    pub mask: Vec<u8>,
    /// The values with which the field is compared, in the kernel's byte order.
    pub values: Vec<Vec<u8>>,
    /// Whether the field must have none of the values.
    pub is_negated: bool,
}

/// A field of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// The name of the incoming device: `meta iifname`.
    InName,
    /// The name of the outgoing device: `meta oifname`.
    OutName,
    /// The index of the incoming device: `meta iif`.
    InIndex,
    /// The index of the outgoing device: `meta oif`.
    OutIndex,
    /// The IP family: `meta nfproto`.
    Protocol,
    /// The transport protocol: `meta l4proto`.
    Transport,
    /// The destination port of TCP, UDP or SCTP.
    DestinationPort,
    /// The packet's mark: `meta mark`.
    Mark,
    /// The state of the connection in kernel conntrack: `ct state`.
    State,
    /// The status bits of the connection in kernel conntrack: `ct status`.
    Status,
    /// Some consecutive bytes of the IP header.
    Header {
        /// The offset of the first byte in the IP header.
        offset: usize,
        /// The number of bytes that are compared.
        length: usize,
    },
    /// A field that the check does not know.
    Other,
}

impl Condition {
    /// Creates a condition that the doctor cannot evaluate, because the condition compares an unknown field.
    pub const fn unclear() -> Self {
        Self { field: Field::Other, mask: Vec::new(), values: Vec::new(), is_negated: false }
    }

    /// Whether the condition compares only this bit.
    fn compares(&self, bit: u32) -> bool {
        self.mask == bit.to_ne_bytes()
    }

    /// Returns the bits of a value that the condition compares.
    fn masked(&self, value: Vec<u8>) -> Vec<u8> {
        match self.mask.len() {
            0 => value,
            _ => value.iter().zip(&self.mask).map(|(byte, mask)| byte & mask).collect(),
        }
    }
}

/// `IFNAMSIZ`: rules compare the whole interface name, zero-padded to this length, or a prefix such as `eth*`.
const NAME_SIZE: usize = 16;
/// The value of `ct state new`: nftables' number for the state of a new connection.
pub const STATE_NEW: u32 = 8;
/// The value of `ct state established`: nftables' number for the state of a connection with packets in both directions.
const STATE_ESTABLISHED: u32 = 2;
/// The value of `ct status dnat`: the kernel's bit for a connection with a translated destination.
pub const STATUS_DNAT: u32 = 1 << 5;
/// The value of `ct status snat`: the kernel's bit for a connection with a translated source.
const STATUS_SNAT: u32 = 1 << 4;
/// The mark bit of kube-proxy. This bit is not set on requests that NPL translates, so the doctor can evaluate rules
/// that compare only this bit. The doctor cannot evaluate rules that compare other bits of the mark, because other
/// software may mark any forwarded packet.
const KUBE_PROXY_MARK: u32 = 0x4000;
/// The maximum depth of nested jumps that the kernel accepts.
const MAX_DEPTH: usize = 16;
/// The maximum number of Pods of each IP family for which the rules are evaluated.
const SAMPLES: usize = 3;
/// The maximum number of ports of each Pod for which the rules are evaluated.
const PORTS: usize = 4;

/// Whether a packet goes from the client to the Pod, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PacketKind {
    /// A translated request.
    Request,
    /// A reply that NPL has not translated yet.
    Reply,
}

impl PacketKind {
    /// All kinds, in the order in which the check evaluates the packets.
    const ALL: [Self; 2] = [Self::Request, Self::Reply];

    const fn plural(self) -> &'static str {
        match self {
            Self::Request => "requests",
            Self::Reply => "replies",
        }
    }
}

/// A packet of a connection to a mapped Pod, for which the rules are evaluated.
struct Packet<'a> {
    kind: PacketKind,
    family: Family,
    uplink: &'a Device,
    /// Addresses of global scope on the loopback device, such as the node address of a Node with unnumbered uplinks.
    loopback: &'a [IpAddr],
    pod: Option<(IpAddr, &'a Device)>,
    port: Option<(Protocol, PodPort)>,
}

impl Packet<'_> {
    /// Returns the value of the field that the condition compares; `None` if the value in the packet is unknown.
    fn value(&self, condition: &Condition) -> Option<Vec<u8>> {
        let name = |device: &Device| {
            let mut padded = device.name.clone().into_bytes();
            padded.resize(NAME_SIZE, 0);
            padded
        };
        let pod = self.pod.map(|(_, device)| device);
        let (from, to) = match self.kind {
            PacketKind::Request => (Some(self.uplink), pod),
            PacketKind::Reply => (pod, Some(self.uplink)),
        };
        let is_request = self.kind == PacketKind::Request;
        let value = match &condition.field {
            Field::InName => name(from?),
            Field::OutName => name(to?),
            Field::InIndex => from?.ifindex.to_ne_bytes().to_vec(),
            Field::OutIndex => to?.ifindex.to_ne_bytes().to_vec(),
            Field::Transport => vec![self.port?.0.number()],
            Field::DestinationPort if is_request => self.port?.1.0.to_be_bytes().to_vec(),
            Field::Protocol => vec![if self.family == Family::V4 { 2 } else { 10 }],
            Field::Mark if condition.compares(KUBE_PROXY_MARK) => vec![0; 4],
            Field::State => if is_request { STATE_NEW } else { STATE_ESTABLISHED }.to_ne_bytes().to_vec(),
            // The status of an established connection has further bits, which differ between connections.
            Field::Status if is_request || [STATUS_DNAT, STATUS_SNAT].iter().any(|bit| condition.compares(*bit)) => {
                vec![0; 4]
            }
            Field::Header { offset, length } => self.bytes(self.pod?.0, self.pod_offset(), *offset, *length)?,
            Field::DestinationPort | Field::Mark | Field::Status | Field::Other => return None,
        };
        Some(condition.masked(value))
    }

    /// The offset of the Pod's address in the IP header.
    fn pod_offset(&self) -> usize {
        self.address_offset(self.kind == PacketKind::Request)
    }

    /// The offset of the destination or source address in the IP header.
    const fn address_offset(&self, is_destination: bool) -> usize {
        match (self.family, is_destination) {
            (Family::V4, false) => 12,
            (Family::V4, true) => 16,
            (Family::V6, false) => 8,
            (Family::V6, true) => 24,
        }
    }

    /// Returns the bytes at `offset` in an IP header that has `addr` at the offset `start`; `None` if the bytes are not
    /// all part of this address.
    fn bytes(&self, addr: IpAddr, start: usize, offset: usize, length: usize) -> Option<Vec<u8>> {
        let octets = match addr {
            IpAddr::V4(addr) => addr.octets().to_vec(),
            IpAddr::V6(addr) => addr.octets().to_vec(),
        };
        let first = offset.checked_sub(start).filter(|_| Family::of(addr) == self.family)?;
        octets.get(first..first + length).map(<[u8]>::to_vec)
    }

    /// Whether the client's address meets the condition. The client's address is not known. The check assumes that a
    /// client is outside of every network that contains the Pod, except networks that also contain an address of the
    /// uplink or of the loopback device. `None` if the condition does not compare the client's address, or compares it
    /// with another network.
    fn client_matches(&self, condition: &Condition) -> Option<bool> {
        let Field::Header { offset, length } = condition.field else { return None };
        let start = self.address_offset(self.kind == PacketKind::Reply);
        let contains = |addr: IpAddr| {
            let value = condition.masked(self.bytes(addr, start, offset, length)?);
            Some(condition.values.contains(&value))
        };
        let mut of_node = self.uplink.addresses.iter().chain(self.loopback);
        let is_of_node = of_node.any(|addr| contains(*addr) == Some(true));
        (contains(self.pod?.0)? && !is_of_node).then_some(condition.is_negated)
    }

    /// Whether the packet meets the condition; `None` if a field's value is unknown.
    fn matches(&self, condition: &Condition) -> Option<bool> {
        if let Some(matches) = self.client_matches(condition) {
            return Some(matches);
        }
        let value = self.value(condition)?;
        let is_name = matches!(condition.field, Field::InName | Field::OutName);
        if !is_name && condition.values.iter().any(|it| it.len() != value.len()) {
            return None;
        }
        let is_any = condition.values.iter().any(|it| value.starts_with(it));
        Some(is_any != condition.is_negated)
    }

    fn matches_all(&self, rule: &Rule) -> Option<bool> {
        let mut all = Some(true);
        for condition in &rule.conditions {
            match self.matches(condition) {
                Some(true) => {}
                Some(false) => return Some(false),
                None => all = None,
            }
        }
        all
    }
}

/// How the evaluation of a chain ends for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Accepted,
    Refused,
    /// No rule of the chain decided: the calling chain decides, or, at the end of a base chain, the chain's policy.
    Open,
}

/// The result of the rules that were evaluated so far. `may_accept` and `may_refuse_in` are the possible effects of
/// rules for which the doctor cannot tell whether they match the packet.
#[derive(Debug, Clone, Copy)]
struct ChainOutcome<'a> {
    end: End,
    /// The name of the chain whose rule certainly drops or rejects the packet.
    refused_in: Option<&'a str>,
    may_accept: bool,
    /// The name of the chain with a rule that may drop or reject the packet, depending on fields that the doctor does
    /// not know.
    may_refuse_in: Option<&'a str>,
}

impl<'a> ChainOutcome<'a> {
    const fn ended(end: End, refused_in: Option<&'a str>) -> Self {
        Self { end, refused_in, may_accept: false, may_refuse_in: None }
    }

    /// Returns the outcome after one more rule. `inner` is the outcome of that rule's verdict, or of the chain to which
    /// the rule jumps.
    fn then(self, inner: Self) -> Self {
        Self {
            may_accept: self.may_accept || inner.may_accept,
            may_refuse_in: self.may_refuse_in.or(inner.may_refuse_in),
            ..inner
        }
    }
}

/// Whether a base chain certainly or possibly drops or rejects a packet. The text describes the rule or policy.
enum Refusal {
    /// The verbs of the finding, and how the chain drops or rejects the packet.
    Certain(&'static str, String),
    Possible(String),
}

impl ForwardChains {
    /// Describes the rule or policy by which the base chain drops, or may drop, the packet.
    fn refusal<'a>(&'a self, base: &'a BaseChain, packet: &'a Packet<'a>) -> Option<Refusal> {
        let covers = match base.table.family {
            "ip" => packet.family == Family::V4,
            "ip6" => packet.family == Family::V6,
            _ => true,
        };
        if !covers {
            return None;
        }
        let of_chain = |chain: &str| if chain == base.name { String::new() } else { format!(" of chain {chain}") };
        let mut evaluation = Evaluation { chains: self, table: &base.table, packet, known: BTreeMap::new() };
        let walk = evaluation.outcome(&base.name, 0);
        let (verbs, how) = match (walk.end, walk.refused_in) {
            (End::Refused, chain) => {
                ("drops or rejects", format!("by a rule{}", chain.map(of_chain).unwrap_or_default()))
            }
            (End::Open, _) if base.drops_by_default => ("drops", "by default (policy drop)".to_owned()),
            (End::Open | End::Accepted, _) => {
                let how = format!("by a rule{}, if conditions hold", of_chain(walk.may_refuse_in?));
                return Some(Refusal::Possible(format!("{how} that this check does not evaluate")));
            }
        };
        Some(if walk.may_accept {
            Refusal::Possible(format!("{how}, unless an earlier rule accepts them"))
        } else {
            Refusal::Certain(verbs, how)
        })
    }
}

/// The evaluation of the chains of one table for one packet.
struct Evaluation<'a> {
    chains: &'a ForwardChains,
    table: &'a Table,
    packet: &'a Packet<'a>,
    /// The outcomes of the chains that were already evaluated. Many rules may jump to one chain, so the number of paths
    /// through the chains may be exponential in their depth.
    known: BTreeMap<&'a str, ChainOutcome<'a>>,
}

impl<'a> Evaluation<'a> {
    fn outcome(&mut self, chain: &'a str, depth: usize) -> ChainOutcome<'a> {
        if let Some(known) = self.known.get(chain) {
            return *known;
        }
        let outcome = self.walk(chain, depth);
        self.known.insert(chain, outcome);
        outcome
    }

    fn walk(&mut self, chain: &'a str, depth: usize) -> ChainOutcome<'a> {
        let key = (self.table.clone(), chain.to_owned());
        let rules = self.chains.rules.get(&key).filter(|_| depth <= MAX_DEPTH);
        let mut walk = ChainOutcome { may_accept: rules.is_none(), ..ChainOutcome::ended(End::Open, None) };
        for rule in rules.into_iter().flatten() {
            let is_certain = match self.packet.matches_all(rule) {
                Some(false) => continue,
                matched => matched.is_some(),
            };
            let inner = match &rule.verdict {
                Verdict::Accept => ChainOutcome::ended(End::Accepted, None),
                Verdict::Refuse => ChainOutcome::ended(End::Refused, Some(chain)),
                Verdict::Return => ChainOutcome::ended(End::Open, None),
                Verdict::Jump(to) | Verdict::Goto(to) => self.outcome(to, depth + 1),
            };
            let leaves = matches!(rule.verdict, Verdict::Return | Verdict::Goto(_));
            let after = walk.then(inner);
            if !is_certain {
                // The doctor cannot tell whether this rule matches. If a `return` or `goto` rule matches, the kernel
                // skips the remaining rules of this chain, and may therefore accept the packet.
                walk.may_accept = after.may_accept || inner.end == End::Accepted || leaves;
                walk.may_refuse_in = after.may_refuse_in.or(inner.refused_in);
            } else if inner.end != End::Open || leaves {
                return after;
            } else {
                walk = ChainOutcome { end: End::Open, ..after };
            }
        }
        walk
    }
}

pub(super) fn forward_chains(facts: &Facts) -> Finding {
    let key = "forward_chains";
    let chains = match &facts.forward_chains {
        Ok(chains) => chains,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let mut possible = None;
    let kinds = PacketKind::ALL.into_iter().flat_map(|kind| Family::ALL.map(|family| (kind, family)));
    for packet in kinds.flat_map(|(kind, family)| packets(facts, kind, family)) {
        for chain in &chains.base {
            match chains.refusal(chain, &packet) {
                Some(Refusal::Certain(verbs, how)) => return finding(key, chain, verbs, &how, &packet),
                Some(Refusal::Possible(how)) => possible = possible.or(Some((chain, packet.kind, how))),
                None => {}
            }
        }
    }
    let possible = possible.map(|(BaseChain { table, name, .. }, kind, how)| {
        let packets = kind.plural();
        format!("; chain {name} of nftables table {} {} may drop {packets} {how}", table.family, table.name)
    });
    let legacy = "; iptables-legacy is not checked: see `iptables-legacy -S FORWARD`";
    let legacy = if chains.has_legacy_filter { legacy } else { "" };
    let (count, possible) = (chains.base.len(), possible.unwrap_or_default());
    let found = format!(
        "forward chains of nftables that drop or reject requests or replies: none of {count}{possible}{legacy}"
    );
    Finding::ok(key, found)
}

/// Returns the packets to evaluate: between each uplink and some of the mapped Pods, or an unknown Pod if no Pod is
/// mapped.
fn packets(facts: &Facts, kind: PacketKind, family: Family) -> Vec<Packet<'_>> {
    if need(facts, family) == Need::No {
        return Vec::new();
    }
    let mut devices = facts.devices.as_deref().unwrap_or_default().iter();
    let loopback = devices
        .find(|device| device.kind == DeviceKind::Loopback)
        .map(|device| &device.addresses[..])
        .unwrap_or_default();
    let leading = devices_of_pods(facts, family);
    let device = |ifindex| leading.iter().copied().find(|device| device.ifindex == ifindex);
    let of_family = facts.pod_devices.iter().filter(|(pod, _)| Family::of(**pod) == family);
    let pods: Vec<_> = of_family.filter_map(|(pod, ifindex)| Some((*pod, device(*ifindex)?))).take(SAMPLES).collect();
    let to_each = |uplink| {
        let pods = if pods.is_empty() { vec![None] } else { pods.iter().copied().map(Some).collect() };
        pods.into_iter().flat_map(move |pod| {
            let ports = ports_of(facts, pod.map(|(ip, _device)| ip));
            ports.into_iter().map(move |port| Packet { kind, family, uplink, loopback, pod, port })
        })
    };
    client_uplinks(facts, family).flat_map(to_each).collect()
}

/// Returns some of the mapped ports of a Pod; if no mapped port is known, returns one `None`, which stands for an
/// unknown port.
fn ports_of(facts: &Facts, pod: Option<IpAddr>) -> Vec<Option<(Protocol, PodPort)>> {
    let datapath = facts.datapath.as_ref().ok();
    let ports = pod.zip(datapath).and_then(|(pod, datapath)| datapath.pod_ports.get(&pod));
    let known: Vec<_> = ports.into_iter().flatten().copied().map(Some).take(PORTS).collect();
    if known.is_empty() { vec![None] } else { known }
}

fn finding(key: &'static str, chain: &BaseChain, verbs: &str, how: &str, packet: &Packet<'_>) -> Finding {
    let BaseChain { table: Table { family, name: table }, name, .. } = chain;
    let uplink = &packet.uplink.name;
    let (protocol, firewalld) = match packet.family {
        Family::V4 => ("ip", "ipv4"),
        Family::V6 => ("ip6", "ipv6"),
    };
    let (packets, end, address, further) = match packet.kind {
        PacketKind::Request => (
            format!("requests that arrive on {uplink}"),
            "destination",
            "daddr",
            ". Unless a rule accepts established connections, also add the same command with `saddr`",
        ),
        PacketKind::Reply => (format!("replies that leave through {uplink}"), "source", "saddr", ""),
    };
    let rule = if table == "firewalld" {
        format!(
            "in a policy of firewalld (`firewall-cmd --permanent --new-policy npl`, with `--add-ingress-zone ANY` and \
             `--add-egress-zone ANY`), add the rich rule `rule family={firewalld} {end} address=POD-NETWORK accept`"
        )
    } else {
        format!(
            "add this command to the configuration of the firewall: `nft insert rule {family} {table} {name} \
             {protocol} {address} POD-NETWORK accept`{further}"
        )
    };
    let meaning = match packet.kind {
        PacketKind::Request => {
            "to the firewall, a translated request is a new connection from the client to the Pod; no rule accepts this \
             connection, and `ct status dnat` does not match this connection"
        }
        PacketKind::Reply => {
            "the firewall accepts the request, and drops the Pod's reply, which is a packet of an established \
             connection"
        }
    };
    Finding::warning(
        key,
        format!("chain {name} of nftables table {family} {table} {verbs} {} {packets}, {how}", packet.family),
        format!("with --forwarding stack and offload, connections to mapped Pods fail: {meaning}: {rule}"),
    )
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Facts, State,
            tests::{check, first_device, pinned, well},
        },
        BaseChain, Condition, Device, DeviceKind, Field, ForwardChains, MAX_DEPTH, Rule, STATE_NEW, STATUS_DNAT, Table,
        Verdict,
    };

    const KEY: &str = "forward_chains";
    const ESTABLISHED_OR_RELATED: u32 = 2 | 4;

    fn table(family: &'static str, name: &str) -> Table {
        Table { family, name: name.to_owned() }
    }

    fn chains(table: &Table, drops_by_default: bool, rules: Vec<Rule>) -> ForwardChains {
        ForwardChains {
            base: vec![BaseChain { table: table.clone(), name: "fwd".to_owned(), drops_by_default }],
            rules: [((table.clone(), "fwd".to_owned()), rules)].into(),
            has_legacy_filter: false,
        }
    }

    /// Sets up a chain as `iptables -P FORWARD DROP` does, with these rules.
    fn dropping(facts: &mut Facts, rules: Vec<Rule>) {
        facts.forward_chains = Ok(chains(&table("ip", "filter"), true, rules));
    }

    fn rule(conditions: Vec<Condition>, verdict: Verdict) -> Rule {
        Rule { conditions, verdict }
    }

    fn is(field: Field, value: &[u8]) -> Condition {
        Condition { field, mask: Vec::new(), values: vec![value.to_vec()], is_negated: false }
    }

    /// Returns the condition that one of the bits of a field is set, as in `ct state established,related`, `ct status
    /// dnat` and `meta mark & BITS != 0`.
    fn has_bits(field: Field, bits: u32) -> Condition {
        Condition { field, mask: bits.to_ne_bytes().to_vec(), values: vec![vec![0; 4]], is_negated: true }
    }

    fn to_pod_network() -> Condition {
        is(Field::Header { offset: 16, length: 2 }, &[10, 0])
    }

    fn from_pod_network() -> Condition {
        is(Field::Header { offset: 12, length: 2 }, &[10, 0])
    }

    /// Rules that accept requests to Pods, and their replies.
    fn accept_pods() -> Vec<Rule> {
        vec![rule(vec![to_pod_network()], Verdict::Accept), rule(vec![from_pod_network()], Verdict::Accept)]
    }

    fn established() -> Rule {
        rule(vec![has_bits(Field::State, ESTABLISHED_OR_RELATED)], Verdict::Accept)
    }

    fn dnat() -> Rule {
        rule(vec![has_bits(Field::Status, STATUS_DNAT)], Verdict::Accept)
    }

    /// Sets up the rules of firewalld, which accept established connections and connections that netfilter translates,
    /// and reject all other connections. The `further` rules precede the rule that rejects.
    fn firewalld(facts: &mut Facts, further: Vec<Rule>) {
        let rules = [established(), dnat()].into_iter().chain(further).chain([rule(Vec::new(), Verdict::Refuse)]);
        facts.forward_chains = Ok(chains(&table("inet", "firewalld"), false, rules.collect()));
    }

    #[test]
    fn a_chain_that_rejects_all_but_kernel_dnat_is_reported() {
        check(&[
            (
                |it| firewalld(it, Vec::new()),
                KEY,
                State::Warning,
                "chain fwd of nftables table inet firewalld drops or rejects IPv4 requests that arrive on",
                "rule family=ipv4 destination address=POD-NETWORK accept",
            ),
            (|it| firewalld(it, vec![rule(vec![to_pod_network()], Verdict::Accept)]), KEY, State::Ok, "none of 1", ""),
            (
                |it| firewalld(it, vec![rule(vec![is(Field::OutName, b"cali")], Verdict::Accept)]),
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
            // A rule for another device does not match the request.
            (
                |it| firewalld(it, vec![rule(vec![is(Field::OutName, b"docker0\0\0\0\0\0\0\0\0\0")], Verdict::Accept)]),
                KEY,
                State::Warning,
                "drops or rejects IPv4 requests that arrive on eth0, by a rule",
                "",
            ),
        ]);
    }

    /// Every chain has twelve rules that jump to the next chain, so there are 12^15 paths to the last chain.
    #[test]
    fn each_of_many_nested_chains_is_evaluated_once() {
        fn nested(it: &mut Facts, last: Verdict) {
            let table = table("ip", "filter");
            let name = |depth: usize| if depth == 0 { "fwd".to_owned() } else { format!("nested-{depth}") };
            let mut nested = chains(&table, true, Vec::new());
            for depth in 0..MAX_DEPTH - 1 {
                let jump = || rule(vec![Condition::unclear()], Verdict::Jump(name(depth + 1)));
                nested.rules.insert((table.clone(), name(depth)), (0..12).map(|_| jump()).collect());
            }
            nested.rules.insert((table, name(MAX_DEPTH - 1)), vec![rule(Vec::new(), last)]);
            it.forward_chains = Ok(nested);
        }
        check(&[
            (|it| nested(it, Verdict::Return), KEY, State::Warning, "drops IPv4 requests that arrive on eth0", ""),
            (|it| nested(it, Verdict::Accept), KEY, State::Ok, "unless an earlier rule accepts them", ""),
        ]);
    }

    #[test]
    fn a_chain_that_drops_by_default_is_reported_unless_it_accepts_pods() {
        check(&[
            (
                |it| dropping(it, vec![established(), rule(vec![has_bits(Field::Mark, 0x4000)], Verdict::Accept)]),
                KEY,
                State::Warning,
                "chain fwd of nftables table ip filter drops IPv4 requests that arrive on eth0, by default",
                "nft insert rule ip filter fwd ip daddr POD-NETWORK accept",
            ),
            (|it| dropping(it, accept_pods()), KEY, State::Ok, "none of 1", ""),
            // This rule may match the request: Calico marks the packets that Calico accepts.
            (
                |it| dropping(it, vec![rule(vec![has_bits(Field::Mark, 0x10000)], Verdict::Accept)]),
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
            (
                |it| dropping(it, vec![rule(vec![Condition::unclear()], Verdict::Refuse)]),
                KEY,
                State::Warning,
                "drops IPv4 requests that arrive on eth0, by default",
                "",
            ),
            (
                |it| it.forward_chains = Ok(chains(&table("ip6", "filter"), true, Vec::new())),
                KEY,
                State::Warning,
                "IPv6 requests",
                "ip6 daddr",
            ),
            (
                |it| it.forward_chains = Ok(chains(&table("inet", "fw"), false, Vec::new())),
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
            (|it| it.forward_chains = Err("EPERM".to_owned()), KEY, State::Unknown, "EPERM", "as root"),
        ]);
    }

    /// Sets up a chain with the policy `accept` and these rules.
    fn accepting(facts: &mut Facts, rules: Vec<Rule>) {
        facts.forward_chains = Ok(chains(&table("inet", "fw"), false, rules));
    }

    /// The conditions of a rule for one TCP port. The mapped Pod listens on TCP port 8080.
    fn to_port(port: u16) -> Vec<Condition> {
        vec![is(Field::Transport, &[6]), is(Field::DestinationPort, &port.to_be_bytes())]
    }

    #[test]
    fn a_drop_rule_of_an_accepting_chain_is_reported_if_it_matches_pods() {
        let drops = "chain fwd of nftables table inet fw drops or rejects IPv4 requests that arrive on eth0, by a rule";
        check(&[
            (|it| accepting(it, vec![rule(Vec::new(), Verdict::Refuse)]), KEY, State::Warning, drops, "daddr"),
            (
                |it| accepting(it, vec![rule(vec![is(Field::InName, b"eth0")], Verdict::Refuse)]),
                KEY,
                State::Warning,
                drops,
                "",
            ),
            (|it| accepting(it, vec![rule(vec![to_pod_network()], Verdict::Refuse)]), KEY, State::Warning, drops, ""),
            (|it| accepting(it, vec![rule(to_port(8080), Verdict::Refuse)]), KEY, State::Warning, drops, ""),
            (|it| accepting(it, vec![rule(to_port(8081), Verdict::Refuse)]), KEY, State::Ok, "none of 1", ""),
            (
                |it| accepting(it, vec![rule(vec![is(Field::InName, b"wlan0")], Verdict::Refuse)]),
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
            (
                |it| {
                    let rules = vec![rule(to_port(8080), Verdict::Accept), rule(Vec::new(), Verdict::Refuse)];
                    accepting(it, rules);
                },
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
        ]);
    }

    #[test]
    fn a_rule_that_may_drop_is_named_without_a_warning() {
        let found = |rules: Vec<Rule>| {
            let mut facts = well();
            accepting(&mut facts, rules);
            let finding = super::forward_chains(&facts);
            assert_eq!(finding.state, State::Ok, "{finding:?}");
            finding.found
        };
        let unclear = |verdict| rule(vec![Condition::unclear()], verdict);
        let conditional = found(vec![unclear(Verdict::Refuse)]);
        let words = "chain fwd of nftables table inet fw may drop requests by a rule, if conditions hold";
        assert!(conditional.contains(words), "{conditional}");
        let excepted = found(vec![unclear(Verdict::Accept), rule(Vec::new(), Verdict::Refuse)]);
        let words = "may drop requests by a rule, unless an earlier rule accepts them";
        assert!(excepted.contains(words), "{excepted}");
        // A rule that accepts the request makes later rules irrelevant.
        let accepted = found(vec![rule(Vec::new(), Verdict::Accept), unclear(Verdict::Refuse)]);
        assert!(!accepted.contains("may drop"), "{accepted}");
        assert!(!found(vec![established()]).contains("may drop"));
    }

    /// A rule accepts only packets to the Pod network. This network contains the Node's address, so the network may
    /// also contain clients.
    fn node_in_pod_network(facts: &mut Facts) {
        first_device(facts).addresses = vec!["10.0.1.1".parse().unwrap()];
        pinned(facts).addresses = ["10.0.1.1".parse().unwrap()].into();
        dropping(facts, vec![rule(vec![to_pod_network()], Verdict::Accept)]);
    }

    /// Each IPv4 chain lets only the requests or only the replies pass. In two of the cases, the Pod network contains
    /// the Node's address. Clients may then be in the Pod network too, so the chain may let the replies pass, and the
    /// check reports no warning.
    #[test]
    fn a_chain_that_accepts_only_one_direction_is_reported() {
        check(&[
            (
                |it| dropping(it, vec![rule(vec![to_pod_network()], Verdict::Accept)]),
                KEY,
                State::Warning,
                "chain fwd of nftables table ip filter drops IPv4 replies that leave through eth0, by default \
                 (policy drop)",
                "nft insert rule ip filter fwd ip saddr POD-NETWORK accept",
            ),
            (
                |it| dropping(it, vec![rule(vec![from_pod_network()], Verdict::Accept)]),
                KEY,
                State::Warning,
                "IPv4 requests that arrive on eth0",
                "ip daddr POD-NETWORK accept",
            ),
            (
                |it| accepting(it, vec![rule(vec![from_pod_network()], Verdict::Refuse)]),
                KEY,
                State::Warning,
                "drops or rejects IPv4 replies that leave through eth0, by a rule",
                "ip saddr POD-NETWORK accept",
            ),
            (node_in_pod_network, KEY, State::Ok, "may drop replies", ""),
            // The Node's address is on the loopback device, and the uplink has no address.
            (
                |it| {
                    node_in_pod_network(it);
                    let addresses = std::mem::take(&mut first_device(it).addresses);
                    let loopback = Device { addresses, ..Device::new(1, "lo", DeviceKind::Loopback) };
                    it.devices.as_mut().unwrap().push(loopback);
                },
                KEY,
                State::Ok,
                "may drop replies",
                "",
            ),
            // An uplink without an address receives no IPv6 requests on a Node without IPv6 addresses.
            (
                |it| {
                    first_device(it).addresses.clear();
                    it.forward_chains = Ok(chains(&table("ip6", "filter"), true, Vec::new()));
                },
                KEY,
                State::Ok,
                "none of 1",
                "",
            ),
            // A device without an address can receive requests, too.
            (
                |it| {
                    first_device(it).addresses.clear();
                    dropping(it, vec![established()]);
                },
                KEY,
                State::Warning,
                "IPv4 requests that arrive on eth0",
                "",
            ),
        ]);
    }

    #[test]
    fn the_chain_with_the_rule_is_named() {
        let mut facts = well();
        let mut all = chains(&table("inet", "fw"), false, vec![rule(Vec::new(), Verdict::Jump("deny".to_owned()))]);
        all.rules.insert((table("inet", "fw"), "deny".to_owned()), vec![rule(Vec::new(), Verdict::Refuse)]);
        facts.forward_chains = Ok(all);
        let found = super::forward_chains(&facts).found;
        assert!(
            found.contains("table inet fw drops or rejects IPv4 requests that arrive on eth0, by a rule of chain deny"),
            "{found}"
        );
    }

    #[test]
    fn legacy_rules_are_named_as_not_checked() {
        let mut facts = well();
        facts.forward_chains = Ok(ForwardChains { has_legacy_filter: true, ..ForwardChains::default() });
        let finding = super::forward_chains(&facts);
        assert_eq!(finding.state, State::Ok);
        assert!(finding.found.contains("iptables-legacy is not checked"), "{finding:?}");
    }

    #[test]
    fn chains_are_followed_by_jump_goto_and_return() {
        let state = |in_base: Rule, in_other: Vec<Rule>| {
            let table = table("ip", "filter");
            let mut facts = well();
            let mut all = chains(&table, true, vec![in_base]);
            all.rules.insert((table, "other".to_owned()), in_other);
            facts.forward_chains = Ok(all);
            super::forward_chains(&facts).state
        };
        let accept = accept_pods;
        let other = || "other".to_owned();
        assert_eq!(state(rule(Vec::new(), Verdict::Jump(other())), accept()), State::Ok);
        assert_eq!(state(rule(Vec::new(), Verdict::Goto(other())), accept()), State::Ok);
        assert_eq!(state(rule(vec![Condition::unclear()], Verdict::Jump(other())), accept()), State::Ok);
        let is_established = vec![has_bits(Field::State, ESTABLISHED_OR_RELATED)];
        assert_eq!(state(rule(is_established, Verdict::Jump(other())), accept()), State::Warning);
        let returned = [vec![rule(Vec::new(), Verdict::Return)], accept()].concat();
        assert_eq!(state(rule(Vec::new(), Verdict::Jump(other())), returned), State::Warning);
        assert_eq!(state(rule(Vec::new(), Verdict::Jump("unread".to_owned())), Vec::new()), State::Ok);
        let new = vec![is(Field::State, &STATE_NEW.to_ne_bytes())];
        assert_eq!(state(rule(new, Verdict::Accept), Vec::new()), State::Warning, "replies are not accepted");
        let new_or_established = vec![has_bits(Field::State, STATE_NEW | ESTABLISHED_OR_RELATED)];
        assert_eq!(state(rule(new_or_established, Verdict::Accept), Vec::new()), State::Ok);
    }

    #[test]
    fn jumps_in_a_circle_end() {
        let mut facts = well();
        dropping(&mut facts, vec![rule(Vec::new(), Verdict::Jump("fwd".to_owned()))]);
        assert_eq!(super::forward_chains(&facts).state, State::Ok);
    }
}

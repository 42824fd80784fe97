// SPDX-License-Identifier: Apache-2.0
//! Whether forward chains of nftables drop or reject requests that NPL has translated.
//!
//! To kernel conntrack, a translated request is a new connection from the client to the Pod, without the status `dnat`.
//! The rules are evaluated for such a packet, as far as its fields are known. A chain is reported only if no rule
//! before the drop or reject rule may accept the packet.

use std::{collections::BTreeMap, net::IpAddr};

use super::{
    Facts, Finding,
    forwarding::{devices_of_pods, receiving_uplinks},
    kernel::ASK_AS_ROOT,
};
use crate::core::{
    devices::{Device, DeviceKind},
    model::Family,
};

/// The base chains of the forward hook, and all chains that they jump to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardChains {
    /// Base chains in the order of the kernel's list.
    pub base: Vec<BaseChain>,
    /// Rules by table and chain. A chain that was not read is absent.
    pub rules: BTreeMap<(Table, String), Vec<Rule>>,
    /// Whether legacy iptables has a table `filter`, whose rules nftables does not list.
    pub has_legacy_filter: bool,
}

/// An nftables table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Table {
    /// `inet`, `ip` or `ip6`.
    pub family: &'static str,
    /// The table's name.
    pub name: String,
}

/// A filter chain of the forward hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// The table.
    pub table: Table,
    /// The chain's name.
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
    /// The packet is accepted, and the next base chain evaluates it.
    Accept,
    /// The packet is dropped, or rejected with a RST or an ICMP error.
    Refuse,
    /// Evaluation continues in another chain of the table, and returns to the next rule.
    Jump(String),
    /// Evaluation continues in another chain of the table, and does not return to this one.
    Goto(String),
    /// Evaluation returns to the calling chain.
    Return,
}

/// A condition on a packet field: the field has one of some values, or none of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The field.
    pub field: Field,
    /// The bits that are compared; empty if all bits are compared.
    pub mask: Vec<u8>,
    /// The values, in the kernel's byte order.
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
    /// The packet's mark: `meta mark`.
    Mark,
    /// The state of the connection in kernel conntrack: `ct state`.
    State,
    /// The status bits of the connection in kernel conntrack: `ct status`.
    Status,
    /// Bytes of the IP header.
    Header {
        /// Offset of the first byte.
        offset: usize,
        /// The number of bytes.
        length: usize,
    },
    /// Any other field of the packet.
    Other,
}

impl Condition {
    /// A condition for which the doctor cannot decide whether it matches.
    pub const fn unclear() -> Self {
        Self { field: Field::Other, mask: Vec::new(), values: Vec::new(), is_negated: false }
    }
}

/// `IFNAMSIZ`: rules compare the whole interface name, zero-padded to this length, or a prefix such as `eth*`.
const NAME_SIZE: usize = 16;
/// `ct state new`, by nftables' number of the state.
pub const STATE_NEW: u32 = 8;
/// `ct status dnat`, by the kernel's bit of the status.
pub const STATUS_DNAT: u32 = 1 << 5;
/// The mark that kube-proxy sets on packets that it has translated. Other software may mark any forwarded packet.
const KUBE_PROXY_MARK: u32 = 0x4000;
/// The maximum depth of jumps in the kernel.
const MAX_DEPTH: usize = 16;
/// The maximum number of Pods for which the rules are evaluated.
const SAMPLES: usize = 3;

/// A translated request, for which the rules are evaluated.
struct Request<'a> {
    family: Family,
    uplink: &'a Device,
    pod: Option<(IpAddr, &'a Device)>,
}

impl Request<'_> {
    /// The value of the request's field; `None` if the value is unknown.
    fn value(&self, condition: &Condition) -> Option<Vec<u8>> {
        let name = |device: &Device| {
            let mut padded = device.name.clone().into_bytes();
            padded.resize(NAME_SIZE, 0);
            padded
        };
        let to_pod = self.pod.map(|(_, device)| device);
        let value = match &condition.field {
            Field::InName => name(self.uplink),
            Field::OutName => name(to_pod?),
            Field::InIndex => self.uplink.ifindex.to_ne_bytes().to_vec(),
            Field::OutIndex => to_pod?.ifindex.to_ne_bytes().to_vec(),
            Field::Protocol => vec![if self.family == Family::V4 { 2 } else { 10 }],
            Field::Mark if condition.mask == KUBE_PROXY_MARK.to_ne_bytes() => vec![0; 4],
            Field::State => STATE_NEW.to_ne_bytes().to_vec(),
            Field::Status => vec![0; 4],
            Field::Header { offset, length } => self.destination(*offset, *length)?,
            Field::Mark | Field::Other => return None,
        };
        Some(match condition.mask.len() {
            0 => value,
            _ => value.iter().zip(&condition.mask).map(|(byte, mask)| byte & mask).collect(),
        })
    }

    /// The bytes at an offset in the IP header, if the destination address contains them; `None` for other bytes.
    fn destination(&self, offset: usize, length: usize) -> Option<Vec<u8>> {
        let (start, octets) = match self.pod?.0 {
            IpAddr::V4(addr) => (16, addr.octets().to_vec()),
            IpAddr::V6(addr) => (24, addr.octets().to_vec()),
        };
        let first = offset.checked_sub(start)?;
        octets.get(first..first + length).map(<[u8]>::to_vec)
    }

    /// Whether the request matches the condition; `None` if this is unknown.
    fn matches(&self, condition: &Condition) -> Option<bool> {
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

/// The verdict of a chain on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Accepted,
    Refused,
    /// No rule decided: the calling chain, or the policy, decides.
    Open,
}

/// The verdict of a chain, and whether an earlier rule may have accepted the request.
#[derive(Debug, Clone, Copy)]
struct ChainOutcome {
    end: End,
    may_accept: bool,
}

impl ForwardChains {
    /// The rule or policy by which the chain drops the request; `None` if the chain accepts it or may accept it.
    fn refusal(&self, chain: &BaseChain, request: &Request<'_>) -> Option<&'static str> {
        let covers = match chain.table.family {
            "ip" => request.family == Family::V4,
            "ip6" => request.family == Family::V6,
            _ => true,
        };
        let walk = self.walk(&chain.table, &chain.name, request, 0);
        match walk.end {
            _ if !covers || walk.may_accept => None,
            End::Refused => Some("drops or rejects by a rule"),
            End::Open if chain.drops_by_default => Some("drops by default (policy drop)"),
            End::Open | End::Accepted => None,
        }
    }

    fn walk(&self, table: &Table, chain: &str, request: &Request<'_>, depth: usize) -> ChainOutcome {
        let rules = self.rules.get(&(table.clone(), chain.to_owned())).filter(|_| depth <= MAX_DEPTH);
        let mut walk = ChainOutcome { end: End::Open, may_accept: rules.is_none() };
        for rule in rules.into_iter().flatten() {
            let is_certain = match request.matches_all(rule) {
                Some(false) => continue,
                matched => matched.is_some(),
            };
            let inner = match &rule.verdict {
                Verdict::Accept => ChainOutcome { end: End::Accepted, may_accept: false },
                Verdict::Refuse => ChainOutcome { end: End::Refused, may_accept: false },
                Verdict::Return => ChainOutcome { end: End::Open, may_accept: false },
                Verdict::Jump(to) | Verdict::Goto(to) => self.walk(table, to, request, depth + 1),
            };
            let leaves = matches!(rule.verdict, Verdict::Return | Verdict::Goto(_));
            walk.may_accept |= inner.may_accept;
            if !is_certain {
                // If the rule may not match, evaluation may continue with a rule that accepts.
                walk.may_accept |= inner.end == End::Accepted || leaves;
            } else if inner.end != End::Open || leaves {
                return ChainOutcome { end: inner.end, ..walk };
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
    for request in Family::ALL.into_iter().flat_map(|family| requests(facts, family)) {
        let refused = chains.base.iter().find_map(|chain| Some((chain, chains.refusal(chain, &request)?)));
        if let Some((chain, how)) = refused {
            return finding(key, chain, how, &request);
        }
    }
    let found = format!("forward chains of nftables that drop or reject requests: none of {}", chains.base.len());
    if chains.has_legacy_filter {
        return Finding::ok(key, format!("{found}; iptables-legacy is not checked: see `iptables-legacy -S FORWARD`"));
    }
    Finding::ok(key, found)
}

/// Requests through each uplink to some of the mapped Pods, or to an unknown Pod if no Pod is mapped.
fn requests(facts: &Facts, family: Family) -> Vec<Request<'_>> {
    let leading = devices_of_pods(facts, family);
    let device = |ifindex| leading.iter().copied().find(|device| device.ifindex == ifindex);
    let of_family = facts.pod_devices.iter().filter(|(pod, _)| Family::of(**pod) == family);
    let pods: Vec<_> = of_family.filter_map(|(pod, ifindex)| Some((*pod, device(*ifindex)?))).take(SAMPLES).collect();
    let has_address = |device: &Device| device.addresses.iter().any(|addr| Family::of(*addr) == family);
    // A firewall may filter the tunnels between Nodes differently from the uplinks of clients.
    let uplinks = receiving_uplinks(facts, family).into_iter();
    let uplinks = uplinks.filter(|device| device.kind != DeviceKind::Tunnel && has_address(device));
    let to_each = |uplink| {
        let pods = if pods.is_empty() { vec![None] } else { pods.iter().copied().map(Some).collect() };
        pods.into_iter().map(move |pod| Request { family, uplink, pod })
    };
    uplinks.flat_map(to_each).collect()
}

fn finding(key: &'static str, chain: &BaseChain, how: &str, request: &Request<'_>) -> Finding {
    let BaseChain { table: Table { family, name: table }, name, .. } = chain;
    let uplink = &request.uplink.name;
    let (protocol, firewalld) = match request.family {
        Family::V4 => ("ip", "ipv4"),
        Family::V6 => ("ip6", "ipv6"),
    };
    let rule = if table == "firewalld" {
        format!(
            "in a policy of firewalld (`firewall-cmd --permanent --new-policy npl`, with `--add-ingress-zone ANY` and \
             `--add-egress-zone ANY`), add the rich rule `rule family={firewalld} destination address=POD-NETWORK \
             accept`"
        )
    } else {
        format!(
            "add `nft insert rule {family} {table} {name} {protocol} daddr POD-NETWORK accept`, and the same with \
             `saddr` unless a rule accepts established connections, to the configuration of the firewall"
        )
    };
    Finding::warning(
        key,
        format!("chain {name} of nftables table {family} {table} {how}: {} requests by {uplink}", request.family),
        format!(
            "with --forwarding stack and offload, connections to mapped Pods fail: a translated request is a \
             new connection from the client to the Pod, which no rule accepts (`ct status dnat` does not match it): \
             {rule}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Facts, State,
            tests::{check, well},
        },
        BaseChain, Condition, Field, ForwardChains, Rule, STATE_NEW, STATUS_DNAT, Table, Verdict,
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

    /// `iptables -P FORWARD DROP` with these rules.
    fn dropping(facts: &mut Facts, rules: Vec<Rule>) {
        facts.forward_chains = Ok(chains(&table("ip", "filter"), true, rules));
    }

    fn rule(conditions: Vec<Condition>, verdict: Verdict) -> Rule {
        Rule { conditions, verdict }
    }

    fn is(field: Field, value: &[u8]) -> Condition {
        Condition { field, mask: Vec::new(), values: vec![value.to_vec()], is_negated: false }
    }

    /// `ct state established,related`, `ct status dnat`, `meta mark & BITS != 0`: one of the bits is set.
    fn has_bits(field: Field, bits: u32) -> Condition {
        Condition { field, mask: bits.to_ne_bytes().to_vec(), values: vec![vec![0; 4]], is_negated: true }
    }

    fn to_pod_network() -> Condition {
        is(Field::Header { offset: 16, length: 2 }, &[10, 0])
    }

    fn established() -> Rule {
        rule(vec![has_bits(Field::State, ESTABLISHED_OR_RELATED)], Verdict::Accept)
    }

    fn dnat() -> Rule {
        rule(vec![has_bits(Field::Status, STATUS_DNAT)], Verdict::Accept)
    }

    /// firewalld: accepts translated and established connections, and rejects all others.
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
                "chain fwd of nftables table inet firewalld drops or rejects by a rule: IPv4 requests by eth0",
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
                "drops or rejects by a rule",
                "",
            ),
        ]);
    }

    #[test]
    fn a_chain_that_drops_by_default_is_reported_unless_it_accepts_pods() {
        check(&[
            (
                |it| dropping(it, vec![established(), rule(vec![has_bits(Field::Mark, 0x4000)], Verdict::Accept)]),
                KEY,
                State::Warning,
                "chain fwd of nftables table ip filter drops by default",
                "nft insert rule ip filter fwd ip daddr POD-NETWORK accept",
            ),
            (|it| dropping(it, vec![rule(vec![to_pod_network()], Verdict::Accept)]), KEY, State::Ok, "none of 1", ""),
            // The rule may match: Calico marks the packets that it accepts.
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
                "drops by default",
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
        let accept = || vec![rule(vec![to_pod_network()], Verdict::Accept)];
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
        assert_eq!(state(rule(new, Verdict::Accept), Vec::new()), State::Ok);
    }

    #[test]
    fn jumps_in_a_circle_end() {
        let mut facts = well();
        dropping(&mut facts, vec![rule(Vec::new(), Verdict::Jump("fwd".to_owned()))]);
        assert_eq!(super::forward_chains(&facts).state, State::Ok);
    }
}

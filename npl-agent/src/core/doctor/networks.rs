// SPDX-License-Identifier: Apache-2.0
//! Recognizes the CNI, the policy engine and the Service proxy of a Node by their traces: names of devices, and names of
//! nftables and iptables tables and chains.

use std::collections::BTreeSet;

use super::{Facts, Finding, kernel::ASK_AS_ROOT};
use crate::core::devices::{Device, redirect::Forwarding};

/// The part of the Node's network that a software provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Connects Pods.
    Cni,
    /// Enforces NetworkPolicy.
    PolicyEngine,
    /// Provides Services.
    ServiceProxy,
}

impl Role {
    /// The key of the check, and the name in the documentation.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Cni => ("cni", "CNI"),
            Self::PolicyEngine => ("policy_engine", "policy engine"),
            Self::ServiceProxy => ("service_proxy", "Service proxy"),
        }
    }
}

/// A name that a software leaves on a Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trace {
    /// A device whose name begins so.
    Device(&'static str),
    /// An nftables table of this name.
    Table(&'static str),
    /// A chain of nftables or iptables whose name begins so.
    Chain(&'static str),
}

/// How a software was tested with NPL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tested {
    /// The software itself runs in the tests of the real cluster.
    InTests,
    /// The software itself was run with NPL once, by hand.
    ByHand,
    /// Its rules, marks and routes are imitated in the tests.
    Imitated,
    /// Not at all.
    No,
}

impl Tested {
    /// The text in the documentation.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InTests => "itself, in the tests",
            Self::ByHand => "itself, by hand",
            Self::Imitated => "its rules, in the tests",
            Self::No => "no",
        }
    }
}

/// Software that NPL recognizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// What it provides.
    pub role: Role,
    /// Its name.
    pub name: &'static str,
    /// Any of these traces shows it.
    pub traces: &'static [Trace],
    /// How it was tested with NPL.
    pub tested: Tested,
    /// Its effect on node ports, for operators.
    pub with_npl: &'static str,
    /// Whether it is a policy engine that filters in netfilter, which redirected packets bypass.
    pub is_bypassed_by_redirect: bool,
}

/// What a CNI without particularities means for node ports.
const NOTHING_TO_SET: &str = "works without settings";
/// The effect of the engines whose chains accept packets of established connections first.
const KEEPS_OPEN_CONNECTIONS: &str = "applies with `stack` and `offload` to new connections; open ones go on after a \
                                      change, with NPL as without";
const AS_NETFILTER: &str = "applies with `stack` and `offload`";

const fn cni(name: &'static str, traces: &'static [Trace], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::Cni, name, traces, tested, with_npl, is_bypassed_by_redirect: false }
}

const fn in_netfilter(name: &'static str, traces: &'static [Trace], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::PolicyEngine, name, traces, tested, with_npl, is_bypassed_by_redirect: true }
}

const fn elsewhere(name: &'static str, traces: &'static [Trace], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::PolicyEngine, name, traces, tested, with_npl, is_bypassed_by_redirect: false }
}

const fn proxy(name: &'static str, traces: &'static [Trace], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::ServiceProxy, name, traces, tested, with_npl, is_bypassed_by_redirect: false }
}

/// All software that NPL recognizes.
pub const NETWORKS: [Network; 24] = [
    cni("bridge plug-in", &[Trace::Device("cni0")], Tested::InTests, NOTHING_TO_SET),
    cni("flannel", &[Trace::Device("flannel."), Trace::Chain("FLANNEL-")], Tested::InTests, NOTHING_TO_SET),
    cni(
        "Calico",
        &[Trace::Device("cali"), Trace::Device("vxlan.calico")],
        Tested::InTests,
        "works without settings; felix deletes and restores all IPv6 routes at its start and every 90 s, and loses IPv6 \
         packets with NPL as without: `routeRefreshInterval: 0` leaves only the starts",
    ),
    cni("kube-router", &[Trace::Device("kube-bridge")], Tested::ByHand, NOTHING_TO_SET),
    cni(
        "Cilium",
        &[Trace::Device("cilium_host")],
        Tested::ByHand,
        "forwards packets of Pods itself: `redirect` and `offload` redirect nothing and gain nothing; with \
         `bpf.masquerade` set `--port-range` below 30000, for example 28000-29000",
    ),
    cni(
        "Antrea",
        &[Trace::Device("antrea-gw")],
        Tested::Imitated,
        "disable its own NodePortLocal, or give NPL another `--annotation-domain`",
    ),
    cni("OVN-Kubernetes", &[Trace::Device("ovn-k8s-mp")], Tested::No, "not tested"),
    cni("Kube-OVN", &[Trace::Device("ovn0")], Tested::No, "not tested"),
    cni("Weave Net", &[Trace::Device("weave")], Tested::No, "not tested"),
    cni(
        "AWS VPC CNI",
        &[Trace::Chain("AWS-SNAT-CHAIN")],
        Tested::Imitated,
        "works; see doctor `reply_routes` and `incoming_rules` for Pods of secondary interfaces and with security groups",
    ),
    cni("Azure CNI", &[Trace::Device("azv")], Tested::No, "not tested"),
    cni("GKE", &[Trace::Device("gke")], Tested::No, "not tested"),
    in_netfilter("Calico", &[Trace::Chain("cali-"), Trace::Table("calico")], Tested::ByHand, KEEPS_OPEN_CONNECTIONS),
    in_netfilter(
        "kube-router",
        &[Trace::Chain("KUBE-ROUTER-FORWARD"), Trace::Chain("KUBE-POD-FW-"), Trace::Chain("KUBE-NWPLCY-")],
        Tested::ByHand,
        KEEPS_OPEN_CONNECTIONS,
    ),
    in_netfilter("kube-network-policies", &[Trace::Table("kube-network-policies")], Tested::No, AS_NETFILTER),
    in_netfilter("Weave NPC", &[Trace::Chain("WEAVE-NPC")], Tested::No, AS_NETFILTER),
    in_netfilter("Azure NPM", &[Trace::Chain("AZURE-NPM")], Tested::No, AS_NETFILTER),
    elsewhere(
        "Cilium",
        &[Trace::Device("cilium_host")],
        Tested::ByHand,
        "applies in every forwarding mode; policies of its host firewall do not protect node ports",
    ),
    elsewhere(
        "Antrea",
        &[Trace::Device("antrea-gw")],
        Tested::No,
        "is enforced by Open vSwitch; packets of its Pods take the stack in every forwarding mode",
    ),
    elsewhere(
        "Kube-OVN",
        &[Trace::Device("ovn0")],
        Tested::No,
        "is enforced by Open vSwitch; packets of its Pods take the stack in every forwarding mode",
    ),
    proxy("kube-proxy (iptables)", &[Trace::Chain("KUBE-SERVICES")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (nftables)", &[Trace::Table("kube-proxy")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (IPVS)", &[Trace::Device("kube-ipvs0")], Tested::No, "not tested"),
    proxy(
        "Cilium (if it replaces kube-proxy)",
        &[Trace::Device("cilium_host")],
        Tested::ByHand,
        "its NodePort and hostPort serve beside node ports of NPL",
    ),
];

/// The names of the Node's netfilter tables and chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleNames {
    /// The names of nftables tables.
    pub tables: BTreeSet<String>,
    /// The names of chains of nftables, and those of legacy iptables that [`NETWORKS`] asks for.
    pub chains: BTreeSet<String>,
}

/// The names of chains that [`NETWORKS`] asks for.
pub fn chain_prefixes() -> impl Iterator<Item = &'static str> {
    let traces = NETWORKS.iter().flat_map(|network| network.traces);
    traces.filter_map(|trace| if let Trace::Chain(prefix) = trace { Some(*prefix) } else { None })
}

/// The software that these devices and rules show.
pub fn recognize(devices: &[Device], rules: &RuleNames) -> impl Iterator<Item = &'static Network> {
    let is_left = |trace: &Trace| match trace {
        Trace::Device(prefix) => devices.iter().any(|device| device.name.starts_with(prefix)),
        Trace::Table(name) => rules.tables.contains(*name),
        Trace::Chain(prefix) => rules.chains.iter().any(|name| name.starts_with(prefix)),
    };
    NETWORKS.iter().filter(move |network| network.traces.iter().any(is_left))
}

/// The policy engines that redirected packets bypass.
pub fn bypassed_engines(rules: &RuleNames) -> BTreeSet<&'static str> {
    let found = recognize(&[], rules).filter(|network| network.is_bypassed_by_redirect);
    found.map(|network| network.name).collect()
}

/// The software of one role, with what it means for node ports.
fn found(facts: &Facts, role: Role) -> Result<Vec<&'static Network>, String> {
    let devices = facts.devices.as_ref().map_err(Clone::clone)?;
    let rules = facts.rule_names.as_ref().map_err(Clone::clone)?;
    Ok(recognize(devices, rules).filter(|network| network.role == role).collect())
}

fn shown(networks: &[&Network]) -> String {
    networks.iter().map(|it| format!("{}: {}", it.name, it.with_npl)).collect::<Vec<_>>().join("; ").replace('`', "")
}

/// Names the CNI or the Service proxy.
pub(super) fn recognized(facts: &Facts, role: Role) -> Finding {
    let (key, name) = role.names();
    match found(facts, role) {
        Ok(networks) if networks.is_empty() => Finding::ok(key, format!("no known {name} found")),
        Ok(networks) => Finding::ok(key, shown(&networks)),
        Err(reason) => Finding::unknown(key, reason, ASK_AS_ROOT),
    }
}

/// Names the policy engine, and warns if redirected packets bypass it or redirect is refused because of it.
pub(super) fn policy_engine(facts: &Facts) -> Finding {
    let (key, name) = Role::PolicyEngine.names();
    let networks = match found(facts, Role::PolicyEngine) {
        Ok(networks) => networks,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let bypassed: Vec<&str> =
        networks.iter().filter(|network| network.is_bypassed_by_redirect).map(|it| it.name).collect();
    let datapath = facts.datapath.as_ref().ok();
    let is_redirecting = datapath.is_some_and(|it| it.forwarding == Some(Forwarding::Redirect));
    if !bypassed.is_empty() && datapath.is_some_and(|it| it.is_redirect_refused) {
        return Finding::warning(
            key,
            format!("--forwarding redirect is refused: NetworkPolicy of {} would not apply", bypassed.join(", ")),
            "packets take the host's stack: set --forwarding stack or offload, or --ignore-network-policy if node ports \
             need no NetworkPolicy",
        );
    }
    if !bypassed.is_empty() && is_redirecting {
        return Finding::warning(
            key,
            format!("redirected packets bypass the NetworkPolicy of {}", bypassed.join(", ")),
            "every client reaches the node ports of redirected Pods: set --forwarding stack or offload, or restrict \
             clients by allowed-source-ranges",
        );
    }
    if networks.is_empty() {
        return Finding::ok(key, format!("no known {name} found"));
    }
    Finding::ok(key, shown(&networks))
}

/// The first port that Cilium may choose as the source port of a masqueraded connection, by default.
const CILIUM_FIRST_PORT: u16 = 32_768;

/// Whether Cilium may masquerade connections of Pods behind node ports: it then has a program at egress of an uplink.
pub(super) fn is_masqueraded_by_cilium(facts: &Facts) -> bool {
    let reaches = facts.datapath.as_ref().ok().and_then(|it| it.port_range.as_ref());
    let reaches = reaches.is_some_and(|range| range.end().0 >= CILIUM_FIRST_PORT);
    let devices = facts.devices.as_deref().unwrap_or_default();
    reaches && facts.has_others_at_egress && devices.iter().any(|device| device.name == "cilium_host")
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            State,
            tests::{check, pinned},
        },
        *,
    };
    use crate::core::devices::DeviceKind;

    fn rules(tables: &[&str], chains: &[&str]) -> RuleNames {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        RuleNames { tables: owned(tables), chains: owned(chains) }
    }

    fn add_device(facts: &mut Facts, name: &str) {
        facts.devices.as_mut().unwrap().push(Device::new(9, name, DeviceKind::Veth));
    }

    fn calico(facts: &mut Facts) {
        facts.rule_names = Ok(rules(&["filter", "nat"], &["FORWARD", "cali-FORWARD", "KUBE-SERVICES"]));
    }

    #[test]
    fn each_software_is_recognized_by_each_of_its_traces() {
        for network in NETWORKS {
            for trace in network.traces {
                let (mut devices, mut names) = (Vec::new(), RuleNames::default());
                match trace {
                    Trace::Device(prefix) => devices.push(Device::new(9, &format!("{prefix}1"), DeviceKind::Veth)),
                    Trace::Table(name) => drop(names.tables.insert((*name).to_owned())),
                    Trace::Chain(prefix) => drop(names.chains.insert(format!("{prefix}x"))),
                }
                assert!(recognize(&devices, &names).any(|found| *found == network), "{network:?} by {trace:?}");
            }
        }
    }

    #[test]
    fn a_node_without_traces_shows_nothing() {
        let plain = rules(&["filter", "npl"], &["FORWARD", "postrouting", "KUBE-MARK-MASQ"]);
        assert_eq!(recognize(&[Device::new(2, "eth0", DeviceKind::Physical)], &plain).count(), 0);
        assert!(bypassed_engines(&plain).is_empty());
    }

    #[test]
    fn only_engines_in_netfilter_are_bypassed() {
        let engines = |chain: &str| bypassed_engines(&rules(&[], &[chain])).into_iter().collect::<Vec<_>>();
        assert_eq!(engines("cali-tw-cali1"), ["Calico"]);
        assert_eq!(engines("KUBE-POD-FW-ABC"), ["kube-router"]);
        assert_eq!(engines("KUBE-SERVICES"), Vec::<&str>::new());
        assert!(NETWORKS.iter().filter(|it| it.is_bypassed_by_redirect).all(|it| it.role == Role::PolicyEngine));
    }

    #[test]
    fn cni_policy_engine_and_service_proxy_are_named_with_their_effect() {
        check(&[
            (|it| add_device(it, "flannel.1"), "cni", State::Ok, "flannel: works without settings", ""),
            (|it| it.devices.as_mut().unwrap().truncate(1), "cni", State::Ok, "no known CNI found", ""),
            (calico, "policy_engine", State::Ok, "Calico: applies with stack and offload to new connections", ""),
            (|_| (), "policy_engine", State::Ok, "no known policy engine found", ""),
            (calico, "service_proxy", State::Ok, "kube-proxy (iptables)", ""),
        ]);
        let mut unreadable = super::super::tests::well();
        unreadable.rule_names = Err("EPERM".to_owned());
        for key in ["cni", "policy_engine", "service_proxy"] {
            let findings = super::super::examine(&unreadable);
            let finding = findings.iter().find(|finding| finding.key == key).unwrap();
            assert_eq!((finding.state, finding.found.as_str()), (State::Unknown, "EPERM"));
        }
    }

    #[test]
    fn redirect_beside_an_engine_in_netfilter_is_a_warning_whether_refused_or_not() {
        check(&[
            (
                |it| {
                    calico(it);
                    pinned(it).is_redirect_refused = true;
                },
                "policy_engine",
                State::Warning,
                "--forwarding redirect is refused: NetworkPolicy of Calico",
                "--ignore-network-policy",
            ),
            (
                |it| {
                    calico(it);
                    pinned(it).forwarding = Some(Forwarding::Redirect);
                },
                "policy_engine",
                State::Warning,
                "redirected packets bypass the NetworkPolicy of Calico",
                "allowed-source-ranges",
            ),
            (
                |it| {
                    calico(it);
                    pinned(it).forwarding = Some(Forwarding::Offload);
                },
                "policy_engine",
                State::Ok,
                "Calico",
                "",
            ),
            (|it| pinned(it).forwarding = Some(Forwarding::Redirect), "policy_engine", State::Ok, "no known", ""),
        ]);
    }

    #[test]
    fn a_port_range_that_cilium_masquerades_to_is_a_warning() {
        fn cilium(facts: &mut Facts) {
            add_device(facts, "cilium_host");
            facts.has_others_at_egress = true;
        }
        check(&[
            (cilium, "port_range", State::Warning, "from 32768-65535", "28000-29000"),
            (|it| add_device(it, "cilium_host"), "port_range", State::Ok, "61000-62000", ""),
            (|it| it.has_others_at_egress = true, "port_range", State::Ok, "61000-62000", ""),
            (
                |it| {
                    cilium(it);
                    pinned(it).port_range = "28000-29000".parse().ok();
                },
                "port_range",
                State::Ok,
                "28000-29000",
                "",
            ),
        ]);
    }
}

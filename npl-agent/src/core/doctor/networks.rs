// SPDX-License-Identifier: Apache-2.0
//! Recognizes the CNI, the policy engines and the Service proxy of a Node by the names of devices, nftables tables, and
//! nftables and iptables chains.

use std::collections::BTreeSet;

use super::{Facts, Finding, kernel::ASK_AS_ROOT};
use crate::core::devices::{CILIUM_HOST, Device, redirect::Forwarding};

/// The role of recognized software in the Node's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The software connects Pods to the network.
    Cni,
    /// The software enforces NetworkPolicy.
    PolicyEngine,
    /// The software translates Service addresses.
    ServiceProxy,
}

impl Role {
    /// The key of the role's doctor check, and the role's name in the documentation.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Cni => ("cni", "CNI"),
            Self::PolicyEngine => ("policy_engine", "policy engine"),
            Self::ServiceProxy => ("service_proxy", "Service proxy"),
        }
    }
}

/// A name on the Node by which software is recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trace {
    /// A device whose name begins with this prefix.
    Device(&'static str),
    /// An nftables table with this name.
    Table(&'static str),
    /// An nftables or iptables chain whose name begins with this prefix.
    Chain(&'static str),
}

/// How the software was tested with NPL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tested {
    /// The software itself runs in the cluster tests.
    InTests,
    /// The software itself was run with NPL once, in a manual test.
    ByHand,
    /// The tests imitate the software's rules, marks and routes.
    Imitated,
    /// The software was not tested.
    No,
}

impl Tested {
    /// The description of the test in the documentation.
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
    /// The role of the software.
    pub role: Role,
    /// The name of the software.
    pub name: &'static str,
    /// The traces, any of which identifies the software.
    pub traces: &'static [Trace],
    /// How the software was tested with NPL.
    pub tested: Tested,
    /// The software's effect on node ports, for operators.
    pub with_npl: &'static str,
    /// Whether the software is a policy engine that filters in netfilter, so that redirected packets bypass its rules.
    pub is_bypassed_by_redirect: bool,
}

/// The effect of CNIs that need no settings.
const NOTHING_TO_SET: &str = "works without settings";
/// The effect of policy engines whose chains first accept packets of established connections.
const KEEPS_OPEN_CONNECTIONS: &str = "applies with `stack` and `offload` to new connections; open connections \
                                      continue after a change of a policy, as they do without NPL";
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
        "works without settings; felix deletes and restores all IPv6 routes at its start and every 90 s, which loses \
         IPv6 packets also without NPL; with `routeRefreshInterval: 0` only at its start",
    ),
    cni("kube-router", &[Trace::Device("kube-bridge")], Tested::InTests, NOTHING_TO_SET),
    cni(
        "Cilium",
        &[Trace::Device(CILIUM_HOST)],
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
    in_netfilter("Calico", &[Trace::Chain("cali-"), Trace::Table("calico")], Tested::InTests, KEEPS_OPEN_CONNECTIONS),
    in_netfilter(
        "kube-router",
        &[Trace::Chain("KUBE-ROUTER-FORWARD"), Trace::Chain("KUBE-POD-FW-"), Trace::Chain("KUBE-NWPLCY-")],
        Tested::InTests,
        KEEPS_OPEN_CONNECTIONS,
    ),
    in_netfilter("kube-network-policies", &[Trace::Table("kube-network-policies")], Tested::No, AS_NETFILTER),
    in_netfilter("Weave NPC", &[Trace::Chain("WEAVE-NPC")], Tested::No, AS_NETFILTER),
    in_netfilter("Azure NPM", &[Trace::Chain("AZURE-NPM")], Tested::No, AS_NETFILTER),
    elsewhere(
        "Cilium",
        &[Trace::Device(CILIUM_HOST)],
        Tested::ByHand,
        "applies in every forwarding mode; policies of its host firewall do not protect node ports",
    ),
    elsewhere(
        "Antrea",
        &[Trace::Device("antrea-gw")],
        Tested::No,
        "is enforced by Open vSwitch; the host's stack forwards packets of its Pods in every forwarding mode",
    ),
    elsewhere(
        "Kube-OVN",
        &[Trace::Device("ovn0")],
        Tested::No,
        "is enforced by Open vSwitch; the host's stack forwards packets of its Pods in every forwarding mode",
    ),
    proxy("kube-proxy (iptables)", &[Trace::Chain("KUBE-SERVICES")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (nftables)", &[Trace::Table("kube-proxy")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (IPVS)", &[Trace::Device("kube-ipvs0")], Tested::No, "not tested"),
    proxy(
        "Cilium (if it replaces kube-proxy)",
        &[Trace::Device(CILIUM_HOST)],
        Tested::ByHand,
        "its NodePort and hostPort work together with node ports of NPL",
    ),
];

/// The names of the Node's netfilter tables and chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleNames {
    /// The names of nftables tables.
    pub tables: BTreeSet<String>,
    /// The names of all nftables chains, and of those legacy iptables chains for which [`NETWORKS`] has a trace.
    pub chains: BTreeSet<String>,
}

/// The chain name prefixes in [`NETWORKS`].
pub fn chain_prefixes() -> impl Iterator<Item = &'static str> {
    let traces = NETWORKS.iter().flat_map(|network| network.traces);
    traces.filter_map(|trace| if let Trace::Chain(prefix) = trace { Some(*prefix) } else { None })
}

/// The software that is recognized by these devices and rules.
pub fn recognize(devices: &[Device], rules: &RuleNames) -> impl Iterator<Item = &'static Network> {
    let is_left = |trace: &Trace| match trace {
        Trace::Device(prefix) => devices.iter().any(|device| device.name.starts_with(prefix)),
        Trace::Table(name) => rules.tables.contains(*name),
        Trace::Chain(prefix) => rules.chains.iter().any(|name| name.starts_with(prefix)),
    };
    NETWORKS.iter().filter(move |network| network.traces.iter().any(is_left))
}

/// The recognized policy engines whose rules redirected packets bypass.
pub fn bypassed_engines(rules: &RuleNames) -> BTreeSet<&'static str> {
    let found = recognize(&[], rules).filter(|network| network.is_bypassed_by_redirect);
    found.map(|network| network.name).collect()
}

/// The recognized software of one role, with its effect on node ports.
fn found(facts: &Facts, role: Role) -> Result<Vec<&'static Network>, String> {
    let devices = facts.devices.as_ref().map_err(Clone::clone)?;
    let rules = facts.rule_names.as_ref().map_err(Clone::clone)?;
    Ok(recognize(devices, rules).filter(|network| network.role == role).collect())
}

fn shown(networks: &[&Network]) -> String {
    networks.iter().map(|it| format!("{}: {}", it.name, it.with_npl)).collect::<Vec<_>>().join("; ").replace('`', "")
}

/// The finding that names the CNI or the Service proxy.
pub(super) fn recognized(facts: &Facts, role: Role) -> Finding {
    let (key, name) = role.names();
    match found(facts, role) {
        Ok(networks) if networks.is_empty() => Finding::ok(key, format!("no known {name} found")),
        Ok(networks) => Finding::ok(key, shown(&networks)),
        Err(reason) => Finding::unknown(key, reason, ASK_AS_ROOT),
    }
}

/// The finding that names the policy engines. It is a warning if redirected packets bypass an engine's rules, or if
/// redirect is refused because of an engine.
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
            "the host's stack forwards all packets: set --forwarding stack or offload, or --ignore-network-policy if \
             node ports need no NetworkPolicy",
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

/// The first port that Cilium, by default, may choose as the source port of a masqueraded connection.
const CILIUM_FIRST_PORT: u16 = 32_768;

/// Whether Cilium may choose node ports as source ports of masqueraded connections. If Cilium masquerades by BPF, it
/// has a program at egress of an uplink.
pub(super) fn is_masqueraded_by_cilium(facts: &Facts) -> bool {
    let reaches = facts.datapath.as_ref().ok().and_then(|it| it.port_range.as_ref());
    let reaches = reaches.is_some_and(|range| range.end().0 >= CILIUM_FIRST_PORT);
    let devices = facts.devices.as_deref().unwrap_or_default();
    reaches && facts.has_others_at_egress && devices.iter().any(|device| device.name == CILIUM_HOST)
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
    fn no_software_is_recognized_on_a_node_without_traces() {
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
    fn redirect_with_a_policy_engine_in_netfilter_is_a_warning_whether_refused_or_not() {
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

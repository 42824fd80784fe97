// SPDX-License-Identifier: Apache-2.0
//! Recognizes the CNI, the policy engines and the Service proxy of a Node by the names of devices, nftables tables, and
//! nftables and iptables chains.

use std::collections::BTreeSet;

/// The name of a network device that Cilium creates on every Node.
pub const CILIUM_HOST: &str = "cilium_host";

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
    /// The key of the doctor check for this role, and the name of the role in the documentation.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Cni => ("cni", "CNI"),
            Self::PolicyEngine => ("policy_engine", "policy engine"),
            Self::ServiceProxy => ("service_proxy", "Service proxy"),
        }
    }
}

/// The name of a device, nftables table or chain by which NPL recognizes software on the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
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
    /// The software did not run in tests; tests imitate its rules, marks and routes.
    Imitated,
    /// The software did not run in tests; tests imitate its bridges and `OpenFlow` rules, with the userspace datapath of
    /// Open vSwitch.
    Ovs,
    /// The software did not run in tests; tests imitate its rules as [`Self::Imitated`], and its bridges as
    /// [`Self::Ovs`].
    RulesAndOvs,
    /// The software was not tested.
    No,
}

impl Tested {
    /// The description of the test in the documentation.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InTests => "itself, in the tests",
            Self::Imitated => "its rules, in the tests",
            Self::Ovs => "its datapath, imitated by userspace OVS, in the tests",
            Self::RulesAndOvs => "its rules, and its datapath, imitated by userspace OVS, in the tests",
            Self::No => "no",
        }
    }
}

/// Networking software that NPL recognizes on a Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// The role of the software.
    pub role: Role,
    /// The name of the software.
    pub name: &'static str,
    /// The devices, tables and chains by which NPL recognizes the software; one of these names on the Node is
    /// sufficient.
    pub names: &'static [Name],
    /// How the software was tested with NPL.
    pub tested: Tested,
    /// The text for operators about the software's effect on node ports.
    pub with_npl: &'static str,
    /// Whether the software is a policy engine whose rules are in netfilter, so that redirected packets bypass the
    /// rules.
    pub is_bypassed_by_redirect: bool,
}

/// The text about a CNI with which NPL works without special settings.
const NOTHING_TO_SET: &str = "works without settings";
/// The text about a policy engine whose chains accept packets of established connections before they check policies.
const KEEPS_OPEN_CONNECTIONS: &str = "its policies apply with `stack` and `offload` to new connections; open \
                                      connections continue after a change of a policy, as they do without NPL";
const AS_NETFILTER: &str = "its policies apply with `stack` and `offload`";
/// The text about a policy engine whose rules are `OpenFlow` rules of Open vSwitch.
const IN_OPEN_VSWITCH: &str = "its policies are enforced by Open vSwitch and apply in every forwarding mode, because \
                               the host's stack forwards packets of its Pods";

const fn cni(name: &'static str, names: &'static [Name], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::Cni, name, names, tested, with_npl, is_bypassed_by_redirect: false }
}

const fn in_netfilter(name: &'static str, names: &'static [Name], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::PolicyEngine, name, names, tested, with_npl, is_bypassed_by_redirect: true }
}

const fn elsewhere(name: &'static str, names: &'static [Name], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::PolicyEngine, name, names, tested, with_npl, is_bypassed_by_redirect: false }
}

const fn proxy(name: &'static str, names: &'static [Name], tested: Tested, with_npl: &'static str) -> Network {
    Network { role: Role::ServiceProxy, name, names, tested, with_npl, is_bypassed_by_redirect: false }
}

/// All software that NPL recognizes.
pub const NETWORKS: [Network; 25] = [
    cni("bridge plug-in", &[Name::Device("cni0")], Tested::InTests, NOTHING_TO_SET),
    cni("flannel", &[Name::Device("flannel."), Name::Chain("FLANNEL-")], Tested::InTests, NOTHING_TO_SET),
    cni(
        "Calico",
        &[Name::Device("cali"), Name::Device("vxlan.calico")],
        Tested::InTests,
        "works without settings; Calico's felix deletes and restores all IPv6 routes when it starts and every 90 s, \
         which loses IPv6 packets with and without NPL; with `routeRefreshInterval: 0`, felix does so only when it \
         starts",
    ),
    cni("kube-router", &[Name::Device("kube-bridge")], Tested::InTests, NOTHING_TO_SET),
    cni(
        "Cilium",
        &[Name::Device(CILIUM_HOST)],
        Tested::InTests,
        "Cilium's programs forward packets of Pods in every forwarding mode: `redirect` and `offload` have no effect; \
         with `bpf.masquerade` set `--port-range` below 30000, for example 28000-29000",
    ),
    cni(
        "Antrea",
        &[Name::Device("antrea-gw")],
        Tested::RulesAndOvs,
        "disable Antrea's own NodePortLocal, or give NPL another `--annotation-domain`",
    ),
    cni(
        "OVN-Kubernetes",
        &[Name::Device("ovn-k8s-mp")],
        Tested::Ovs,
        "set `routingViaHost: true` (local gateway mode): in shared gateway mode, replies of Pods bypass the host's \
         stack, so NPL does not translate them",
    ),
    cni(
        "Kube-OVN",
        &[Name::Device("ovn0")],
        Tested::Ovs,
        "works for Pods whose packets to clients pass the host's stack; replies of Pods in underlay subnets bypass \
         the host's stack, so NPL does not translate them",
    ),
    cni("Weave Net", &[Name::Device("weave")], Tested::No, "not tested"),
    cni(
        "AWS VPC CNI",
        &[Name::Chain("AWS-SNAT-CHAIN")],
        Tested::Imitated,
        "works; for Pods with security groups or addresses of secondary interfaces, see the doctor checks \
         `reply_routes` and `incoming_rules`",
    ),
    cni("Azure CNI", &[Name::Device("azv")], Tested::No, "not tested"),
    cni("GKE", &[Name::Device("gke")], Tested::No, "not tested"),
    in_netfilter("Calico", &[Name::Chain("cali-"), Name::Table("calico")], Tested::InTests, KEEPS_OPEN_CONNECTIONS),
    in_netfilter(
        "kube-router",
        &[Name::Chain("KUBE-ROUTER-FORWARD"), Name::Chain("KUBE-POD-FW-"), Name::Chain("KUBE-NWPLCY-")],
        Tested::InTests,
        KEEPS_OPEN_CONNECTIONS,
    ),
    in_netfilter(
        "kube-network-policies",
        // kindnet contains this engine, with a table name of its own.
        &[Name::Table("kube-network-policies"), Name::Table("kindnet-network-policies")],
        Tested::No,
        KEEPS_OPEN_CONNECTIONS,
    ),
    in_netfilter("Weave NPC", &[Name::Chain("WEAVE-NPC")], Tested::No, AS_NETFILTER),
    in_netfilter("Azure NPM", &[Name::Chain("AZURE-NPM")], Tested::No, AS_NETFILTER),
    elsewhere(
        "Cilium",
        &[Name::Device(CILIUM_HOST)],
        Tested::InTests,
        "its policies apply in every forwarding mode, but the policies of its host firewall do not protect node ports",
    ),
    elsewhere("Antrea", &[Name::Device("antrea-gw")], Tested::Ovs, IN_OPEN_VSWITCH),
    elsewhere("OVN-Kubernetes", &[Name::Device("ovn-k8s-mp")], Tested::Ovs, IN_OPEN_VSWITCH),
    elsewhere("Kube-OVN", &[Name::Device("ovn0")], Tested::Ovs, IN_OPEN_VSWITCH),
    proxy("kube-proxy (iptables)", &[Name::Chain("KUBE-SERVICES")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (nftables)", &[Name::Table("kube-proxy")], Tested::InTests, NOTHING_TO_SET),
    proxy("kube-proxy (IPVS)", &[Name::Device("kube-ipvs0")], Tested::No, "not tested"),
    proxy(
        "Cilium (if it replaces kube-proxy)",
        &[Name::Device(CILIUM_HOST)],
        Tested::InTests,
        "Cilium continues to serve NodePort Services and host ports; node ports of NPL work beside them",
    ),
];

/// The names of the Node's netfilter tables and chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleNames {
    /// The names of nftables tables.
    pub tables: BTreeSet<String>,
    /// The names of all nftables chains, and of some chains of legacy iptables: those by which [`NETWORKS`] identifies
    /// software.
    pub chains: BTreeSet<String>,
}

/// The prefixes of chain names by which [`NETWORKS`] identifies software.
pub fn chain_prefixes() -> impl Iterator<Item = &'static str> {
    let names = NETWORKS.iter().flat_map(|network| network.names);
    names.filter_map(|name| if let Name::Chain(prefix) = name { Some(*prefix) } else { None })
}

/// Returns the software that is recognized by the names of these devices, tables and chains.
pub fn recognize(devices: &[&str], rules: &RuleNames) -> impl Iterator<Item = &'static Network> {
    let is_present = |name: &Name| match name {
        Name::Device(prefix) => devices.iter().any(|device| device.starts_with(prefix)),
        Name::Table(name) => rules.tables.contains(*name),
        Name::Chain(prefix) => rules.chains.iter().any(|name| name.starts_with(prefix)),
    };
    NETWORKS.iter().filter(move |network| network.names.iter().any(is_present))
}

/// Returns the names of the recognized policy engines whose rules a redirect bypasses.
pub fn bypassed_engines(rules: &RuleNames) -> BTreeSet<&'static str> {
    let found = recognize(&[], rules).filter(|network| network.is_bypassed_by_redirect);
    found.map(|network| network.name).collect()
}

#[cfg(test)]
pub(in crate::core) mod tests {
    use super::*;

    pub(in crate::core) fn rules(tables: &[&str], chains: &[&str]) -> RuleNames {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        RuleNames { tables: owned(tables), chains: owned(chains) }
    }

    #[test]
    fn each_software_is_recognized_by_each_of_its_names() {
        for network in NETWORKS {
            for name in network.names {
                let (mut device, mut rules) = (String::new(), RuleNames::default());
                match name {
                    Name::Device(prefix) => device = format!("{prefix}1"),
                    Name::Table(name) => drop(rules.tables.insert((*name).to_owned())),
                    Name::Chain(prefix) => drop(rules.chains.insert(format!("{prefix}x"))),
                }
                assert!(
                    recognize(&[device.as_str()], &rules).any(|found| *found == network),
                    "{network:?} by {name:?}"
                );
            }
        }
    }

    #[test]
    fn no_software_is_recognized_on_a_node_without_known_names() {
        let plain = rules(&["filter", "npl"], &["FORWARD", "postrouting", "KUBE-MARK-MASQ"]);
        assert_eq!(recognize(&["eth0"], &plain).count(), 0);
        assert!(bypassed_engines(&plain).is_empty());
    }

    #[test]
    fn only_engines_in_netfilter_are_bypassed() {
        let engines = |chain: &str| bypassed_engines(&rules(&[], &[chain])).into_iter().collect::<Vec<_>>();
        assert_eq!(engines("cali-tw-cali1"), ["Calico"]);
        assert_eq!(engines("KUBE-POD-FW-ABC"), ["kube-router"]);
        assert_eq!(engines("KUBE-SERVICES"), Vec::<&str>::new());
        // The chains of kube-network-policies have names that other software uses, too.
        for table in ["kube-network-policies", "kindnet-network-policies"] {
            let engines: Vec<_> = bypassed_engines(&rules(&[table], &["postrouting"])).into_iter().collect();
            assert_eq!(engines, ["kube-network-policies"], "table {table}");
        }
        assert!(NETWORKS.iter().filter(|it| it.is_bypassed_by_redirect).all(|it| it.role == Role::PolicyEngine));
    }
}

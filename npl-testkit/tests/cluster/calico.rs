// SPDX-License-Identifier: Apache-2.0
//! Tests Calico's own policies in each forwarding mode: `GlobalNetworkPolicy` for Pods, and for host endpoints, which
//! stand for the uplinks of Nodes.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use npl_testkit::echo::Protocol::{self, Tcp, Udp};
use npl_testkit::real_cluster::client_addresses;
use npl_testkit::topology::host_prefix;
use serde_json::{Value, json};

use self::Ports::{All, Closed, OfTheNode, OfThePod};
use self::Stage::{ApplyOnForward, DoNotTrack, PreDnat};
use crate::clients;
use crate::network_policy::{answered_protocols, answering, wait};
use crate::traffic::PORTS;
use crate::world::{Pod, World};

const POLICIES: &str = "/apis/crd.projectcalico.org/v1/globalnetworkpolicies";
const HOST_ENDPOINTS: &str = "/apis/crd.projectcalico.org/v1/hostendpoints";

/// Calico stores the policies of its default tier with this prefix.
const POLICY: &str = "default.npl-test";

/// The name of the policy that admits all packets to and from the Node itself, which a host endpoint refuses otherwise:
/// without neighbor discovery, IPv6 connections of the Node break within seconds.
const ADMIT_ALL: &str = "default.npl-test-node";

/// The value of the host endpoint's label `npl-test`.
const ENDPOINT: &str = "uplink";

/// A port of the Node on which no program listens. The Node resets a connection to this port, unless a policy drops
/// the connection.
const CLOSED_PORT: u16 = 9;

/// The time after which a connection to [`CLOSED_PORT`] counts as dropped. The Node resets within a millisecond; a
/// slower Node only makes the check of a policy that does not apply less strict.
const RESET_LIMIT: Duration = Duration::from_millis(500);

/// The Pod's ports, TCP and UDP.
const POD_PORTS: [u16; 2] = [8080, 5300];

const TRANSPORTS: [Protocol; 2] = [Tcp, Udp];

/// Whether the agents forward through the stack, where Calico's rules see the packets of node ports.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forwarding {
    /// The modes `stack` and `offload`.
    Stack,
    /// The mode `redirect` with `--ignore-network-policy`.
    Redirect,
}

/// How Calico applies a policy of a host endpoint.
#[derive(Clone, Copy)]
enum Stage {
    /// To packets for the Node itself, and to no forwarded packets.
    Node,
    /// To forwarded packets, too.
    ApplyOnForward,
    /// To packets ahead of netfilter's translation of destinations.
    PreDnat,
    /// To packets ahead of kernel conntrack.
    DoNotTrack,
}

/// The destination ports of a rule.
enum Ports {
    All,
    /// [`CLOSED_PORT`]
    Closed,
    OfThePod,
    OfTheNode,
}

/// A rule for packets from the outside client with these protocols and destination ports.
struct Rule(&'static str, &'static [Protocol], Ports);

/// A policy for the host endpoint, and its effect on the outside client's requests to node ports.
struct Case {
    name: &'static str,
    stage: Stage,
    rules: &'static [Rule],
    /// The protocols by which the client is answered in the modes `stack` and `offload`.
    answered: &'static [Protocol],
}

const NAMES_THE_CLIENT: &[Rule] = &[Rule("Deny", &TRANSPORTS, All)];
const NAMES_THE_POD_PORT: &[Rule] = &[Rule("Deny", &[Tcp], OfThePod)];
const NAMES_THE_NODE_PORTS: &[Rule] = &[Rule("Deny", &TRANSPORTS, OfTheNode)];

const CASES: &[Case] = &[
    Case {
        name: "a policy without applyOnForward that denies the client",
        stage: Stage::Node,
        rules: NAMES_THE_CLIENT,
        answered: &TRANSPORTS,
    },
    Case {
        name: "an applyOnForward policy that denies the client",
        stage: ApplyOnForward,
        rules: NAMES_THE_CLIENT,
        answered: &[],
    },
    Case {
        name: "an applyOnForward policy that denies the Pod's TCP port",
        stage: ApplyOnForward,
        rules: NAMES_THE_POD_PORT,
        answered: &[Udp],
    },
    Case {
        name: "an applyOnForward policy that denies the node ports",
        stage: ApplyOnForward,
        rules: NAMES_THE_NODE_PORTS,
        answered: &TRANSPORTS,
    },
    Case { name: "a preDNAT policy that denies the client", stage: PreDnat, rules: NAMES_THE_CLIENT, answered: &[] },
    Case {
        name: "a preDNAT policy that denies the Pod's TCP port",
        stage: PreDnat,
        rules: NAMES_THE_POD_PORT,
        answered: &[Udp],
    },
    Case {
        name: "a preDNAT policy that denies the node ports",
        stage: PreDnat,
        rules: NAMES_THE_NODE_PORTS,
        answered: &TRANSPORTS,
    },
    Case {
        name: "a preDNAT policy that admits the node ports and denies the rest",
        stage: PreDnat,
        rules: &[Rule("Allow", &TRANSPORTS, OfTheNode), Rule("Deny", &TRANSPORTS, All)],
        answered: &[],
    },
    Case {
        name: "a preDNAT policy that admits the Pod's ports and denies the rest",
        stage: PreDnat,
        rules: &[Rule("Allow", &TRANSPORTS, OfThePod), Rule("Deny", &TRANSPORTS, All)],
        answered: &TRANSPORTS,
    },
    Case {
        name: "a doNotTrack policy that denies the client",
        stage: DoNotTrack,
        rules: NAMES_THE_CLIENT,
        answered: &[],
    },
];

impl Rule {
    /// Returns one object for each protocol, because a rule of Calico has one protocol.
    fn objects(&self, node_ports: &[u16]) -> Vec<Value> {
        let Self(action, protocols, ports) = self;
        let ports: &[u16] = match ports {
            All => &[],
            Closed => &[CLOSED_PORT],
            OfThePod => &POD_PORTS,
            OfTheNode => node_ports,
        };
        // Calico reads an empty list as all ports.
        let object = |protocol: &Protocol| {
            json!({
                "action": action,
                "protocol": protocol.to_string().to_uppercase(),
                "source": {"nets": nets()},
                "destination": {"ports": ports},
            })
        };
        protocols.iter().map(object).collect()
    }
}

impl Case {
    /// The policy of this case. Its first rule drops connections of the client to [`CLOSED_PORT`], by which the test
    /// recognizes that the policy is in effect even if the policy does not apply to node ports.
    fn policy(&self, node_ports: &[u16]) -> Value {
        let closed = [Rule("Deny", &[Tcp], Closed)];
        let mut rules: Vec<Value> = closed.iter().chain(self.rules).flat_map(|rule| rule.objects(node_ports)).collect();
        let mut policy = policy(POLICY, &format!("npl-test == '{ENDPOINT}'"), &json!([]));
        let fields: &[&str] = match self.stage {
            Stage::Node => &[],
            ApplyOnForward => &["applyOnForward"],
            PreDnat => &["applyOnForward", "preDNAT"],
            DoNotTrack => &["applyOnForward", "doNotTrack"],
        };
        for field in fields {
            policy["spec"][field] = json!(true);
        }
        // At the end of a `preDNAT` or `doNotTrack` policy, packets without a matching rule continue.
        if matches!(self.stage, Stage::Node | ApplyOnForward) {
            rules.push(json!({"action": "Allow"}));
        }
        policy["spec"]["ingress"] = json!(rules);
        policy
    }
}

/// Returns a `GlobalNetworkPolicy` for the selected endpoints with these ingress rules.
fn policy(name: &str, selector: &str, ingress: &Value) -> Value {
    json!({
        "apiVersion": "crd.projectcalico.org/v1",
        "kind": "GlobalNetworkPolicy",
        "metadata": {"name": name},
        "spec": {"order": 10, "selector": selector, "types": ["Ingress"], "ingress": ingress},
    })
}

/// The ranges of the outside client's addresses.
fn nets() -> [String; 2] {
    client_addresses().map(host_prefix)
}

pub(crate) fn a_global_network_policy_admits_the_named_clients_alone(world: &mut World) {
    assert_policies_of_pods(world, Forwarding::Stack);
}

pub(crate) fn host_endpoint_policies_match_the_translated_packet(world: &mut World) {
    assert_policies_of_host_endpoints(world, Forwarding::Stack);
}

/// With `--ignore-network-policy`, packets that the agents redirect bypass Calico's policies. Clients in Pods of the
/// same Node connect to the Pod itself, so policies for Pods still apply to them.
pub(crate) fn redirected_packets_bypass_every_policy_of_calico(world: &mut World) {
    world.set_agent_variables(&["NPL_FORWARDING=redirect", "NPL_IGNORE_NETWORK_POLICY=true"]);
    assert_policies_of_pods(world, Forwarding::Redirect);
    assert_policies_of_host_endpoints(world, Forwarding::Redirect);
    world.set_agent_variables(&["NPL_FORWARDING-", "NPL_IGNORE_NETWORK_POLICY-"]);
}

/// Applies `GlobalNetworkPolicies` for the Pods of the shop, and asserts which clients are answered.
fn assert_policies_of_pods(world: &World, forwarding: Forwarding) {
    let pod = world.wait_for_shop(4).into_values().next().unwrap();
    let (outside, other) = (clients::outside(world), clients::node(world, &world.other_node(&pod).name()));
    let neighbor = clients::pod_on(world, &pod.node);
    let admit = json!([{"action": "Allow", "source": {"nets": nets()}}]);
    let deny = json!([{"action": "Deny", "source": {"nets": nets()}}, {"action": "Allow"}]);
    let clients = [&outside, &other, &neighbor];
    let answers = || {
        thread::scope(|scope| {
            clients
                .map(|client| scope.spawn(|| answering(world, client, &pod)))
                .map(|answering| answering.join().unwrap())
        })
    };
    let api = world.cluster.cluster().client();
    let selector = "projectcalico.org/namespace == 'shop' && app == 'web'";
    api.create(POLICIES, &policy(POLICY, selector, &json!([{"action": "Allow"}]))).unwrap();
    let path = format!("{POLICIES}/{POLICY}");
    // Each policy changes whether the client in the Pod is admitted, so the test recognizes in every mode that the policy
    // is in effect.
    for (name, ingress, [is_outside_admitted, is_other_admitted, is_neighbor_admitted]) in [
        ("a policy that admits the outside client", admit, [true, false, false]),
        ("a policy that denies the outside client", deny, [false, true, true]),
        ("a policy that denies all clients", json!([]), [false, false, false]),
    ] {
        api.merge_patch(&path, &json!({"spec": {"ingress": ingress}})).unwrap();
        // The client on the same Node connects to the Pod itself, also while packets of other clients are redirected.
        let is_redirected = forwarding == Forwarding::Redirect;
        let expected = [is_outside_admitted || is_redirected, is_other_admitted || is_redirected, is_neighbor_admitted]
            .map(|is_admitted| if is_admitted { PORTS } else { 0 });
        wait(&format!("{name}: the clients to be answered at {expected:?} node ports"), &|| answers() == expected);
    }
    api.delete(&path).unwrap();
    wait("the end of the policy", &|| answers() == [PORTS; 3]);
}

/// Applies each policy of [`CASES`] to a host endpoint on the uplink of a Pod's Node, and asserts by which protocols
/// the outside client is answered.
fn assert_policies_of_host_endpoints(world: &World, forwarding: Forwarding) {
    let pod = world.wait_for_shop(4).into_values().next().unwrap();
    let entries = world.entries(&pod.name, PORTS);
    let node_ports: Vec<u16> = entries.iter().map(|entry| entry.node_port).collect();
    let outside = clients::outside(world);
    let api = world.cluster.cluster().client();
    create_host_endpoint(world, &pod);
    for case in CASES {
        api.create(POLICIES, &case.policy(&node_ports)).unwrap();
        wait(&format!("{} to be in effect", case.name), &|| closed_ports_dropped(world, &pod) == 2);
        let answered = if forwarding == Forwarding::Redirect { &TRANSPORTS } else { case.answered };
        let all = entries.iter().map(|entry| entry.protocol);
        let expected: Vec<Protocol> = all.filter(|protocol| answered.contains(protocol)).collect();
        let what = format!("{}: node ports of {expected:?} to respond", case.name);
        wait(&what, &|| answered_protocols(&outside, &entries) == expected);
        api.delete(&format!("{POLICIES}/{POLICY}")).unwrap();
        wait(&format!("the end of {}", case.name), &|| closed_ports_dropped(world, &pod) == 0);
    }
    api.delete(&format!("{HOST_ENDPOINTS}/{}", pod.node)).unwrap();
    api.delete(&format!("{POLICIES}/{ADMIT_ALL}")).unwrap();
}

/// Creates a host endpoint for the uplink of a Pod's Node, and the policy without which the Node would be cut off.
fn create_host_endpoint(world: &World, pod: &Pod) {
    let api = world.cluster.cluster().client();
    let mut admit_all = policy(ADMIT_ALL, &format!("npl-test == '{ENDPOINT}'"), &json!([{"action": "Allow"}]));
    admit_all["spec"]["order"] = json!(100);
    admit_all["spec"]["types"] = json!(["Ingress", "Egress"]);
    admit_all["spec"]["egress"] = json!([{"action": "Allow"}]);
    api.create(POLICIES, &admit_all).unwrap();
    let endpoint = json!({
        "apiVersion": "crd.projectcalico.org/v1",
        "kind": "HostEndpoint",
        "metadata": {"name": pod.node, "labels": {"npl-test": ENDPOINT}},
        "spec": {"node": pod.node, "interfaceName": "eth0"},
    });
    api.create(HOST_ENDPOINTS, &endpoint).unwrap();
}

/// Returns the number of IP families over which the Pod's Node drops the outside client's connections to
/// [`CLOSED_PORT`].
fn closed_ports_dropped(world: &World, pod: &Pod) -> usize {
    let number = world.cluster.node(&pod.node).unwrap().number();
    let is_dropped = |address: IpAddr| {
        let connect = || TcpStream::connect_timeout(&SocketAddr::new(address, CLOSED_PORT), RESET_LIMIT);
        let error = world.cluster.client().run(connect).unwrap().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::ConnectionRefused), "{error}");
        error.kind() == ErrorKind::TimedOut
    };
    thread::scope(|scope| {
        let probes = number.addresses().map(|address| scope.spawn(move || is_dropped(address)));
        probes.map(|probe| usize::from(probe.join().unwrap())).iter().sum()
    })
}

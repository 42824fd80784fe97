// SPDX-License-Identifier: Apache-2.0
//! Tests that the doctor's findings agree with the traffic. Each case changes settings of the Node, compares the
//! doctor's findings with requests of clients, and undoes the changes.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::traffic;
use serde_json::json;

use crate::doctor::findings;
use crate::families::{create_dual_stack_pod, set_service};
use crate::world::{NODE, World};

/// A command on the Node.
enum Step {
    /// The path of a sysctl below `/proc/sys`, and a value.
    Sysctl(&'static str, &'static str),
    /// The words of an `ip` command.
    Ip(&'static str),
    /// A ruleset for `nft`.
    Nft(&'static str),
}

use Step::{Ip, Nft, Sysctl};

/// Whether the Pod answers the requests of a client to an entry. The first argument is the index of the client.
type Answered = fn(usize, &Entry) -> bool;

/// A change of the Node, and its effect.
struct Case {
    /// The change, in words.
    name: &'static str,
    changes: Vec<Step>,
    undo: Vec<Step>,
    /// The checks whose states change: for each check, its key, the new state, and words of the finding or of its
    /// advice.
    findings: Vec<(&'static str, &'static str, &'static str)>,
    answered: Answered,
}

const ALL: Answered = |_, _| true;
const NONE: Answered = |_, _| false;
const V4: Answered = |_, entry| entry.node_ip.is_ipv4();
const V6: Answered = |_, entry| entry.node_ip.is_ipv6();
/// The first client sends through the uplink `eth0`, the second one through `eth1`.
const ALL_BUT_V4_OF_FIRST: Answered = |client, entry| client == 1 || entry.node_ip.is_ipv6();
const ALL_BUT_V4_OF_SECOND: Answered = |client, entry| client == 0 || entry.node_ip.is_ipv6();

/// The states of all checks by key, and the text of each finding. The check `admission_policy` is left out, because its
/// state changes some time after the agent's start.
fn states(world: &World) -> BTreeMap<String, (String, String)> {
    let (_, all) = findings(world);
    let text = |row: &serde_json::Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    let of_row = |row: &serde_json::Value| {
        (text(row, "key"), (text(row, "state"), format!("{}: {}", text(row, "found"), text(row, "advice"))))
    };
    all.as_array().unwrap().iter().filter(|row| row["key"] != "admission_policy").map(of_row).collect()
}

/// Sends a request of each client to each entry, all at the same time. Returns a description of each request whose
/// outcome differs from `answered`.
fn wrong_outcomes(world: &World, entries: &[Entry], answered: Answered) -> Vec<String> {
    let ask = |number: usize, entry: &Entry| {
        let from = &world.topology.clients()[number].netns;
        let outcome = traffic::request(from, entry.protocol, entry.address(), "who?").map(|answer| answer.pod);
        let is_right = outcome.is_ok() == answered(number, entry);
        (!is_right).then(|| format!("client {number}, {} to {}: {outcome:?}", entry.protocol, entry.address()))
    };
    thread::scope(|scope| {
        let clients = 0..world.topology.clients().len();
        let requests = clients.flat_map(|number| entries.iter().map(move |entry| (number, entry)));
        #[expect(clippy::needless_collect, reason = "all requests run at the same time")]
        let running: Vec<_> = requests.map(|(number, entry)| scope.spawn(move || ask(number, entry))).collect();
        running.into_iter().filter_map(|request| request.join().unwrap()).collect()
    })
}

impl Step {
    fn run(&self, world: &World) {
        let node = world.topology.node();
        match self {
            Self::Sysctl(path, value) => node.sysctl(path, value).unwrap(),
            Self::Ip(line) => drop(node.ip(line).unwrap()),
            Self::Nft(rules) => drop(node.nft(rules).unwrap()),
        }
    }
}

/// Runs all cases, and then fails with a list of all findings and requests that differ from the expected ones.
fn check(world: &World, entries: &[Entry], cases: &[Case]) {
    let mut wrong = Vec::new();
    let before = states(world);
    for error in wrong_outcomes(world, entries, ALL) {
        wrong.push(format!("before all cases: {error}"));
    }
    for Case { name, changes, undo, findings, answered } in cases {
        for step in changes {
            step.run(world);
        }
        let after = states(world);
        let changed: BTreeMap<&str, &str> = after
            .iter()
            .filter(|(key, (state, _))| before[*key].0 != *state)
            .map(|(key, (state, _))| (key.as_str(), state.as_str()))
            .collect();
        let expected: BTreeMap<&str, &str> = findings.iter().map(|(key, state, _)| (*key, *state)).collect();
        if changed != expected {
            wrong.push(format!("{name}: the states {changed:?} are new instead of {expected:?}"));
        }
        for (key, _, words) in findings {
            let text = &after[*key].1;
            if !text.contains(words) {
                wrong.push(format!("{name}: {words:?} is not in {text:?}"));
            }
        }
        wrong.extend(wrong_outcomes(world, entries, *answered).iter().map(|error| format!("{name}: {error}")));
        for step in undo {
            step.run(world);
        }
        for (key, (state, text)) in states(world).iter().filter(|(key, (state, _))| before[*key].0 != *state) {
            wrong.push(format!("{name}, undone: the check {key} is {state}: {text}"));
        }
        wrong.extend(wrong_outcomes(world, entries, ALL).iter().map(|error| format!("{name}, undone: {error}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Creates a dual-stack Node with two uplinks, two clients and one Pod. The Node's end of the Pod's veth pair is
/// `npl1`. Returns the four entries of the Pod.
fn dual_stack_world(flags: &[&str]) -> (World, Vec<Entry>) {
    let mut world = World::with_clients(2);
    let node = world.topology.node();
    node.set_liberal_tracking(true).unwrap();
    node.sysctl("net/netfilter/nf_conntrack_tcp_timeout_unacknowledged", "432000").unwrap();
    let addresses = world.topology.node_addresses();
    world.cluster.create_node(NODE, &[addresses.v4.into(), addresses.v6.into()]).unwrap();
    // The second uplink has neither a published address nor a route with a gateway, so the flag has to name it.
    world.start_agent(&[&["--devices", "eth0,eth1"], flags].concat());
    world.create_service();
    set_service(&world, &json!({"ipFamilyPolicy": "RequireDualStack"}));
    world.enable_service();
    create_dual_stack_pod(&mut world, "web-0");
    let entries = world.wait_for_entries("web-0", 4);
    (world, entries)
}

fn case(
    name: &'static str,
    changes: Vec<Step>,
    undo: Vec<Step>,
    findings: Vec<(&'static str, &'static str, &'static str)>,
    answered: Answered,
) -> Case {
    Case { name, changes, undo, findings, answered }
}

const IP_FORWARD: &str = "net/ipv4/ip_forward";
const UPLINK: &str = "net/ipv4/conf/eth0/forwarding";
const SECOND_UPLINK: &str = "net/ipv4/conf/eth1/forwarding";
const POD: &str = "net/ipv4/conf/npl1/forwarding";
const V6_FORWARDING: &str = "net/ipv6/conf/all/forwarding";

/// Cases of IPv4 forwarding as in openshift/openshift-docs#83087 and systemd/systemd#33414, and cases of IPv6
/// forwarding.
fn forwarding_cases() -> Vec<Case> {
    vec![
        case(
            "IPv4 forwarding is off for an uplink",
            vec![Sysctl(UPLINK, "0")],
            vec![Sysctl(UPLINK, "1")],
            vec![("ip_forward", "failed", "net.ipv4.conf.eth0.forwarding=1")],
            ALL_BUT_V4_OF_FIRST,
        ),
        case(
            "IPv4 forwarding is off for an uplink without a default route",
            vec![Sysctl(SECOND_UPLINK, "0")],
            vec![Sysctl(SECOND_UPLINK, "1")],
            vec![("ip_forward", "warning", "net.ipv4.conf.eth1.forwarding=1")],
            ALL_BUT_V4_OF_SECOND,
        ),
        case(
            "IPv4 forwarding is off for the device of the Pod",
            vec![Sysctl(POD, "0")],
            vec![Sysctl(POD, "1")],
            vec![("ip_forward", "failed", "replies of Pods behind npl1")],
            V6,
        ),
        case(
            "IPv4 forwarding is off",
            vec![Sysctl(IP_FORWARD, "0")],
            vec![Sysctl(IP_FORWARD, "1")],
            vec![("ip_forward", "failed", "net.ipv4.ip_forward=1")],
            V6,
        ),
        case(
            "IPv4 forwarding is off globally, and on for the uplinks and the device of the Pod",
            vec![Sysctl(IP_FORWARD, "0"), Sysctl(UPLINK, "1"), Sysctl(SECOND_UPLINK, "1"), Sysctl(POD, "1")],
            vec![Sysctl(IP_FORWARD, "1")],
            vec![],
            ALL,
        ),
        case(
            "IPv4 forwarding is off for a device that connects neither clients nor Pods",
            vec![Ip("link add other0 type bridge"), Sysctl("net/ipv4/conf/other0/forwarding", "0")],
            vec![Ip("link del other0")],
            vec![],
            ALL,
        ),
        case(
            "IPv6 forwarding is off",
            vec![Sysctl(V6_FORWARDING, "0")],
            vec![Sysctl(V6_FORWARDING, "1")],
            vec![("ipv6_forwarding", "failed", "net.ipv6.conf.all.forwarding=1")],
            V4,
        ),
        case(
            "IPv6 forwarding is off for the uplink and the device of the Pod, and on globally",
            vec![Sysctl("net/ipv6/conf/eth0/forwarding", "0"), Sysctl("net/ipv6/conf/npl1/forwarding", "0")],
            vec![Sysctl("net/ipv6/conf/eth0/forwarding", "1"), Sysctl("net/ipv6/conf/npl1/forwarding", "1")],
            vec![],
            ALL,
        ),
    ]
}

const FORCE_UPLINK: &str = "net/ipv6/conf/eth0/force_forwarding";
const FORCE_SECOND_UPLINK: &str = "net/ipv6/conf/eth1/force_forwarding";
const FORCE_POD: &str = "net/ipv6/conf/npl1/force_forwarding";

/// Cases of the sysctl `force_forwarding`, which Linux 6.17 introduced for IPv6.
fn forced_forwarding_cases() -> Vec<Case> {
    let undo = || {
        vec![
            Sysctl(FORCE_UPLINK, "0"),
            Sysctl(FORCE_SECOND_UPLINK, "0"),
            Sysctl(FORCE_POD, "0"),
            Sysctl(V6_FORWARDING, "1"),
        ]
    };
    let uplinks = || vec![Sysctl(V6_FORWARDING, "0"), Sysctl(FORCE_UPLINK, "1"), Sysctl(FORCE_SECOND_UPLINK, "1")];
    vec![
        case(
            "IPv6 forwarding is forced for the uplinks and the device of the Pod",
            uplinks().into_iter().chain([Sysctl(FORCE_POD, "1")]).collect(),
            undo(),
            vec![],
            ALL,
        ),
        case(
            "IPv6 forwarding is forced for the uplinks only",
            uplinks(),
            undo(),
            vec![("ipv6_forwarding", "failed", "net.ipv6.conf.npl1.force_forwarding=1")],
            V4,
        ),
    ]
}

/// Requests are answered exactly for the clients and IP families for which doctor reports no problem.
#[test]
fn doctor_reports_forwarding_that_is_off_if_and_only_if_requests_are_lost() {
    let (world, entries) = dual_stack_world(&[]);
    let mut cases = forwarding_cases();
    let has_force = world.topology.node().run(|| Path::new("/proc/sys").join(FORCE_UPLINK).exists()).unwrap();
    if has_force {
        cases.extend(forced_forwarding_cases());
    }
    check(&world, &entries, &cases);
}

const DROP_BY_POLICY: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
  }
}";
/// The forward chain of firewalld. Of the new connections from an uplink, the chain accepts those that kernel conntrack
/// has translated, and rejects all others.
const FIREWALLD: &str = "
table inet npl_test {
  chain filter_FORWARD {
    type filter hook forward priority filter + 10; policy accept;
    ct state { established, related } accept
    ct status dnat accept
    iifname \"lo\" accept
    jump filter_FORWARD_POLICIES
    ct state invalid drop
    reject with icmpx admin-prohibited
  }
  chain filter_FORWARD_POLICIES {
    iifname \"virbr0\" accept
  }
}";
/// The forward chain of Docker, with its policy `drop`.
const DOCKER: &str = "
table ip npl_test {
  chain DOCKER-USER {
    return
  }
  chain DOCKER-FORWARD {
    oifname \"docker0\" ct state related,established accept
    iifname \"docker0\" accept
  }
  chain FORWARD {
    type filter hook forward priority filter; policy drop;
    counter jump DOCKER-USER
    counter jump DOCKER-FORWARD
  }
}";
const ACCEPT_PODS: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ip daddr 10.244.0.0/16 accept
    ip saddr 10.244.0.0/16 accept
    ip6 daddr fd00:10:244::/64 accept
    ip6 saddr fd00:10:244::/64 accept
  }
}";
/// Requests are accepted, and replies are dropped by the policy.
const ACCEPT_REQUESTS_ONLY: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ip daddr 10.244.0.0/16 accept
    ip6 daddr fd00:10:244::/64 accept
  }
}";
const REJECT_REPLIES: &str = "
table ip npl_test {
  chain forward {
    type filter hook forward priority filter; policy accept;
    ip saddr 10.244.0.0/16 oifname \"eth0\" drop
  }
}";
const DROP_A_PORT: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy accept;
    tcp dport 8080 drop
  }
}";
const DROP_V6: &str = "
table ip6 npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
  }
}";
/// A packet that the first base chain accepts still traverses the second one, which has a higher priority number.
const DROP_AFTER_ACCEPT: &str = "
table inet npl_test {
  chain first {
    type filter hook forward priority filter; policy accept;
    accept
  }
  chain second {
    type filter hook forward priority filter + 1; policy accept;
    iifname \"eth0\" ct state new drop
  }
}";
const DROP_OTHERS: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy accept;
    ip daddr 10.99.0.0/16 drop
    iifname \"docker0\" reject
    tcp dport 22 drop
    ct mark 0x99 drop
  }
}";

fn forward_chain_cases() -> Vec<Case> {
    let tables = |name, rules, answered, chain: Option<&'static str>| {
        let family = rules_family(rules);
        let undo = vec![Nft(match family {
            "ip" => "delete table ip npl_test",
            "ip6" => "delete table ip6 npl_test",
            _ => "delete table inet npl_test",
        })];
        let findings = chain.map(|words| ("forward_chains", "warning", words)).into_iter().collect();
        case(name, vec![Nft(rules)], undo, findings, answered)
    };
    vec![
        tables("a chain drops by its policy", DROP_BY_POLICY, NONE, Some("forward")),
        tables("a chain like firewalld's rejects", FIREWALLD, NONE, Some("filter_FORWARD")),
        tables("a chain like Docker's drops", DOCKER, V6, Some("FORWARD")),
        tables("a chain accepts requests and replies by address", ACCEPT_PODS, ALL, None),
        tables("a chain accepts requests, and drops replies", ACCEPT_REQUESTS_ONLY, NONE, Some("replies")),
        tables("a rule drops replies to an uplink", REJECT_REPLIES, ALL_BUT_V4_OF_FIRST, Some("replies")),
        tables("a rule drops a port", DROP_A_PORT, |_, entry| entry.protocol == Protocol::Udp, Some("forward")),
        tables("a chain drops IPv6", DROP_V6, V4, Some("forward")),
        tables(
            "a second chain drops packets that a first one accepts",
            DROP_AFTER_ACCEPT,
            |client, _| client == 1,
            Some("second"),
        ),
        tables("a chain drops other packets", DROP_OTHERS, ALL, None),
    ]
}

/// The family of the only table in a ruleset.
fn rules_family(rules: &str) -> &str {
    rules.split_whitespace().nth(1).unwrap()
}

#[test]
fn doctor_reports_a_forward_chain_if_and_only_if_it_drops_requests_or_replies() {
    let (world, entries) = dual_stack_world(&[]);
    check(&world, &entries, &forward_chain_cases());
}

const STRICT: &str = "net/ipv4/conf/eth0/rp_filter";
/// The Pod gets a routing table of its own, whose gateway is the second client.
const POD_RULE: &str = "rule add from 10.244.0.1 lookup 100 priority 1536\n\
                        route add default via 203.0.113.2 dev eth1 table 100";
const NO_POD_RULE: &str = "rule del priority 1536\nroute flush table 100";

/// The Node address of the first uplink gets a routing table of its own. The default route of the main table uses the
/// second uplink.
const ADDRESS_RULE: &str = "rule add from 192.0.2.10 lookup 100 priority 1536\n\
                            route add default via 192.0.2.1 dev eth0 table 100\n\
                            route replace default via 203.0.113.2 dev eth1";
const NO_ADDRESS_RULE: &str = "route replace default via 192.0.2.1 dev eth0\nrule del priority 1536\n\
                               route flush table 100";

fn routing_cases() -> Vec<Case> {
    vec![
        case(
            "a rule for the device of the Pod selects another uplink",
            vec![Ip("route add default via 203.0.113.2 dev eth1 table 101\nrule add iif npl1 lookup 101 priority 100")],
            vec![Ip("rule del priority 100\nroute flush table 101")],
            vec![("incoming_rules", "warning", "iif npl1 lookup 101")],
            ALL_BUT_V4_OF_FIRST,
        ),
        case(
            "a rule for the device of the Pod selects the first uplink only",
            vec![Ip("route add default via 192.0.2.1 dev eth0 table 101\nrule add iif npl1 lookup 101 priority 100")],
            vec![Ip("rule del priority 100\nroute flush table 101")],
            vec![("incoming_rules", "warning", "iif npl1 lookup 101")],
            ALL_BUT_V4_OF_SECOND,
        ),
        case(
            "a rule for the device of the Pod selects the same uplinks as the main table",
            vec![Ip("route add default via 192.0.2.1 dev eth0 table 101\n\
                     route add 203.0.113.0/24 dev eth1 table 101\n\
                     rule add iif npl1 lookup 101 priority 100")],
            vec![Ip("rule del priority 100\nroute flush table 101")],
            vec![],
            ALL,
        ),
        case(
            "a rule for the device of the Pod selects an empty table",
            vec![Ip("rule add iif npl1 lookup 101 priority 100")],
            vec![Ip("rule del priority 100")],
            vec![],
            ALL,
        ),
        case(
            "the Pod has a routing table of its own, which selects another uplink",
            vec![Ip(POD_RULE)],
            vec![Ip(NO_POD_RULE)],
            vec![("reply_routes", "warning", "docs/troubleshoot.md")],
            ALL_BUT_V4_OF_FIRST,
        ),
        case(
            "strict reverse path filtering, and the Pod has a routing table of its own",
            vec![Ip(POD_RULE), Sysctl(STRICT, "1")],
            vec![Sysctl(STRICT, "0"), Ip(NO_POD_RULE)],
            vec![("reply_routes", "warning", "docs/troubleshoot.md"), ("rp_filter", "warning", "arrive on eth0")],
            ALL_BUT_V4_OF_FIRST,
        ),
        case(
            "strict reverse path filtering, and the Node address has a routing table of its own",
            vec![Ip(ADDRESS_RULE), Sysctl(STRICT, "1")],
            vec![Sysctl(STRICT, "0"), Ip(NO_ADDRESS_RULE)],
            vec![("reply_routes", "warning", "192.0.2.10"), ("rp_filter", "warning", "arrive on eth0")],
            ALL_BUT_V4_OF_FIRST,
        ),
        case(
            "strict reverse path filtering, and the route to the client uses the uplink of the request",
            vec![Sysctl(STRICT, "1")],
            vec![Sysctl(STRICT, "0")],
            vec![],
            ALL,
        ),
    ]
}

#[test]
fn doctor_reports_routes_that_lead_replies_elsewhere() {
    let (world, entries) = dual_stack_world(&[]);
    check(&world, &entries, &routing_cases());
}

/// The findings about these settings say that mappings work nevertheless, so all requests must be answered.
#[test]
fn requests_are_answered_in_spite_of_warnings_that_are_not_about_mappings() {
    const LIBERAL: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";
    const UNACKNOWLEDGED: &str = "net/netfilter/nf_conntrack_tcp_timeout_unacknowledged";
    const PORTS: &str = "net/ipv4/ip_local_port_range";
    const RESERVED: &str = "net/ipv4/ip_local_reserved_ports";
    let (world, entries) = dual_stack_world(&[]);
    check(
        &world,
        &entries,
        &[
            case(
                "kernel conntrack refuses out-of-window packets",
                vec![Sysctl(LIBERAL, "0")],
                vec![Sysctl(LIBERAL, "1")],
                vec![("conntrack_liberal", "warning", "only --forwarding offload")],
                ALL,
            ),
            case(
                "kernel conntrack has a short timeout",
                vec![Sysctl(UNACKNOWLEDGED, "300")],
                vec![Sysctl(UNACKNOWLEDGED, "432000")],
                vec![("conntrack_timeouts", "warning", "only --forwarding offload")],
                ALL,
            ),
            case(
                "outgoing connections may use the node ports of Services",
                vec![Sysctl(PORTS, "30000 60999")],
                vec![Sysctl(PORTS, "32768 60999")],
                vec![("service_ports", "warning", "30000-32767")],
                ALL,
            ),
            case(
                "the node ports of Services are reserved",
                vec![Sysctl(RESERVED, "30000-32767"), Sysctl(PORTS, "30000 60999")],
                vec![Sysctl(PORTS, "32768 60999"), Sysctl(RESERVED, "")],
                vec![],
                ALL,
            ),
            case(
                "outgoing connections may use ports of the range",
                vec![Sysctl(PORTS, "32768 61500")],
                vec![Sysctl(PORTS, "32768 60999")],
                vec![("port_range", "warning", "ip_local_reserved_ports")],
                ALL,
            ),
            case(
                "ports of the range are reserved",
                vec![Sysctl(RESERVED, "61000-62000"), Sysctl(PORTS, "32768 61500")],
                vec![Sysctl(PORTS, "32768 60999"), Sysctl(RESERVED, "")],
                vec![],
                ALL,
            ),
        ],
    );
}

// SPDX-License-Identifier: Apache-2.0
//! Adds, removes, moves and renames devices and addresses of both families while an agent runs, and tests which
//! requests are served.

use std::net::{IpAddr, SocketAddr};

use aya::programs::{SchedClassifier, TcAttachType};
use npl_testkit::cluster::Entry;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::topology::Offload;
use npl_testkit::traffic::{self, Direction, Load, Request, Transfer};
use serde_json::json;

use crate::families::{assert_served, create_dual_stack_pod, world_with_service};
use crate::world::{LIMIT, World};

/// The Node's addresses on a VLAN or macvlan device on top of the uplink.
const NODE_ABOVE: [&str; 2] = ["198.18.100.10", "fd00:18:100::10"];
/// The client's addresses on a VLAN or macvlan device on top of the client's device.
const CLIENT_ABOVE: [&str; 2] = ["198.18.100.2", "fd00:18:100::2"];

/// Creates a Node with an agent and with a Pod that is served in both families. Returns the Node and the Pod's
/// annotation entries.
fn served() -> (World, Vec<Entry>) {
    let mut world = world_with_service(&json!({"ipFamilyPolicy": "RequireDualStack"}));
    create_dual_stack_pod(&mut world, "web-0");
    let entries = world.wait_for_entries("web-0", 4);
    assert_served(&world, "web-0", &entries);
    (world, entries)
}

/// Returns requests from the addresses `client` to the entries' node ports, at the addresses `node` in place of the
/// entries' own node addresses.
fn requests(entries: &[Entry], node: [&str; 2], client: [&str; 2]) -> Vec<Request> {
    let of =
        |entry: &Entry, texts: [&str; 2]| -> IpAddr { texts[usize::from(entry.node_ip.is_ipv6())].parse().unwrap() };
    let request = |entry: &Entry| Request {
        protocol: entry.protocol,
        server: SocketAddr::new(of(entry, node), entry.node_port),
        pod: "web-0".to_owned(),
        client: of(entry, client),
    };
    entries.iter().map(request).collect()
}

/// Returns requests from the client of the topology to the entries' node ports at these node addresses.
fn from_afar(world: &World, entries: &[Entry], node: [&str; 2]) -> Vec<Request> {
    let client = world.topology.client().addresses;
    requests(entries, node, [&client.v4.to_string(), &client.v6.to_string()])
}

/// Returns requests from the client of the topology to the addresses of the entries.
fn own_requests(world: &World, entries: &[Entry]) -> Vec<Request> {
    let node = world.topology.node_addresses();
    from_afar(world, entries, [&node.v4.to_string(), &node.v6.to_string()])
}

/// Waits until each request receives the expected response.
#[track_caller]
fn wait_until_served(world: &World, requests: &[Request]) {
    let netns = &world.topology.client().netns;
    for Request { protocol, server, pod, client } in requests {
        let ask = || traffic::request(netns, *protocol, *server, "who?").ok();
        let (answer, _) = poll::until(&format!("a response of {server} over {protocol}"), LIMIT, ask).unwrap();
        assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod.as_str(), *client), "{protocol} {server}");
    }
}

/// Waits until every request fails.
#[track_caller]
fn wait_until_refused(world: &World, requests: &[Request]) {
    let netns = &world.topology.client().netns;
    for Request { protocol, server, .. } in requests {
        let is_refused = || traffic::request(netns, *protocol, *server, "who?").is_err().then_some(());
        poll::until(&format!("requests to {server} over {protocol} to fail"), LIMIT, is_refused).unwrap();
    }
}

/// Waits until the programs are attached to exactly these devices.
#[track_caller]
fn wait_for_devices(world: &World, expected: &[&str]) {
    let names = || {
        let status = world.agent_options(&[]).command_json("status").unwrap();
        let devices = status["devices"].as_array().unwrap().iter();
        let attached = devices.filter(|device| device["attached"] == json!(["ingress", "egress"]));
        let mut names: Vec<String> = attached.map(|device| device["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    poll::until(&format!("programs on {expected:?}"), LIMIT, || (names() == expected).then_some(())).unwrap();
}

/// Returns the number of programs that are attached to the Node's device of this name.
fn programs_on(world: &World, device: &str) -> usize {
    let at = |attach_type| SchedClassifier::query_tcx(device, attach_type).unwrap().1.len();
    world.topology.node().run(|| [TcAttachType::Ingress, TcAttachType::Egress].map(at).iter().sum()).unwrap()
}

/// Routes the client's packets to these addresses through the uplink, and makes the Node reject these packets while the
/// Node does not have the addresses.
fn send_by_the_uplink(world: &World, [v4, v6]: [&str; 2]) {
    let (node, client) = (world.topology.node_addresses(), world.topology.client().addresses);
    world.topology.node().ip(&format!("route add unreachable {v4}/32\nroute add unreachable {v6}/128")).unwrap();
    let routes = format!(
        "route add {v4}/32 via {} dev eth0 src {}\nroute add {v6}/128 via {} dev eth0 src {}",
        node.v4, client.v4, node.v6, client.v6
    );
    world.topology.client().netns.ip(&routes).unwrap();
}

/// Adds a VLAN device, or a macvlan device if the kernel does not support VLANs. Returns the client's device.
fn add_device_above(world: &World) -> &'static str {
    let (node, client) = (world.topology.node(), &world.topology.client().netns);
    let vlan = "link add link eth0 name eth0.100 type vlan id 100";
    let client_device = if node.ip(vlan).is_ok() {
        client.ip(&format!("{vlan}\nlink set eth0.100 up")).unwrap();
        "eth0.100"
    } else {
        node.ip("link add link eth0 name eth0.100 type macvlan mode bridge").unwrap();
        "eth0"
    };
    // Without this setting, other devices of the same network namespace would answer ARP requests for the new address
    // as well.
    node.sysctl("net/ipv4/conf/all/arp_ignore", "1").unwrap();
    for (netns, device, [v4, v6]) in [(client, client_device, CLIENT_ABOVE), (node, "eth0.100", NODE_ABOVE)] {
        let lines = format!("addr add {v4}/24 dev {device}\naddr add {v6}/64 dev {device} nodad");
        netns.ip(&format!("link set {device} up\n{lines}")).unwrap();
    }
    client_device
}

#[test]
fn a_vlan_device_above_the_uplink_is_served_until_it_is_removed() {
    let (world, entries) = served();
    let client_device = add_device_above(&world);
    wait_for_devices(&world, &["eth0", "eth0.100"]);
    wait_until_served(&world, &requests(&entries, NODE_ABOVE, CLIENT_ABOVE));
    assert_served(&world, "web-0", &entries);

    world.topology.node().ip("link del eth0.100").unwrap();
    let [v4, v6] = CLIENT_ABOVE;
    let gone = format!("addr del {v4}/24 dev {client_device}\naddr del {v6}/64 dev {client_device}");
    world.topology.client().netns.ip(&gone).unwrap();
    send_by_the_uplink(&world, NODE_ABOVE);
    wait_for_devices(&world, &["eth0"]);
    wait_until_refused(&world, &from_afar(&world, &entries, NODE_ABOVE));
    assert_served(&world, "web-0", &entries);
}

#[test]
fn added_addresses_of_both_families_are_served_until_they_are_removed() {
    let (world, entries) = served();
    let added = ["192.0.2.77", "2001:db8:0:1::77"];
    let requests = from_afar(&world, &entries, added);
    send_by_the_uplink(&world, added);
    wait_until_refused(&world, &requests);
    let [v4, v6] = added;
    let come = format!("addr add {v4}/32 dev eth0\naddr add {v6}/128 dev eth0 nodad");
    world.topology.node().ip(&come).unwrap();
    wait_until_served(&world, &requests);
    world.topology.node().ip(&format!("addr del {v6}/128 dev eth0")).unwrap();
    let (of_v6, of_v4): (Vec<_>, Vec<_>) = requests.iter().cloned().partition(|it| it.server.is_ipv6());
    wait_until_refused(&world, &of_v6);
    wait_until_served(&world, &of_v4);
    world.topology.node().ip(&format!("addr del {v4}/32 dev eth0")).unwrap();
    wait_until_refused(&world, &of_v4);
    assert_served(&world, "web-0", &entries);
    world.topology.node().ip(&come).unwrap();
    wait_until_served(&world, &requests);
}

/// Starts one transfer to the Pod per family. A transfer takes longer than the changes that the test makes during the
/// transfer.
fn transfers(world: &World, entries: &[Entry]) -> Vec<Transfer> {
    let client = &world.topology.client().netns;
    let start = |entry: &Entry| Transfer::start(client, entry.address(), Direction::Upload, 4 << 20, 1 << 20).unwrap();
    let transfers: Vec<_> = entries.iter().filter(|entry| entry.protocol == Protocol::Tcp).map(start).collect();
    for transfer in &transfers {
        transfer.wait_for_share(0.1, LIMIT).unwrap();
    }
    transfers
}

/// Changes the Node's network and waits until the agent has noticed the changes.
#[track_caller]
fn change_and_wait_until_seen(world: &World, lines: &str) {
    let mark = "198.18.200.1";
    world.topology.node().ip(&format!("{lines}\naddr add {mark}/32 dev lo")).unwrap();
    let status = || world.agent_options(&[]).command(&["status"]).unwrap();
    poll::until("the agent to report the new address", LIMIT, || status().contains(mark).then_some(())).unwrap();
}

#[test]
fn connections_survive_a_brief_loss_of_the_addresses() {
    let (world, entries) = served();
    let writes = world.writes("web-0");
    let transfers = transfers(&world, &entries);
    change_and_wait_until_seen(&world, "addr flush dev eth0 scope global");
    world.topology.move_node_to("eth0").unwrap();
    for transfer in transfers {
        transfer.join().unwrap();
    }
    assert_eq!(world.writes("web-0"), writes);
    assert_served(&world, "web-0", &entries);
}

/// Returns the ID of the XDP program on the uplink.
fn program_in_the_driver(world: &World) -> Option<String> {
    let shown = world.topology.node().ip("link show dev eth0").unwrap();
    shown.split_once("prog/xdp id ").and_then(|(_, rest)| rest.split_whitespace().next()).map(str::to_owned)
}

#[test]
fn connections_and_the_xdp_program_survive_a_link_flap() {
    let (mut world, entries) = served();
    // XDP programs require complete checksums, so checksum offload is disabled at the client.
    world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
    world.agent().kill().unwrap();
    world.start_agent(&["--attach", "xdp"]);
    let (program, _) = poll::until("an XDP program on the uplink", LIMIT, || program_in_the_driver(&world)).unwrap();
    let transfers = transfers(&world, &entries);
    change_and_wait_until_seen(&world, "link set eth0 down\naddr flush dev eth0 scope global");
    assert_eq!(program_in_the_driver(&world), Some(program.clone()));
    world.topology.node().ip("link set eth0 up").unwrap();
    world.topology.move_node_to("eth0").unwrap();
    for transfer in transfers {
        transfer.join().unwrap();
    }
    assert_eq!(program_in_the_driver(&world), Some(program));
    assert_served(&world, "web-0", &entries);
}

#[test]
fn programs_follow_the_addresses_to_a_bridge_and_back() {
    let (world, entries) = served();
    let requests = own_requests(&world, &entries);
    let node = world.topology.node();
    assert_eq!(programs_on(&world, "eth0"), 2);
    node.ip("link add br0 type bridge forward_delay 0\nlink set br0 up\nlink set eth0 master br0").unwrap();
    world.topology.move_node_to("br0").unwrap();
    wait_for_devices(&world, &["br0"]);
    wait_until_served(&world, &requests);
    assert_eq!((programs_on(&world, "eth0"), programs_on(&world, "br0")), (0, 2));

    node.ip("link del br0").unwrap();
    world.topology.move_node_to("eth0").unwrap();
    wait_for_devices(&world, &["eth0"]);
    wait_until_served(&world, &requests);
    assert_eq!(programs_on(&world, "eth0"), 2);
}

#[test]
fn a_renamed_uplink_keeps_serving_and_is_reported_by_its_new_name() {
    let (mut world, entries) = served();
    let load = Load::start(&world.topology.client().netns, 200, own_requests(&world, &entries));
    let wait_for_answers = |count| {
        let total = load.report().total() + count;
        poll::until("responses", LIMIT, || (load.report().total() >= total).then_some(())).unwrap();
    };
    wait_for_answers(50);
    world.topology.node().ip("link set eth0 name wan0").unwrap();
    wait_for_devices(&world, &["wan0"]);
    wait_for_answers(50);
    world.wait_for_log("wan0");
    world.agent().restart().unwrap();
    wait_for_devices(&world, &["wan0"]);
    wait_for_answers(50);
    let report = load.stop();
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    assert_served(&world, "web-0", &entries);
}

#[test]
fn the_log_warns_about_pods_whose_replies_may_leave_by_another_interface() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let pod = world.topology.pods()[0].ip();
    let warning = "policy routing rules give Pods routing tables of their own";
    // The agent must not report these two rules: the first is for the Node's address, and the second gives the Pod the
    // table `main`. The new address shows that the agent has read the rules, because the agent reads addresses and
    // rules together.
    let harmless = format!("rule add from 192.0.2.10 lookup 100\nrule add from {pod} lookup main");
    world.topology.node().ip(&format!("{harmless}\naddr add 192.0.2.77/32 dev eth0")).unwrap();
    let status = || world.agent_options(&[]).command(&["status"]).unwrap();
    poll::until("the agent to report the new address", LIMIT, || status().contains("192.0.2.77").then_some(()))
        .unwrap();
    assert!(!world.agent_log().contains(warning), "{}", world.agent_log());
    world.topology.node().ip(&format!("rule add from {pod} lookup 100")).unwrap();
    world.wait_for_log(warning);
    world.assert_served("web-0");
}

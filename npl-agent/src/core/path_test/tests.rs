// SPDX-License-Identifier: Apache-2.0
//! Tests which paths `kubectl npl test` plans, and how it judges observations.

use super::*;
use crate::core::model::{NodePort, PodPort};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The echo Pod of node-`number`, with IPv4 node ports for TCP and UDP.
fn server(number: u8) -> Server {
    let entry = |protocol, port| Entry {
        node_ip: ip(&format!("192.0.2.{number}")),
        node_port: NodePort(port),
        protocol,
        pod_port: PodPort(7777),
    };
    Server {
        node: format!("node-{number}"),
        pod: format!("echo-{number}"),
        identity: format!("echo-{number}.npl-test-a"),
        pod_ips: [ip(&format!("10.244.{number}.7"))].into(),
        client_ips: [ip(&format!("10.244.{number}.8"))].into(),
        node_ips: [ip(&format!("192.0.2.{number}"))].into(),
        device_ips: BTreeSet::new(),
        pod_ranges: [format!("10.244.{number}.0/24").parse().unwrap()].into(),
        protocols: [Protocol::Tcp, Protocol::Udp].into(),
        serves_local_pods: true,
        entries: vec![entry(Protocol::Udp, 61_001), entry(Protocol::Tcp, 61_000)],
    }
}

fn answered(identity: &str, seen: &str, local: &str) -> Observation {
    Observation::Answered(Reply { pod: identity.to_owned(), seen: ip(seen), local: Some(ip(local)) })
}

/// Returns the row about an observation on the client's first path to the echo Pod of node-1.
fn judged(client: Client, observation: &Observation, unreachable: &[&str]) -> Row {
    judged_of(&[server(1), server(2)], client, observation, unreachable)
}

/// Returns the row about an observation on the client's first path to the first echo Pod.
fn judged_of(servers: &[Server], client: Client, observation: &Observation, unreachable: &[&str]) -> Row {
    let (paths, _) = plan(servers);
    let path = paths.iter().find(|path| path.client == client && path.server == 0).unwrap();
    let unreachable = unreachable.iter().map(|text| ip(text)).collect();
    judge(PathFacts { servers, unreachable: &unreachable }, path, observation)
}

#[test]
fn every_client_sends_to_every_node_port_and_large_datagrams_to_udp() {
    let (paths, not_tried) = plan(&[server(1), server(2)]);
    assert_eq!(not_tried, []);
    let of_first = |client| {
        let paths = paths.iter().filter(move |path| path.client == client && path.server == 0);
        paths.map(|path| path.probe.to_string()).collect::<Vec<_>>()
    };
    for client in Client::ALL {
        assert_eq!(of_first(client), ["tcp,192.0.2.1:61000,64", "udp,192.0.2.1:61001,64", "udp,192.0.2.1:61001,8000"]);
    }
    assert_eq!(paths.len(), 2 * 4 * 3);
}

#[test]
fn the_text_of_a_request_is_read_back() {
    for text in ["tcp,192.0.2.1:61000,64", "udp,[2001:db8::1]:61001,8000"] {
        assert_eq!(text.parse::<Probe>().unwrap().to_string(), text);
    }
    assert_eq!("icmp,192.0.2.1:1,1".parse::<Probe>(), Err(UnknownProbe));
}

#[test]
fn paths_that_cannot_exist_are_named_once() {
    let alone = Server { serves_local_pods: false, ..server(1) };
    let (paths, not_tried) = plan(&[alone]);
    assert!(paths.iter().all(|path| path.client == Client::Outside));
    let names: Vec<&str> = not_tried.iter().map(|row| row.path.as_str()).collect();
    assert_eq!(names, ["Pod on another Node → node-1", "Pod on node-1 → node-1", "Pod echo-1 on node-1 → itself"]);
    assert!(not_tried.iter().all(|row| row.result == Outcome::NotTried));
}

#[test]
fn a_missing_node_port_fails_the_publication() {
    let row = |server: &Server| publication(server, &server.wanted(&Family::ALL.into()), "15 s");
    assert_eq!(row(&server(1)).result, Outcome::Passed);
    let without_udp = Server { entries: server(1).entries.into_iter().skip(1).collect(), ..server(1) };
    let missing = row(&without_udp);
    assert_eq!((missing.result, missing.node.as_str()), (Outcome::Failed, "node-1"));
    assert!(missing.detail.ends_with("no node port for udp IPv4"), "{missing:?}");
    let without_address = Server { pod_ips: [ip("2001:db8::7")].into(), entries: Vec::new(), ..server(1) };
    assert_eq!(row(&without_address).result, Outcome::Unknown);
}

#[test]
fn a_request_without_an_answer_fails_unless_the_workstation_reaches_nothing_there() {
    let silent = Observation::NoAnswer("connect: no answer".to_owned());
    assert_eq!(judged(Client::Outside, &silent, &[]).result, Outcome::Failed);
    assert_eq!(judged(Client::Outside, &silent, &["192.0.2.1"]).result, Outcome::NotTried);
    assert_eq!(judged(Client::OtherNode, &silent, &["192.0.2.1"]).result, Outcome::Failed);
    let row = judged(Client::OtherNode, &silent, &[]);
    assert_eq!((row.path.as_str(), row.node.as_str()), ("Pod on node-2 → node-1", "node-1"));
    assert_eq!(row.detail, "192.0.2.1:61000: connect: no answer");
    let refused = Observation::Refused("connect: connection refused".to_owned());
    assert_eq!(judged(Client::Outside, &refused, &["192.0.2.1"]).result, Outcome::Failed);
    let not_sent = Observation::NotSent("no exec".to_owned());
    assert_eq!(judged(Client::OtherNode, &not_sent, &[]).result, Outcome::Unknown);
}

/// If `kubectl npl test` runs twice at the same time, both runs have Pods with the same names. So the name of a Pod
/// does not show to which run an answer belongs.
#[test]
fn an_answer_of_another_pod_or_of_another_test_fails() {
    for other in ["echo-2.npl-test-a", "echo-1.npl-test-b"] {
        let row = judged(Client::Outside, &answered(other, "198.51.100.9", "198.51.100.9"), &[]);
        assert_eq!(row.result, Outcome::Failed);
        assert!(row.detail.contains(&format!("Pod {other} answers instead of echo-1.npl-test-a")), "{row:?}");
    }
}

/// With some CNIs, the Node object names no ranges of Pod addresses. The addresses of the Node's devices then show
/// whether the Node masquerades requests.
#[test]
fn the_addresses_of_the_nodes_devices_show_masquerading_without_a_pod_range() {
    let devices: BTreeSet<IpAddr> = [ip("192.0.2.1"), ip("10.244.1.1")].into();
    let result = |device_ips: &BTreeSet<IpAddr>, client, seen, local| {
        let first = Server { pod_ranges: BTreeSet::new(), device_ips: device_ips.clone(), ..server(1) };
        judged_of(&[first, server(2)], client, &answered("echo-1.npl-test-a", seen, local), &[]).result
    };
    for (client, local) in [(Client::Outside, "198.51.100.9"), (Client::OtherNode, "10.244.2.8")] {
        assert_eq!(result(&devices, client, "10.244.1.1", local), Outcome::Failed);
        assert_eq!(result(&devices, client, "203.0.113.1", local), Outcome::Passed);
        // The set `device_ips` is empty if the agent's version does not print the addresses of the Node's devices.
        assert_eq!(result(&BTreeSet::new(), client, "10.244.1.1", local), Outcome::Unknown);
        assert_eq!(result(&BTreeSet::new(), client, "192.0.2.1", local), Outcome::Failed);
        assert_eq!(result(&BTreeSet::new(), client, local, local), Outcome::Passed);
    }
}

#[test]
fn the_address_that_the_pod_sees_must_not_be_of_its_own_node() {
    let result = |client, seen, local| judged(client, &answered("echo-1.npl-test-a", seen, local), &[]).result;
    // The Pod may see the client's own address, or the address of a gateway outside the Node.
    assert_eq!(result(Client::Outside, "198.51.100.9", "198.51.100.9"), Outcome::Passed);
    assert_eq!(result(Client::Outside, "203.0.113.1", "198.51.100.9"), Outcome::Passed);
    assert_eq!(result(Client::OtherNode, "10.244.2.8", "10.244.2.8"), Outcome::Passed);
    assert_eq!(result(Client::OtherNode, "192.0.2.2", "10.244.2.8"), Outcome::Passed);
    assert_eq!(result(Client::OwnNode, "10.244.1.8", "10.244.1.8"), Outcome::Passed);
    assert_eq!(result(Client::Itself, "10.244.1.7", "127.0.0.1"), Outcome::Passed);
    // The Pod must see neither the address of its Node nor the address of the Node's bridge.
    for masqueraded in ["192.0.2.1", "10.244.1.1"] {
        for (client, local) in
            [(Client::Outside, "198.51.100.9"), (Client::OtherNode, "10.244.2.8"), (Client::OwnNode, "10.244.1.8")]
        {
            assert_eq!(result(client, masqueraded, local), Outcome::Failed, "{client:?} {masqueraded}");
        }
    }
}

#[test]
fn one_failed_path_decides_the_verdict_and_skipped_paths_do_not() {
    let row = |result| Row { protocol: Some(Protocol::Tcp), ..Row::about("a", "node-1", result, "") };
    assert_eq!(verdict(&[row(Outcome::Passed), row(Outcome::NotTried)]), HealthVerdict::Healthy);
    let publication = Row::about("publication", "node-1", Outcome::Passed, "");
    assert_eq!(verdict(&[publication, row(Outcome::NotTried)]), HealthVerdict::CannotTell);
    assert_eq!(verdict(&[row(Outcome::Passed), row(Outcome::Unknown)]), HealthVerdict::CannotTell);
    assert_eq!(verdict(&[row(Outcome::Unknown), row(Outcome::Failed)]), HealthVerdict::AtRisk);
    assert_eq!(verdict(&[row(Outcome::NotTried)]), HealthVerdict::CannotTell);
}

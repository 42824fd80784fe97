// SPDX-License-Identifier: Apache-2.0

use std::time::Duration;

use npl_common::flow::tcp_flag::{ACK, FIN, RST, SYN};

use super::{Filter, Traffic, rows};
use crate::{
    core::{
        model::{ConnectionTraffic, Family, Frontend, NodePort, Protocol},
        view::{AgentView, NodePortView, PortState},
    },
    datapath::tables::FlowRecord,
};

const NOW: Duration = Duration::from_secs(100);

fn flow(client: &str, node_port: u16, last_seen: u64, flags: (u8, u8)) -> FlowRecord {
    FlowRecord {
        protocol: Protocol::Tcp,
        client: client.parse().unwrap(),
        nat: format!("192.0.2.10:{node_port}").parse().unwrap(),
        pod: "10.0.0.5:8080".parse().unwrap(),
        last_seen: Duration::from_secs(last_seen),
        client_tcp_flags: flags.0,
        pod_tcp_flags: flags.1,
    }
}

fn agent() -> AgentView {
    let node_port = NodePortView {
        frontend: Frontend { family: Family::V4, node_port: NodePort(61_000), protocol: Protocol::Tcp },
        state: PortState::Published,
        namespace: Some("shop".to_owned()),
        pod: Some("web-0".to_owned()),
        pod_port: None,
        pod_ip: None,
        services: Vec::new(),
        age_millis: None,
        ends_in_millis: None,
    };
    AgentView { node_ports: vec![node_port], ..AgentView::default() }
}

#[test]
fn a_flow_shows_the_addresses_of_client_node_and_pod_and_the_name_of_the_pod() {
    let flows =
        [flow("198.51.100.2:4000", 61_000, 90, (SYN | ACK, ACK)), flow("198.51.100.3:5000", 61_001, 99, (0, 0))];
    let rows = rows(&flows, Some(&agent()), &Traffic::new(), &Filter::default(), NOW);
    let [newest, named] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((newest.client.as_str(), newest.pod.as_deref(), newest.idle_millis), ("198.51.100.3:5000", None, 1_000));
    let ends = [&named.client, &named.node, &named.pod_address].map(String::as_str);
    assert_eq!(ends, ["198.51.100.2:4000", "192.0.2.10:61000", "10.0.0.5:8080"]);
    assert_eq!((named.namespace.as_deref(), named.pod.as_deref()), (Some("shop"), Some("web-0")));
}

#[test]
fn packets_and_bytes_are_those_of_the_connection_from_the_client_to_the_pod() {
    let flows = [flow("198.51.100.2:4000", 61_000, 90, (ACK, ACK)), flow("198.51.100.3:5000", 61_001, 80, (ACK, ACK))];
    let counted =
        ConnectionTraffic { request_packets: 3, request_bytes: 180, reply_packets: 2, reply_bytes: 5_000_000_000 };
    let [client, node, pod] = ["198.51.100.2:4000", "192.0.2.10:61000", "10.0.0.5:8080"].map(|it| it.parse().unwrap());
    // The second entry is for another connection of the same client: to the Node's own port, without NPL.
    let other = ConnectionTraffic { request_packets: 7, ..counted };
    let traffic = Traffic::from([((Protocol::Tcp, client, pod), counted), ((Protocol::Tcp, client, node), other)]);
    let rows = rows(&flows, Some(&agent()), &traffic, &Filter::default(), NOW);
    let counts = |row: &super::FlowRow| [row.request_packets, row.request_bytes, row.reply_packets, row.reply_bytes];
    assert_eq!(counts(&rows[0]), [Some(3), Some(180), Some(2), Some(5_000_000_000)]);
    assert_eq!(counts(&rows[1]), [None; 4]);
}

#[test]
fn the_state_follows_from_the_tcp_flags_of_client_and_pod() {
    let states = [
        ((SYN | ACK, ACK), "established"),
        ((FIN | ACK, ACK), "closing"),
        ((ACK, FIN | ACK), "closing"),
        ((FIN, FIN), "closed"),
        ((FIN, RST), "reset"),
        ((RST, 0), "reset"),
    ];
    for (flags, state) in states {
        assert_eq!(flow("198.51.100.2:1", 61_000, 0, flags).state(), state, "{flags:?}");
    }
}

#[test]
fn each_filter_selects_flows() {
    let flows = [flow("198.51.100.2:4000", 61_000, 90, (ACK, ACK)), flow("203.0.113.9:5000", 61_001, 99, (ACK, ACK))];
    let shown = |filter: &Filter<'_>| -> Vec<String> {
        rows(&flows, Some(&agent()), &Traffic::new(), filter, NOW).into_iter().map(|row| row.client).collect()
    };
    let first = ["198.51.100.2:4000"];
    assert_eq!(shown(&Filter { namespace: Some("shop"), ..Filter::default() }), first);
    assert_eq!(shown(&Filter { pod: Some("web"), ..Filter::default() }), first);
    assert_eq!(shown(&Filter { node_port: Some(61_000), ..Filter::default() }), first);
    assert_eq!(shown(&Filter { client: Some("198.51.100.0/24".parse().unwrap()), ..Filter::default() }), first);
    assert_eq!(shown(&Filter { client: Some("198.51.100.2".parse().unwrap()), ..Filter::default() }), first);
    assert_eq!(shown(&Filter { client: Some("2001:db8::/32".parse().unwrap()), ..Filter::default() }), [""; 0]);
    assert_eq!(shown(&Filter { protocol: Some(Protocol::Udp), ..Filter::default() }), [""; 0]);
    assert_eq!(shown(&Filter::default()).len(), 2);
}

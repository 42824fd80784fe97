// SPDX-License-Identifier: Apache-2.0

use npl_common::stats::MappingStats;

use super::{Filter, age, rows, target};
use crate::{
    core::{
        model::{Backend, Family, Frontend, NodePort, PodPort, Protocol, sources::Sources},
        view::{AgentView, NodePortView, PortState},
    },
    datapath::tables::MappingRecord,
};

fn frontend(node_port: u16) -> Frontend {
    Frontend { family: Family::V4, node_port: NodePort(node_port), protocol: Protocol::Tcp }
}

fn record(node_port: u16) -> MappingRecord {
    let pod_ip = "10.0.0.5".parse().unwrap();
    MappingRecord {
        frontend: frontend(node_port),
        backend: Backend { pod_ip, pod_port: PodPort(8080), generation: 1, is_restricted: false },
        sources: Sources::Anyone,
        stats: MappingStats { request_packets: 7, ..MappingStats::ZERO },
    }
}

fn view(node_port: u16, pod: &str, state: PortState) -> NodePortView {
    NodePortView {
        frontend: frontend(node_port),
        state,
        namespace: Some("shop".to_owned()),
        pod: Some(pod.to_owned()),
        pod_port: Some(PodPort(8080)),
        pod_ip: None,
        services: vec!["web".to_owned()],
        age_millis: (node_port % 2 == 1).then_some(61_000),
        ends_in_millis: None,
    }
}

fn agent() -> AgentView {
    let node_ports = vec![
        view(61_000, "web-0", PortState::Published),
        view(61_001, "web-1", PortState::Reserved),
        view(61_002, "api-0", PortState::Quarantined),
        view(8080, "host-0", PortState::HostPort),
    ];
    AgentView { uptime_millis: 5_000, node_ports, ..AgentView::default() }
}

fn ports(records: &[MappingRecord], agent: Option<&AgentView>, filter: &Filter<'_>) -> Vec<u16> {
    rows(records, agent, filter, None).iter().map(|row| row.node_port).collect()
}

#[test]
fn without_an_agent_the_kernels_mappings_have_no_names() {
    let rows = rows(&[record(61_000)], None, &Filter::default(), None);
    let row = &rows[0];
    assert_eq!((rows.len(), row.pod.as_ref(), row.state, row.in_kernel), (1, None, None, true));
    assert_eq!((target(row).as_str(), age(row).as_str(), row.request_packets), ("10.0.0.5:8080", "-", 7));
}

#[test]
fn a_row_joins_the_kernels_counters_with_the_agents_names() {
    let rows = rows(&[record(61_000), record(61_009)], Some(&agent()), &Filter::default(), None);
    let row = &rows[0];
    assert_eq!((row.node_port, row.pod.as_deref(), row.state), (61_000, Some("web-0"), Some(PortState::Published)));
    assert_eq!((row.request_packets, age(row).as_str()), (7, ">5s"), "an earlier agent allocated the port");
    let reserved = &rows[1];
    assert_eq!((reserved.in_kernel, target(reserved).as_str(), age(reserved).as_str()), (false, "-:8080", "1m1s"));
    assert_eq!((rows[2].node_port, rows[2].pod.as_ref()), (61_009, None), "a mapping that the agent does not know");
}

#[test]
fn ports_without_a_mapping_are_shown_on_request() {
    let records = [record(61_000)];
    let agent = agent();
    let shown = |filter: &Filter<'_>| ports(&records, Some(&agent), filter);
    assert_eq!(shown(&Filter::default()), [61_000, 61_001]);
    assert_eq!(shown(&Filter { all: true, ..Filter::default() }), [8080, 61_000, 61_001, 61_002]);
    assert_eq!(shown(&Filter { states: &[PortState::Quarantined], ..Filter::default() }), [61_002]);
    assert_eq!(shown(&Filter { pod: Some("web-"), ..Filter::default() }), [61_000, 61_001]);
    assert_eq!(shown(&Filter { node_port: Some(61_001), ..Filter::default() }), [61_001]);
    assert_eq!(shown(&Filter { service: Some("api"), ..Filter::default() }), [0_u16; 0]);
    assert_eq!(shown(&Filter { namespace: Some("other"), all: true, ..Filter::default() }), [0_u16; 0]);
}

/// A node port in quarantine must not have a mapping. A mapping in the kernel is a fault, so the row is shown even
/// without `--all`.
#[test]
fn a_quarantined_port_with_a_mapping_is_shown() {
    assert_eq!(ports(&[record(61_002)], Some(&agent()), &Filter::default()), [61_000, 61_001, 61_002]);
}

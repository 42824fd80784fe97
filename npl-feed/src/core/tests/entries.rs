// SPDX-License-Identifier: Apache-2.0
//! Tests which entries of a Pod's annotation the feed serves, above all if a malicious user has written the annotation.

use npl_agent::core::model::{ContainerPort, NodePort};

use super::*;
use crate::core::{
    entries::{self, LONGEST_ANNOTATION, LeftOut, MOST_ENTRIES},
    state::Refusal,
    work::{self, Operation},
};

/// Returns the members and the left-out entries of a cluster whose only Pod is `pod`.
fn served(pod: Pod) -> (Vec<String>, Vec<(LeftOut, usize)>) {
    let mut state = cluster(vec![pod]);
    let members = web(&mut state);
    let refusals = state.take_refusals();
    (members, refusals.into_iter().flat_map(|refusal| refusal.left_out).collect())
}

#[test]
fn an_entry_of_the_own_node_is_served() {
    let (members, left_out) = served(pod("a", "n1", &annotation(8080, "192.0.2.1", 61000)));
    assert_eq!(members, ["a 192.0.2.1:61000 ready"]);
    assert!(left_out.is_empty());
}

#[test]
fn hostile_entries_are_left_out_with_their_reason() {
    for (annotation, reason) in [
        (annotation(8080, "192.0.2.2", 61000), LeftOut::ForeignAddress),
        (annotation(8080, "203.0.113.9", 61000), LeftOut::ForeignAddress),
        (annotation(8080, "192.0.2.1", 22), LeftOut::PortOutOfRange),
        (annotation(8080, "192.0.2.1", 62001), LeftOut::PortOutOfRange),
        (annotation(8080, "192.0.2.1", 0), LeftOut::Malformed),
        (annotation(8080, "node.example", 61000), LeftOut::Malformed),
        (r#"[{"podPort":8080,"nodePort":61000}]"#.to_owned(), LeftOut::Malformed),
        (
            r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"ipFamily":"IPv6"}]"#.to_owned(),
            LeftOut::Malformed,
        ),
        ("{}".to_owned(), LeftOut::Malformed),
        ("[[[[".to_owned(), LeftOut::Malformed),
        (String::new(), LeftOut::Malformed),
    ] {
        assert_eq!(served(pod("a", "n1", &annotation)), (Vec::new(), vec![(reason, 1)]), "{annotation}");
    }
}

#[test]
fn a_pod_of_an_unknown_node_is_left_out_until_the_node_is_known() {
    let mut state = cluster(vec![pod("a", "n3", &annotation(8080, "192.0.2.3", 61000))]);
    assert_eq!(web(&mut state), Vec::<String>::new());
    assert_eq!(state.take_refusals().len(), 1);
    state.apply(Change::Node(node("n3", "192.0.2.3", "")), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.3:61000 ready"]);
    let key = ObjectKey::new("default", "a");
    assert_eq!(state.take_refusals(), [Refusal { pod: key, left_out: BTreeMap::new() }]);
}

#[test]
fn a_host_port_of_the_pod_at_the_entrys_address_is_served_outside_of_the_range() {
    for (host_ip, is_served) in
        [(None, true), (Some("192.0.2.1"), true), (Some("127.0.0.1"), false), (Some("192.0.2.2"), false)]
    {
        let mut own = pod("a", "n1", &annotation(8080, "192.0.2.1", 22));
        own.object.ports = vec![ContainerPort {
            name: None,
            port: PodPort(8080),
            protocol: Protocol::Tcp,
            host_port: Some(NodePort(22)),
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
        }];
        let expected = if is_served {
            (vec!["a 192.0.2.1:22 ready".to_owned()], Vec::new())
        } else {
            (Vec::new(), vec![(LeftOut::PortOutOfRange, 1)])
        };
        assert_eq!(served(own), expected, "{host_ip:?}");
    }
}

/// Returns the value of an annotation with this number of entries. Each entry has all fields that an agent writes.
fn annotation_with(entries: usize) -> String {
    let entry = |number| {
        let port = 61_000 + number;
        format!(
            r#"{{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":{port},"protocol":"tcp","protocols":["tcp"],"ipFamily":"IPv4"}}"#
        )
    };
    format!("[{}]", (0..entries).map(entry).collect::<Vec<_>>().join(","))
}

#[test]
fn a_pod_has_a_bounded_number_of_entries() {
    let (members, left_out) = served(pod("a", "n1", &annotation_with(MOST_ENTRIES)));
    assert_eq!((members.len(), left_out), (MOST_ENTRIES, Vec::new()));
    let (members, left_out) = served(pod("a", "n1", &annotation_with(MOST_ENTRIES + 10)));
    assert_eq!((members.len(), left_out), (MOST_ENTRIES, vec![(LeftOut::Oversized, 10)]));
    let long = annotation(8080, "192.0.2.1", 61000) + &" ".repeat(LONGEST_ANNOTATION);
    assert_eq!(served(pod("a", "n1", &long)), (Vec::new(), vec![(LeftOut::Oversized, 1)]));
}

/// A user may write an annotation of 256 KiB, and labels and ports of a megabyte. The feed does not keep so large an
/// annotation, label or list of ports.
#[test]
fn the_memory_of_a_pod_is_bounded() {
    let normal = pod("a", "n1", &annotation_with(MOST_ENTRIES));
    let mut bounded = normal.clone();
    entries::bound(&mut bounded.object);
    assert_eq!(bounded, normal);
    let port = ContainerPort { name: None, port: PodPort(1), protocol: Protocol::Tcp, host_port: None, host_ip: None };
    for enlarge in [
        |pod: &mut model::Pod, _: &ContainerPort| pod.annotation = Some("1".repeat(256 * 1024)),
        |pod: &mut model::Pod, port: &ContainerPort| pod.ports = vec![port.clone(); 10_000],
        |pod: &mut model::Pod, _: &ContainerPort| {
            pod.labels.extend((0..10_000).map(|number| (number.to_string(), "value".to_owned())));
        },
        |pod: &mut model::Pod, _: &ContainerPort| {
            pod.labels.extend((0..300).map(|number| (number.to_string(), String::new())));
        },
    ] {
        let mut large = pod("a", "n1", &annotation(8080, "192.0.2.1", 61000));
        enlarge(&mut large.object, &port);
        entries::bound(&mut large.object);
        let object = &large.object;
        assert!(object.annotation.as_ref().is_some_and(|text| text.len() < 100));
        assert!(object.ports.is_empty() && object.labels.is_empty());
        assert_eq!(served(large), (Vec::new(), vec![(LeftOut::Oversized, 1)]));
    }
}

/// The number of Pods that a change of one Pod visits does not depend on the number of Pods that claim the same
/// targets.
#[test]
fn a_claim_that_many_pods_have_costs_no_more_than_one() {
    let visits = |others: i64| {
        let same = annotation_with(50);
        let mut pods: Vec<Pod> = (0..others).map(|number| pod(&format!("other-{number}"), "n1", &same)).collect();
        for (pod, created) in pods.iter_mut().zip(0..) {
            pod.created = created;
        }
        let mut state = cluster(pods);
        let mut last = pod("last", "n1", &same);
        last.created = others;
        work::during(Operation::Visit, || {
            for is_ready in [true, false] {
                last.is_ready = is_ready;
                state.apply(Change::Pod(Box::new(last.clone())), 0);
            }
        })
    };
    assert_eq!(visits(300), visits(3));
}

#[test]
fn a_pod_on_the_host_network_is_served_at_its_own_port_only() {
    for (node_port, expected) in [(8080, Some("a 192.0.2.1:8080 ready")), (61000, None)] {
        let mut own = pod("a", "n1", &annotation(8080, "192.0.2.1", node_port));
        own.object.host_network = true;
        let (members, left_out) = served(own);
        assert_eq!(members.first().map(String::as_str), expected);
        assert_eq!(left_out.is_empty(), expected.is_some());
    }
}

#[test]
fn of_two_pods_with_one_node_port_the_agents_own_annotation_wins_and_then_the_older_pod() {
    let same = annotation(8080, "192.0.2.1", 61000);
    let mut foreign = pod("a", "n1", &same);
    foreign.object.annotation_manager = Some("kubectl-edit".into());
    let mut agents = pod("b", "n1", &same);
    agents.created = 100;
    let mut state = cluster(vec![foreign.clone(), agents]);
    assert_eq!(web(&mut state), ["b 192.0.2.1:61000 ready"]);
    assert_eq!(state.take_refusals().len(), 1);
    assert_eq!(state.left_out_by_reason(), BTreeMap::from([(LeftOut::Contested, 1)]));

    foreign.object.annotation_manager = None;
    state.apply(Change::Pod(Box::new(foreign)), 0);
    assert_eq!(web(&mut state), ["a 192.0.2.1:61000 ready"], "the older Pod's claim must take precedence");
    state.apply(Change::PodGone(ObjectKey::new("default", "a"), PodUid("a".into())), 0);
    assert_eq!(web(&mut state), ["b 192.0.2.1:61000 ready"]);
}

#[test]
fn refusals_are_reported_once_per_change() {
    let mut state = cluster(vec![pod("a", "n1", "no JSON")]);
    state.refresh();
    assert_eq!(state.take_refusals().len(), 1);
    let mut again = pod("a", "n1", "no JSON");
    again.is_ready = false;
    state.apply(Change::Pod(Box::new(again)), 0);
    assert!(state.take_refusals().is_empty());
}

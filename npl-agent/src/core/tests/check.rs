// SPDX-License-Identifier: Apache-2.0
//! Tests the comparison of annotations with Services and Nodes for `kubectl npl check`.

use std::collections::BTreeMap;

use super::script::{pod, service};
use crate::core::check::{Cluster, Kind, check};

const WEB_0: &str = r#"[{"podPort":8080,"nodeIP":"192.0.2.10","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]"#;

/// Creates a cluster with two Pods on one Node, and an enabled Service that selects the first Pod. The second Pod has
/// no labels.
fn cluster(annotation: Option<&str>) -> Cluster {
    let mut first = pod(&["a/p", "app=x", "10.0.0.5"], None);
    first.annotation = annotation.map(str::to_owned);
    let second = pod(&["a/q", "10.0.0.6"], None);
    Cluster {
        pods: vec![(first, Some("node-1".to_owned())), (second, Some("node-1".to_owned()))],
        services: vec![service(&["a/web", "app=x", "8080/tcp"])],
        nodes: BTreeMap::from([("node-1".to_owned(), ["192.0.2.10".parse().unwrap()].into())]),
    }
}

fn kinds(cluster: &Cluster) -> Vec<(Kind, String)> {
    check(cluster).into_iter().map(|found| (found.kind, format!("{}/{}", found.namespace, found.pod))).collect()
}

#[test]
fn a_published_pod_is_consistent() {
    assert_eq!(kinds(&cluster(Some(WEB_0))), []);
}

#[test]
fn a_requested_port_without_an_entry_is_missing_until_the_pod_ends() {
    let mut cluster = cluster(None);
    assert_eq!(kinds(&cluster), [(Kind::Missing, "a/p".to_owned())]);
    cluster.pods[0].0.is_terminating = true;
    assert_eq!(kinds(&cluster), []);
    cluster.pods[0].0.is_terminating = false;
    cluster.pods[0].0.is_finished = true;
    assert_eq!(kinds(&cluster), []);
}

#[test]
fn a_port_of_a_family_that_the_node_lacks_is_not_missing() {
    let mut cluster = cluster(Some(WEB_0));
    cluster.pods[0].0.ips.push("2001:db8::5".parse().unwrap());
    cluster.services = vec![service(&["a/web", "app=x", "8080/tcp", "dual"])];
    assert_eq!(kinds(&cluster), []);
    cluster.nodes.get_mut("node-1").unwrap().insert("2001:db8:1::1".parse().unwrap());
    assert_eq!(kinds(&cluster), [(Kind::Missing, "a/p".to_owned())]);
}

#[test]
fn an_entry_that_no_enabled_service_requests_is_stale() {
    let mut cluster = cluster(Some(WEB_0));
    cluster.services = vec![service(&["a/web", "app=x", "8080/tcp", "off"])];
    assert_eq!(kinds(&cluster), [(Kind::Stale, "a/p".to_owned())]);
}

#[test]
fn an_address_that_the_node_does_not_list_is_wrong() {
    let mut cluster = cluster(Some(WEB_0));
    cluster.nodes.insert("node-1".to_owned(), ["192.0.2.11".parse().unwrap()].into());
    assert_eq!(kinds(&cluster), [(Kind::WrongAddress, "a/p".to_owned())]);
}

#[test]
fn a_node_port_that_two_pods_name_is_a_duplicate() {
    let mut cluster = cluster(Some(WEB_0));
    cluster.pods[1].0.labels = cluster.pods[0].0.labels.clone();
    cluster.pods[1].0.annotation = Some(WEB_0.to_owned());
    let expected = ["a/p", "a/q"].map(|pod| (Kind::Duplicate, pod.to_owned()));
    assert_eq!(kinds(&cluster), expected);
}

#[test]
fn an_annotation_that_cannot_be_decoded_is_reported() {
    let found = kinds(&cluster(Some("none")));
    let expected = [Kind::Missing, Kind::Unreadable].map(|kind| (kind, "a/p".to_owned()));
    assert_eq!(found, expected);
    let mut empty = cluster(Some("[]"));
    empty.services.clear();
    assert_eq!(kinds(&empty), []);
}

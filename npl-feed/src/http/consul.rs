// SPDX-License-Identifier: Apache-2.0
//! Serves members in the format of Consul's health and catalog interfaces, for programs that discover members from
//! Consul. The Consul service `SERVICE.NAMESPACE` contains the members of all ports of a Kubernetes Service, and
//! `PORT.SERVICE.NAMESPACE` contains the members of one port.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde::Serialize;

use super::members::{encode, version_of};
use crate::core::snapshot::{Condition, Group, Member, Snapshot, Version};

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Entry<'a> {
    node: NodeBody<'a>,
    service: ServiceBody<'a>,
    checks: [Check<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct NodeBody<'a> {
    node: &'a str,
    address: IpAddr,
    datacenter: &'a str,
    meta: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct ServiceBody<'a> {
    #[serde(rename = "ID")]
    id: String,
    service: &'a str,
    tags: [&'a str; 0],
    address: IpAddr,
    port: u16,
    meta: BTreeMap<&'a str, &'a str>,
    weights: Weights,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Weights {
    passing: u16,
    warning: u16,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Check<'a> {
    node: &'a str,
    #[serde(rename = "CheckID")]
    id: &'static str,
    name: &'static str,
    status: &'static str,
    #[serde(rename = "ServiceID")]
    service_id: String,
    service_name: &'a str,
}

const DATACENTER: &str = "npl";

/// Renders the names of all Services and Service ports, each with an empty list of tags.
pub(super) fn services(snapshot: &Snapshot) -> Vec<u8> {
    #[expect(clippy::zero_sized_map_values, reason = "Consul's answer is an object with a list of tags for each name")]
    let mut names: BTreeMap<String, [&str; 0]> = BTreeMap::new();
    for group in snapshot.groups() {
        let service = format!("{}.{}", group.key.service.name, group.key.service.namespace);
        names.insert(format!("{}.{service}", group.port_text()), []);
        names.insert(service, []);
    }
    encode(&names)
}

/// Returns the version of the members of the Consul service `name`; `None` if the service does not exist.
pub(super) fn version(snapshot: &Snapshot, name: &str) -> Option<Version> {
    let groups = find(snapshot, name);
    (!groups.is_empty()).then(|| version_of(groups.into_iter()))
}

/// Renders the members of the Consul service `name`; with `only_passing`, only the ready members. If the service does
/// not exist, the list is empty, as in Consul's answer.
pub(super) fn health(snapshot: &Snapshot, name: &str, only_passing: bool) -> Vec<u8> {
    let groups = find(snapshot, name);
    let entries = groups.iter().flat_map(|group| {
        let members = group.members.iter();
        let shown = members.filter(|member| !only_passing || member.condition == Condition::Ready);
        shown.map(|member| entry(name, group, member))
    });
    let entries: Vec<Entry<'_>> = entries.collect();
    encode(&entries)
}

fn find<'a>(snapshot: &'a Snapshot, name: &str) -> Vec<&'a Arc<Group>> {
    let parts: Vec<&str> = name.split('.').collect();
    match parts.as_slice() {
        [service, namespace] => snapshot.service(namespace, service).collect(),
        [port, service, namespace] => snapshot.port(namespace, service, port).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn entry<'a>(name: &'a str, group: &'a Group, member: &'a Member) -> Entry<'a> {
    let id = format!("{}-{}-{}-{}", member.pod, member.address, member.port, group.key.protocol);
    let status = if member.condition == Condition::Ready { "passing" } else { "critical" };
    let meta = [("pod", &*member.pod), ("zone", &*member.zone), ("condition", member.condition.as_str())];
    Entry {
        node: NodeBody { node: &member.node, address: member.address, datacenter: DATACENTER, meta: BTreeMap::new() },
        checks: [Check {
            node: &member.node,
            id: "npl",
            name: "Pod is ready",
            status,
            service_id: id.clone(),
            service_name: name,
        }],
        service: ServiceBody {
            id,
            service: name,
            tags: [],
            address: member.address,
            port: member.port,
            meta: meta.into_iter().collect(),
            weights: Weights { passing: member.weight, warning: member.weight },
        },
    }
}

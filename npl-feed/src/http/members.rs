// SPDX-License-Identifier: Apache-2.0
//! Serves members as JSON.

use std::{net::IpAddr, sync::Arc};

use axum::body::Bytes;
use hickory_server::proto::rr::Name;
use npl_agent::core::members::Names;
use serde::Serialize;

use crate::{
    core::snapshot::{Condition, Group, Member, Snapshot, Version},
    dns, xds,
};

/// The interfaces besides HTTP, whose names for each Service port are part of the answers.
#[derive(Debug, Clone, Default)]
pub struct Interfaces {
    /// Whether xDS is served.
    pub xds: bool,
    /// The zone of DNS; `None` if DNS is not served.
    pub zone: Option<Name>,
}

#[derive(Serialize)]
struct AllBody<'a> {
    version: String,
    ports: Vec<GroupBody<'a>>,
}

#[derive(Serialize)]
struct GroupBody<'a> {
    namespace: &'a str,
    service: &'a str,
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    protocol: &'static str,
    version: String,
    names: Names,
    members: Vec<MemberBody<'a>>,
}

#[derive(Serialize)]
struct MemberBody<'a> {
    address: IpAddr,
    port: u16,
    pod: &'a str,
    node: &'a str,
    zone: &'a str,
    ready: bool,
    draining: bool,
    weight: u16,
}

impl Interfaces {
    fn names(&self, group: &Group) -> Names {
        let service = &group.key.service;
        Names {
            xds: self.xds.then(|| xds::cluster_name(group)),
            dns: self.zone.as_ref().map(|zone| dns::of_port(group, zone)),
            http: format!("/v1/members/{}/{}/{}", service.namespace, service.name, group.port_text()),
        }
    }

    fn body<'a>(&self, group: &'a Group) -> GroupBody<'a> {
        GroupBody {
            namespace: &group.key.service.namespace,
            service: &group.key.service.name,
            port: group.key.number,
            name: group.name.as_deref(),
            protocol: group.key.protocol.as_str(),
            version: group.version.to_string(),
            names: self.names(group),
            members: group.members.iter().map(MemberBody::from).collect(),
        }
    }
}

impl<'a> From<&'a Member> for MemberBody<'a> {
    fn from(member: &'a Member) -> Self {
        Self {
            address: member.address,
            port: member.port,
            pod: &member.pod,
            node: &member.node,
            zone: &member.zone,
            ready: member.condition == Condition::Ready,
            draining: member.condition == Condition::Draining,
            weight: member.weight,
        }
    }
}

/// All members of all Services.
pub(super) fn all(snapshot: &Snapshot, interfaces: &Interfaces) -> Vec<u8> {
    let ports = snapshot.groups().map(|group| interfaces.body(group)).collect();
    encode(&AllBody { version: snapshot.version().to_string(), ports })
}

/// The members of all ports of a Service.
pub(super) fn of_service(
    snapshot: &Snapshot,
    interfaces: &Interfaces,
    (namespace, service): (&str, &str),
) -> Option<(Version, Bytes)> {
    let groups: Vec<&Arc<Group>> = snapshot.service(namespace, service).collect();
    if groups.is_empty() {
        return None;
    }
    let version = version_of(groups.iter().copied());
    let ports = groups.into_iter().map(|group| interfaces.body(group)).collect();
    Some((version, encode(&AllBody { version: version.to_string(), ports }).into()))
}

/// The members of one Service port.
pub(super) fn of_port(
    snapshot: &Snapshot,
    interfaces: &Interfaces,
    (namespace, service, port): (&str, &str, &str),
) -> Option<(Version, Bytes)> {
    let group = snapshot.port(namespace, service, port)?;
    Some((group.version, encode(&interfaces.body(group)).into()))
}

/// The common version of several groups.
pub(super) fn version_of<'a, I: Iterator<Item = &'a Arc<Group>>>(groups: I) -> Version {
    let versions: String = groups.map(|group| group.version.to_string()).collect();
    Version::of(versions.as_bytes())
}

/// Serializes to JSON. Structures of strings and numbers never fail to serialize.
pub(super) fn encode(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).unwrap_or_default()
}

// SPDX-License-Identifier: Apache-2.0
//! Serves members as JSON.

use std::{net::IpAddr, sync::Arc};

use axum::body::Bytes;
use serde::Serialize;

use crate::core::snapshot::{Condition, Group, Member, Snapshot, Version};

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

impl<'a> From<&'a Group> for GroupBody<'a> {
    fn from(group: &'a Group) -> Self {
        Self {
            namespace: &group.key.service.namespace,
            service: &group.key.service.name,
            port: group.key.number,
            name: group.name.as_deref(),
            protocol: group.key.protocol.as_str(),
            version: group.version.to_string(),
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
pub(super) fn all(snapshot: &Snapshot) -> Vec<u8> {
    let ports = snapshot.groups().map(|group| GroupBody::from(&**group)).collect();
    encode(&AllBody { version: snapshot.version().to_string(), ports })
}

/// The members of all ports of a Service.
pub(super) fn of_service(snapshot: &Snapshot, namespace: &str, service: &str) -> Option<(Version, Bytes)> {
    let groups: Vec<&Arc<Group>> = snapshot.service(namespace, service).collect();
    if groups.is_empty() {
        return None;
    }
    let version = version_of(groups.iter().copied());
    let ports = groups.into_iter().map(|group| GroupBody::from(&**group)).collect();
    Some((version, encode(&AllBody { version: version.to_string(), ports }).into()))
}

/// The members of one Service port.
pub(super) fn of_port(snapshot: &Snapshot, namespace: &str, service: &str, port: &str) -> Option<(Version, Bytes)> {
    let group = snapshot.port(namespace, service, port)?;
    Some((group.version, encode(&GroupBody::from(&**group)).into()))
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

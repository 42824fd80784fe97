// SPDX-License-Identifier: Apache-2.0
//! Serves members as JSON. The types of the answers belong to the agent's library, so that `kubectl npl members` can
//! decode the answers.

use std::sync::Arc;

use hickory_server::proto::rr::Name;
use npl_agent::core::members::{self, MemberAddress, Names, PortMembers, ServiceMembers};
use serde::Serialize;

use crate::{
    core::snapshot::{Condition, Group, Member, Snapshot, Version},
    dns, xds,
};

/// The feed's interfaces besides HTTP. Answers by HTTP contain the name that each Service port has in these interfaces.
#[derive(Debug, Clone, Default)]
pub struct Interfaces {
    /// Whether the feed serves xDS.
    pub xds: bool,
    /// The zone of the DNS interface; `None` if the feed does not serve DNS.
    pub zone: Option<Name>,
}

impl Interfaces {
    /// Returns the version of the representation. Feeds with different versions give different answers about equal
    /// members.
    pub(super) fn version(&self) -> Version {
        let Self { xds, zone } = self;
        let zone = zone.as_ref().map(Name::to_ascii);
        Version::of(format!("{} {xds} {zone:?}", env!("CARGO_PKG_VERSION")).as_bytes())
    }

    fn names(&self, group: &Group) -> Names {
        let service = &group.key.service;
        Names {
            xds: self.xds.then(|| xds::cluster_name(group)),
            dns: self.zone.as_ref().map(|zone| dns::of_port(group, zone)),
            http: format!("/v1/members/{}/{}/{}", service.namespace, service.name, group.port_text()),
        }
    }

    fn body(&self, group: &Group) -> PortMembers {
        PortMembers {
            namespace: group.key.service.namespace.to_string(),
            service: group.key.service.name.to_string(),
            port: group.key.number,
            name: group.name.as_deref().map(str::to_owned),
            protocol: group.key.protocol.as_str().to_owned(),
            version: group.version.to_string(),
            names: self.names(group),
            members: group.members.iter().map(member).collect(),
        }
    }
}

fn member(member: &Member) -> members::Member {
    members::Member {
        address: MemberAddress(member.address),
        port: member.port,
        pod: member.pod.to_string(),
        node: member.node.to_string(),
        zone: member.zone.to_string(),
        ready: member.condition == Condition::Ready,
        draining: member.condition == Condition::Draining,
        weight: member.weight,
    }
}

/// Renders the members of all Services.
pub(super) fn all(snapshot: &Snapshot, interfaces: &Interfaces) -> Vec<u8> {
    let ports = snapshot.groups().map(|group| interfaces.body(group)).collect();
    encode(&ServiceMembers { version: snapshot.version().to_string(), ports })
}

/// Returns the version of the members of a Service; `None` if the snapshot does not contain the
/// Service.
pub(super) fn version_of_service(snapshot: &Snapshot, namespace: &str, service: &str) -> Option<Version> {
    let mut groups = snapshot.service(namespace, service).peekable();
    groups.peek()?;
    Some(version_of(groups))
}

/// Renders the members of all ports of a Service.
pub(super) fn of_service(snapshot: &Snapshot, interfaces: &Interfaces, namespace: &str, service: &str) -> Vec<u8> {
    let version = version_of(snapshot.service(namespace, service)).to_string();
    let ports = snapshot.service(namespace, service).map(|group| interfaces.body(group)).collect();
    encode(&ServiceMembers { version, ports })
}

/// Renders the members of one Service port; empty if the port does not exist.
pub(super) fn of_port(
    snapshot: &Snapshot,
    interfaces: &Interfaces,
    (namespace, service, port): (&str, &str, &str),
) -> Vec<u8> {
    snapshot.port(namespace, service, port).map(|group| encode(&interfaces.body(group))).unwrap_or_default()
}

/// Computes one version for several groups, from the version of each group.
pub(super) fn version_of<'a, I: Iterator<Item = &'a Arc<Group>>>(groups: I) -> Version {
    let versions: String = groups.map(|group| group.version.to_string()).collect();
    Version::of(versions.as_bytes())
}

/// Serializes the body of an answer to JSON. All keys in these bodies are strings, so the serialization cannot fail.
pub(super) fn encode(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).unwrap_or_default()
}

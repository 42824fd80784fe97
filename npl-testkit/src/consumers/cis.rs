// SPDX-License-Identifier: Apache-2.0
//! A model of F5 Container Ingress Services (CIS): the pool members that CIS reads from an annotation.

use std::net::SocketAddr;

use super::go_json;

/// A pool member as CIS sends it to BIG-IP: the values of the annotation without validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    address: String,
    port: i64,
}

impl Member {
    /// The address, if it is valid.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.address.parse().ok()?, u16::try_from(self.port).ok()?))
    }
}

/// Returns the pool members for a target port without duplicates, regardless of family and protocol.
pub(super) fn members(annotation: &str, target_port: u16) -> Vec<Member> {
    let mut members: Vec<Member> = Vec::new();
    for fields in go_json::decode(annotation, i64::from(i32::MAX)) {
        let member = Member { address: fields.node_ip, port: fields.node_port };
        if fields.pod_port == i64::from(target_port) && !members.contains(&member) {
            members.push(member);
        }
    }
    members
}

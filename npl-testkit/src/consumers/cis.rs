// SPDX-License-Identifier: Apache-2.0
//! F5's Container Ingress Services.

use std::net::SocketAddr;

use super::go_json;

/// A pool member as it is sent to BIG-IP: whatever stands in the annotation, checked by nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    address: String,
    port: i64,
}

impl Member {
    /// Where clients are sent to, if that is anywhere.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.address.parse().ok()?, u16::try_from(self.port).ok()?))
    }
}

/// The members of a pool for a target port, each once, of whatever family and protocol.
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

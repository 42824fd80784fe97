// SPDX-License-Identifier: Apache-2.0
//! Serves members in the format of Prometheus' HTTP service discovery, so that Prometheus can scrape or probe each
//! member.

use std::net::SocketAddr;

use serde::Serialize;

use super::members::encode;
use crate::core::snapshot::Snapshot;

#[derive(Serialize)]
struct Target<'a> {
    targets: [String; 1],
    labels: Labels<'a>,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "Prometheus keeps labels with this prefix for relabeling only")]
struct Labels<'a> {
    __meta_npl_namespace: &'a str,
    __meta_npl_service: &'a str,
    __meta_npl_port: String,
    __meta_npl_protocol: &'static str,
    __meta_npl_pod: &'a str,
    __meta_npl_node: &'a str,
    __meta_npl_zone: &'a str,
    __meta_npl_condition: &'static str,
}

/// Renders one Prometheus target for each member of the snapshot.
pub(super) fn targets(snapshot: &Snapshot) -> Vec<u8> {
    let targets = snapshot.groups().flat_map(|group| {
        group.members.iter().map(|member| Target {
            targets: [SocketAddr::new(member.address, member.port).to_string()],
            labels: Labels {
                __meta_npl_namespace: &group.key.service.namespace,
                __meta_npl_service: &group.key.service.name,
                __meta_npl_port: group.port_text(),
                __meta_npl_protocol: group.key.protocol.as_str(),
                __meta_npl_pod: &member.pod,
                __meta_npl_node: &member.node,
                __meta_npl_zone: &member.zone,
                __meta_npl_condition: member.condition.as_str(),
            },
        })
    });
    encode(&targets.collect::<Vec<_>>())
}

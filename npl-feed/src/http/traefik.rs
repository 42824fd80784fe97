// SPDX-License-Identifier: Apache-2.0
//! Serves a dynamic configuration for Traefik's HTTP provider: a Traefik service `SERVICE.NAMESPACE.PORT` for each
//! Service port. The configuration contains no routers: Traefik must get these from another provider. A TCP port
//! becomes both an HTTP service and a TCP service of Traefik.

use std::{collections::BTreeMap, net::SocketAddr};

use npl_agent::core::model::Protocol;
use serde::Serialize;
use serde_json::{Value, json};

use super::members::encode;
use crate::core::snapshot::{Group, Snapshot};

#[derive(Serialize)]
struct Configuration {
    #[serde(skip_serializing_if = "Services::is_empty")]
    http: Services,
    #[serde(skip_serializing_if = "Services::is_empty")]
    tcp: Services,
    #[serde(skip_serializing_if = "Services::is_empty")]
    udp: Services,
}

#[derive(Serialize, Default)]
struct Services {
    services: BTreeMap<String, Value>,
}

impl Services {
    fn is_empty(&self) -> bool {
        self.services.is_empty()
    }
}

/// Renders Traefik's dynamic configuration. The servers of each Traefik service are the ready members.
pub(super) fn configuration(snapshot: &Snapshot) -> Vec<u8> {
    let mut all = Configuration { http: Services::default(), tcp: Services::default(), udp: Services::default() };
    for group in snapshot.groups() {
        let name = format!("{}.{}.{}", group.key.service.name, group.key.service.namespace, group.port_text());
        let addresses = addresses(group);
        let by_address = |list: &[SocketAddr]| -> Vec<Value> {
            list.iter().map(|address| json!({ "address": address.to_string() })).collect()
        };
        match group.key.protocol {
            Protocol::Tcp => {
                let urls = addresses.iter().map(|address| json!({ "url": format!("http://{address}") }));
                let http = json!({ "loadBalancer": { "servers": urls.collect::<Vec<_>>() } });
                all.http.services.insert(name.clone(), http);
                let tcp = json!({ "loadBalancer": { "servers": by_address(&addresses) } });
                all.tcp.services.insert(name, tcp);
            }
            Protocol::Udp => {
                let udp = json!({ "loadBalancer": { "servers": by_address(&addresses) } });
                all.udp.services.insert(name, udp);
            }
            // SCTP ports are skipped, because Traefik does not support SCTP.
            Protocol::Sctp => {}
        }
    }
    encode(&all)
}

fn addresses(group: &Group) -> Vec<SocketAddr> {
    group.ready().map(|member| SocketAddr::new(member.address, member.port)).collect()
}

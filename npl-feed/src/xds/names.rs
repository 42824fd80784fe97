// SPDX-License-Identifier: Apache-2.0
//! Names of resources: `SERVICE.NAMESPACE:PORT`, with the name or the number of the port, as in the target
//! `xds:///web.default:http` of a gRPC client. The port may be left out if the Service has one.

use std::sync::Arc;

use crate::core::snapshot::{Group, Snapshot};

/// The canonical name of a Service port.
pub(super) fn of(group: &Group) -> String {
    format!("{}.{}:{}", group.key.service.name, group.key.service.namespace, group.port_text())
}

/// The Service port of a name.
pub(super) fn find<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a Arc<Group>> {
    let (host, port) = match name.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (name, None),
    };
    let (service, namespace) = host.split_once('.')?;
    if let Some(port) = port {
        return snapshot.port(namespace, service, port);
    }
    let mut ports = snapshot.service(namespace, service);
    ports.next().filter(|_| ports.next().is_none())
}

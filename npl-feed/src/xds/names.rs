// SPDX-License-Identifier: Apache-2.0
//! The names of xDS resources: `SERVICE.NAMESPACE:PORT`, where PORT is a port's name or number, as in the target
//! `xds:///web.default:http` of a gRPC client. The port may be left out if the Service has only one port.

use std::sync::Arc;

use crate::core::snapshot::{Group, Snapshot};

/// Returns the canonical name of a Service port's resources.
pub fn of(group: &Group) -> String {
    format!("{}.{}:{}", group.key.service.name, group.key.service.namespace, group.port_text())
}

/// Finds the group of the Service port to which a resource name refers.
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

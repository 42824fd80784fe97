// SPDX-License-Identifier: Apache-2.0
//! Parses and formats the names of xDS resources: `SERVICE.NAMESPACE:PORT`, where PORT is a port's name or number, as
//! in the target `xds:///web.default:http` of a gRPC client. The port may be left out if the Service has only one port.

use std::sync::Arc;

use npl_agent::core::model::{Protocol, ServiceKey};

use crate::core::{
    snapshot::{Group, Snapshot},
    work::{self, Operation},
};

/// Returns the canonical name of a Service port's resources.
pub fn of(group: &Group) -> String {
    format!("{}:{}", of_service(&group.key.service), group.port_text())
}

/// Returns the text with which all names of a Service's resources begin. Names of other Services may also begin with
/// this text.
pub(super) fn of_service(service: &ServiceKey) -> String {
    format!("{}.{}", service.name, service.namespace)
}

/// Returns whether the name is the canonical name of a Service port's resources.
pub(super) fn is_canonical(name: &str, group: &Group) -> bool {
    let port = name
        .strip_prefix(&*group.key.service.name)
        .and_then(|rest| rest.strip_prefix('.')?.strip_prefix(&*group.key.service.namespace)?.strip_prefix(':'));
    port.is_some_and(|port| match &group.name {
        Some(name) => port == &**name,
        None => port == group.port_text(),
    })
}

/// Finds the group of the Service port to which a resource name refers. SCTP ports have no resources, because xDS
/// addresses have no such protocol.
pub(super) fn find<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a Arc<Group>> {
    work::count(Operation::LookUp, 1);
    let (host, port) = match name.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (name, None),
    };
    let (service, namespace) = host.split_once('.')?;
    let group = if let Some(port) = port {
        snapshot.port(namespace, service, port)
    } else {
        let mut ports = snapshot.service(namespace, service);
        ports.next().filter(|_| ports.next().is_none())
    };
    group.filter(|group| group.key.protocol != Protocol::Sctp)
}

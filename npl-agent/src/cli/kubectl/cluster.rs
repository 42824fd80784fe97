// SPDX-License-Identifier: Apache-2.0
//! Reads Pods, Services and Nodes of the cluster.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Kubectl, text_at};
use crate::{
    core::check::Cluster,
    kube::{
        AnnotationKeys, convert,
        objects::{NodeObject, PodObject, ServiceObject},
    },
};

/// Reads the Pods and Services of all namespaces, or of one namespace, and no Nodes.
pub(super) fn read(kubectl: Kubectl<'_>, namespace: Option<&str>) -> anyhow::Result<Cluster> {
    let scope = namespace.map_or_else(|| vec!["--all-namespaces"], |namespace| vec!["--namespace", namespace]);
    let list = |kind: &str| kubectl.list(&[&[kind], scope.as_slice()].concat());
    let keys = AnnotationKeys::new(&kubectl.connection.annotation_domain);
    let pods = list("pods")?.into_iter().filter_map(|object| {
        let node = Some(text_at(&object, "/spec/nodeName").to_owned()).filter(|name| !name.is_empty());
        Some((convert::pod(decoded::<PodObject>(object)?, &keys)?.object, node))
    });
    let services = list("services")?.into_iter();
    let services = services.filter_map(|it| Some(convert::service(decoded::<ServiceObject>(it)?, &keys)?.object));
    Ok(Cluster { pods: pods.collect(), services: services.collect(), nodes: BTreeMap::new() })
}

/// Reads the Pods and Services of all namespaces, or of one namespace, and all Nodes.
pub(super) fn read_with_nodes(kubectl: Kubectl<'_>, namespace: Option<&str>) -> anyhow::Result<Cluster> {
    let nodes = kubectl.list(&["nodes"])?.into_iter().filter_map(|object| {
        let node = convert::node(decoded::<NodeObject>(object)?)?.object;
        let addresses: BTreeSet<_> = node.internal_ips.into_iter().chain(node.external_ips).collect();
        Some((node.name, addresses))
    });
    Ok(Cluster { nodes: nodes.collect(), ..read(kubectl, namespace)? })
}

fn decoded<T: DeserializeOwned>(object: Value) -> Option<T> {
    serde_json::from_value(object).ok()
}

// SPDX-License-Identifier: Apache-2.0
//! Kubernetes objects with only the fields that NPL uses. The decoder skips the fields that NPL does not use, which
//! saves memory on Nodes with many Pods.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{ClusterResourceScope, NamespaceResourceScope, Resource};
use serde::{Deserialize, de::IgnoredAny};

/// `metadata` with only the fields that NPL uses. From `managedFields`, the largest field of the metadata, the decoder
/// keeps only the managers of annotations.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(from = "WireMetadata")]
pub struct Metadata {
    /// The metadata: name, namespace, uid, resource version, labels, annotations and creation time. Fields of
    /// `ObjectMeta` that are not in this list stay empty.
    pub object: ObjectMeta,
    /// Whether `deletionTimestamp` is set.
    pub is_terminating: bool,
    /// The field managers that own annotations, each with the keys of its annotations in the form `f:KEY`.
    pub annotation_managers: Vec<(String, Vec<String>)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<IgnoredAny>,
    managed_fields: Option<Vec<WireManager>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireManager {
    manager: Option<String>,
    fields_v1: Option<WireFields>,
}

#[derive(Deserialize)]
struct WireFields {
    #[serde(rename = "f:metadata")]
    metadata: Option<WireMetadataFields>,
}

#[derive(Deserialize)]
struct WireMetadataFields {
    #[serde(rename = "f:annotations")]
    #[expect(clippy::zero_sized_map_values, reason = "serde reads a JSON object as a map")]
    annotations: Option<BTreeMap<String, IgnoredAny>>,
}

impl WireManager {
    fn annotations(self) -> Option<(String, Vec<String>)> {
        let annotations = self.fields_v1?.metadata?.annotations?;
        Some((self.manager?, annotations.into_keys().collect()))
    }
}

impl From<WireMetadata> for Metadata {
    fn from(wire: WireMetadata) -> Self {
        let WireMetadata {
            name,
            namespace,
            uid,
            resource_version,
            labels,
            annotations,
            creation_timestamp,
            deletion_timestamp,
            managed_fields,
        } = wire;
        Self {
            object: ObjectMeta {
                name,
                namespace,
                uid,
                resource_version,
                labels,
                annotations,
                creation_timestamp,
                ..ObjectMeta::default()
            },
            is_terminating: deletion_timestamp.is_some(),
            annotation_managers: managed_fields.into_iter().flatten().filter_map(WireManager::annotations).collect(),
        }
    }
}

/// A Pod, as the API server sends it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodObject {
    /// The field `metadata`.
    pub metadata: Metadata,
    /// The field `spec`.
    pub spec: PodSpec,
    /// The field `status`.
    pub status: PodStatus,
}

/// The field `spec` of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// The field `containers`.
    pub containers: Option<Vec<Container>>,
    /// The field `initContainers`.
    pub init_containers: Option<Vec<Container>>,
    /// The field `nodeName`.
    pub node_name: Option<String>,
    /// The field `hostNetwork`.
    pub host_network: Option<bool>,
    /// The field `readinessGates`.
    pub readiness_gates: Option<Vec<ReadinessGate>>,
}

/// An element of the field `readinessGates` of a Pod's `spec`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ReadinessGate {
    /// The field `conditionType`.
    pub condition_type: Option<String>,
}

/// A container of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    /// The field `ports`.
    pub ports: Option<Vec<Port>>,
    /// The field `restartPolicy`. An init container with `Always` is a native sidecar.
    pub restart_policy: Option<String>,
}

/// A port of a container.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    /// The field `name`.
    pub name: Option<String>,
    /// The field `containerPort`.
    pub container_port: i64,
    /// The field `protocol`.
    pub protocol: Option<String>,
    /// The field `hostPort`.
    pub host_port: Option<i64>,
    /// The field `hostIP`.
    #[serde(rename = "hostIP")]
    pub host_ip: Option<String>,
}

/// The field `status` of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    /// The field `phase`.
    pub phase: Option<String>,
    /// The field `podIP`.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// The field `podIPs`.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
    /// The field `conditions`.
    pub conditions: Option<Vec<PodCondition>>,
}

/// An element of the field `conditions` of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    /// The field `type`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The field `status`.
    pub status: Option<String>,
}

/// An element of the field `podIPs` of a Pod's `status`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodIp {
    /// The field `ip`.
    pub ip: Option<String>,
}

/// A Service, as the API server sends it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ServiceObject {
    /// The field `metadata`.
    pub metadata: Metadata,
    /// The field `spec`.
    pub spec: ServiceSpec,
}

/// The field `spec` of a Service.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    /// The field `type`.
    #[serde(rename = "type")]
    pub service_type: Option<String>,
    /// The field `selector`.
    pub selector: Option<BTreeMap<String, String>>,
    /// The field `ports`.
    pub ports: Option<Vec<ServicePortSpec>>,
    /// The field `ipFamilies`.
    pub ip_families: Option<Vec<String>>,
    /// The field `healthCheckNodePort`.
    pub health_check_node_port: Option<i64>,
}

/// An element of the field `ports` of a Service.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServicePortSpec {
    /// The field `name`.
    pub name: Option<String>,
    /// The field `port`.
    pub port: i64,
    /// The field `protocol`.
    pub protocol: Option<String>,
    /// The field `targetPort`.
    pub target_port: Option<NumberOrName>,
    /// The field `nodePort`.
    pub node_port: Option<i64>,
}

/// A target port: Kubernetes' type `IntOrString`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum NumberOrName {
    /// The number of the target port.
    Number(i64),
    /// The name of a container port.
    Name(String),
}

/// A Node, as the API server sends it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeObject {
    /// The field `metadata`.
    pub metadata: Metadata,
    /// The field `status`.
    pub status: NodeStatus,
}

/// The field `status` of a Node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// The field `addresses`.
    pub addresses: Option<Vec<NodeAddress>>,
}

/// An element of the field `addresses` of a Node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    /// The field `type`: `InternalIP`, `ExternalIP`, `Hostname` …
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The field `address`.
    pub address: Option<String>,
}

macro_rules! resource {
    ($object:ty, $kind:literal, $plural:literal, $scope:ty) => {
        impl Resource for $object {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                "".into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata.object
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata.object
            }
        }
    };
}

resource!(PodObject, "Pod", "pods", NamespaceResourceScope);
resource!(ServiceObject, "Service", "services", NamespaceResourceScope);
resource!(NodeObject, "Node", "nodes", ClusterResourceScope);

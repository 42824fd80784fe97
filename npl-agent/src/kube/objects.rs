// SPDX-License-Identifier: Apache-2.0
//! Kubernetes objects with only the fields that NPL uses. Other fields are skipped during decoding, which saves memory
//! on Nodes with many Pods.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{ClusterResourceScope, NamespaceResourceScope, Resource};
use serde::{Deserialize, de::IgnoredAny};

/// `metadata` without the fields that NPL does not use, of which `managedFields` is the largest.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(from = "WireMetadata")]
pub struct Metadata {
    /// Name, namespace, uid, resource version, labels, annotations and creation time. Other fields are empty.
    pub object: ObjectMeta,
    /// Whether `deletionTimestamp` is set.
    pub is_terminating: bool,
    /// The field managers that own annotations, with their keys in the form `f:KEY`.
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

/// A Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodObject {
    /// `metadata`.
    pub metadata: Metadata,
    /// `spec`.
    pub spec: PodSpec,
    /// `status`.
    pub status: PodStatus,
}

/// `spec` of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// `containers`.
    pub containers: Option<Vec<Container>>,
    /// `initContainers`.
    pub init_containers: Option<Vec<Container>>,
    /// `nodeName`.
    pub node_name: Option<String>,
    /// `hostNetwork`.
    pub host_network: Option<bool>,
    /// `readinessGates`.
    pub readiness_gates: Option<Vec<ReadinessGate>>,
}

/// An element of `readinessGates`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ReadinessGate {
    /// `conditionType`.
    pub condition_type: Option<String>,
}

/// A container of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    /// `ports`.
    pub ports: Option<Vec<Port>>,
    /// `restartPolicy`. An init container with `Always` is a native sidecar.
    pub restart_policy: Option<String>,
}

/// A port of a container.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Port {
    /// `name`.
    pub name: Option<String>,
    /// `containerPort`.
    pub container_port: i64,
    /// `protocol`.
    pub protocol: Option<String>,
    /// `hostPort`.
    pub host_port: Option<i64>,
    /// `hostIP`.
    #[serde(rename = "hostIP")]
    pub host_ip: Option<String>,
}

/// `status` of a Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    /// `phase`.
    pub phase: Option<String>,
    /// `podIP`.
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    /// `podIPs`.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
    /// `conditions`.
    pub conditions: Option<Vec<PodCondition>>,
}

/// An element of a Pod's `conditions`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    /// `type`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// `status`.
    pub status: Option<String>,
}

/// An element of `podIPs`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct PodIp {
    /// `ip`.
    pub ip: Option<String>,
}

/// A Service.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ServiceObject {
    /// `metadata`.
    pub metadata: Metadata,
    /// `spec`.
    pub spec: ServiceSpec,
}

/// `spec` of a Service.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    /// `type`.
    #[serde(rename = "type")]
    pub service_type: Option<String>,
    /// `selector`.
    pub selector: Option<BTreeMap<String, String>>,
    /// `ports`.
    pub ports: Option<Vec<ServicePortSpec>>,
    /// `ipFamilies`.
    pub ip_families: Option<Vec<String>>,
    /// `healthCheckNodePort`.
    pub health_check_node_port: Option<i64>,
}

/// An element of a Service's `ports`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServicePortSpec {
    /// `name`.
    pub name: Option<String>,
    /// `port`.
    pub port: i64,
    /// `protocol`.
    pub protocol: Option<String>,
    /// `targetPort`.
    pub target_port: Option<NumberOrName>,
    /// `nodePort`.
    pub node_port: Option<i64>,
}

/// Kubernetes' `IntOrString`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum NumberOrName {
    /// A number.
    Number(i64),
    /// A name.
    Name(String),
}

/// A Node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeObject {
    /// `metadata`.
    pub metadata: Metadata,
    /// `status`.
    pub status: NodeStatus,
}

/// `status` of a Node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// `addresses`.
    pub addresses: Option<Vec<NodeAddress>>,
}

/// An element of a Node's `addresses`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    /// `type`: `InternalIP`, `ExternalIP`, `Hostname` …
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// `address`.
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

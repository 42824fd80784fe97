// SPDX-License-Identifier: Apache-2.0
//! Converts Kubernetes objects to the types of [`crate::core::model`].
//!
//! An invalid value of a field is skipped and reported in [`Converted::skipped`], so that the valid fields of the
//! object remain usable.

use std::{fmt, net::IpAddr, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    objects::{
        Container, NodeObject, NumberOrName, PodObject, PodSpec, PodStatus, Port, ServiceObject, ServicePortSpec,
    },
    patch::FIELD_MANAGER,
};
use crate::core::model::{
    ContainerPort, Family, Gate, Node, NodePort, ObjectKey, Pod, PodPort, PodUid, Protocol, Service, ServicePort,
    ServiceType, ServiceUid, TargetPort, node_port_requests::NodePortRequests, sources::AllowList,
};

/// The keys of NPL's annotations and of its readiness gate. All keys begin with the domain of `--annotation-domain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotationKeys {
    /// Annotation of a Service: the value `true` requests node ports for the Pods of the Service.
    pub enabled: String,
    /// Annotation of a Service: the source ranges from which clients may use the node ports of the Service's Pods.
    pub allowed_sources: String,
    /// Annotation of a Pod, in which the agent publishes the mappings of the Pod's ports.
    pub mapping: String,
    /// Annotation of a Pod: the node ports that the Pod requests.
    pub requests: String,
    /// The readiness gate of a Pod, and the condition of the same name. The agent sets the condition to `True` once the
    /// Pod's mappings are published, or once the containers of a Pod without mappings are ready.
    pub gate: String,
}

impl AnnotationKeys {
    /// Creates the keys for the domain of `--annotation-domain`.
    pub fn new(domain: &str) -> Self {
        Self {
            enabled: format!("{domain}/enabled"),
            allowed_sources: format!("{domain}/allowed-source-ranges"),
            mapping: domain.to_owned(),
            requests: format!("{domain}/requested-node-ports"),
            gate: format!("{domain}/published"),
        }
    }
}

/// A kind of invalid value in a Kubernetes object. The conversion leaves out the list element with such a value, and
/// treats an unknown Service type as `ExternalName`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skipped {
    /// A port number that is not in the range from 1 to 65535.
    Port,
    /// A protocol other than TCP, UDP and SCTP.
    Protocol,
    /// An address that cannot be parsed, or that is the wildcard address (`0.0.0.0` or `::`).
    Address,
    /// An IP family other than IPv4 and IPv6.
    Family,
    /// An unknown type of a Service; NPL assigns no node ports for this Service.
    ServiceType,
}

impl Skipped {
    /// Returns the word that names this kind of invalid value in the log.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Port => "port",
            Self::Protocol => "protocol",
            Self::Address => "address",
            Self::Family => "family",
            Self::ServiceType => "service_type",
        }
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A converted object, and the kinds of the invalid values that were skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted<T> {
    /// The object without the invalid values.
    pub object: T,
    /// The kinds of the skipped values, in the order in which the conversion found them.
    pub skipped: Vec<Skipped>,
}

/// Converts a Pod. Returns `None` if the Pod has no name, namespace or uid; the API server always sets all three.
pub fn pod(object: PodObject, keys: &AnnotationKeys) -> Option<Converted<Pod>> {
    let PodObject { metadata, spec, status } = object;
    let key = key(&metadata.object)?;
    let ObjectMeta { uid, resource_version, labels, annotations, .. } = metadata.object;
    let mut annotations = annotations.unwrap_or_default();
    let mut skipped = Vec::new();
    let object = Pod {
        key,
        uid: PodUid(uid?.into()),
        resource_version: resource_version.and_then(|version| version.parse().ok()).unwrap_or_default(),
        labels: labels.unwrap_or_default(),
        is_finished: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
        is_terminating: metadata.is_terminating,
        host_network: spec.host_network.unwrap_or_default(),
        gate: gate(&spec, &status, keys),
        ips: pod_ips(status, &mut skipped),
        ports: pod_ports(spec, &mut skipped),
        requests: annotations.get(&keys.requests).map(|text| NodePortRequests::read(text)).unwrap_or_default(),
        annotation: annotations.remove(&keys.mapping),
        annotation_manager: annotation_manager(metadata.annotation_managers, keys),
    };
    Some(Converted { object, skipped })
}

/// Converts a Service. Returns `None` if the Service has no name, namespace or uid; the API server always sets all
/// three.
pub fn service(object: ServiceObject, keys: &AnnotationKeys) -> Option<Converted<Service>> {
    let ServiceObject { metadata, spec } = object;
    let mut skipped = Vec::new();
    let families = spec.ip_families.unwrap_or_default();
    let key = key(&metadata.object)?;
    let annotations = metadata.object.annotations.unwrap_or_default();
    let service_ports = spec.ports.unwrap_or_default();
    let node_ports = service_ports.iter().filter_map(|port| port.node_port).chain(spec.health_check_node_port);
    let node_ports = node_ports.filter_map(|number| port_number(number).ok().map(NodePort)).collect();
    let allow_list = annotations.get(&keys.allowed_sources).map_or(AllowList::ABSENT, |text| AllowList::read(text));
    let object = Service {
        key,
        uid: ServiceUid(metadata.object.uid?.into()),
        is_enabled: annotations.get(&keys.enabled).is_some_and(|value| value == "true"),
        service_type: service_type(spec.service_type.as_deref(), &mut skipped),
        selector: spec.selector.unwrap_or_default(),
        ports: keep(service_ports, &mut skipped, service_port),
        node_ports,
        families: keep(families, &mut skipped, |name| family(&name)),
        allow_list,
    };
    Some(Converted { object, skipped })
}

/// Converts a Node. Returns `None` if the Node has no name; the API server always sets the name.
pub fn node(object: NodeObject) -> Option<Converted<Node>> {
    let NodeObject { metadata, status } = object;
    let mut node = Node { name: metadata.object.name?, internal_ips: Vec::new(), external_ips: Vec::new() };
    let mut skipped = Vec::new();
    for address in status.addresses.unwrap_or_default() {
        let list = match address.kind.as_deref() {
            Some("InternalIP") => &mut node.internal_ips,
            Some("ExternalIP") => &mut node.external_ips,
            _ => continue,
        };
        match ip(&address.address.unwrap_or_default()) {
            Ok(ip) => push_new(list, ip),
            Err(reason) => skipped.push(reason),
        }
    }
    Some(Converted { object: node, skipped })
}

fn key(metadata: &ObjectMeta) -> Option<ObjectKey> {
    Some(ObjectKey::new(metadata.namespace.as_deref()?, metadata.name.as_deref()?))
}

fn keep<F, T>(from: Vec<F>, skipped: &mut Vec<Skipped>, mut convert: impl FnMut(F) -> Result<T, Skipped>) -> Vec<T> {
    from.into_iter().filter_map(|value| convert(value).map_err(|reason| skipped.push(reason)).ok()).collect()
}

/// Returns the field manager, other than the agent, that owns the mapping annotation; `None` if no such manager exists.
/// A field manager owns the annotation if it has set the annotation's current value. Of several owners, the function
/// returns the last one in `managers`.
fn annotation_manager(managers: Vec<(String, Vec<String>)>, keys: &AnnotationKeys) -> Option<Arc<str>> {
    let owns = |owned: &[String]| owned.iter().any(|key| key.strip_prefix("f:") == Some(&keys.mapping));
    let is_other = |(manager, owned): &(String, Vec<String>)| manager != FIELD_MANAGER && owns(owned);
    managers.into_iter().rfind(is_other).map(|(manager, _)| manager.into())
}

fn gate(spec: &PodSpec, status: &PodStatus, keys: &AnnotationKeys) -> Gate {
    let is_npl = |kind: &Option<String>| kind.as_ref() == Some(&keys.gate);
    if !spec.readiness_gates.iter().flatten().any(|gate| is_npl(&gate.condition_type)) {
        return Gate::Absent;
    }
    let npl = status.conditions.iter().flatten().find(|condition| is_npl(&condition.kind));
    let is_true = npl.is_some_and(|condition| condition.status.as_deref() == Some("True"));
    let are_containers_ready = has_condition(status, "ContainersReady", "True");
    if is_true { Gate::Open } else { Gate::Closed { are_containers_ready } }
}

/// Returns whether the Pod has a condition of type `kind` whose status is `value`.
pub fn has_condition(status: &PodStatus, kind: &str, value: &str) -> bool {
    let conditions = status.conditions.iter().flatten();
    conditions
        .into_iter()
        .any(|condition| condition.kind.as_deref() == Some(kind) && condition.status.as_deref() == Some(value))
}

/// Returns the addresses in `podIPs`. If `podIPs` is absent, as with an old kubelet, returns the address in `podIP`.
///
/// Returns no address while the Pod has no sandbox. After a reboot of the Node, the Pod's status contains the old
/// addresses until the kubelet has created a new sandbox. The CNI may already have assigned the addresses in the status
/// to other Pods.
fn pod_ips(status: PodStatus, skipped: &mut Vec<Skipped>) -> Vec<IpAddr> {
    if has_condition(&status, "PodReadyToStartContainers", "False") {
        return Vec::new();
    }
    let mut texts: Vec<String> = status.pod_ips.unwrap_or_default().into_iter().filter_map(|entry| entry.ip).collect();
    if texts.is_empty() {
        texts.extend(status.pod_ip.filter(|text| !text.is_empty()));
    }
    let mut ips = Vec::with_capacity(texts.len());
    for found in keep(texts, skipped, |text| ip(&text)) {
        push_new(&mut ips, found);
    }
    ips
}

/// Returns the ports of containers, followed by the ports of native sidecars: the order in which Kubernetes resolves a
/// named target port.
fn pod_ports(spec: PodSpec, skipped: &mut Vec<Skipped>) -> Vec<ContainerPort> {
    let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.unwrap_or_default().into_iter().filter(is_sidecar).collect();
    let mut ports = keep(ports_of(spec.containers.unwrap_or_default()), skipped, container_port);
    // The kubelet maps no host port of an init container, and a native sidecar is an init container.
    let without_host_port = |port| Ok(ContainerPort { host_port: None, host_ip: None, ..container_port(port)? });
    ports.extend(keep(ports_of(sidecars), skipped, without_host_port));
    ports
}

fn ports_of(containers: Vec<Container>) -> Vec<Port> {
    containers.into_iter().flat_map(|container| container.ports.unwrap_or_default()).collect()
}

fn container_port(port: Port) -> Result<ContainerPort, Skipped> {
    let host_ip = port.host_ip.filter(|text| !is_wildcard(text)).map(|text| ip(&text)).transpose()?;
    Ok(ContainerPort {
        name: port.name.filter(|name| !name.is_empty()),
        port: PodPort(port_number(port.container_port)?),
        protocol: protocol(port.protocol.as_deref())?,
        host_port: port.host_port.filter(|number| *number != 0).map(port_number).transpose()?.map(NodePort),
        host_ip,
    })
}

/// Converts a port of a Service. If the target port is absent, zero or empty, the Service's port is also the target
/// port, as in Kubernetes.
///
/// # Errors
///
/// If a port number or the protocol is invalid.
pub fn service_port(spec: ServicePortSpec) -> Result<ServicePort, Skipped> {
    let target = match spec.target_port {
        Some(NumberOrName::Name(name)) if !name.is_empty() => TargetPort::Name(name),
        Some(NumberOrName::Number(number)) if number != 0 => TargetPort::Number(PodPort(port_number(number)?)),
        None | Some(NumberOrName::Number(_) | NumberOrName::Name(_)) => {
            TargetPort::Number(PodPort(port_number(spec.port)?))
        }
    };
    Ok(ServicePort { protocol: protocol(spec.protocol.as_deref())?, target })
}

fn service_type(name: Option<&str>, skipped: &mut Vec<Skipped>) -> ServiceType {
    match name {
        None | Some("" | "ClusterIP") => ServiceType::ClusterIp,
        Some("LoadBalancer") => ServiceType::LoadBalancer,
        Some("NodePort") => ServiceType::NodePort,
        Some("ExternalName") => ServiceType::ExternalName,
        Some(_) => {
            skipped.push(Skipped::ServiceType);
            ServiceType::ExternalName
        }
    }
}

fn protocol(name: Option<&str>) -> Result<Protocol, Skipped> {
    match name {
        None | Some("" | "TCP") => Ok(Protocol::Tcp),
        Some("UDP") => Ok(Protocol::Udp),
        Some("SCTP") => Ok(Protocol::Sctp),
        Some(_) => Err(Skipped::Protocol),
    }
}

fn family(name: &str) -> Result<Family, Skipped> {
    match name {
        "IPv4" => Ok(Family::V4),
        "IPv6" => Ok(Family::V6),
        _ => Err(Skipped::Family),
    }
}

fn port_number(number: i64) -> Result<u16, Skipped> {
    u16::try_from(number).ok().filter(|port| *port != 0).ok_or(Skipped::Port)
}

fn is_wildcard(text: &str) -> bool {
    text.is_empty() || text.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
}

/// Parses an IP address of a Kubernetes object. An IPv4-mapped IPv6 address becomes the IPv4 address, because packets
/// to such an address are IPv4 packets.
fn ip(text: &str) -> Result<IpAddr, Skipped> {
    let parsed = text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    parsed.filter(|ip| !ip.is_unspecified()).ok_or(Skipped::Address)
}

fn push_new(ips: &mut Vec<IpAddr>, ip: IpAddr) {
    if !ips.contains(&ip) {
        ips.push(ip);
    }
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;

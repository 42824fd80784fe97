// SPDX-License-Identifier: Apache-2.0
//! Pods and Services of tests.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::echo::Protocol;

/// A port of a container or of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The name, by which a Service can refer to a container port.
    pub name: String,
    /// The port number of the container or of the Service.
    pub number: u16,
    pub protocol: Protocol,
    /// The `targetPort` of a Service: a number or a name.
    pub target: Value,
    /// The `hostPort` of a container.
    pub host_port: Option<u16>,
}

impl Port {
    /// Creates a port of a container, or a Service's port whose `targetPort` is the same number.
    pub fn new(name: &str, number: u16, protocol: Protocol) -> Self {
        Self { name: name.to_owned(), number, protocol, target: json!(number), host_port: None }
    }

    /// Returns the same port with another `targetPort`.
    #[must_use]
    pub fn to(self, target: impl Into<Value>) -> Self {
        Self { target: target.into(), ..self }
    }

    /// Returns the same container port with a `hostPort`.
    #[must_use]
    pub fn on_host(self, host_port: u16) -> Self {
        Self { host_port: Some(host_port), ..self }
    }

    fn protocol(&self) -> &'static str {
        match self.protocol {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => "SCTP",
        }
    }
}

/// A Pod with one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodObject {
    pub namespace: String,
    pub name: String,
    /// The name of the Pod's Node.
    pub node: String,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// The declared container ports.
    pub ports: Vec<Port>,
    /// Whether the Pod uses the host network.
    pub host_network: bool,
}

impl PodObject {
    /// Creates a Pod whose label `app` has the value `app`, without declared ports.
    pub fn new(namespace: &str, name: &str, node: &str, app: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            annotations: BTreeMap::new(),
            ports: Vec::new(),
            host_network: false,
        }
    }

    /// Returns the same Pod with these declared ports.
    #[must_use]
    pub fn with_ports(self, ports: Vec<Port>) -> Self {
        Self { ports, ..self }
    }

    /// Returns the same Pod with this annotation in addition.
    #[must_use]
    pub fn with_annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { namespace, name, node, labels, annotations, ports, host_network } = self;
        let ports: Vec<Value> = ports
            .iter()
            .map(|port| {
                json!({
                    "name": port.name,
                    "containerPort": port.number,
                    "protocol": port.protocol(),
                    "hostPort": port.host_port,
                })
            })
            .collect();
        json!({
            "metadata": {"namespace": namespace, "name": name, "labels": labels, "annotations": annotations},
            "spec": {
                "nodeName": node,
                "hostNetwork": host_network,
                "containers": [{"name": "echo", "image": "npl-echo", "ports": ports}],
            },
        })
    }
}

/// A Service of type `ClusterIP`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceObject {
    pub namespace: String,
    pub name: String,
    /// The selector: labels of the Pods that the Service selects.
    pub selector: BTreeMap<String, String>,
    pub ports: Vec<Port>,
    pub annotations: BTreeMap<String, String>,
}

impl ServiceObject {
    /// Creates a Service that selects the Pods whose label `app` has the value `app`, without the annotation that
    /// enables node ports.
    pub fn new(namespace: &str, name: &str, app: &str, ports: Vec<Port>) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            selector: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            ports,
            annotations: BTreeMap::new(),
        }
    }

    /// Returns the same Service with the annotation that enables node ports.
    #[must_use]
    pub fn enabled(mut self) -> Self {
        self.annotations.insert(super::ENABLED_ANNOTATION.to_owned(), "true".to_owned());
        self
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { namespace, name, selector, ports, annotations } = self;
        let ports: Vec<Value> = ports
            .iter()
            .map(|port| {
                json!({"name": port.name, "port": port.number, "protocol": port.protocol(), "targetPort": port.target})
            })
            .collect();
        json!({
            "metadata": {"namespace": namespace, "name": name, "annotations": annotations},
            "spec": {"selector": selector, "ports": ports},
        })
    }
}

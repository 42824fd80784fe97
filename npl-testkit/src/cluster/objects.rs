// SPDX-License-Identifier: Apache-2.0
//! Pods and Services as tests describe them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::echo::Protocol;

/// A port of a container or of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The port's name; container and Service may use it to refer to each other.
    pub name: String,
    /// The number: of the container's port, or of the Service's.
    pub number: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// On which number or name of the container a Service's port ends.
    pub target: Value,
    /// The Node's port that the container asks for.
    pub host_port: Option<u16>,
}

impl Port {
    /// A port whose Service and container use the same number.
    pub fn new(name: &str, number: u16, protocol: Protocol) -> Self {
        Self { name: name.to_owned(), number, protocol, target: json!(number), host_port: None }
    }

    /// The same port with another target: a number or a name.
    #[must_use]
    pub fn to(self, target: impl Into<Value>) -> Self {
        Self { target: target.into(), ..self }
    }

    /// The same port of a container, also reached by a port of the Node.
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

/// A Pod of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodObject {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The Node that it runs on.
    pub node: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The ports that its container declares.
    pub ports: Vec<Port>,
    /// Whether it uses the Node's own network.
    pub host_network: bool,
}

impl PodObject {
    /// A Pod with the label `app`.
    pub fn new(namespace: &str, name: &str, node: &str, app: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            ports: Vec::new(),
            host_network: false,
        }
    }

    /// The same Pod with these ports declared.
    #[must_use]
    pub fn with_ports(self, ports: Vec<Port>) -> Self {
        Self { ports, ..self }
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { namespace, name, node, labels, ports, host_network } = self;
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
            "metadata": {"namespace": namespace, "name": name, "labels": labels},
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
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The labels of the Pods behind it.
    pub selector: BTreeMap<String, String>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

impl ServiceObject {
    /// A Service in front of the Pods with the label `app`, not enabled for node ports.
    pub fn new(namespace: &str, name: &str, app: &str, ports: Vec<Port>) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            selector: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            ports,
            annotations: BTreeMap::new(),
        }
    }

    /// The same Service, enabled for node ports.
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

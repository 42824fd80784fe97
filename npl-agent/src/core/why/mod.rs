// SPDX-License-Identifier: Apache-2.0
//! Why a Pod or a Service is served or not: the chain of conditions from the Service to the last packet, over the same
//! state as the plan. The first link that does not hold is the cause of all later ones.

mod pod;
mod service;
mod traffic;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::traffic::{Traffic, add_traffic};
use super::{
    model::{Frontend, ObjectKey, PodPort},
    state::State,
    view::AgentView,
};

/// A question of an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// Why a Pod, or one port of it.
    Pod(ObjectKey, Option<PodPort>),
    /// Why a Service: all of its Pods on this Node.
    Service(ObjectKey),
}

impl Question {
    /// The question about an object of a kind; `None` if the kind is neither `pod` nor `service`.
    pub fn new(kind: &str, namespace: &str, name: &str, pod_port: Option<u16>) -> Option<Self> {
        let key = ObjectKey::new(namespace, name);
        match (kind, pod_port) {
            ("pod", port) => Some(Self::Pod(key, port.map(PodPort))),
            ("service", None) => Some(Self::Service(key)),
            _ => None,
        }
    }

    /// The question as a path of the local socket: `pod/NAMESPACE/NAME/PORT`.
    pub fn path(&self) -> String {
        match self {
            Self::Pod(ObjectKey { namespace, name }, None) => format!("pod/{namespace}/{name}"),
            Self::Pod(ObjectKey { namespace, name }, Some(port)) => format!("pod/{namespace}/{name}/{port}"),
            Self::Service(ObjectKey { namespace, name }) => format!("service/{namespace}/{name}"),
        }
    }
}

/// The text is no object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an object: give pod/NAMESPACE/NAME, pod/NAMESPACE/NAME:PORT or service/NAMESPACE/NAME")]
pub struct UnknownObject;

impl std::str::FromStr for Question {
    type Err = UnknownObject;

    fn from_str(text: &str) -> Result<Self, UnknownObject> {
        let mut parts = text.split('/');
        let (Some(kind), Some(namespace), Some(name), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(UnknownObject);
        };
        let (name, port) = match name.split_once(':') {
            Some((name, port)) => {
                (name, Some(port.parse::<u16>().ok().filter(|port| *port != 0).ok_or(UnknownObject)?))
            }
            None => (name, None),
        };
        // Names of Kubernetes; the path of a request needs no escape.
        let is_name =
            |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.');
        let kind = match kind {
            "pods" | "po" => "pod",
            "services" | "svc" => "service",
            kind => kind,
        };
        Some(()).filter(|()| is_name(namespace) && is_name(name)).ok_or(UnknownObject)?;
        Self::new(kind, namespace, name, port).ok_or(UnknownObject)
    }
}

/// A condition of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// The agent has lists of Pods and Services, and an address of the Node.
    Agent,
    /// The agent knows the Pod, and the Pod serves.
    Pod,
    /// A Service is enabled, has a suitable type and a selector.
    Enabled,
    /// An enabled Service selects the Pod.
    Selected,
    /// The Pod has an address that belongs to no other Pod.
    Address,
    /// The Service's target port is a port of the Pod, of a protocol that the agent serves.
    PortResolved,
    /// The Node and the Pod have an address of a family of the Service.
    Family,
    /// A node port is held for the Pod's port.
    NodePort,
    /// The kernel has the mapping.
    KernelEntry,
    /// The Pod's annotation names the node port.
    Annotation,
    /// The Pod's readiness gate is open.
    ReadinessGate,
    /// A device by which clients reach the Node carries the programs.
    Device,
    /// Packets were translated in both directions.
    LastPacket,
    /// Packets near the node port that were not translated.
    LastRefusal,
}

impl Link {
    /// The name in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Pod => "pod",
            Self::Enabled => "enabled",
            Self::Selected => "selected",
            Self::Address => "address",
            Self::PortResolved => "port-resolved",
            Self::Family => "family",
            Self::NodePort => "node-port",
            Self::KernelEntry => "kernel-entry",
            Self::Annotation => "annotation",
            Self::ReadinessGate => "readiness-gate",
            Self::Device => "device",
            Self::LastPacket => "last-packet",
            Self::LastRefusal => "last-refusal",
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// The condition holds.
    Yes,
    /// The condition does not hold.
    No,
    /// The condition does not apply, or the fact is for information only.
    Info,
}

impl Holds {
    /// The name in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Yes => "ok",
            Self::No => "BROKEN",
            Self::Info => "info",
        }
    }
}

/// A condition, and what was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkReport {
    /// The condition.
    pub link: Link,
    /// Whether it holds.
    pub holds: Holds,
    /// What was found, in one sentence.
    pub found: String,
    /// The section of the documents; `None` if the condition holds.
    pub page: Option<String>,
}

impl LinkReport {
    fn ok(link: Link, found: impl Into<String>) -> Self {
        Self { link, holds: Holds::Yes, found: found.into(), page: None }
    }

    fn info(link: Link, found: impl Into<String>) -> Self {
        Self { link, holds: Holds::Info, found: found.into(), page: None }
    }

    fn broken(link: Link, found: impl Into<String>, page: &str) -> Self {
        Self { link, holds: Holds::No, found: found.into(), page: Some(page.to_owned()) }
    }
}

/// The chain of one Pod port, or of a Pod or Service without any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chain {
    /// `pod shop/web-0, port 8080/tcp IPv4`.
    pub subject: String,
    /// The node port; `None` before there is one.
    pub frontend: Option<Frontend>,
    /// The conditions, in their order. Conditions behind a broken one are left out if they depend on it.
    pub links: Vec<LinkReport>,
}

impl Chain {
    /// The first condition that does not hold.
    pub fn first_broken(&self) -> Option<&LinkReport> {
        self.links.iter().find(|link| link.holds == Holds::No)
    }
}

/// The answer to a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// One chain for each port of each Pod.
    pub chains: Vec<Chain>,
}

impl Explanation {
    /// Whether every condition of every chain holds.
    pub fn is_served(&self) -> bool {
        self.chains.iter().all(|chain| chain.first_broken().is_none())
    }
}

/// Answers a question from the state of the agent. `view` has the devices.
pub fn explain(state: &State, view: &AgentView, question: &Question) -> Explanation {
    let chains = match question {
        Question::Pod(key, port) => pod::chains(state, view, key, *port, None),
        Question::Service(key) => service::chains(state, view, key),
    };
    Explanation { chains }
}

// SPDX-License-Identifier: Apache-2.0
//! Explains why a Pod or a Service is served or not served, by a chain of conditions: from the agent's prerequisites to
//! the last packet. The conditions are evaluated on the same state from which the agent plans operations. The first
//! broken link of the chain is usually the cause of the broken links that follow.

mod pod;
mod service;
mod traffic;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::traffic::{Traffic, add_traffic};
use super::{
    model::{Frontend, ObjectKey, PodPort},
    pages,
    state::PlannerState,
    verdict::HealthVerdict,
    view::AgentView,
};

/// The Pod or Service about which an operator asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// The question about all ports of a Pod, or about one port.
    Pod(ObjectKey, Option<PodPort>),
    /// The question about a Service and all Pods of this Node that the Service selects.
    Service(ObjectKey),
}

impl Question {
    /// Creates the question about an object; `None` if `kind` is neither `pod` nor `service`.
    pub fn new(kind: &str, namespace: &str, name: &str, pod_port: Option<u16>) -> Option<Self> {
        let key = ObjectKey::new(namespace, name);
        match (kind, pod_port) {
            ("pod", port) => Some(Self::Pod(key, port.map(PodPort))),
            ("service", None) => Some(Self::Service(key)),
            _ => None,
        }
    }

    /// Returns the question as a path on the agent's local socket, for example `pod/NAMESPACE/NAME/PORT`.
    pub fn path(&self) -> String {
        match self {
            Self::Pod(ObjectKey { namespace, name }, None) => format!("pod/{namespace}/{name}"),
            Self::Pod(ObjectKey { namespace, name }, Some(port)) => format!("pod/{namespace}/{name}/{port}"),
            Self::Service(ObjectKey { namespace, name }) => format!("service/{namespace}/{name}"),
        }
    }
}

/// The error for a text that does not name a Pod or a Service.
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
        // Kubernetes names consist of characters that need no escaping in a request path.
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

/// A link of the chain: a condition for traffic to reach the Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// The agent has lists of Pods and Services, an address of the Node and the state of the kernel, and the Node is
    /// not being retired.
    Agent,
    /// The agent knows the Pod, and the Pod has not finished.
    Pod,
    /// A Service in the Pod's namespace is enabled, and has a supported type and a selector.
    Enabled,
    /// An enabled Service selects the Pod.
    Selected,
    /// The Pod has an address. If the Pod port has no host port, the Pod's address of the IP family is not on the Node's
    /// own network, and no other Pod holds the address, unless the Pod is on the host network.
    Address,
    /// The Service's target port resolves to a port of the Pod, with a protocol that the agent serves.
    PortResolved,
    /// The Node and the Pod both have an address of one of the Service's families.
    Family,
    /// A node port is allocated to the Pod port.
    NodePort,
    /// The kernel has the mapping.
    KernelEntry,
    /// The Pod's annotation names the node port.
    Annotation,
    /// The Pod's readiness gate is open.
    ReadinessGate,
    /// The programs are attached to a device through which clients reach the Node.
    Device,
    /// Requests and replies of the mapping were translated.
    LastPacket,
    /// The numbers of packets of the Node that were not translated, by reason. This link only informs, and is never
    /// broken.
    LastRefusal,
}

impl Link {
    /// The word in the table that the command `why` prints.
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

/// Whether the condition of a link holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// The condition holds.
    Yes,
    /// The condition does not hold.
    No,
    /// The condition does not apply, or the finding is only informational.
    Info,
}

impl Holds {
    /// The word in the table that the command `why` prints.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Yes => "ok",
            Self::No => "BROKEN",
            Self::Info => "info",
        }
    }
}

/// One link of a chain: the condition, whether it holds, and the finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkReport {
    /// The link, that is, the condition.
    pub link: Link,
    /// Whether the link's condition holds.
    pub holds: Holds,
    /// The finding about the condition, one sentence.
    pub found: String,
    /// The documentation section about a broken condition, or about packet reasons: file and anchor; `None` for all
    /// other findings.
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

/// The chain of conditions for one Pod port, or for a Pod or Service if no port is requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chain {
    /// The subject of the chain, such as `pod shop/web-0, port 8080/tcp IPv4`.
    pub subject: String,
    /// The frontend of the Pod port; `None` if no node port is allocated.
    pub frontend: Option<Frontend>,
    /// The links, in the order of the conditions. Links that cannot be evaluated because of a preceding broken link are
    /// omitted.
    pub links: Vec<LinkReport>,
}

impl Chain {
    /// Returns the first link whose condition does not hold.
    pub fn first_broken(&self) -> Option<&LinkReport> {
        self.links.iter().find(|link| link.holds == Holds::No)
    }
}

/// The answer to an operator's question about a Pod or a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The chains: one for each requested port of each Pod.
    pub chains: Vec<Chain>,
    /// One sentence for each Node whose agent gave no answer. [`Self::chains`] lacks the Pods of these Nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

impl Explanation {
    /// Creates the answer about a Service to whose Pods NPL assigns no node ports. `reason` says why.
    pub fn of_inactive_service(key: &ObjectKey, reason: impl Into<String>) -> Self {
        let links = vec![LinkReport::broken(Link::Enabled, reason, pages::NO_ANNOTATION)];
        let chain = Chain { subject: format!("service {key}"), frontend: None, links };
        Self { chains: vec![chain], missing: Vec::new() }
    }

    /// Whether every condition of every chain holds.
    pub fn is_served(&self) -> bool {
        self.chains.iter().all(|chain| chain.first_broken().is_none())
    }

    /// Returns the verdict on the object of the question. A condition that does not hold has more weight than a missing
    /// answer of a Node.
    pub fn verdict(&self) -> HealthVerdict {
        if !self.is_served() {
            HealthVerdict::AtRisk
        } else if self.missing.is_empty() {
            HealthVerdict::Healthy
        } else {
            HealthVerdict::CannotTell
        }
    }
}

/// Returns the broken link if the agent does not read the Services of this namespace.
fn outside_of_namespaces(state: &PlannerState, namespace: &str) -> Option<LinkReport> {
    let namespaces = &state.settings.namespaces;
    (!namespaces.contains(namespace)).then(|| {
        let text = format!(
            "the agent's --namespaces excludes the namespace {namespace}: the agent reads only Services of {namespaces}"
        );
        LinkReport::broken(Link::Enabled, text, pages::NO_ANNOTATION)
    })
}

/// Answers a question from the state of the planner. `view` supplies only the state of the devices; everything else
/// comes from `state`.
pub fn explain(state: &PlannerState, view: &AgentView, question: &Question) -> Explanation {
    let chains = match question {
        Question::Pod(key, port) => pod::chains(state, view, key, *port, None),
        Question::Service(key) => service::chains(state, view, key),
    };
    Explanation { chains, missing: Vec::new() }
}

// SPDX-License-Identifier: Apache-2.0
//! Creates the client of the API server, and checks at start that the API server grants the agent its permissions.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderValue, header::USER_AGENT};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::{
    Api, Client, Config,
    api::{ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    backoff::{Jittered, Throttle},
    confinement::{self, ConfinementResult},
    failure::{FailureKind, REFUSALS_TO_CONFIRM, one_line, root_cause},
    objects::NodeObject,
    renewal::renewing,
    transport::{self, LIVENESS},
};

use crate::core::{certificate, pages};

const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the agent cannot use the API server. The agent exits with an error of this type, because a retry would also
/// fail.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file of `--kubeconfig` is missing or invalid.
    #[error("use kubeconfig {}: {reason}; give --kubeconfig a readable file with a current context", path.display())]
    Kubeconfig {
        /// The path of the kubeconfig file.
        path: PathBuf,
        /// The error of the library kube.
        reason: String,
    },
    /// The agent does not run in a Pod, and `--kubeconfig` is not given.
    #[error("find the Pod's service account: {reason}; run inside a cluster or give --kubeconfig FILE")]
    InCluster {
        /// The error of the library kube, which names the missing file or variable.
        reason: String,
    },
    /// The kubeconfig or service account names an unusable certificate, token file or proxy.
    #[error("set up a client for the API server at {url}: {reason}; check the service account or --kubeconfig")]
    Client {
        /// The address of the API server.
        url: String,
        /// The error of the library kube.
        reason: String,
    },
    /// The API server answered 401 (`Unauthorized`) several times in succession.
    #[error(
        "the API server at {url} does not accept the agent's credentials: check that its service account exists, or \
         check the file of --kubeconfig"
    )]
    Unauthorized {
        /// The address of the API server.
        url: String,
    },
    /// The API server denied at least one permission several times in succession.
    #[error(
        "the API server at {url} does not permit the agent to {missing}: apply deploy/npl.yaml, which grants the \
         permissions"
    )]
    Forbidden {
        /// The address of the API server.
        url: String,
        /// The permissions that an operator must grant.
        missing: MissingPermissions,
    },
}

/// The permissions that the API server does not grant the agent; at least one. The text consists of verbs and
/// resources: `list pods, patch pods/status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingPermissions(Vec<Permission>);

impl fmt::Display for MissingPermissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Permission { verb, resource, subresource }) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let slash = if subresource.is_empty() { "" } else { "/" };
            write!(f, "{separator}{verb} {resource}{slash}{subresource}")?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Permission {
    verb: &'static str,
    resource: &'static str,
    subresource: &'static str,
}

const fn permission(verb: &'static str, resource: &'static str, subresource: &'static str) -> Permission {
    Permission { verb, resource, subresource }
}

/// The permissions without which the agent cannot work. The permissions for Events are not in the list, because Events
/// are optional.
const NEEDED: [Permission; 7] = [
    permission("list", "pods", ""),
    permission("watch", "pods", ""),
    permission("patch", "pods", "status"),
    permission("list", "services", ""),
    permission("watch", "services", ""),
    permission("list", "nodes", ""),
    permission("watch", "nodes", ""),
];

/// Creates the client without sending a request. Also returns the address of the API server. After a request without an
/// answer, or with the answer 401, the client reads the kubeconfig or the service account again.
///
/// # Errors
///
/// If the kubeconfig or the service account is unusable.
pub async fn open(kubeconfig: Option<&Path>, user_agent: &str) -> Result<(Client, String), ConnectError> {
    let (first, url) = read(kubeconfig, user_agent).await?;
    let (kubeconfig, user_agent) = (kubeconfig.map(Path::to_owned), user_agent.to_owned());
    let again = move || {
        let (kubeconfig, user_agent) = (kubeconfig.clone(), user_agent.clone());
        async move { Ok(read(kubeconfig.as_deref(), &user_agent).await?.0) }
    };
    Ok((renewing(first, again), url))
}

async fn read(kubeconfig: Option<&Path>, user_agent: &str) -> Result<(Client, String), ConnectError> {
    let mut config = load(kubeconfig).await?;
    let user_agent = HeaderValue::from_str(&format!("{user_agent}/{}", env!("CARGO_PKG_VERSION")));
    config.headers.extend(user_agent.ok().map(|value| (USER_AGENT, value)));
    let url = config.cluster_url.to_string();
    let client = transport::build(config, LIVENESS)
        .map_err(|err| ConnectError::Client { url: url.clone(), reason: one_line(&err) })?;
    Ok((client, url))
}

/// Checks the permissions until the API server gives a definite answer. Then checks the admission policy for as long as
/// the agent runs. The future resolves only if the API server denies the agent access.
pub(super) async fn refusal(
    client: Client,
    url: String,
    node_name: String,
    confinement: ConfinementResult,
) -> ConnectError {
    if let Err(refusal) = wait_for_access(&client, &url, &node_name).await {
        return refusal;
    }
    confinement::keep_checking(&client, &node_name, &confinement).await
}

/// Loads the kubeconfig file if one is given; otherwise loads the service account of the Pod. The environment variable
/// `KUBECONFIG` is ignored, because it may name the kubeconfig of another cluster.
async fn load(kubeconfig: Option<&Path>) -> Result<Config, ConnectError> {
    let Some(path) = kubeconfig else {
        return Config::incluster().map_err(|err| ConnectError::InCluster { reason: one_line(&err) });
    };
    let failed = |err: KubeconfigError| ConnectError::Kubeconfig { path: path.to_owned(), reason: one_line(&err) };
    let file = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)
}

/// The result of one check of all permissions.
enum Probe {
    /// The API server grants all permissions. `is_node_known` is true if the API server has a Node of the agent's name.
    Granted { is_node_known: bool },
    /// The API server gave no definite answer, so the check is repeated.
    NotYet(kube::Error),
    /// The API server answered 401 or denied a permission. A single refusal is not final, because an API server that
    /// has just started may deny valid requests.
    Refused(ConnectError),
}

async fn wait_for_access(client: &Client, url: &str, node_name: &str) -> Result<(), ConnectError> {
    let mut delays = Jittered::new();
    let mut throttle = Throttle::default();
    let mut refusals = 0;
    loop {
        match probe(client, url, node_name).await {
            Probe::Granted { is_node_known } => {
                info!(url, "connected to the API server");
                if !is_node_known {
                    warn!(
                        see = pages::url(pages::NOT_READY),
                        node = node_name,
                        "the API server has no Node of this name, so no Pod gets a node port; the agent waits for the \
                         Node: check --node-name"
                    );
                }
                return Ok(());
            }
            Probe::NotYet(err) => {
                refusals = 0;
                if throttle.acquire() {
                    let err = root_cause(&err);
                    warn!(
                        see = pages::url(pages::NOT_READY),
                        url,
                        err,
                        "{}; mappings of an earlier agent are still served",
                        silence(&err)
                    );
                }
            }
            Probe::Refused(err) => {
                refusals += 1;
                if refusals == REFUSALS_TO_CONFIRM {
                    return Err(err);
                }
                debug!(
                    %err,
                    refusals,
                    "the API server answered 401 or denied a permission; the agent checks its permissions again"
                );
            }
        }
        sleep(delays.next().unwrap_or(PROBE_TIMEOUT)).await;
    }
}

/// Returns the log message for an API server that does not answer. The message contains a remedy if `cause`, the text
/// of the error's last cause, is about the certificate.
fn silence(cause: &str) -> &'static str {
    certificate::advice(cause).unwrap_or("the API server does not answer; the agent retries")
}

async fn probe(client: &Client, url: &str, node_name: &str) -> Probe {
    let mut missing = Vec::new();
    for needed in NEEDED {
        match bounded(is_allowed(client, needed, node_name)).await {
            Ok(true) => {}
            Ok(false) => missing.push(needed),
            Err(err) => return refused_or_late(url, needed, err),
        }
    }
    if !missing.is_empty() {
        return Probe::Refused(ConnectError::Forbidden { url: url.to_owned(), missing: MissingPermissions(missing) });
    }
    match bounded(is_node_known(client, node_name)).await {
        Ok(is_node_known) => Probe::Granted { is_node_known },
        Err(err) => refused_or_late(url, permission("list", "nodes", ""), err),
    }
}

fn refused_or_late(url: &str, needed: Permission, err: kube::Error) -> Probe {
    let url = url.to_owned();
    match FailureKind::of(&err) {
        FailureKind::Unauthorized => Probe::Refused(ConnectError::Unauthorized { url }),
        FailureKind::Forbidden => {
            Probe::Refused(ConnectError::Forbidden { url, missing: MissingPermissions(vec![needed]) })
        }
        FailureKind::Expired
        | FailureKind::Restored
        | FailureKind::Unavailable
        | FailureKind::Rejected
        | FailureKind::Unreachable
        | FailureKind::Malformed => Probe::NotYet(err),
    }
}

/// Returns whether the API server grants a permission. If the API server denies the access review itself, the
/// permission counts as granted. If the permission is missing nevertheless, the request that needs the permission
/// reports the denial.
async fn is_allowed(client: &Client, needed: Permission, node_name: &str) -> kube::Result<bool> {
    let Permission { verb, resource, subresource } = needed;
    let attributes = ResourceAttributes {
        verb: Some(verb.to_owned()),
        version: Some("v1".to_owned()),
        resource: Some(resource.to_owned()),
        subresource: Some(subresource.to_owned()).filter(|name| !name.is_empty()),
        // The agent selects its Node by name in its watch, and the API server authorizes such a watch as access to that
        // single Node. The review therefore names the Node.
        name: (resource == "nodes").then(|| node_name.to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), non_resource_attributes: None },
        ..SelfSubjectAccessReview::default()
    };
    match Api::<SelfSubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await {
        Ok(answer) => Ok(answer.status.is_some_and(|status| status.allowed)),
        Err(err) if matches!(FailureKind::of(&err), FailureKind::Forbidden | FailureKind::Rejected) => Ok(true),
        Err(err) => Err(err),
    }
}

async fn is_node_known(client: &Client, node_name: &str) -> kube::Result<bool> {
    let only_this = ListParams::default().fields(&format!("metadata.name={node_name}")).limit(1);
    let nodes = Api::<NodeObject>::all(client.clone()).list(&only_this).await?;
    Ok(!nodes.items.is_empty())
}

pub(super) async fn bounded<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    timeout(PROBE_TIMEOUT, request).await.unwrap_or_else(|late| Err(kube::Error::Service(late.into())))
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;

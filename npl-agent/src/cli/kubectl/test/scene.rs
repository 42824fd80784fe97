// SPDX-License-Identifier: Apache-2.0
//! The objects of the test: a Namespace with a Service, a `ServiceAccount`, and two Pods on each Node. The Service
//! selects the echo Pods; the client Pods send requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use serde_json::{Value, json};

use super::site::Site;
use crate::{
    cli::kubectl::{
        Kubectl, cluster,
        nodes::{self, PROGRAM},
        temporary::{Kind, NAME_LABEL, TemporaryNamespace},
    },
    config::{echo_args::Listen, label_selector},
    core::{
        model::{Family, Protocol},
        path_test::Server,
        publish::annotation,
    },
    kube::AnnotationKeys,
};

/// The kind of Namespace that `kubectl npl test` creates.
pub(super) const NAMESPACE: Kind = Kind { label: "npl-test", level: "restricted" };
/// The key of the Pods' label by which the Service selects the echo Pods.
const ROLE: &str = "app.kubernetes.io/component";
const SERVICE: &str = "echo";
/// The name of the container in each Pod.
const CONTAINER: &str = "echo";
/// The hidden command of `npl-agent` that the Pods run.
const COMMAND: &str = "echo";
/// The time limit for the start of the Pods. Without `--image`, the Nodes have pulled the image already.
pub(super) const START: Duration = Duration::from_mins(2);
/// The time limit for the publication of all node ports.
pub(super) const PUBLICATION: Duration = Duration::from_mins(1);
/// Returns the port of the echo Pods for a protocol. Each protocol has its own port. If all protocols had the same
/// port, an agent with `--protocol-pairing merged` would need a node port that is free for all of them.
const fn port(protocol: Protocol) -> u16 {
    match protocol {
        Protocol::Tcp => 7_777,
        Protocol::Udp => 7_778,
        Protocol::Sctp => 7_779,
    }
}

/// The names of the test's objects, and the Nodes on which the test runs.
#[derive(Debug)]
pub(super) struct Scene<'a> {
    pub(super) kubectl: Kubectl<'a>,
    pub(super) namespace: TemporaryNamespace<'a>,
    pub(super) sites: &'a [Site],
    /// Labels with which the Service matches the `--service-selector` of every agent.
    service_labels: BTreeMap<String, String>,
}

/// Returns the name of a Node's echo Pod.
pub(super) fn echo_pod(index: usize) -> String {
    format!("echo-{}", index + 1)
}

/// Returns the name of a Node's client Pod.
pub(super) fn client_pod(index: usize) -> String {
    format!("client-{}", index + 1)
}

impl<'a> Scene<'a> {
    /// Chooses the names of the objects, without creating them.
    pub(super) fn new(kubectl: Kubectl<'a>, sites: &'a [Site]) -> anyhow::Result<Self> {
        if let Some((site, namespaces)) = sites.iter().find_map(|site| Some((site, site.namespaces()?))) {
            bail!(
                "the agent on Node {} reads only Services of the namespaces {namespaces} (--namespaces), and the test's \
                 Service is in a Namespace of its own: with --node, name Nodes whose agents read all namespaces",
                site.node
            );
        }
        let selectors = sites.iter().filter_map(Site::service_selector).collect();
        let service_labels = label_selector::satisfying(&selectors).map_err(|requirements| {
            anyhow!(
                "the test has one Service, and its labels cannot satisfy the requirements `{requirements}` of the \
                 agents' --service-selector"
            )
        })?;
        Ok(Self { kubectl, namespace: TemporaryNamespace::new(kubectl, &NAMESPACE), sites, service_labels })
    }

    /// Creates all objects of the test.
    pub(super) fn create(&self, image: Option<&str>) -> anyhow::Result<()> {
        self.namespace.create()?;
        // The Pods use a service account of their own, because Kubernetes may create the Namespace's service account
        // `default` later than this command creates the Pods.
        let account = self.namespace.object("ServiceAccount", SERVICE);
        let mut objects = vec![account, self.service()];
        for (index, site) in self.sites.iter().enumerate() {
            let image = image.unwrap_or(&site.agent.image);
            objects.push(self.pod(&echo_pod(index), "echo", site, image));
            objects.push(self.pod(&client_pod(index), "client", site, image));
        }
        self.kubectl.create(&json!({"apiVersion": "v1", "kind": "List", "items": objects}))
    }

    /// Returns the protocols that at least one agent of the test's Nodes maps. An agent ignores Service ports whose
    /// protocol it does not map.
    fn protocols(&self) -> BTreeSet<Protocol> {
        self.sites.iter().flat_map(Site::protocols).collect()
    }

    fn service(&self) -> Value {
        let mut service = self.namespace.object("Service", SERVICE);
        let ports: Vec<Value> = self
            .protocols()
            .iter()
            .map(|it| json!({"name": it.as_str(), "port": port(*it), "protocol": it.as_str().to_ascii_uppercase()}))
            .collect();
        let keys = AnnotationKeys::new(&self.kubectl.connection.annotation_domain);
        service["metadata"]["labels"] = json!(self.service_labels);
        service["metadata"]["annotations"] = json!({keys.enabled: "true"});
        service["spec"] = json!({
            "selector": {NAME_LABEL: NAMESPACE.label, ROLE: "echo"}, "ports": ports, "ipFamilyPolicy": "PreferDualStack",
        });
        service
    }

    /// Returns the name that a Pod's answers contain. The name includes the Namespace, because a concurrent run of the
    /// test has Pods with the same names.
    fn identity(&self, pod: &str) -> String {
        format!("{pod}.{}", self.namespace.name)
    }

    /// Builds a Pod that Pod Security Admission admits at the level "restricted".
    fn pod(&self, name: &str, role: &str, site: &Site, image: &str) -> Value {
        let mut pod = self.namespace.object("Pod", name);
        pod["metadata"]["labels"][ROLE] = json!(role);
        let ports = self.protocols().into_iter().map(|protocol| Listen { protocol, port: port(protocol) }.to_string());
        let (identity, ports) = (self.identity(name), ports.collect::<Vec<_>>().join(","));
        let command = [PROGRAM, COMMAND, "serve", "--name", &identity, "--listen", &ports];
        let container = json!({
            "name": CONTAINER,
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": command,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {
                "requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"},
                "limits": {"cpu": "500m", "memory": "128Mi", "ephemeral-storage": "16Mi"},
            },
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
        });
        let uid = 65_534;
        pod["spec"] = json!({
            "nodeName": site.node,
            "serviceAccountName": SERVICE,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 1,
            // If this command is killed before it has removed the Pods, Kubernetes stops the Pods after this time in
            // seconds.
            "activeDeadlineSeconds": 600,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": uid, "runAsGroup": uid, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        });
        pod
    }

    /// Reads the echo Pods with their published node ports, and the IP families of the Service.
    pub(super) fn servers(&self) -> anyhow::Result<(Vec<Server>, BTreeSet<Family>)> {
        let cluster = cluster::read(self.kubectl, Some(&self.namespace.name))?;
        let find = |name: &str| {
            let mut pods = cluster.pods.iter().map(|(pod, _node)| pod);
            pods.find(|pod| *pod.key.name == *name).with_context(|| format!("Pod {name} has been deleted"))
        };
        let ips = |ips: &[IpAddr]| ips.iter().copied().collect::<BTreeSet<_>>();
        let servers = self.sites.iter().enumerate().map(|(index, site)| {
            let (echo, client) = (find(&echo_pod(index))?, find(&client_pod(index))?);
            let published = echo.annotation.as_deref().map(annotation::published_entries).unwrap_or_default();
            Ok(Server {
                node: site.node.clone(),
                pod: echo_pod(index),
                identity: self.identity(&echo_pod(index)),
                pod_ips: ips(&echo.ips),
                client_ips: ips(&client.ips),
                node_ips: site.node_ips.clone(),
                device_ips: site.device_ips.clone(),
                pod_ranges: site.pod_ranges.clone(),
                protocols: site.protocols(),
                serves_local_pods: site.serves_local_pods(),
                entries: published.0,
            })
        });
        let families = cluster.services.iter().flat_map(|service| service.families.iter().copied()).collect();
        Ok((servers.collect::<anyhow::Result<_>>()?, families))
    }

    /// Removes the annotation that requests node ports.
    pub(super) fn disable(&self) -> anyhow::Result<()> {
        let keys = AnnotationKeys::new(&self.kubectl.connection.annotation_domain);
        let removal = format!("{}-", keys.enabled);
        self.kubectl.output(&["annotate", "service", SERVICE, "--namespace", &self.namespace.name, &removal]).map(drop)
    }

    /// Returns the arguments of kubectl that run a command of `npl-agent echo` in a Pod.
    pub(super) fn exec_arguments<'b>(
        &'b self,
        pod: &'b str,
        options: &[&'b str],
        arguments: &[&'b str],
    ) -> Vec<&'b str> {
        nodes::exec_in([&self.namespace.name, pod, CONTAINER], options, &[&[COMMAND], arguments].concat())
    }
}

#[cfg(test)]
#[path = "scene_tests.rs"]
mod tests;

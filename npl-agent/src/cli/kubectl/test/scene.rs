// SPDX-License-Identifier: Apache-2.0
//! The objects of the test: a Namespace with a Service, and on each Node an echo Pod, which the Service selects, and a
//! client Pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::unix::process::CommandExt as _,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{interrupt::Interrupt, site::Site};
use crate::{
    cli::{
        kubectl::{
            Kubectl, cluster,
            nodes::{self, PROGRAM},
            text_at,
        },
        note,
    },
    core::{
        model::{Family, Protocol},
        path_test::Server,
        publish::annotation,
    },
    kube::AnnotationKeys,
};

/// The label of the test's Namespaces, by which a later test finds Namespaces that were not removed.
const LABEL: (&str, &str) = ("app.kubernetes.io/name", "npl-test");
/// The label of the Pods, by which the Service selects the echo Pods.
const ROLE: &str = "app.kubernetes.io/component";
const SERVICE: &str = "echo";
/// The container of each Pod.
const CONTAINER: &str = "echo";
/// The hidden command of `npl-agent` that the Pods run.
const COMMAND: &str = "echo";
const PORT: u16 = 7_777;
/// The limit for the start of the Pods, whose image the Nodes have pulled already.
const START: Duration = Duration::from_secs(40);
/// The limit for the publication of all node ports.
pub(super) const PUBLICATION: Duration = Duration::from_secs(15);
/// The limit for the removal of all objects.
const REMOVAL: &str = "--timeout=60s";

/// The objects of a running test. Dropping it removes them.
#[derive(Debug)]
pub(super) struct Scene<'a> {
    kubectl: Kubectl<'a>,
    pub(super) namespace: String,
    pub(super) sites: &'a [Site],
}

/// Writes the names of Namespaces that another test has not removed to standard error.
pub(super) fn name_leftovers(kubectl: Kubectl<'_>) -> anyhow::Result<()> {
    let selector = format!("{}={}", LABEL.0, LABEL.1);
    for namespace in kubectl.list(&["namespaces", "--selector", &selector])? {
        let name = text_at(&namespace, "/metadata/name");
        if namespace.pointer("/metadata/deletionTimestamp").is_none() {
            note(&format!(
                "Namespace {name} is of another test: unless it is still running, `kubectl delete namespace {name}`"
            ));
        }
    }
    Ok(())
}

/// The name of a Node's echo Pod.
pub(super) fn echo_pod(index: usize) -> String {
    format!("echo-{}", index + 1)
}

/// The name of a Node's client Pod.
pub(super) fn client_pod(index: usize) -> String {
    format!("client-{}", index + 1)
}

impl<'a> Scene<'a> {
    /// Creates all objects.
    pub(super) fn create(kubectl: Kubectl<'a>, sites: &'a [Site], image: Option<&str>) -> anyhow::Result<Self> {
        let suffix: String = std::iter::repeat_with(fastrand::lowercase).take(5).collect();
        let scene = Self { kubectl, namespace: format!("npl-test-{suffix}"), sites };
        kubectl.create(&scene.namespace_object())?;
        // The Pods' own service account exists before them; the controller creates `default` later.
        let account = scene.object("ServiceAccount", "v1", SERVICE, &BTreeMap::new());
        let mut objects = vec![account, scene.service()];
        for (index, site) in sites.iter().enumerate() {
            let image = image.unwrap_or(&site.agent.image);
            objects.push(scene.pod(&echo_pod(index), "echo", site, image));
            objects.push(scene.pod(&client_pod(index), "client", site, image));
        }
        kubectl.create(&json!({"apiVersion": "v1", "kind": "List", "items": objects}))?;
        Ok(scene)
    }

    fn namespace_object(&self) -> Value {
        let labels = json!({
            LABEL.0: LABEL.1,
            "pod-security.kubernetes.io/enforce": "restricted",
        });
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}})
    }

    fn object(&self, kind: &str, version: &str, name: &str, labels: &BTreeMap<String, String>) -> Value {
        let mut labels = labels.clone();
        labels.insert(LABEL.0.to_owned(), LABEL.1.to_owned());
        let metadata = json!({"name": name, "namespace": self.namespace, "labels": labels});
        json!({"apiVersion": version, "kind": kind, "metadata": metadata})
    }

    /// The protocols of all agents; an agent ignores Service ports of other protocols.
    fn protocols(&self) -> BTreeSet<Protocol> {
        self.sites.iter().flat_map(Site::protocols).collect()
    }

    fn service(&self) -> Value {
        let labels = self.sites.iter().flat_map(Site::service_labels).collect();
        let mut service = self.object("Service", "v1", SERVICE, &labels);
        let ports: Vec<Value> = self
            .protocols()
            .iter()
            .map(|it| json!({"name": it.as_str(), "port": PORT, "protocol": it.as_str().to_ascii_uppercase()}))
            .collect();
        let keys = AnnotationKeys::new(&self.kubectl.connection.annotation_domain);
        service["metadata"]["annotations"] = json!({keys.enabled: "true"});
        service["spec"] = json!({
            "selector": {LABEL.0: LABEL.1, ROLE: "echo"}, "ports": ports, "ipFamilyPolicy": "PreferDualStack",
        });
        service
    }

    /// A Pod that Pod Security Admission admits on the level "restricted".
    fn pod(&self, name: &str, role: &str, site: &Site, image: &str) -> Value {
        let labels = [(ROLE.to_owned(), role.to_owned())].into();
        let mut pod = self.object("Pod", "v1", name, &labels);
        let protocols: Vec<&str> = self.protocols().into_iter().map(Protocol::as_str).collect();
        let command = [
            PROGRAM,
            COMMAND,
            "serve",
            "--name",
            name,
            "--port",
            &PORT.to_string(),
            "--protocols",
            &protocols.join(","),
        ];
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
            // If this command is killed before it removes the Pods, Kubernetes stops them after this time.
            "activeDeadlineSeconds": 600,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": uid, "runAsGroup": uid, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        });
        pod
    }

    /// Waits until every Pod runs.
    pub(super) fn wait_for_pods(&self, interrupt: &Interrupt) -> anyhow::Result<()> {
        let mut obstacles = Vec::new();
        let are_running = interrupt.until(START, || {
            obstacles.clear();
            for pod in self.kubectl.list(&["pods", "--namespace", &self.namespace])? {
                match progress(&pod) {
                    Progress::Running => {}
                    Progress::Waiting(reason) => obstacles.push(reason),
                    Progress::Ended(reason) => {
                        bail!("{reason}: give --image if the agent's image is older than this command")
                    }
                }
            }
            Ok(obstacles.is_empty().then_some(()))
        })?;
        ensure!(are_running.is_some(), "after {} s: {}", START.as_secs(), obstacles.join("; "));
        Ok(())
    }

    /// The echo Pods with their published node ports, and the IP families of the Service.
    pub(super) fn servers(&self) -> anyhow::Result<(Vec<Server>, BTreeSet<Family>)> {
        let cluster = cluster::read(self.kubectl, Some(&self.namespace))?;
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
                pod_ips: ips(&echo.ips),
                client_ips: ips(&client.ips),
                node_ips: site.node_ips.clone(),
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
        self.kubectl.output(&["annotate", "service", SERVICE, "--namespace", &self.namespace, &removal]).map(drop)
    }

    /// The arguments of kubectl that run a command of `npl-agent echo` in a Pod.
    pub(super) fn exec_arguments<'b>(
        &'b self,
        pod: &'b str,
        options: &[&'b str],
        arguments: &[&'b str],
    ) -> Vec<&'b str> {
        nodes::exec_in([&self.namespace, pod, CONTAINER], options, &[&[COMMAND], arguments].concat())
    }

    fn remove(&self) -> anyhow::Result<()> {
        let arguments = ["delete", "namespace", &self.namespace, "--ignore-not-found", "--wait", REMOVAL];
        let mut command = self.kubectl.command(&arguments);
        // A second Ctrl-C does not interrupt the removal.
        let output = command.process_group(0).output().context("run kubectl")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim_end());
        Ok(())
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            note(&format!("Namespace {0} is left, `kubectl delete namespace {0}`: {error:#}", self.namespace));
        }
    }
}

/// The state of a Pod's container.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Running,
    Waiting(String),
    Ended(String),
}

fn progress(pod: &Value) -> Progress {
    let name = text_at(pod, "/metadata/name");
    let state = |pointer: &str| pod.pointer(&format!("/status/containerStatuses/0{pointer}"));
    if let Some(ended) = state("/lastState/terminated").or_else(|| state("/state/terminated")) {
        let message = text_at(ended, "/message").trim_end();
        return Progress::Ended(format!(
            "the container of Pod {name} has ended: {} {message}",
            text_at(ended, "/reason")
        ));
    }
    if text_at(pod, "/status/phase") == "Failed" {
        let (reason, message) = (text_at(pod, "/status/reason"), text_at(pod, "/status/message"));
        return Progress::Ended(format!("Pod {name} has failed: {reason} {message}"));
    }
    if state("/state/running").is_some() {
        return Progress::Running;
    }
    let text = |pointer| state(pointer).and_then(Value::as_str).unwrap_or_default();
    let reason = format!("{} {}", text("/state/waiting/reason"), text("/state/waiting/message"));
    Progress::Waiting(format!("Pod {name} does not run: {}", reason.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_that_has_ended_is_reported_at_once() {
        let pod = |status: Value| json!({"metadata": {"name": "echo-1"}, "status": {"containerStatuses": [status]}});
        assert_eq!(progress(&pod(json!({"state": {"running": {}}}))), Progress::Running);
        let waiting = json!({"state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no image"}}});
        let text = "Pod echo-1 does not run: ErrImageNeverPull no image";
        assert_eq!(progress(&pod(waiting)), Progress::Waiting(text.to_owned()));
        let ended = json!({"reason": "Error", "message": "unrecognized subcommand 'echo'\n"});
        let back_off =
            json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}});
        let text = "the container of Pod echo-1 has ended: Error unrecognized subcommand 'echo'";
        assert_eq!(progress(&pod(back_off)), Progress::Ended(text.to_owned()));
    }
}

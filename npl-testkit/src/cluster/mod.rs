// SPDX-License-Identifier: Apache-2.0
//! Kubernetes objects for tests without a kubelet. In place of the kubelet, this module writes the status of Pods and
//! Nodes.

mod annotations;
mod mapping;
mod objects;

use std::ffi::OsStr;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

pub use self::annotations::{AnnotationLog, Seen};
pub use self::mapping::Entry;
pub use self::objects::{PodObject, Port, ServiceObject};
use crate::api_client::ApiClient;
use crate::control_plane::ControlPlane;
use crate::{poll, tools};

/// The time limit of kubectl and Helm for rollouts, deletions, drains and other waits. This limit is far above the
/// usual times even on a slow machine, because no caller expects a timeout.
const COMMAND_LIMIT: Duration = Duration::from_mins(5);

/// The annotation that enables a Service, with the default prefix.
pub const ENABLED_ANNOTATION: &str = "nodeportlocal.antrea.io/enabled";

/// The annotation that the agent writes to Pods, with the default prefix.
pub const MAPPING_ANNOTATION: &str = "nodeportlocal.antrea.io";

/// The kinds of objects in a manifest that grant access to the API server. [`Cluster::apply_access`] skips other kinds,
/// such as the DaemonSet, which needs a kubelet.
const ACCESS_KINDS: [&str; 6] =
    ["Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"];

/// A client of a control plane that creates, changes and reads Kubernetes objects as an administrator.
#[derive(Debug)]
pub struct Cluster {
    client: ApiClient,
    kubeconfig: std::path::PathBuf,
    kubectl_cache: std::path::PathBuf,
    netns: Option<crate::netns::Netns>,
}

/// Returns the mapping annotation of a Pod object.
pub fn annotation_of(pod: &Value) -> Option<&str> {
    annotations::annotation(pod, MAPPING_ANNOTATION)
}

/// Returns the option `--timeout` of kubectl and Helm: five minutes, which [`poll::patience`] extends.
pub fn timeout_option() -> &'static str {
    static OPTION: OnceLock<String> = OnceLock::new();
    OPTION.get_or_init(|| format!("--timeout={}s", (COMMAND_LIMIT * poll::patience()).as_secs()))
}

/// Returns the API path that lists the Pods of a namespace with a label. The label has the form `app=web`.
pub fn pods_with_label(namespace: &str, label: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods?labelSelector={}", label.replace('=', "%3D"))
}

impl Cluster {
    /// Creates a client whose requests go to `plane` with administrator rights.
    pub fn new(plane: &ControlPlane) -> Result<Self> {
        Ok(Self {
            client: plane.client()?,
            kubeconfig: plane.admin_kubeconfig(),
            kubectl_cache: plane.directory().join("kubectl"),
            netns: plane.netns().cloned(),
        })
    }

    /// Returns `self` with a client for threads that already run in the control plane's namespace: requests need no
    /// extra thread to enter the namespace.
    #[must_use]
    pub fn from_inside(self) -> Self {
        Self { client: self.client.from_inside(), ..self }
    }

    /// The API client, for requests without a method of this type.
    pub fn client(&self) -> &ApiClient {
        &self.client
    }

    /// Applies the objects of a manifest that grant access.
    pub fn apply_access(&self, manifest: &Path) -> Result<()> {
        let text = fs::read_to_string(manifest).with_context(|| format!("read {}", manifest.display()))?;
        let access: Vec<&str> = text.split("\n---").filter(|document| is_access(document)).collect();
        let mut command = self.kubectl_command(&["apply", "--filename", "-"])?;
        tools::output_with_input(&mut command, &access.join("\n---"))
            .with_context(|| format!("apply the access rules of {}", manifest.display()))
            .map(drop)
    }

    /// Runs `kubectl` as an administrator and returns its output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        tools::output(&mut self.kubectl_command(arguments)?)
    }

    pub fn create_namespace(&self, name: &str) -> Result<()> {
        self.client.create("/api/v1/namespaces", &json!({"metadata": {"name": name}})).map(drop)
    }

    /// Creates a ready Node with these addresses.
    pub fn create_node(&self, name: &str, addresses: &[IpAddr]) -> Result<()> {
        self.client.create("/api/v1/nodes", &json!({"metadata": {"name": name}}))?;
        self.set_node_addresses(name, addresses)
    }

    pub fn set_node_addresses(&self, name: &str, addresses: &[IpAddr]) -> Result<()> {
        let addresses: Vec<Value> =
            addresses.iter().map(|ip| json!({"type": "InternalIP", "address": ip.to_string()})).collect();
        let status = json!({"addresses": addresses, "conditions": [{"type": "Ready", "status": "True"}]});
        self.client.merge_patch(&format!("/api/v1/nodes/{name}/status"), &json!({"status": status})).map(drop)
    }

    /// Creates a Pod, which has no address until [`Self::set_pod_running`].
    pub fn create_pod(&self, pod: &PodObject) -> Result<()> {
        self.client.create(&pods_path(&pod.namespace), &pod.to_json()).map(drop)
    }

    /// Sets the status of a running and ready Pod, as a kubelet does.
    pub fn set_pod_running(&self, namespace: &str, name: &str, host: IpAddr, pod_ips: &[IpAddr]) -> Result<()> {
        let ips: Vec<Value> = pod_ips.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
        let status = json!({
            "phase": "Running",
            "hostIP": host.to_string(),
            "podIP": pod_ips.first().map(ToString::to_string),
            "podIPs": ips,
            "conditions": [{"type": "Ready", "status": "True"}],
        });
        self.patch_pod_status(namespace, name, &status)
    }

    /// Sets the phase of a Pod that has ended, as a kubelet does: `Succeeded` or `Failed`.
    pub fn set_pod_phase(&self, namespace: &str, name: &str, phase: &str) -> Result<()> {
        self.patch_pod_status(namespace, name, &json!({"phase": phase}))
    }

    /// Deletes a Pod without a grace period.
    pub fn delete_pod(&self, namespace: &str, name: &str) -> Result<()> {
        self.client.delete(&pod_path(namespace, name))
    }

    pub fn create_service(&self, service: &ServiceObject) -> Result<()> {
        self.client.create(&services_path(&service.namespace), &service.to_json()).map(drop)
    }

    pub fn delete_service(&self, namespace: &str, name: &str) -> Result<()> {
        self.client.delete(&format!("{}/{name}", services_path(namespace)))
    }

    /// Enables or disables node ports for a Service.
    pub fn set_service_enabled(&self, namespace: &str, name: &str, enabled: bool) -> Result<()> {
        let value = if enabled { json!("true") } else { Value::Null };
        let patch = json!({"metadata": {"annotations": {ENABLED_ANNOTATION: value}}});
        self.client.merge_patch(&format!("{}/{name}", services_path(namespace)), &patch).map(drop)
    }

    /// Returns the annotation that the agent wrote to a Pod; `None` if the Pod or the annotation does not exist.
    pub fn pod_annotation(&self, namespace: &str, name: &str) -> Result<Option<String>> {
        let pod = self.client.find(&pod_path(namespace, name))?;
        Ok(pod.as_ref().and_then(annotation_of).map(str::to_owned))
    }

    /// Waits until a Pod's annotation satisfies `wanted`.
    pub fn wait_for_annotation(
        &self,
        namespace: &str,
        name: &str,
        limit: Duration,
        wanted: impl Fn(Option<&str>) -> bool,
    ) -> Result<Option<String>> {
        let what = format!("the annotation of Pod {namespace}/{name}");
        let condition = || self.pod_annotation(namespace, name).ok().filter(|value| wanted(value.as_deref()));
        poll::until(&what, limit, condition).map(|(value, _)| value)
    }

    /// Starts to record the mapping annotations of a namespace's Pods with timestamps.
    pub fn watch_mappings(&self, namespace: &str, limit: Duration) -> Result<AnnotationLog> {
        AnnotationLog::start(&self.client, &pods_path(namespace), MAPPING_ANNOTATION, limit)
    }

    /// Starts to record which Services of a namespace are enabled, with timestamps.
    pub fn watch_enabled(&self, namespace: &str, limit: Duration) -> Result<AnnotationLog> {
        AnnotationLog::start(&self.client, &services_path(namespace), ENABLED_ANNOTATION, limit)
    }

    fn patch_pod_status(&self, namespace: &str, name: &str, status: &Value) -> Result<()> {
        let path = format!("{}/status", pod_path(namespace, name));
        self.client.merge_patch(&path, &json!({"status": status})).map(drop)
    }

    /// Returns a command that runs `program` with the administrator's kubeconfig, in the namespace of the API server.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = match &self.netns {
            Some(netns) => netns.command(program)?,
            None => Command::new(program),
        };
        command.env("KUBECONFIG", &self.kubeconfig).env("KUBECACHEDIR", &self.kubectl_cache);
        Ok(command)
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = self.command("kubectl")?;
        command.args(arguments);
        Ok(command)
    }
}

fn is_access(document: &str) -> bool {
    let kind = document.lines().find_map(|line| line.strip_prefix("kind:")).unwrap_or_default();
    ACCESS_KINDS.contains(&kind.trim())
}

fn pods_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods")
}

fn pod_path(namespace: &str, name: &str) -> String {
    format!("{}/{name}", pods_path(namespace))
}

fn services_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/services")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_access_rules_of_a_manifest_are_applied() {
        assert!(is_access("# comment\napiVersion: v1\nkind: ServiceAccount\nmetadata: {}"));
        assert!(!is_access("apiVersion: apps/v1\nkind: DaemonSet\nspec:\n  kind: Role"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Runs commands of the agent on Nodes where no agent runs, in Pods that exist for one command of the plug-in only:
//! `kubectl npl on NODE --create-pod` and `kubectl npl bundle --create-pods`.

use std::{
    process::{ExitCode, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{
    Kubectl, child,
    interrupt::Interrupt,
    nodes::{CONTAINER, PROGRAM, exec_in},
    temporary::{Kind, TemporaryNamespace, name_leftovers},
};
use crate::{
    cli::note,
    config::kubectl_args::OnArgs,
    core::{sizes::CONTAINER_LIMIT, verdict::HealthVerdict},
};

/// The kind of Namespace that `kubectl npl on --create-pod` creates. The level `privileged` admits Pods with the host
/// network and with `hostPath` volumes.
const NAMESPACE: Kind = Kind { label: "npl-on", level: "privileged" };
/// The name of the Pods' `ServiceAccount`, which has no rights.
const ACCOUNT: &str = "npl-agent";
/// The time limit for the start of the Pod, whose image the Node may have to pull.
const START: Duration = Duration::from_mins(3);
/// The time limit of the command, after which Kubernetes stops the Pods.
pub(super) const LIMIT: Duration = Duration::from_hours(1);

/// Runs a command in a new Pod on the Node, with this process's standard output, and returns the command's exit code.
/// Removes the Pod afterwards, also after a signal. Returns 2 if the command has succeeded, but the Pod could not be
/// removed.
pub(super) fn run(kubectl: Kubectl<'_>, args: &OnArgs, image: &str) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::watch(LIMIT)?;
    run_with(kubectl.within(&interrupt), args, image, &interrupt)
}

fn run_with(kubectl: Kubectl<'_>, args: &OnArgs, image: &str, interrupt: &Interrupt) -> anyhow::Result<ExitCode> {
    // Kubernetes deletes a Pod whose Node does not exist, and reports no error, so this command checks first that the
    // Node exists.
    kubectl.output(&["get", "node", &args.node, "--output", "name"])?;
    let pods = NodePods::new(kubectl, &NAMESPACE, image, interrupt)?;
    note(&format!("no agent runs on Node {}: {}", args.node, pods.description()));
    let code = in_pod(kubectl, &pods, args, interrupt);
    let is_removed = pods.remove();
    Ok(exit_code(code?, is_removed))
}

fn in_pod(
    kubectl: Kubectl<'_>,
    pods: &NodePods<'_>,
    args: &OnArgs,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<i32>> {
    pods.create()?;
    pods.start(&args.node)?;
    let arguments: Vec<&str> = args.arguments.iter().map(String::as_str).collect();
    let mut command = kubectl.command(&pods.exec_arguments(&args.node, &arguments));
    let running = command.stdin(Stdio::null()).spawn().context("run kubectl: it must be on the PATH")?;
    let output = child::output(running, || interrupt.check())?;
    interrupt.check()?;
    Ok(output.status.code())
}

/// The Pods of one command on Nodes where no agent runs, in a temporary Namespace.
#[derive(Debug)]
pub(super) struct NodePods<'a> {
    kubectl: Kubectl<'a>,
    namespace: TemporaryNamespace<'a>,
    image: &'a str,
    interrupt: &'a Interrupt,
}

impl<'a> NodePods<'a> {
    /// Chooses the name of the Namespace, without creating the Namespace. Reports on standard error the Namespaces that
    /// an earlier command has not removed.
    pub(super) fn new(
        kubectl: Kubectl<'a>,
        kind: &'static Kind,
        image: &'a str,
        interrupt: &'a Interrupt,
    ) -> anyhow::Result<Self> {
        name_leftovers(kubectl, kind)?;
        Ok(Self { kubectl, namespace: TemporaryNamespace::new(kubectl, kind), image, interrupt })
    }

    /// Describes the Pods to the user.
    pub(super) fn description(&self) -> String {
        format!(
            "creating a Pod there in Namespace {}, on the host network and with CAP_BPF and CAP_NET_ADMIN; image {}",
            self.namespace.name, self.image
        )
    }

    /// Creates the Namespace and the Pods' `ServiceAccount`.
    pub(super) fn create(&self) -> anyhow::Result<()> {
        self.namespace.create()?;
        self.kubectl.create(&self.namespace.object("ServiceAccount", ACCOUNT))
    }

    /// Creates the Pod of a Node, and waits until it runs. The Pod has the name of the Node.
    pub(super) fn start(&self, node: &str) -> anyhow::Result<()> {
        self.kubectl.create(&pod(&self.namespace, node, self.image))?;
        self.namespace.wait_for_pod(node, self.interrupt, START)
    }

    /// Returns the arguments with which kubectl runs a command in the Pod of a Node.
    pub(super) fn exec_arguments<'b>(&'b self, node: &'b str, arguments: &[&'b str]) -> Vec<&'b str> {
        exec_in([&self.namespace.name, node, CONTAINER], &[], arguments)
    }

    /// Removes the Namespace with all Pods. If the removal fails, writes a command for the user to standard error, and
    /// returns `false`.
    pub(super) fn remove(&self) -> bool {
        self.namespace.remove(self.interrupt)
    }
}

/// Returns the exit code of this process. `code` is the command's exit code; `None` if a signal has ended kubectl.
fn exit_code(code: Option<i32>, is_removed: bool) -> ExitCode {
    match code.and_then(|code| u8::try_from(code).ok()) {
        Some(0) if !is_removed => ExitCode::from(HealthVerdict::CannotTell.exit_code()),
        Some(code) => ExitCode::from(code),
        None => ExitCode::FAILURE,
    }
}

/// Builds a Pod with the rights of the agent's container, but without access to the API server. The container gets the
/// whole BPF file system, as in the DaemonSet that removes kernel state. If the container mounted only NPL's folder,
/// the container runtime would create this folder on a Node that has none.
fn pod(namespace: &TemporaryNamespace<'_>, node: &str, image: &str) -> Value {
    let memory_limit = format!("{}Mi", CONTAINER_LIMIT >> 20);
    let container = json!({
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [PROGRAM, "echo", "wait"],
        "env": [
            {"name": "NPL_BPFFS", "value": "/bpf"},
            {"name": "NPL_RUNTIME_DIR", "value": "/run/npl"},
            {"name": "NPL_CGROUP", "value": "/cgroup"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": memory_limit}},
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "privileged": false,
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN"]},
        },
        "volumeMounts": [
            {"name": "bpffs", "mountPath": "/bpf"},
            {
                "name": "cgroup", "mountPath": "/cgroup", "readOnly": true, "mountPropagation": "HostToContainer",
            },
        ],
    });
    let mut pod = namespace.object("Pod", node);
    pod["spec"] = json!({
        "nodeName": node,
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "hostNetwork": true,
        "dnsPolicy": "Default",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        // If this command is killed before it removes the Pod, Kubernetes stops the Pod after this time.
        "activeDeadlineSeconds": LIMIT.as_secs(),
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"type": "spc_t"}},
        "containers": [container],
        "volumes": [
            {"name": "bpffs", "hostPath": {"path": "/sys/fs/bpf", "type": "Directory"}},
            {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup"}},
        ],
    });
    pod
}

#[cfg(test)]
#[path = "node_pod_tests.rs"]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl on NODE --create-pod`: runs a command of the agent on a Node where no agent runs, in a Pod that exists
//! for this command only.

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
use crate::{cli::note, config::kubectl_args::OnArgs, core::verdict::HealthVerdict};

/// The label and the Pod Security level of the temporary Namespaces. The level `privileged` admits Pods with the host
/// network and with `hostPath` volumes.
const NAMESPACE: Kind = Kind { label: "npl-on", level: "privileged" };
const POD: &str = "npl-agent";
/// The time limit for the start of the Pod, whose image the Node may have to pull.
const START: Duration = Duration::from_mins(3);
/// The time limit of the command in the Pod.
const LIMIT: Duration = Duration::from_hours(1);

/// Runs a command in a new Pod on the Node, with this process's standard output, and returns its exit code. Removes the
/// Pod afterwards, also after a signal. The exit code is 2 if the command has succeeded, but the Pod could not be
/// removed.
pub(super) fn run(kubectl: Kubectl<'_>, args: &OnArgs, image: &str) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::watch(LIMIT)?;
    run_with(kubectl.within(&interrupt), args, image, &interrupt)
}

fn run_with(kubectl: Kubectl<'_>, args: &OnArgs, image: &str, interrupt: &Interrupt) -> anyhow::Result<ExitCode> {
    // Kubernetes deletes a Pod whose Node does not exist, and reports no error, so this command checks first that the
    // Node exists.
    kubectl.output(&["get", "node", &args.node, "--output", "name"])?;
    name_leftovers(kubectl, &NAMESPACE)?;
    let namespace = TemporaryNamespace::new(kubectl, &NAMESPACE);
    note(&format!(
        "no agent runs on Node {}: creating the Pod {}/{POD} there, on the host network and with CAP_BPF and CAP_NET_ADMIN; \
         image {image}",
        args.node, namespace.name
    ));
    let code = in_pod(kubectl, &namespace, args, image, interrupt);
    let is_removed = namespace.remove(interrupt);
    Ok(exit_code(code?, is_removed))
}

fn in_pod(
    kubectl: Kubectl<'_>,
    namespace: &TemporaryNamespace<'_>,
    args: &OnArgs,
    image: &str,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<i32>> {
    namespace.create()?;
    let objects = [namespace.object("ServiceAccount", POD), pod(namespace, &args.node, image)];
    kubectl.create(&json!({"apiVersion": "v1", "kind": "List", "items": objects}))?;
    namespace.wait_for_pods(interrupt, START)?;
    let arguments: Vec<&str> = args.arguments.iter().map(String::as_str).collect();
    let mut command = kubectl.command(&exec_in([&namespace.name, POD, CONTAINER], &[], &arguments));
    let running = command.stdin(Stdio::null()).spawn().context("run kubectl: it must be on the PATH")?;
    let output = child::output(running, || interrupt.check())?;
    interrupt.check()?;
    Ok(output.status.code())
}

/// Returns the exit code of this process. `code` is that of the command; `None` if a signal has ended kubectl.
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
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "384Mi"}},
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
    let mut pod = namespace.object("Pod", POD);
    pod["spec"] = json!({
        "nodeName": node,
        "serviceAccountName": POD,
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

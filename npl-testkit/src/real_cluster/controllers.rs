// SPDX-License-Identifier: Apache-2.0
//! What turns Deployments into Pods and puts Pods on Nodes: kube-controller-manager and kube-scheduler.

use std::path::Path;

use anyhow::Result;

use super::binaries::Programs;
use super::network::pod_range;
use crate::control_plane::{Account, ControlPlane, SERVICE_RANGE, write_secret};
use crate::netns::Netns;
use crate::process::Process;

const MANAGER: &str = "system:kube-controller-manager";
const SCHEDULER: &str = "system:kube-scheduler";

/// Both, beside the API server.
#[derive(Debug)]
pub(super) struct Controllers {
    // Held for their end only.
    _manager: Process,
    _scheduler: Process,
}

/// Whom the API server has to know. The manager has all rights, since its controllers share one account.
pub(super) fn accounts() -> [Account; 2] {
    [Account::new(MANAGER, &["system:masters"]), Account::new(SCHEDULER, &[])]
}

impl Controllers {
    /// Starts both.
    pub(super) fn start(plane: &ControlPlane, netns: &Netns, programs: &Programs) -> Result<Self> {
        let start = |name: &str, user: &str, flags: &[String]| -> Result<Process> {
            let kubeconfig = plane.directory().join(format!("{name}.kubeconfig"));
            write_secret(&kubeconfig, &plane.kubeconfig(user)?)?;
            let mut command = netns.command(programs.path(name))?;
            command.arg(format!("--kubeconfig={}", kubeconfig.display())).args(flags);
            // Each is alone, and nobody asks for its health or metrics.
            command.args(["--leader-elect=false", "--secure-port=0"]);
            Process::spawn(name, command, &plane.directory().join(format!("{name}.log")))
        };
        let manager = start("kube-controller-manager", MANAGER, &manager_flags(plane))?;
        let scheduler = start("kube-scheduler", SCHEDULER, &[])?;
        Ok(Self { _manager: manager, _scheduler: scheduler })
    }
}

fn manager_flags(plane: &ControlPlane) -> Vec<String> {
    let file = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    vec![
        file("service-account-private-key-file", &plane.signing_key()),
        file("root-ca-file", &plane.certificate()),
        // The usual one is a folder of the machine's own.
        file("flex-volume-plugin-dir", &plane.directory().join("volume-plugins")),
        format!("--cluster-cidr={}", pod_range()),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        // Every Node's range follows from its number.
        "--allocate-node-cidrs=false".to_owned(),
    ]
}

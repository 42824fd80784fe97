// SPDX-License-Identifier: Apache-2.0
//! Runs kube-controller-manager and kube-scheduler, which create Pods from Deployments and assign them to Nodes.

use std::path::Path;

use anyhow::Result;

use super::binaries::Programs;
use super::network::pod_range;
use crate::control_plane::{Account, ControlPlane, SERVICE_RANGE, write_secret};
use crate::netns::Netns;
use crate::process::Process;

const MANAGER: &str = "system:kube-controller-manager";
const SCHEDULER: &str = "system:kube-scheduler";

/// The processes kube-controller-manager and kube-scheduler.
#[derive(Debug)]
pub(super) struct Controllers {
    // The fields are never read. The fields keep the processes running, because dropping a field ends its process.
    _manager: Process,
    _scheduler: Process,
}

/// The API server accounts of both processes. The manager's account has all rights, because all controllers share this
/// account.
pub(super) fn accounts() -> [Account; 2] {
    [Account::new(MANAGER, &["system:masters"]), Account::new(SCHEDULER, &[])]
}

impl Controllers {
    /// Starts kube-controller-manager and kube-scheduler.
    pub(super) fn start(plane: &ControlPlane, netns: &Netns, programs: &Programs) -> Result<Self> {
        let start = |name: &str, user: &str, flags: &[String]| -> Result<Process> {
            let kubeconfig = plane.directory().join(format!("{name}.kubeconfig"));
            write_secret(&kubeconfig, &plane.kubeconfig(user)?)?;
            let mut command = netns.command(programs.path(name))?;
            command.arg(format!("--kubeconfig={}", kubeconfig.display())).args(flags);
            // Leader election is off, because each process is the only replica; the HTTPS port is closed, because no
            // program reads health or metrics.
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
        // The flag is set, because the default is a directory of the host.
        file("flex-volume-plugin-dir", &plane.directory().join("volume-plugins")),
        format!("--cluster-cidr={}", pod_range()),
        format!("--service-cluster-ip-range={SERVICE_RANGE}"),
        // kube-controller-manager need not assign Pod ranges, because each Node's range is derived from the Node's
        // number.
        "--allocate-node-cidrs=false".to_owned(),
        // By default, a manager that keeps running while the API server is unavailable for more than 50 s marks the
        // Pods of all Nodes as not ready afterwards. With leader election, as in usual clusters, the manager exits
        // during such an outage, and the next manager counts the time from its own start.
        "--node-monitor-grace-period=5m".to_owned(),
    ]
}

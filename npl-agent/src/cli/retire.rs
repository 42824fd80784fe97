// SPDX-License-Identifier: Apache-2.0
//! `npl-agent retire`: makes the agent of every Node withdraw the node ports and remove NPL's kernel state. The Helm
//! chart runs this command before an uninstallation.

use super::print;
use crate::{
    config::args::RetireArgs,
    kube::retire::{Target, retire_all},
};

/// Requests the retirement of every Node, and prints the progress until every Node is retired.
///
/// # Errors
///
/// If the API server refuses a request, or a Node is not retired within the time limit.
pub async fn retire(args: RetireArgs) -> anyhow::Result<()> {
    let RetireArgs { kubeconfig, namespace, daemon_sets, timeout } = args;
    let target = Target { kubeconfig, namespace, daemon_sets, timeout };
    let mut printed = Ok(());
    let retired = retire_all(&target, |progress| {
        let result = print(&format!("{progress}\n"));
        printed = std::mem::replace(&mut printed, Ok(())).and(result);
    });
    retired.await?;
    printed
}

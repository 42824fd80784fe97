// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl check`: compares annotations with Services and Node addresses.

use std::{collections::BTreeSet, process::ExitCode, thread, time::Duration};

use super::{Kubectl, cluster};
use crate::{
    cli::{print, print_json, table},
    config::{args::OutputFormat, kubectl_args::CheckArgs},
    core::check::{Inconsistency, check},
};

/// Prints every inconsistency that lasts for the settling time (`--settle`). The exit code is 1 if an inconsistency was
/// printed, otherwise 0.
pub(super) fn show(kubectl: Kubectl<'_>, args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let found = lasting(kubectl, args.namespace.as_deref(), args.settle)?;
    match args.output {
        OutputFormat::Json => print_json(&found)?,
        OutputFormat::Table | OutputFormat::Wide if found.is_empty() => {
            print("Every annotation matches its Services and its Node.\n")?;
        }
        OutputFormat::Table | OutputFormat::Wide => {
            let cells = found.iter().map(|it| {
                let pod = format!("{}/{}", it.namespace, it.pod);
                vec![it.kind.as_str().to_owned(), pod, it.node.clone(), it.text.clone(), it.page.to_owned()]
            });
            print(&table(&["INCONSISTENCY", "POD", "NODE", "FOUND", "PAGE"], cells))?;
        }
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the inconsistencies that last for the time `settle`.
pub(super) fn lasting(
    kubectl: Kubectl<'_>,
    namespace: Option<&str>,
    settle: Duration,
) -> anyhow::Result<BTreeSet<Inconsistency>> {
    let found = check(&cluster::read_with_nodes(kubectl, namespace)?);
    if found.is_empty() || settle.is_zero() {
        return Ok(found);
    }
    // After a change of a Pod, its annotation is inconsistent for milliseconds, so only inconsistencies that last are
    // reported.
    thread::sleep(settle);
    Ok(&found & &check(&cluster::read_with_nodes(kubectl, namespace)?))
}

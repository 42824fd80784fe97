// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl check`: compares annotations with Services and Node addresses.

use std::{process::ExitCode, thread};

use super::{Kubectl, cluster};
use crate::{
    cli::{print, print_json, table},
    config::{args::OutputFormat, kubectl_args::CheckArgs},
    core::check::check,
};

/// Prints every inconsistency that lasts for the settling time (`--settle`). The exit code is 1 if an inconsistency was
/// printed, otherwise 0.
pub(super) fn show(kubectl: Kubectl<'_>, args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let namespace = args.namespace.as_deref();
    let mut found = check(&cluster::read_with_nodes(kubectl, namespace)?);
    if !found.is_empty() && !args.settle.is_zero() {
        // After a change of a Pod, its annotation is inconsistent for milliseconds, so only inconsistencies that last
        // are reported.
        thread::sleep(args.settle);
        found = &found & &check(&cluster::read_with_nodes(kubectl, namespace)?);
    }
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

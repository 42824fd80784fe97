// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask chart`: renders the manifests of `deploy/` and the page of the chart's values from the Helm chart,
//! their only source.

pub(crate) mod values;

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{paths, process, setup};

/// The directory of the chart.
const CHART: &str = "deploy/chart/npl";

/// The arguments of `cargo xtask chart`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Change no file, and fail if a manifest differs from the chart.
    #[arg(long)]
    check: bool,
}

/// A manifest in `deploy/` for users without Helm, rendered from the chart.
struct Manifest {
    path: &'static str,
    /// The comment lines at the beginning of the manifest, after the license line.
    about: &'static [&'static str],
    /// The arguments of `helm template` for this manifest.
    arguments: &'static [&'static str],
}

const MANIFESTS: [Manifest; 4] = [
    Manifest {
        path: "deploy/npl.yaml",
        about: &[
            "NodePortLocal for any CNI: `kubectl apply -f npl.yaml`. Needs Kubernetes 1.30 or newer, Linux 5.10 or newer on each Node,",
            "and a BPF file system at /sys/fs/bpf, which systemd mounts. Options, upgrade and uninstall: docs/install.md.",
        ],
        arguments: &["--set", "namespace.create=true"],
    },
    Manifest {
        path: "deploy/cleanup.yaml",
        about: &[
            "Removes NPL's kernel state from every Node whose agent was deleted without being retired. After",
            "deploy/npl.yaml was deleted, apply this manifest, wait for the rollout, and delete the manifest's objects",
            "again: docs/install.md.",
        ],
        arguments: &["--set", "namespace.create=true,cleanup.enabled=true,resourceQuota.enabled=false"],
    },
    Manifest {
        path: "deploy/npl-feed.yaml",
        about: &[
            "Serves the mappings to any load balancer by xDS, DNS and HTTP: `kubectl apply -f npl-feed.yaml`, beside npl.yaml.",
            "docs/load-balancers.md lists the interface that each load balancer reads, and its configuration.",
        ],
        arguments: &["--set", "feed.enabled=true", "--show-only", "templates/feed/*.yaml"],
    },
    Manifest {
        path: "deploy/openshift/scc.yaml",
        about: &["Lets the Pods of deploy/npl.yaml start on OpenShift."],
        arguments: &["--set", "openshift.enabled=true", "--show-only", "templates/openshift.yaml"],
    },
];

/// Renders all manifests and the page of the chart's values.
pub(crate) fn run(options: &Options) -> Result<()> {
    let helm = setup::helm()?;
    process::say("chart: rendering the manifests of deploy/");
    if !options.check {
        write_values_page()?;
    }
    let mut outdated = Vec::new();
    for manifest in &MANIFESTS {
        let mut command = Command::new(&helm);
        // The manifest omits the hook that retires Nodes, because only Helm runs hooks. Users of the manifest set
        // `NPL_RETIRE=true` to retire Nodes.
        command.args(["template", "npl", CHART, "--namespace", "npl-system", "--no-hooks"]).args(manifest.arguments);
        let rendered = manifest.rendered(&process::ask(command.current_dir(paths::root()))?);
        let path = paths::root().join(manifest.path);
        if fs::read_to_string(&path).is_ok_and(|text| text == rendered) {
            continue;
        }
        if options.check {
            outdated.push(manifest.path);
        } else {
            fs::write(&path, rendered).with_context(|| format!("write {}", manifest.path))?;
            process::detail(manifest.path);
        }
    }
    match outdated.as_slice() {
        [] => Ok(()),
        paths => bail!("{} differ from {CHART}: run `cargo xtask chart` and commit the result", paths.join(", ")),
    }
}

/// Writes the page of the chart's values.
pub(crate) fn write_values_page() -> Result<()> {
    let yaml = fs::read_to_string(paths::root().join(CHART).join("values.yaml")).context("read the chart's values")?;
    fs::write(paths::root().join(values::PAGE), values::page(&yaml)).context("write the page of the chart's values")
}

/// Fails if a manifest differs from the result of rendering the chart.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

impl Manifest {
    /// Converts Helm's output to the text of the manifest, without the labels and comments that describe an
    /// installation by Helm.
    fn rendered(&self, output: &str) -> String {
        let mut lines = vec!["# SPDX-License-Identifier: Apache-2.0".to_owned()];
        lines.extend(self.about.iter().map(|line| format!("# {line}")));
        lines.push(format!("# Rendered from {CHART} by `cargo xtask chart`; do not edit."));
        let is_of_helm = |line: &str| {
            line.starts_with("# Source: ")
                || line.trim_start().starts_with("helm.sh/chart: ")
                || line.trim() == "app.kubernetes.io/managed-by: Helm"
        };
        lines.extend(output.lines().filter(|line| !is_of_helm(line)).map(|line| line.trim_end().to_owned()));
        lines.push(String::new());
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::Manifest;

    #[test]
    fn a_manifest_has_its_header_and_no_label_of_helm() {
        let manifest = Manifest { path: "a.yaml", about: &["About."], arguments: &[] };
        let output = "---\n# Source: npl/templates/a.yaml\nkind: A\n  helm.sh/chart: npl-0.1.0\n  a: b  \n  \
                      app.kubernetes.io/managed-by: Helm\n";
        let expected = "# SPDX-License-Identifier: Apache-2.0\n# About.\n# Rendered from deploy/chart/npl by `cargo \
                        xtask chart`; do not edit.\n---\nkind: A\n  a: b\n";
        assert_eq!(manifest.rendered(output), expected);
    }
}

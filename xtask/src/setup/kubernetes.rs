// SPDX-License-Identifier: Apache-2.0
//! Builds the programs of a real Kubernetes cluster from Go modules that pin the versions.
//!
//! The cache has a separate directory for each part, because most commands need only the API server. The API server is
//! compiled first, then the components that a command needs, in the order of [`Component`].

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::parts::{CALICO, CILIUM, CONTROL_PLANE, FLANNEL, GRPC, HELM, KREW, KUBE_ROUTER, NODES, Part};
use super::{clang, prometheus};
use crate::{cache, files, paths, process};

/// With these flags, the compiler writes no debug information, which the linker would remove anyway, and inlines no
/// functions. Together, both flags shorten the build by 40 %.
const COMPILER_FLAGS: &str = "all=-dwarf=false -l";

/// The components that a command may need besides an API server, in the order in which they are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Component {
    /// `kubelet` and further programs that Nodes run.
    Nodes,
    /// The program `flannel` of the Pod network flannel.
    Flannel,
    /// The programs `calico-node` and `calico` of the Pod network Calico, and its `crds.yaml`.
    Calico,
    /// The program `kube-router` of the Pod network kube-router.
    KubeRouter,
    /// The programs `daemon` and `cilium-cni` of the Pod network Cilium, its custom resource definitions and the source
    /// of its kernel programs.
    Cilium,
    /// The C compiler `clang`, with which Cilium compiles its kernel programs.
    Clang,
    /// The program `helm`, which renders and installs the chart.
    Helm,
    /// The program `krew`, which installs the kubectl plug-in.
    Krew,
    /// The programs `prometheus` and `promtool`, which check alert rules and scrape metrics.
    Prometheus,
}

/// The set of components that a command needs.
pub(crate) type Extent = BTreeSet<Component>;

impl Component {
    /// Returns the components that Nodes need for these Pod networks. `every` stands for every network of the tests.
    pub(crate) fn of_networks(networks: &[String]) -> Extent {
        let names = |text: &str| networks.iter().any(|network| network.contains(text) || network == "every");
        let mut extent = Extent::from([Self::Nodes]);
        extent.extend(names("flannel").then_some(Self::Flannel));
        extent.extend(names("calico").then_some(Self::Calico));
        extent.extend(names("kube-router").then_some(Self::KubeRouter));
        extent.extend(names("cilium").then_some([Self::Cilium, Self::Clang]).into_iter().flatten());
        extent
    }

    /// The environment variable by which npl-testkit finds the component's directory.
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Self::Nodes => "NPL_KUBERNETES_DIR",
            Self::Flannel => "NPL_FLANNEL_DIR",
            Self::Calico => "NPL_CALICO_DIR",
            Self::KubeRouter => "NPL_KUBE_ROUTER_DIR",
            Self::Cilium => "NPL_CILIUM_DIR",
            Self::Clang => "NPL_CLANG_DIR",
            Self::Helm => "NPL_HELM_DIR",
            Self::Krew => "NPL_KREW_DIR",
            Self::Prometheus => "NPL_PROMETHEUS_DIR",
        }
    }

    fn obtain(self, cancelled: &AtomicBool) -> Result<PathBuf> {
        match self {
            Self::Nodes => obtain(&NODES, cancelled),
            Self::Flannel => obtain(&FLANNEL, cancelled),
            Self::Calico => obtain(&CALICO, cancelled),
            Self::KubeRouter => obtain(&KUBE_ROUTER, cancelled),
            Self::Cilium => obtain(&CILIUM, cancelled),
            Self::Clang => clang::obtain(),
            Self::Helm => obtain(&HELM, cancelled),
            Self::Krew => obtain(&KREW, cancelled),
            Self::Prometheus => prometheus::obtain(),
        }
    }
}

/// The directories with the built programs of a Kubernetes cluster.
#[derive(Debug, Clone)]
pub(crate) struct Kubernetes {
    /// The directory with `etcd` and `kube-apiserver`.
    pub(crate) control_plane: PathBuf,
    /// The directory of each component that the command needs.
    pub(crate) components: BTreeMap<Component, PathBuf>,
}

/// The time between two lines that report the progress.
const REPORT_EVERY: Duration = Duration::from_secs(20);

/// A build of Kubernetes on its own thread, because the build takes longer than all other builds of xtask together.
#[derive(Debug)]
pub(crate) struct Background {
    thread: Option<JoinHandle<Result<Kubernetes>>>,
    cancelled: Arc<AtomicBool>,
}

impl Background {
    /// Starts the build of Kubernetes, and returns immediately.
    pub(crate) fn start(extent: Extent) -> Self {
        let cancelled = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancelled);
        let make = move || {
            let control_plane = obtain_control_plane(&flag)?;
            let obtained = extent.into_iter().map(|component| Ok((component, component.obtain(&flag)?)));
            Ok(Kubernetes { control_plane, components: obtained.collect::<Result<_>>()? })
        };
        Self { thread: Some(thread::spawn(make)), cancelled }
    }

    /// Waits for the end of the build of Kubernetes.
    pub(crate) fn finish(mut self) -> Result<Kubernetes> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(made)) => made,
            _ => bail!("the build of Kubernetes panicked"),
        }
    }
}

impl Drop for Background {
    /// Stops the build if it is still running, for example because the command that needs the build has failed.
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// Returns the path of the program `helm`. Builds Helm if it is missing in the cache.
pub(crate) fn helm() -> Result<PathBuf> {
    Ok(obtain(&HELM, &AtomicBool::new(false))?.join("helm"))
}

/// Returns the directory with the program `grpc`. Builds the program if it is missing in the cache.
pub(crate) fn grpc() -> Result<PathBuf> {
    obtain(&GRPC, &AtomicBool::new(false))
}

/// Returns the directory with `etcd` and `kube-apiserver`. If `KUBEBUILDER_ASSETS` is set, returns the directory that
/// this variable names, or an error if a program is missing there. Otherwise returns a directory of the cache, after
/// building programs that are missing there.
fn obtain_control_plane(cancelled: &AtomicBool) -> Result<PathBuf> {
    if let Some(own) = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) {
        if own.join("etcd").is_file() && own.join("kube-apiserver").is_file() {
            return Ok(own);
        }
        bail!(
            "KUBEBUILDER_ASSETS is {}, which contains no etcd and kube-apiserver: correct or unset the variable",
            own.display()
        );
    }
    obtain(&CONTROL_PLANE, cancelled)
}

fn obtain(part: &Part, cancelled: &AtomicBool) -> Result<PathBuf> {
    let module = paths::root().join("npl-testkit").join(part.module);
    let read = |file: &str| fs::read(module.join(file)).with_context(|| format!("read {file} of {}", part.words));
    let (requirements, sums) = (read("go.mod")?, read("go.sum")?);
    let version = version_of(part.versioned, &String::from_utf8_lossy(&requirements))?;
    let packages = part.packages.join(" ");
    let mut made_from =
        vec![&requirements[..], &sums, part.linker_flags.as_bytes(), COMPILER_FLAGS.as_bytes(), packages.as_bytes()];
    // Files and variables contribute to the cache key only if the part has any, so that existing cache directories of
    // parts without files and variables stay valid.
    let further = format!("{:?} {:?}", part.files, part.variables);
    if !part.files.is_empty() || !part.variables.is_empty() {
        made_from.push(further.as_bytes());
    }
    let source = module.join("main.go").exists().then(|| read("main.go")).transpose()?;
    made_from.extend(source.as_deref());
    cache::obtain(part.name, &made_from, |folder| {
        build(part, &module, &version, folder, cancelled)?;
        for file in part.files {
            copy_of_module(part, &module, file, folder)?;
        }
        // Go names a program after its source directory. For etcd, this directory is `server`, so the program is
        // renamed.
        let server = folder.join("server");
        if server.exists() {
            fs::rename(server, folder.join("etcd")).context("rename the binary of etcd")?;
        }
        Ok(())
    })
}

fn build(part: &Part, module: &Path, version: &str, folder: &Path, cancelled: &AtomicBool) -> Result<()> {
    let Some(go) = process::find("go") else {
        let other_way = if part.name == CONTROL_PLANE.name {
            ", or set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
        } else {
            ""
        };
        bail!("{} is compiled with Go, and `go` is not installed: install Go 1.21 or newer{other_way}", part.words);
    };
    let started = Instant::now();
    let Part { name, words, time, packages, linker_flags, .. } = part;
    process::say(&format!("{name}: compiling {words}, {version}, once; {time} on two cores"));
    let needed = process::ask(
        Command::new(&go)
            .current_dir(module)
            .args(["list", "-deps"])
            .args(*packages)
            .envs(part.variables.iter().copied()),
    )
    .with_context(|| format!("download the Go modules of {words}"))?;
    let mut compile = Command::new(&go);
    compile
        .current_dir(module)
        .envs(part.variables.iter().copied())
        // With this variable, the Go compiler, itself a Go program, collects garbage less often: the build is faster,
        // but needs more memory.
        .env("GOGC", "800")
        .args(["build", "-v", "-trimpath", "-gcflags", COMPILER_FLAGS, "-ldflags"])
        .arg(at_version(linker_flags, version))
        .arg("-o")
        .arg(folder)
        .args(*packages);
    process::show(&compile);
    watch(part, compile, needed.lines().count(), started, cancelled)
}

/// Copies a file or directory of the module [`Part::versioned`] from Go's module cache to a folder. `module` is the
/// directory in npl-testkit whose `go.mod` states the version of [`Part::versioned`].
fn copy_of_module(part: &Part, module: &Path, file: &str, folder: &Path) -> Result<()> {
    let mut list = Command::new("go");
    list.current_dir(module).args(["list", "-m", "-f", "{{.Dir}}", part.versioned]);
    let from = Path::new(process::ask(&mut list)?.trim()).join(file);
    files::copy(&from, &folder.join(from.file_name().context("name a file of the module")?))
}

/// Runs `go build -v`, which prints a line for each compiled package, and reports the progress.
fn watch(part: &Part, compile: Command, total: usize, started: Instant, cancelled: &AtomicBool) -> Result<()> {
    let Part { name, words, .. } = part;
    let mut printed = Vec::new();
    let mut reported = Instant::now();
    let status = process::stream(compile, cache::BUILD_DEADLINE, |line| {
        printed.extend(line.map(str::to_owned));
        if cancelled.load(Ordering::Relaxed) {
            bail!("the command that needs {words} has ended");
        }
        if reported.elapsed() > REPORT_EVERY {
            reported = Instant::now();
            let time = process::elapsed(started.elapsed());
            process::detail(&format!("{name}: {} of at most {total} packages after {time}", printed.len()));
        }
        Ok(())
    })?;
    if !status.success() {
        process::print_end(&printed.join("\n"));
        bail!("{words} did not compile: Go's output is above");
    }
    process::detail(&format!("{name}: done in {}", process::elapsed(started.elapsed())));
    Ok(())
}

/// Inserts the version of a part into the part's linker flags. Without the version, the API server, for example, would
/// report v0.0.0.
fn at_version(linker_flags: &str, version: &str) -> String {
    let minor = version.split('.').nth(1).unwrap_or_default();
    linker_flags.replace("VERSION", version).replace("MINOR", minor)
}

/// Reads the version from a line such as `k8s.io/kubernetes v1.36.3 // indirect`.
fn version_of(module: &str, requirements: &str) -> Result<String> {
    let mut lines = requirements.lines().map(|line| line.trim().trim_start_matches("require "));
    let rest = lines.find_map(|line| line.strip_prefix(module)?.strip_prefix(' '));
    let version = rest.and_then(|rest| rest.split_whitespace().next());
    Ok(version.with_context(|| format!("go.mod requires no {module}"))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::parts::LINKER_FLAGS;
    use super::{Component, at_version, version_of};

    #[test]
    fn only_the_networks_of_the_command_are_built() {
        use Component::{Calico, Cilium, Clang, Flannel, KubeRouter, Nodes};
        for (networks, extent) in [
            (&["bridge/iptables"][..], &[Nodes][..]),
            (&["flannel-vxlan/nftables", "bridge/none"], &[Nodes, Flannel]),
            (&["calico-vxlan/iptables"], &[Nodes, Calico]),
            (&["calico-vxlan/iptables", "flannel-vxlan/none"], &[Nodes, Flannel, Calico]),
            (&["kube-router/iptables"], &[Nodes, KubeRouter]),
            (&["cilium-native/none"], &[Nodes, Cilium, Clang]),
            (&["every"], &[Nodes, Flannel, Calico, KubeRouter, Cilium, Clang]),
        ] {
            let networks: Vec<String> = networks.iter().map(|network| (*network).to_owned()).collect();
            assert!(Component::of_networks(&networks).iter().eq(extent), "{networks:?}");
        }
    }

    #[test]
    fn the_api_server_reports_the_version_that_the_module_requires() {
        let module = "module m\n\nrequire (\n\ta.b/c v0.1.0\n\tk8s.io/kubernetes v1.36.3 // indirect\n)\n";
        let version = version_of("k8s.io/kubernetes", module).unwrap();
        assert!(at_version(LINKER_FLAGS, &version).contains("gitVersion=v1.36.3"));
        assert!(at_version(LINKER_FLAGS, &version).ends_with("gitMinor=36"));
        assert!(version_of("k8s.io/kubernetes", "module m").is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A real etcd and kube-apiserver, compiled from a Go module that names their versions.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::{cache, paths, process};

/// What the binaries are linked with; `VERSION` and `MINOR` stand for Kubernetes' version.
const LINKER_FLAGS: &str = "-s -w -X k8s.io/component-base/version.gitVersion=VERSION \
     -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=MINOR";

/// Neither debugger's tables, which the linker would throw away again, nor inlining: 40 % less to compile.
const COMPILER_FLAGS: &str = "all=-dwarf=false -l";

/// Far beyond the four minutes that two cores take.
const DEADLINE: Duration = Duration::from_mins(25);

/// How often a line tells how far it is.
const TELL_EVERY: Duration = Duration::from_secs(20);

/// The control plane being made on a thread of its own, since it takes longer than everything else together.
#[derive(Debug)]
pub(crate) struct Background {
    thread: Option<JoinHandle<Result<PathBuf>>>,
    cancelled: Arc<AtomicBool>,
}

impl Background {
    /// Begins; returns at once.
    pub(crate) fn start() -> Self {
        let cancelled = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancelled);
        Self { thread: Some(thread::spawn(move || obtain(&flag))), cancelled }
    }

    /// Waits for it; the folder with `etcd` and `kube-apiserver`.
    pub(crate) fn finish(mut self) -> Result<PathBuf> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(made)) => made,
            _ => bail!("the thread that makes the control plane ended early"),
        }
    }
}

impl Drop for Background {
    /// A command that fails on something else leaves no compiler running behind it.
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// The folder with `etcd` and `kube-apiserver`: the user's own, the cached one, or a new one.
fn obtain(cancelled: &AtomicBool) -> Result<PathBuf> {
    if let Some(own) = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) {
        if own.join("etcd").is_file() && own.join("kube-apiserver").is_file() {
            return Ok(own);
        }
        bail!("KUBEBUILDER_ASSETS is {}, which has no etcd and kube-apiserver: correct or unset it", own.display());
    }
    let module = paths::root().join("npl-testkit").join("control-plane");
    let read = |file: &str| fs::read(module.join(file)).with_context(|| format!("read the control plane's {file}"));
    let (requirements, sums) = (read("go.mod")?, read("go.sum")?);
    let version = kubernetes_version(&String::from_utf8_lossy(&requirements))?;
    cache::obtain(
        "control-plane",
        &[&requirements, &sums, LINKER_FLAGS.as_bytes(), COMPILER_FLAGS.as_bytes()],
        |folder| {
            build(&module, &version, folder, cancelled)?;
            fs::rename(folder.join("server"), folder.join("etcd")).context("give etcd's binary its usual name")
        },
    )
}

fn build(module: &Path, version: &str, folder: &Path, cancelled: &AtomicBool) -> Result<()> {
    let Some(go) = process::find("go") else {
        bail!(
            "the tests' real API server is compiled with Go, and there is no `go` here: install Go 1.21 or newer, \
             or set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
        );
    };
    let started = Instant::now();
    process::say(&format!(
        "control plane: compiling Kubernetes {version}'s API server and etcd, once; 3 to 5 minutes on two cores"
    ));
    let packages = process::ask(Command::new(&go).current_dir(module).args(["list", "-deps", "tool"]))
        .context("download the control plane's Go modules")?;
    let mut compile = Command::new(&go);
    compile
        .current_dir(module)
        // The compiler is a Go program too: it collects its garbage less often, for the price of some memory.
        .env("GOGC", "800")
        .args(["build", "-v", "-trimpath", "-gcflags", COMPILER_FLAGS, "-ldflags", &linker_flags(version), "-o"])
        .arg(folder);
    compile.arg("tool");
    process::show(&compile);
    watch(compile, packages.lines().count(), started, cancelled)
}

/// Tells now and then how far `go build -v` is, which prints a line for each package that it has compiled.
fn watch(compile: Command, total: usize, started: Instant, cancelled: &AtomicBool) -> Result<()> {
    let mut printed = Vec::new();
    let mut told = Instant::now();
    let status = process::stream(compile, DEADLINE, |line| {
        printed.extend(line.map(str::to_owned));
        if cancelled.load(Ordering::Relaxed) {
            bail!("the command that needed the control plane has ended");
        }
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            let time = process::elapsed(started.elapsed());
            process::detail(&format!("control plane: {} of at most {total} packages after {time}", printed.len()));
        }
        Ok(())
    })?;
    if !status.success() {
        process::print_end(&printed.join("\n"));
        bail!("the API server and etcd did not compile: Go's own words are above");
    }
    process::detail(&format!("control plane: done in {}", process::elapsed(started.elapsed())));
    Ok(())
}

/// Without them the API server calls itself v0.0.0.
fn linker_flags(version: &str) -> String {
    let minor = version.split('.').nth(1).unwrap_or_default();
    LINKER_FLAGS.replace("VERSION", version).replace("MINOR", minor)
}

/// From a line like `k8s.io/kubernetes v1.36.3 // indirect`.
fn kubernetes_version(requirements: &str) -> Result<String> {
    let mut lines = requirements.lines().map(|line| line.trim().trim_start_matches("require "));
    let rest = lines.find_map(|line| line.strip_prefix("k8s.io/kubernetes "));
    let version = rest.and_then(|rest| rest.split_whitespace().next());
    Ok(version.context("the control plane's go.mod requires no k8s.io/kubernetes")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{kubernetes_version, linker_flags};

    #[test]
    fn the_api_server_reports_the_version_that_the_module_requires() {
        let module = "module m\n\nrequire (\n\ta.b/c v0.1.0\n\tk8s.io/kubernetes v1.36.3 // indirect\n)\n";
        let version = kubernetes_version(module).unwrap();
        assert!(linker_flags(&version).contains("gitVersion=v1.36.3"));
        assert!(linker_flags(&version).ends_with("gitMinor=36"));
        assert!(kubernetes_version("module m").is_err());
    }
}

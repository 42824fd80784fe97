// SPDX-License-Identifier: Apache-2.0
//! A real etcd and kube-apiserver, compiled from a Go module that names their versions.

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{cache, paths, process};

/// The version that the API server reports; kept in step with the Go module.
const KUBERNETES: &str = "v1.36.3";

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
    cache::obtain("control-plane", &[&requirements, &sums, KUBERNETES.as_bytes()], |folder| {
        build(&module, folder, cancelled)?;
        fs::rename(folder.join("server"), folder.join("etcd")).context("give etcd's binary its usual name")
    })
}

fn build(module: &Path, folder: &Path, cancelled: &AtomicBool) -> Result<()> {
    let Some(go) = process::find("go") else {
        bail!(
            "the tests' real API server is compiled with Go, and there is no `go` here: install Go 1.21 or newer, \
             or set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
        );
    };
    let started = Instant::now();
    process::say(&format!(
        "control plane: compiling Kubernetes {KUBERNETES}'s API server and etcd, once; 3 to 5 minutes on two cores"
    ));
    let packages = process::ask(Command::new(&go).current_dir(module).args(["list", "-deps", "tool"]))
        .context("download the control plane's Go modules")?;
    let mut compile = Command::new(&go);
    compile.current_dir(module).args(["build", "-v", "-trimpath", "-ldflags", &linker_flags(), "-o"]).arg(folder);
    compile.arg("tool");
    process::show(&compile);
    let child = compile.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let child = child.with_context(|| format!("start {}", go.display()))?;
    Compilation { child, started, total: packages.lines().count() }.watch(cancelled)
}

fn linker_flags() -> String {
    let version = "-X k8s.io/component-base/version.git";
    let minor = KUBERNETES.split('.').nth(1).unwrap_or_default();
    format!("-s -w {version}Version={KUBERNETES} {version}Major=1 {version}Minor={minor}")
}

/// A running `go build -v`, which prints a line for each package that it has compiled.
struct Compilation {
    child: Child,
    started: Instant,
    total: usize,
}

impl Compilation {
    fn watch(mut self, cancelled: &AtomicBool) -> Result<()> {
        let output = self.child.stderr.take().ok_or_else(|| anyhow!("the Go compiler's output is not a pipe"))?;
        let compiled = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&compiled);
        let reader = thread::spawn(move || {
            let mut other = Vec::new();
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                counter.fetch_add(1, Ordering::Relaxed);
                other.push(line);
            }
            other.join("\n")
        });
        let status = self.wait(&compiled, cancelled);
        let text = reader.join().unwrap_or_default();
        if status? {
            process::detail(&format!("control plane: done in {}", process::elapsed(self.started.elapsed())));
            return Ok(());
        }
        process::print_end(&text);
        bail!("the API server and etcd did not compile: Go's own words are above")
    }

    /// Whether it succeeded; ends it on cancellation and past the deadline.
    fn wait(&mut self, compiled: &AtomicUsize, cancelled: &AtomicBool) -> Result<bool> {
        let mut told = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().context("wait for the Go compiler")? {
                return Ok(status.success());
            }
            let late = self.started.elapsed() > DEADLINE;
            if late || cancelled.load(Ordering::Relaxed) {
                self.child.kill().context("end the Go compiler")?;
                self.child.wait().context("wait for the Go compiler")?;
                bail!(
                    "compiling the control plane was {}",
                    if late { "not done after 25 minutes" } else { "cancelled" }
                );
            }
            if told.elapsed() > TELL_EVERY {
                told = Instant::now();
                let (done, time) = (compiled.load(Ordering::Relaxed), process::elapsed(self.started.elapsed()));
                process::detail(&format!("control plane: {done} of at most {} packages after {time}", self.total));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

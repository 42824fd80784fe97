// SPDX-License-Identifier: Apache-2.0
//! Runs the built agent as a process on a test Node, with the privileges that `deploy/npl.yaml` grants to the agent's
//! container or, if [`Options::has_perfmon`] is set, to its init container.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::fcntl::AT_FDCWD;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::symlinkat;
use serde_json::Value;

use crate::netns::Netns;
use crate::process::Process;
use crate::{http, poll, tools};

/// The number of `CAP_NET_ADMIN` in `linux/capability.h`.
const CAP_NET_ADMIN: i32 = 12;
/// The number of `CAP_PERFMON` in `linux/capability.h`.
const CAP_PERFMON: i32 = 38;
/// The number of `CAP_BPF` in `linux/capability.h`.
const CAP_BPF: i32 = 39;

/// The time limit of the agent's start, which takes less than a second on an idle machine.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// The options of an agent that a test starts.
#[derive(Clone, Debug)]
pub struct Options {
    /// The path of the `npl-agent` binary.
    pub binary: PathBuf,
    /// The name of the Kubernetes Node object.
    pub node_name: String,
    /// The Node's network namespace.
    pub netns: Netns,
    /// The path of the kubeconfig that the agent uses if `service_account` is `None`.
    pub kubeconfig: PathBuf,
    /// The service account that the agent uses in place of the kubeconfig, as in a cluster.
    pub service_account: Option<ServiceAccount>,
    /// The BPF file system in which the agent pins its maps and programs.
    pub bpffs: PathBuf,
    /// The file that receives the agent's output.
    pub log: PathBuf,
    /// The directory of the agent's local socket.
    pub runtime_dir: PathBuf,
    /// Whether the agent has `CAP_PERFMON`, too. Then the kernel needs less than half of the time to verify the programs.
    /// In `deploy/npl.yaml`, the init container loads the programs with this capability.
    pub has_perfmon: bool,
    /// Additional flags of `npl-agent run`.
    pub flags: Vec<String>,
    /// A command that runs the agent, such as strace with its arguments; empty if the agent is run directly.
    pub wrapper: Vec<String>,
}

/// A service account as a Pod sees it: the files below `/var/run`, and the API server's address in the environment.
#[derive(Clone, Debug)]
pub struct ServiceAccount {
    /// The folder that the Pod sees as `/var/run`.
    pub var_run: PathBuf,
    /// The address of the API server.
    pub server: SocketAddr,
}

/// A running agent. Dropping this value kills the agent; the agent's maps and programs stay in the kernel.
#[derive(Debug)]
pub struct Agent {
    options: Options,
    listen: SocketAddr,
    process: Process,
}

impl Agent {
    /// Starts the agent and waits until it is ready.
    pub fn start(options: Options) -> Result<Self> {
        let mut agent = Self::launch(options)?;
        agent.wait_until_ready()?;
        Ok(agent)
    }

    /// Starts the agent without waiting until it is ready.
    pub fn launch(options: Options) -> Result<Self> {
        let listen = options.netns.free_address()?;
        let process = spawn(&options, listen)?;
        Ok(Self { options, listen, process })
    }

    /// Waits until `/readyz` returns 200.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let mut ended = None;
        let ready = poll::until("the readiness of npl-agent", READY_LIMIT, || {
            ended = self.process.exit_status();
            let is_ready = matches!(http::get(&self.options.netns, self.listen, "/readyz"), Ok((200, _)));
            (ended.is_some() || is_ready).then_some(())
        });
        if let Some(status) = ended {
            bail!("npl-agent exited during startup: {status}\n{}", self.process.log_tail(15));
        }
        ready.with_context(|| self.process.log_tail(15)).map(drop)
    }

    /// Kills the agent with SIGKILL, so that the agent runs no cleanup.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.process.kill()
    }

    /// Sends SIGTERM, waits for the agent to exit, and kills the agent with SIGKILL if it still runs after `grace`.
    pub fn terminate(&mut self, grace: Duration) -> Result<ExitStatus> {
        self.process.terminate(grace)
    }

    /// Kills the agent with SIGKILL if it still runs, starts it again, and waits until it is ready.
    pub fn restart(&mut self) -> Result<()> {
        if self.process.exit_status().is_none() {
            self.kill()?;
        }
        self.process = spawn(&self.options, self.listen)?;
        self.wait_until_ready()
    }

    /// The agent's process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Sends a signal to the agent.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// The address of the agent's HTTP server, on the Node's loopback device.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// The options with which the agent was started.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the body of `/metrics`.
    pub fn metrics(&self) -> Result<String> {
        let (status, body) = http::get(&self.options.netns, self.listen, "/metrics")?;
        if status != 200 {
            bail!("/metrics returned {status}: {body}");
        }
        Ok(body)
    }
}

impl Options {
    /// Creates options for an agent on this Node, with the binary from [`find_binary`].
    pub fn new(netns: &Netns, node_name: &str, kubeconfig: &Path, bpffs: &Path, log: &Path) -> Result<Self> {
        Ok(Self {
            binary: find_binary()?,
            node_name: node_name.to_owned(),
            netns: netns.clone(),
            kubeconfig: kubeconfig.to_owned(),
            service_account: None,
            bpffs: bpffs.to_owned(),
            log: log.to_owned(),
            runtime_dir: log.with_extension("run"),
            has_perfmon: false,
            flags: Vec::new(),
            wrapper: Vec::new(),
        })
    }

    /// Runs another `npl-agent` subcommand on the Node. No running agent is required.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        let (code, output) = self.exit_code_and_output(arguments)?;
        // The exit codes 0 to 2 of `status` report the health of the Node, so none of them means that the subcommand
        // failed.
        let is_verdict = arguments.first() == Some(&"status") && (0..=2).contains(&code);
        if code != 0 && !is_verdict {
            bail!("`npl-agent {}` exited with {code}: {output}", arguments.join(" "));
        }
        Ok(output)
    }

    /// Runs a subcommand as [`Self::command`] does. Returns the exit code and the standard output of the subcommand, or
    /// its standard error if the standard output is empty.
    pub fn exit_code_and_output(&self, arguments: &[&str]) -> Result<(i32, String)> {
        let mut command = self.netns.command(&self.binary)?;
        // With an interval of 0 s, `status` reads the counters once. A second reading for the rates would take another
        // second.
        command.env("NPL_RUNTIME_DIR", &self.runtime_dir).env("NPL_INTERVAL", "0s");
        command.args(arguments).arg("--bpffs").arg(&self.bpffs).stdin(Stdio::null());
        let output = command.output().context("run npl-agent")?;
        let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
        let code = output.status.code().context("npl-agent was killed by a signal")?;
        Ok((code, String::from_utf8_lossy(&text).into_owned()))
    }

    /// Runs a subcommand as [`Self::command`] does and parses its JSON output.
    pub fn command_json(&self, command: &str) -> Result<Value> {
        let text = self.command(&[command, "--output", "json"])?;
        serde_json::from_str(&text).with_context(|| format!("parse the JSON output of `npl-agent {command}`: {text}"))
    }
}

/// The agent binary: `NPL_AGENT` if set, otherwise the output of `cargo xtask build`.
pub fn find_binary() -> Result<PathBuf> {
    let path =
        env::var_os("NPL_AGENT").map_or_else(|| tools::repository_file("target/release/npl-agent"), PathBuf::from);
    path.canonicalize().with_context(|| {
        format!("no agent at {}: run `cargo xtask build`, or set NPL_AGENT to the path of the binary", path.display())
    })
}

fn spawn(options: &Options, listen: SocketAddr) -> Result<Process> {
    let Options { binary, node_name, netns, kubeconfig, service_account, bpffs, log, runtime_dir, .. } = options;
    let mut command = match options.wrapper.split_first() {
        Some((program, arguments)) => {
            let mut command = netns.command(program)?;
            command.args(arguments).arg(binary);
            command
        }
        None => netns.command(binary)?,
    };
    command.args(["run", "--node-name", node_name]);
    match service_account {
        Some(ServiceAccount { server, .. }) => {
            command.env("KUBERNETES_SERVICE_HOST", server.ip().to_string());
            command.env("KUBERNETES_SERVICE_PORT", server.port().to_string());
        }
        None => drop(command.arg("--kubeconfig").arg(kubeconfig)),
    }
    // The agent's socket programs would affect other processes of the test machine. Without a cgroup, the agent
    // attaches no socket programs. Tests with their own cgroup override this setting.
    command.env("NPL_CGROUP", "none").env("NPL_RUNTIME_DIR", runtime_dir);
    command.arg("--bpffs").arg(bpffs).arg("--listen").arg(listen.to_string()).args(&options.flags);
    let var_run = service_account.as_ref().map(|account| account.var_run.clone());
    confine(&mut command, var_run, options.has_perfmon);
    Process::spawn("npl-agent", command, log)
}

/// Gives the process the environment of the DaemonSet's container: `/sys` of its network namespace, user 0 with two
/// capabilities (three with `has_perfmon`), and `no_new_privs`. The process sees the folder `var_run`, if given, as
/// `/var/run`.
#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
fn confine(command: &mut Command, var_run: Option<PathBuf>, has_perfmon: bool) {
    let hook = move || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(None::<&str>, c"/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)?;
        mount(Some(c"sysfs"), c"/sys", Some(c"sysfs"), MsFlags::empty(), None::<&std::ffi::CStr>)?;
        if let Some(var_run) = &var_run {
            mount(Some(c"tmpfs"), c"/var", Some(c"tmpfs"), MsFlags::empty(), None::<&std::ffi::CStr>)?;
            symlinkat(var_run.as_path(), AT_FDCWD, c"/var/run")?;
        }
        let is_kept = |capability| match capability {
            CAP_NET_ADMIN | CAP_BPF => true,
            CAP_PERFMON => has_perfmon,
            _ => false,
        };
        for capability in (0..64).filter(|capability| !is_kept(*capability)) {
            drop_from_bounding_set(capability)?;
        }
        prctl::set_no_new_privs()?;
        Ok(())
    };
    // SAFETY: the hook makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(hook);
    }
}

/// Removes a capability from the bounding set. After execve by user 0, the permitted set lacks the capability too.
#[expect(unsafe_code, reason = "no library in use wraps PR_CAPBSET_DROP")]
fn drop_from_bounding_set(capability: i32) -> io::Result<()> {
    // SAFETY: this call has an integer argument and accesses no memory.
    let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    match io::Error::last_os_error() {
        _ if result == 0 => Ok(()),
        // The caller tries all capability numbers below 64. The kernel has fewer capabilities and returns EINVAL for
        // unknown numbers.
        err if err.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        err => Err(err),
    }
}

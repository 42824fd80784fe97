// SPDX-License-Identifier: Apache-2.0
//! Creates the namespaces of a Node, and starts processes in them from outside.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns, unshare};

use super::init::{InitArguments, PID_FILE, READY_FILE};
use crate::cgroups::Cgroup;
use crate::netns::Netns;
use crate::poll;
use crate::process::{self, Process};
use crate::tools;

/// The time limit within which the Node's first process must have mounted all file systems.
const READY_LIMIT: Duration = Duration::from_mins(1);

/// The kinds of namespaces in the order in which `setns` enters them. [`Space::inside`] opens all namespaces before it
/// enters the first namespace, because the Node's `/proc` does not show the host's PIDs.
const KINDS: [(&str, CloneFlags); 5] = [
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("net", CloneFlags::CLONE_NEWNET),
    ("pid", CloneFlags::CLONE_NEWPID),
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// The first process of a Node. When this process exits, the kernel kills the Node's other processes and removes the
/// Node's mounts.
#[derive(Debug)]
pub(super) struct Init {
    space: Space,
    // The outer process. When this program exits, the kernel kills the outer process and then the inner one.
    _process: Process,
}

impl Init {
    /// Starts the first process with a program that accepts [`InitArguments`], and waits for the Node's mounts.
    pub(super) fn start(program: &Path, arguments: &InitArguments, netns: &Netns, cgroup: &Cgroup) -> Result<Self> {
        let mut command = netns.command(program)?;
        command.arg("node-init").args(arguments.to_words());
        cgroup.hold_roots(&mut command)?;
        let log = arguments.directory.join("init.log");
        let mut process = Process::spawn(&format!("the first process of {}", arguments.name), command, &log)?;
        let ready = arguments.directory.join(READY_FILE);
        let (started, _) = poll::until(&format!("the mounts of {}", arguments.name), READY_LIMIT, || {
            if let Some(status) = process.exit_status() {
                return Some(Err(status));
            }
            // Both files must exist: the outer process writes the PID file, and the inner process the ready file.
            Space::find(&arguments.directory, cgroup.clone()).ok().filter(|_found| ready.exists()).map(Ok)
        })
        .with_context(|| process.log_tail(5))?;
        match started {
            Ok(space) => Ok(Self { space, _process: process }),
            Err(status) => bail!("{} exited: {status}\n{}", process.name(), process.log_tail(5)),
        }
    }

    /// The Node's namespaces.
    pub(super) fn space(&self) -> &Space {
        &self.space
    }
}

/// The namespaces of a running Node.
#[derive(Clone, Debug)]
pub struct Space {
    init: u32,
    cgroup: Cgroup,
}

impl Space {
    /// Returns the namespaces of the Node whose directory is `directory`. Another process may have started the Node.
    pub fn find(directory: &Path, cgroup: Cgroup) -> Result<Self> {
        let file = directory.join(PID_FILE);
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let init = text.parse().with_context(|| format!("read a process id from {}", file.display()))?;
        Ok(Self { init, cgroup })
    }

    /// Starts a long-running process in the namespaces. The process ends with the Node.
    pub(super) fn spawn(&self, name: &str, mut command: Command, log: &Path) -> Result<Process> {
        self.join(&mut command)?;
        Process::spawn_by(name, command, log, |mut command| self.inside(|| command.spawn())?)
    }

    /// Runs a command in the namespaces, on this process's terminal, and waits for its exit.
    pub fn run(&self, mut command: Command) -> Result<ExitStatus> {
        self.join(&mut command)?;
        self.inside(|| command.status())
            .and_then(|status| status)
            .with_context(|| format!("run {} inside the Node", command.get_program().display()))
    }

    /// Runs a command in the namespaces and returns its output.
    pub fn output(&self, mut command: Command) -> Result<String> {
        self.join(&mut command)?;
        self.inside(|| tools::output(&mut command)).context("enter the Node")?
    }

    /// Makes a command join the Node's cgroup before the command enters the cgroup namespace. Inside the cgroup
    /// namespace, the command could not be moved, because its own cgroup would be outside the namespace's root.
    #[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
    fn join(&self, command: &mut Command) -> Result<()> {
        self.cgroup.hold_system(command)?;
        let file = self.open("cgroup").context("open the Node's cgroup namespace")?;
        let enter = move || setns(&file, CloneFlags::CLONE_NEWCGROUP).map_err(io::Error::from);
        // SAFETY: the hook makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(enter);
        }
        Ok(())
    }

    fn open(&self, kind: &str) -> io::Result<File> {
        File::open(format!("/proc/{}/ns/{kind}", self.init))
    }

    /// Runs `work` on a thread whose child processes start in the namespaces.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        let files: Vec<(File, CloneFlags)> =
            KINDS.iter().map(|(kind, flag)| Ok((self.open(kind)?, *flag))).collect::<io::Result<_>>()?;
        let entered = move || {
            // The kernel refuses to change the mount namespace of a thread that shares its root and working directory
            // with other threads.
            unshare(CloneFlags::CLONE_FS)?;
            files.iter().try_for_each(|(file, flag)| setns(file, *flag))?;
            Ok(work())
        };
        process::on_own_thread(entered)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Long-running child processes that never outlive this process, and CPU affinity.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{OnceLock, mpsc};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::{Pid, getpid, getppid};

use crate::{poll, tools};

/// A child process with a log file. The child is killed when this value is dropped, and by the kernel when this process
/// exits.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts `command` in its own process group and appends its output to `log`.
    pub fn spawn(name: &str, command: Command, log: &Path) -> Result<Self> {
        Self::spawn_by(name, command, log, spawn_for_life)
    }

    /// Starts a process as [`Self::spawn`] does, with a custom spawn function, which must ensure that the process ends
    /// with its parent.
    pub(crate) fn spawn_by(
        name: &str,
        mut command: Command,
        log: &Path,
        spawn: impl FnOnce(Command) -> io::Result<Child>,
    ) -> Result<Self> {
        let file =
            File::options().create(true).append(true).open(log).with_context(|| format!("open {}", log.display()))?;
        let copy = file.try_clone().with_context(|| format!("open {} a second time", log.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy).process_group(0);
        let shown = tools::show(&command);
        let child = spawn(command).with_context(|| format!("start {name}: `{shown}`"))?;
        Ok(Self { child, name: name.to_owned(), log: log.to_owned() })
    }

    /// The name given when the process was started.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if the process has exited.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends `signal` without waiting for its effect.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        signal::kill(self.pid()?, signal).with_context(|| format!("send {signal} to {}", self.name))
    }

    /// Kills the process with SIGKILL, as the out-of-memory killer does.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        if self.exit_status().is_none() {
            self.signal(Signal::SIGKILL)?;
        }
        self.child.wait().with_context(|| format!("wait for {}", self.name))
    }

    /// Kills the process, and all other processes of its process group, with SIGKILL.
    pub fn kill_group(&mut self) -> Result<ExitStatus> {
        signal::killpg(self.pid()?, Signal::SIGKILL).with_context(|| format!("kill {} and its children", self.name))?;
        self.child.wait().with_context(|| format!("wait for {}", self.name))
    }

    /// Sends SIGTERM, and SIGKILL if the process has not exited after `grace`.
    pub fn terminate(&mut self, grace: Duration) -> Result<ExitStatus> {
        if self.exit_status().is_none() {
            self.signal(Signal::SIGTERM)?;
        }
        match poll::until(&format!("{} to exit", self.name), grace, || self.exit_status()) {
            Ok((status, _)) => Ok(status),
            Err(_late) => self.kill(),
        }
    }

    /// Returns the last `lines` lines of the log, for error messages.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        let tail = all.get(all.len().saturating_sub(lines)..).unwrap_or_default();
        format!("last lines of {}'s log:\n  {}", self.name, tail.join("\n  "))
    }

    /// The path of the log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id()).context("process id out of range")?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(err) = self.kill() {
            report(&format!("{err:#}"));
        }
    }
}

/// Pins a thread, and threads that it starts later, to one processor.
pub fn keep_on(thread: Pid, cpu: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu).with_context(|| format!("select processor {cpu}"))?;
    sched_setaffinity(thread, &only).with_context(|| format!("pin thread {thread} to processor {cpu}"))
}

/// Runs `work` on a new thread and waits for its end. Changes that the kernel stores per thread, such as the priority,
/// do not affect the calling thread.
pub fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| joined(scope.spawn(work)))
}

/// Joins a thread and returns its result. If the thread panicked, the panic continues in the caller.
pub fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Raises the soft limit of open files to `wanted`, at most to the hard limit.
pub fn allow_open_files(wanted: u64) -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    let limit = soft.max(wanted.min(hard));
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).with_context(|| format!("raise the limit of open files to {limit}"))
}

/// Prints an error of the teardown, because `drop` cannot return errors. The teardown then continues.
#[expect(clippy::print_stderr, reason = "drop cannot return the error of a failed teardown")]
pub(crate) fn report(message: &str) {
    eprintln!("teardown: {message}");
}

struct Job {
    command: Command,
    reply: mpsc::Sender<io::Result<Child>>,
}

/// Forks from one thread that lives as long as this process. The kernel sends the signal of `PR_SET_PDEATHSIG` when the
/// forking thread exits, not when its process exits.
fn spawn_for_life(mut command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    die_with_parent(&mut command);
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for mut job in jobs {
                let child = job.command.spawn();
                // Sending fails only if the caller no longer waits, because this process is exiting. The child is then
                // killed together with this process.
                drop(job.reply.send(child));
            }
        });
        sender
    });
    let (reply, answer) = mpsc::channel();
    spawner.send(Job { command, reply }).map_err(io::Error::other)?;
    answer.recv().map_err(io::Error::other)?
}

#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The child inherits the mask of blocked signals, so the child unblocks all signals.
        SigSet::empty().thread_set_mask()?;
        // If the parent died before PR_SET_PDEATHSIG took effect, no signal arrives, so the child checks its parent and
        // fails.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: the hook makes a few system calls and allocates nothing.
    unsafe {
        command.pre_exec(hook);
    }
}

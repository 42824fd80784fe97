// SPDX-License-Identifier: Apache-2.0
//! One run of a test or demo, which owns all objects that it creates outside this process.
//!
//! The run's identifier is enough to find all of these objects: names of namespaces and cgroups contain the
//! identifier, and files and mounts are in the run's directory. One function therefore removes a run, whether it
//! completed, was interrupted or was killed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{self, Signal};
use nix::unistd::{Pid, geteuid};

use crate::cgroups::{self, Cgroup};
use crate::client_cgroup::{self, ClientCgroup};
use crate::mounts::{self, BpfFs};
use crate::netns::Netns;
use crate::{process, tools};

/// The parent directory of all runs' directories.
pub const ROOT: &str = "/run/npl-testkit";

/// The prefix of the names of all runs' namespaces and cgroups.
const PREFIX: &str = "npl-";

/// The file that identifies the process that owns the run, by PID and start time, because PIDs are reused.
const OWNER_FILE: &str = "owner";

/// A run. Dropping this value removes all objects that were created for the run.
#[derive(Debug)]
pub struct Run {
    id: String,
    directory: PathBuf,
}

impl Run {
    /// Removes the objects of killed runs and starts a new run.
    ///
    /// # Errors
    /// Returns an error if the process is not root: creating namespaces and mounts requires root.
    pub fn start() -> Result<Self> {
        if !geteuid().is_root() {
            bail!("creating network namespaces and mounts requires root: run this program with sudo");
        }
        sweep()?;
        let id = random_hex(4)?;
        let directory = Path::new(ROOT).join(&id);
        // The directory is renamed when it is complete, so that a concurrent sweep never finds a run's directory
        // without the owner file.
        let unfinished = Path::new(ROOT).join(format!(".{id}"));
        fs::create_dir_all(&unfinished).with_context(|| format!("create {}", unfinished.display()))?;
        let pid = std::process::id();
        let start_time = start_time(pid).with_context(|| format!("read the start time of process {pid}"))?;
        fs::write(unfinished.join(OWNER_FILE), format!("{pid} {start_time}")).context("write the run's owner")?;
        fs::rename(&unfinished, &directory).with_context(|| format!("create {}", directory.display()))?;
        Ok(Self { id, directory })
    }

    /// The random identifier: eight hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The run's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of a file in the run's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Creates the network namespace `npl-<run>-<name>`.
    pub fn netns(&self, name: &str) -> Result<Netns> {
        Netns::create(&format!("{}{name}", self.name_prefix()))
    }

    /// Gives the name `npl-<run>-<name>` to the network namespace of a process.
    pub fn netns_of_process(&self, name: &str, pid: u32) -> Result<Netns> {
        Netns::of_process(&format!("{}{name}", self.name_prefix()), pid)
    }

    /// Creates the cgroup `npl-<run>-<name>`.
    pub fn cgroup(&self, name: &str) -> Result<Cgroup> {
        Cgroup::create(&format!("{}{name}", self.name_prefix()))
    }

    /// Mounts a new BPF file system in the run's directory.
    pub fn bpffs(&self, name: &str) -> Result<BpfFs> {
        BpfFs::mount(&self.directory.join(name))
    }

    /// Creates the cgroup `npl-<run>-<name>` for clients, below the cgroup of this process.
    pub fn client_cgroup(&self, name: &str) -> Result<ClientCgroup> {
        ClientCgroup::create(&format!("{}{name}", self.name_prefix()))
    }

    /// The prefix of the names of the run's namespaces and cgroups.
    pub fn name_prefix(&self) -> String {
        name_prefix(&self.id)
    }

    /// Removes all objects that were created for the run. Dropping the run does the same.
    pub fn remove(&self) -> Result<()> {
        let _alone = only_remover()?;
        remove_run(&self.id)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Err(err) = self.remove() {
            process::report(&format!("{err:#}"));
        }
    }
}

/// Returns `bytes` random bytes in hexadecimal.
pub fn random_hex(bytes: usize) -> Result<String> {
    let mut buffer = vec![0; bytes];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut buffer)).context("read /dev/urandom")?;
    let digits = buffer.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    Ok(digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect())
}

/// Removes the runs whose process has exited. Concurrent calls are safe.
pub fn sweep() -> Result<()> {
    let _alone = only_remover()?;
    let mut dead = BTreeSet::new();
    let mut alive = BTreeSet::new();
    for id in ids() {
        if owner(&id).is_some() {
            alive.insert(id)
        } else {
            dead.insert(id)
        };
    }
    for name in netns_names().into_iter().chain(cgroups::names(PREFIX)?) {
        if let Some(id) = run_of(&name)
            && !alive.contains(id)
            && !directory_of(id).exists()
        {
            dead.insert(id.to_owned());
        }
    }
    for id in dead {
        remove_run(&id).with_context(|| format!("remove the remains of the killed run {id}"))?;
    }
    Ok(())
}

/// The identifiers of all runs that have a directory. A directory whose name begins with a dot belongs to a run that is
/// being created.
pub fn ids() -> BTreeSet<String> {
    directory_names(Path::new(ROOT)).into_iter().filter(|id| !id.starts_with('.')).collect()
}

/// Returns the directory of a run, which another process may own.
pub fn directory_of(id: &str) -> PathBuf {
    Path::new(ROOT).join(id)
}

/// Returns the PID of the run's owner, if that process is alive.
pub fn owner(id: &str) -> Option<u32> {
    let owner = fs::read_to_string(directory_of(id).join(OWNER_FILE)).ok()?;
    let (pid, time) = owner.split_once(' ')?;
    let pid = pid.parse().ok()?;
    start_time(pid).is_some_and(|now| now == time).then_some(pid)
}

/// Returns the processes inside the namespaces of a run, which another process may own.
pub fn processes_of(id: &str) -> Result<BTreeSet<u32>> {
    let prefix = name_prefix(id);
    let mut pids = BTreeSet::new();
    for netns in netns_names().into_iter().filter(|name| name.starts_with(&prefix)) {
        pids.extend(processes_in(&netns)?);
    }
    Ok(pids)
}

/// The names of all named network namespaces.
pub fn netns_names() -> BTreeSet<String> {
    directory_names(Path::new(crate::netns::DIRECTORY))
}

/// Takes the lock for removing runs. Without the lock, a removal would fail on objects that a concurrent removal has
/// already removed.
fn only_remover() -> Result<File> {
    let lock = || -> std::io::Result<File> {
        fs::create_dir_all(ROOT)?;
        let folder = File::open(ROOT)?;
        folder.lock()?;
        Ok(folder)
    };
    lock().with_context(|| format!("lock {ROOT}"))
}

fn remove_run(id: &str) -> Result<()> {
    let prefix = name_prefix(id);
    for name in netns_names().into_iter().filter(|name| name.starts_with(&prefix)) {
        kill_processes_in(&name)?;
        crate::netns::delete(&name)?;
    }
    for name in cgroups::names(&prefix)? {
        cgroups::remove(&name)?;
    }
    client_cgroup::delete_all(&prefix)?;
    let directory = directory_of(id);
    for mount in mounts::below(&directory)?.into_iter().rev() {
        umount2(&mount, MntFlags::MNT_DETACH).with_context(|| format!("unmount {}", mount.display()))?;
    }
    match fs::remove_dir_all(&directory) {
        Err(err) if err.kind() != std::io::ErrorKind::NotFound => {
            Err(err).with_context(|| format!("remove {}", directory.display()))
        }
        _removed_or_gone => Ok(()),
    }
}

fn kill_processes_in(netns: &str) -> Result<()> {
    for pid in processes_in(netns)?.into_iter().filter(|pid| *pid != std::process::id()) {
        let target = i32::try_from(pid).context("process id out of range")?;
        match signal::kill(Pid::from_raw(target), Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(err) => return Err(err).with_context(|| format!("kill process {pid} in {netns}")),
        }
    }
    Ok(())
}

fn processes_in(netns: &str) -> Result<Vec<u32>> {
    let pids = tools::output(Command::new("ip").args(["netns", "pids", netns]))?;
    Ok(pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect())
}

/// Returns the prefix of the names of a run's namespaces and cgroups.
pub(crate) fn name_prefix(id: &str) -> String {
    format!("{PREFIX}{id}-")
}

fn run_of(name: &str) -> Option<&str> {
    let (id, _) = name.strip_prefix(PREFIX)?.split_once('-')?;
    (id.len() == 8 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// Returns the start time of a process: field 22 of `/proc/<pid>/stat`. Fields are counted from the last parenthesis,
/// because the process name in field 2 may contain spaces and parentheses.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

fn directory_names(path: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_runs_are_recognized() {
        assert_eq!(run_of("npl-0123abcd-node"), Some("0123abcd"));
        assert_eq!(run_of("npl-0123abcd-pod-web-0"), Some("0123abcd"));
        assert_eq!(run_of("npl-lab-node"), None);
        assert_eq!(run_of("cni-0123abcd-node"), None);
    }

    #[test]
    fn this_process_has_a_start_time() {
        assert!(start_time(std::process::id()).is_some_and(|time| time.parse::<u64>().is_ok()));
    }
}

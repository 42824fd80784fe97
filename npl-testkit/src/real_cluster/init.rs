// SPDX-License-Identifier: Apache-2.0
//! The first process of a Node: it sets up the Node's namespaces from inside and then reaps orphans.
//!
//! The first process in fact consists of two processes, because a process that creates a PID namespace does not belong
//! to this namespace. The outer process creates the PID namespace, and waits for the inner process, which has PID 1 in
//! this namespace. Both processes set up namespaces before they start any thread.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;

use crate::cgroups::{self, Cgroup, Hierarchy, Version};
use crate::reaper;

/// The directory of the Node's binaries inside the Node.
pub(super) const BINARIES: &str = "/run/npl/bin";

/// The directory of the Node's configuration inside the Node.
pub(super) const SETTINGS: &str = "/run/npl";

/// The directory for temporary files inside the Node.
pub(super) const TEMPORARY: &str = "/run/temporary";

/// The file with the PID of the Node's first process, as seen from outside; relative to the Node's directory.
pub(super) const PID_FILE: &str = "init.pid";

/// The file that exists once all file systems are mounted, relative to the Node's directory.
pub(super) const READY_FILE: &str = "run/npl/ready";

/// Subdirectories of the Node's directory, and the host directories over which they are mounted. `/run` is last because
/// mounting over it hides the Node's directory.
const OWN_FOLDERS: [(&str, &str); 3] = [("lib", "/var/lib"), ("log", "/var/log"), ("run", "/run")];

/// Host-wide sysctls that a kubelet or Cilium sets, with the values that these programs require. Regular files are
/// mounted over these sysctls, so that the programs of a Node do not change the host.
const SYSCTLS: [(&str, &str); 8] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
    ("kernel/unprivileged_bpf_disabled", "1"),
    ("kernel/timer_migration", "0"),
];

/// The arguments of a Node's first process.
#[derive(Clone, Debug, clap::Args)]
pub struct InitArguments {
    /// The Node's name.
    #[arg(long)]
    pub name: String,
    /// The Node's directory.
    #[arg(long)]
    pub directory: PathBuf,
    /// The Node's cgroup, which contains this process.
    #[arg(long)]
    pub cgroup: String,
    /// The directory of kubelet and kube-proxy.
    #[arg(long)]
    pub binaries: PathBuf,
    /// Run as the inner of the two processes.
    #[arg(long, hide = true)]
    pub inner: bool,
}

impl InitArguments {
    pub(super) fn to_words(&self) -> Vec<std::ffi::OsString> {
        let Self { name, directory, cgroup, binaries, inner } = self;
        let mut words = vec!["--name".into(), name.into(), "--directory".into(), directory.into()];
        words.extend(["--cgroup".into(), cgroup.into(), "--binaries".into(), binaries.into()]);
        words.extend(inner.then(|| "--inner".into()));
        words
    }
}

/// Creates the directories that a Node needs before its first process starts.
pub(super) fn prepare_folders(directory: &Path) -> Result<()> {
    for folder in ["lib", "log", "run/npl/bin", "run/netns", "run/temporary", "run/lock"] {
        let folder = directory.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    }
    Ok(())
}

/// Runs the outer or the inner process until it is terminated.
pub fn run(arguments: &InitArguments) -> Result<()> {
    if arguments.inner { be_first(arguments) } else { start_first(arguments).map(drop) }
}

fn start_first(arguments: &InitArguments) -> Result<ExitStatus> {
    let kinds =
        CloneFlags::CLONE_NEWCGROUP | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWUTS;
    unshare(kinds).context("create the Node's cgroup, IPC, PID and UTS namespaces")?;
    Cgroup::find(&arguments.cgroup)?.divide()?;
    let inner = InitArguments { inner: true, ..arguments.clone() };
    let mut command = Command::new(env::current_exe().context("find the path of this program")?);
    command.arg("node-init").args(inner.to_words());
    die_with_outer(&mut command);
    let mut child = command.spawn().context("start the inner process")?;
    let file = arguments.directory.join(PID_FILE);
    fs::write(&file, child.id().to_string()).with_context(|| format!("write {}", file.display()))?;
    child.wait().context("wait for the inner process")
}

/// Makes the kernel kill the command when the outer process exits. `PR_SET_PDEATHSIG` refers to the parent thread, and
/// the outer process has only one thread.
#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
fn die_with_outer(command: &mut Command) {
    // If the outer process exits before this call, the kernel sends no signal. Removing the run then kills the inner
    // process, which is in the Node's network namespace.
    let hook = || prctl::set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from);
    // SAFETY: the hook makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(hook);
    }
}

fn be_first(arguments: &InitArguments) -> Result<()> {
    ensure!(std::process::id() == 1, "--inner requires PID 1 of a PID namespace");
    reaper::prepare()?;
    // Read the mount table before other mounts hide the host's cgroup hierarchies.
    let hierarchies = Hierarchy::all()?;
    // Only the inner process gets its own mounts: the outer process writes the PID file below the Node's directory,
    // which the later mount over `/run` hides.
    unshare(CloneFlags::CLONE_NEWNS).context("create the Node's mount namespace")?;
    attach(None, "/", MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    new(Path::new("/proc"), "proc", "proc", "")?;
    new(Path::new("/sys"), "sysfs", "sysfs", "")?;
    new(Path::new("/sys/fs/bpf"), "bpf", "bpf", "")?;
    mount_cgroups(&hierarchies)?;
    let directory = &arguments.directory;
    attach(Some(&arguments.binaries), directory.join("run/npl/bin"), MsFlags::MS_BIND)?;
    for (own, machines) in OWN_FOLDERS {
        attach(Some(&directory.join(own)), machines, MsFlags::MS_BIND | MsFlags::MS_REC)?;
    }
    // Not every kernel has all of these sysctls.
    for (name, value) in SYSCTLS.iter().filter(|(name, _)| Path::new("/proc/sys").join(name).exists()) {
        let own = Path::new(TEMPORARY).join(name.replace('/', "."));
        fs::write(&own, value).with_context(|| format!("write {}", own.display()))?;
        attach(Some(&own), Path::new("/proc/sys").join(name), MsFlags::MS_BIND)?;
    }
    // Mounts must propagate, because kubelet and container runtime require shared mount propagation.
    attach(None, "/", MsFlags::MS_REC | MsFlags::MS_SHARED)?;
    fs::write("/proc/sys/kernel/hostname", &arguments.name).context("set the host name")?;
    fs::write(Path::new(SETTINGS).join("ready"), "").context("create the ready file")?;
    reaper::run()
}

/// Mounts the hierarchies as on the host, each with the Node's own group as its root.
fn mount_cgroups(hierarchies: &[Hierarchy]) -> Result<()> {
    let root = Path::new(cgroups::ROOT);
    if hierarchies.iter().all(|it| it.point != root) {
        new(root, "tmpfs", "cgroup", "mode=755")?;
    }
    for Hierarchy { point, version } in hierarchies {
        fs::create_dir_all(point).with_context(|| format!("create {}", point.display()))?;
        match version {
            Version::V2 => new(point, "cgroup2", "cgroup2", "")?,
            Version::V1(controllers) => {
                let options = controllers.join(",");
                let named = options.starts_with("name=");
                new(point, "cgroup", "cgroup", &if named { format!("none,{options}") } else { options })?;
                link_controllers(point, controllers)?;
            }
        }
    }
    Ok(())
}

/// Creates links from the names of controllers to their common mount point, such as `cpu` to `cpu,cpuacct`, because
/// programs expect these links.
fn link_controllers(point: &Path, controllers: &[String]) -> Result<()> {
    let (Some(folder), Some(name)) = (point.parent(), point.file_name()) else { return Ok(()) };
    for controller in controllers.iter().filter(|it| controllers.len() > 1 && name != it.as_str()) {
        let link = folder.join(controller);
        symlink(name, &link).with_context(|| format!("link {}", link.display()))?;
    }
    Ok(())
}

fn new(point: &Path, kind: &str, source: &str, options: &str) -> Result<()> {
    mount(Some(source), point, Some(kind), MsFlags::empty(), Some(options))
        .with_context(|| format!("mount {kind} with options '{options}' at {}", point.display()))
}

fn attach(source: Option<&Path>, point: impl AsRef<Path>, flags: MsFlags) -> Result<()> {
    let point = point.as_ref();
    mount(source, point, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("mount {} at {} with {flags:?}", source.unwrap_or(point).display(), point.display()))
}

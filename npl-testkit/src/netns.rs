// SPDX-License-Identifier: Apache-2.0
//! Named network namespaces.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

use crate::{process, tools};

/// Where `ip netns` keeps names.
pub const DIRECTORY: &str = "/run/netns";

/// A handle of a named network namespace, which is deleted with its last handle.
#[derive(Clone, Debug)]
pub struct Netns(Arc<Name>);

#[derive(Debug)]
struct Name(String);

impl Netns {
    /// Creates it, with its loopback device up.
    pub(crate) fn create(name: &str) -> Result<Self> {
        tools::output(Command::new("ip").args(["netns", "add", name]))?;
        let netns = Self(Arc::new(Name(name.to_owned())));
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Gives a name to the namespace that a process is in.
    pub(crate) fn of_process(name: &str, pid: u32) -> Result<Self> {
        tools::output(Command::new("ip").args(["netns", "attach", name, &pid.to_string()]))?;
        Ok(Self(Arc::new(Name(name.to_owned()))))
    }

    /// The name, as `ip netns exec` takes it.
    pub fn name(&self) -> &str {
        &self.0.0
    }

    /// Runs `work` inside, on a thread of its own. A socket that it opens stays in this namespace wherever it is used.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let file = self.open()?;
        let inside = move || -> Result<T> {
            setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter namespace {}", self.name()))?;
            Ok(work())
        };
        process::on_own_thread(inside)
    }

    /// Waits inside for a future, on a thread and with a runtime of its own.
    pub fn block_on<T: Send>(&self, future: impl Future<Output = T> + Send) -> Result<T> {
        let waited = self.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map(|runtime| runtime.block_on(future))
        });
        waited?.context("start a runtime")
    }

    /// A command that will run inside.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        command_in(self.name(), program)
    }

    /// Runs lines of `ip` inside, without the word `ip`, as one batch.
    pub fn ip(&self, lines: &str) -> Result<String> {
        tools::output_with_input(Command::new("ip").args(["-n", self.name(), "-batch", "-"]), &format!("{lines}\n"))
    }

    /// Runs a line of `tc` inside, without the word `tc`.
    pub fn tc(&self, line: &str) -> Result<String> {
        tools::output(self.command("tc")?.args(line.split(' ')))
    }

    /// Runs lines of `nft` inside, without the word `nft`, as one file; all of them hold, or none.
    pub fn nft(&self, rules: &str) -> Result<String> {
        tools::output_with_input(self.command("nft")?.args(["--file", "-"]), rules)
    }

    /// A table of `nft` as it lists it, if it is there; protocols by their numbers, for which not every machine has names.
    pub fn nft_table(&self, name: &str) -> Option<String> {
        let mut list = self.command("nft").ok()?;
        tools::output(list.args(["--numeric-protocol", "list", "table"]).args(name.split(' '))).ok()
    }

    /// Packets that a counter of `nft` has seen, by its family, table and name.
    pub fn packets_counted(&self, counter: &str) -> Result<u64> {
        let text = self.nft(&format!("list counter {counter}"))?;
        let number = text.split_once("packets ").and_then(|(_, after)| after.split_whitespace().next()?.parse().ok());
        number.with_context(|| format!("find packets in `{text}`"))
    }

    /// Sets a sysctl inside, by its path below `/proc/sys`.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        let file = Path::new("/proc/sys").join(path);
        self.run(|| fs::write(&file, value))?.with_context(|| format!("set {path} to {value} in {}", self.name()))
    }

    /// Has connection tracking accept packets of TCP that are out of the window which it has seen, or not. Where it is a
    /// module it has no settings before a rule asks for it.
    pub fn set_liberal_tracking(&self, is_liberal: bool) -> Result<()> {
        self.nft("table inet npl_tracking {\n chain nothing {\n ct state invalid\n }\n}")?;
        self.sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", if is_liberal { "1" } else { "0" })
    }

    /// Has connection tracking forget every connection, also for the sake of its room, which all namespaces share.
    pub fn forget_connections(&self) -> Result<()> {
        tools::output(self.command("conntrack")?.arg("--flush")).map(drop)
    }

    /// A counter of the namespace's network stack: of `Tcp` or `Udp`, whose IPv6 half counts as `Udp6`, or of `TcpExt`.
    pub fn counter(&self, protocol: &str, name: &str) -> Result<u64> {
        let is_v6 = protocol.ends_with('6');
        let path = match protocol {
            _ if is_v6 => "/proc/thread-self/net/snmp6",
            "TcpExt" => "/proc/thread-self/net/netstat",
            _ => "/proc/thread-self/net/snmp",
        };
        let text = self.run(|| fs::read_to_string(path))?.with_context(|| format!("read {path}"))?;
        let value = if is_v6 { value_in_lines(&text, protocol, name) } else { value_in_table(&text, protocol, name) };
        let value = value.with_context(|| format!("no {name} of {protocol} in {path}"))?;
        value.parse().with_context(|| format!("read the number `{value}`"))
    }

    /// Deletes it now; its devices go with it as soon as no process and no socket is left inside.
    pub fn delete(&self) -> Result<()> {
        delete(self.name())
    }

    /// The file that stands for it.
    pub fn path(&self) -> PathBuf {
        Path::new(DIRECTORY).join(self.name())
    }

    fn open(&self) -> Result<File> {
        open(self.name())
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if let Err(err) = delete(&self.0) {
            process::report(&format!("{err:#}"));
        }
    }
}

/// A command that will run in a namespace that somebody else owns.
#[expect(unsafe_code, reason = "pre_exec is the only place between fork and exec")]
pub fn command_in(name: &str, program: impl AsRef<OsStr>) -> Result<Command> {
    let file = open(name)?;
    let mut command = Command::new(program);
    let enter = move || setns(&file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
    // SAFETY: the hook makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(enter);
    }
    Ok(command)
}

fn open(name: &str) -> Result<File> {
    File::open(Path::new(DIRECTORY).join(name)).with_context(|| format!("open namespace {name}"))
}

/// The value in a line of names and, below it, one of values.
fn value_in_table<'t>(text: &'t str, protocol: &str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
    let (names, values) = (lines.next()?, lines.next()?);
    names.split(' ').zip(values.split(' ')).find(|(field, _)| *field == name).map(|(_, value)| value)
}

/// The value behind its name, in a line of its own.
fn value_in_lines<'t>(text: &'t str, protocol: &str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(protocol)?.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
}

/// Deletes a namespace by name; one that does not exist is no error.
pub(crate) fn delete(name: &str) -> Result<()> {
    if Path::new(DIRECTORY).join(name).exists() {
        tools::output(Command::new("ip").args(["netns", "del", name]))?;
    }
    Ok(())
}

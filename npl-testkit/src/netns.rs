// SPDX-License-Identifier: Apache-2.0
//! Named network namespaces.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

use crate::{process, tools};

/// The directory in which `ip netns` keeps the files of named network namespaces.
pub const DIRECTORY: &str = "/run/netns";

/// A handle of a named network namespace. Dropping the last handle deletes the name, as [`Netns::delete`] does.
#[derive(Clone, Debug)]
pub struct Netns(Arc<Name>);

#[derive(Debug)]
struct Name(String);

impl Netns {
    /// Creates a namespace with its loopback device up.
    pub(crate) fn create(name: &str) -> Result<Self> {
        tools::output(Command::new("ip").args(["netns", "add", name]))?;
        let netns = Self(Arc::new(Name(name.to_owned())));
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Gives a name to the network namespace of a process.
    pub(crate) fn of_process(name: &str, pid: u32) -> Result<Self> {
        tools::output(Command::new("ip").args(["netns", "attach", name, &pid.to_string()]))?;
        Ok(Self(Arc::new(Name(name.to_owned()))))
    }

    /// The name, as accepted by `ip netns exec`.
    pub fn name(&self) -> &str {
        &self.0.0
    }

    /// Runs `work` on a new thread in this namespace. Sockets that `work` opens stay in the namespace even when other
    /// threads use them.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let file = self.open()?;
        let inside = move || -> Result<T> {
            setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter namespace {}", self.name()))?;
            Ok(work())
        };
        process::on_own_thread(inside)
    }

    /// Returns a loopback address with a free TCP port.
    pub fn free_address(&self) -> Result<SocketAddr> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        self.run(bind)?.with_context(|| format!("find a free port in {}", self.name()))
    }

    /// Runs a future in this namespace, on a new thread with its own runtime.
    pub fn block_on<T: Send>(&self, future: impl Future<Output = T> + Send) -> Result<T> {
        let waited = self.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map(|runtime| runtime.block_on(future))
        });
        waited?.context("start a runtime")
    }

    /// Returns a command that runs in this namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        command_in(self.name(), program)
    }

    /// Runs `ip` commands in this namespace as one batch. `lines` has one command per line, without the word `ip`.
    pub fn ip(&self, lines: &str) -> Result<String> {
        tools::output_with_input(Command::new("ip").args(["-n", self.name(), "-batch", "-"]), &format!("{lines}\n"))
    }

    /// Runs `tc` in this namespace, with the words of `line` as arguments. Returns the output.
    pub fn tc(&self, line: &str) -> Result<String> {
        tools::output(self.command("tc")?.args(line.split(' ')))
    }

    /// Loads an `nft` ruleset in this namespace as one transaction.
    pub fn nft(&self, rules: &str) -> Result<String> {
        tools::output_with_input(self.command("nft")?.args(["--file", "-"]), rules)
    }

    /// Lists a table with `nft`. Returns `None` if `nft` fails, for example because the table does not exist. `nft`
    /// prints protocols as numbers, because some machines lack the file with the names of protocols.
    pub fn nft_table(&self, name: &str) -> Option<String> {
        let mut list = self.command("nft").ok()?;
        tools::output(list.args(["--numeric-protocol", "list", "table"]).args(name.split(' '))).ok()
    }

    /// Returns the number of packets that an `nft` counter has counted. The counter is given as family, table and name.
    pub fn packets_counted(&self, counter: &str) -> Result<u64> {
        let text = self.nft(&format!("list counter {counter}"))?;
        let number = text.split_once("packets ").and_then(|(_, after)| after.split_whitespace().next()?.parse().ok());
        number.with_context(|| format!("parse the packet count in `{text}`"))
    }

    /// Sets a sysctl in this namespace, given as its path below `/proc/sys`.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        let file = Path::new("/proc/sys").join(path);
        self.run(|| fs::write(&file, value))?.with_context(|| format!("set {path} to {value} in {}", self.name()))
    }

    /// Sets `nf_conntrack_tcp_be_liberal`: whether kernel conntrack accepts out-of-window TCP packets. If conntrack is
    /// a module, the sysctl exists only after the first rule that uses conntrack.
    pub fn set_liberal_tracking(&self, is_liberal: bool) -> Result<()> {
        self.nft("table inet npl_tracking {\n chain nothing {\n ct state invalid\n }\n}")?;
        self.sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", if is_liberal { "1" } else { "0" })
    }

    /// Makes kernel conntrack track all packets, and count the packets and bytes of each new connection.
    pub fn count_connections(&self) -> Result<()> {
        self.nft(
            "table inet npl_tracking {\n chain tracked {\n type filter hook forward priority filter; ct state new\n }\n}",
        )?;
        self.sysctl("net/netfilter/nf_conntrack_acct", "1")
    }

    /// Removes all kernel conntrack entries of the namespace, so that these entries neither affect later packets nor
    /// count toward the limit on the number of entries.
    pub fn forget_connections(&self) -> Result<()> {
        tools::output(self.command("conntrack")?.arg("--flush")).map(drop)
    }

    /// Reads a counter of the namespace's network stack. `protocol` is `Tcp`, `Udp`, `Udp6` (UDP over IPv6) or
    /// `TcpExt`.
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

    /// Returns the TCP connections of the namespace that can still send a FIN, a RST or data, as lines of
    /// `/proc/net/tcp` and `/proc/net/tcp6`: sockets that neither listen nor are in the state `TIME_WAIT`.
    pub fn live_connections(&self) -> Result<Vec<String>> {
        let read = || ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")));
        let mut live = Vec::new();
        for table in self.run(read)? {
            let table = table.context("read the table of TCP sockets")?;
            live.extend(table.lines().skip(1).filter(|line| is_live(line)).map(str::to_owned));
        }
        Ok(live)
    }

    /// Deletes the name. The kernel removes the namespace and its devices as soon as no process and no socket uses the
    /// namespace.
    pub fn delete(&self) -> Result<()> {
        delete(self.name())
    }

    /// The path of the namespace's file.
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

/// Returns a command that runs in the namespace with this name, which another process may have created.
#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
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

/// Whether a line of `/proc/net/tcp` is a connection whose socket can still send a FIN, a RST or data.
fn is_live(line: &str) -> bool {
    const TIME_WAIT: &str = "06";
    const LISTEN: &str = "0A";
    let state = line.split_whitespace().nth(3);
    state.is_some_and(|state| state != TIME_WAIT && state != LISTEN)
}

/// Finds a value in a table of two lines: names, then values.
fn value_in_table<'t>(text: &'t str, protocol: &str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
    let (names, values) = (lines.next()?, lines.next()?);
    names.split(' ').zip(values.split(' ')).find(|(field, _)| *field == name).map(|(_, value)| value)
}

/// Finds a value in a list with one name and value per line.
fn value_in_lines<'t>(text: &'t str, protocol: &str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(protocol)?.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
}

/// Deletes a namespace by name. An absent namespace is no error.
pub(crate) fn delete(name: &str) -> Result<()> {
    if Path::new(DIRECTORY).join(name).exists() {
        tools::output(Command::new("ip").args(["netns", "del", name]))?;
    }
    Ok(())
}

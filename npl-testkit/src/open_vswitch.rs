// SPDX-License-Identifier: Apache-2.0
//! Open vSwitch with its userspace datapath, in place of an OVS-based CNI. The userspace datapath needs no kernel module,
//! and its ports are TAP devices and packet sockets of one network namespace.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::netns::Netns;
use crate::process::Process;
use crate::run::Run;
use crate::topology::{Device, Offload};
use crate::{poll, tools};

/// The environment variable with the directory of the programs of Open vSwitch.
const PROGRAMS_VARIABLE: &str = "NPL_OPEN_VSWITCH_DIR";

/// The time limit for the database to accept connections, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

/// Open vSwitch in one network namespace. All its files are in the run's directory, so the instance is independent of an
/// Open vSwitch that the machine runs.
#[derive(Debug)]
pub struct OpenVswitch {
    netns: Netns,
    programs: PathBuf,
    directory: PathBuf,
    _daemon: Process,
    _database: Process,
}

impl OpenVswitch {
    /// Starts the database and the daemon, without bridges.
    ///
    /// # Errors
    ///
    /// Returns an error if the environment variable `NPL_OPEN_VSWITCH_DIR` is unset, or if a program fails.
    pub fn start(run: &Run, netns: &Netns) -> Result<Self> {
        let programs = env::var_os(PROGRAMS_VARIABLE).map(PathBuf::from);
        let programs = programs.with_context(|| format!("{PROGRAMS_VARIABLE} is unset: run `cargo xtask test`"))?;
        let directory = run.file("open-vswitch");
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let file = |name: &str| directory.join(name).display().to_string();
        let (data, socket) = (file("conf.db"), file("db.sock"));
        let schema = programs.join("vswitch.ovsschema");
        tools::output(Command::new(programs.join("ovsdb-tool")).args(["create", &data]).arg(schema))?;
        let start = |name: &str, arguments: &[&str], control: &str| {
            let mut command = netns.command(programs.join(name))?;
            command.args(arguments).arg(format!("--unixctl={}", file(control))).env("OVS_RUNDIR", &directory);
            Process::spawn(name, command, &directory.join(format!("{name}.log")))
        };
        let database = start("ovsdb-server", &[&data, &format!("--remote=punix:{socket}")], "db.ctl")?;
        let is_there = || directory.join("db.sock").exists().then_some(());
        poll::until("the database of Open vSwitch", LIMIT, is_there).with_context(|| database.log_tail(20))?;
        let daemon = start("ovs-vswitchd", &[&format!("unix:{socket}")], "vswitchd.ctl")?;
        let switch = Self { netns: netns.clone(), programs, directory, _daemon: daemon, _database: database };
        switch.configure("--no-wait init")?;
        Ok(switch)
    }

    /// Adds a bridge. The bridge has a port with its own name, which is a device of the Node and is down.
    pub fn add_bridge(&self, bridge: &str) -> Result<()> {
        self.configure(&format!("add-br {bridge} -- set bridge {bridge} datapath_type=netdev"))
    }

    /// Adds a port that is a new device of the Node, as the gateway device of a CNI.
    pub fn add_internal_port(&self, bridge: &str, port: &str) -> Result<()> {
        self.configure(&format!("add-port {bridge} {port} -- set interface {port} type=internal"))
    }

    /// Connects two bridges.
    pub fn connect(&self, [first, second]: [&str; 2]) -> Result<()> {
        let port = |own: &str, other: &str| {
            let (port, peer) = (format!("patch-{own}"), format!("patch-{other}"));
            format!("add-port {own} {port} -- set interface {port} type=patch options:peer={peer}")
        };
        self.configure(&format!("{} -- {}", port(first, second), port(second, first)))
    }

    /// Adds a device of the Node as a port. `peer` is the other end of the device's veth pair.
    ///
    /// As the userspace datapath receives copies of the device's packets, a rule drops the packets that the host's stack
    /// also receives. With the kernel's datapath, the host's stack receives no packets of a port. `peer` completes
    /// checksums and segments packets itself, because the userspace datapath does not.
    pub fn add_port(&self, bridge: &str, device: &Device, peer: &Device) -> Result<()> {
        let name = device.name();
        self.netns.nft(&format!(
            "table netdev npl_test_{name} {{\n chain ingress {{\n type filter hook ingress device {name} priority 0; \
             policy drop;\n }}\n}}"
        ))?;
        peer.set_offloads(&[Offload::TxChecksum, Offload::Tso, Offload::Gso], false)?;
        self.configure(&format!("add-port {bridge} {name}"))
    }

    /// Adds an `OpenFlow` rule to a bridge. By default, a bridge has one rule of priority 0, which switches packets by MAC
    /// address.
    pub fn add_flow(&self, bridge: &str, flow: &str) -> Result<()> {
        self.flows("add-flow", bridge, &[flow]).map(drop)
    }

    /// Removes the `OpenFlow` rules that match `flow`.
    pub fn remove_flows(&self, bridge: &str, flow: &str) -> Result<()> {
        self.flows("del-flows", bridge, &[flow]).map(drop)
    }

    /// Returns the number of packets that matched the `OpenFlow` rules that match `flow`.
    pub fn packets_matched(&self, bridge: &str, flow: &str) -> Result<u64> {
        let text = self.flows("dump-aggregate", bridge, &[flow])?;
        let number =
            text.split_once("packet_count=").and_then(|(_, after)| after.split_whitespace().next()?.parse().ok());
        number.with_context(|| format!("parse the packet count in `{text}`"))
    }

    /// Returns the port numbers of a device, for `OpenFlow` rules.
    pub fn port_number(&self, port: &str) -> Result<u32> {
        let text = tools::output(&mut self.vsctl(&format!("get interface {port} ofport")))?;
        text.trim().parse().with_context(|| format!("parse the port number `{text}`"))
    }

    /// Runs `ovs-vsctl`, which waits until the daemon has applied the change.
    fn configure(&self, line: &str) -> Result<()> {
        tools::output(&mut self.vsctl(line)).map(drop)
    }

    fn vsctl(&self, line: &str) -> Command {
        let mut command = Command::new(self.programs.join("ovs-vsctl"));
        let limit = (LIMIT * poll::patience()).as_secs();
        command.arg(format!("--db=unix:{}", self.directory.join("db.sock").display()));
        command.arg(format!("--timeout={limit}")).args(line.split(' '));
        command
    }

    fn flows(&self, action: &str, bridge: &str, arguments: &[&str]) -> Result<String> {
        let management = format!("unix:{}", self.directory.join(format!("{bridge}.mgmt")).display());
        let mut command = Command::new(self.programs.join("ovs-ofctl"));
        tools::output(command.args([action, &management]).args(arguments))
    }
}

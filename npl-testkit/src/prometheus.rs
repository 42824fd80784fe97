// SPDX-License-Identifier: Apache-2.0
//! Debian's Prometheus, which scrapes agents in a test network, and `promtool`, which checks alert rules.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::netns::Netns;
use crate::process::Process;
use crate::run::Run;
use crate::{http, poll};

/// The time limit of a start, which takes less than a second on an idle machine.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// Returns a command that runs `promtool`.
///
/// # Errors
/// Returns an error if `NPL_PROMETHEUS_DIR`, which `cargo xtask test` sets, is unset.
pub fn promtool() -> Result<Command> {
    program("promtool")
}

/// Returns a command that runs `prometheus`.
///
/// # Errors
/// Returns an error if `NPL_PROMETHEUS_DIR`, which `cargo xtask test` sets, is unset.
pub fn server() -> Result<Command> {
    program("prometheus")
}

fn program(name: &str) -> Result<Command> {
    let folder = env::var_os("NPL_PROMETHEUS_DIR")
        .context("NPL_PROMETHEUS_DIR is unset: run the tests by `cargo xtask test`, which downloads Prometheus")?;
    Ok(Command::new(PathBuf::from(folder).join(name)))
}

/// A running Prometheus, which is killed when this value is dropped.
#[derive(Debug)]
pub struct Prometheus {
    netns: Netns,
    listen: SocketAddr,
    process: Process,
}

impl Prometheus {
    /// Starts Prometheus in a network namespace. Prometheus scrapes `target` every second as the job `npl-agent`, with
    /// its default `Accept` header.
    ///
    /// # Errors
    /// Returns an error if Prometheus does not become ready.
    pub fn start(run: &Run, netns: &Netns, target: SocketAddr) -> Result<Self> {
        let listen = netns.free_address()?;
        let configuration = run.file("prometheus.yaml");
        let text = format!(
            "global: {{scrape_interval: 1s}}\nscrape_configs:\n  - job_name: npl-agent\n    static_configs:\n      - targets: \
             ['{target}']\n"
        );
        fs::write(&configuration, text).context("write the configuration of Prometheus")?;
        let mut command = netns.command(server()?.get_program())?;
        command.arg(format!("--config.file={}", configuration.display()));
        command.arg(format!("--storage.tsdb.path={}", run.file("prometheus").display()));
        command.arg(format!("--web.listen-address={listen}"));
        let process = Process::spawn("prometheus", command, &run.file("prometheus.log"))?;
        let prometheus = Self { netns: netns.clone(), listen, process };
        let is_ready = || matches!(http::get(netns, listen, "/-/ready"), Ok((200, _))).then_some(());
        poll::until("the readiness of Prometheus", READY_LIMIT, is_ready)
            .with_context(|| prometheus.process.log_tail(15))?;
        Ok(prometheus)
    }

    /// Returns the samples of an instant query.
    ///
    /// # Errors
    /// Returns an error if Prometheus refuses the query.
    pub fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let mut encoded = String::new();
        for byte in expression.bytes() {
            if byte.is_ascii_alphanumeric() {
                encoded.push(byte.into());
            } else {
                write!(encoded, "%{byte:02X}")?;
            }
        }
        let (status, body) = http::get(&self.netns, self.listen, &format!("/api/v1/query?query={encoded}"))?;
        if status != 200 {
            bail!("Prometheus answered {status} to `{expression}`: {body}");
        }
        let mut answer: Value = serde_json::from_str(&body).with_context(|| format!("parse the response `{body}`"))?;
        let samples = answer["data"]["result"].take();
        samples
            .as_array()
            .cloned()
            .with_context(|| format!("the response to `{expression}` has no list of samples: {body}"))
    }
}

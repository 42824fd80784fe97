// SPDX-License-Identifier: Apache-2.0
//! The echo server alone: `npl-echo [--name NAME] [--node NODE] [--port PORT]… [--drain SECONDS]`, for containers and
//! other machines.

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use npl_testkit::echo::EchoServer;
use npl_testkit::interrupt;

const USAGE: &str = "npl-echo [--name NAME] [--node NODE] [--port PORT]... [--drain SECONDS]: answers over TCP, UDP and \
     HTTP with its name, its Node and the client's address, and goes on for the drain when it is told to end";

/// Served when no port is given.
const DEFAULT_PORT: u16 = 8080;

fn main() -> ExitCode {
    match run(env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            report(&format!("npl-echo: {err:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    // Before any thread is started. The first process of a container gets no signal that it does not ask for.
    interrupt::watch()?;
    // A container's host name is its Pod's name.
    let mut name = env::var("HOSTNAME").unwrap_or_else(|_unset| "npl-echo".to_owned());
    let mut node = None;
    let mut ports = Vec::new();
    let mut drain = Duration::ZERO;
    while let Some(flag) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{flag} needs a value; usage: {USAGE}"))?;
        match flag.as_str() {
            "--name" => name = value,
            "--node" => node = Some(value),
            "--port" => ports.push(value.parse().with_context(|| format!("{value} is not a port"))?),
            "--drain" => {
                drain = value.parse().map(Duration::from_secs).with_context(|| format!("{value} are no seconds"))?;
            }
            _unknown => bail!("{flag} is not known; usage: {USAGE}"),
        }
    }
    if ports.is_empty() {
        ports.push(DEFAULT_PORT);
    }
    let _server = EchoServer::start_on(&name, node.as_deref(), &ports)?;
    report(&format!("{name} answers on ports {ports:?}"));
    interrupt::wait();
    // Whoever sends requests comes to know later than this process that it ends.
    interrupt::wait_at_most(drain);
    Ok(())
}

#[expect(clippy::print_stderr, reason = "the log of a container")]
fn report(message: &str) {
    eprintln!("{message}");
}

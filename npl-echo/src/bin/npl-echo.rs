// SPDX-License-Identifier: Apache-2.0
//! The echo server as a program, for containers and other machines: `npl-echo [--name NAME] [--node NODE] [--port
//! PORT]… [--drain SECONDS]`.

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use npl_echo::{EchoServer, interrupt};

const USAGE: &str = "npl-echo [--name NAME] [--node NODE] [--port PORT]... [--drain SECONDS]: answers requests over TCP, \
     UDP and HTTP with its name, its Node and the client's address; after SIGTERM, serves for the drain period";

/// The port if none is given.
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
    // Signal handling must be set up before any thread starts. In a container, signal handling is required, because the
    // kernel discards signals that PID 1 does not handle.
    interrupt::watch()?;
    // In a container, `HOSTNAME` is the name of the Pod.
    let mut name = env::var("HOSTNAME").unwrap_or_else(|_unset| "npl-echo".to_owned());
    let mut node = None;
    let mut ports = Vec::new();
    let mut drain = Duration::ZERO;
    while let Some(flag) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{flag} needs a value; usage: {USAGE}"))?;
        match flag.as_str() {
            "--name" => name = value,
            "--node" => node = Some(value),
            "--port" => ports.push(value.parse().with_context(|| format!("{value} is not a port number"))?),
            "--drain" => {
                drain = value
                    .parse()
                    .map(Duration::from_secs)
                    .with_context(|| format!("{value} is not a number of seconds"))?;
            }
            _unknown => bail!("unknown flag {flag}; usage: {USAGE}"),
        }
    }
    if ports.is_empty() {
        ports.push(DEFAULT_PORT);
    }
    let _server = EchoServer::start_on(&name, node.as_deref(), &ports)?;
    report(&format!("{name} listens on ports {ports:?}"));
    interrupt::wait();
    // The server keeps answering, because clients send requests until they notice that the Pod terminates.
    interrupt::wait_at_most(drain);
    Ok(())
}

#[expect(clippy::print_stderr, reason = "the log of a container")]
fn report(message: &str) {
    eprintln!("{message}");
}

// SPDX-License-Identifier: Apache-2.0
//! `npl-feed`: parses the command line, starts logging and calls the library.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::Parser as _;
use npl_agent::{
    config::ConfigError,
    core::pages,
    process::{
        limits, memory,
        telemetry::{self, FILTER_VARIABLE},
    },
};
use npl_feed::{config::Config, connection_limits::ConnectionLimits, run};

/// The exit code after a usage error; clap uses the same exit code.
const USAGE: u8 = 2;

/// systemd's default soft limit of open files, which containers inherit unless the unit of the container runtime sets
/// another limit. The feed assumes this value if the limit cannot be read or raised.
const SOFT_LIMIT: u64 = 1024;

/// The default log filter. The crate `kube_client` logs every failed request. The filter hides these log lines, because
/// the watches already log failed requests.
const FILTER: &str = "warn,npl_feed=info,npl_agent=info,kube_client=off";

fn report(error: &anyhow::Error) {
    // The result is ignored, because a failed write to standard error cannot be reported.
    drop(writeln!(io::stderr(), "npl-feed: {error:#}"));
}

/// Raises the soft limit of open files, and computes the maximum numbers of connections from the new limit. Logs a
/// warning if these numbers are below [`ConnectionLimits::LARGEST`].
fn connection_limits() -> ConnectionLimits {
    let open_files = limits::raise_soft_limit().unwrap_or_else(|error| {
        tracing::warn!(see = pages::url(pages::FEED_FAILURES), %error, "the soft limit of open files cannot be raised; the feed assumes {SOFT_LIMIT}");
        SOFT_LIMIT
    });
    let connections = ConnectionLimits::for_open_files(open_files);
    if connections != ConnectionLimits::LARGEST {
        tracing::warn!(
            see = pages::url(pages::FEED_FAILURES),
            open_files,
            http = connections.http,
            xds = connections.xds,
            dns = connections.dns,
            probes = connections.probes,
            "the limit of open files reduces the number of connections: raise LimitNOFILE of the container runtime to at least {}",
            ConnectionLimits::OPEN_FILES
        );
    }
    connections
}

fn main() -> ExitCode {
    let config = match Config::try_parse() {
        Ok(config) => config,
        Err(error) => match ConfigError::from_clap(&error) {
            Some(refused) => {
                report(&refused.into());
                return ExitCode::from(USAGE);
            }
            None => error.exit(),
        },
    };
    let filter = std::env::var(FILTER_VARIABLE).ok();
    if let Err(error) = telemetry::init_with_default(config.log_format, filter.as_deref(), FILTER) {
        report(&error.into());
        return ExitCode::from(USAGE);
    }
    memory::use_one_heap();
    let connections = connection_limits();
    let format = config.log_format;
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let outcome = runtime.block_on(run::run(config, connections));
            runtime.shutdown_background();
            outcome
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !telemetry::log_fatal(format, &error) {
                report(&error);
            }
            ExitCode::FAILURE
        }
    }
}

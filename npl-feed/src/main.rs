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
use npl_feed::{config::Config, run};

/// The exit code after a usage error; clap uses the same exit code.
const USAGE: u8 = 2;

/// The default log filter. The filter hides log lines of two libraries: hickory would log a warning for each packet
/// from an address that it cannot answer, and kube would log every failed request, although the watches log failed
/// requests already.
const FILTER: &str = "warn,npl_feed=info,npl_agent=info,kube_client=off,hickory_server=error";

fn report(error: &anyhow::Error) {
    // The result is ignored, because a failed write to standard error cannot be reported.
    drop(writeln!(io::stderr(), "npl-feed: {error:#}"));
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
    if let Err(error) = limits::raise_soft_limit() {
        tracing::warn!(see = pages::url(pages::FEED_FAILURES), %error, "the soft limit of open files cannot be raised; when it is reached, the feed refuses connections");
    }
    let format = config.log_format;
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let outcome = runtime.block_on(run::run(config));
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

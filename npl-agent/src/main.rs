// SPDX-License-Identifier: Apache-2.0
//! `npl-agent`: parses the command line, starts the log, and runs the command.

use std::process::ExitCode;

use clap::Parser as _;
use npl_agent::{
    agent::run,
    cli,
    config::{
        Config,
        args::{Cli, Command},
    },
    process::{memory, telemetry},
};

/// clap's exit code for a usage error.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    match dispatch(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            cli::complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    memory::share_one_heap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let outcome = match cli.command {
        Command::Run(args) => {
            let filter = std::env::var(telemetry::FILTER_VARIABLE).ok();
            if let Err(error) = telemetry::init(args.log_format, filter.as_deref()) {
                cli::complain(&error.into());
                return Ok(ExitCode::from(USAGE));
            }
            match Config::try_from(*args) {
                Ok(config) => runtime.block_on(run::run(config)).map(|()| ExitCode::SUCCESS),
                Err(error) => {
                    cli::complain(&error.into());
                    Ok(ExitCode::from(USAGE))
                }
            }
        }
        Command::Status(args) => runtime.block_on(cli::status::show(&args)).map(|()| ExitCode::SUCCESS),
        Command::Mappings(args) => cli::mappings::show(&args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => runtime.block_on(cli::doctor::show(&args)),
        Command::Load(args) => cli::load::load(&args).map(|()| ExitCode::SUCCESS),
        Command::Cleanup(args) => runtime.block_on(cli::cleanup::remove(&args)).map(|()| ExitCode::SUCCESS),
    };
    // Blocking tasks that still wait for the kernel only read.
    runtime.shutdown_background();
    outcome
}
